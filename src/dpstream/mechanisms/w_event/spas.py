"""Predict how often to publish from past releases; publish where a private test sees a change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender, release_or_hold, whole
from dpstream.mechanisms.parts.above_threshold import AboveThreshold, with_changes
from dpstream.mechanisms.parts.publish_or_hold import BudgetWindow, distance
from dpstream.privacy.amounts import Amount, exact, floor_units, laplace_stddev, on_grid, units
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

Update = Literal["two_windows", "all", "decay"]


@storable("changes in two windows")
@dataclass(frozen=True, kw_only=True, eq=False)
class TwoWindows:
    """Changes in the last `windows` windows, their mean taken off; two are the paper's choice.

    >>> last = TwoWindows(window=2).add(1, np.array([0]), np.array([3]))
    >>> last.add(2, np.array([3]), np.array([8])).variance()
    1.0
    """

    window: int
    windows: int = 2
    entries: Reals = field(default_factory=lambda: np.empty((0, 3)))
    """Rows of (step, mean |change|, mean squared change)."""

    def add(self, step: int, old: Integers, new: Integers) -> TwoWindows:
        """Forget what is too old, add one change."""
        oldest = step - self.windows * self.window + 1
        mean, square = _mean(np.abs(new - old).astype(np.float64)), _mean_square(old, new)
        recent = self.entries[self.entries[:, 0] >= oldest]
        entries = np.vstack([recent, [(step, mean, square)]])
        return TwoWindows(window=self.window, windows=self.windows, entries=entries)

    def variance(self) -> float:
        """Mean square less squared mean."""
        if not len(self.entries):
            return 0.0
        mean, square = self.entries[:, 1:].sum(axis=0) / len(self.entries)
        return max(0.0, float(square - mean * mean))


@storable("all changes")
@dataclass(frozen=True, kw_only=True)
class AllHistory:
    """Mean squared change over the whole stream."""

    total: float = 0.0
    count: int = 0

    def add(self, step: int, old: Integers, new: Integers) -> AllHistory:
        """Add one squared change."""
        return AllHistory(total=self.total + _mean_square(old, new), count=self.count + 1)

    def variance(self) -> float:
        """The running mean."""
        return self.total / self.count if self.count else 0.0


@storable("decayed changes")
@dataclass(frozen=True, kw_only=True, eq=False)
class Decayed:
    """Squared changes, divided by `base` for every window begun since, over the number of all.

    Changes whose steps are equal modulo w decay together, so w sums are enough.
    """

    phases: Reals = field(repr=False)
    step: int = 0
    count: int = 0
    base: float = 2.0

    def add(self, step: int, old: Integers, new: Integers) -> Decayed:
        """Divide what has aged, then add one squared change."""
        width = len(self.phases)
        phase = np.arange(width)
        turns = (step - phase) // width - (self.step - phase) // width
        phases = self.phases * self.base**-turns
        phases[step % width] += _mean_square(old, new)
        return Decayed(phases=phases, step=step, count=self.count + 1, base=self.base)

    def variance(self) -> float:
        """The decayed sum over the count; a change of this very step has not decayed yet."""
        if not self.count:
            return 0.0
        now = float(self.phases[self.step % len(self.phases)])
        total = float(self.phases.sum()) + (self.base - 1) * now
        return total / (self.base * self.count)


def _mean_square(old: Integers, new: Integers) -> float:
    return _mean(np.square((new - old).astype(np.float64)))


def _mean(values: Reals) -> float:
    return float(values[0]) if len(values) == 1 else float(values.mean())


ReleaseChanges = TwoWindows | AllHistory | Decayed
"""How much successive publications differ: one of the three updates of the paper's section 4.

