"""Predict how often to publish from past releases; publish where a private test sees a change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism, Spender, whole
from dpstream.mechanisms.parts.above_threshold import AboveThreshold
from dpstream.mechanisms.parts.budget_window import BudgetWindow
from dpstream.mechanisms.parts.changed import changed
from dpstream.mechanisms.parts.distance import distance
from dpstream.mechanisms.parts.release_changes import ReleaseChanges, Update, release_changes
from dpstream.privacy.amounts import floor_units, on_grid, units
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.privacy.stddev import laplace_stddev
from dpstream.records import Integers, Release


@storable("spas state")
@dataclass(frozen=True, kw_only=True, eq=False)
class SpasState:
    """The last publication, both budgets in the window, the open run, and C*."""

    published: BudgetWindow
    runs: BudgetWindow  # closed runs, at their last step
    changes: ReleaseChanges
    run: AboveThreshold | None = None
    count: int = 1  # C*: publications per window that the past suggests
    values: Integers | None = None
    stddev: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What follows from C*: of a publication, of a run, and what may be spent before each."""

    publication: Fraction
    run: Fraction
    units: int  # of a publication, on the grid; the next two likewise
    before_publication: int
    before_run: int
    error: Fraction  # the mean error of publishing, per bin


@dataclass(frozen=True, kw_only=True)
class Spas(HistogramMechanism, identity="spas", keys="update warm_up"):
    """Publish with epsilon_p / C*, C* the sampling count that past releases make optimal.

    epsilon_p is 3/4 of epsilon; the tests' runs share the rest. The first window publishes every
    `warm_up` steps. `update` names how C* looks back: over two windows, over everything ("all"),
    or with "decay". Values are those of the last publication: counts plus noise, not clamped.

    Guarantee: w-event epsilon-DP, w = `window`: publications in a window cost at most epsilon_p;
        the runs that overlap it, at most epsilon_s. Nothing is tested unless what a "yes" would
        lead to can be paid. Each "yes" is followed by a fresh run.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: "SPAS: Continuous Release of Data Streams under w-Event Differential Privacy", 2025;
        its noise is drawn once for the whole stream, which its proof does not cover, so the runs,
        their scales and their budgets are dpstream's.

    >>> from dpstream import release
    >>> series = release(Spas(epsilon=1, window=3), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid[:3], series.values.shape
    ([True, False, False], (4, 2))
    """

    update: Update = "two_windows"
    warm_up: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "warm_up", whole(self.warm_up, "warm_up", at_least=1))
        if self.update not in ("two_windows", "all", "decay"):
            raise InvalidParameter(f"update must be two_windows, all or decay; got {self.update!r}")

    @cached_property
    def testing(self) -> Fraction:
        """epsilon_s, for the tests."""
        return on_grid(self.budget / 4)

    @cached_property
    def publishing(self) -> Fraction:
        """epsilon_p, for the publications."""
        return self.budget - self.testing

    def start(self) -> SpasState:
        """Nothing published, nothing spent."""
        return SpasState(
            published=BudgetWindow(width=self.window),
            runs=BudgetWindow(width=self.window),
            changes=release_changes(self.update, self.window),
        )

    def step(
        self, state: SpasState, x: Integers, spend: Spender
    ) -> tuple[SpasState, list[Release]]:
        """Publish, hold, or let a test decide."""
        now = spend.step
        if now < self.window:
            amount, paid = self._warm_up_share, now % self._warm_up_interval == 0
        else:
            amount = self._by_count(state.count).publication
            state, paid = self._decide(state, x, spend)
        if paid:
            state = self._publish(state, x, amount, spend)
        assert state.values is not None
        release = Release(
            step=now,
            values=state.values.astype(np.float64),
            paid=paid,
            held=not paid,
            stddev=np.full(x.shape, state.stddev),
        )
        return state, [release]

    @cached_property
    def _warm_up_interval(self) -> int:
        return min(self.warm_up, self.window)

    @cached_property
    def _warm_up_share(self) -> Fraction:
        return on_grid(self.publishing / -(-self.window // self._warm_up_interval))

    def _by_count(self, count: int) -> Costs:
        """What follows from C* = `count`."""
        known = self._costs.get(count)
        if known is None:
            publication = on_grid(self.publishing / count)
            run = on_grid(self.testing / (count + 1))
            known = self._costs[count] = Costs(
                publication=publication,
                run=run,
                units=units(publication),
                before_publication=floor_units(self.publishing) - units(publication),
                before_run=floor_units(self.testing) - units(run),
                error=count / self.publishing,
            )
        return known

    @cached_property
    def _costs(self) -> dict[int, Costs]:
        return {}

    def _decide(self, state: SpasState, x: Integers, spend: Spender) -> tuple[SpasState, bool]:
        """After the warm-up. Only the test's answer depends on `x`."""
        costs, now = self._by_count(state.count), spend.step
        spent = state.published.units_before(now)
        if spent > costs.before_publication:
            return state, False
        if self._covers_the_rest(state, spent, costs, now):
            return state, True
        if state.run is None:
            if state.runs.units_before(now) > costs.before_run:
                return state, False
            run = AboveThreshold.open(spend, epsilon=costs.run, sensitivity=histogram_change())
            state = changed(state, run=run)
        assert state.run is not None
        assert state.values is not None
        threshold = len(x) * costs.error
        if not state.run.exceeded(distance(state.values, x), threshold, spend):
            return state, False
        closed = state.runs.paid(now, state.run.epsilon)
        return changed(state, run=None, runs=closed), True

    def _covers_the_rest(self, state: SpasState, spent: int, costs: Costs, now: int) -> bool:
        """Enough is left to publish every step until the window's oldest publication leaves it."""
        if state.count >= self.window:
            return True
        oldest = state.published.first_step(now - self.window + 1)
        if oldest is None:
            return False
        others = oldest + self.window - now - 1
        return spent + others * costs.units <= costs.before_publication

    def _publish(
        self, state: SpasState, x: Integers, amount: Fraction, spend: Spender
    ) -> SpasState:
        noisy = spend.laplace(x, sensitivity=histogram_change(), epsilon=amount, purpose="publish")
        changes, count = state.changes, state.count
        if state.values is not None:
            changes = changes.changed(spend.step, state.values, noisy)
            count = self._count(changes.variance())
        return changed(
            state,
            published=state.published.paid(spend.step, amount),
            changes=changes,
            count=count,
            values=noisy,
            stddev=laplace_stddev(histogram_change(), amount),
        )

    def _count(self, variance: float) -> int:
        """C* = epsilon_p sqrt(3 Var) / 6 (Theorem 1), between 1 and w."""
        best = float(self.publishing) / 6 * math.sqrt(3 * variance)
        return max(1, min(self.window, round(min(best, float(self.window)))))
