"""Mechanisms as their papers print them, where the printed form loses more than it claims.

Each says what is wrong, and is charged for what it draws, so that the ledger refuses it; where the
ledger cannot see the fault, a function computes what one outcome loses exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpstream.audit.replay import Recorder, drive, replay
from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.infinite.dpi import Dpi, DpiState, Memory
from dpstream.mechanisms.parts.above_threshold import AboveThreshold
from dpstream.mechanisms.parts.grouping import GRID, Grouping
from dpstream.mechanisms.parts.publish_or_hold import distance
from dpstream.mechanisms.w_event.adapub import AdaPub
from dpstream.mechanisms.w_event.budget_distribution import BudgetDistribution
from dpstream.mechanisms.w_event.dsat import Dsat, DsatState
from dpstream.mechanisms.w_event.fast import FastW
from dpstream.mechanisms.w_event.pegasus_w import THRESHOLD, PegasusW
from dpstream.mechanisms.w_event.spas import Spas, SpasState
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.ledger.charges import Cells
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers, Reals, Release

_State = TypeVar("_State", DsatState, SpasState)
_FAR = 10**6
THETA = 3.0
"""ContinGroup's threshold in the paper's figures, in the unit of the data."""


def _with_lasting_run(state: _State, epsilon: Fraction, spend: Spender) -> _State:
    """The state with its only run of tests, which is never closed."""
    if state.run is not None:
        return state
    run = AboveThreshold.open(spend, epsilon=epsilon, sensitivity=histogram_change())
    return replace(state, run=run)


def _is_above(
    state: DsatState | SpasState,
    moved: int,
    threshold: Any,
    spend: Spender,
    *,
    test: Fraction,
    positive: Fraction,
) -> bool:
    """One test against the run's rho; a positive is charged to every window, for rho is shared."""
    assert state.run is not None
    noisy = spend.laplace(
        np.array([moved]),
        sensitivity=histogram_change(),
        epsilon=on_grid(test),
        purpose="test",
        interval=state.run.interval,
    )
    above = bool(int(noisy[0]) - state.run.rho > threshold)
    if above:
        spend.open_interval(on_grid(positive), purpose="positive")
    return above


@dataclass(frozen=True, kw_only=True)
class SpasPublished(Spas, identity="control/spas"):
    """Algorithm 2 of the SPAS paper: one rho for the whole stream, test budget moved elsewhere.

    What is wrong: the noise rho is drawn once, so the outcomes of ever more tests reveal it. A
    neighbour's tests are then protected by their own noise alone, test by test, and the shift of
    rho that the proof makes has to be paid by every positive of the stream, not of one window. The
    first window spends epsilon on publications alone, more than epsilon if the interval does not
    divide w, and direct publications take test budget that is still in use. A ledger refuses that
    sooner or later, at the latest after a few positives.
    """

    @cached_property
    def _warm_up_share(self) -> Fraction:
        return on_grid(self.budget * self._warm_up_interval / self.window)

    def _decide(self, state: SpasState, x: Integers, spend: Spender) -> tuple[SpasState, bool]:
        costs, now = self._by_count(state.count), spend.step
        spent = state.published.units_before(now)
        half = on_grid(self.testing / 2)
        state = _with_lasting_run(state, half, spend)
        assert state.values is not None
        if spent > costs.before_publication:
            return state, False
        if self._covers_the_rest(state, spent, costs, now):
            return state, True
        return state, _is_above(
            state,
            np.abs(state.values - x).sum(),
            len(x) * costs.error,
            spend,
            test=half / (2 * state.count * len(x)),
            positive=half / state.count,
        )