Each keeps a state that does not grow with the stream. Only released values are read.
"""


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
class Spas(
    HistogramMechanism, identity="spas", keys="update warm_up theta decay_base testing_share"
):
    """Publish with epsilon_p / C*, C* the sampling count that past releases make optimal.

    epsilon_p is 3/4 of epsilon; the tests' runs share the rest, which is `testing_share` of it. The
    first window publishes every `warm_up` steps. `update` names how C* looks back: over two
    windows, over everything ("all"), or with "decay", by a factor of `decay_base` for each window.
    `theta` is the share of held steps that C* takes the tests to have missed. Values are those of
    the last publication: counts plus noise, not clamped.

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

    remembers: ClassVar[Remembers] = "thresholds"

    update: Update = "two_windows"
    warm_up: int = 20
    theta: Amount = Fraction(1, 2)
    decay_base: Amount = 2
    testing_share: Amount = Fraction(1, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "warm_up", whole(self.warm_up, "warm_up", at_least=1))
        if self.update not in get_args(Update):
            raise InvalidParameter(f"update must be two_windows, all or decay; got {self.update!r}")
        for name, least, most in (
            ("theta", 0, 1),
            ("decay_base", 1, math.inf),
            ("testing_share", 0, 1),
        ):
            value = Fraction(exact(getattr(self, name), name))
            object.__setattr__(self, name, value)
            if not least < value or value > most or (value == most and name == "testing_share"):
                raise InvalidParameter(f"{name} must lie between {least} and {most}; got {value}")

    def written(self) -> dict[str, Any]:
        """Parameters that came later have a key only where they differ from what was always so."""
        usual = {"theta": Fraction(1, 2), "decay_base": 2, "testing_share": Fraction(1, 4)}
        return {k: v for k, v in super().written().items() if k not in usual or v != usual[k]}

    @cached_property
    def testing(self) -> Fraction:
        """epsilon_s, for the tests."""
        return on_grid(self.budget * Fraction(self.testing_share))

    @cached_property
    def publishing(self) -> Fraction:
        """epsilon_p, for the publications."""
        return self.budget - self.testing

    def start(self) -> SpasState:
        """Nothing published, nothing spent."""
        changes: dict[Update, ReleaseChanges] = {
            "two_windows": TwoWindows(window=self.window),
            "all": AllHistory(),
            "decay": Decayed(phases=np.zeros(self.window), base=float(self.decay_base)),
        }
        empty = BudgetWindow(width=self.window)
        return SpasState(published=empty, runs=empty, changes=changes[self.update])

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
        return state, [release_or_hold(now, state.values, paid=paid, stddev=state.stddev)]

    @cached_property
    def _warm_up_interval(self) -> int:
        return min(self.warm_up, self.window)

    @cached_property
    def _warm_up_share(self) -> Fraction:
        return on_grid(self.publishing / -(-self.window // self._warm_up_interval))

    def _by_count(self, count: int) -> Costs:
        """What follows from C* = `count`."""
        costs = self._costs.get(count)
        if costs is None:
            publication = on_grid(self.publishing / count)
            run = on_grid(self.testing / (count + 1))
            costs = self._costs[count] = Costs(
                publication=publication,
                run=run,
                units=units(publication),
                before_publication=floor_units(self.publishing) - units(publication),
                before_run=floor_units(self.testing) - units(run),
                error=count / self.publishing,
            )
        return costs

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
        run = state.run
        if run is None:
            if state.runs.units_before(now) > costs.before_run:
                return state, False
            run = AboveThreshold.open(spend, epsilon=costs.run, sensitivity=histogram_change())
            state = with_changes(state, run=run)
        assert state.values is not None
        if not run.exceeds(distance(state.values, x), len(x) * costs.error, spend):
            return state, False
        return with_changes(state, run=None, runs=state.runs.pay(now, run.epsilon)), True

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
        noisy = self.perturb(x, amount, spend)
        changes, count = state.changes, state.count
        if state.values is not None:
            changes = changes.add(spend.step, state.values, noisy)
            count = self._count(changes.variance())
        return with_changes(
            state,
            published=state.published.pay(spend.step, amount),
            changes=changes,
            count=count,
            values=noisy,
            stddev=laplace_stddev(histogram_change(), amount),
        )

    def _count(self, variance: float) -> int:
        """C* of Theorem 1, between 1 and w: epsilon_p sqrt(3 Var) / 6 for theta = 1/2."""
        publishing = float(self.publishing)
        best = publishing / 6 * math.sqrt(3 * variance)
        if self.theta != Fraction(1, 2):
            best = best_count(variance, publishing, self.window, float(self.theta))
        return max(1, min(self.window, round(min(best, float(self.window)))))


def best_count(variance: float, epsilon: float, window: int, theta: float) -> float:
    """The count at which `window_variance` is least.

    >>> round(best_count(10.0, 1.0, 10, 0.5), 3), round(best_count(1000.0, 1.0, 10, 0.25), 3)
    (0.913, 6.385)
    """
    rest = (1 - 2 * theta) * window
    return (math.sqrt(rest**2 + 3 * theta**2 * variance * epsilon**2) - rest) / (6 * theta)


def window_variance(
    count: float, variance: float, epsilon: float, window: int, theta: float
) -> float:
    """The error of a window with `count` publications, if tests miss `theta` of what they hold.

    Equation 2 of the paper: missed steps are as far off as releases are from one another, all
    others as a publication's noise.
    """
    missed, noise = theta * (window - count), 2 * (count / epsilon) ** 2
    return missed * variance + (window - 2 * missed) * noise
