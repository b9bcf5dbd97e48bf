"""`dpstream.bounds`: read a source once, pay or be told that it is public, propose bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from dpstream.bounds_proposal import trade_off
from dpstream.bounds_proposal.histograms import SIZES, Histograms, exact, noisy, question
from dpstream.bounds_proposal.proposal import Choice, Proposal
from dpstream.bounds_proposal.unit_facts import collect, value_sums
from dpstream.connectors.registry import open_source
from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import Amount
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.windows import DAY, Duration, Instant, Micros, Tumble
from dpstream.session.feeds import SourceSpec

_SHARES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_TIMES: Final = 10.0  # thresholds that make the size of a group to choose bounds for
_USUAL: Final = 0.99  # the quantile that bounds are first taken at


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
    ledger: Ledger | str | Path | None = None,
    dataset: str = "stream",
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
    is drawn. The bounds are for a query with `query_epsilon`, `query_delta` and `triggers` tables
    a window, and for groups of `group_size` rows (default: ten times what a group needs to
    appear). `sample` looks at this share of the units.

    >>> import pyarrow as pa
    >>> rows = range(6000)
    >>> clicks = pa.table({"user": [n % 500 for n in rows], "page": [n % 7 for n in rows]})
    >>> found = bounds(clicks, privacy_unit_column="user", keys=["page"], public=True)
    >>> found.max_groups_contributed, found.max_rows_per_group
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
        asked = question(reading, facts=wanted, epsilon=epsilon, delta=delta)
        plan_query(asked)  # refuses what no noise can keep, before a row is read
    found, _ = collect(
        open_source(source),
        reading,
        secret=Secret.of(None),
        run=mint_run_id(),
        share=sample,
        progress=progress or (lambda done, total: None),
    )
    if asked is None:
        histograms = exact(found)
    else:
        histograms = noisy(found, asked, ledger=ledger, dataset=dataset)
    target = _Target(query_epsilon, query_delta, triggers, bool(keys))
    chosen = _proposed(histograms, target, group_size)
    return Proposal(
        privacy_unit_column=privacy_unit_column,
        keys=tuple(reading.keys),
        value=value,
        epsilon=None if asked is None else float(asked.epsilon),
        delta=None if asked is None else float(asked.delta),
        query_epsilon=query_epsilon,
        query_delta=query_delta,
        triggers=triggers,
        **chosen,
    )


class _Target:
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


def _proposed(found: Histograms, target: _Target, group_size: float | None) -> dict[str, Any]:
    """The bounds of least error, and the trade-off around them."""
    groups = trade_off.counts(found.bins["groups"], found.stddev)
    rows = trade_off.counts(found.bins["rows"], found.stddev)
    usual = max(math.ceil(groups.quantile(_USUAL)), 1)
    size = group_size or _TIMES * max(target.noise(usual)[1], 1)
    curve = [_choice(groups, target, size, count) for count in trade_off.candidates(groups)]
    count, many = _least_error(curve, rows, size)
    noise, _, early = target.noise(count, many)
    left = 1 - groups.kept(count) * rows.kept(many)
    lo, hi = _clamps(found, noise, size)
    return {
        "group_size": size,
        "max_groups_contributed": count,
        "max_rows_per_group": many,
        "max_rows_contributed": count * many,
        "lo": lo,
        "hi": hi,
        "pre_threshold": early,
        "left_out": left,
        "noise": noise,
        "error": trade_off.error(left, noise, size),
        "units": groups.total,
        "stddev": found.stddev,
        "quantiles": {
            name: {f"{share:g}": each.quantile(share) for share in _SHARES}
            for name, each in (("groups", groups), ("rows", rows))
        },
        "trade_off": tuple(curve),
    }


def _choice(groups: trade_off.SizeDistribution, target: _Target, size: float, count: int) -> Choice:
    """What keeping so many groups of each unit leaves out, and the noise it costs."""
    noise, threshold, _ = target.noise(count)
    left = 1 - groups.kept(count)
    return Choice(
        groups=count,
        left_out=left,
        noise=noise,
        threshold=threshold,
        error=trade_off.error(left, noise, size),
    )


def _least_error(
    curve: list[Choice], rows: trade_off.SizeDistribution, size: float
) -> tuple[int, int]:
    """Groups of each unit and rows in each: the pair with the least error."""
    pairs = [(one, many) for one in curve for many in trade_off.candidates(rows, 64)]
    errors = [
        trade_off.error(
            1 - (1 - one.left_out) * rows.kept(many),
            # More than one row per group takes a column of its own: half of the budget each.
            one.noise * many * (1 if many == 1 else math.sqrt(2)),
            size,
        )
        for one, many in pairs
    ]
    groups, many = trade_off.best([(one.groups, many) for one, many in pairs], errors)
    return groups, many


def _clamps(found: Histograms, noise: float, size: float) -> tuple[float | None, float | None]:
    """Clamps of least error for a SUM beside the COUNT: as large as the noise they cost allows."""
    if "value" not in found.bins:
        return None, None
    sides = trade_off.values(found.bins["value"], found.stddev)
    known = sides.sizes
    mean = float(known.units @ known.sizes) / known.total if known.total else 1.0
    reach = [float(edge) for edge in SIZES]
    errors = [
        trade_off.error(1 - known.kept(edge), noise * math.sqrt(2) * edge / mean, size)
        for edge in reach
    ]
    edge = min(zip(errors, reach, strict=True))[1]
    positive = sides.positive or not sides.negative
    return (-edge if sides.negative else 0.0), (edge if positive else 0.0)
