"""Choose the pace of publications from past releases alone; spend everything on publishing.

A pace is k publications per window, one every ceil(w / k) steps, each with a k-th of the budget:
more of them follow the stream more closely and are noisier.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender
from dpstream.mechanisms.w_event.pacer_jumps import (
    SHIFT,
    SPIKE,
    Jumps,
    hold,
    learn_jumps,
    no_jumps,
)
from dpstream.mechanisms.w_event.pacer_math import exp
from dpstream.mechanisms.w_event.pacer_models import (
    FULL_BINS,
    Bank,
    Belief,
    Models,
    estimate,
    first_belief,
    flat_prior,
    later,
    models,
)
from dpstream.privacy.amounts import Amount, exact, on_grid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

SHARES = 1 << 40
"""A window's budget is this many equal shares; budgets are whole numbers of them."""

_STEPS = 200  # points at which the error between two publications is looked at
_SHORT = 5  # an interval of so few steps is never too long
_PATIENCE = 2.0  # an error counts little more once it passes this many times the level
_MISSED = 0.25  # of an interval; shifts are missed for half of it, and models expect some of them
_MISSES = 0.05  # of the releases are beyond two deviations, with the noise, if all is well
_WIDENING, _UNSURE, _WIDEST = 0.5, 0.8, 3.0  # log variance per miss, at first, at most
_PROBE = 32  # the first publication costs at most this part of epsilon
_CLEAR = 8.0  # probing ends once the mean count is this many times the noise scale
_SLOWING = 2  # at most this many times slower from one publication to the next


def _none() -> Integers:
    return np.zeros(0, np.int64)


def _nothing() -> Reals:
    return np.zeros(0)


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
    jumps: Jumps | None = None
    held: Reals | None = None
    variance: Reals = field(default_factory=_nothing)  # of the true counts around them
    growth: Reals = field(default_factory=_nothing)  # of the variance, per step
    widening: Reals = field(default_factory=_nothing)  # log of what it is multiplied by
    prior: Reals = field(default_factory=flat_prior)
    held_prior: Reals = field(default_factory=flat_prior)

    @cached_property
    def factor(self) -> Reals:
        """What the variance is multiplied by."""
        return np.exp(self.widening)


