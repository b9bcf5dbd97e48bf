"""The groups of one window and hash bucket: exact sums, and which groups are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.compiled import compiled
from dpstream.counting.noise_process import KeyedNoise
from dpstream.errors import StateError
from dpstream.group_by.bounding import FIRST, KEPT, KeepMask
from dpstream.group_by.hash_tables import (
    FAR,
    NEAR,
    SLICE,
    HashTable,
    ask_row,
    ask_slot,
    row_bits,
    row_of,
)
from dpstream.query.aggregates import Measure
from dpstream.records import Integers, Reals, Words

if TYPE_CHECKING:
    from dpstream.group_by.cell_sums import CellSums

LARGEST_SUM = 1 << 61
TOO_LARGE = "a sum left the integers of 61 bits; use a coarser quantum"
_KINDS = ("units", "rows", "value", "round", "clamped", "distinct", "weight")
_COLUMNS = {"value": 1, "clamped": 1, "distinct": 2, "weight": 1}  # numbers of each row
_FEW = 32  # tables of key columns before they are joined
_ACTIVE = 1  # a group has been active, and its key columns are known


@dataclass(kw_only=True)
class ShownGroups:
    """The groups that have been shown: which of the active ones, in order of appearance."""

    active: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    since: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """The release at which each appeared."""
    noise: list[KeyedNoise] = field(default_factory=list)
    """Of every measure but the one that finds keys."""
    published: Reals | None = None
    """What was last published of each, where thinning is asked for."""


class GroupBucket:
    """Sums of every group; noise and key columns of the active ones.

    Where keys are found in rounds, a group's row ends with `_ACTIVE`, or `_ACTIVE` plus one more
    than the step at which it was last published.
    """

    def __init__(self, measures: Sequence[Measure], cells: Sequence[CellSums] = ()) -> None:
        self.codes = np.array([_KINDS.index(m.kind) for m in measures], np.int64)
        self.cells = list(cells)  # their leaves follow the values that are summed
        self.in_rounds = any(m.kind == "round" for m in measures)
        self.table = HashTable(len(measures) + self.in_rounds)
        self.members: HashTable | None = None  # units in groups, and the step of their last row
        self.values = [HashTable() for m in measures if m.kind == "distinct"]  # in groups
        self.round: Integers = np.zeros(0, np.int64)  # active groups whose round has noise
        self.active: Integers = np.zeros(0, np.int64)  # rows of the table, as they became active
        self.keys: list[pa.Table] = []  # key columns of the active groups
        self.remembered: Integers = np.zeros(0, np.int64)  # active groups that were shown before
        self.joined = 0  # active groups whose noise has begun
        self.noise: KeyedNoise | None = None  # of the units of the joined groups
        self.shown = ShownGroups()

    def add(
        self,
        groups: Words,
        keep_mask: KeepMask,
        values: Integers,
        keys: pa.Table,
        places: Integers,
        *,
        pre_threshold: int,
        units: Words | None = None,
        step: int = 0,
    ) -> None:
        """Add the rows at `places`, which count; groups that pass the pre-threshold get active.

        The row that takes a group past the threshold names its key columns. `units` and `step` are
        needed where keys are found in rounds and a unit may have several rows in a group.
        """
        if self.values:
            values = self._new_values(groups, values, places)
        new = keep_mask  # in its first round, a unit is new where it is new to the group
        if units is not None:
            rows = self.table.rows(groups, places)
            new = self._new_in_round(groups, units, rows, places, step, len(keep_mask))
        of_rows = (groups, places, keep_mask, new, values)
        active, named = _add_to(self.table, self.codes, *of_rows, pre_threshold)
        summed = sum(_COLUMNS.get(_KINDS[code], 0) for code in self.codes)
        kept = places[keep_mask[places] & KEPT > 0] if self.cells else places
        for number, cells in enumerate(self.cells):
            cells.add(groups, values[:, summed + number], kept)
        if len(active):
            unknown = ~self._is_remembered(active)
            self._activate(active[unknown], keys.take(pa.array(named[unknown])))

    def add_sums(
        self, groups: Words, sums: Integers, keys: pa.Table, *, pre_threshold: int
    ) -> None:
        """Add what `sum_groups` has made of rows elsewhere: the same as to add the rows."""
        rows = self.table.rows(groups)
        became: Integers = np.empty(len(rows), np.int64)
        state = (self.table.numbers, pre_threshold, became)
        count, over = _add_sums(rows, sums, *state)
        if over:
            raise StateError(TOO_LARGE)
        if count:
            became = became[:count][~self._is_remembered(rows[became[:count]])]
            self._activate(rows[became], keys.take(pa.array(became)))

    def _new_values(self, groups: Words, values: Integers, places: Integers) -> Integers:
        """The same values; that of a distinct count is 1 where nobody has brought it before."""
        values, column, number = values.copy(), 0, 0
        for code in self.codes:
            if _KINDS[code] == "distinct":
                ids = np.ascontiguousarray(values[places, column : column + 2]).view(np.uint64)
                given = np.flatnonzero(ids.any(axis=1))
                pairs = np.ascontiguousarray(ids[given] ^ groups[places[given]][:, ::-1])
                before = self.values[number].used
                found, first = np.unique(self.values[number].rows(pairs), return_index=True)
                values[places, column] = 0
                values[places[given[first[found >= before]]], column] = 1
                number += 1
            column += _COLUMNS.get(_KINDS[code], 0)
        return values

    def _new_in_round(
        self, groups: Words, units: Words, rows: Integers, places: Integers, step: int, size: int
    ) -> KeepMask:
        """Which rows are the first of their unit since their group was last published."""
        if self.members is None:
            self.members = HashTable(1)
        # Ids are pseudo-random, so an exclusive or with the words swapped is an id of the pair.
        pairs = units[places] ^ groups[places][:, ::-1]
        known = self.members.rows(np.ascontiguousarray(pairs))
        new: KeepMask = np.zeros(size, np.uint8)
        _first_since(rows, places, known, self.members.numbers, self.table.numbers, step, new)
        return new

    def open(self, groups: Words, keys: pa.Table) -> None:
        """Public groups: there from the beginning, whatever the data are."""
        self._activate(self.table.rows(groups), keys)

    def remember(self, groups: Words, keys: pa.Table) -> None:
        """Groups that earlier windows have shown: active from now on, whatever the data are."""
        rows, active = self.table.rows(groups), self.active
        new = ~np.isin(rows, active)
        self._activate(rows[new], keys.filter(pa.array(new)))
        these = np.flatnonzero(np.isin(self.active, rows))
        self.remembered = np.union1d(self.remembered, these)
        if self.in_rounds:
            self.table.numbers[rows, -1] = np.maximum(self.table.numbers[rows, -1], _ACTIVE)
            self.table.touched[rows] = 1

    def _is_remembered(self, rows: Integers) -> npt.NDArray[np.bool_]:
        """Which rows of the table are of such groups: they do not become active once more."""
        if not len(self.remembered):
            return np.zeros(len(rows), bool)
        return np.isin(rows, self.active[self.remembered])

    def _activate(self, rows: Integers, keys: pa.Table) -> None:
        self.active = np.concatenate([self.active, rows])
        self.keys.append(keys)
        if len(self.keys) > _FEW:
            self.keys = [pa.concat_tables(self.keys).combine_chunks()]

    def hidden(self) -> npt.NDArray[np.bool_]:
        """Which active groups have not been shown."""
        hidden = np.ones(len(self.active), bool)
        hidden[self.shown.active] = False
        return hidden

    def ids(self, active: Integers) -> Words:
        """The ids of active groups."""
        return self.table.ids[self.active[active]]

    def sums(self, active: Integers) -> Integers:
        """The exact sums of active groups, groups x measures."""
        return self.table.numbers[self.active[active], : len(self.codes)]

    def key_columns(self, active: Integers) -> pa.Table:
        """The key columns of active groups."""
        ends = np.cumsum([len(table) for table in self.keys])
        table_of = np.searchsorted(ends, active, side="right")
        order = np.argsort(table_of, kind="stable")
        tables = []
        for number in np.unique(table_of):
            first = ends[number] - len(self.keys[number])
            within = active[order[table_of[order] == number]] - first
            tables.append(self.keys[number].take(pa.array(within)))
        return pa.concat_tables(tables).combine_chunks().take(pa.array(np.argsort(order)))

    @property
    def bytes(self) -> int:
        """Memory held."""
        noise = 0 if self.noise is None else self.noise.ids.nbytes + self.noise.state.nbytes
        others = sum(n.ids.nbytes + n.state.nbytes for n in self.shown.noise)
        members = 0 if self.members is None else self.members.bytes
        members += sum(values.bytes for values in self.values)
        members += sum(cells.bytes for cells in self.cells)
        return self.table.bytes + members + noise + others + sum(int(k.nbytes) for k in self.keys)


def sum_groups(
    measures: Sequence[Measure], groups: Words, keep_mask: KeepMask, values: Integers
) -> tuple[Words, Integers, Integers]:
    """Groups of rows that are kept, their sums, and the first row of each.

    Sums are exact integers, so parts of a step may be summed wherever they are and added later, in
    any order. Not for keys that are found in rounds: there it matters whose rows they are.
    """
    places = np.flatnonzero(keep_mask)
    codes, table = np.array([_KINDS.index(m.kind) for m in measures]), HashTable(len(measures))
    rows = table.rows(groups, places)
    _add_to(table, codes, groups, places, keep_mask, keep_mask, values, -1)
    first: Integers = np.empty(table.used, np.int64)
    first[rows[::-1]] = places[::-1]
    return table.ids[: table.used], table.numbers[: table.used], first


def _add_to(
    table: HashTable,
    codes: Integers,
    groups: Words,
    places: Integers,
    keep_mask: KeepMask,
    new: KeepMask,
    values: Integers,
    pre_threshold: int,
) -> tuple[Integers, Integers]:
    """Add rows to their groups' sums; the groups that pass the pre-threshold, and which rows do it.

    Goes through rows until the table is full, lets it grow, and goes on.
    """
    became: Integers = np.empty(len(places), np.int64)
    named: Integers = np.empty(len(places), np.int64)
    at = count = 0
    while at < len(places):
        if table.used >= table.room:
            table.reserve(min(len(places) - at, SLICE))
        of_table = (table.words, table.index, table.touched, table.used, table.room)
        of_rows = (at, places, groups, keep_mask, new, values, codes)
        at, table.used, count, over = _add_rows(
            *of_rows, of_table, pre_threshold, became, named, count
        )
        if over:
            raise StateError(TOO_LARGE)
    return became[:count].copy(), named[:count]


@compiled
def _add_sums(rows: Any, more: Any, sums: Any, pre_threshold: int, became: Any) -> tuple[int, bool]:
    """Add sums to each row's; note the places where a group passes the pre-threshold."""
    count, over = 0, False
    for i in range(len(rows)):
        row, before = rows[i], sums[rows[i], 0]
        for m in range(more.shape[1]):
            sums[row, m] += more[i, m]
            over |= abs(sums[row, m]) > LARGEST_SUM
        if pre_threshold >= 0 and before <= pre_threshold < sums[row, 0]:
            became[count] = i
            count += 1
    return count, over


