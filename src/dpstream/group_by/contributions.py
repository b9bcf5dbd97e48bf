"""What each unit adds to a group as a whole: clamped sums, and distinct values.

Bounding lets a unit into its groups; from then on every row that it has there counts here, however
many there are, and what they make together is bounded. What a row adds is written in place of its
value, so that later stages only add: of clamped sums the difference that it makes, of distinct
values the id of a value that the unit brings for the first time.

What a unit adds depends on its own rows alone, never on what others have. What it has added stays:
only more can come. Proof: `docs/soundness/per_unit.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.compiled import compiled
from dpstream.group_by.bounding import FIRST, INSIDE, KeepMask, UnitBucket
from dpstream.group_by.hash_tables import HashTable, find_known
from dpstream.query.aggregates import NULL_STEPS, Measure
from dpstream.query.query import Query
from dpstream.records import Integers, Words

_LARGEST = 1 << 60  # what a sum of values that are not clamped is held within
_OF_UNIT = ("parts", "sum", "mean")


def contribution_table(query: Query) -> HashTable:
    """Units in groups of one window: two numbers for each clamped sum, one for distinct values."""
    kinds = [measure.kind for measure in query.unit_measures]
    return HashTable(2 * kinds.count("clamped") + kinds.count("distinct"))


def distinct_tables(query: Query) -> list[HashTable]:
    """The values that units have brought to groups of one window, for each count of them."""
    return [HashTable() for measure in query.unit_measures if measure.kind == "distinct"]


def add_contributions(
    query: Query,
    bucket: UnitBucket,
    window: int,
    units: Words,
    groups: Words,
    places: Integers,
    keep_mask: KeepMask,
    values: Integers,
) -> None:
    """Write what the rows at `places` add in place of their `values`, and mark those that count.

    The rows are a step's of one bucket of units, all of one window.
    """
    pairs = np.ascontiguousarray(units[places] ^ groups[places][:, ::-1])  # as bounding has them
    known = bucket.contributions.setdefault(window, contribution_table(query))
    known.rows(pairs[keep_mask[places] & FIRST > 0])
    rows: Integers = np.empty(len(places), np.int64)
    find_known(known.words, known.index, pairs, rows)
    inside = rows >= 0
    rows, places, pairs = rows[inside], places[inside], pairs[inside]
    keep_mask[places] |= INSIDE
    known.touched[rows] = 1
    seen = bucket.values.setdefault(window, distinct_tables(query))
    at, number = 0, 0
    for measure in query.unit_measures:
        column = query.value_columns[measure]
        if measure.kind == "clamped":
            first, limits = keep_mask[places] & FIRST, _limits(measure)
            state = known.numbers[:, at : at + 2]
            _add_clamped(rows, places, first, state, values[:, column], limits)
            at += 2
        else:
            of_value = values[:, column : column + 2]
            counts = known.numbers[:, at]
            _bring_values(rows, places, pairs, units, seen[number], counts, of_value, measure)
            at, number = at + 1, number + 1
    if not known.used:
        del bucket.contributions[window], bucket.values[window]  # nobody has got into it


def weigh_keys(
    query: Query,
    bucket: UnitBucket,
    period: int,
    units: Words,
    groups: Words,
    places: Integers,
    keep_mask: KeepMask,
    values: Integers,
) -> None:
    """Write for the first row of each unit in a group what the group counts of it.

    The rows are a step's of one bucket of units, of one window and period, and bounding has just
    let them in. A weight stays as it is: what comes later gets the next ones. Of groups that come
    at one step hashes decide which are counted first.
    """
    weights = query.key_weights
    first = places[keep_mask[places] & FIRST > 0]
    if weights is None or not len(first):
        return
    column = query.value_columns[weights.measure]
    table = bucket.periods[period]
    rows: Integers = np.empty(len(first), np.int64)
    find_known(table.words, table.index, np.ascontiguousarray(units[first]), rows)
    pairs = units[first] ^ groups[first][:, ::-1]
    order = np.lexsort((pairs[:, 1], pairs[:, 0], rows))
    first, rows = first[order], rows[order]
    at = np.arange(len(rows))
    begins = np.flatnonzero(np.diff(rows, prepend=-1) != 0)
    counts = np.diff(begins, append=len(rows))
    inside = at - np.repeat(begins, counts)  # places among those of this step
    total = table.numbers[rows, 1]  # groups of the unit by now
    before = total - np.repeat(counts, counts)
    if weights.once:
        values[first, column] = np.where(before > 0, 0, weights.of_number[total - 1])
    else:
        values[first, column] = weights.of_number[before + inside]


def _limits(measure: Measure) -> tuple[int, int, int, int]:
    """(what is clamped, lo, hi, middle) in grid steps."""
    ends = (int(each / measure.quantum) for each in (measure.lo, measure.hi, measure.middle))
    return _OF_UNIT.index(measure.of_unit), *ends  # type: ignore[return-value]


@compiled
def _add_clamped(
    rows: Any, places: Any, first: Any, state: Any, values: Any, limits: tuple[int, int, int, int]
) -> None:
    """values[place] = what the row moves the clamped figure of its unit by.

    The first row of a unit in a group brings what a unit without values counts, too.
    """
    nothing = _figure(0, 0, limits)
    for i in range(len(rows)):
        row, value = rows[i], values[places[i]]
        before = _figure(state[row, 0], state[row, 1], limits)
        moved = nothing if first[i] else 0
        if value != NULL_STEPS:
            if limits[0] == 0:
                state[row, 0] = min(state[row, 0] + max(value, 0), max(limits[2], 0))
                state[row, 1] = min(state[row, 1] + max(-value, 0), max(-limits[1], 0))
            else:
                state[row, 0] = max(min(state[row, 0] + value, _LARGEST), -_LARGEST)
                state[row, 1] += 1
            moved += _figure(state[row, 0], state[row, 1], limits) - before
        values[places[i]] = moved


@compiled
def _figure(one: int, two: int, limits: tuple[int, int, int, int]) -> int:
    """What a unit counts: of its positive and negative parts, or of its sum and number of values.

    A mean is rounded to the grid, half up, and counts from the middle.
    """
    kind, lo, hi, middle = limits
    if kind == 2:
        if two == 0:
            return 0
        return min(max((2 * one + two) // (2 * two), lo), hi) - middle
    if kind == 1:
        return min(max(one, lo), hi)
    if lo >= 0:
        return max(one, lo)
    if hi <= 0:
        return -max(two, -hi)
    return one - two


def _bring_values(
    rows: Integers,
    places: Integers,
    pairs: Words,
    units: Words,
    seen: HashTable,
    counts: Integers,
    values: Integers,
    measure: Measure,
) -> None:
    """Leave of a step's values those that a unit brings to a group now, at most `largest`.

    The first to come stay; of those that come in one step a hash of unit and value decides, so that
    units do not all bring the same. A value that is not brought is 0, as NULL is.
    """
    ids = np.ascontiguousarray(values[places]).view(np.uint64)
    values[places] = 0
    given = np.flatnonzero(ids.any(axis=1))
    brought = np.ascontiguousarray(pairs[given] ^ ids[given])  # ids are pseudo-random: one of three
    found: Integers = np.empty(len(given), np.int64)
    find_known(seen.words, seen.index, brought, found)
    new = given[found < 0]
    if not len(new):
        return
    order = _mixed(units[places[new], 0] ^ ids[new, 0])
    by_unit = np.lexsort((ids[new, 1], order, rows[new]))
    new = new[by_unit]
    same = np.zeros(len(new), bool)  # a value that came before in the same step
    same[1:] = (rows[new][1:] == rows[new][:-1]) & (ids[new][1:] == ids[new][:-1]).all(axis=1)
    new = new[~same]
    at = np.arange(len(new))
    begins = np.maximum.accumulate(np.where(np.diff(rows[new], prepend=-1) != 0, at, 0))
    kept = new[counts[rows[new]] + at - begins < int(measure.largest)]
    seen.rows(np.ascontiguousarray(pairs[kept] ^ ids[kept]))
    np.add.at(counts, rows[kept], 1)
    values[places[kept]] = ids[kept].view(np.int64)


def _mixed(words: Any) -> Any:
    """Words whose order has nothing to do with that of the words given (SplitMix64's last step)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
