"""How much successive publications differ: three ways to look back.

Guarantee: post-processing; only released values are read.

The three updates of "SPAS: Continuous Release of Data Streams under w-Event Differential Privacy",
2025, section 4. Each keeps a state that does not grow with the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

Update = Literal["two_windows", "all", "decay"]


class ReleaseChanges(Protocol):
    """A record of changes between adjacent publications."""

    def changed(self, step: int, old: Integers, new: Integers) -> ReleaseChanges:
        """The record after `new` was published over `old`."""

    def variance(self) -> float:
        """The variance of a change; 0 before the first one."""


def release_changes(update: Update, window: int) -> ReleaseChanges:
    """An empty record of the chosen kind."""
    if update == "two_windows":
        return TwoWindows(window=window)
    if update == "all":
        return AllHistory()
    return Decayed(phases=np.zeros(window))


@storable("changes in two windows")
@dataclass(frozen=True, kw_only=True)
class TwoWindows:
    """Changes in the last two windows, their mean taken off; the paper's choice.

    >>> last = TwoWindows(window=2).changed(1, np.array([0]), np.array([3]))
    >>> last.changed(2, np.array([3]), np.array([8])).variance()
    1.0
    """

    window: int
    entries: tuple[tuple[int, float, float], ...] = ()

    def changed(self, step: int, old: Integers, new: Integers) -> TwoWindows:
        """Keep (step, mean |change|, mean squared change)."""
        oldest = step - 2 * self.window + 1
        kept = tuple(entry for entry in self.entries if entry[0] >= oldest)
        change = np.abs(new - old).astype(np.float64)
        entry = (step, float(change.mean()), _mean_square(old, new))
        return replace(self, entries=(*kept, entry))

    def variance(self) -> float:
        """Mean square less squared mean."""
        if not self.entries:
            return 0.0
        means = np.array([(mean, square) for _, mean, square in self.entries]).mean(axis=0)
        return max(0.0, float(means[1] - means[0] ** 2))


@storable("all changes")
@dataclass(frozen=True, kw_only=True)
class AllHistory:
    """Mean squared change over the whole stream."""

    total: float = 0.0
    count: int = 0

    def changed(self, step: int, old: Integers, new: Integers) -> AllHistory:
        """Add one squared change."""
        return AllHistory(total=self.total + _mean_square(old, new), count=self.count + 1)

    def variance(self) -> float:
        """The running mean."""
        return self.total / self.count if self.count else 0.0


@storable("decayed changes")
@dataclass(frozen=True, kw_only=True, eq=False)
class Decayed:
    """Squared changes, halved for every window begun since, over the number of all changes.

    Changes whose steps are equal modulo w halve together, so w sums are enough.
    """

    phases: Reals = field(repr=False)
    step: int = 0
    count: int = 0

    def changed(self, step: int, old: Integers, new: Integers) -> Decayed:
        """Halve what has aged, then add one squared change."""
        width = len(self.phases)
        phase = np.arange(width)
        turns = (step - phase) // width - (self.step - phase) // width
        phases = np.ldexp(self.phases, -turns)
        phases[step % width] += _mean_square(old, new)
        return Decayed(phases=phases, step=step, count=self.count + 1)

    def variance(self) -> float:
        """The decayed sum over the count; a change of this very step is not halved yet."""
        if not self.count:
            return 0.0
        now = float(self.phases[self.step % len(self.phases)])
        return (float(self.phases.sum()) + now) / (2 * self.count)


def _mean_square(old: Integers, new: Integers) -> float:
    return float(np.square((new - old).astype(np.float64)).mean())