@dataclass(frozen=True, kw_only=True)
class Pacer(HistogramMechanism, identity="pacer", keys="gamma"):
    """Publish every so many steps, as often as past releases say that it pays.

    Nothing is spent on looking. A bank of filters learns from the releases how fast and how
    restlessly each count moves; the pace with the least expected error is taken next. What is
    published is the filters' estimate, a whole number from 0 up that minimises the expected
    |error| / max(count, 1)^`gamma` (0: absolute error; 1: relative error). A release far from
    what was expected may be a shift or a one-step spike: until the next release tells, both are
    weighed. `stddev` is the root of the expected squared error of what is published, by the
    whole mixture of filters, given all releases so far: it grows with every held step, includes
    shrinkage, and is larger where releases were further from held counts than was expected.

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

    remembers: ClassVar[Remembers] = "answers"

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

    @cached_property
    def _floats(self) -> tuple[float, float]:
        """Epsilon and gamma, for all that is computed from releases."""
        return float(self.budget), float(self.gamma)

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
        since = float(spend.step - int(state.steps[-1]))
        stddev = deviations(state.factor, state.variance, state.growth, since)
        release = Release(step=spend.step, values=state.held, paid=False, held=True, stddev=stddev)
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
        epsilon, gamma = self._floats
        grid = models(epsilon, self.window, thin=len(z) > FULL_BINS)
        if state.bank is None:
            bank, belief = first_belief(z, scale, grid)
            jumps, widening = no_jumps(len(z), self.window), np.full(len(z), _UNSURE)
        else:
            assert state.jumps is not None
            assert state.held is not None
            gap = now - int(state.steps[-1])
            widening = widen(
                state.widening,
                state.factor,
                state.variance,
                state.growth,
                float(gap),
                state.held,
                z,
                2.0 * scale * scale,
            )
            jumps, bank, belief = learn_jumps(
                state.jumps, state.bank, z, scale, gap, grid, self.window
            )
        count, due, probing = self._choose_pace(state, bank, belief, jumps, scale, grid, now)
        until = hold(jumps, later(bank, 0.5 * (due - now), grid), 0.5 * (due - now), grid, gamma)
        values, prior, shrunk = estimate(
            belief.count, belief.typical_variance, state.prior, gamma=gamma
        )
        held, held_prior, held_shrunk = estimate(
            until.level, until.typical, state.held_prior, gamma=gamma
        )
        # those of the window of the next step
        steps, paid = spent(state.steps, state.shares, now - self.window + 2, now, shares)
        state = PacerState(
            count=count,
            due=due,
            probing=probing,
            steps=steps,
            shares=paid,
            bank=bank,
            jumps=jumps,
            held=held,
            variance=held_shrunk * until.variance,
            growth=held_shrunk * until.growth,
            widening=widening,
            prior=prior,
            held_prior=held_prior,
        )
        stddev = np.sqrt(shrunk * belief.variance)
        return state, Release(step=now, values=values, paid=True, stddev=stddev)

    def _choose_pace(
        self,
        state: PacerState,
        bank: Bank,
        belief: Belief,
        jumps: Jumps,
        scale: float,
        grid: Models,
        now: int,
    ) -> tuple[int, int, bool]:
        """Probe with twice the budget at once, or settle for a pace: its count, when next."""
        log_error = log_errors(self._floats[0], self.window, grid)
        position = best(
            bank.weight,
            bank.level,
            log_error,
            jumps.sizes,
            jumps.steps,
            intervals(self.window),
        )
        if state.probing:
            clear = float(np.maximum(belief.count, 0.0).mean()) >= _CLEAR * scale
            if not clear and state.count > 2:
                return max(2, state.count // 2), now + 1, True
        else:
            position = max(position, bisect_left(counts(self.window), state.count / _SLOWING))
        count = counts(self.window)[position]
        return count, now + interval(self.window, count), False


@njit(cache=True, nogil=True, error_model="numpy")
def deviations(factor: Reals, variance: Reals, growth: Reals, since: float) -> Reals:
    """Of held counts, so many steps after the release."""
    out = np.empty(len(factor))
    for j in range(len(factor)):
        out[j] = math.sqrt(factor[j] * (variance[j] + growth[j] * since))
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def widen(
    widening: Reals,
    factor: Reals,
    variance: Reals,
    growth: Reals,
    since: float,
    held: Reals,
    z: Reals,
    noise: float,
) -> Reals:
    """The log of a factor for the variance of held counts, such that most releases were within.

    A miss of two deviations widens, a hit narrows a little, so that in the long run about _MISSES
    of them miss: Gibbs, Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021. The
    models' own variance is never made smaller.
    """
    out = np.empty(len(z))
    for j in range(len(z)):
        away, expected = z[j] - held[j], factor[j] * (variance[j] + growth[j] * since)
        missed = 1.0 if away * away > 4.0 * (expected + noise) else 0.0
        out[j] = min(max(widening[j] + _WIDENING * (missed - _MISSES), 0.0), _WIDEST)
    return out


@lru_cache(maxsize=64)
def counts(window: int) -> tuple[int, ...]:
    """Publications per window to choose from, ascending, about 30% apart; the last is w.

    Equal intervals give equal counts, so only one of them is kept. A pace that spends most of a
    window's budget at once could not react to what it sees, so an interval is at most a third of
    the window (or _SHORT steps).

    >>> counts(8), counts(40), counts(1)
    ((2, 3, 4, 8), (3, 4, 5, 7, 8, 10, 14, 20, 40), (1,))
    """
    count = float(-(-window // max(_SHORT, -(-window // 3))))
    chosen = {window}
    while count < window:
        chosen.add(-(-window // interval(window, round(count))))
        count = max(1.3 * count, count + 1)
    return tuple(sorted(chosen))


@lru_cache(maxsize=64)
def intervals(window: int) -> Reals:
    """The steps between publications, for each of `counts`."""
    return np.array([float(interval(window, count)) for count in counts(window)])


def interval(window: int, count: int) -> int:
    """Steps from one publication to the next."""
    return -(-window // count)


@lru_cache(maxsize=64)
def log_errors(epsilon: float, window: int, grid: Models) -> Reals:
    """Models x counts: the log of the mean standard deviation once a model's filter has settled."""
    columns = []
    for count in counts(window):
        steps = interval(window, count)
        noise = 2.0 * (count / epsilon) ** 2
        seen, moved = noise + grid.white, grid.drift * steps
        before = 0.5 * (moved + np.sqrt(moved**2 + 4.0 * moved * seen))
        after = before * seen / (before + seen)
        total = before + grid.white
        error = np.sqrt(total * noise / (total + noise))
        if steps > 1:
            ages = np.unique(np.linspace(1, steps - 1, min(steps - 1, _STEPS)))
            held = np.sqrt((after + grid.white)[:, None] + np.outer(grid.drift, ages))
            error += (steps - 1) * held.mean(axis=1)
        columns.append(np.log(error / steps))
    return np.stack(columns, axis=1)


