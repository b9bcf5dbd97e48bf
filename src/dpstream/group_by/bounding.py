"""Bound what each unit contributes: rows in all, groups in all, rows per group.

A unit is a user, or a user within a period. What is kept of a unit's rows depends on its own rows
alone: its rows of a step are taken by window, then in the order of a keyed hash of the row, and a
row is kept if it fits all three bounds. Rows of keys that the window remembers, which tables have
shown, go before the others. So every replay, and every engine, keeps the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.compiled import compiled
from dpstream.group_by.hash_tables import (
    FAR,
    NEAR,
    SLICE,
    Flags,
    HashTable,
    ask_row,
    ask_slot,
    row_bits,
    row_of,
)
from dpstream.group_by.remembered_keys import NONE, FirstWords, among_first_words
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

    It stays empty where a unit has one row in all, unless `bias.py` asks in which group that is.
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
    reached_pairs: dict[int, HashTable] = field(default_factory=dict)
    """Units in groups that they have rows in, kept or not, by window, where bounds are chosen."""
    reached: dict[int, HashTable] = field(default_factory=dict)
    """In how many groups each unit has rows, by period, likewise (`chosen_bounds.py`)."""
    set_pairs: dict[int, HashTable] = field(default_factory=dict)
    """Units in groups of fewer keys than all, by window, where there are such sets and units
    count once in each (`grouping_sets.py`)."""

    def keep(
        self,
        window: int,
        period: int,
        batch: tuple[Words, Words, Words],
        places: Integers,
        keep_mask: KeepMask,
        *,
        by_value: bool,
        preferred: FirstWords = NONE,
        bounds: Bounds | None = None,
    ) -> None:
        """Set the flags of the rows at `places` of a batch, all of one window and period.

        The batch: units, groups, and a keyed hash of each row, whose first word is its place in
        the order. `by_value`: rows of one group differ in what they add. `preferred`: the groups
        that the window remembers. `bounds`: those of the period, where each has its own.
        """
        _, groups, hashes = batch
        limits = self.bounds if bounds is None else bounds
        units = self.periods.setdefault(period, unit_table())
        pairs = self.windows.setdefault(window, pair_table(self.bounds))
        most: Flags = np.empty(len(places), np.uint8)
        waiting: Integers = np.empty(len(places), np.int64)
        tables, how = (units, pairs, limits), (keep_mask, waiting)
        left = self._keep(tables, batch, places, most, *how, by_value=by_value)
        later = places[waiting[:left]]
        later = later[np.argsort(hashes[later, 0], kind="stable")]
        if len(preferred):
            behind = ~among_first_words(groups[later], preferred)
            later = later[np.argsort(behind, kind="stable")]
        self._keep(tables, batch, later, _EVERY, *how, by_value=by_value)
        if not pairs.used:
            del self.windows[window]  # nobody has got into it

    def _keep(
        self,
        of: tuple[HashTable, HashTable, Bounds],
        batch: tuple[Words, Words, Words],
        places: Integers,
        most: Flags,
        keep_mask: KeepMask,
        waiting: Integers,
        *,
        by_value: bool,
    ) -> int:
        """Go through rows until a table is full, let it grow, and go on; how many are put off."""
        units, pairs, bounds = of
        limits = (bounds.rows, bounds.groups, bounds.rows_per_group)
        cells = _EVERY if most is _EVERY else estimate_cells(len(places))
        at = left = 0
        while at < len(places):
            for table in (units, pairs) if bounds.rows > 1 else (units,):
                if table.used >= table.room:
                    table.reserve(min(len(places) - at, SLICE))
            of_units = (units.words, units.index, units.touched, units.used, units.room)
            of_pairs = (pairs.words, pairs.index, pairs.touched, pairs.used, pairs.room)
            of_rows = (at, places, most, cells, batch[0], batch[1])
            at, left, units.used, pairs.used = _keep_rows(
                *of_rows, of_units, of_pairs, limits, by_value, keep_mask, waiting, left
            )
            cells = _EVERY  # counted by now
        return left


def estimate_cells(rows: int) -> Flags:
    """A small table that counts the rows of each unit, or of several that share a cell."""
    return np.zeros(1 << min(max(rows * 4, 256).bit_length(), 22), np.uint8)


@compiled
def _count_rows(units: Any, places: Any, cells: Any, rows: Any) -> None:
    """For each place at least the number of rows of its unit among all places (255: that or more).

    Units that share a cell count as one; that errs on the safe side.
    """
    mask = np.uint64(len(cells) - 1)
    for place in places:
        cell = units[place, 1] & mask
        if cells[cell] < _MOST:
            cells[cell] += 1
    for i in range(len(places)):
        rows[i] = cells[units[places[i], 1] & mask]


@compiled
def _keep_rows(
    begin: int,
    places: Any,
    most: Any,
    cells: Any,
    units: Any,
    groups: Any,
    of_units: Any,
    of_pairs: Any,
    limits: tuple[int, int, int],
    by_value: bool,
    out: Any,
    waiting: Any,
    left: int,
) -> tuple[int, int, int, int]:
    """Go through rows in order, from `begin` on, and keep what fits, until a table has no room.

    Returns where it ended, how many rows are put off by now, and the rows of both tables. With
    `cells` the rows of each unit are estimated first. Where the estimate `most` leaves it open
    whether all rows of a unit fit, or where it matters which of them are kept, they are put off,
    all of them or those after some that fit anyway: only then does order matter, and they are taken
    in the order of their hashes.
    """
    if len(cells):
        _count_rows(units, places, cells, most)
    words, unit_index, unit_touched, used_units, unit_room = of_units
    pairs, index, touched, used, room = of_pairs
    bits, unit_bits, one = row_bits(index), row_bits(unit_index), np.uint64(1)
    most_rows, most_groups = np.uint64(limits[0]), np.uint64(limits[1])
    end = len(places)
    for ahead in range(begin, end + FAR):
        if ahead < end:
            place = places[ahead]
            ask_slot(unit_index, units[place, 1])
            ask_slot(index, units[place, 1] ^ groups[place, 0])
        near = ahead - (FAR - NEAR)
        if begin <= near < end:
            ask_row(words, unit_index, units[places[near], 1])
        i = ahead - FAR
        if i < begin:
            continue
        place = places[i]
        row = row_of(
            words, unit_index, unit_bits, units[place, 0], units[place, 1], used_units, unit_room
        )
        if row < 0:
            return i, left, used_units, used
        if row == used_units:
            used_units += 1
        else:
            unit_touched[row] = 1
        if len(most) and most[i] > 1:
            more = np.uint64(most[i])
            fits = words[row, _ROWS] + more <= most_rows
            fits = fits and words[row, _GROUPS] + more <= most_groups and most[i] < _MOST
            if by_value or not fits:
                waiting[left] = i
                left += 1
                continue
        if words[row, _ROWS] >= most_rows:
            continue
        if most_rows == one:  # the only row of its unit: nobody asks for the pair again
            words[row, _ROWS], words[row, _GROUPS] = one, one
            out[place] = KEPT | FIRST
            continue
        # Ids are pseudo-random, so an exclusive or with the words swapped is an id of the pair.
        first = units[place, 0] ^ groups[place, 1]
        second = units[place, 1] ^ groups[place, 0]
        # A unit that is in all its groups gets into no other one.
        full = words[row, _GROUPS] >= most_groups
        pair = row_of(pairs, index, bits, first, second, used, 0 if full else room)
        if pair < 0:
            if full:
                continue
            return i, left, used_units, used
        if pair == used:
            used += 1
            if limits[2] > 1:
                pairs[pair, 2] = one
            words[row, _GROUPS] += one
            words[row, _ROWS] += one
            out[place] = KEPT | FIRST
        elif limits[2] > 1 and np.int64(pairs[pair, 2]) < limits[2]:
            pairs[pair, 2] += one
            touched[pair] = 1
            words[row, _ROWS] += one
            out[place] = KEPT
    return end, left, used_units, used


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
