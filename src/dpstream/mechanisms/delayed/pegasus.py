"""Perturb every value, group successive values that stay close together, smooth each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpstream.mechanisms.base import Spender, whole
from dpstream.mechanisms.parts import smoothing
from dpstream.mechanisms.parts.grouping import TimeGroups
from dpstream.mechanisms.parts.history import History
from dpstream.mechanisms.parts.pegasus_groups import PegasusGroups
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


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

    @property
    def largest_group(self) -> int:
        """As the parameter says."""
        return self.longest

    def start(self) -> PegasusState | None:
        """The number of bins is not known yet."""
        return None

    def step(
        self, state: PegasusState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Perturb, group, smooth."""
        if state is None:
            noisy = History.of(bins=len(x), longest=self.longest, dtype=np.float64)
            state = PegasusState(groups=self.grouping.start(len(x)), noisy=noisy)
        perturbed = spend.laplace(
            x, sensitivity=self.change, epsilon=self.for_values, purpose="publish"
        )
        noisy = state.noisy.append(perturbed)
        groups, size = self.grouping.grow(state.groups, x, self.theta, spend)
        how: smoothing.Smoother = "average" if self.smoother == "mean" else self.smoother
        smooth = smoothing.smooth(noisy, size, how)
        values = self.settled(smooth, self.value_scale / np.sqrt(size))
        state = PegasusState(groups=groups, noisy=noisy)
        return state, [Release(step=spend.step, values=values, paid=True)]
