"""`dpstream.bounds`: read a source once, pay or be told that it is public, propose bounds.

What follows the histograms is post-processing: it reads them and public numbers alone. Bounds leave
out a share of a group's rows, and clamps a share of its values (bias); noise grows with both. For a
group of a given size the error of an aggregate, relative to its value, is

    sqrt(left out^2 + (noise / value)^2)

and the groups, rows and clamps with the least error over all aggregates of the query are proposed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpstream.bounds_proposal.histograms import (
    CLASSES,
    COUNTS,
    SIZES,
    Histograms,
    UnitFacts,
    collect_unit_facts,
    exact_histograms,
    fact_names,
    histograms_of,
    kept_release,
    value_sums,
)
from dpstream.bounds_proposal.lost_rows import (
    Asked,
    Measured,
    Measurement,
    kept_sum,
    read_plan,
)
from dpstream.bounds_proposal.smooth_histogram import SizeDistribution, smooth_histogram
from dpstream.connectors.registry import open_source
from dpstream.connectors.union_source import union_source
from dpstream.errors import InvalidParameter
from dpstream.optional import optional
from dpstream.privacy.amounts import Amount
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.identity import canonical, readable
from dpstream.privacy.state.run_directory import GivenLedger, read_about
from dpstream.privacy.state.secret import secret_path
from dpstream.query.aggregates import Aggregate, Count, CountUnits, OfPairs, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.public_tables import missing_table
from dpstream.query.query import Query
from dpstream.records import Reals, Source
from dpstream.session.start import SourceSpec

_QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_USUAL: Final = 0.99  # the quantile of groups that a key of the usual size is reckoned with
_KEY_SIZE: Final = 10.0  # of a key to choose bounds for, in thresholds
_IN_NOISE: Final = 100.0  # the same where nothing is known: in standard deviations of its count
_AROUND: Final = (0.1, 1.0, 10.0, 100.0)  # sizes of keys that errors are told for
_MOST_ROWS: Final = 64
_SURE: Final = 3.0  # standard deviations above which there are units of a sign
_READ_AS: Final = bytes(16)  # the run of hashes in a measurement that is kept or public
_MOST_TIMES: Final = 4.0  # that a measured loss may differ from the fitted one, for other bounds
_SEEN: Final = 2.0  # deviations of a sum, from which on some rows are left out for sure, or nearly
_BEYOND: Final = 0.5  # of what is fitted beyond its cut, which may be nothing or twice that
_FEW_REPEATS, _FEW_GIANTS = 10.0, 30.0  # `rare` of rows in a group, and of values
Clamps = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Bounds, and what they do to a key of the size that the proposal is for.

    `left_out`: share of all rows beyond the bounds. `noise`: of the first aggregate in the last
    table of a window. `threshold`: noisy units that show a key there. `error`: of all aggregates.
    """

    groups: int
    rows: int
    left_out: float
    noise: float
    threshold: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What becomes of one aggregate of a key with so many rows, shares of its true value."""

    key_size: float
    aggregate: str
    bias: float
    noise: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Bounds, and what speaks for them.

    `epsilon`, `delta`: paid for this proposal; None if the data were declared public. `clamps`: by
    the column of a SUM, AVG and so on. `left_out`: share of all rows beyond the bounds, and of each
    column's values beyond the clamps.
    """

    query: Query = field(repr=False)
    epsilon: float | None
    delta: float | None
    measured_before: bool
    key_size: float
    max_groups_contributed: int
    max_rows_per_group: int
    clamps: Mapping[str, Clamps]
    pre_threshold: int
    left_out: float
    values_left_out: Mapping[str, float]
    error: float
    units: float
    rows: float
    stddev: float
    quantiles: Mapping[str, Mapping[str, float]]
    expected: Sequence[Expected]
    trade_off: Sequence[Choice]

    @property
    def private(self) -> bool:
        """May it be shown to anyone?"""
        return self.epsilon is not None

    @property
    def bounded_query(self) -> Query:
        """The query with the bounds that are proposed."""
        return _with_bounds(
            self.query, self.max_groups_contributed, self.max_rows_per_group, self.clamps
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, and the snippets."""
        more = {"private": self.private, "sql": self.sql(), "python": self.python()}
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "query"}
        lists = {name: [asdict(each) for each in facts[name]] for name in ("expected", "trade_off")}
        return {"query": self.query.name} | facts | lists | more

    def sql(self) -> str:
        """The OPTIONS clause, and the aggregates that go with it."""
        options = {
            "epsilon": _number(self.query.epsilon),
            "delta": _number(self.query.delta),
            "privacy_unit_column": self.query.privacy_unit_column,
            "max_groups_contributed": str(self.max_groups_contributed),
            "max_rows_per_group": str(self.max_rows_per_group),
            "pre_threshold": str(self.pre_threshold),
        }
        inside = ", ".join(f"{name} = {text}" for name, text in options.items())
        lines = [f"OPTIONS ({inside})"]
        for each in _clamped(self.query):
            lo, hi = map(_number, self.clamps[each.column])
            kind = str(each.identity).upper()
            lines.append(f"{kind}({each.column}, contribution_bounds_per_row => ({lo}, {hi}))")
        return "\n".join(lines)

    def python(self) -> str:
        """The arguments of a Query."""
        lines = [
            f"max_groups_contributed={self.max_groups_contributed}",
            f"max_rows_per_group={self.max_rows_per_group}",
            f"pre_threshold={self.pre_threshold}",
        ]
        sums = [
            f"dps.{type(each).__name__}({each.name!r}, column={each.column!r}, "
            f"contribution_bounds_per_row=({', '.join(map(_number, self.clamps[each.column]))}))"
            for each in _clamped(self.query)
        ]
        return ", ".join([*lines, *([f"aggregates=[{', '.join(sums)}]"] if sums else [])])

    def plot(self, path: str | Path) -> None:
        """Bias, noise and error over the bound."""
        drawing = optional("matplotlib.figure", extra="plot", who="a plot")
        figure = drawing.Figure(figsize=(7, 4), dpi=144, layout="constrained")
        panel = figure.subplots()
        groups = [choice.groups for choice in self.trade_off]
        noise = [math.sqrt(max(c.error**2 - c.left_out**2, 0.0)) for c in self.trade_off]
        for label, line, values in (
            ("rows left out (bias)", "--", [choice.left_out for choice in self.trade_off]),
            (f"noise, key of {self.key_size:,.0f}", ":", noise),
            ("both", "-", [choice.error for choice in self.trade_off]),
        ):
            panel.plot(groups, values, line, marker="o", markersize=3, label=label)
        panel.axvline(self.max_groups_contributed, color="#8a8f98", linewidth=1)
        panel.set(xscale="log", xlabel="groups kept of a unit", ylabel="share of a key's value")
        panel.set_title("bias against noise")
        panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def _number(value: float | Fraction) -> str:
    return f"{float(value):.12g}"


def bounds(
    query: Query,
    source: SourceSpec | Mapping[str, SourceSpec],
    *,
    public: bool = False,
    epsilon: Amount | None = None,
    delta: Amount = 1e-9,
    key_size: float | None = None,
    sample: float = 1.0,
    state: str | Path | None = None,
    again: bool = False,
    ledger: GivenLedger = None,
    dataset: str = "stream",
    analyst: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Proposal:
    """Propose how much of each unit a query should keep, and where it should clamp its values.

    The bounds and clamps that `query` has are not looked at; its keys, windows, triggers, filters,
    unit, budget and aggregates are. `public=True` declares that the source is public: nothing is
    paid, and what is proposed is exact. Otherwise `epsilon` and `delta` are charged to `dataset`'s
    book in `ledger` before noise is drawn; a book that is not there yet is opened, and whoever
    opens it next sets its budget. `analyst`: who asks, for a book that gives analysts shares.

    What was paid for is kept in `state`, a directory: the next question about the same rows, keys
    and windows is answered from it, without reading, paying or drawing anything; `again` pays for
    another measurement. The bounds are for keys of `key_size` rows in a window (default: the mean
    of public groups; else ten times what a key needs to appear). `sample` looks at this share of
    the units.

    >>> import pyarrow as pa
    >>> rows = range(6000)
    >>> clicks = pa.table({"user": [n % 500 for n in rows], "page": [n % 7 for n in rows]})
    >>> query = Query(privacy_unit_column="user", keys=["page"], epsilon=1, delta=1e-9,
    ...               max_groups_contributed=1)
    >>> proposal = bounds(query, clicks, public=True)
    >>> proposal.max_groups_contributed, proposal.max_rows_per_group
    (7, 2)
    """
    if not isinstance(query, Query):
        raise InvalidParameter(
            "bounds are for a GROUP BY: a time-series mechanism keeps one row of a unit in each "
            "window, and there is nothing to choose"
        )
    if query.per_unit is not None and query.per_unit.across_windows:
        raise InvalidParameter(
            f"bounds have nothing to choose in {query.name!r}: a unit has one cohort, and is in "
            f"{query.per_unit.most} groups at most, for ever; leave max_groups_contributed out"
        )
    if not 0 < sample <= 1:
        raise InvalidParameter(f"sample must be above 0 and at most 1; got {sample}")
    for name in query.table_names:
        raise missing_table(name)
    query = _counting_units(query.starting(0))
    columns = list(dict.fromkeys(each.column for each in _clamped(query)))
    reading, names = reading_of(query, columns), fact_names(query, columns)
    folder = None if state is None else _folder(Path(state), reading, source, again=again)
    answer = partial(from_histograms, query, columns=columns, share=sample, key_size=key_size)
    kept = None if folder is None or public else kept_release(folder)
    plan = None if kept is None or folder is None else read_plan(folder)
    lost = None if folder is None or plan is None else kept_sum(folder, plan)
    if kept is not None and (plan is None or lost is not None or epsilon is None):
        assert folder is not None
        about: Any = read_about(folder)
        known = plan or {name: readable(text) for name, text in about["facts"].items()}
        paid = [Fraction(known[name]) for name in ("epsilon", "delta")]
        found = answer(histograms_of(kept, names), lost=lost)
    elif public == (epsilon is not None):
        raise InvalidParameter(
            "bounds come from data that is declared public (public=True, --public), or are paid "
            f"for (epsilon=0.1, --epsilon 0.1): one of the two; got {public=}, {epsilon=}"
        )
    else:
        paid, measurement = [], None
        if not public:
            measurement = Measurement.of(
                reading, names, epsilon=epsilon, delta=delta, about=_digest(reading)
            )
            paid = [measurement.epsilon, measurement.delta]
        if folder is not None and not public:
            make_directory(folder.parent, mode=0o700)
        if public:
            secret, run = Secret(bytes(32)), _READ_AS  # the same proposal every time
        elif folder is None:
            secret, run = Secret.of(None), mint_run_id()
        else:
            secret, run = Secret.of(secret_path(folder)), _READ_AS
        facts = collect_unit_facts(
            _opened(query, source),
            reading,
            secret=secret,
            run=run,
            share=sample,
            progress=progress or (lambda done, total: None),
        )
        if measurement is None:
            found = answer(exact_histograms(facts, names))
        else:
            payer: Any = {"ledger": ledger, "dataset": dataset, "analyst": analyst}
            kept_in: Any = {} if folder is None else {"state": folder, "secret": secret}
            found = _pay_and_ask(measurement, facts, answer, **payer, **kept_in)
    return Proposal(
        query=query,
        epsilon=float(paid[0]) if paid else None,
        delta=float(paid[1]) if paid else None,
        measured_before=kept is not None,
        **found,
    )


def _pay_and_ask(
    measurement: Measurement,
    facts: UnitFacts,
    answer: Callable[..., dict[str, Any]],
    *,
    state: Path | None = None,
    secret: Secret | None = None,
    **payer: Any,
) -> dict[str, Any]:
    """The histograms, then the sum of what the bounds that they propose leave out."""
    if state is not None:
        measurement.note(state)
    if state is None or not state.exists():
        measurement.check_room(facts, **payer)
    histograms = measurement.histograms(facts, state=state, secret=secret, **payer)
    about = asked_about(histograms, measurement, answer(histograms))
    lost = measurement.lost(facts, about, state=state, secret=secret, **payer)
    return answer(histograms, lost=lost)


def from_histograms(
    query: Query,
    histograms: Histograms,
    columns: Sequence[str] = (),
    *,
    share: float = 1.0,
    key_size: float | None = None,
    lost: Measured | None = None,
) -> dict[str, Any]:
    """What is proposed, and what speaks for it, of a query whose histograms are known.

    `lost`: what some bounds were measured to leave out. It changes what is said of bounds, and not
    which are proposed: those are the ones that it was measured for.
    """
    log = _log_of(histograms, tuple(columns), share)
    found = _least_error(query, log, key_size)
    if lost is None:
        return found
    bounds = found["max_groups_contributed"], found["max_rows_per_group"]
    return _least_error(query, log.corrected(lost), key_size, bounds)


def asked_about(
    histograms: Histograms, measurement: Measurement, found: Mapping[str, Any]
) -> Asked:
    """The bounds that were found, and where to cut what one unit loses by them.

    There the histograms see the least of noise and of what is beyond together. A unit's groups are
    taken to have as many rows each.
    """
    bounds = found["max_groups_contributed"], found["max_rows_per_group"]
    lost, units = _log_of(histograms, (), 1.0).losses(*bounds)
    beyond = np.array([units @ np.maximum(lost - cut, 0.0) for cut in COUNTS])
    cut = COUNTS[np.argmin(np.hypot(measurement.noise_of_one * COUNTS, beyond))]
    return Asked(groups=bounds[0], rows=bounds[1], cut=int(cut))


def _counting_units(query: Query) -> Query:
    """The query with one count of units for all that is bounded per unit and group.

    Such bounds stay as they are: what is chosen is in how many groups a unit is. A query for keys
    alone counts units, too. Of pairs of columns, whose clamps stay, pairs are counted.
    """
    kept: list[Aggregate] = [
        Count(a.name) if isinstance(a, OfPairs) else a
        for a in query.aggregates
        if not any(m.per_unit for m in a.measures(True))
    ]
    if len(kept) < len(query.aggregates) or not kept:
        kept.append(CountUnits("units in a group"))
    known = {*(a.name for a in kept), "selection", "bias"}
    weights = tuple(pair for pair in query.weights if pair[0] in known)
    return replace(query, aggregates=tuple(kept), weights=weights, weighted_keys=False)


def _clamped(query: Query) -> list[Sum]:
    """The aggregates whose clamps are to be chosen; a COUNTIF adds 0 or 1 anyway."""
    sums = [each for each in query.aggregates if isinstance(each, Sum)]
    return [each for each in sums if _has_clamps(each)]


def _has_clamps(aggregate: Sum) -> bool:
    """Are there clamps to choose? A COUNTIF adds 0 or 1 anyway."""
    return not (aggregate.lo == 0 and aggregate.hi == aggregate.quantum == 1)


def reading_of(query: Query, columns: Sequence[str]) -> Query:
    """The rows, keys and windows of a query, and both grids of each value."""
    late = query.arrival_column
    needed = late in {query.privacy_unit_column, *query.keys, query.time_column, *columns}
    types = [each for each in query.column_types if needed or query.prepare or each[0] != late]
    sums = [each for name in columns for each in value_sums(name)]
    return Query(
        name="bounds",
        privacy_unit_column=query.privacy_unit_column,
        privacy_unit_period=query.privacy_unit_period,
        keys=query.keys,
        public_groups=query.public_groups if query.keys else None,
        aggregates=(Count("dpstream rows"), *sums),
        epsilon=1,
        delta=Fraction(1, 10**9),
        time_column=query.time_column,
        time_unit=query.time_unit,
        time_origin=query.time_origin,
        time_zone=query.time_zone,
        window=query.window,
        start=query.start,
        end=query.end,
        column_types=types,
        max_key_bytes=query.max_key_bytes,
        prepare=query.prepare,
        report_bias=False,
        max_groups_contributed=1,
    )


def _digest(reading: Query, *more: str) -> str:
    text = canonical((sorted(reading.facts().items()), more))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _opened(query: Query, source: Any) -> Source:
    """What is read: one source, or those of a UNION ALL by their names."""
    if not query.sources:
        return open_source(source)
    for name in query.sources:
        if not isinstance(source, Mapping) or name not in source:
            raise InvalidParameter(
                f"the query reads {' and '.join(query.sources)}; give a source for {name!r} too: "
                f"{{{name!r}: ...}}, --source {name}=PATH"
            )
    return union_source({name: open_source(source[name]) for name in query.sources})


def _folder(state: Path, reading: Query, source: Any, *, again: bool) -> Path:
    """Where a measurement is kept: the last one of these rows, or the next one."""
    places = source if isinstance(source, list | tuple) else [source]
    if isinstance(source, Mapping):
        places = [source[name] for name in sorted(source)]
    words = [os.fspath(each) for each in places if isinstance(each, str | os.PathLike)]
    name = _digest(reading, *words)
    tries = (state / (name if n == 1 else f"{name}-{n}") for n in count(1))
    folders = []
    for folder in tries:
        folders.append(folder)
        if not folder.exists():
            break
    if len(folders) == 1 or (again and kept_release(folders[-2]) is not None):
        return folders[-1]
    return folders[-2]  # one that was broken off is finished before another is paid for


@dataclass(frozen=True, kw_only=True, eq=False)
class _Values:
    """Values of a column: the signs they have, their mean size, and what clamps hold of them."""

    signs: Clamps
    mean: float
    edges: Reals
    held: Reals

    def clamps(self, at: int) -> Clamps:
        """Clamps at one of the edges, on the sides where there are values."""
        return self.signs[0] * float(self.edges[at]), self.signs[1] * float(self.edges[at])


class _Log:
    """What the histograms say about units, rows and values."""

    def __init__(self, histograms: Histograms, columns: Sequence[str], share: float) -> None:
        below = np.concatenate([[0], COUNTS[:-1]])
        self._sizes, self._widths = (below + 1 + COUNTS) / 2, (COUNTS - below).astype(np.float64)
        self.stddev, self._share = histograms.stddev, share
        self._lost: tuple[int, int, float] | None = None
        self._times = 1.0
        by_class = histograms.bins["rows"].reshape(len(CLASSES) + 1, -1)
        if "groups" in histograms.bins:
            self.groups = self._counts(histograms.bins["groups"])
            self.rows = [self._counts(bins, rare=_FEW_REPEATS) for bins in by_class]
        else:  # one group each
            self.rows = [self._counts(by_class[0])]
            ones = np.where(COUNTS == 1, self.rows[0].total, 0.0)
            self.groups = SizeDistribution(sizes=self._sizes, units=ones)
        self.values = {name: self._values(histograms.bins[f"value {name}"]) for name in columns}
        places = np.minimum(np.searchsorted(CLASSES, self._sizes), len(self.rows) - 1)
        self._of_class = [np.flatnonzero(places == number) for number in range(len(self.rows))]
        self.total = self._kept(np.inf, np.inf)

    def _counts(self, bins: Reals, rare: float = 3.0) -> SizeDistribution:
        known: Any = {"sizes": self._sizes, "widths": self._widths, "stddev": self.stddev}
        return smooth_histogram(bins, **known, rare=rare)

    def _values(self, bins: Reals) -> _Values:
        zero = len(SIZES)
        below = np.concatenate([[SIZES[0] / 2], SIZES[:-1]])
        middles, found, signs = np.sqrt(SIZES * below), np.zeros(len(SIZES)), [0.0, 0.0]
        for side, part in enumerate((bins[:zero][::-1], bins[zero + 1 :])):
            if part.sum() > _SURE * self.stddev * math.sqrt(zero) and part.sum() > 0:
                one = {"sizes": middles, "widths": np.log(SIZES / below), "stddev": self.stddev}
                found += smooth_histogram(part, **one, rare=_FEW_GIANTS).units
                signs[side] = 1.0
        signs[1] = 1.0 if signs == [0.0, 0.0] else signs[1]
        units = np.concatenate([[max(float(bins[zero]), 0.0)], found])
        sizes = np.concatenate([[0.0], middles])
        found_ = SizeDistribution(sizes=sizes, units=units)
        mean = found_.mean() if found_.sum else 1.0
        edges = SIZES[(mean / 20 < SIZES) & (1e4 * mean > SIZES)]
        held = np.array([found_.kept(edge) for edge in edges])
        return _Values(signs=(0.0 - signs[0], signs[1]), mean=mean, edges=edges, held=held)

    @lru_cache(maxsize=4096)  # noqa: B019 - it lives as long as a question
    def _kept(self, groups: float, rows: float) -> float:
        cut = self.groups.units * np.minimum(self._sizes, groups)
        each = [rows_of.mean(rows) for rows_of in self.rows]
        return sum(
            float(cut[where].sum()) * mean for where, mean in zip(self._of_class, each, strict=True)
        )

    @property
    def all_rows(self) -> float:
        """Rows of all units, once in each window that they are in."""
        return self.total / self._share

    def kept(self, groups: int, rows: int) -> float:
        """The share of all rows that these bounds keep."""
        if self._lost is not None and (groups, rows) == self._lost[:2]:
            return 1 - self._lost[2]
        lost = 1 - self._kept(groups, rows) / self.total if self.total else 0.0
        return 1 - min(lost * self._times, 1.0)

    def corrected(self, lost: Measured) -> _Log:
        """The log as a sum of lost rows shows it: told for its bounds, scaled for others."""
        bounds, found = (lost.asked.groups, lost.asked.rows), copy(self)
        fitted, rows = 1 - self.kept(*bounds), lost.rows
        if rows > _SEEN * lost.stddev:
            by_unit, units = self.losses(*bounds)
            rows += _BEYOND * float(units @ np.maximum(by_unit - lost.asked.cut, 0.0))
        share = min(rows / self.total, 1.0) if self.total else 0.0
        found._lost = (*bounds, share)
        if fitted > 0:
            found._times = min(max(share / fitted, 1 / _MOST_TIMES), _MOST_TIMES)
        return found

    def losses(self, groups: int, rows: int) -> tuple[Reals, Reals]:
        """(rows that a unit loses by these bounds, how many units lose so many)."""
        lost, units = [np.zeros(1)], [np.zeros(1)]
        for where, each in zip(self._of_class, self.rows, strict=True):
            if each.total:
                sizes = self._sizes[where][:, None]
                kept = np.minimum(sizes, groups) * np.minimum(each.sizes, rows)
                lost.append((sizes * each.sizes - kept).ravel())
                share = each.units / each.total
                units.append((self.groups.units[where][:, None] * share).ravel())
        return np.concatenate(lost), np.concatenate(units)

    def most(self, of: SizeDistribution, largest: float) -> list[int]:
        """Bounds of the grid worth comparing: up to sizes that units have."""
        top = max(of.quantile(1 - 1e-4), 1.0)
        grid = [int(each) for each in COUNTS if each <= min(1.5 * top + 1, largest)]
        return grid or [1]


@lru_cache(maxsize=2)
def _log_of(histograms: Histograms, columns: tuple[str, ...], share: float) -> _Log:
    """Fitted once for all that one question reads off them."""
    return _Log(histograms, columns, share)


class _Noise:
    """The noise of a query for bounds of all kinds: it goes with sensitivities.

    Of several sets of keys it is that of the one with most keys, whose groups are the smallest.
    """

    def __init__(self, query: Query) -> None:
        self.query, windows = query, query.schedule.windows
        seen = range(min(windows or 48, 48))
        self.releases = max([query.schedule.releases(window) for window in seen] + [1])
        sizes = [len(names) for names in query.grouping_sets] or [0]
        self._set = sizes.index(max(sizes))

    @lru_cache(maxsize=4096)  # noqa: B019 - it lives as long as a question
    def _window(self, groups: int, rows: int) -> Any:
        query = _with_bounds(self.query, groups, rows, {})
        return query, plan_query(query).window(self.releases)

    def threshold(self, groups: int, rows: int) -> tuple[int, int]:
        """(noisy units that show a key in a window's last table, pre-threshold)."""
        _, window = self._window(groups, min(rows, 2))
        thresholds = np.atleast_2d(window.thresholds)[self._set]
        return int(thresholds[-1]), int(window.pre_threshold)

    def spreads(self, aggregate: Aggregate, groups: int, rows: int) -> list[float]:
        """Standard deviations of its measures; values with clamps of the query."""
        query, window = self._window(groups, min(rows, 2))
        found = []
        for measure in query.measures_of[aggregate.name]:
            row = self._set * len(query.measures) + query.measures.index(measure)
            steps = float(window.stddevs[row, -1])
            more = 1 if measure.kind in ("units", "round") else rows / min(rows, 2)
            found.append(steps * float(measure.quantum) * more)
        return found


@lru_cache(maxsize=2)
def _noise_of(query: Query) -> _Noise:
    """Calibrated once for all bounds that one question compares."""
    return _Noise(query)


def _with_bounds(query: Query, groups: int, rows: int, clamps: Mapping[str, Clamps]) -> Query:
    """The query with other bounds, and other clamps for some columns."""
    chosen = {id(each) for each in _clamped(query) if each.column in clamps}
    aggregates = tuple(
        type(each)(each.name, column=each.column, contribution_bounds_per_row=clamps[each.column])
        if isinstance(each, Sum) and id(each) in chosen
        else each
        for each in query.aggregates
    )
    return replace(
        query,
        aggregates=aggregates,
        max_groups_contributed=groups,
        choose_groups=False,
        planned=(),
        max_rows_per_group=rows,
        max_rows_contributed=None,
        max_dropped_rows=None,
        pre_threshold=None,
    )


def _share_of(
    log: _Log, noise: _Noise, aggregate: Aggregate, bounds: tuple[int, int], at: Any
) -> tuple[Any, Any]:
    """(bias, noise of a key with one row), as shares of an aggregate's true value.

    `at`: the clamps among the edges of its column, or all of them.
    """
    kept, spreads = log.kept(*bounds), noise.spreads(aggregate, *bounds)
    if isinstance(aggregate, CountUnits):
        pairs = log.groups.sum / log.total if log.total else 1.0
        return 1 - log.groups.kept(bounds[0]), spreads[0] / max(pairs, 1e-9)
    if not isinstance(aggregate, Sum) or not _has_clamps(aggregate):
        return 1 - kept, spreads[0]  # of ones and zeros as many as rows, at most
    values = log.values[aggregate.column]
    edges, held = values.edges[at], values.held[at]
    spread = spreads[0] * edges / float(max(abs(aggregate.lo), abs(aggregate.hi)))
    if not aggregate.grows:  # an average
        return 1 - held, spread / max(kept, 1e-9) / values.mean
    if len(spreads) > 1:  # about the middle, and the middle for each row
        spread = np.hypot(spread, sum(values.signs) * edges / 2 * spreads[1])
    return 1 - kept * held, spread / values.mean


def _error(shares: Sequence[tuple[Any, Any]], size: float) -> Any:
    """The error of all aggregates of a key, root of the mean square."""
    return np.sqrt(sum(bias**2 + (noise / size) ** 2 for bias, noise in shares) / len(shares))


def _least_error(
    query: Query, log: _Log, key_size: float | None, bounds: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The bounds of least error (or those that are given), and the trade-off around them."""
    start = {name: values.signs for name, values in log.values.items()}
    noise = _noise_of(_with_bounds(query, 1, 1, start))
    most = math.inf if query.reachable is None else query.reachable
    candidates = log.most(log.groups, most)
    rows_of_all = max(log.rows, key=lambda each: each.quantile(1 - 1e-4))
    size = key_size or _usual_size(query, log, noise, min(most, candidates[-1]))

    def with_clamps(groups: int, rows: int) -> tuple[float, dict[str, int]]:
        edges: dict[str, int] = {}
        for column in log.values:
            mine = [each for each in _clamped(noise.query) if each.column == column]
            every = [_share_of(log, noise, each, (groups, rows), slice(None)) for each in mine]
            edges[column] = int(np.argmin(_error(every, size)))
        return float(_error(_shares(log, noise, (groups, rows), edges), size)), edges

    found = {
        (groups, rows): with_clamps(groups, rows)
        for groups in candidates
        for rows in log.most(rows_of_all, _MOST_ROWS)
    }
    groups, rows = bounds or min(found, key=lambda pair: (found[pair][0], pair))
    error, edges = found[groups, rows]
    clamps = {name: log.values[name].clamps(at) for name, at in edges.items()}
    final = _with_bounds(query, groups, rows, clamps)
    early = plan_query(final).window(noise.releases).pre_threshold
    choices = []
    for each in candidates:
        best = min((found[pair][0], pair[1]) for pair in found if pair[0] == each)[1]
        choices.append(
            Choice(
                groups=each,
                rows=best,
                left_out=1 - log.kept(each, best),
                noise=noise.spreads(_in(noise, query.aggregates[0]), each, best)[0],
                threshold=noise.threshold(each, best)[0],
                error=found[each, best][0],
            )
        )
    return {
        "key_size": size,
        "max_groups_contributed": groups,
        "max_rows_per_group": rows,
        "clamps": clamps,
        "pre_threshold": early,
        "left_out": 1 - log.kept(groups, rows),
        "values_left_out": {
            name: 1 - float(log.values[name].held[at]) for name, at in edges.items()
        },
        "error": error,
        "units": log.groups.total,
        "rows": log.all_rows,
        "stddev": log.stddev,
        "quantiles": {
            name: {f"{share:g}": sizes.quantile(share) for share in _QUANTILES}
            for name, sizes in (("groups", log.groups), ("rows", log.rows[0]))
        },
        "expected": tuple(_expected(query, log, noise, (groups, rows), edges, size)),
        "trade_off": tuple(choices),
    }


def _in(noise: _Noise, aggregate: Aggregate) -> Aggregate:
    """An aggregate as the query has it whose noise is known."""
    return next(each for each in noise.query.aggregates if each.name == aggregate.name)


def _shares(
    log: _Log, noise: _Noise, bounds: tuple[int, int], edges: Mapping[str, int]
) -> list[tuple[Any, Any]]:
    """Of all aggregates: (bias, noise of a key with one row)."""
    return [
        _share_of(log, noise, each, bounds, edges.get(getattr(each, "column", ""), 0))
        for each in noise.query.aggregates
    ]


def _expected(
    query: Query,
    log: _Log,
    noise: _Noise,
    bounds: tuple[int, int],
    edges: Mapping[str, int],
    size: float,
) -> list[Expected]:
    shares = _shares(log, noise, bounds, edges)
    return [
        Expected(
            key_size=around * size,
            aggregate=aggregate.name,
            bias=float(bias),
            noise=float(one) / (around * size),
            error=math.hypot(bias, one / (around * size)),
        )
        for around in _AROUND
        for aggregate, (bias, one) in zip(query.aggregates, shares, strict=True)
    ]


def _usual_size(query: Query, log: _Log, noise: _Noise, most: float) -> float:
    """Rows of a key in one window that bounds are chosen for, if nobody says."""
    groups = int(min(max(math.ceil(log.groups.quantile(_USUAL)), 1), most))
    if query.public_groups is None:
        return _KEY_SIZE * max(noise.threshold(groups, 1)[0], 1)
    windows = (
        query.schedule.windows if query.start is not None or query.time_column is None else None
    )
    if windows is not None and log.all_rows > 0:
        return max(log.all_rows / windows / len(query.public_groups), 1.0)
    return _IN_NOISE * noise.spreads(noise.query.aggregates[0], groups, 1)[0]
