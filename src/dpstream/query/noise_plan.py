"""How much noise, and when a key is shown: all of it follows from the query alone.

The whole run is one charge of mu^2 (GDP), a slack of delta for the selection of keys, and what
float arithmetic adds. The columns share mu^2; each window's noise has the standard deviation that
its own number of releases asks for. Proofs: `docs/soundness/latched.md`, `docs/soundness/sqlp.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import BufferedLinearToeplitz, LastTwice
from dpstream.counting.noise_scale import (
    Process,
    QueryCalibration,
    calibrate_query,
    path_error_ratio,
    sigma_for,
    streamed_norm,
)
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.accounting.accountant import NO_FLOAT_ERROR, FloatError
from dpstream.privacy.accounting.calibration import (
    mu_squared_for,
    round_down,
    round_up,
    split_budget,
)
from dpstream.privacy.accounting.curves import choice_epsilon, choice_mu_above, pure_mu_above
from dpstream.privacy.accounting.promises import ROUNDING_SHARE, own_terms
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.sensitivity import (
    CorrelatedNoise,
    group_by_change,
    per_unit_change,
    rank_change,
    rounds_change,
    total_change,
    units_change,
)
from dpstream.query.aggregates import Measure, Sum
from dpstream.query.book_periods import (
    book_share,
    has_finer_periods,
    periods_in_a_window,
    same_rows,
)
from dpstream.query.period_bounds import PeriodBounds
from dpstream.query.quantiles import ExponentialQuantile, Level, Quantile
from dpstream.query.query import Query
from dpstream.query.shared_noise import shared_noise
from dpstream.records import Integers, Reals

_EARLY = 0.02  # the part of a threshold that sparing noise for rare keys may cost
_COARSEST = 10  # grid steps that a clamped value must still have
_VISIBLE = 2  # standard deviations above 0 at which a remembered key is shown
_MOST_CHOICES = 100  # releases of a window up to which a choice for each is thought of
_BETTER = 0.9  # of the error of a tree: what a choice must have at most
_ROOM = 1e-9  # for floats, of noise that groups share
_OF_CHOICES = Fraction(1, 50)  # of the budget: histograms by which bounds are chosen
USUAL_INTERVAL = float(-ndtri(0.025))
"""Half the width of an interval of 95%, in standard deviations."""
_buffered = lru_cache(maxsize=256)(BufferedLinearToeplitz)  # to find its parameters takes a while
_last_twice = lru_cache(maxsize=256)(LastTwice)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A window with so many releases: its noise process, and per measure the noise it adds."""

    public: bool
    """Are all groups known, and shown from the first release on?"""
    process: Process
    sigmas: tuple[float, ...]
    stddevs: Reals
    """In grid steps, measures (and levels of cells) x releases; rounding included."""
    pre_threshold: int
    thresholds: Integers
    """Noisy units that show a key, by release; of several sets of keys a row for each."""
    visible: Reals
    """What shows a remembered key, measures x releases: hiding it below is post-processing."""
    measures: int = 0
    """How many measures each of several sets of keys has; 0: there is one set."""
    shared: tuple[float, ...] = ()
    """By column, of noise that all groups of the window have alike in its last release."""
    last_rows: tuple[LastTwice | None, ...] = ()
    """By column, the process where it is another one, since groups share some of its noise."""
    slopes: tuple[Fraction, ...] = ()
    """By column, how the odds of a leaf fall with each part of a rank; 0 where noise is added."""
    scales: tuple[Fraction, ...] = ()
    """By column, of discrete Laplace noise; none where the noise is normal."""

    def sigma(self, measure: int, sets: Integers | None) -> float | Reals:
        """What a measure's noise is multiplied with; of groups of these sets, if there are any."""
        if sets is None:
            return self.sigmas[measure]
        of_measure: Reals = np.array(self.sigmas[measure :: self.measures])
        return of_measure[sets]

    def process_of(self, measure: int) -> Process:
        """The noise process of a measure."""
        return (self.last_rows[measure] if self.last_rows else None) or self.process

    def stddevs_of(self, release: int, sets: Integers | None) -> Reals:
        """Of each measure at a release; with `sets`, groups x measures."""
        column: Reals = self.stddevs[:, release - 1]
        return column if sets is None else column.reshape(-1, self.measures)[sets]

    @property
    def activation(self) -> int:
        """Units above which a group becomes active; -1: all groups are known and active."""
        return -1 if self.public else self.pre_threshold