def svt_loss(
    distances: Sequence[float],
    neighbour: Sequence[float],
    outcomes: Sequence[bool],
    *,
    threshold: float,
    rho_scale: float,
    nu_scale: float,
) -> float:
    """Log ratio of the probabilities of these outcomes, when one rho serves all the tests.

    Summed over rho on the integers; nu has the continuous law, whose distribution function is
    closed.
    """
    farthest = max(abs(threshold - value) for value in (*distances, *neighbour))
    reach = math.ceil(40 * (rho_scale + nu_scale) + farthest)
    rho = np.arange(-reach, reach + 1, dtype=np.float64)
    prior = -np.abs(rho) / rho_scale
    log_likelihoods = []
    for stream in (distances, neighbour):
        total = prior.copy()
        for value, above in zip(stream, outcomes, strict=True):
            total += _log_tail((threshold + rho - value) / nu_scale, above=above)
        log_likelihoods.append(float(np.logaddexp.reduce(total)))
    return log_likelihoods[0] - log_likelihoods[1]


def _log_tail(at: Reals, *, above: bool) -> Reals:
    """Log P[Lap(1) > at], or log P[Lap(1) <= at]."""
    side = at if above else -at
    tail: Reals = np.where(
        side >= 0, math.log(0.5) - side, np.log1p(-0.5 * np.exp(np.minimum(side, 0.0)))
    )
    return tail


@dataclass(frozen=True, kw_only=True)
class DsatPublished(Dsat, identity="control/dsat"):
    """DSAT as one sparse vector for the whole stream, charged for what it draws.

    What is wrong: as in `SpasPublished`; a proof for one positive does not cover the next one, and
    positives outside a window reveal the noise that protects the tests inside it. Half of the test
    budget is for the threshold, the other half for c positives per window.
    """

    def _decide(self, state: DsatState, x: Integers, spend: Spender) -> tuple[DsatState, bool]:
        if state.values is None:
            return state, True
        half = on_grid(self.testing / 2)
        state = _with_lasting_run(state, half, spend)
        assert state.values is not None
        if state.published.units_before(spend.step) > self._limits[0]:
            return state, False
        return state, _is_above(
            state,
            distance(state.values, x),
            self._threshold(state.values, state.factor),
            spend,
            test=half / (2 * self.samples),
            positive=half / self.samples,
        )


@dataclass(frozen=True, kw_only=True)
class PegasusWPublished(PegasusW, identity="control/pegasus_w"):
    """PeGaSuS with Lap(2 / eps_g) and Lap(4 / eps_g) for its tests, charged as 2 eps_g.

    What is wrong: a deviation moves by two when a count moves by one, and the noise is for one.
    """

    @cached_property
    def share(self) -> Fraction:
        """What the paper gives a step's counts."""
        return on_grid(self.budget / self.window - self._claimed)

    @cached_property
    def grouping(self) -> Grouping:
        """Half of the sound noise is the sound noise of twice the budget."""
        return Grouping(epsilon=2 * self._claimed, change=histogram_change(), longest=self.window)

    @cached_property
    def theta(self) -> Integers:
        """The threshold that the claimed eps_g gives."""
        return np.array([math.ceil(GRID * THRESHOLD / self._claimed)])

    @cached_property
    def _claimed(self) -> Fraction:
        return on_grid(self.budget / (5 * self.window))


@dataclass(frozen=True, kw_only=True)
class AdaPubPublished(AdaPub, identity="control/adapub"):
    """AdaPub with a fifth of epsilon for the tests of every single step.

    What is wrong: the budget of the counts is divided by the window, that of the tests is not.
    """

    @cached_property
    def share(self) -> Fraction:
        """What the paper gives a step's counts."""
        return on_grid(4 * self.budget / (5 * self.window))

    @cached_property
    def grouping(self) -> Grouping:
        """The tests of one step with the budget of a whole window."""
        epsilon = on_grid(self.budget / 5)
        return Grouping(epsilon=epsilon, change=histogram_change(), longest=self.window)


