"""What a query remembers between steps, and what of it goes when a window or a period is over."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpstream.group_by.bounding import UnitBucket
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.kept_share import Totals
from dpstream.query.query import Query


@dataclass(kw_only=True)
class QueryState:
    """Units and their groups, and every group's sums and noise, in hash buckets."""

    units: list[UnitBucket]
    windows: dict[int, list[GroupBucket]] = field(default_factory=dict)
    totals: dict[int, Totals] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory held."""
        tables = [
            table
            for bucket in self.units
            for kind in (bucket.periods, bucket.windows, bucket.offered)
            for table in kind.values()
        ]
        groups = [bucket for buckets in self.windows.values() for bucket in buckets]
        return sum(t.bytes for t in tables) + sum(g.bytes for g in groups)

    @property
    def periods(self) -> set[int]:
        """Periods that have units.

        A list of each bucket's: the next step's rows may be bounded meanwhile, in other periods.
        """
        return {period for bucket in self.units for period in list(bucket.periods)}

    def evict_window(self, window: int) -> None:
        """Drop a final window's groups, the units in them, and its totals."""
        self.windows.pop(window, None)
        self.totals.pop(window, None)
        for bucket in self.units:
            bucket.windows.pop(window, None)

    def evict_period(self, period: int) -> None:
        """Drop a period's units."""
        for bucket in self.units:
            bucket.periods.pop(period, None)
            bucket.offered.pop(period, None)

    def evict_periods(self, query: Query, step: int) -> None:
        """Drop every period of which no row can be kept any more: its windows are final."""
        for period in self.periods:
            if _last_step(query, period, step) < step:
                self.evict_period(period)


def _last_step(query: Query, period: int, step: int) -> int:
    """The last step that publishes a window of a period; without an end, it is not over yet."""
    ticks, schedule = query.periods, query.schedule
    if ticks is None:
        return step if schedule.steps is None else schedule.steps - 1
    end = ticks.at(period + 1)
    if schedule.end is not None:  # the period may reach beyond it
        end = min(end, schedule.end)
    return schedule.last_step(int(schedule.last_window_of(np.array([end - 1]))[0]))
