"""Bound what each unit contributes: rows in all, groups in all, rows per group.

A unit is a user, or a user within a period. What is kept of a unit's rows depends on its own rows
alone: its rows of a step are taken by window, then in the order of a keyed hash of the row, and a
row is kept if it fits all three bounds. So every replay, and every engine, keeps the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.compiled import compiled
from dpstream.group_by.hash_tables import FAR, SLICE, Flags, HashTable, prefetch, row_bits
from dpstream.query.query import Bounds
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import Rows, RowSlice, rows_at, rows_by_window
from dpstream.rows.row_ids import combine, multiset_digest

KEPT, FIRST, INSIDE = 1, 2, 4
"""A row is kept; it is the first of its unit in its group; its unit is in the group (noted where
all rows of such units count, `contributions.py`)."""
KeepMask = npt.NDArray[np.uint8]
"""By row: 0, KEPT, or KEPT | FIRST; INSIDE where that is noted."""

_ROWS, _GROUPS = 2, 3  # words of a unit: rows and groups kept of it
_EVERY: Flags = np.zeros(0, np.uint8)  # no estimate: every row is taken as it comes
_MOST = 255  # what a cell of the estimate counts up to


def unit_table() -> HashTable:
    """For each unit: rows kept, groups."""
    return HashTable(2)


def pair_table(bounds: Bounds) -> HashTable:
    """Units within groups of one window; rows are counted where there may be several.

    It stays empty where a unit has one row in all.
    """
    return HashTable(1 if bounds.rows_per_group > 1 else 0)


@dataclass(kw_only=True)
class UnitBucket:
    """The units of one hash bucket: a table per period, and their groups by window."""

    bounds: Bounds
    periods: dict[int, HashTable] = field(default_factory=dict)
    windows: dict[int, HashTable] = field(default_factory=dict)
    dropped: dict[int, HashTable] = field(default_factory=dict)
    """Rows dropped of each unit, by period, where they are counted (`bias.py`)."""
    counted_pairs: dict[int, HashTable] = field(default_factory=dict)
    """Units in groups that were counted, kept or dropped, by window, where they count once."""
    contributions: dict[int, HashTable] = field(default_factory=dict)
    """What units have added to groups, by window, where that is bounded (`contributions.py`)."""
    values: dict[int, list[HashTable]] = field(default_factory=dict)
    """The values that units have brought to groups, likewise."""

    def keep(
        self,
        window: int,
        period: int,
        batch: tuple[Words, Words, Words],
        places: Integers,
        keep_mask: KeepMask,
        *,
        by_value: bool,
    ) -> None:
        """Set the flags of the rows at `places` of a batch, all of one window and period.

        The batch: units, groups, and a keyed hash of each row, whose first word is its place in
        the order. `by_value`: rows of one group differ in what they add.
        """
        _, _, hashes = batch
        units = self.periods.setdefault(period, unit_table())
        pairs = self.windows.setdefault(window, pair_table(self.bounds))
        most = rows_of_unit(batch[0], places)
        waiting = self._keep_slices(units, pairs, batch, places, most, keep_mask, by_value=by_value)
        later = places[waiting]
        later = later[np.argsort(hashes[later, 0], kind="stable")]
        self._keep_slices(units, pairs, batch, later, None, keep_mask, by_value=by_value)
        if not pairs.used:
            del self.windows[window]  # nobody has got into it

    def _keep_slices(
        self,
        units: HashTable,
        pairs: HashTable,
        batch: tuple[Words, Words, Words],
        places: Integers,
        most: Flags | None,
        keep_mask: KeepMask,
        *,
        by_value: bool,
    ) -> Integers:
        """Go through rows, a slice at a time; with `most`, some are put off: which."""
        limits = (self.bounds.rows, self.bounds.groups, self.bounds.rows_per_group)
        rows: Integers = np.empty(min(len(places), SLICE), np.int64)
        waiting: Integers = np.empty(len(rows), np.int64)
        put_off: list[Integers] = [np.zeros(0, np.int64)]
        for start in range(0, len(places), SLICE):
            part = places[start : start + SLICE]
            units.find(batch[0], part, rows)
            if self.bounds.rows > 1:
                pairs.reserve(len(part))
            known = _EVERY if most is None else most[start : start + SLICE]
            pair_state = (pairs.words, pairs.index, pairs.touched, pairs.used)
            rows_of = (part, rows, known, batch[0], batch[1], units.words.view(np.int64))
            result = (keep_mask, waiting)
            pairs.used, left = _keep_rows(*rows_of, *pair_state, limits, by_value, *result)
            if left:
                put_off.append(waiting[:left] + start)
        return np.concatenate(put_off)


def rows_of_unit(units: Words, places: Integers) -> Flags:
    """For each place at least the number of rows of its unit among all places (255: that or more).

    Units that share a cell of a small table count as one; that errs on the safe side.
    """
    cells = np.zeros(1 << min(max(len(places) * 4, 256).bit_length(), 22), np.uint8)
    rows: Flags = np.empty(len(places), np.uint8)
    _count_rows(units, places, cells, rows)
    return rows


@compiled
def _count_rows(units: Any, places: Any, cells: Any, rows: Any) -> None:
    mask = np.uint64(len(cells) - 1)
    for place in places:
        cell = units[place, 1] & mask
        if cells[cell] < _MOST:
            cells[cell] += 1
    for i in range(len(places)):
        rows[i] = cells[units[places[i], 1] & mask]


@compiled
def _keep_rows(
    places: Any,
    rows: Any,
    most: Any,
    units: Any,
    groups: Any,
    counters: Any,
    pairs: Any,
    index: Any,
    touched: Any,
    used: int,
    limits: tuple[int, int, int],
    by_value: bool,
    out: Any,
    waiting: Any,
) -> tuple[int, int]:
    """Go through rows in order and keep what fits; returns the pairs in use, and the rows put off.

    Where the estimate `most` leaves it open whether all rows of a unit fit, or where it matters
    which of them are kept, they are put off, all of them or those after some that fit anyway: only
    then does order matter, and they are taken in the order of their hashes.
    """
    mask, bits = np.uint64(len(index) - 1), row_bits(index)
    one, half = np.uint64(1), np.uint64(32)
    slots = np.uint64(index.ctypes.data)
    left = 0
    for ahead in range(len(places) + FAR):
        if ahead < len(places):
            place = places[ahead]
            prefetch(slots + (((units[place, 1] ^ groups[place, 0]) & mask) << np.uint64(2)))
        i = ahead - FAR
        if i < 0:
            continue
        row, place = rows[i], places[i]
        if len(most) and most[i] > 1:
            fits = counters[row, _ROWS] + most[i] <= limits[0]
            fits = fits and counters[row, _GROUPS] + most[i] <= limits[1] and most[i] < _MOST
            if by_value or not fits:
                waiting[left] = i
                left += 1
                continue
        if counters[row, _ROWS] >= limits[0]:
            continue
        if limits[0] == 1:  # the only row of its unit: nobody asks for the pair again
            counters[row, _ROWS], counters[row, _GROUPS] = 1, 1
            out[place] = KEPT | FIRST
            continue
        # Ids are pseudo-random, so an exclusive or with the words swapped is an id of the pair.
        first = units[place, 0] ^ groups[place, 1]
        second = units[place, 1] ^ groups[place, 0]
        tag = (first >> half) >> bits
        slot = second & mask
        while True:
            entry = np.uint64(index[slot])
            if entry == 0:
                if counters[row, _GROUPS] < limits[1]:
                    pairs[used, 0], pairs[used, 1] = first, second
                    if limits[2] > 1:
                        pairs[used, 2] = 1
                    used += 1
                    index[slot] = (tag << bits) | np.uint64(used)
                    counters[row, _GROUPS] += 1
                    counters[row, _ROWS] += 1
                    out[place] = KEPT | FIRST
                break
            if entry >> bits == tag:
                pair = np.int64(entry & mask) - 1
                if pairs[pair, 0] == first and pairs[pair, 1] == second:
                    if limits[2] > 1 and np.int64(pairs[pair, 2]) < limits[2]:
                        pairs[pair, 2] += one
                        touched[pair] = 1
                        counters[row, _ROWS] += 1
                        out[place] = KEPT
                    break
            slot = (slot + one) & mask
    return used, left


FLOOD = 1 << 22
"""Rows of a step that are held as they come; beyond, those that cannot be kept are let go."""


class StepRows(list[RowSlice]):
    """The rows of a step; of a flood, only those of each unit and group that may be kept.

    Of the rows of a unit in a group bounding takes those with the smallest hashes, `most` of them,
    and where it takes one of them not, it takes none that come after it. So the others never count,
    whatever else the step has, and memory goes with units and groups instead of rows. `let_go` is
    their digest, which is part of the step's all the same.
    """

    def __init__(self, most: int) -> None:
        self.let_go = (0, 0)
        self._most, self._held, self._enough = most, 0, FLOOD

    def add(self, slices: Sequence[RowSlice]) -> None:
        """Take more of the step's rows."""
        if isinstance(slices, StepRows):
            self.let_go = combine(self.let_go, slices.let_go)
        self += slices
        self._held += sum(end - first for _, first, end in slices)
        if self._held > self._enough:
            parts = [rows for _, _, rows in rows_by_window(self)]
            self.clear()
            self._held = 0
            while parts:
                self._thin(parts.pop())
            self._enough = max(FLOOD, 2 * self._held)

    def digest(self) -> tuple[int, int]:
        """The digest of all its rows."""
        held = (multiset_digest(rows.digests[first:end]) for rows, first, end in self)
        return reduce(combine, held, self.let_go)

    def _thin(self, rows: Rows) -> None:
        """Hold what may be kept of the rows of one window and period."""
        pairs = HashTable().rows(rows.units ^ rows.groups[:, ::-1])  # as in `_keep_rows`
        many = np.flatnonzero(np.bincount(pairs)[pairs] > self._most)
        many = many[np.lexsort((rows.digests[many, 0], pairs[many]))]
        places, pairs = np.arange(len(many)), pairs[many]
        begins = np.maximum.accumulate(np.where(np.diff(pairs, prepend=-1) != 0, places, 0))
        kept = np.ones(len(rows), bool)
        kept[many[places - begins >= self._most]] = False
        self.let_go = combine(self.let_go, multiset_digest(rows.digests[~kept]))
        self.append((rows_at(rows, np.flatnonzero(kept)), 0, int(kept.sum())))
        self._held += int(kept.sum())