@dataclass(frozen=True)
class NoisePlan:
    """The noise of one query.

    `kept`: the decays of its counters, by the number of releases, as a run has begun with them:
    what is optimised on the spot differs a little between machines. Whatever they are, sigmas are
    calibrated for them. `whole`: the plan of the run, where this one is for the periods that have
    one of the bounds that it may choose.
    """

    query: Query
    kept: tuple[tuple[int, tuple[float, ...]], ...] = field(default=(), kw_only=True)
    whole: NoisePlan | None = field(default=None, kw_only=True)

    @cached_property
    def sensitivities(self) -> tuple[Fraction, ...]:
        """Of each measure and total, in grid steps, for one unit, over all its groups.

        In L2, or in L1 where the noise is Laplace's; of a choice that of the scores in one group.
        """
        if self.query.pure:
            return tuple(map(self._total, self.columns))
        columns = zip(self.columns, self.sets, strict=True)
        return tuple(self._sensitivity(measure, names) for measure, names in columns)

    @property
    def measure(self) -> Literal["epsilon", "mu_squared"]:
        """What the run's budget is counted in."""
        return "epsilon" if self.query.pure else "mu_squared"

    @cached_property
    def columns(self) -> tuple[Measure, ...]:
        """All that noise is added to: measures of groups, levels of cells, totals of windows.

        Of several sets of keys each has all measures, one set after another.
        """
        query = self.query
        return self._of_groups * max(len(query.grouping_sets), 1) + query.totals

    @property
    def _of_groups(self) -> tuple[Measure, ...]:
        return self.query.measures + self.query.levels

    @cached_property
    def sets(self) -> tuple[tuple[str, ...] | None, ...]:
        """The set of keys that each of the columns is of; None: there is one, or it is a total."""
        several = [names for names in self.query.grouping_sets for _ in self._of_groups]
        alone = len(self.columns) - len(several)
        return (*several, *[None] * alone)

    def _total(self, measure: Measure) -> Fraction:
        """The same in L1."""
        bounds = self.query.bounds
        if isinstance(measure, Level) and measure.share is not None:
            return self._sensitivity(measure)
        if measure in self.query.totals:
            return total_change(rows=self._rows_of_total(measure), largest=measure.largest)
        per_group = measure.kind == "units" or measure.per_unit
        rows = bounds.groups if per_group else bounds.rows
        return total_change(rows=rows, largest=measure.largest)

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        bounds = self.query.bounds
        if isinstance(measure, Level) and measure.share is not None:
            return rank_change(measure.share, per_group=bounds.rows_per_group)
        if names is not None and len(names) < len(self.query.keys):  # all rows may be in one group
            groups = self.query.groups_of_set(names)
            if measure.kind == "units":
                return units_change(rows=bounds.rows, groups=groups)
            return group_by_change(
                rows=bounds.rows, per_group=bounds.rows, groups=groups, largest=measure.largest
            )
        if measure.kind == "units":
            return units_change(rows=bounds.rows, groups=bounds.groups)
        if measure.kind == "weight" and self.query.key_weights is not None:
            return self.query.key_weights.change
        if measure.kind == "round":
            return rounds_change(rows=bounds.rows)
        if measure.per_unit:
            return per_unit_change(groups=bounds.groups, largest=measure.largest)
        if measure in self.query.totals:  # all rows of a unit may lie in one window
            rows = self._rows_of_total(measure)
            return group_by_change(rows=rows, per_group=rows, groups=1, largest=measure.largest)
        return group_by_change(
            rows=bounds.rows,
            per_group=bounds.rows_per_group,
            groups=bounds.groups,
            largest=measure.largest,
        )

    def correlated(self, releases: int) -> tuple[CorrelatedNoise | None, ...]:
        """Of each column noise that groups share in the last of so many releases, at mu = 1."""
        if not self.query.shares_noise:
            return (None,) * len(self.columns)
        once = min(releases, 2)  # how many there are does not matter, if there are several
        if once not in self._correlated:
            self._correlated[once] = tuple(
                shared_noise(self.query, column, once) for column in self.columns
            )
        return self._correlated[once]

    @cached_property
    def _correlated(self) -> dict[int, tuple[CorrelatedNoise | None, ...]]:
        return {}

    def opposed(self, measure: Measure, releases: int) -> float:
        """How much more noise a measure has than if a unit only added to it."""
        process = self._process(releases)
        return float(streamed_norm(process, measure.fall) / streamed_norm(process))

    def _reached(self, measure: Measure, names: tuple[str, ...] | None = None) -> int:
        """How many processes of a measure one unit may move, at most; `names`: of a set of keys."""
        bounds = self.query.bounds
        if names is not None:
            return self.query.groups_of_set(names)
        if measure in self.query.totals:  # one group in each window
            rows = self._rows_of_total(measure)
            windows = self.query.schedule.windows_of_a_period(self.query.periods)
            return rows if windows is None else min(rows, windows)
        if isinstance(measure, Level):
            return min(bounds.rows, bounds.groups * measure.nodes)
        return bounds.rows if measure.kind == "round" else bounds.groups

    def _rows_of_total(self, measure: Measure) -> int:
        """How many rows of one unit count in a total, over all windows."""
        most = self.query.most_dropped
        known = {"dropped": most, "elsewhere": most, "kept": self.query.bounds.rows, "beyond": 1}
        return known[measure.kind]

    @property
    def delta_slack(self) -> Fraction:
        """What selecting keys may take from delta; nothing if the keys are public."""
        query = self.query
        return query.delta * query.selection_share if query.public_groups is None else Fraction(0)

    @cached_property
    def calibrated(self) -> QueryCalibration:
        """mu^2 of the whole run, and its float error, whatever the windows' lengths."""
        if self.whole is not None:
            return self.whole.calibrated
        query, weights = self.query, self._weights
        if query.candidates:
            return self._calibrated_for_all()
        noisy = [number for number, column in enumerate(self.columns) if _gets_noise(column)]
        if not noisy:  # choices alone are exact
            room = query.delta - self.delta_slack
            mu_squared = on_grid(mu_squared_for(epsilon=query.epsilon, delta=room))
            return QueryCalibration(mu_squared=mu_squared, sigmas=(), error=NO_FLOAT_ERROR)
        changes, reached = list(self.sensitivities), self._processes_reached
        for plan, releases in product(self._sharing, query.schedule.lengths):
            for number, shared in enumerate(plan.correlated(releases)):
                if shared is not None:  # all groups of the window together (`correlated.md`)
                    wider, count = plan._influence_of_shared(releases, number, shared)
                    changes[number] = max(changes[number], wider)
                    reached[number] = max(reached[number], count)
        bins = self._histograms  # a unit is in one bin of each
        of_bins = [each / sum(weights) for each in weights[len(self.columns) :]]
        return calibrate_query(
            *(self._process(releases) for releases in self.lengths),
            sensitivities=[changes[number] for number in noisy] + [Fraction(1)] * bins,
            falls=[self.columns[number].fall for number in noisy] + [Fraction(0)] * bins,
            shares=[weights[number] / sum(weights) for number in noisy] + of_bins,
            influence=[reached[number] for number in noisy] + [1] * bins,
            epsilon=query.epsilon,
            delta=query.delta,
            delta_slack=self.delta_slack,
        )

    @property
    def _sharing(self) -> tuple[NoisePlan, ...]:
        """The plans in which groups may share noise: this one."""
        return (self,) if self.query.shares_noise else ()

    def _influence_of_shared(
        self, releases: int, number: int, shared: CorrelatedNoise
    ) -> tuple[Fraction, int]:
        """As what, and as how many processes, noise that groups share counts in float error."""
        if releases == 1:
            wide = shared.own + shared.shared
            return wide, 2 * math.ceil(wide / shared.own) * self._known + 2
        change = self.sensitivities[number]
        usual, last = self._process(releases), self._last_row(releases, number, shared)
        assert isinstance(usual, LastTwice)
        return change, math.ceil(path_error_ratio(usual, last)) * (self._known + 1)

    def _last_row(self, releases: int, number: int, shared: CorrelatedNoise) -> LastTwice:
        """The process of a column whose last measurement has noise that groups share."""
        process, norm = self._process(releases), self.sensitivities[number]
        assert isinstance(process, LastTwice)
        sigma = float(streamed_norm(process) * norm)  # at mu = 1, as what is shared
        own, alike = (float(each) * (1 + _ROOM) / sigma for each in (shared.own, shared.shared))
        return replace(process, own=own, alike=alike)

    def _calibrated_for_all(self) -> QueryCalibration:
        """For whatever bounds a period gets: floats err most with the largest."""
        query, kept = self.query, self.kept
        sharing: tuple[NoisePlan, ...] = ()
        if query.shares_noise:
            bounds = (replace(query.widest_bounds, groups=each) for each in query.choices)
            sharing = tuple(NoisePlan(self._bounded_by(each), kept=kept) for each in bounds)
        histograms, widest = len(query.candidates), self._bounded_by(query.widest_bounds)
        return _Widest(widest, kept=kept, histograms=histograms, sharing=sharing).calibrated

    @property
    def _histograms(self) -> int:
        """How many histograms a period has, by which bounds are chosen."""
        return len(self.query.candidates)

    @property
    def _processes_reached(self) -> list[int]:
        return [self._reached(*each) for each in zip(self.columns, self.sets, strict=True)]

    @property
    def _known(self) -> int:
        """How many public groups there are."""
        return len(self.query.public_groups or ())

    @property
    def interval(self) -> float | None:
        """Half the width of a confidence interval, in standard deviations, of normal noise."""
        confidence = self.query.confidence
        return None if confidence is None else interval_of(confidence)

    @cached_property
    def total(self) -> Fraction:
        """The budget of the whole run: epsilon, or mu^2."""
        return self.query.epsilon if self.query.pure else self.calibrated.mu_squared

    @property
    def error(self) -> FloatError:
        """What float arithmetic adds: nothing to choices and Laplace noise, which are exact."""
        return NO_FLOAT_ERROR if self.query.pure else self.calibrated.error

    @property
    def _weights(self) -> tuple[Fraction, ...]:
        """How the budget is divided among columns, and histograms where bounds are chosen."""
        weights = self.query.column_weights
        if not self._histograms:
            return weights
        together = sum(weights) * _OF_CHOICES / (1 - _OF_CHOICES)
        return (*weights, *[together / self._histograms] * self._histograms)

    @cached_property
    def _split(self) -> tuple[Fraction, ...]:
        return split_budget(self.total, weights=self._weights)

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """The part of each measure and total: the same whatever bounds are chosen."""
        return (self._split if self.whole is None else self.whole._split)[: len(self.columns)]

    @property
    def lengths(self) -> list[int]:
        """How many releases its noise processes have: those of windows, 1 of a histogram."""
        lengths = self.query.schedule.lengths
        return [*lengths, 1] if self._histograms and 1 not in lengths else lengths

    def of_bounds(self, bounds: PeriodBounds) -> NoisePlan:
        """The noise of a period with these bounds; all periods share one budget."""
        if bounds not in self._of_bounds_chosen:
            query = self._bounded_by(bounds)
            self._of_bounds_chosen[bounds] = NoisePlan(query, kept=self.kept, whole=self)
        return self._of_bounds_chosen[bounds]

    def _bounded_by(self, bounds: PeriodBounds) -> Query:
        """The query of a period; where groups share noise they do in each period that gains by it,
        whether that was asked for or not.
        """
        shared = self.query.shares_noise
        return replace(self.query.with_bounds(bounds), correlated_noise=shared)

    @cached_property
    def _of_bounds_chosen(self) -> dict[PeriodBounds, NoisePlan]:
        return {}

    @cached_property
    def histogram(self) -> WindowPlan:
        """The noise of histograms of units, by what bounds are chosen by.

        One unit of a period is in one bin of each of its histograms, which are published once.
        """
        process, bins = self._process(1), sum(len(each.bins) for each in self.query.candidates)
        share = min(self._split[len(self.columns) :])
        sigma = float(sigma_for(process, sensitivity=Fraction(1), mu_squared=share))
        stddevs: Reals = np.hypot(np.outer([sigma] * bins, process.error()), 12**-0.5)
        return WindowPlan(
            public=True,
            process=process,
            sigmas=(sigma,) * bins,
            stddevs=stddevs,
            pre_threshold=0,
            thresholds=np.zeros(1, np.int64),
            visible=_VISIBLE * stddevs,
        )

    def _choice_epsilon(self, column: int, releases: int) -> Fraction:
        """Epsilon of each choice that a column makes in a group, at one of so many releases."""
        bounds, share = self.query.bounds, self.shares[column]
        if self.query.pure:  # a row in one group is none in another
            return share * bounds.rows_per_group / bounds.rows
        mu = math.sqrt(share / (bounds.groups * releases)) * (1 - 1e-12)
        return round_down(choice_epsilon(mu))

    def charges(self, book: Terms) -> list[Fraction]:
        """What each column takes of a book, in what the book counts; then histograms, if any."""
        fitting = self.for_book(book)
        if fitting is not self:
            return fitting.charges(book)
        if not self.query.pure:
            of_book = book_share(self.query, book)
            pairs = zip(self.shares, self.columns, strict=True)
            columns = [part * of_book.times(column) for part, column in pairs]
            return columns + list(self._split[len(self.columns) :])
        if book.measure == "epsilon":
            return list(self.shares)
        lost = []
        for number, (column, share) in enumerate(zip(self.columns, self.shares, strict=True)):
            mu_squared = pure_mu_above(share) ** 2
            if not _gets_noise(column):
                each = choice_mu_above(self._choice_epsilon(number, 1))
                mu_squared = min(mu_squared, self.query.bounds.groups * each**2)
            lost.append(round_up(mu_squared))
        return lost

    def ranks(self, quantile: Quantile, releases: int) -> Reals:
        """About how many rows off a quantile is, by release."""
        query, window = self.query, self.window(releases)
        levels = quantile.cells.levels
        first = len(query.measures) + query.levels.index(levels[0])
        spreads = window.stddevs[first : first + len(levels)]
        if isinstance(quantile, ExponentialQuantile):
            worst: Reals = spreads.max(axis=0)
            return worst
        of_rows = window.stddevs[query.measures.index(quantile.rows)]
        weights = quantile.cells.rank_weights[1:].mean(axis=0)
        ranks: Reals = np.sqrt(weights @ spreads**2 + (of_rows / 4) ** 2)
        return ranks

    def _process(self, releases: int) -> Process:
        if self.query.strategy == "sqlp":
            return Honaker(steps=releases)
        buffers = self.query.buffers
        decays = dict(self.kept).get(releases, ())
        decays = decays if len(decays) == 2 * buffers else ()  # of another query
        process = _buffered(steps=releases, buffers=buffers, decays=decays)
        share = self.query.last_budget
        if share is None or releases == 1:
            return process
        return _last_twice(process=process, share=share)

    @property
    def matrices(self) -> list[tuple[int, tuple[float, ...]]]:
        """The counters' matrices, by the number of releases: they fix the noise."""
        processes = [(length, self._process(length)) for length in self.lengths]
        return [(n, () if isinstance(p, Honaker) else p.decays) for n, p in processes]

    def terms(self, book: Terms | None = None) -> Terms:
        """The book that this query opens where there is none, or its terms within a `book`.

        A book of other periods of the same users counts what it takes of them (`book_periods`).
        """
        fitting = self.for_book(book)
        if fitting is not self:
            return fitting.terms(book)
        query = self.query
        own = self._own_terms()
        if book is not None and query.pure and book.measure == "mu_squared":
            return replace(own, measure=book.measure, total=sum(self.charges(book), Fraction(0)))
        same = book is None or query.period_in_words == book.period
        if book is None or same or not same_rows(query, book):
            return own
        book_share(query, book)
        return replace(own, period=book.period, time_zone=book.time_zone, change=book.change)

    def _own_terms(self) -> Terms:
        query = self.query
        if query.pure:
            return pure_terms(query, query.epsilon)
        return own_terms(
            epsilon=query.epsilon,
            mu_squared=self.calibrated.mu_squared,
            delta_slack=self.delta_slack,
            error=self.error,
            period=query.period_in_words,
            time_zone=query.time_zone,
            change=query.protected,
        )

    def for_book(self, book: Terms | None) -> NoisePlan:
        """The plan of a run that is charged to a book, or opens it (None).

        Noise that groups share is not counted in books of finer periods: where nobody has asked for
        it, groups have noise of their own there.
        """
        query = self.query
        by_itself = query.correlated_noise is None and query.shares_noise
        if book is None or not by_itself or has_finer_periods(query, book):
            return self
        return NoisePlan(replace(query, correlated_noise=False), kept=self.kept)

    def pay(self, spend: QuerySpend, digest: str, *, instead_of: str = "") -> None:
        """Charge the whole run, once; `instead_of`: a run that has held its place."""
        if self.for_book(spend.book) is not self:
            raise LedgerError(
                f"the book of the query {self.query.name!r} was opened meanwhile, with periods of "
                f"{spend.book.period}: noise that groups share is not counted there; start again"
            )
        spend.pay(**self.cost(spend.book), digest=digest, instead_of=instead_of)

    def first_room(self, spend: QuerySpend) -> int | None:
        """The first period from which on the book could pay for the query; None: it never can."""
        cost = self.cost(spend.book)
        return None if cost["periods"].first is None else spend.first_room(**cost)

    def cost(self, book: Terms) -> dict[str, Any]:
        """What one unit of the book loses by the whole run, in what the book counts."""
        fitting = self.for_book(book)
        if fitting is not self:
            return fitting.cost(book)
        self._refuse_book(book)
        share, error = book_share(self.query, book), self.error
        if self.query.pure:
            amount = self.total if book.measure == "epsilon" else sum(self.charges(book))
        else:
            amount = share.mu_squared(self.total, self.shares, self.columns)
        return {
            "amount": amount,
            "measure": book.measure,
            "delta_slack": self.delta_slack * share.groups,
            "error": FloatError(xi=error.xi * share.groups, tau=error.tau * share.groups),
            "periods": share.periods,
        }

    def _refuse_book(self, book: Terms) -> None:
        """A book of epsilon takes what is pure; what is pure counts one unit of the book."""
        query = self.query
        if book.measure == "epsilon" and not query.pure:
            raise LedgerError(
                f"the query {query.name!r} has a delta, and its book counts epsilon alone; use a "
                "book of its own (another dataset name), or leave delta out where all groups are "
                "public and each window is published once"
            )
        if query.pure and query.period_in_words != book.period:
            raise LedgerError(
                f"the query {query.name!r} has no delta and periods of {query.period_in_words}, "
                f"its book of {book.period}: what it takes of other periods is not counted; give "
                "it a delta, the book's period, or a book of its own (another dataset name)"
            )

    def window(self, releases: int) -> WindowPlan:
        """The noise of a window with so many releases."""
        if releases not in self._windows:
            self._windows[releases] = self._window(releases)
        return self._windows[releases]

    @cached_property
    def _windows(self) -> dict[int, WindowPlan]:
        """A cache of all plans would hash this one at every step, which takes 0.2 ms."""
        return {}

    def _window(self, releases: int) -> WindowPlan:
        query = self.query
        plan = self._of_columns(releases, slice(len(self.columns) - len(query.totals)))
        if query.grouping_sets:
            plan = replace(plan, measures=len(query.measures))
        if query.public_groups is not None:
            return plan
        errors = plan.process.error() * (1 + 1e-12)
        deviations = self._quantiles(releases) * plan.sigmas[0] * errors
        if query.grouping_sets:
            first = plan.sigmas[:: plan.measures]
            sets = zip(first, query.grouping_sets, strict=True)
            of_sets = [self._quantiles(releases, names) * sigma * errors for sigma, names in sets]
            deviations = np.array(of_sets)
        unit = int(query.measures[0].largest)  # what a unit adds to a key, at most
        early = query.pre_threshold
        if early is None:
            early = math.floor(_EARLY * float(deviations[..., -1].min()))
        else:
            early *= unit
        thresholds = early + unit + np.ceil(deviations + 0.5).astype(np.int64)
        return replace(plan, public=False, pre_threshold=early, thresholds=thresholds)

    @lru_cache(maxsize=64)  # noqa: B019
    def totals(self, releases: int) -> WindowPlan:
        """The noise of a window's totals: one group, which everybody knows."""
        first = len(self.columns) - len(self.query.totals)
        return self._of_columns(releases, slice(first, None))

    def _of_columns(self, releases: int, columns: slice) -> WindowPlan:
        """The noise of some columns of groups that everybody knows."""
        process, pure = self._process(releases), self.query.pure
        sigmas, slopes, scales = [], [], []
        shared = [0.0] * len(self.columns)
        last_rows: list[LastTwice | None] = [None] * len(self.columns)
        for number in range(len(self.columns))[columns]:
            column, change = self.columns[number], self.sensitivities[number]
            chosen = not _gets_noise(column)
            share = self._choice_epsilon(number, releases) if chosen else self.shares[number]
            slopes.append(share / (2 * change) if chosen else Fraction(0))
            scales.append(change / share if pure and not chosen else Fraction(0))
            sigma, correlated = 0.0, self.correlated(releases)[number]
            if correlated is not None and releases == 1:
                parts = [correlated.own, correlated.shared]
                sigma, shared[number] = (
                    float(sigma_for(process, sensitivity=each, mu_squared=share)) for each in parts
                )
            elif not pure and not chosen:
                sigma = float(
                    sigma_for(process, sensitivity=change, mu_squared=share, fall=column.fall)
                )
                if correlated is not None:
                    last = self._last_row(releases, number, correlated)
                    last_rows[number], shared[number] = last, sigma * last.shared
            sigmas.append(sigma)
        alike = shared[columns]
        spreads = np.outer(sigmas, process.error())
        for row, last_row in enumerate(last_rows[columns]):
            if last_row is not None:
                spreads[row, -1] = sigmas[row] * last_row.row_norm(releases)
        spreads[:, -1] = np.hypot(spreads[:, -1], alike)
        stddevs: Reals = np.hypot(spreads, 12**-0.5)
        for row, number in enumerate(range(len(self.columns))[columns]):
            column = self.columns[number]
            if isinstance(column, Level) and column.share is not None:
                stddevs[row] = math.sqrt(2) / float(slopes[row] * column.share.denominator)
            elif pure:
                stddevs[row] = _laplace_stddev(scales[row])
        return WindowPlan(
            shared=tuple(alike) if any(alike) else (),
            last_rows=tuple(last_rows[columns]) if any(last_rows[columns]) else (),
            slopes=tuple(slopes) if any(slopes) else (),
            scales=tuple(scales) if pure else (),
            public=True,
            process=process,
            sigmas=tuple(sigmas),
            stddevs=stddevs,
            pre_threshold=0,
            thresholds=np.zeros(releases, np.int64),
            visible=_VISIBLE * stddevs,
        )

    def _quantiles(self, releases: int, names: tuple[str, ...] | None = None) -> Reals:
        """How many standard deviations no noise of a unit's own keys passes, but for the slack.

        By release: the last one has a part of the slack of its own, the others share the rest. Sets
        of keys share it alike.
        """
        parts = np.full(releases, 1 / releases)
        if self.query.last_share is not None and releases > 1:
            last = float(self.query.last_share)
            parts[:-1], parts[-1] = (1 - last) / (releases - 1), last
        slack = float(self.delta_slack) * (1 - 1e-12) / max(len(self.query.grouping_sets), 1)
        each = slack / self._reached(self.columns[0], names) * parts
        quantiles: Reals = -ndtri(each) * (1 + 1e-12)
        return quantiles


