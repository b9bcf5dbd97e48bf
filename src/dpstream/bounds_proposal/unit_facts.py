"""Three facts about each unit, from one pass over a source: what bounds have to hold.

    groups   how many (key, window) groups it has rows in
    rows     how many rows it has in one of them, picked by a keyed hash
    value    the value of one of its rows, picked by a keyed hash

Each is a function of the unit's own rows and of a secret key. Rows are read in chunks; what is kept
is a table of units and one of (unit, group) pairs, of a public share of the units if asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from dpstream.engines.chunks import ChunkReader
from dpstream.engines.embedded.step_rows import check_columns
from dpstream.group_by.hash_tables import HashTable
from dpstream.privacy.state import Secret
from dpstream.query.aggregates import Sum
from dpstream.query.query import Query
from dpstream.records import Integers, Reals, Rejected, Source, Words
from dpstream.rows.row_batch import Rows
from dpstream.rows.row_ids import row_digests
from dpstream.rows.row_reader import RowReader

_PARTS: Final = 1 << 16  # a share of the units is taken by 16 bits of their ids


def value_sums(column: str) -> tuple[Sum, Sum]:
    """Two grids that hold a value between them: thousandths up to a million, thousands beyond."""
    return (
        Sum(
            "fine",
            column=column,
            contribution_bounds_per_row=(-(10**6), 10**6),
            quantum=Fraction(1, 1000),
        ),
        Sum("coarse", column=column, contribution_bounds_per_row=(-(10**12), 10**12), quantum=1000),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """One entry per unit; `values` is None if no value column was asked for."""

    units: Words
    periods: Integers
    groups: Integers
    rows: Integers
    values: Reals | None


class _Tables:
    """What is known of units and of their groups so far."""

    def __init__(self, key: bytes, share: float, valued: bool) -> None:
        self._key, self._valued = key, valued
        self._below = round(share * _PARTS)
        self._units = HashTable(3)  # period, digest of the row picked, its value's bits
        self._pairs = HashTable(2)  # rows, the unit's place

    def add(self, rows: Rows) -> None:
        """Take in a chunk."""
        taken = (rows.units[:, 1] >> np.uint64(48)).astype(np.int64) < self._below
        units, groups, windows = rows.units[taken], rows.groups[taken], rows.windows[taken]
        if not len(units):
            return
        known = self._units.used
        places = self._units.rows(units)
        numbers = self._units.numbers
        numbers[known : self._units.used, 1] = np.int64(-1)  # the largest word: any row beats it
        numbers[places, 0] = rows.periods[taken]
        pairs = self._pairs.rows(row_digests([units, groups, windows], self._key))
        np.add.at(self._pairs.numbers[:, 0], pairs, 1)
        self._pairs.numbers[pairs, 1] = places
        if self._valued:
            self._pick(places, rows.digests[taken, 0], _values(rows.values[taken]))

    def _pick(self, places: Integers, digests: Words, values: Reals) -> None:
        """The row with the least digest so far stands for its unit."""
        order = np.lexsort((digests, places))
        firsts = order[np.r_[True, np.diff(places[order]) > 0]]
        at, least = places[firsts], digests[firsts]
        words = self._units.words
        better = least < words[at, 3]
        words[at[better], 3] = least[better]
        words[at[better], 4] = values[firsts[better]].view(np.uint64)

    def facts(self) -> Facts:
        """What each unit comes to."""
        units, pairs = self._units.used, self._pairs.used
        of, rows = self._pairs.numbers[:pairs, 1], self._pairs.numbers[:pairs, 0]
        order = np.lexsort((self._pairs.words[:pairs, 0], of))  # a pair's id is a keyed hash
        firsts = order[np.r_[True, np.diff(of[order]) > 0]] if pairs else order
        values = self._units.words[:units, 4].copy().view(np.float64) if self._valued else None
        return Facts(
            units=self._units.ids[:units].copy(),
            periods=self._units.numbers[:units, 0].copy(),
            groups=np.bincount(of, minlength=units).astype(np.int64),
            rows=rows[firsts],
            values=values,
        )


def _values(grids: Integers) -> Reals:
    """Back from the two grids."""
    fine, coarse = grids[:, 0] / 1000.0, grids[:, 1] * 1000.0
    return np.where(np.abs(coarse) >= 10**6, coarse, fine)


class _RejectCounter:
    """Counts what could not be used, for the operator."""

    def __init__(self) -> None:
        self.read = self.unused = 0

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        self.unused += len(rows)

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        self.read += read
        self.unused += outside + late

    def lagged(self, seconds: float) -> None:
        pass


def collect(
    source: Source,
    query: Query,
    *,
    secret: Secret,
    run: bytes,
    share: float,
    progress: Callable[[int, int], None],
) -> tuple[Facts, dict[str, Any]]:
    """The facts of all units of a bounded source; and, for the operator alone, what was read."""
    check_columns(source, query)
    aside = _RejectCounter()
    reader = ChunkReader(source, RowReader(query, secret, run), aside)
    key = secret.key("pairs of units and groups", run)[:16]
    tables = _Tables(key, share, valued=len(query.aggregates) > 1)
    partitions = source.partitions()
    for number, partition in enumerate(partitions):
        progress(number, len(partitions))
        position, done = None, False
        while not done:
            batch = reader.batch(partition, position)
            tables.add(reader.rows(partition, position, batch))
            position, done = batch.position, batch.done
    progress(len(partitions), len(partitions))
    return tables.facts(), {"rows_read": aside.read, "rows_not_used": aside.unused}
