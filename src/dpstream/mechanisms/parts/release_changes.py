"""How much successive publications differ: three ways to look back.

Guarantee: post-processing; only released values are read.

The three updates of "SPAS: Continuous Release of Data Streams under w-Event Differential Privacy",
2025, section 4. Each keeps a state that does not grow with the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dpstream.compiled import njit
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
@dataclass(frozen=True, kw_only=True, eq=False)
class TwoWindows:
    """Changes in the last `windows` windows, their mean taken off; two are the paper's choice.

    >>> last = TwoWindows(window=2).changed(1, np.array([0]), np.array([3]))
    >>> last.changed(2, np.array([3]), np.array([8])).variance()
    1.0
    """

    window: int
    windows: int = 2
    entries: Reals = field(default_factory=lambda: np.empty((0, 3)))
    """Rows of (step, mean |change|, mean squared change)."""

    def changed(self, step: int, old: Integers, new: Integers) -> TwoWindows:
        """Forget what is too old, add one change."""
        oldest = step - self.windows * self.window + 1
        mean, square = _mean(np.abs(new - old).astype(np.float64)), _mean_square(old, new)
        entries = _appended(self.entries, oldest, step, mean, square)
        return TwoWindows(window=self.window, windows=self.windows, entries=entries)

    def variance(self) -> float:
        """Mean square less squared mean."""
        return float(_variance(self.entries)) if len(self.entries) else 0.0


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
    return _mean(np.square((new - old).astype(np.float64)))


def _mean(values: Reals) -> float:
    return float(values[0]) if len(values) == 1 else float(values.mean())


@njit(cache=True, nogil=True)
def _appended(entries: Reals, oldest: int, step: int, mean: float, square: float) -> Reals:
    first = 0
    while first < len(entries) and entries[first, 0] < oldest:
        first += 1
    out = np.empty((len(entries) - first + 1, 3))
    out[:-1] = entries[first:]
    out[-1, 0], out[-1, 1], out[-1, 2] = step, mean, square
    return out


@njit(cache=True, nogil=True)
def _variance(entries: Reals) -> float:
    mean = square = 0.0
    for row in range(len(entries)):
        mean += entries[row, 1]
        square += entries[row, 2]
    mean, square = mean / len(entries), square / len(entries)
    return max(0.0, square - mean * mean)
