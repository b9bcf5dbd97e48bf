"""PeGaSuS: perturb each value, group successive values that stay close together, smooth each group.

`Pegasus` publishes at once; with `PegasusDelay` a value waits, and is smoothed with the later ones
of its group too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, get_args

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender, check_choice, whole
from dpstream.mechanisms.parts.batches import DelayedMechanism, SharedMechanism
from dpstream.mechanisms.parts.grouping import (
    GRID,
    Grouping,
    History,
    Smoother,
    TimeGroups,
    smooth,
)
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

_THRESHOLD = 5  # theta = 5 Delta / eps_g


@dataclass(frozen=True, kw_only=True)
class PegasusGroups(SharedMechanism, ABC, identity=None, keys="threshold smoother"):
    """Groups that grow while their deviation is below `threshold`, in the units of the data."""

    threshold: Amount | None = None
    smoother: Smoother = "median"
    constant_charges: ClassVar[bool] = True
    publishes_stddev: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.smoother, "smoother", get_args(Smoother))
        if self.threshold is not None:
            object.__setattr__(self, "threshold", positive(self.threshold, "threshold"))

    @property
    @abstractmethod
    def longest(self) -> int:
        """How many values a group has at most."""

    @cached_property
    def grouping(self) -> Grouping:
        """How groups grow, with eps_g per value."""
        return Grouping(epsilon=self.for_groups, change=self.change, longest=self.longest)

    @cached_property
    def theta(self) -> Integers:
        """The threshold of every deviation, on its grid."""
        theta = _THRESHOLD * self.change / self.for_groups
        if self.threshold is not None:
            theta = Fraction(self.threshold) / self.range[2]
        return np.array([math.ceil(GRID * theta)])

    def perturb(self, x: Integers, spend: Spender) -> Integers:
        """Noise on every value, with eps_p."""
        return spend.laplace(x, sensitivity=self.change, epsilon=self.for_values, purpose="publish")


@storable("pegasus values")
@dataclass(frozen=True, kw_only=True, eq=False)
class PegasusState:
    """The open groups, and the noisy values that they smooth."""

    groups: TimeGroups
    noisy: History


@dataclass(frozen=True, kw_only=True)
class Pegasus(PegasusGroups, identity="pegasus", keys="longest"):
    """PeGaSuS for a series: 4/5 of epsilon for every value, 1/5 for finding its group.

    Successive values form a group, of at most `longest`, while their deviation is below
    `threshold` (in the units of the data; by default 5 Delta / eps_g). What is published is the
    group's `smoother` so far: "median", "mean", or the noisy value shrunk towards the mean
    ("james_stein"). When to use it: nothing may be delayed, the series rests for long at levels
    far apart, and epsilon is large.

    Guarantee: event-level epsilon-DP: a value costs eps_p for its noise and eps_g for all tests
        that ever read it, since it takes part in one run of them only.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: none.
    Paper: Chen, Machanavajjhala, Hay, Miklau, "PeGaSuS: Data-Adaptive Differentially Private Stream
        Processing", 2017; the noise of its tests is doubled, because a deviation moves by 2 Delta.

    >>> from dpstream import release
    >>> series = release(Pegasus(epsilon=1, lo=0, hi=100), [10, 20, 30], secret=bytes(32))
    >>> series.paid, series.values.shape
    ([True, True, True], (3, 1))
    """

    longest: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "longest", whole(self.longest, "longest", at_least=1))

    def step(
        self, state: PegasusState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb, group, smooth."""
        if state is None:
            noisy = History.of(bins=len(x), longest=self.longest, dtype=np.float64)
            state = PegasusState(groups=self.grouping.start(len(x)), noisy=noisy)
        noisy = state.noisy.append(self.perturb(x, spend))
        groups, size = self.grouping.grow(state.groups, x, self.theta, spend)
        smoothed = smooth(noisy, size, self.smoother)
        values = self.shrink_and_scale(smoothed, self.value_scale / np.sqrt(size))
        state = PegasusState(groups=groups, noisy=noisy)
        return state, [Release(step=spend.step, values=values, paid=True)]


