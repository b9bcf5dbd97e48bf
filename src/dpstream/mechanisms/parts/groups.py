"""Columns that change alike, found from releases alone.

Guarantee: post-processing; only released values are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals


@storable("column groups")
@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnGroups:
    """A group number per column, and how much each column's releases have moved."""

    group: Integers
    movement: Reals
    count: int

    @classmethod
    def of(cls, columns: int, count: int) -> ColumnGroups:
        """Before anything is released: groups of neighbouring columns, equally large."""
        count = min(count, columns)
        return cls(
            group=np.arange(columns) * count // columns, movement=np.zeros(columns), count=count
        )

    def sums(self, distance: Integers) -> Integers:
        """Group totals of a per-column distance."""
        return np.bincount(self.group, weights=distance, minlength=self.count).astype(np.int64)

    def sizes(self) -> Integers:
        """Columns per group."""
        return np.bincount(self.group, minlength=self.count)

    def moved(self, old: Integers, new: Integers) -> ColumnGroups:
        """Remember how far releases moved (decayed mean square)."""
        movement = 0.9 * self.movement + 0.1 * np.square((new - old).astype(np.float64))
        return ColumnGroups(group=self.group, movement=movement, count=self.count)

    def regrouped(self) -> ColumnGroups:
        """Columns sorted by movement, cut into groups of equal size."""
        rank = np.argsort(np.argsort(self.movement, kind="stable"), kind="stable")
        group = rank * self.count // len(rank)
        return ColumnGroups(group=group, movement=self.movement, count=self.count)