@dataclass(frozen=True)
class _Widest(NoisePlan):
    """The plan of the largest bounds that a period may get, with the histograms of all."""

    histograms: int = field(default=0, kw_only=True)
    sharing: tuple[NoisePlan, ...] = field(default=(), kw_only=True)

    @property
    def _histograms(self) -> int:
        return self.histograms

    @property
    def _sharing(self) -> tuple[NoisePlan, ...]:
        return self.sharing


def pure_terms(query: Query, epsilon: Fraction) -> Terms:
    """The terms of a book of epsilon, for queries of the same users that have no delta."""
    return Terms(
        unit="user",
        total=epsilon,
        period=query.period_in_words,
        time_zone=query.time_zone,
        change=query.protected,
    )


def plan_query(query: Query, counters: str | None = None) -> NoisePlan:
    """The plan of a query; grids that nobody chose are made coarser where floats ask for it.

    If that is not enough, or takes much of what a book has for float error, what the bounds drop is
    not measured, unless the query says how.

    `counters`: the canonical text of the matrices that a run has begun with.
    """
    _refuse_mixed_periods(query)
    kept = () if counters is None else matrices_of(counters)
    query = given = _with_noise(_with_mechanisms(query, kept), kept)
    while True:
        plan = NoisePlan(query, kept=kept)
        made_up = query.debias and "debias" not in query.planned
        spared = query.totals and not made_up and query.max_dropped_rows is None
        try:
            error = plan.error
        except InvalidParameter as problem:
            coarser = _coarser(query) or _fewer_candidates(query)
            if coarser is None:
                if not spared:
                    more = ", or fewer leaves" if query.levels else ""
                    raise InvalidParameter(f"the query {query.name!r}: {problem}{more}") from None
                coarser = replace(given, report_bias=False, debias=None)
            query = coarser
        else:
            if not spared or error.xi <= query.epsilon * ROUNDING_SHARE / 10:
                return plan
            query = _fewer_candidates(query) or replace(given, report_bias=False, debias=None)


