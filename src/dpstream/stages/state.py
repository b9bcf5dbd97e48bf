"""What a query remembers between steps, and what of it goes when a window or a period is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dpstream.stages.bounding import UnitBucket
from dpstream.stages.groups import GroupBucket
from dpstream.stages.query import Query
from dpstream.stages.totals import Totals


@dataclass(kw_only=True)
class State:
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
        """A window is final: its groups, its pairs and its totals go."""
        self.windows.pop(window, None)
        self.totals.pop(window, None)
        for bucket in self.units:
            bucket.windows.pop(window, None)

    def evict_period(self, period: int) -> None:
        """Its units go."""
        for bucket in self.units:
            bucket.periods.pop(period, None)
            bucket.offered.pop(period, None)


def is_over(query: Query, step: int) -> Callable[[int], bool]:
    """Is every window of a period final by `step`? Then no row of it can be kept any more."""
    ticks, schedule = query.periods, query.schedule
    if ticks is None:
        return lambda period: schedule.steps is not None and step >= schedule.steps

    def over(period: int) -> bool:
        end = ticks.at(period + 1)
        if schedule.end is not None:  # the period may reach beyond it
            end = min(end, schedule.end)
        last = int(schedule.last_window_of(np.array([end - 1]))[0])
        return schedule.last_step(last) < step

    return over
