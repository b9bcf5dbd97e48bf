"""Bound what each unit contributes: rows in all, groups in all, rows per group.

A unit is a user, or a user within a period. What is kept of a unit's rows depends on its own rows
alone: its rows of a step are taken by window, then in the order of a keyed hash of the row, and a
row is kept if it fits all three bounds. So every replay, and every engine, keeps the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.parts.counting.kernels import compiled
from dpstream.records import Integers, Words
from dpstream.stages.tables import SLICE, Table

Limits = tuple[int, int, int]
Verdicts = npt.NDArray[np.uint8]
Taken = tuple[Integers, Words, Words, Integers, Any, Verdicts]
ROWS, GROUPS, NOW = 0, 1, 2  # columns of a unit's counters
KEPT, FIRST = 1, 2
"""A row is kept; it is the first of its unit in its group."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """At most `rows` rows and `groups` groups of a unit, `rows_per_group` rows in each group."""

    rows: int
    groups: int
    rows_per_group: int


def unit_table() -> Table:
    """For each unit: rows kept, groups, and rows of the step at hand (zero between steps)."""
    return Table({"counters": ("i4", 3)})


def pair_table(bounds: Bounds) -> Table:
    """Units within groups of one window; rows are counted where there may be several."""
    return Table({"rows": ("i4", 0)} if bounds.rows_per_group > 1 else {})


@dataclass(kw_only=True)
class UnitBucket:
    """The units of one hash bucket: a table per period, and their groups by window."""

    bounds: Bounds
    periods: dict[int, Table] = field(default_factory=dict)
    windows: dict[int, Table] = field(default_factory=dict)
    changed: dict[tuple[str, int], list[Integers]] = field(default_factory=dict)
    """Rows of those tables that changed since the last snapshot, by ("period" or "window", n)."""

    def keep(
        self,
        window: int,
        period: int,
        batch: tuple[Words, Words, Words],
        places: Integers,
        verdicts: Verdicts,
        *,
        by_value: bool,
    ) -> None:
        """Give a verdict on the rows at `places` of a batch, all of one window and period.

        The batch: units, groups, and a keyed hash of each row, whose first word is its place in
        the order. `by_value`: rows of one group differ in what they add.
        """
        units, groups, hashes = batch
        table = self.periods.setdefault(period, unit_table())
        rows = table.rows(units, places)
        counters = table.columns["counters"]
        touched: Integers = np.empty(len(rows), np.int64)
        touched = touched[: _count(rows, counters, touched)].copy()
        taken = (rows, units, groups, places, counters, verdicts)
        again: list[Integers] = []
        near: list[Integers] = []
        self.windows.setdefault(window, pair_table(self.bounds))
        for part in _slices(np.arange(len(rows))):
            left = self._keep(window, part, taken, again, put_off=True, by_value=by_value)
            near.append(left)
        close = np.concatenate([*near, np.zeros(0, np.int64)])
        close = close[np.argsort(hashes[places[close], 0], kind="stable")]
        for part in _slices(close):
            self._keep(window, part, taken, again, put_off=False, by_value=by_value)
        if not self.windows[window].used:
            del self.windows[window]  # nobody has got into it
        counters[touched, NOW] = 0
        self.changed.setdefault(("period", period), []).append(touched)
        self.changed.setdefault(("window", window), []).extend(again)

    def _keep(
        self,
        window: int,
        sequence: Integers,
        taken: Taken,
        again: list[Integers],
        *,
        put_off: bool,
        by_value: bool,
    ) -> Integers:
        """Go through some rows; returns those that are put off to be taken in order.

        Known pairs that have one row more are added to `again`.
        """
        pairs = self.windows[window]
        pairs.reserve(len(sequence))
        counts = pairs.columns.get("rows", np.zeros(0, np.int32))
        limits = (self.bounds.rows, self.bounds.groups, self.bounds.rows_per_group)
        more: Integers = np.empty(len(sequence) if limits[2] > 1 else 0, np.int64)
        left: Integers = np.empty(len(sequence) if put_off else 0, np.int64)
        state = (pairs.ids, pairs.index, pairs.used, counts)
        pairs.used, known, waiting = _keep(
            sequence, *taken, *state, limits, put_off, by_value, more, left
        )
        again.append(more[:known])
        return left[:waiting]


def _slices(*sequences: Integers) -> Iterator[Integers]:
    for sequence in sequences:
        for start in range(0, len(sequence), SLICE):
            yield sequence[start : start + SLICE]


@compiled
def _count(rows: Any, counters: Any, touched: Any) -> int:
    """Rows of this step per unit, and the units that have any."""
    changed = 0
    for i in range(len(rows)):
        row = rows[i]
        if counters[row, NOW] == 0:
            touched[changed] = row
            changed += 1
        counters[row, NOW] += 1
    return changed


@compiled
def _keep(
    sequence: Any,
    rows: Any,
    units: Any,
    groups: Any,
    places: Any,
    counters: Any,
    out: Any,
    ids: Any,
    index: Any,
    used: int,
    counts: Any,
    limits: Limits,
    put_off: bool,
    by_value: bool,
    again: Any,
    left: Any,
) -> tuple[int, int, int]:
    """Go through rows in order and keep what fits; returns the pairs in use.

    With `put_off`, rows of units that come close to a bound are left for later, when they are
    taken in the order of their hashes: only there does order matter. (A unit is far from its bounds
    if all its rows of the step fit; that stays true, or false, while they are kept one by one.)
    `again`: pairs that were there before and have one row more.
    """
    mask = np.uint64(len(index) - 1)
    one, shift = np.uint64(1), np.uint64(32)
    low_bits = np.uint64(0xFFFFFFFF)
    known = waiting = 0
    for i in sequence:
        row, place = rows[i], places[i]
        number = counters[row, NOW]
        if put_off and number > 1:
            fits = counters[row, ROWS] + number <= limits[0]
            fits = fits and counters[row, GROUPS] + number <= limits[1]
            if by_value or not fits:
                left[waiting] = i
                waiting += 1
                continue
        if counters[row, ROWS] >= limits[0]:
            continue
        # Ids are pseudo-random, so an exclusive or with the words swapped is an id of the pair.
        first = units[place, 0] ^ groups[place, 1]
        second = units[place, 1] ^ groups[place, 0]
        tag = first >> shift
        slot = second & mask
        while True:
            entry = index[slot]
            if entry == 0:
                if counters[row, GROUPS] < limits[1]:
                    ids[used, 0], ids[used, 1] = first, second
                    if limits[2] > 1:
                        counts[used] = 1
                    used += 1
                    index[slot] = (tag << shift) | np.uint64(used)
                    counters[row, GROUPS] += 1
                    counters[row, ROWS] += 1
                    out[place] = KEPT | FIRST
                break
            if entry >> shift == tag:
                pair = np.int64(entry & low_bits) - 1
                if ids[pair, 0] == first and ids[pair, 1] == second:
                    if limits[2] > 1 and counts[pair] < limits[2]:
                        counts[pair] += 1
                        again[known] = pair
                        known += 1
                        counters[row, ROWS] += 1
                        out[place] = KEPT
                    break
            slot = (slot + one) & mask
    return used, known, waiting
