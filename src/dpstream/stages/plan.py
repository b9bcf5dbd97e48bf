"""How much noise, and when a key is shown: all of it follows from the query alone.

The whole run is one charge of mu^2 (GDP), a tail for the selection of keys, and what float
arithmetic adds. The columns share mu^2; each window's noise has the standard deviation that its own
number of releases asks for. Proof: `docs/soundness/latched.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from scipy.stats import norm

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.float_error import (
    QueryCalibration,
    calibrate_query,
    query_sigma,
)
from dpstream.privacy.calibration import split_budget
from dpstream.privacy.charges import Terms
from dpstream.privacy.promises import own_terms
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.sensitivity import group_by_change, units_change
from dpstream.records import Integers, Reals
from dpstream.stages.aggregates import Avg, Measure, Sum
from dpstream.stages.query import Query

_EARLY = 0.02  # the part of a threshold that sparing noise for rare keys may cost
_COARSEST = 10  # grid steps that a clamped value must still have


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A window with so many releases: its noise process, and per measure the noise it adds."""

    public: bool
    """Are all groups known, and shown from the first release on?"""
    process: BufferedLinearToeplitz
    sigmas: tuple[float, ...]
    stddevs: Reals
    """In grid steps, measures x releases; rounding included."""
    pre_threshold: int
    thresholds: Integers
    """Noisy units that show a key, by release."""


@dataclass(frozen=True)
class Plan:
    """The noise of one query."""

    query: Query

    @cached_property
    def sensitivities(self) -> tuple[Fraction, ...]:
        """Of each measure, in grid steps, for one unit; L2 over all its groups."""
        return tuple(self._sensitivity(measure) for measure in self.query.measures)

    def _sensitivity(self, measure: Measure) -> Fraction:
        bounds = self.query.bounds
        if measure.kind == "units":
            return units_change(rows=bounds.rows, groups=bounds.groups)
        return group_by_change(
            rows=bounds.rows,
            per_group=bounds.rows_per_group,
            groups=bounds.groups,
            largest=measure.largest,
        )

    @property
    def tail(self) -> Fraction:
        """What selecting keys may take from delta; nothing if the keys are public."""
        query = self.query
        return query.delta * query.selection_share if query.public_keys is None else Fraction(0)

    @cached_property
    def calibrated(self) -> QueryCalibration:
        """mu^2 of the whole run, and its float error, whatever the windows' lengths."""
        query = self.query
        columns = len(query.measures)
        return calibrate_query(
            *(_process(releases, query.buffers) for releases in query.schedule.lengths),
            sensitivities=self.sensitivities,
            shares=[Fraction(1, columns)] * columns,
            groups=query.bounds.groups,
            epsilon=query.epsilon,
            delta=query.delta,
            tail=self.tail,
        )

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """mu^2 of each measure."""
        return split_budget(self.calibrated.mu_squared, columns=len(self.query.measures))

    @property
    def decays(self) -> list[tuple[int, tuple[float, ...]]]:
        """The counters' matrices, by the number of releases: they fix the noise."""
        buffers, lengths = self.query.buffers, self.query.schedule.lengths
        return [(releases, _process(releases, buffers).decays) for releases in lengths]

    def terms(self) -> Terms:
        """The book that this query opens where there is none."""
        query = self.query
        return own_terms(
            epsilon=query.epsilon,
            mu_squared=self.calibrated.mu_squared,
            tail=self.tail,
            error=self.calibrated.error,
            period=query.period_in_words,
            time_zone=query.time_zone,
            change=query.protected,
        )

    def pay(self, spend: QuerySpend, digest: str) -> None:
        """Charge the whole run, once."""
        calibrated = self.calibrated
        spend.pay(
            mu_squared=calibrated.mu_squared,
            tail=self.tail,
            error=calibrated.error,
            digest=digest,
        )

    @lru_cache(maxsize=64)  # noqa: B019 - a plan lives as long as its query
    def window(self, releases: int) -> WindowPlan:
        """The noise of a window with so many releases."""
        query = self.query
        process = _process(releases, query.buffers)
        sigmas = tuple(
            float(query_sigma(process, sensitivity=sensitivity, mu_squared=share))
            for sensitivity, share in zip(self.sensitivities, self.shares, strict=True)
        )
        rows = process.error()
        stddevs = np.hypot(np.outer(sigmas, rows), 12**-0.5)
        if query.public_keys is not None:
            return WindowPlan(
                public=True,
                process=process,
                sigmas=sigmas,
                stddevs=stddevs,
                pre_threshold=0,
                thresholds=np.zeros(releases, np.int64),
            )
        deviations = self._quantile(releases) * sigmas[0] * rows * (1 + 1e-12)
        early = query.pre_threshold
        if early is None:
            early = math.floor(_EARLY * float(deviations[-1]))
        thresholds = early + 1 + np.ceil(deviations + 0.5).astype(np.int64)
        return WindowPlan(
            public=False,
            process=process,
            sigmas=sigmas,
            stddevs=stddevs,
            pre_threshold=early,
            thresholds=thresholds,
        )

    def _quantile(self, releases: int) -> float:
        """How many standard deviations no noise of a unit's own keys passes, but for the tail."""
        each = float(self.tail) * (1 - 1e-12) / (self.query.bounds.groups * releases)
        return float(norm.isf(each)) * (1 + 1e-12)


@lru_cache(maxsize=256)
def _process(releases: int, buffers: int) -> BufferedLinearToeplitz:
    return BufferedLinearToeplitz(steps=releases, buffers=buffers)


def planned(query: Query) -> Plan:
    """The plan of a query; grids that nobody chose are made coarser where floats ask for it."""
    while True:
        plan = Plan(query)
        try:
            _ = plan.calibrated
        except InvalidParameter:
            coarser = _coarser(query)
            if coarser is None:
                raise
            query = coarser
        else:
            return plan


def _coarser(query: Query) -> Query | None:
    """The query with its finest default grid ten times as coarse, if that leaves enough steps."""
    found = []
    for aggregate in query.aggregates:
        if isinstance(aggregate, Sum) and not aggregate.chosen:
            largest = max(abs(aggregate.lo), abs(aggregate.hi))
            wider = aggregate.quantum * 10
            fits = (aggregate.lo / wider).denominator == (aggregate.hi / wider).denominator == 1
            if fits and largest / wider >= _COARSEST:
                found.append((largest / aggregate.quantum, aggregate, wider))
    if not found:
        return None
    _, finest, quantum = max(found, key=lambda item: item[0])
    kind = Avg if isinstance(finest, Avg) else Sum
    changed = kind(
        finest.name, column=finest.column, lo=finest.lo, hi=finest.hi, quantum=quantum, chosen=False
    )
    aggregates = [changed if a is finest else a for a in query.aggregates]
    return replace(query, aggregates=aggregates)
