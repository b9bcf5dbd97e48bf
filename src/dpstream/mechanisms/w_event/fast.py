"""Sample adaptively, filter what was sampled, predict the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

PROCESS, MEASUREMENT, START = 1e5, 1e6, 100.0  # variances, public


@storable("kalman")
@dataclass(frozen=True, kw_only=True, eq=False)
class Kalman:
    """A random walk filtered: one estimate per bin, one variance for all, which share every update.

    Guarantee: post-processing; it reads releases and public constants. So does `Pid`.
    """

    estimate: Reals | None = None
    variance: float = START

    def predict(self) -> Kalman:
        """One step passes: the estimate stays, its variance grows."""
        return replace(self, variance=self.variance + PROCESS)

    def correct(self, measured: Reals) -> Kalman:
        """A noisy measurement arrives; the first one is taken as it is."""
        if self.estimate is None:
            return replace(self, estimate=measured)
        gain = self.variance / (self.variance + MEASUREMENT)
        estimate = self.estimate + gain * (measured - self.estimate)
        return Kalman(estimate=estimate, variance=self.variance * (1 - gain))


PROPORTIONAL, INTEGRAL, MEMORY = 0.9, 0.1, 5
GAIN, SET_POINT = 5.0, 0.1


@storable("pid")
@dataclass(frozen=True, kw_only=True)
class Pid:
    """Turns feedback errors of the filter into the distance to the next sample."""

    interval: float = 1.0
    errors: tuple[float, ...] = ()

    def feed(self, error: float) -> Pid:
        """A sample's feedback error: below the set point the interval grows, above it shrinks.

        >>> Pid().feed(0.0).interval > 1, Pid(interval=9.0).feed(0.5).interval
        (True, 1.0)
        """
        errors = (*self.errors, error)[-MEMORY:]
        control = PROPORTIONAL * error + INTEGRAL * sum(errors) / len(errors)
        excess = min((control - SET_POINT) / SET_POINT, 50.0)  # e^50 already means "at once"
        interval = max(1.0, self.interval + GAIN * (1 - math.exp(excess)))
        return Pid(interval=interval, errors=errors)


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

    remembers: ClassVar[Remembers] = "answers"
    publishes_stddev: ClassVar[bool] = False

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
        noisy = self.perturb(x, self.share, spend).astype(np.float64)
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
