"""Publish once per window with the whole budget; repeat in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender, release_or_hold
from dpstream.privacy.amounts import laplace_stddev
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


@storable("sample state")
@dataclass(frozen=True, kw_only=True)
class SampleState:
    """The release that is being repeated."""

    held: Reals | None = None


@dataclass(frozen=True, kw_only=True)
class Sample(HistogramMechanism, identity="sample"):
    """Spend all of epsilon on one step per window and hold the answer.

    Guarantee: w-event epsilon-DP, w = `window`: two paid steps are never closer than `window`.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event Sequences over
        Infinite Streams", 2014.

    >>> from dpstream import release
    >>> series = release(Sample(epsilon=1, window=3), [[10], [99], [98], [97]], secret=bytes(32))
    >>> series.paid, bool((series.values[0] == series.values[1]).all())
    ([True, False, False, True], True)
    """

    remembers: ClassVar[Remembers] = "releases"

    def start(self) -> SampleState:
        """Nothing published yet."""
        return SampleState()

    def step(
        self, state: SampleState, x: Integers, spend: Spender
    ) -> tuple[SampleState, list[Release]]:
        """Pay at steps 0, window, 2 window, ...; hold at the others."""
        paid = spend.step % self.window == 0 or state.held is None
        if paid:
            noisy = self.perturb(x, self.budget, spend)
            state = SampleState(held=noisy.astype(np.float64))
        assert state.held is not None
        stddev = laplace_stddev(histogram_change(), self.budget)
        return state, [release_or_hold(spend.step, state.held, paid=paid, stddev=stddev)]
