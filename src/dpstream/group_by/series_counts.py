"""Histograms of open windows: of each unit at most one row, the one with the smallest keyed digest.

A row that came with an earlier step goes before later ones. So which row counts depends on the
unit's own rows alone, and a replay keeps the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dpstream.privacy.state import Secret
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import RowSlice, id_pairs, rows_by_window
from dpstream.rows.row_reader import RowReader


class StepCounts:
    """Counts per public group of every window that is not published yet, and who is in them."""

    def __init__(self, query: SeriesQuery, secret: Secret, run: bytes) -> None:
        self.reader = RowReader(query, secret, run)
        self._seen: dict[int, Words] = {}
        self._counts: dict[int, Integers] = {}

    def take(self, slices: Iterable[RowSlice]) -> None:
        """Add the rows of a step, whatever windows they belong to."""
        for window, _, rows in rows_by_window(slices):
            # of each unit the row with the smallest digest
            order = np.lexsort((*rows.digests.T[::-1], *rows.units.T[::-1]))
            units, groups = rows.units[order], rows.groups[order]
            first = np.ones(len(units), bool)
            first[1:] = (units[1:] != units[:-1]).any(axis=1)
            self._add(window, units[first], groups[first])

    def _add(self, window: int, units: Words, groups: Words) -> None:
        """Count the groups of units that are not in the window yet."""
        seen = self._seen.get(window, np.zeros((0, 2), np.uint64))
        new = ~np.isin(id_pairs(units), id_pairs(seen))
        self._seen[window] = np.concatenate([seen, units[new]])
        bins = id_pairs(self.reader.public_ids())
        order = np.argsort(bins)
        places = order[np.searchsorted(bins[order], id_pairs(groups[new]))]
        self._counts[window] = self.counts(window) + np.bincount(places, minlength=len(bins))

    def counts(self, window: int) -> Integers:
        """A window's histogram, in the order of the public groups."""
        if window not in self._counts:
            return np.zeros(len(self.reader.public_ids()), np.int64)
        return self._counts[window]

    def evict(self, window: int) -> None:
        """Drop a window that is published."""
        self._seen.pop(window, None)
        self._counts.pop(window, None)

    def save(self) -> dict[str, Any]:
        """All open windows, as plain arrays."""
        windows = sorted(self._counts)
        return {
            "windows": windows,
            "counts": [self._counts[window] for window in windows],
            "seen": [self._seen[window] for window in windows],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self._counts = dict(zip(saved["windows"], saved["counts"], strict=True))
        self._seen = dict(zip(saved["windows"], saved["seen"], strict=True))
