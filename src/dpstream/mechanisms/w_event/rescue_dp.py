"""Sample when a controller says so, with a part of what the window has left; group small bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender
from dpstream.mechanisms.parts.publish_or_hold import BudgetWindow
from dpstream.privacy.amounts import GRID, floor_units
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

_SLOPE, _MOST = 0.2, 0.6  # of the budget that is left: SLOPE ln(interval + 1), at most MOST
_GAIN = 5.0  # steps by which an interval grows while nothing happens
_PROPORTIONAL, _INTEGRAL, _MEMORY = 0.9, 0.1, 5
_ENOUGH = 4.0  # times the noise scale: a predicted count of so much stays by itself
_DECAY = 0.8  # of what is known of the drift, at each sample


@storable("rescue dp state")
@dataclass(frozen=True, kw_only=True, eq=False)
class RescueDpState:
    """The filter (estimates, their variances, the drift), the controller, and what was spent."""

    spent: BudgetWindow
    values: Reals | None = None
    variance: Reals | None = None
    drift: float = 0.0  # variance that a count gains in a step
    interval: float = 1.0
    errors: tuple[float, ...] = ()
    sampled_at: int = 0
    due: int = 0


@dataclass(frozen=True, kw_only=True)
class RescueDp(HistogramMechanism, identity="rescue_dp"):
    """Adaptive sampling by a PID, adaptive budgets, groups of small bins, a Kalman filter.

    A sample takes min(0.2 ln(interval + 1), 0.6) of what the window has left: longer intervals
    leave more. Bins whose predicted counts are below the noise are grouped with those nearest to
    them, and a group's noisy sum is divided by its size. Between samples the filter's estimate is
    held. One schedule serves all bins: with one for each, as published, a unit that moves meets
    the samples of all of them.

    Guarantee: w-event epsilon-DP, w = `window`: counts are read by samples only, each of which
        takes less than the window has left; schedule, budgets and groups follow from releases.
    Unit: one event per step, L1 change at most 1; it moves one group's sum by at most 1.
    Delay: none.
    Paper: Wang, Zhang, Lu, Wang, Qin, Ren, "RescueDP: Real-time Spatio-temporal Crowd-sourced Data
        Publishing with Differential Privacy", 2016; constants are dpstream's where no data-free
        ones are given.

    >>> from dpstream import release
    >>> series = release(RescueDp(epsilon=1, window=20), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid[0], series.values.shape
    (True, (4, 2))
    """

    remembers: ClassVar[Remembers] = "answers"
    publishes_stddev: ClassVar[bool] = False

    def start(self) -> RescueDpState:
        """Nothing sampled yet."""
        return RescueDpState(spent=BudgetWindow(width=self.window))

    def step(
        self, state: RescueDpState, x: Integers, spend: Spender
    ) -> tuple[RescueDpState, list[Release]]:
        """Sample where the controller says so and the window has something left."""
        now = spend.step
        left = floor_units(self.budget) - state.spent.units_before(now)
        part = min(_SLOPE * math.log(state.interval + 1), _MOST)
        amount = Fraction(left * round(part * 1024) // 1024, GRID)
        paid = now >= state.due and amount > 0
        if paid:
            state = self._sample(state, x, amount, spend)
        assert state.values is not None
        return state, [Release(step=now, values=state.values, paid=paid, held=not paid)]

    def _sample(
        self, state: RescueDpState, x: Integers, amount: Fraction, spend: Spender
    ) -> RescueDpState:
        now, scale = spend.step, 1 / float(amount)
        groups = small_bins_together(state.values, len(x), _ENOUGH * scale)
        sums = np.zeros(int(groups.max()) + 1, np.int64)
        np.add.at(sums, groups, x)
        sizes = np.bincount(groups)
        noisy = (self.perturb(sums, amount, spend) / sizes)[groups]
        noise = 2 * (scale / sizes[groups]) ** 2
        spent = state.spent.pay(now, amount)
        if state.values is None or state.variance is None:
            return RescueDpState(spent=spent, values=noisy, variance=noise, due=now + 1)
        gap = now - state.sampled_at
        away = noisy - state.values
        surplus = float(np.mean(away**2 - state.variance - noise)) / gap
        drift = _DECAY * state.drift + (1 - _DECAY) * max(surplus, 0.0)
        before = state.variance + drift * gap
        weight = before / (before + noise)
        moved = float(np.mean(np.abs(weight * away)))
        errors = (*state.errors, moved)[-_MEMORY:]
        control = _PROPORTIONAL * moved + _INTEGRAL * sum(errors) / len(errors)
        interval = state.interval + _GAIN * (1 - min(control / scale, 1e6) ** 2)
        interval = min(max(1.0, interval), float(self.window))
        return RescueDpState(
            spent=spent,
            values=state.values + weight * away,
            variance=(1 - weight) * before,
            drift=drift,
            interval=interval,
            errors=errors,
            sampled_at=now,
            due=now + round(interval),
        )


def small_bins_together(predicted: Reals | None, bins: int, enough: float) -> Integers:
    """A group number per bin: neighbours in the order of their predictions, until they add up.

    Guarantee: post-processing; only releases are read.

    >>> small_bins_together(np.array([90.0, 1.0, 30.0, 2.0, 3.0]), 5, 5.0).tolist()
    [2, 0, 1, 0, 0]
    """
    if predicted is None:
        return np.arange(bins)
    group, total, number = np.empty(bins, np.int64), 0.0, 0
    for j in np.argsort(predicted, kind="stable"):
        if total >= enough or (total > 0 and predicted[j] >= enough):
            number, total = number + 1, 0.0
        group[j] = number
        total += max(float(predicted[j]), 0.0)
    return group