@compiled
def _add_rows(
    begin: int,
    places: Any,
    groups: Any,
    keep_mask: Any,
    new: Any,
    values: Any,
    codes: Any,
    of_table: Any,
    pre_threshold: int,
    became: Any,
    named: Any,
    count: int,
) -> tuple[int, int, int, bool]:
    """Add rows, from `begin` on, to their groups' sums, until the table has no room.

    Returns where it ended, the rows of the table, how many groups have passed the pre-threshold
    (`became`, and the rows that name them), and whether a sum is too large.
    """
    words, index, touched, used, room = of_table
    bits, over, end = row_bits(index), False, len(places)
    sums = words.view(np.int64)[:, 2:]
    for ahead in range(begin, end + FAR):
        if ahead < end:
            ask_slot(index, groups[places[ahead], 1])
        near = ahead - (FAR - NEAR)
        if begin <= near < end:
            ask_row(words, index, groups[places[near], 1])
        i = ahead - FAR
        if i < begin:
            continue
        place, value = places[i], 0
        row = row_of(words, index, bits, groups[place, 0], groups[place, 1], used, room)
        if row < 0:
            return i, used, count, over
        if row == used:
            used += 1
        else:
            touched[row] = 1
        for m in range(len(codes)):
            if codes[m] == 0:
                if keep_mask[place] & FIRST:
                    sums[row, m] += 1
                    if m == 0 and pre_threshold >= 0 and sums[row, 0] == pre_threshold + 1:
                        became[count], named[count] = row, place
                        count += 1
            elif codes[m] == 1:
                sums[row, m] += keep_mask[place] & KEPT
            elif codes[m] == 2:
                if keep_mask[place] & KEPT:
                    sums[row, m] += values[place, value]
                value += 1
                over |= abs(sums[row, m]) > LARGEST_SUM
            elif codes[m] == 6:
                if keep_mask[place] & FIRST:
                    before = sums[row, m]
                    sums[row, m] += values[place, value]
                    if m == 0 and before <= pre_threshold < sums[row, 0] and pre_threshold >= 0:
                        became[count], named[count] = row, place
                        count += 1
                value += 1
            elif codes[m] >= 4:  # of rows that are not kept, too, if their unit is in the group
                sums[row, m] += values[place, value]
                value += codes[m] - 3
                over |= abs(sums[row, m]) > LARGEST_SUM
            elif new[place] & FIRST:
                sums[row, 0] += 1
                if sums[row, 0] == pre_threshold + 1 and sums[row, len(codes)] == 0:
                    sums[row, len(codes)] = _ACTIVE
                    became[count], named[count] = row, place
                    count += 1
    return end, used, count, over


@compiled
def _first_since(
    rows: Any, places: Any, known: Any, members: Any, sums: Any, step: int, new: Any
) -> None:
    """Mark rows whose unit has no other since the last publication of their group."""
    last = sums.shape[1] - 1
    for i in range(len(places)):
        before = members[known[i], 0]  # 0, or one more than the step of its last row
        if before <= max(sums[rows[i], last] - _ACTIVE, 0):
            new[places[i]] = FIRST
        members[known[i], 0] = step + 1