class SomeColumns:
    """A Spender for the columns `first` to `last` - 1: charges name their bins."""

    def __init__(self, spend: Spender, first: int, last: int) -> None:
        self._spend, self.step, self._columns = spend, spend.step, (first, last)

    def laplace(self, value: npt.ArrayLike, *, purpose: str, **asked: Any) -> Integers:
        """Noise of its own, charged to these columns alone."""
        asked["cells"] = Cells(first=self.step, last=self.step, bins=(self._columns,))
        purpose = f"{purpose} from {self._columns[0]}"
        return self._spend.laplace(value, purpose=purpose, **asked)


@dataclass(frozen=True, kw_only=True)
class ColumnsApart(HistogramMechanism, identity="control/columns_apart", keys="scheme groups"):
    """An instance of `scheme` for each of `groups` groups of neighbouring columns (0: each column).

    What is wrong: each has the whole of epsilon. One event per step changes one column, so one step
    of one instance is within its claim; but the instances pay at different steps, and a unit that
    is in another group at each step meets the payments of all of them. FAST is published so, with a
    schedule per column (Fan, Xiong, 2014), and so are the column groups of budget distribution and
    budget absorption (Kellaris, Papadopoulos, Xiao, Papadias, 2014, section 4.5). The ledger, which
    takes the worst bin of every step, sees it.

    >>> ColumnsApart(epsilon=1, window=20).scheme.__name__
    'FastW'
    """

    scheme: type[HistogramMechanism] = FastW
    groups: int = 0

    @cached_property
    def instance(self) -> Any:
        """The scheme, with the whole of epsilon."""
        return self.scheme(epsilon=self.epsilon, window=self.window)

    def start(self) -> tuple[Any, ...]:
        """The number of columns is not known yet."""
        return ()

    def step(
        self, state: tuple[Any, ...], x: Integers, spend: Spender
    ) -> tuple[tuple[Any, ...], list[Release]]:
        """One step of every instance."""
        count = min(self.groups or len(x), len(x))
        edges = [len(x) * i // count for i in range(count + 1)]
        states, parts = [], []
        for i, (first, last) in enumerate(pairwise(edges)):
            before = state[i] if state else self.instance.start()
            after, (release,) = self.instance.step(
                before, x[first:last], SomeColumns(spend, first, last)
            )
            states.append(after)
            parts.append(release)
        values = np.concatenate([part.values for part in parts])
        paid = any(part.paid for part in parts)
        return tuple(states), [Release(step=spend.step, values=values, paid=paid, held=not paid)]


def trajectory_loss(window: int, groups: int) -> float:
    """What `ColumnsApart` over budget distribution loses to events that follow the publications.

    A trajectory that is always in the group which publishes meets more publications than any one
    group makes in a window: at w = 12 it loses 1.48 epsilon with 2 groups, 3.5 epsilon with 12.
    Each column publishes in turn, after two windows in which all budgets come back. The outcome is
    one that noise can give, and the events move every draw in the direction of the noise, so that
    the costs of all draws add up.
    """
    mechanism = ColumnsApart(epsilon=1, window=window, scheme=BudgetDistribution)
    start = 2 * window
    stream = np.zeros((start + window, groups), np.int64)
    events = stream.copy()
    for step in range(start, start + window):
        events[step, step % groups] += 1
    recorder = Recorder(_Outcome(start, groups))  # type: ignore[arg-type]
    drive(mechanism, stream, recorder)
    return float(replay(mechanism, events, recorder.calls).loss)


class _Outcome:
    """Answers that noise could give: each column's comparison says yes in its turn, else no."""

    def __init__(self, start: int, groups: int) -> None:
        self._start, self._groups, self._step = start, groups, -1

    def begin(self, step: int, digest: Any) -> None:
        self._step = step

    def laplace(self, value: npt.ArrayLike, *, purpose: str, **_: Any) -> Integers:
        exact, (kind, column) = np.asarray(value), purpose.split(" from ")
        if kind != "dissimilarity":
            return exact
        turn = self._step >= self._start and self._step % self._groups == int(column)
        return exact + (_FAR if turn else -_FAR)


def grouping_loss(
    stream: Sequence[float], neighbour: Sequence[float], *, epsilon: float, theta: float
) -> float:
    """Log ratio of the chances that all values but the last join one group, and the last fails.

    The noise is that of ContinGroup as printed for eps_g = `epsilon`, in a range of length 1: rho
    has scale 2 Delta / eps_g and nu 4 Delta / eps_g, half of what tests need whose deviations move
    by 2 Delta (1 - 1/n). (Li et al., "Delay-allowed Differentially Private Data Stream Release",
    2025.) The largest loss that was found is 1.07 eps_g, at eps_g = 0.01: 74 zeros, one of which is
    1 in the neighbour, then 25 ones, then a failure.
    """
    grid = max(1, round(64 * epsilon))  # svt_loss sums rho over whole numbers
    outcomes = [False] * (len(stream) - 1) + [True]
    return svt_loss(
        [grid * _deviation(stream[: n + 1]) for n in range(len(stream))],
        [grid * _deviation(neighbour[: n + 1]) for n in range(len(neighbour))],
        outcomes,
        threshold=grid * theta,
        rho_scale=grid * 2 / epsilon,
        nu_scale=grid * 4 / epsilon,
    )


def _deviation(values: Sequence[float]) -> float:
    return float(np.abs(np.asarray(values) - np.mean(values)).sum())


@dataclass(frozen=True, kw_only=True)
class DpiPublished(Dpi, identity="control/dpi"):
    """DPI as printed: weights from the sum of all past scores, charged as if it were one score.

    What is wrong: Theorem 5.1 bounds the change of one slot's score by 2 Delta_Q / mu and charges
    each slot for that. Algorithm 1 weighs exp(-alpha_t sum_j score_j): a user who is in every slot
    moves every summand, so slot t costs t times what was charged, and the whole stream the sum of
    t eps_t, which no series of the order 1 / t^2 keeps finite. The ledger cannot see it, for the
    charges are those of the paper. The replay does: the sums move by more than was declared.
    """

    def _choose(
        self, scores: Memory, purpose: str, change: Fraction, epsilon: Fraction, spend: Spender
    ) -> int:
        return spend.choose(scores.sums, sensitivity=change, epsilon=epsilon, purpose=purpose)


class DpiGapsOfData(Dpi, identity="control/dpi_gaps_of_data"):
    """DPI that sees in the counts themselves whether the stream has moved.

    What is wrong: when it publishes next, and pays, is then a function of exact counts. The ledger
    cannot see it; the replay does, for the neighbour asks at other slots.
    """

    def step(self, state: DpiState, x: Integers, spend: Spender) -> tuple[DpiState, list[Release]]:
        """As ever; then the next gap, from what the counts say."""
        _, rule = self._plan(self._scoring.change(self.pdf_change, len(x)))
        before = rule.start() if state.allocation is None else state.allocation
        state, releases = super().step(state, x, spend)
        used, term = rule.pick(before, spend.step + 1)
        if term:
            moved = bool(2 * x[0] > x.sum())
            after = rule.after(used, spend.step + 1, moved=moved)
            state = replace(state, allocation=after)
        return state, releases


def path_loss(budgets: Sequence[float], *, printed: bool) -> float:
    """Log ratio of the probabilities of one path of draws, exactly, for one user in every slot.

    The user decides every slot: with them one synopsis scores 1 and all others -1, without them
    the other way round (score change 2). The path draws that synopsis in every slot. Budgets are
    those of the synopsis draw: exp(budget score / 4), on sums (`printed`) or on means.
    """
    total = 0.0
    for t, budget in enumerate(budgets, start=1):
        reach = budget / 4 * (t if printed else 1)
        fits = np.full(10_000, -reach)
        fits[0] = reach
        total += _log_share(fits) - _log_share(-fits)
    return total


def _log_share(exponents: Reals) -> float:
    """Log of the first one's probability."""
    return float(exponents[0] - np.logaddexp.reduce(exponents))
