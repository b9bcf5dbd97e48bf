"""Sample adaptively, filter what was sampled, predict the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.parts.kalman import Kalman
from dpstream.mechanisms.parts.pid import Pid
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release

_FIRST_SAMPLES = 5  # the controller needs some errors before it can steer


@storable("fast state")
@dataclass(frozen=True, kw_only=True, eq=False)
class FastState:
    """Filter, controller, when to sample next, and what is left of this block."""

    filter: Kalman
    pid: Pid
    next_sample: int = 0
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class FastW(HistogramMechanism, identity="fast_w"):
    """FAST in blocks of `window` steps, half of epsilon each: a share of 0.15 of the steps pays.

    One schedule serves all bins. (A schedule per bin, as published, spends up to the number of
    samples per bin times over: the bins' paid steps differ, and a unit may be in another bin each
    step.) When to use it: smooth streams with counts far above w / epsilon.

    Guarantee: w-event epsilon-DP, w = `window`: `window` successive steps lie in at most two
        blocks, and a block's samples share epsilon / 2.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Fan, Xiong, "An Adaptive Approach to Real-Time Aggregate Monitoring with Differential
        Privacy", 2014; in blocks by Kellaris, Papadopoulos, Xiao, Papadias, "Differentially
        Private Event Sequences over Infinite Streams", 2014.

    >>> from dpstream import release
    >>> series = release(FastW(epsilon=1, window=20), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid
    [True, True, True, False]
    """

    @cached_property
    def samples(self) -> int:
        """Paid steps per block."""
        return max(1, 15 * self.window // 100)

    @cached_property
    def share(self) -> Fraction:
        """What one sample may spend."""
        return on_grid(self.budget / (2 * self.samples))

    def start(self) -> FastState:
        """Nothing sampled yet."""
        return FastState(filter=Kalman(), pid=Pid())

    def step(
        self, state: FastState, x: Integers, spend: Spender
    ) -> tuple[FastState, list[Release]]:
        """Predict; where the schedule says so and the block can pay, sample and correct."""
        now = spend.step
        if now % self.window == 0:
            state = replace(state, left=self.samples)
        state = replace(state, filter=state.filter.predict())
        paid = now >= state.next_sample and state.left > 0
        if paid:
            state = self._sample(state, x, spend)
        assert state.filter.estimate is not None
        release = Release(step=now, values=state.filter.estimate, paid=paid, held=not paid)
        return state, [release]

    def _sample(self, state: FastState, x: Integers, spend: Spender) -> FastState:
        noisy = spend.laplace(
            x, sensitivity=histogram_change(), epsilon=self.share, purpose="publish"
        ).astype(np.float64)
        predicted, corrected = state.filter.estimate, state.filter.correct(noisy)
        assert corrected.estimate is not None
        pid = state.pid
        if predicted is not None:
            scale = np.maximum(corrected.estimate, 1.0)
            pid = pid.feed(float(np.mean(np.abs(corrected.estimate - predicted) / scale)))
        pause = 1 if spend.step < _FIRST_SAMPLES - 1 else max(1, round(pid.interval))
        return replace(
            state,
            filter=corrected,
            pid=pid,
            next_sample=spend.step + pause,
            left=state.left - 1,
        )
