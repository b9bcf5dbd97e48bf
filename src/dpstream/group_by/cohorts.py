"""Who comes back: the cohort of each unit, and the windows after it in which the unit was there.

A unit's cohort is the window of its first `first` row. It has an inner row of lag 0 there, and one
of lag n for the window n later if it has an `again` row in it. So it has `lags` + 1 inner rows in
all, for ever: what is known of a unit is carried from window to window, and a unit whose lags are
over stays marked as full.

Proof: `docs/soundness/unit_rows.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from dpstream.group_by.hash_tables import HashTable
from dpstream.group_by.inner_rows import first_places, times_of_window
from dpstream.query.per_unit import HeldRows, Span
from dpstream.records import Integers, Words
from dpstream.rows.parse import whole_column

LAG = "lag"
FIRST, AGAIN = 1, 2
_AGE = 2  # bits before the age of a unit's cohort
MOST_LAGS = 1000


@dataclass(frozen=True, kw_only=True)
class CohortRows:
    """The lags at which each unit was there again.

    `column`: what a row is, `FIRST`, `AGAIN` or both; of a row that is carried the windows since
    its unit's cohort, plus one, above these bits. `keys`: columns of a unit's first `first` row;
    they go with it.
    """

    column: str
    lags: int
    keys: tuple[str, ...] = ()
    gap: ClassVar[None] = None
    grows: ClassVar[bool] = False
    at_most_one: ClassVar[bool] = True
    across_windows: ClassVar[bool] = True

    @property
    def most(self) -> int:
        """How many inner rows a unit has at most, in all windows together."""
        return self.lags + 1

    @property
    def text(self) -> str:
        """All of it: part of what fixes a query's releases, so it never changes."""
        return f"RETENTION OF {self.column!r} LAGS {self.lags} BY {self.keys!r}"

    @property
    def in_words(self) -> str:
        """The same for people."""
        return (
            "one row at most, with its lag: 0 in the window of a unit's first row (its cohort), "
            f"then 1 to {self.lags} in later windows in which it is there again; {self.most} rows "
            "in all for a unit for ever, and it stays marked as full when its lags are over"
        )

    @property
    def made_of(self) -> dict[str, tuple[str, ...]]:
        """The columns that wait behind each column of inner rows."""
        return {LAG: (self.column,)}

    def __call__(
        self, rows: HeldRows, span: Span, step: int | None = None
    ) -> tuple[Words, pa.Table]:
        """The inner rows of a window that has closed."""
        first, ages, was = self._known(rows)
        there = np.where(ages < 0, was & FIRST != 0, (was & AGAIN != 0) & (ages <= self.lags))
        at = first[there]
        columns = {LAG: pa.array(np.maximum(ages[there], 0), pa.int64())} | self._keys(rows, at)
        return rows.units[at], pa.table(columns | times_of_window(span, len(at)))

    def carried(self, rows: HeldRows) -> tuple[Integers, pa.Table]:
        """What the next window must know: a row for each unit that has a cohort, and its columns.

        They look at one unit at a time, as inner rows do.
        """
        first, ages, was = self._known(rows)
        kept = (ages >= 0) | (was & FIRST != 0)
        older = np.minimum(np.maximum(ages[kept], 0) + 1, self.most)
        columns = {self.column: pa.array((older + 1) << _AGE, pa.int64())}
        columns |= self._keys(rows, first[kept])
        return first[kept], pa.table({name: columns[name] for name in rows.keys.column_names})

    def _keys(self, rows: HeldRows, places: Integers) -> dict[str, pa.Array]:
        return {name: whole_column(rows.keys[name]).take(pa.array(places)) for name in self.keys}

    def _known(self, rows: HeldRows) -> tuple[Integers, Integers, Integers]:
        """By unit: the row that began its cohort, the windows since (-1: none), what rows were."""
        units = HashTable().rows(np.ascontiguousarray(rows.units))
        which = np.asarray(whole_column(rows.keys[self.column]).fill_null(0), np.int64)
        first = first_places(units)
        if self.keys:  # they are those of one row: which one is the row's own
            digests = rows.digests
            begins = np.where(which >> _AGE > 0, 0, np.where(which & FIRST, 1, 2))
            order = np.lexsort((digests[:, 1], digests[:, 0], rows.values[:, 0], begins))
            first = order[first_places(units[order])]
        ages, was = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
        np.maximum.at(ages, units, which >> _AGE)
        np.bitwise_or.at(was, units, which & (FIRST | AGAIN))
        return first, ages - 1, was