def _refuse_mixed_periods(query: Query) -> None:
    """Bounds are chosen for a period, so each window has to be of one."""
    if query.chooses and periods_in_a_window(query) > 1:
        what = "max_groups_contributed = AUTO" if query.choose_groups else "AUTO"
        raise InvalidParameter(
            f"{what} in the query {query.name!r} needs windows that lie "
            f"within a period ({query.period_in_words}, from midnight of {query.time_zone} on): a "
            "window of several would have rows under several bounds, and noise for one; use "
            "TUMBLE or CUMULATE windows that divide the period, begun where one begins, or give a "
            "number"
        )


def _with_noise(query: Query, kept: tuple[tuple[int, tuple[float, ...]], ...]) -> Query:
    """The query, without noise that groups share where that takes much of what floats may add."""
    if query.correlated_noise is not None or not query.shares_noise:
        return query
    try:
        if NoisePlan(query, kept=kept).error.xi <= query.epsilon * ROUNDING_SHARE / 10:
            return query
    except InvalidParameter:
        pass
    return replace(query, correlated_noise=False)


def _with_mechanisms(query: Query, kept: tuple[tuple[int, tuple[float, ...]], ...]) -> Query:
    """The query with its quantiles by the exponential mechanism where that errs less.

    It tells no interval, so a query with `confidence` takes trees.
    """
    asked = [a.name for a in query.aggregates if _may_choose(a, query)]
    if not asked:
        return query
    choosing = _choosing(query, asked)
    trees = _choosing(query, [a.name for a in query.aggregates if _must_choose(a)])
    try:
        plan = NoisePlan(trees, kept=kept)
        errors = {name: _mean_rank(plan, name) for name in asked}
    except InvalidParameter:  # floats cannot keep so many levels
        return choosing
    plan = NoisePlan(choosing, kept=kept)
    better = [name for name in asked if _mean_rank(plan, name) <= _BETTER * errors[name]]
    return _choosing(
        query, [a.name for a in query.aggregates if a.name in better or _must_choose(a)]
    )


