"""DPI: a distribution a slot, for ever, each chosen from a public pool.

Boosting goes in both directions: synopses that answer well gain weight, and so do queries that
they answer badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.mechanisms.base import MechanismBase, Spender, check_choice, check_counts, whole
from dpstream.mechanisms.infinite.budget_series import (
    Allocation,
    BudgetSeries,
    allocation,
    budget_series,
)
from dpstream.mechanisms.infinite.noisy_histograms import KEPT, distribution
from dpstream.mechanisms.infinite.posterior import Posterior
from dpstream.mechanisms.infinite.synopsis_pool import (
    GRID,
    POOLS,
    BinGroups,
    Grouping,
    Naturals,
    Pool,
    check_groups,
    even,
    groups_of,
    pool,
)
from dpstream.privacy.accounting.promises import ALL_ROWS
from dpstream.privacy.amounts import Amount, exact, on_grid, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.sensitivity import (
    distribution_change,
    score_change,
    score_sum_change,
    user_histogram_change,
)
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release

SCORE: Final = 1 << 20
"""Scores are whole multiples of 1 / SCORE."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A pool and the queries that it answers, with the answers of every synopsis."""

    pool: Pool
    queries: tuple[BinGroups, ...]

    @cached_property
    def _answers(self) -> list[Naturals | None]:
        """By query, synopses x groups; None where every bin stands for itself."""
        return [None if query.single else self.pool.grouped(query) for query in self.queries]

    def errors(self, probabilities: Naturals, query: int) -> Integers:
        """How far every synopsis is from the right answer to one query, in grid steps."""
        answers = self._answers[query]
        if answers is None:
            return self.pool.distances(probabilities)
        wanted = self.queries[query].sum(probabilities).astype(np.uint32)
        return self.pool.distances(wanted, answers)

    def errors_of(self, synopsis: int, probabilities: Naturals) -> Integers:
        """How far one synopsis is from the right answer to every query, in grid steps."""
        off = self.pool.member(synopsis).astype(np.int64) - probabilities
        sums = (off if query.single else query.sum(off) for query in self.queries)
        return np.array([np.abs(by_group).sum() for by_group in sums])


@lru_cache(maxsize=2)
def workload(
    name: str, queries: tuple[Grouping, ...], *, bins: int, size: int, seed: int
) -> Workload:
    """Made once and kept, for it is large."""
    synopses = pool(name, bins=bins, size=size, seed=seed)
    return Workload(pool=synopses, queries=groups_of(queries, bins))


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """1 for an error below lambda, -1 from lambda + mu on, straight in between (Algorithm 1).

    One user moves a slot's score by at most `change`, and the sum of t such scores, with whatever
    queries and synopses earlier draws have chosen, by at most t times that.
    """

    error_bound: Fraction
    overfitting_bound: Fraction

    def __post_init__(self) -> None:
        if not (0 <= self.error_bound <= 2 and 0 < self.overfitting_bound <= 2):
            raise InvalidParameter(
                "L1 distances of distributions are at most 2: error_bound must be in [0, 2] and "
                f"overfitting_bound in (0, 2]; got {self.error_bound} and {self.overfitting_bound}"
            )

    @property
    def span(self) -> int:
        """Mu in grid steps."""
        return max(int(self.overfitting_bound * GRID), 1)

    def of(self, errors: Integers) -> Integers:
        """Scores of errors, in whole multiples of 1 / SCORE."""
        free = int(self.error_bound * GRID)
        scores = SCORE * (self.span + 2 * (free - errors)) // self.span
        return np.clip(scores, -SCORE, SCORE)

    def change(self, pdf_change: Fraction, bins: int) -> Fraction:
        """How far one user moves a score, in whole multiples of 1 / SCORE."""
        return score_change(pdf_change, bins=bins, grid=GRID, span=self.span, steps=SCORE)


