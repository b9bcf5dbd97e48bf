"""Shares of counts of users: of the step before in a funnel, of its cohort in a retention table.

It is post-processing of what is published, so it costs nothing. Beside each count stands
`<count>_share` with its interval, `<count>_share_low` and `<count>_share_high`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from scipy.special import ndtri
from sqlglot import exp

from dpstream.group_by.cohorts import LAG, CohortRows
from dpstream.group_by.funnel import STEP, FunnelRows
from dpstream.group_by.inner_rows import as_moments
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import Ticks
from dpstream.records import Integers, Reals
from dpstream.rows.parse import row_codes, whole_column
from dpstream.sql_compiler.earlier_windows import STDDEV, known_numbers, numbers_of
from dpstream.sql_compiler.select import distinct_values
from dpstream.sql_compiler.statement import USER_TABLES, Draft, call_name

SHARE = "_share"
ENDS = ("", "_low", "_high")
COHORT = "cohort"
_USUAL = 0.95
"""How sure intervals of shares are, unless `confidence` says it."""
Measured = tuple[Reals, Reals]
"""Published counts and their standard deviations."""


def normal_interval(part: Measured, whole: Measured, *, deviations: float) -> tuple[Reals, Reals]:
    """All shares from 0 to 1 that two counts with normal noise speak for (Fieller's interval).

    A share r is one of them if part - r whole lies within so many of its own standard deviations
    of 0. Where the whole may be nothing, every share is.

    >>> low, high = normal_interval((np.array([50.0]), np.array([3.0])),
    ...                             (np.array([100.0]), np.array([4.0])), deviations=2)
    >>> [round(float(low[0]), 3), round(float(high[0]), 3)]
    [0.431, 0.576]
    """
    (x, of_x), (y, of_y) = part, whole
    z2 = deviations**2
    with np.errstate(all="ignore"):
        square = y**2 - z2 * of_y**2
        known = (square > 0) & (y > 0)
        root = np.sqrt(z2 * (x**2 * of_y**2 + of_x**2 * square).clip(min=0))
        low, high = (x * y - root) / square, (x * y + root) / square
    return _within(low, high, known)


def laplace_interval(part: Measured, whole: Measured, *, confidence: float) -> tuple[Reals, Reals]:
    """The same of two counts with discrete Laplace noise.

    Each is within its scale times ln(2/alpha), plus one, of its truth, but for alpha / 2.
    """
    (x, of_x), (y, of_y) = part, whole
    far = math.log(2 / (1 - confidence))
    with np.errstate(all="ignore"):
        at_x, at_y = (
            1 + far / (2 * np.arcsinh(1 / (math.sqrt(2) * each))) for each in (of_x, of_y)
        )
        least, most = y - at_y, y + at_y
        low, high = (x - at_x).clip(min=0) / most, (x + at_x).clip(min=0) / least
    return _within(low, high, least > 0)


def _within(low: Reals, high: Reals, known: Any) -> tuple[Reals, Reals]:
    low, high = np.where(known, low, 0.0), np.where(known, high, 1.0)
    return low.clip(0.0, 1.0), high.clip(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How sure intervals are, and of what noise: `normal`, or Laplace's."""

    level: float
    normal: bool

    def interval(self, part: Measured, whole: Measured) -> tuple[Reals, Reals]:
        """The interval of part / whole."""
        if not self.normal:
            return laplace_interval(part, whole, confidence=self.level)
        return normal_interval(part, whole, deviations=float(-ndtri((1 - self.level) / 2)))


@dataclass(frozen=True, kw_only=True, repr=False)
class SharesOfSteps:
    """Each count of a funnel's step as a share of the count of the step before."""

    counts: tuple[str, ...]
    keys: tuple[str, ...]
    """What else rows are grouped by: each of their values has a funnel."""
    step: str
    confidence: Confidence
    ordered: bool
    """Is it said in which order rows stand? Otherwise a funnel's steps stand together."""
    windows_back: int = 0

    @property
    def text(self) -> str:
        """All of it: part of what fixes a query's releases, so it never changes."""
        order = "" if self.ordered else " IN ORDER"
        return (
            f"SHARES OF {self.counts!r} OVER {self.keys!r} BY {self.step!r} WITHIN "
            f"{self.confidence.level!r}{order}"
        )

    def computed(self, before: Mapping[str, bool]) -> dict[str, bool]:
        """Columns that are computed from noisy ones, and whether each has an error bar."""
        return dict(before) | {f"{name}{SHARE}": False for name in self.counts}

    def __call__(self, table: pa.Table, window: int, earlier: dict[int, pa.Table]) -> pa.Table:
        """The table with its shares."""
        steps = np.asarray(whole_column(table[self.step]), np.int64)
        funnels = row_codes([whole_column(table[name]) for name in self.keys], len(table))
        if not self.ordered:
            _, first = np.unique(funnels, return_inverse=True)
            begins: Integers = np.full(int(first.max()) + 1 if len(first) else 0, len(table))
            np.minimum.at(begins, first, np.arange(len(table)))
            order = np.lexsort((steps, begins[first]))
            table, steps, funnels = table.take(pa.array(order)), steps[order], funnels[order]
        place = {one: at for at, one in enumerate(zip(funnels, steps, strict=True))}
        before = np.array(
            [place.get((f, s - 1), -1) for f, s in zip(funnels, steps, strict=True)], np.int64
        )
        return _with_shares(table, self.confidence, self.counts, table, before)


@dataclass(frozen=True, kw_only=True, repr=False)
class SharesOfCohorts:
    """When the cohort of each row began, and each count as a share of what the cohort began with.

    Cohorts that would have begun before the run did are left out: nobody is in them.
    """

    counts: tuple[str, ...]
    keys: tuple[str, ...]
    """What else rows are grouped by: each of their values has cohorts of its own."""
    lag: str
    lags: int
    period: int
    zone: str
    confidence: Confidence
    ordered: bool

    @property
    def windows_back(self) -> int:
        """How many earlier windows it looks at."""
        return self.lags

    @property
    def text(self) -> str:
        """All of it: part of what fixes a query's releases, so it never changes."""
        order = "" if self.ordered else " IN ORDER"
        return (
            f"COHORTS OF {self.counts!r} OVER {self.keys!r} BY {self.lag!r} TO {self.lags} OF "
            f"{self.period} WITHIN {self.confidence.level!r} IN {self.zone}{order}"
        )

    def computed(self, before: Mapping[str, bool]) -> dict[str, bool]:
        """Columns that are computed from noisy ones, and whether each has an error bar."""
        return dict(before) | {f"{name}{SHARE}": False for name in self.counts}

    def __call__(self, table: pa.Table, window: int, earlier: dict[int, pa.Table]) -> pa.Table:
        """The table with cohorts and shares; notes in `earlier` what this cohort begins with."""
        lags = np.asarray(whole_column(table[self.lag]), np.int64)
        there = np.flatnonzero(lags <= window)
        if not self.ordered:
            there = there[np.argsort(lags[there], kind="stable")]
        table, lags = table.take(pa.array(there)), lags[there]
        beside = [f"{name}{end}" for name in self.counts for end in ("", STDDEV)]
        size = table.filter(pa.array(lags == 0)).select([*self.keys, *beside])
        earlier[window] = size
        wholes, places = [size.select(beside).slice(0, 0)], np.full(len(table), -1)
        for lag in sorted({*lags.tolist()} - {0}):
            size = earlier.get(window - lag, size.slice(0, 0))
            mine = np.flatnonzero(lags == lag)
            codes = row_codes(
                [
                    pa.concat_arrays([whole_column(one[name]) for one in (size, table)])
                    for name in self.keys
                ],
                len(size) + len(table),
            ).tolist()
            known = {code: at + sum(map(len, wholes)) for at, code in enumerate(codes[: len(size)])}
            places[mine] = [known.get(codes[len(size) + at], -1) for at in mine.tolist()]
            wholes.append(size.select(beside))
        table = _with_shares(table, self.confidence, self.counts, pa.concat_tables(wholes), places)
        begins = [
            Ticks(origin=start, size=self.period, zone=self.zone).at(-lag)
            for start, lag in zip(_micros(table["window_start"]), lags.tolist(), strict=True)
        ]
        at = table.column_names.index(self.lag)
        return table.add_column(at, COHORT, as_moments(np.array(begins, np.int64)))


def _micros(column: pa.ChunkedArray) -> list[int]:
    micros = whole_column(column).cast(pa.timestamp("us", tz="UTC")).view(pa.int64())
    return [int(each) for each in micros.to_pylist()]


def _with_shares(
    table: pa.Table,
    confidence: Confidence,
    counts: Sequence[str],
    wholes: pa.Table,
    places: Integers,
) -> pa.Table:
    """The table with the share of each count in that of a row of `wholes` (-1: of none)."""
    none = places < 0
    at = pa.array(np.where(none, 0, places), mask=none)
    for name in counts:
        part = numbers_of(table[name]), numbers_of(table[name + STDDEV])
        taken = wholes.select([name, name + STDDEV]).take(at)
        whole = numbers_of(taken[name]), numbers_of(taken[name + STDDEV])
        low, high = confidence.interval(part, whole)
        with np.errstate(all="ignore"):
            share = np.where(whole[0] > 0, part[0] / whole[0], np.nan).clip(0.0, 1.0)
        after = max(
            number for number, known in enumerate(table.column_names) if _is_beside(known, name)
        )
        for end, values in zip(ENDS, (share, low, high), strict=True):
            after += 1
            column = known_numbers(np.where(none, np.nan, values))
            table = table.add_column(after, f"{name}{SHARE}{end}", column)
    return table


def _is_beside(column: str, count: str) -> bool:
    return column in {f"{count}{end}" for end in ("", STDDEV, "_low", "_high", "_high_all")}


Shares: TypeAlias = SharesOfSteps | SharesOfCohorts


def shares_of_users(draft: Draft, query: Query | SeriesQuery) -> Shares | None:
    """The shares that stand beside counts of units of FUNNEL or RETENTION; None: there are none."""
    unit = draft.relation.unit
    inner = None if unit is None else unit.inner
    if not isinstance(inner, FunnelRows | CohortRows) or not isinstance(query, Query):
        return None
    counts = tuple(
        name
        for name, call in draft.aggregates.items()
        if name in draft.outputs and call_name(call) == "COUNT" and _counts_units(draft, call)
    )
    column = STEP if isinstance(inner, FunnelRows) else LAG
    key = next(n for n, e in draft.keys.items() if isinstance(e, exp.Column) and e.name == column)
    if not set(draft.keys) <= set(draft.outputs):
        counts = ()
    taken = {*draft.outputs} & {COHORT, *(f"{n}{SHARE}{end}" for n in counts for end in ENDS)}
    if taken:
        raise draft.refusal(
            draft.select.expressions[0],
            f"{min(taken)} is a column of its own in what is published",
            "use another name",
        )
    how: dict[str, Any] = {
        "counts": counts,
        "confidence": Confidence(level=query.confidence or _USUAL, normal=not query.pure),
        "ordered": bool(draft.select.args.get("order")),
    }
    listed = {name for names in USER_TABLES.values() for name in names}
    others = tuple(
        name
        for name, node in draft.keys.items()
        if not (isinstance(node, exp.Column) and node.name in listed)
    )
    if isinstance(inner, CohortRows):
        if key not in draft.outputs:
            return None
        period = draft.parameters["window"].size
        return SharesOfCohorts(
            keys=others, lag=key, lags=inner.lags, period=period, zone=query.time_zone, **how
        )
    return SharesOfSteps(keys=others, step=key, **how) if counts else None


def _counts_units(draft: Draft, call: exp.Expr) -> bool:
    """Is it COUNT(*), or COUNT(DISTINCT unit)? A unit has a row for each step, or lag."""
    argument = call.expressions[0]
    if isinstance(argument, exp.Distinct):
        return distinct_values(draft, call) is None
    return isinstance(argument, exp.Star)