def _must_choose(aggregate: object) -> bool:
    return isinstance(aggregate, Quantile) and aggregate.mechanism == "exponential"


def _may_choose(aggregate: object, query: Query) -> bool:
    if type(aggregate) is not Quantile or aggregate.mechanism == "tree" or not aggregate.inside:
        return False
    few = max(query.schedule.lengths) <= _MOST_CHOICES and query.confidence is None
    return few or _must_choose(aggregate)


def _choosing(query: Query, names: Collection[str]) -> Query:
    """The query with these quantiles by choice."""
    aggregates = tuple(
        a.by_choice if isinstance(a, Quantile) and a.name in names else a for a in query.aggregates
    )
    return query if aggregates == query.aggregates else replace(query, aggregates=aggregates)


def _mean_rank(plan: NoisePlan, name: str) -> float:
    """The rank error of a quantile, root mean square over the longest window's releases."""
    (quantile,) = (a for a in plan.query.aggregates if a.name == name)
    assert isinstance(quantile, Quantile)
    ranks = plan.ranks(quantile, max(plan.query.schedule.lengths))
    return float(np.sqrt(np.mean(ranks**2)))


def _gets_noise(column: Measure) -> bool:
    """Is noise added to it? Otherwise something is chosen by it."""
    return not isinstance(column, Level) or column.share is None