@njit(cache=True, nogil=True, error_model="numpy")
def best(
    weight: Reals, level: Reals, log_error: Reals, sizes: Reals, steps: float, intervals: Reals
) -> int:
    """The position in `counts` with the least error, bins weighted by 1 / sqrt(level).

    Per bin the log error is averaged over models: while unsure, a ratio too slow is as bad as the
    same ratio too fast. `sizes` (spikes, shifts x bins) are those of jumps in `steps`: a shift
    is missed for half an interval in the mean, a spike wherever a count is held.
    """
    bins, size = weight.shape
    options = log_error.shape[1]
    score, mean = np.zeros(options), np.empty(options)
    for j in range(bins):
        for c in range(options):
            mean[c] = 0.0
        for g in range(size):
            if weight[j, g] > 1e-8:
                for c in range(options):
                    mean[c] += weight[j, g] * log_error[g, c]
        scale = max(level[j], 1.0)
        enough, root = _PATIENCE * scale, math.sqrt(scale)
        spike, shift = sizes[SPIKE, j] / steps, sizes[SHIFT, j] / steps
        for c in range(options):
            error = exp(mean[c]) + _MISSED * shift * (intervals[c] - 1.0)
            score[c] += error * enough / ((error + enough) * root)
            score[c] += spike * (1.0 - 1.0 / intervals[c]) / root
    least = 0
    for c in range(1, options):
        if score[c] < score[least]:
            least = c
    return least


@njit(cache=True, nogil=True)
def spent(
    steps: Integers, shares: Integers, first: int, now: int, newest: int
) -> tuple[Integers, Integers]:
    """Paid steps from `first` on and their shares, with what was spent `now`."""
    left = 0
    while left < len(steps) and steps[left] < first:
        left += 1
    size = len(steps) - left
    new_steps, new_shares = np.empty(size + 1, np.int64), np.empty(size + 1, np.int64)
    for i in range(size):
        new_steps[i], new_shares[i] = steps[left + i], shares[left + i]
    new_steps[size], new_shares[size] = now, newest
    return new_steps, new_shares


@njit(cache=True, nogil=True)
def sustainable(
    steps: Integers, shares: Integers, now: int, window: int, count: int, every: int
) -> int:
    """The most shares, up to a count-th, that `now` and each `every` steps after it can spend.

    `steps`, `shares`: what was spent, oldest first. The publication n intervals from now shares
    its window with n others like it and with what is left there of the past.
    """
    most = SHARES // count
    spent, newest = 0, len(steps) - 1
    for n in range(count - 1, -1, -1):
        while newest >= 0 and steps[newest] > now + n * every - window:
            spent += shares[newest]
            newest -= 1
        most = min(most, (SHARES - spent) // (n + 1))
    return most
