"""`dpstream.bounds`: read a source once, pay or be told that it is public, propose bounds.

What follows the histograms is post-processing: it reads them and public numbers alone. Bounds leave
out a share of a group's rows (bias), and noise grows with them. For a group of a given size the
error of its count, relative to that size, is

    sqrt(left out^2 + (noise / size)^2)

and the bounds with the least error are proposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from dpstream.bounds_proposal.histograms import (
    COUNTS,
    SIZES,
    Histograms,
    collect_unit_facts,
    exact_histograms,
    histogram_query,
    noisy_histograms,
    value_sums,
)
from dpstream.connectors.registry import open_source
from dpstream.errors import InvalidParameter
from dpstream.optional import optional
from dpstream.privacy.amounts import Amount
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.run_directory import GivenLedger
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.windows import DAY, Duration, Instant, Micros, Tumble
from dpstream.records import Integers, Reals
from dpstream.session.start import SourceSpec

_QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_FIRST_QUANTILE: Final = 0.99  # where bounds are first taken at
_GROUP_SIZE: Final = 10.0  # of a group to choose bounds for, in thresholds
_SURE: Final = 3.0  # standard deviations above which a bin is taken to have units in it


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One bound of the trade-off: `groups` a unit, one row each.

    `left_out`: share of rows beyond the bound. `noise`: standard deviation in the last table.
    `threshold`: noisy units that show a group there. `error`: of a group of the proposal's size.
    """

    groups: int
    left_out: float
    noise: float
    threshold: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Bounds, and what speaks for them.

    `epsilon`, `delta`: paid for this proposal; None if the data were declared public.
    """

    privacy_unit_column: str
    keys: tuple[str, ...]
    value: str | None
    epsilon: float | None
    delta: float | None
    group_size: float
    query_epsilon: float
    query_delta: float
    triggers: int
    max_groups_contributed: int
    max_rows_per_group: int
    max_rows_contributed: int
    lo: float | None
    hi: float | None
    pre_threshold: int
    left_out: float
    noise: float
    error: float
    units: float
    stddev: float
    quantiles: Mapping[str, Mapping[str, float]]
    trade_off: Sequence[Choice]

    @property
    def private(self) -> bool:
        """May it be shown to anyone?"""
        return self.epsilon is not None

    def to_json(self) -> dict[str, Any]:
        """All of it, and the snippets."""
        more = {"private": self.private, "sql": self.sql(), "python": self.python()}
        return asdict(self) | more

    def sql(self) -> str:
        """The OPTIONS clause, and the SUM that goes with it."""
        options = {
            "epsilon": _number(self.query_epsilon),
            "delta": _number(self.query_delta),
            "privacy_unit_column": self.privacy_unit_column,
            "max_groups_contributed": str(self.max_groups_contributed),
            "max_rows_per_group": str(self.max_rows_per_group),
            "pre_threshold": str(self.pre_threshold),
        }
        inside = ", ".join(f"{name} = {text}" for name, text in options.items())
        lines = [f"OPTIONS ({inside})"]
        if self.value is not None:
            bounds = f"contribution_bounds_per_row => ({_number(self.lo)}, {_number(self.hi)})"
            lines.append(f"SUM({self.value}, {bounds})")
        return "\n".join(lines)

    def python(self) -> str:
        """The arguments of a Query."""
        lines = [
            f"max_groups_contributed={self.max_groups_contributed}",
            f"max_rows_per_group={self.max_rows_per_group}",
            f"pre_threshold={self.pre_threshold}",
        ]
        if self.value is not None:
            clamps = f"contribution_bounds_per_row=({_number(self.lo)}, {_number(self.hi)})"
            lines.append(f"aggregates=[dps.Sum({self.value!r}, column={self.value!r}, {clamps})]")
        return ", ".join(lines)

    def plot(self, path: str | Path) -> None:
        """Bias, noise and error over the bound."""
        drawing = optional("matplotlib.figure", extra="plot", who="a plot")
        figure = drawing.Figure(figsize=(7, 4), dpi=144, layout="constrained")
        panel = figure.subplots()
        groups = [choice.groups for choice in self.trade_off]
        noise = [choice.noise / self.group_size for choice in self.trade_off]
        for label, line, values in (
            ("rows left out (bias)", "--", [choice.left_out for choice in self.trade_off]),
            (f"noise, group of {self.group_size:,.0f}", ":", noise),
            ("both", "-", [choice.error for choice in self.trade_off]),
        ):
            panel.plot(groups, values, line, marker="o", markersize=3, label=label)
        panel.axvline(self.max_groups_contributed, color="#8a8f98", linewidth=1)
        panel.set(xscale="log", xlabel="groups kept of a unit", ylabel="share of a group's count")
        panel.set_title("bias against noise")
        panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def _number(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.12g}"


def bounds(
    source: SourceSpec,
    *,
    privacy_unit_column: str,
    keys: Sequence[str] = (),
    value: str | None = None,
    public: bool = False,
    epsilon: Amount | None = None,
    delta: Amount = 1e-9,
    query_epsilon: float = 1.0,
    query_delta: float = 1e-9,
    triggers: int = 100,
    group_size: float | None = None,
    sample: float = 1.0,
    ledger: GivenLedger = None,
    dataset: str = "stream",
    analyst: str = "",
    time_column: str | None = None,
    time_unit: str | None = None,
    time_origin: Instant | Literal[0] = 0,
    time_zone: str = "UTC",
    window: str | Tumble | None = None,
    privacy_unit_period: Duration = "forever",
    start: Instant | None = None,
    end: Instant | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Proposal:
    """Propose how much of each unit to keep, for a COUNT (and a SUM of `value`) per `keys`.

    `public=True` declares that the source is public: nothing is paid, and what is proposed is
    exact. Otherwise `epsilon` and `delta` are charged to `dataset`'s book in `ledger` before noise
    is drawn; a book that is not there yet is opened, and whoever opens it next sets its budget.
    `analyst`: who asks, for a book that gives analysts shares. The bounds are for a query with
    `query_epsilon`, `query_delta` and `triggers` tables a window, and for groups of `group_size`
    rows (default: ten times what a group needs to appear). `sample` looks at this share of the
    units.

    >>> import pyarrow as pa
    >>> rows = range(6000)
    >>> clicks = pa.table({"user": [n % 500 for n in rows], "page": [n % 7 for n in rows]})
    >>> proposal = bounds(clicks, privacy_unit_column="user", keys=["page"], public=True)
    >>> proposal.max_groups_contributed, proposal.max_rows_per_group
    (7, 2)
    """
    if public == (epsilon is not None):
        raise InvalidParameter(
            "bounds come from data that is declared public (public=True), or are paid for "
            f"(epsilon=...): one of the two; got {public=}, {epsilon=}"
        )
    if not 0 < sample <= 1:
        raise InvalidParameter(f"sample must be above 0 and at most 1; got {sample}")
    reading = Query(
        name="bounds",
        privacy_unit_column=privacy_unit_column,
        keys=keys,
        aggregates=(Count("count"), *(value_sums(value) if value is not None else ())),
        epsilon=1,
        delta=delta,
        time_column=time_column,
        time_unit=time_unit,
        time_origin=Micros(0) if time_origin == 0 else time_origin,
        time_zone=time_zone,
        window=Tumble(window) if isinstance(window, str) else window,
        privacy_unit_period=privacy_unit_period,
        start=start,
        end=end,
        max_groups_contributed=1,
    )
    wanted = 2 if value is None else 3
    asked = None
    if not public:
        asked = histogram_query(reading, facts=wanted, epsilon=epsilon, delta=delta)
        plan_query(asked)  # refuses what no noise can keep, before a row is read
    facts = collect_unit_facts(
        open_source(source),
        reading,
        secret=Secret.of(None),
        run=mint_run_id(),
        share=sample,
        progress=progress or (lambda done, total: None),
    )
    if asked is None:
        histograms = exact_histograms(facts)
    else:
        histograms = noisy_histograms(facts, asked, ledger=ledger, dataset=dataset, analyst=analyst)
    target = _TargetQuery(query_epsilon, query_delta, triggers, bool(keys))
    return Proposal(
        privacy_unit_column=privacy_unit_column,
        keys=tuple(reading.keys),
        value=value,
        epsilon=None if asked is None else float(asked.epsilon),
        delta=None if asked is None else float(asked.delta),
        query_epsilon=query_epsilon,
        query_delta=query_delta,
        triggers=triggers,
        **_choose_bounds(histograms, target, group_size),
    )


class _TargetQuery:
    """The query that bounds are for, as far as its noise goes."""

    def __init__(self, epsilon: float, delta: float, triggers: int, keyed: bool) -> None:
        self._query = Query(
            privacy_unit_column="unit",
            keys=("key",) if keyed else (),
            epsilon=epsilon,
            delta=delta,
            time_column="time",
            start=Micros(0),
            end=Micros(DAY * triggers),
            every=Micros(DAY),
            max_groups_contributed=1,
        )
        self._triggers = triggers

    def noise(self, groups: int, rows: int = 1) -> tuple[float, int, int]:
        """(stddev of a COUNT in the last table, threshold there, pre-threshold)."""
        query = replace(
            self._query,
            max_groups_contributed=groups,
            max_rows_per_group=rows,
            max_rows_contributed=None,
        )
        window = plan_query(query).window(self._triggers)
        return float(window.stddevs[-1, -1]), int(window.thresholds[-1]), window.pre_threshold


def _choose_bounds(
    histograms: Histograms, target: _TargetQuery, group_size: float | None
) -> dict[str, Any]:
    """The bounds of least error, and the trade-off around them."""
    groups, rows = (
        count_distribution(histograms.bins[fact], histograms.stddev) for fact in ("groups", "rows")
    )
    usual = max(math.ceil(groups.quantile(_FIRST_QUANTILE)), 1)
    size = group_size or _GROUP_SIZE * max(target.noise(usual)[1], 1)
    choices = []
    for count in groups.candidates():
        noise, threshold, _ = target.noise(count)
        left_out = 1 - groups.kept(count)
        error = math.hypot(left_out, noise / size)
        choices.append(
            Choice(groups=count, left_out=left_out, noise=noise, threshold=threshold, error=error)
        )
    max_groups, max_rows = _least_error(choices, rows, size)
    noise, _, pre_threshold = target.noise(max_groups, max_rows)
    left_out = 1 - groups.kept(max_groups) * rows.kept(max_rows)
    lo, hi = _clamps(histograms, noise, size)
    return {
        "group_size": size,
        "max_groups_contributed": max_groups,
        "max_rows_per_group": max_rows,
        "max_rows_contributed": max_groups * max_rows,
        "lo": lo,
        "hi": hi,
        "pre_threshold": pre_threshold,
        "left_out": left_out,
        "noise": noise,
        "error": math.hypot(left_out, noise / size),
        "units": groups.total,
        "stddev": histograms.stddev,
        "quantiles": {
            name: {f"{share:g}": sizes.quantile(share) for share in _QUANTILES}
            for name, sizes in (("groups", groups), ("rows", rows))
        },
        "trade_off": tuple(choices),
    }


def _least_error(choices: list[Choice], rows: SizeDistribution, size: float) -> tuple[int, int]:
    """Groups of each unit and rows in each: the pair of least error, the smaller one if equal."""

    def error(choice: Choice, count: int) -> float:
        # More than one row per group takes a column of its own: half of the budget each.
        noise = choice.noise * count * (1 if count == 1 else math.sqrt(2))
        return math.hypot(1 - (1 - choice.left_out) * rows.kept(count), noise / size)

    pairs = [(choice, count) for choice in choices for count in rows.candidates(64)]
    return min((error(*pair), pair[0].groups, pair[1]) for pair in pairs)[1:]


def _clamps(histograms: Histograms, noise: float, size: float) -> tuple[float | None, float | None]:
    """Clamps of least error for a SUM beside the COUNT: as large as the noise they cost allows."""
    if "value" not in histograms.bins:
        return None, None
    bins, stddev = histograms.bins["value"], histograms.stddev
    sizes, negative, positive = value_distribution(bins, stddev)
    mean = float(sizes.units @ sizes.sizes) / sizes.total if sizes.total else 1.0

    def error(edge: float) -> float:
        return math.hypot(1 - sizes.kept(edge), noise * math.sqrt(2) * edge / mean / size)

    edge = min(map(float, SIZES), key=error)
    return (-edge if negative else 0.0), (edge if positive or not negative else 0.0)


@dataclass(frozen=True, kw_only=True)
class SizeDistribution:
    """How many units have each size, in increasing order of sizes."""

    sizes: Reals
    units: Reals

    @property
    def total(self) -> float:
        """The number of units."""
        return float(self.units.sum())

    def kept(self, most: float) -> float:
        """The share of all sizes together that a bound of `most` each leaves."""
        total = float(self.units @ self.sizes)
        return float(self.units @ np.minimum(self.sizes, most)) / total if total else 1.0

    def quantile(self, share: float) -> float:
        """The least size that at least this share of the units does not exceed."""
        if not self.total:
            return float(self.sizes[0])
        place = int(np.searchsorted(np.cumsum(self.units), share * self.total * (1 - 1e-12)))
        return float(self.sizes[min(place, len(self.sizes) - 1)])

    def candidates(self, most: int = 4096) -> list[int]:
        """Bounds of the grid worth comparing: up to the largest size that units have."""
        largest = float(self.sizes[self.units > 0].max(initial=1.0))
        grid = [int(count) for count in COUNTS if count <= most]
        return [count for count in grid if count <= 1.2 * largest] or grid[:1]


def size_distribution(bins: Reals, sizes: Reals | Integers, stddev: float) -> SizeDistribution:
    """A histogram without the noise of its empty bins.

    From the largest size down, bins are pooled until a pool has more than three standard
    deviations of its noise: noise of a few units in bins of thousands would drown everything else.
    A pool counts at the size where it ends.

    >>> noisy, sizes = np.array([90.0, -2.0, 30.0, 3.0]), np.array([1, 2, 3, 4])
    >>> size_distribution(noisy, sizes, 3.0).units.tolist()
    [88.0, 0.0, 33.0, 0.0]
    """
    units, pool, pooled = np.zeros(len(bins)), 0.0, 0
    for place in range(len(bins) - 1, -1, -1):
        pool += float(bins[place])
        pooled += 1
        if pool > _SURE * stddev * math.sqrt(pooled) and pool > 0:
            units[place], pool, pooled = pool, 0.0, 0
    return SizeDistribution(sizes=np.asarray(sizes, np.float64), units=units)


def count_distribution(bins: Reals, stddev: float) -> SizeDistribution:
    """The distribution of counts; a bin stands for the middle of what it holds."""
    below = np.concatenate([[0], COUNTS[:-1]])
    return size_distribution(bins, (below + 1 + COUNTS) / 2, stddev)


def value_distribution(bins: Reals, stddev: float) -> tuple[SizeDistribution, bool, bool]:
    """Sizes of values of both signs without zeros; whether enough are negative, and positive."""
    zero = len(SIZES)
    below, above = bins[:zero][::-1], bins[zero + 1 :]
    sure = _SURE * stddev * math.sqrt(zero)
    middles = np.concatenate([[SIZES[0]], np.sqrt(SIZES[1:] * SIZES[:-1])])
    sizes = size_distribution(below + above, middles, stddev * math.sqrt(2))
    return sizes, bool(below.sum() > sure), bool(above.sum() > sure)
