"""Perturb every count, group successive counts that stay close together, smooth each group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from dpstream.mechanisms.base import Spender, check_choice
from dpstream.mechanisms.parts.grouping import (
    GRID,
    GroupedHistogram,
    History,
    Smoother,
    TimeGroups,
    smooth,
)
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release

THRESHOLD = 5
"""theta = 5 / eps_g, eps_g that of one step."""


@storable("pegasus state")
@dataclass(frozen=True, kw_only=True, eq=False)
class PegasusWState:
    """The open groups, and the noisy counts that they smooth."""

    groups: TimeGroups
    noisy: History


@dataclass(frozen=True, kw_only=True)
class PegasusW(GroupedHistogram, identity="pegasus_w", keys="smoother"):
    """PeGaSuS with epsilon / window for every step: 4/5 for the count, 1/5 for its group.

    Each bin groups its own counts, at most `window` of them, while their deviation is below
    theta = 5 / eps_g (eps_g the share of one step). What is published is the group's `smoother`:
    its "median" or "mean" so far, or the noisy count shrunk towards the mean ("james_stein").
    Values are not clamped. When to use it: many bins that rest for long at levels of their own and
    jump by more than window / epsilon.

    Guarantee: w-event epsilon-DP, w = `window`: a count costs its step's eps_p for its noise and
        eps_g for all tests that ever read it, since it takes part in one run of them only.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Chen, Machanavajjhala, Hay, Miklau, "PeGaSuS: Data-Adaptive Differentially Private Stream
        Processing", 2017; the noise of its tests is doubled, because a deviation moves by 2.

    >>> from dpstream import release
    >>> series = release(PegasusW(epsilon=1, window=4), [[10, 80]] * 3, secret=bytes(32))
    >>> series.paid, series.values.shape
    ([True, True, True], (3, 2))
    """

    smoother: Smoother = "median"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.smoother, "smoother", get_args(Smoother))

    @cached_property
    def theta(self) -> Integers:
        """The threshold of every deviation, on its grid."""
        return np.array([math.ceil(GRID * THRESHOLD / self.grouping.epsilon)])

    def step(
        self, state: PegasusWState | None, x: Integers, spend: Spender
    ) -> tuple[PegasusWState, list[Release]]:
        """Perturb, group, smooth."""
        if state is None:
            noisy = History.of(bins=len(x), longest=self.window, dtype=np.float64)
            state = PegasusWState(groups=self.grouping.start(len(x)), noisy=noisy)
        noisy = state.noisy.append(self.perturb(x, self.share, spend))
        groups, size = self.grouping.grow(state.groups, x, self.theta, spend)
        values = smooth(noisy, size, self.smoother)
        release = Release(step=spend.step, values=values, paid=True)
        return PegasusWState(groups=groups, noisy=noisy), [release]