@storable("pegasus delayed values")
@dataclass(frozen=True, kw_only=True, eq=False)
class WaitingState:
    """The open groups, the noisy values, the group of each, and how many wait."""

    groups: TimeGroups
    noisy: History
    labels: History
    waiting: int


@dataclass(frozen=True, kw_only=True)
class PegasusDelay(PegasusGroups, DelayedMechanism, identity="pegasus_delay"):
    """PeGaSuS whose values wait `delay` steps, and are smoothed with their whole group till then.

    As `Pegasus`, with groups of at most 2 `delay` + 1 values; the window slides: every step
    publishes the value of `delay` steps ago. When to use it: as `Pegasus`, if a delay is allowed.

    Guarantee: event-level epsilon-DP: a value costs eps_p for its noise and eps_g for all tests
        that ever read it, since it takes part in one run of them only.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: `delay` steps.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025 (its PeGaSus_Delay); the noise of its tests is doubled.

    >>> from dpstream import release
    >>> series = release(PegasusDelay(epsilon=1, delay=2, lo=0, hi=9), [4] * 5, secret=bytes(32))
    >>> series.values.shape
    (5, 1)
    """

    @property
    def longest(self) -> int:
        """Values that a waiting one can be smoothed with, itself included."""
        return 2 * self.delay + 1

    def step(
        self, state: WaitingState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb and group the newest value; publish the one that has waited long enough."""
        if state is None:
            longest = self.longest + self.delay + 1
            state = WaitingState(
                groups=self.grouping.start(len(x)),
                noisy=History.of(bins=len(x), longest=longest, dtype=np.float64),
                labels=History.of(bins=len(x), longest=longest, dtype=np.int64),
                waiting=0,
            )
        perturbed = self.perturb(x, spend)
        groups, size = self.grouping.grow(state.groups, x, self.theta, spend)
        last = state.labels.last(1)[:, 0] if state.labels.end else -size
        # a group is known by a number that only has to differ from its neighbour's
        labels = state.labels.append((last + (size == 1)) % (4 * self.longest))
        state = WaitingState(
            groups=groups,
            noisy=state.noisy.append(perturbed),
            labels=labels,
            waiting=state.waiting + 1,
        )
        return self._publish(state, spend.step, keep=self.delay)

    def finish(self, state: WaitingState | None, spend: Spender) -> tuple[Any, list[Release]]:
        """All that wait."""
        if state is None:
            return state, []
        return self._publish(state, spend.step, keep=0)

    def _publish(
        self, state: WaitingState, newest: int, *, keep: int
    ) -> tuple[WaitingState, list[Release]]:
        """The values before the `keep` newest ones, the oldest first."""
        out, end = [], state.noisy.end
        median, shrunk = self.smoother == "median", self.smoother == "james_stein"
        for waiting in range(state.waiting, keep, -1):
            at, first = end - waiting, max(0, end - waiting - self.longest)
            smoothed, size = _smooth(
                state.noisy.block[:, first:end],
                state.labels.block[:, first:end],
                at - first,
                median,
                shrunk,
            )
            values = self.shrink_and_scale(smoothed, self.value_scale / np.sqrt(size))
            out.append(Release(step=newest - waiting + 1, values=values, paid=True))
        return replace(state, waiting=min(state.waiting, keep)), out


@njit(cache=True, nogil=True)
def _smooth(
    noisy: Reals, labels: Integers, at: int, median: bool, shrunk: bool
) -> tuple[Reals, Integers]:
    """The value at column `at` of every bin from its group, and the size of the group."""
    bins, steps = noisy.shape
    out, size = np.empty(bins), np.empty(bins, np.int64)
    for j in range(bins):
        first, last = at, at
        while first > 0 and labels[j, first - 1] == labels[j, at]:
            first -= 1
        while last + 1 < steps and labels[j, last + 1] == labels[j, at]:
            last += 1
        group = noisy[j, first : last + 1]
        size[j] = len(group)
        out[j] = np.median(group) if median else group.mean()
        if shrunk:
            out[j] += (noisy[j, at] - out[j]) / size[j]
    return out, size
