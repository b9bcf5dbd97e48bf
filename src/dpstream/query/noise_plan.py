"""How much noise, and when a key is shown: all of it follows from the query alone.

The whole run is one charge of mu^2 (GDP), a slack of delta for the selection of keys, and what
float arithmetic adds. The columns share mu^2; each window's noise has the standard deviation that
its own number of releases asks for. Proofs: `docs/soundness/latched.md`, `docs/soundness/sqlp.md`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtri

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import BufferedLinearToeplitz, LastTwice
from dpstream.counting.noise_scale import Process, QueryCalibration, calibrate_query, sigma_for
from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.accounting.calibration import split_budget
from dpstream.privacy.accounting.promises import ROUNDING_SHARE, own_terms
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.sensitivity import group_by_change, rounds_change, units_change
from dpstream.query.aggregates import Measure, Sum
from dpstream.query.book_periods import book_share, same_rows
from dpstream.query.query import Query
from dpstream.records import Integers, Reals

_EARLY = 0.02  # the part of a threshold that sparing noise for rare keys may cost
_COARSEST = 10  # grid steps that a clamped value must still have
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
    """In grid steps, measures x releases; rounding included."""
    pre_threshold: int
    thresholds: Integers
    """Noisy units that show a key, by release."""

    @property
    def activation(self) -> int:
        """Units above which a group becomes active; -1: all groups are known and active."""
        return -1 if self.public else self.pre_threshold


@dataclass(frozen=True)
class NoisePlan:
    """The noise of one query.

    `kept`: the decays of its counters, by the number of releases, as a run has begun with them:
    what is optimised on the spot differs a little between machines. Whatever they are, sigmas are
    calibrated for them.
    """

    query: Query
    kept: tuple[tuple[int, tuple[float, ...]], ...] = field(default=(), kw_only=True)

    @cached_property
    def sensitivities(self) -> tuple[Fraction, ...]:
        """Of each measure and total, in grid steps, for one unit; L2 over all its groups."""
        return tuple(self._sensitivity(measure) for measure in self.columns)

    @cached_property
    def columns(self) -> tuple[Measure, ...]:
        """All that noise is added to: measures of groups, then totals of windows."""
        return self.query.measures + self.query.totals

    def _sensitivity(self, measure: Measure) -> Fraction:
        bounds = self.query.bounds
        if measure.kind == "units":
            return units_change(rows=bounds.rows, groups=bounds.groups)
        if measure.kind == "round":
            return rounds_change(rows=bounds.rows)
        if measure in self.query.totals:  # all rows of a unit may lie in one window
            rows = self._rows_of_total(measure)
            return group_by_change(rows=rows, per_group=rows, groups=1, largest=measure.largest)
        return group_by_change(
            rows=bounds.rows,
            per_group=bounds.rows_per_group,
            groups=bounds.groups,
            largest=measure.largest,
        )

    def _reached(self, measure: Measure) -> int:
        """How many processes of a measure one unit may move, at most."""
        bounds = self.query.bounds
        if measure in self.query.totals:  # one group in each window
            rows = self._rows_of_total(measure)
            windows = self.query.schedule.windows_of_a_period(self.query.periods)
            return rows if windows is None else min(rows, windows)
        return bounds.rows if measure.kind == "round" else bounds.groups

    def _rows_of_total(self, measure: Measure) -> int:
        """How many rows of one unit count in a total, over all windows."""
        known = {"dropped": self.query.most_dropped, "kept": self.query.bounds.rows, "beyond": 1}
        return known[measure.kind]

    @property
    def delta_slack(self) -> Fraction:
        """What selecting keys may take from delta; nothing if the keys are public."""
        query = self.query
        return query.delta * query.selection_share if query.public_groups is None else Fraction(0)

    @cached_property
    def calibrated(self) -> QueryCalibration:
        """mu^2 of the whole run, and its float error, whatever the windows' lengths."""
        query, weights = self.query, self.query.column_weights
        return calibrate_query(
            *(self._process(releases) for releases in query.schedule.lengths),
            sensitivities=self.sensitivities,
            shares=[weight / sum(weights) for weight in weights],
            influence=[self._reached(column) for column in self.columns],
            epsilon=query.epsilon,
            delta=query.delta,
            delta_slack=self.delta_slack,
        )

    @property
    def interval(self) -> float | None:
        """Half the width of a confidence interval, in standard deviations."""
        confidence = self.query.confidence
        return None if confidence is None else float(-ndtri((1 - confidence) / 2))

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """mu^2 of each measure and total."""
        return split_budget(self.calibrated.mu_squared, weights=self.query.column_weights)

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
        processes = [(length, self._process(length)) for length in self.query.schedule.lengths]
        return [(n, () if isinstance(p, Honaker) else p.decays) for n, p in processes]

    def terms(self, book: Terms | None = None) -> Terms:
        """The book that this query opens where there is none, or its terms within a `book`.

        A book of other periods of the same users counts what it takes of them (`book_periods`).
        """
        query = self.query
        own = self._own_terms()
        same = book is None or query.period_in_words == book.period
        if book is None or same or not same_rows(query, book):
            return own
        book_share(query, book)
        return replace(own, period=book.period, time_zone=book.time_zone, change=book.change)

    def _own_terms(self) -> Terms:
        query = self.query
        return own_terms(
            epsilon=query.epsilon,
            mu_squared=self.calibrated.mu_squared,
            delta_slack=self.delta_slack,
            error=self.calibrated.error,
            period=query.period_in_words,
            time_zone=query.time_zone,
            change=query.protected,
        )

    def pay(self, spend: QuerySpend, digest: str) -> None:
        """Charge the whole run, once."""
        spend.pay(**self.cost(spend.book), digest=digest)

    def first_room(self, spend: QuerySpend) -> int | None:
        """The first period from which on the book could pay for the query; None: it never can."""
        cost = self.cost(spend.book)
        return None if cost["periods"].first is None else spend.first_room(**cost)

    def cost(self, book: Terms) -> dict[str, Any]:
        """What one unit of the book loses by the whole run."""
        share, error = book_share(self.query, book), self.calibrated.error
        return {
            "mu_squared": share.mu_squared(self.calibrated.mu_squared, self.shares, self.columns),
            "delta_slack": self.delta_slack * share.groups,
            "error": FloatError(xi=error.xi * share.groups, tau=error.tau * share.groups),
            "periods": share.periods,
        }

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
        plan = self._of_columns(releases, slice(len(query.measures)))
        if query.public_groups is not None:
            return plan
        deviations = self._quantiles(releases) * plan.sigmas[0] * plan.process.error() * (1 + 1e-12)
        early = query.pre_threshold
        if early is None:
            early = math.floor(_EARLY * float(deviations[-1]))
        thresholds = early + 1 + np.ceil(deviations + 0.5).astype(np.int64)
        return replace(plan, public=False, pre_threshold=early, thresholds=thresholds)

    @lru_cache(maxsize=64)  # noqa: B019
    def totals(self, releases: int) -> WindowPlan:
        """The noise of a window's totals: one group, which everybody knows."""
        return self._of_columns(releases, slice(len(self.query.measures), None))

    def _of_columns(self, releases: int, columns: slice) -> WindowPlan:
        """The noise of some columns of groups that everybody knows."""
        process = self._process(releases)
        sigmas = tuple(
            float(sigma_for(process, sensitivity=sensitivity, mu_squared=share))
            for sensitivity, share in zip(self.sensitivities, self.shares, strict=True)
        )[columns]
        stddevs: Reals = np.hypot(np.outer(sigmas, process.error()), 12**-0.5)
        return WindowPlan(
            public=True,
            process=process,
            sigmas=sigmas,
            stddevs=stddevs,
            pre_threshold=0,
            thresholds=np.zeros(releases, np.int64),
        )

    def _quantiles(self, releases: int) -> Reals:
        """How many standard deviations no noise of a unit's own keys passes, but for the slack.

        By release: the last one has a part of the slack of its own, the others share the rest.
        """
        parts = np.full(releases, 1 / releases)
        if self.query.last_share is not None and releases > 1:
            last = float(self.query.last_share)
            parts[:-1], parts[-1] = (1 - last) / (releases - 1), last
        each = float(self.delta_slack) * (1 - 1e-12) / self._reached(self.columns[0]) * parts
        quantiles: Reals = -ndtri(each) * (1 + 1e-12)
        return quantiles


