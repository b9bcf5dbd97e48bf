"""Ids in place of names: units, groups and rows, under the keys of a secret and of one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Integers, Words
from dpstream.stages.hashing import column_ids, group_ids, row_digests
from dpstream.stages.number_text import one_number_spelling
from dpstream.stages.query import Query
from dpstream.stages.rows import RowKeys
from dpstream.stages.stepwise import stepwise


class RowIds:
    """Makes the ids and digests of one run's rows."""

    def __init__(self, query: Query, keys: RowKeys) -> None:
        self._query, self._keys = query, keys

    def units(self, units: pa.Array, periods: Integers) -> Words:
        """The ids of units, each within its period.

        Text that reads as a number counts by its value: 5, 5.0 and " 5" are one unit.
        """
        return self.in_periods(self.names(units), periods)

    @property
    def common(self) -> tuple[bytes, bytes]:
        """Runs with the same give a unit's name, and a group, the same id."""
        return self._keys.units, self._keys.groups

    def names(self, units: pa.Array) -> Words:
        """The ids of units, whatever the period: the same for every run under one secret."""
        return column_ids(one_number_spelling(units), self._keys.units)

    def in_periods(self, ids: Words, periods: Integers) -> Words:
        """The ids of units by name, each within its period."""
        if self._query.periods is None or not len(ids):
            return ids
        known, where = np.unique(periods, return_inverse=True)
        masks = row_digests([known.astype(np.int64)], self._keys.periods)
        return ids ^ masks[where]  # a user in another period is another unit

    def groups(self, keys: pa.Table, count: int) -> Words:
        """The ids of `count` rows' groups; without key columns all rows are one group."""
        if not self._query.keys:
            return np.zeros((count, 2), np.uint64)
        return group_ids(keys.columns, self._keys.groups)

    def periods(self, moments: Integers) -> Integers:
        """The number of each row's period."""
        ticks = self._query.periods
        if ticks is None:
            return np.broadcast_to(np.int64(0), len(moments))
        return stepwise(ticks.before, moments)

    def digests(self, content: list[Any]) -> Words:
        """One digest of each row, from columns that say all of it."""
        return row_digests(content, self._keys.digests)