def interval_of(confidence: float) -> float:
    """Half the width of an interval of a normal number, in standard deviations.

    >>> round(interval_of(0.95), 2)
    1.96
    """
    return float(-ndtri((1 - confidence) / 2))


def laplace_reach(scale: Fraction, tail: float) -> int:
    """Grid steps that discrete Laplace noise of this scale passes with probability `tail` at most.

    >>> laplace_reach(Fraction(1), 0.05)
    3
    """
    return math.ceil(float(scale) * -math.log(tail) * (1 + 1e-12))


def _laplace_stddev(scale: Fraction) -> float:
    """Of discrete Laplace noise."""
    ratio = math.exp(-1 / float(scale))
    return math.sqrt(2 * ratio) / -math.expm1(-1 / float(scale))


def matrices_of(text: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """What `canonical` made this text of: `NoisePlan.matrices`.

    >>> from dpstream.privacy.state.identity import canonical
    >>> matrices_of(canonical([(3, (0.5, 0.75)), (1, ())]))
    ((3, (0.5, 0.75)), (1, ()))
    """
    pairs = [pair["is"] for pair in json.loads(text)]
    return tuple((n, tuple(float.fromhex(d["is"]) for d in decays["is"])) for n, decays in pairs)


_FEWEST_ROWS, _FEWEST_GROUPS = 8, 32


def _fewer_candidates(query: Query) -> Query | None:
    """The query with half the rows, or groups, that a period may get, where rows are chosen.

    Float error grows with both, and is found for the largest.
    """
    if not (query.choose_rows or query.choose_clamps) or not query.chooses:
        return None
    if query.choose_rows and query.max_rows_per_group > _FEWEST_ROWS:
        return replace(
            query, max_rows_per_group=query.max_rows_per_group // 2, max_rows_contributed=None
        )
    if query.choose_groups and query.max_groups_contributed > _FEWEST_GROUPS:
        return replace(
            query,
            max_groups_contributed=query.max_groups_contributed // 2,
            max_rows_contributed=None,
        )
    return None


def _coarser(query: Query) -> Query | None:
    """The query with its finest default grid ten times as coarse, if that leaves enough steps."""
    grids = []
    for aggregate in query.aggregates:
        if isinstance(aggregate, Sum) and not aggregate.chosen and not aggregate.is_open:
            largest = max(abs(aggregate.lo), abs(aggregate.hi))
            wider = aggregate.quantum * 10
            fits = (aggregate.lo / wider).denominator == (aggregate.hi / wider).denominator == 1
            if fits and largest / wider >= _COARSEST:
                grids.append((largest / aggregate.quantum, aggregate, wider))
    if not grids:
        return None
    _, finest, quantum = max(grids, key=lambda item: item[0])
    shared = {m for m in query.measures_of[finest.name] if m.null is not None}
    aggregates = tuple(
        replace(a, quantum=quantum, chosen=False)
        if isinstance(a, Sum) and (a is finest or shared & {*query.measures_of[a.name]})
        else a
        for a in query.aggregates
    )
    return replace(query, aggregates=aggregates)