def plan_query(query: Query, counters: str | None = None) -> NoisePlan:
    """The plan of a query; grids that nobody chose are made coarser where floats ask for it.

    If that is not enough, or takes much of what a book has for float error, what the bounds drop is
    not measured, unless the query says how.

    `counters`: the canonical text of the matrices that a run has begun with.
    """
    kept, given = () if counters is None else matrices_of(counters), query
    while True:
        plan = NoisePlan(query, kept=kept)
        spared = query.totals and not query.debias and query.max_dropped_rows is None
        try:
            error = plan.calibrated.error
        except InvalidParameter as problem:
            coarser = _coarser(query)
            if coarser is None:
                if not spared:
                    raise InvalidParameter(f"the query {query.name!r}: {problem}") from None
                coarser = replace(given, report_bias=False)
            query = coarser
        else:
            if not spared or error.xi <= query.epsilon * ROUNDING_SHARE / 10:
                return plan
            query = replace(given, report_bias=False)


def matrices_of(text: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """What `canonical` made this text of: `NoisePlan.matrices`.

    >>> from dpstream.privacy.state.identity import canonical
    >>> matrices_of(canonical([(3, (0.5, 0.75)), (1, ())]))
    ((3, (0.5, 0.75)), (1, ()))
    """
    pairs = [pair["is"] for pair in json.loads(text)]
    return tuple((n, tuple(float.fromhex(d["is"]) for d in decays["is"])) for n, decays in pairs)


def _coarser(query: Query) -> Query | None:
    """The query with its finest default grid ten times as coarse, if that leaves enough steps."""
    grids = []
    for aggregate in query.aggregates:
        if isinstance(aggregate, Sum) and not aggregate.chosen:
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
