"""Perturb sums of bins that look alike, group each bin in time, publish the groups' medians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender, whole
from dpstream.mechanisms.parts.grouping import (
    GRID,
    GroupedHistogram,
    History,
    TimeGroups,
    smooth,
)
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

_PROPORTIONAL, _INTEGRAL, _MEMORY = 0.9, 0.1, 5  # of the controller of the threshold
_LARGEST = float(1 << 50)  # a threshold that no deviation reaches


@storable("adapub state")
@dataclass(frozen=True, kw_only=True, eq=False)
class AdaPubState:
    """The open groups, the noisy counts that they smooth, the last release, the thresholds."""

    groups: TimeGroups
    noisy: History
    last: Reals | None
    changes: Reals  # e of the last releases: bins x _MEMORY, used in turn
    theta: Integers


@dataclass(frozen=True, kw_only=True)
class AdaPub(GroupedHistogram, identity="adapub", keys="pivots"):
    """Share noise between bins whose last releases are alike; smooth each bin's counts in time.

    4/5 of epsilon / window is for the counts of a step, 1/5 for the groups in time. Bins are put to
    the nearest of `pivots` values, those at evenly spaced ranks of the last release (the paper
    draws them at random); with no more bins than pivots each stays alone. Bins with one release
    would never part again, so every `window` steps each bin is published alone. A group in time
    holds at most `window` counts of one bin; its threshold is max(1, delta^2 / epsilon), delta =
    0.9 e + 0.1 (mean of the last five e), e the relative change of the bin's last release. Values
    are not clamped. When to use it: very many bins of which most are nearly equal.

    Guarantee: w-event epsilon-DP, w = `window`: a step costs eps_p for its sums, of which one event
        moves one by one, and eps_c for all tests that ever read its counts, since each takes part
        in one run of them only. Pivots and thresholds come from releases.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Wang, Yang, Ren, Zhao, Lam, "Adaptive Differentially Private Data Stream Publishing in
        Spatio-temporal Monitoring of IoT", 2019.

    >>> from dpstream import release
    >>> series = release(AdaPub(epsilon=1, window=4), [[10, 80]] * 3, secret=bytes(32))
    >>> series.paid, series.values.shape
    ([True, True, True], (3, 2))
    """

    pivots: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pivots", whole(self.pivots, "pivots", at_least=1))

    def step(
        self, state: AdaPubState | None, x: Integers, spend: Spender
    ) -> tuple[AdaPubState, list[Release]]:
        """Perturb the sums of alike bins, group in time, publish the medians."""
        if state is None:
            state = self._first(len(x))
        noisy = state.noisy.append(self._perturb_alike(state, x, spend))
        groups, size = self.grouping.grow(state.groups, x, state.theta, spend)
        values, changes, theta = smooth(noisy, size, "median"), state.changes, state.theta
        if state.last is not None:
            seen = spend.step - 1
            changes, theta = thresholds(changes, seen, state.last, values, float(self.budget))
        state = AdaPubState(groups=groups, noisy=noisy, last=values, changes=changes, theta=theta)
        return state, [Release(step=spend.step, values=values, paid=True)]

    def _first(self, bins: int) -> AdaPubState:
        return AdaPubState(
            groups=self.grouping.start(bins),
            noisy=History.of(bins=bins, longest=self.window, dtype=np.float64),
            last=None,
            changes=np.zeros((bins, _MEMORY)),
            theta=np.full(bins, GRID),
        )

    def _perturb_alike(self, state: AdaPubState, x: Integers, spend: Spender) -> Reals:
        """A noisy count per bin: its own, or the mean of the bins that looked like it."""
        kind = None
        if len(x) > self.pivots and state.last is not None and spend.step % self.window:
            kind = alike(state.last, self.pivots)
        if kind is None:
            return self.perturb(x, self.share, spend).astype(np.float64)
        sums = np.zeros(self.pivots, np.int64)
        np.add.at(sums, kind, x)
        noisy = self.perturb(sums, self.share, spend).astype(np.float64)
        means: Reals = noisy / np.maximum(np.bincount(kind, minlength=self.pivots), 1)
        return means[kind]


@njit(cache=True, nogil=True)
def thresholds(
    changes: Reals, seen: int, last: Reals, values: Reals, epsilon: float
) -> tuple[Reals, Integers]:
    """The relative changes with the newest one, and the thresholds that follow, on their grid.

    `seen` changes came before.
    """
    changes, theta = changes.copy(), np.empty(len(values), np.int64)
    for j in range(len(values)):
        e = abs(last[j] - values[j]) / max(values[j], 1.0)
        changes[j, seen % _MEMORY] = e
        mean = changes[j].sum() / min(seen + 1, _MEMORY)
        delta = _PROPORTIONAL * e + _INTEGRAL * mean
        theta[j] = math.ceil(GRID * min(max(1.0, delta * delta / epsilon), _LARGEST))
    return changes, theta


def alike(last: Reals, pivots: int) -> Integers:
    """A number below `pivots` per bin, the same for bins that are nearest to the same pivot.

    >>> alike(np.array([1.0, 50.0, 2.0, 60.0]), 2)
    array([0, 1, 0, 1])
    """
    ranks = (2 * np.arange(pivots) + 1) * len(last) // (2 * pivots)
    chosen = np.unique(np.sort(last)[ranks])
    return np.searchsorted((chosen[1:] + chosen[:-1]) / 2, last)
