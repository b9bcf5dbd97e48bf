"""Sample where a private test sees a change beyond a threshold that adapts to the sampling rate."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender, release_or_hold
from dpstream.mechanisms.parts.above_threshold import AboveThreshold, with_changes
from dpstream.mechanisms.parts.publish_or_hold import BudgetWindow, distance
from dpstream.privacy.amounts import Amount, laplace_stddev, on_grid, positive, units
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release

_GAIN, _TOLERANCE = 0.5, 0.05


@storable("dsat state")
@dataclass(frozen=True, kw_only=True, eq=False)
class DsatState:
    """The last release, both budgets in the window, the open run, and the threshold's factor."""

    published: BudgetWindow
    runs: BudgetWindow  # closed runs, at their last step
    run: AboveThreshold | None = None
    values: Integers | None = None
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Dsat(HistogramMechanism, identity="dsat", keys="change adaptive"):
    """Publish at most c = ceil(0.15 w) steps of a window, where the stream moved most.

    The threshold is `change` (0.025) of the last release, times a factor in [0, 2] that follows
    the gap between the share of steps sampled and c / w; `adaptive=False` keeps it fixed (DSFT).
    When to use it: streams that rest for long and then move by a few percent at once.

    Guarantee: w-event epsilon-DP, w = `window`: publications cost 3/4 of epsilon / c each and at
        most c lie in a window; the runs of tests that overlap it cost at most the other quarter.
        A test is made only if the publication it may lead to can be paid.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Li, Xiong, Jiang, Liu, "Differentially Private Histogram Publication for Dynamic
        Datasets: an Adaptive Sampling Approach", 2015; its tests are made fresh runs here.

    >>> from dpstream import release
    >>> series = release(Dsat(epsilon=1, window=20), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid[0], series.values.shape
    (True, (4, 2))
    """

    remembers: ClassVar[Remembers] = "thresholds"

    change: Amount = 0.025
    adaptive: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "change", positive(self.change, "change"))
        if not isinstance(self.adaptive, bool):
            raise InvalidParameter(f"adaptive must be True or False; got {self.adaptive!r}")

    @cached_property
    def samples(self) -> int:
        """c, the publications that a window may hold."""
        return -(-15 * self.window // 100)

    @cached_property
    def testing(self) -> Fraction:
        """eps_1, for the runs of tests."""
        return on_grid(self.budget / 4)

    @cached_property
    def share(self) -> Fraction:
        """What one publication may spend."""
        return on_grid((self.budget - self.testing) / self.samples)

    @cached_property
    def run_budget(self) -> Fraction:
        """What one run of tests may spend."""
        return on_grid(self.testing / (self.samples + 1))

    @cached_property
    def _limits(self) -> tuple[int, int]:
        """What the window may have spent before another publication, another run, in grid units."""
        publications = units(self.share) * (self.samples - 1)
        return publications, units(self.testing) - units(self.run_budget)

    def start(self) -> DsatState:
        """Nothing published, nothing spent."""
        empty = BudgetWindow(width=self.window)
        return DsatState(published=empty, runs=empty)

    def step(
        self, state: DsatState, x: Integers, spend: Spender
    ) -> tuple[DsatState, list[Release]]:
        """Publish the first step; then let the tests decide, as long as both budgets last."""
        if self.adaptive and (factor := self._adapt(state, spend.step)) != state.factor:
            state = with_changes(state, factor=factor)
        state, paid = self._decide(state, x, spend)
        if paid:
            noisy = self.perturb(x, self.share, spend)
            spent = state.published.pay(spend.step, self.share)
            state = with_changes(state, values=noisy, published=spent)
        assert state.values is not None
        stddev = laplace_stddev(histogram_change(), self.share)
        return state, [release_or_hold(spend.step, state.values, paid=paid, stddev=stddev)]

    def _decide(self, state: DsatState, x: Integers, spend: Spender) -> tuple[DsatState, bool]:
        if state.values is None:
            return state, True
        before_publication, before_run = self._limits
        if state.published.units_before(spend.step) > before_publication:
            return state, False
        run, unit = state.run, histogram_change()
        if run is None:
            if state.runs.units_before(spend.step) > before_run:
                return state, False
            run = AboveThreshold.open(spend, epsilon=self.run_budget, sensitivity=unit)
            state = with_changes(state, run=run)
        assert state.values is not None
        threshold = self._threshold(state.values, state.factor)
        if not run.exceeds(distance(state.values, x), threshold, spend):
            return state, False
        return with_changes(state, run=None, runs=state.runs.pay(spend.step, run.epsilon)), True

    def _threshold(self, values: Integers, factor: float) -> Fraction:
        level = max(int(values.sum()), 0)
        change, (over, under) = Fraction(self.change), factor.as_integer_ratio()
        return Fraction(over * level * change.numerator, under * change.denominator)

    def _adapt(self, state: DsatState, now: int) -> float:
        """Sampling more than c / w raises the threshold, less lowers it."""
        recent = state.published.steps(now - self.window + 1)
        gap = recent / min(max(now, 1), self.window) - self.samples / self.window
        if abs(gap) <= _TOLERANCE:
            return state.factor
        return min(2.0, max(0.0, state.factor + _GAIN * gap))


@dataclass(frozen=True, kw_only=True)
class Dsft(Dsat, identity="dsft"):
    """`Dsat` with a fixed threshold: `change` of the last release, whatever the sampling rate.

    When to use it: when the change that matters is known in advance.

    Guarantee: w-event epsilon-DP, w = `window`, as `Dsat`.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Li, Xiong, Jiang, Liu, "Differentially Private Histogram Publication for Dynamic
        Datasets: an Adaptive Sampling Approach", 2015; its tests are made fresh runs here.

    >>> Dsft(epsilon=1, window=20).adaptive
    False
    """

    adaptive: bool = False
