"""Choose the pace of publications from past releases alone; spend everything on publishing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.w_event.pacer_estimate import (
    SHARES,
    Paces,
    best,
    counts,
    estimate,
    flat_prior,
    interval,
    paces,
    remember,
    sustainable,
)
from dpstream.mechanisms.w_event.pacer_models import (
    FULL_BINS,
    Bank,
    Belief,
    Models,
    first_belief,
    later_variance,
    learn,
    models,
)
from dpstream.privacy.amounts import Amount, exact, on_grid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

_PROBE = 32  # the first publication costs at most this part of epsilon
_CLEAR = 8.0  # probing ends once the mean count is this many times the noise scale
_SLOWING = 2  # at most this many times slower from one publication to the next


def _none() -> Integers:
    return np.zeros(0, np.int64)


@storable("pacer state")
@dataclass(frozen=True, kw_only=True, eq=False)
class PacerState:
    """Beliefs, the pace, what the window has paid, and what is published until the next time."""

    count: int  # publications per window
    due: int = 0
    probing: bool = True
    steps: Integers = field(default_factory=_none)  # paid steps of the window, oldest first
    shares: Integers = field(default_factory=_none)  # and their budgets
    bank: Bank | None = None
    held: Reals | None = None
    stddev: Reals | None = None
    prior: Reals = field(default_factory=flat_prior)
    held_prior: Reals = field(default_factory=flat_prior)


@dataclass(frozen=True, kw_only=True)
class Pacer(HistogramMechanism, identity="pacer", keys="gamma"):
    """Publish every so many steps, as often as past releases say that it pays.

    Nothing is spent on looking. A bank of filters learns from the releases how fast and how
    restlessly each count moves; the pace with the least expected error is taken next. What is
    published is the filters' estimate, a whole number from 0 up that minimises the expected
    |error| / max(count, 1)^`gamma` (0: absolute error; 1: relative error). `stddev` is the
    filters' own standard deviation of the true count, given all releases so far: it includes
    how far the stream may have moved since, and is as good as their models of the stream.

    Guarantee: w-event epsilon-DP, w = `window`: counts are read by publications only, each of
        which takes no more than the window has left; all else is computed from releases.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: dpstream's own. Nearest: Fan, Xiong, "An Adaptive Approach to Real-Time Aggregate
        Monitoring with Differential Privacy", 2014 (filtering and adaptive sampling; one model,
        user level).

    >>> from dpstream import release
    >>> series = release(Pacer(epsilon=1, window=4), [[500, 80]] * 9, secret=bytes(32))
    >>> series.paid[0], series.values.shape
    (True, (9, 2))
    """

    gamma: Amount = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "gamma", exact(self.gamma, "gamma"))
        if not 0 <= Fraction(self.gamma) <= 1:
            raise InvalidParameter(f"gamma must be from 0 to 1; got {self.gamma}")

    @cached_property
    def share(self) -> Fraction:
        """The smallest budget: epsilon / 2^40."""
        return on_grid(self.budget / SHARES)

    def start(self) -> PacerState:
        """Nothing is known: begin with small, quick publications."""
        return PacerState(count=min(_PROBE, self.window))

    def step(
        self, state: PacerState, x: Integers, spend: Spender
    ) -> tuple[PacerState, list[Release]]:
        """Publish if it is time and can be paid; else hold."""
        shares = self._affordable(state, spend.step) if spend.step >= state.due else 0
        if shares:
            budget = shares * self.share
            z = self.perturb(x, budget, spend).astype(np.float64)
            scale = 1.0 / float(budget)
            state, release = self._learn(state, z, shares, scale, spend.step)
            return state, [release]
        assert state.held is not None
        release = Release(
            step=spend.step, values=state.held, paid=False, held=True, stddev=state.stddev
        )
        return state, [release]

    def _affordable(self, state: PacerState, now: int) -> int:
        """Shares to spend now; 0 if the window has too little left."""
        fair = SHARES // state.count
        every = interval(self.window, state.count)
        if state.probing:
            inside = state.steps > now - self.window
            shares = min(fair, SHARES - int(state.shares[inside].sum()))
        else:
            shares = int(
                sustainable(state.steps, state.shares, now, self.window, state.count, every)
            )
        return shares if 10 * shares >= fair else 0

    def _learn(
        self, state: PacerState, z: Reals, shares: int, scale: float, now: int
    ) -> tuple[PacerState, Release]:
        """All that follows from a release: beliefs, pace, estimates."""
        grid, choices = self._public(len(z))
        if state.bank is None:
            bank, belief = first_belief(z, scale, grid)
        else:
            bank, belief = learn(state.bank, z, scale, now - int(state.steps[-1]), grid)
        count, due, probing = self._choose_pace(state, bank, belief, scale, choices, now)
        variance = later_variance(bank, belief, 0.5 * (due - now), grid)
        gamma = float(self.gamma)
        values, prior = estimate(belief.count, belief.count_variance, state.prior, gamma=gamma)
        held, held_prior = estimate(belief.level, variance, state.held_prior, gamma=gamma)
        steps, spent = remember(state.steps, state.shares, now, shares, self.window)
        state = PacerState(
            count=count,
            due=due,
            probing=probing,
            steps=steps,
            shares=spent,
            bank=bank,
            held=held,
            stddev=np.sqrt(variance),
            prior=prior,
            held_prior=held_prior,
        )
        stddev = np.sqrt(belief.count_variance)
        return state, Release(step=now, values=values, paid=True, stddev=stddev)

    def _choose_pace(
        self,
        state: PacerState,
        bank: Bank,
        belief: Belief,
        scale: float,
        choices: Paces,
        now: int,
    ) -> tuple[int, int, bool]:
        """Probe with twice the budget at once, or settle for a pace: its count, when next."""
        position = best(bank, choices)
        if state.probing:
            clear = float(np.maximum(belief.count, 0.0).mean()) >= _CLEAR * scale
            if not clear and state.count > 2:
                return max(2, state.count // 2), now + 1, True
        else:
            position = max(position, bisect_left(counts(self.window), state.count / _SLOWING))
        count = counts(self.window)[position]
        return count, now + interval(self.window, count), False

    def _public(self, bins: int) -> tuple[Models, Paces]:
        epsilon = float(self.budget)
        grid = models(epsilon, self.window, thin=bins > FULL_BINS)
        return grid, paces(epsilon, self.window, grid)
