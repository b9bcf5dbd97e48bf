"""PeGaSuS with a delay: a value waits, and is smoothed with the later ones of its group too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.delayed import DelayedMechanism
from dpstream.mechanisms.parts.grouping import TimeGroups
from dpstream.mechanisms.parts.history import History
from dpstream.mechanisms.parts.pegasus_groups import PegasusGroups
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


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
    def largest_group(self) -> int:
        """Values that a waiting one can be smoothed with, itself included."""
        return 2 * self.delay + 1

    def start(self) -> WaitingState | None:
        """The number of bins is not known yet."""
        return None

    def step(
        self, state: WaitingState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb and group the newest value; publish the one that has waited long enough."""
        if state is None:
            state = self._empty(len(x))
        perturbed = spend.laplace(
            x, sensitivity=self.change, epsilon=self.for_values, purpose="publish"
        )
        groups, size = self.grouping.grow(state.groups, x, self.theta, spend)
        last = state.labels.block[:, state.labels.end - 1] if state.labels.end else -size
        # a group is known by a number that only has to differ from its neighbour's
        labels = state.labels.append((last + (size == 1)) % (4 * self.largest_group))
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

    def _empty(self, bins: int) -> WaitingState:
        longest = self.largest_group + self.delay + 1
        return WaitingState(
            groups=self.grouping.start(bins),
            noisy=History.of(bins=bins, longest=longest, dtype=np.float64),
            labels=History.of(bins=bins, longest=longest, dtype=np.int64),
            waiting=0,
        )

    def _publish(
        self, state: WaitingState, newest: int, *, keep: int
    ) -> tuple[WaitingState, list[Release]]:
        """Values that have waited for more than `keep` steps less one."""
        out: list[Release] = []
        waiting = state.waiting
        if waiting <= keep:
            return state, out
        median, shrunk = self.smoother == "median", self.smoother == "james_stein"
        while waiting > keep:
            end = state.noisy.end
            at, first = end - waiting, max(0, end - waiting - self.largest_group)
            smooth, size = _smooth(
                state.noisy.block[:, first:end],
                state.labels.block[:, first:end],
                at - first,
                median,
                shrunk,
            )
            scale = self.value_scale / np.sqrt(size)
            values = self.settled(smooth, scale)
            out.append(Release(step=newest - waiting + 1, values=values, paid=True))
            waiting -= 1
        after = WaitingState(
            groups=state.groups, noisy=state.noisy, labels=state.labels, waiting=waiting
        )
        return after, out


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