def compress_sensitivity(counts: Integers, *, dummy_rows: int) -> Naturals:
    """Counts as whole multiples of 1 / GRID, rounded down; nothing counted is evenly spread.

    Whatever a user did in a step, the distribution moves by at most 2 in L1. If at most b rows of a
    user enter a step and n0 public dummy rows are spread evenly over the bins, it moves by at most
    2 b / (n0 + b): `privacy.sensitivity.distribution_change`.
    Each is within 1 + 2^-20 of the exact one: the quotient has a relative error below 2^-50.

    >>> (4 * compress_sensitivity(np.array([1, 3]), dummy_rows=0) / GRID).tolist()
    [1.0, 3.0]
    """
    total = int(counts.sum()) + dummy_rows
    if total == 0:
        return np.full(len(counts), GRID // len(counts), dtype=np.uint32)
    if total >= 1 << 53:
        raise InvalidInput(f"a step has {total} rows; float64 has exact counts below 2^53 only")
    shares = (counts + dummy_rows / len(counts)) / total
    return np.floor(shares * GRID).astype(np.uint32)


@lru_cache(maxsize=2)
def posterior_over(synopses: Pool, scoring: Scoring) -> Posterior:
    """What draws say of a pool's members; made once and kept, for it is large."""
    return Posterior(pool=synopses, score=lambda errors: scoring.of(errors) / SCORE)


@storable("dpi memory")
@dataclass(frozen=True, kw_only=True)
class Memory:
    """What boosting remembers: a sum of scores for every candidate, over the slots so far.

    One user moves each by at most `slots` times the change of one score.
    """

    sums: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: int = 0

    def add(self, scores: Integers) -> Memory:
        """One more slot."""
        return Memory(sums=self.sums + scores, slots=self.slots + 1)

    def halve(self) -> Memory:
        """The past counts half. Rounded down, a half moves by half the change, rounded up."""
        return Memory(sums=self.sums >> 1, slots=(self.slots + 1) // 2)


@storable("dpi state")
@dataclass(frozen=True, kw_only=True)
class DpiState:
    """Scores of synopses and of queries, what was chosen last, which terms are used."""

    pool: str = ""
    synopses: Memory = field(default_factory=Memory)
    queries: Memory = field(default_factory=Memory)
    synopsis: int = -1
    query: int = 0
    allocation: Any = None
    likely: Reals = field(default_factory=lambda: np.zeros(0))
    """What the draws say of each synopsis, where the posterior mean is published."""
    values: Reals = field(default_factory=lambda: np.zeros(0))
    """What was published last."""
    histograms: Integers = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """The newest noisy histograms, one a row, where they take the pool's place."""
    scales: Reals = field(default_factory=lambda: np.zeros(0))
    """Those of their noise."""


_KEYS = """
    epsilon rows_per_user dummy_rows pool pool_size allocation series queries
    error_bound overfitting_bound decay_rate rate half_life seed publish gap
"""
_GAP: Final = 32
PUBLISHED: Final = ("posterior", "synopsis", "histogram")
_FEW_SLOTS: Final = ("adaptive", "sparse")
_MOVED: Final = 0.15  # L1 distance of two releases from which the stream is taken to move


@dataclass(frozen=True, kw_only=True)
class Dpi(MechanismBase, identity="dpi", keys=_KEYS):
    """Publish one distribution a slot, learnt by draws from a pool that was made without data.

    Guarantee: epsilon-DP for all rows of a user over the whole stream: the budgets of all slots
        together, for ever, are at most `epsilon`.
    Unit: a user with all rows. With `rows_per_user` at most so many of them enter a slot, which
        `bounded_counts` sees to; without it there is no such limit.
    Delay: none.
    Paper: Feng, Mohammady, Wang, Li, Qin, Hong, "DPI: Ensuring Strict Differential Privacy for
        Infinite Data Streaming", 2024.

    A step's input is the count of every bin of a public domain; what is published is a
    distribution over the bins. `rows_per_user` and `dummy_rows` bound what a user can change:
    without them little can be learnt. `pool`, `pool_size`, `seed`: which synopses; `allocation`,
    `series`, `gap`, `rate`, `decay_rate`: how the budget is spread over the slots (`adaptive`
    publishes at gaps of at least `gap` slots, more often where releases move; `random` is the
    paper's Algorithm 3 with Lambda = `rate`, `ranges` its Algorithm 4); `publish`: what the draws
    so far say of the distribution ("posterior"), the synopsis that was drawn last, as in the paper
    ("synopsis"), or, without a pool, noisy counts of the slots that pay, smoothed over time
    ("histogram"; far closer where rows are bounded); `error_bound` (lambda) and
    `overfitting_bound` (mu): errors that count as none, and the span to the worst; `queries`:
    groupings of the bins to answer, by default every bin by itself; with several of them half of
    each slot's budget chooses among them; `half_life`: slots after which the past counts half, by
    default never.

    >>> from dpstream import release
    >>> dpi = Dpi(epsilon=1, rows_per_user=1, dummy_rows=50, pool_size=200, gap=3)
    >>> series = release(dpi, [[900, 50, 50]] * 5, secret=bytes(32))
    >>> series.paid, bool((abs(series.values.sum(axis=1) - 1) < 1e-12).all())
    ([True, False, False, True, False], True)
    """

    publishes_stddev: ClassVar[bool] = False
    epsilon: Amount
    rows_per_user: int | None = None
    dummy_rows: int = 0
    pool: str = "mixed"
    pool_size: int = 1000
    allocation: str = "adaptive"
    series: str | None = None
    queries: Sequence[Grouping] = ()
    error_bound: Amount = 0
    overfitting_bound: Amount = 2
    decay_rate: Amount = 1
    rate: Amount = 10**8
    half_life: int | None = None
    seed: int = 0
    publish: str | None = None
    gap: int = _GAP

    def __post_init__(self) -> None:
        for name in ("epsilon", "overfitting_bound", "decay_rate", "rate"):
            object.__setattr__(self, name, positive(getattr(self, name), name))
        object.__setattr__(self, "error_bound", exact(self.error_bound, "error_bound"))
        least = {
            "rows_per_user": 1,
            "half_life": 1,
            "dummy_rows": 0,
            "pool_size": 2,
            "seed": 0,
            "gap": 1,
        }
        for name, at_least in least.items():
            if getattr(self, name) is not None:
                number = whole(getattr(self, name), name, at_least=at_least)
                object.__setattr__(self, name, number)
        if self.dummy_rows and self.rows_per_user is None:
            raise InvalidParameter(
                f"dummy_rows={self.dummy_rows} bound a user's influence only if rows_per_user "
                "does: a user with all rows of a slot outweighs them; give rows_per_user too"
            )
        check_choice(self.pool, "pool", POOLS)
        object.__setattr__(self, "queries", check_groups(self.queries))
        if self.series is None:
            usual = "sized" if self.allocation == "adaptive" else "level"
            object.__setattr__(self, "series", usual)
        if self.publish is None:
            object.__setattr__(self, "publish", self._usually_published)
        check_choice(str(self.publish), "publish", PUBLISHED)
        if self.publish == "posterior" and len(self.queries) > 1:
            raise InvalidParameter(
                f"publish='posterior' follows draws for one query; got {len(self.queries)} queries;"
                " ask for one, or publish='synopsis'"
            )
        if self.publish == "histogram":
            self._check_histogram()
        self._plan(self._scoring.change(self.pdf_change, 2))

    def _check_histogram(self) -> None:
        if self.rows_per_user is None:
            raise InvalidParameter(
                "publish='histogram' adds noise to counts, which a user may change by all rows of "
                "a slot; give rows_per_user, and make the counts with bounded_counts"
            )
        if len(self.queries) > 1 or self.allocation not in _FEW_SLOTS:
            raise InvalidParameter(
                f"publish='histogram' needs an allocation that pays at few slots "
                f"({' or '.join(_FEW_SLOTS)}) and no choice among queries; got "
                f"allocation={self.allocation!r}, {len(self.queries)} queries"
            )

    @property
    def _usually_published(self) -> str:
        """A draw for one of several queries says little of the bins."""
        adaptive = self.allocation == "adaptive" and len(self.queries) <= 1
        return "posterior" if adaptive else "synopsis"

    @cached_property
    def pdf_change(self) -> Fraction:
        """L1 distance by which one user can move a slot's distribution (Delta_Q)."""
        return distribution_change(rows=self.rows_per_user, dummy_rows=self.dummy_rows)

    @cached_property
    def _scoring(self) -> Scoring:
        return Scoring(
            error_bound=Fraction(self.error_bound),
            overfitting_bound=Fraction(self.overfitting_bound),
        )

    def _plan(self, change: Fraction) -> tuple[BudgetSeries, Allocation]:
        """The series of budgets and who gets which, for scores that move by `change`."""
        if change not in self._plans:
            total, decay = Fraction(self.epsilon), Fraction(self.decay_rate)
            terms = budget_series(
                str(self.series),
                total=total,
                change=change / SCORE,
                decay=decay,
                candidates=self.pool_size,
            )
            rule = allocation(
                self.allocation,
                series=terms,
                rate=Fraction(self.rate),
                seed=self.seed,
                gap=self.gap,
            )
            self._plans[change] = terms, rule
        return self._plans[change]

    @cached_property
    def _plans(self) -> dict[Fraction, tuple[BudgetSeries, Allocation]]:
        return {}

    def written(self) -> dict[str, Any]:
        """Parameters that came later have a key only where they differ from what is usual."""
        usual = {"publish": self._usually_published, "gap": _GAP}
        return {k: v for k, v in super().written().items() if k not in usual or v != usual[k]}

    def terms(self) -> Terms:
        """All rows of a user, for ever."""
        return Terms(unit="user", total=Fraction(self.epsilon), change=ALL_ROWS)

    def check(self, block: Reals) -> Integers:
        """Counts of at least two bins."""
        if block.shape[1] < 2:
            raise InvalidInput(
                "a distribution needs at least 2 bins; got one column; give the count of every bin"
            )
        return check_counts(block)

    def start(self) -> DpiState:
        """Nothing seen; sums are made with the first slot, which tells how many bins there are."""
        return DpiState()

    def step(self, state: DpiState, x: Integers, spend: Spender) -> tuple[DpiState, list[Release]]:
        """Draw a query, score every synopsis on it, draw a synopsis; without budget, hold."""
        if self.publish == "histogram":
            return self._step_histogram(state, x, spend)
        work = workload(
            self.pool, tuple(self.queries), bins=len(x), size=self.pool_size, seed=self.seed
        )
        change = self._scoring.change(self.pdf_change, len(x))
        terms, rule = self._plan(change)
        state = self._begin(state, work, rule)
        before = self._values(state, work)
        used, term = rule.pick(state.allocation, spend.step + 1)
        draws = 1 if len(work.queries) == 1 else 2
        name = work.pool.digest[:8]  # were the pool another one, the same noise must not serve it
        share = on_grid(terms.term(term) / draws) if term else Fraction(0)
        if share and draws == 2:
            query = self._choose(state.queries, f"query {name}", change, share, spend)
            state = replace(state, query=query)
        probabilities = compress_sensitivity(x, dummy_rows=self.dummy_rows)
        if rule.listens(used, spend.step + 1):
            scores = self._scoring.of(work.errors(probabilities, state.query))
            state = replace(state, synopses=state.synopses.add(scores))
        state = replace(state, allocation=used)
        if share:
            chosen = self._choose(state.synopses, f"synopsis {name}", change, share, spend)
            state = self._learn(replace(state, synopsis=chosen), work, float(share / change))
        if term:
            moved = self._moved(before, self._values(state, work))
            follow = rule.after(used, spend.step + 1, moved=moved)
            kept = Memory(sums=np.zeros_like(state.synopses.sums))
            synopses = kept if rule.restarts else state.synopses
            state = replace(state, allocation=follow, synopses=synopses)
        state = self._boost(state, work, probabilities, spend.step + 1)
        release = Release(
            step=spend.step, values=self._values(state, work), paid=bool(share), held=not share
        )
        return state, [release]

    def _step_histogram(
        self, state: DpiState, x: Integers, spend: Spender
    ) -> tuple[DpiState, list[Release]]:
        """Noise on the counts of a slot that pays; what all of them say is published and held."""
        assert self.rows_per_user is not None
        terms, rule = self._plan(self._scoring.change(self.pdf_change, len(x)))
        if state.allocation is None:
            state = replace(state, allocation=rule.start(), values=even(len(x)))
        used, term = rule.pick(state.allocation, spend.step + 1)
        share = on_grid(terms.term(term)) if term else Fraction(0)
        state = replace(state, allocation=used)
        if share:
            change = user_histogram_change(self.rows_per_user)
            noisy = spend.laplace(x, sensitivity=change, epsilon=share, purpose="histogram")
            earlier = state.histograms.reshape(-1, len(x))
            histograms = np.vstack([earlier, noisy])[-KEPT:]
            scales = np.append(state.scales, float(change / share))[-KEPT:]
            state = replace(state, histograms=histograms, scales=scales)
        if term:
            after = distribution(state.histograms, state.scales) if share else state.values
            follow = rule.after(used, spend.step + 1, moved=self._moved(state.values, after))
            state = replace(state, allocation=follow, values=after)
        release = Release(step=spend.step, values=state.values, paid=bool(share), held=not share)
        return state, [release]

    def _learn(self, state: DpiState, work: Workload, strength: float) -> DpiState:
        """What the synopsis that was just drawn adds to what is known."""
        if self.publish != "posterior":
            return state
        posterior = posterior_over(work.pool, self._scoring)
        known = state.likely if len(state.likely) else posterior.start()
        known = posterior.update(known, state.synopsis, strength * SCORE / 2)
        return replace(state, likely=known, values=posterior.mean(known))

    def _values(self, state: DpiState, work: Workload) -> Reals:
        """What is published: a function of what was drawn."""
        if len(state.values):
            return state.values
        bins = work.pool.units.shape[1]
        return work.pool.pdf(state.synopsis) if state.synopsis >= 0 else even(bins)

    def _moved(self, before: Reals, after: Reals) -> bool:
        """Does a release differ from the one before by more than two draws of one stream do?"""
        return bool(np.abs(before - after).sum() > _MOVED)

    def _choose(
        self, scores: Memory, purpose: str, change: Fraction, epsilon: Fraction, spend: Spender
    ) -> int:
        """A candidate of `scores`; a sum over t slots is drawn with t times the sensitivity."""
        sensitivity = score_sum_change(change, slots=scores.slots)
        return spend.choose(scores.sums, sensitivity=sensitivity, epsilon=epsilon, purpose=purpose)

    def _begin(self, state: DpiState, work: Workload, rule: Allocation) -> DpiState:
        if not state.pool:
            return DpiState(
                pool=work.pool.digest,
                synopses=Memory(sums=np.zeros(len(work.pool), np.int64)),
                queries=Memory(sums=np.zeros(len(work.queries), np.int64)),
                allocation=rule.start(),
            )
        if state.pool != work.pool.digest:
            raise StateError(
                "the pool that this version or machine makes is not the one that the run began "
                "with; go on where it began, or start a new run (charged anew)"
            )
        return state

    def _boost(self, state: DpiState, work: Workload, probabilities: Any, slot: int) -> DpiState:
        """Queries gain what the published synopsis loses on them; then the past may fade."""
        if len(work.queries) > 1 and state.synopsis >= 0:
            lost = -self._scoring.of(work.errors_of(state.synopsis, probabilities))
            state = replace(state, queries=state.queries.add(lost))
        if self.half_life is None or slot % self.half_life:
            return state
        return replace(state, synopses=state.synopses.halve(), queries=state.queries.halve())
