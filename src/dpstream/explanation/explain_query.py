"""What a query will do and cost: all of it follows from the query and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.explanation.plan_facts import Explanation, Stage
from dpstream.group_by.chosen_bounds import PERIODS
from dpstream.group_by.hash_tables import LARGE_TABLE, row_bytes
from dpstream.group_by.release_table import release_schema, series_schema
from dpstream.mechanisms import name_of
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.amounts import show
from dpstream.privacy.sensitivity import CorrelatedNoise
from dpstream.query.aggregates import Measure, OfCells
from dpstream.query.grouping_sets import set_name
from dpstream.query.noise_plan import NoisePlan, WindowPlan, plan_query
from dpstream.query.per_unit import PerUnit
from dpstream.query.public_tables import Joining
from dpstream.query.quantiles import Cells, ExponentialQuantile, Level, Quantile
from dpstream.query.query import Query
from dpstream.query.row_spec import Finish, RowSpec
from dpstream.query.second_moments import Moment
from dpstream.query.series_query import SeriesQuery
from dpstream.query.union_tables import TABLE
from dpstream.query.windows import Tumble, in_words, iso
from dpstream.rows.column_values import types_before_rows

_QUERY_BYTES = 2 << 20  # threads, buffers and small objects of a query that runs
_ID, _WORD = 16, 8  # bytes
_SEEN_BYTES = _ID  # of a unit in an open window of a series
_LOOKED_AT = 48  # windows; cumulating ones differ in how often they are published
_MOST_TRIED = 100  # releases, up to which the other mechanism's error is worked out
_TRIED = 400  # steps of a made-up stream that tell a mechanism's noise
_WAITING_BYTES = 80  # of a row that waits for its trigger
_HELD_BYTES = 72  # of a row that waits for its window, besides its columns
_NOISY = ("latch", "select", "perturb", "mechanism", "finish")  # stages
_NOT_PROTECTED = (
    "the query itself: bounds, windows, schedule, noise and thresholds are public",
    "that and when a table is published: every trigger publishes one, also an empty one",
    "truths about groups: what many units have in common is what is published",
    "dead letters, row counts and the state directory: they are for the operator alone",
    "bounds, ranges and options that were chosen by looking at the data",
)
_KINDS = {
    "round": "units since a key was last published",
    "dropped": "rows that the bounds drop",
    "beyond": "units that lose more rows than count",
    "elsewhere": "dropped rows of groups that their unit does not count in",
    "kept": "rows after bounding",
    "clamped": "rows per unit",
}


def explain(query: Query | SeriesQuery) -> Explanation:
    """Explain a query; one that runs live is taken to begin with its first window.

    >>> import dpstream as dps
    >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=4,
    ...                   epsilon=1, delta=1e-9)
    >>> told = explain(query)
    >>> told.keys["last_threshold"]  # users that a page needs to be shown
    75
    """
    if isinstance(query, SeriesQuery):
        return _explain_series(query.starting(0))
    query = query.starting(0)
    plan = plan_query(query)
    told = _explain_choices(plan) if plan.query.candidates else _explain_group_by(plan)
    if query.totals and not plan.query.totals:
        told.budget["words"] += (
            "; what the bounds drop is not measured: over so many releases floating point takes "
            "too much of the budget for it (a longer EMIT EVERY, or report_bias = false, which "
            "changes nothing here)"
        )
    return told


def _explain_group_by(plan: NoisePlan) -> Explanation:
    query = plan.query
    first = range(min(query.schedule.windows or _LOOKED_AT, _LOOKED_AT))
    releases = max([query.schedule.releases(window) for window in first] + [1])
    window = plan.window(releases)
    return Explanation(
        stages=_group_by_stages(query, releases),
        unit=_unit(query),
        bounds=_bounds(query),
        schedule=_schedule(query, query.window, query.every, releases),
        budget=_budget(plan),
        measures=_measures(plan),
        columns=[*_columns(plan, releases), *_computed_columns(query.finish)],
        keys=_keys(query, window.thresholds, window.pre_threshold),
        memory=_memory(query, window.process.width),
        schema=_schema(release_schema(plan, types_before_rows(query)), query),
        not_protected=_not_protected(query),
    )


def _explain_choices(plan: NoisePlan) -> Explanation:
    """The plan of the first period, and how the bounds of the others are chosen."""
    query = plan.query
    told = _explain_group_by(plan.of_bounds(query.first_bounds))
    bounds, ranges = dict(told.bounds), []
    for each in query.candidates:
        least, most, first = (
            f"{float(edge):g}" for edge in (each.edges[0], each.edges[-1], each.first)
        )
        of_rows = each.kind not in ("groups", "rows")
        what = f"a clamp of {each.kind}" if of_rows else f"a bound on {each.kind}"
        ranges.append(f"{what} from {least} to {most}, {first} in the first ones")
        if not of_rows:
            ends = {"least": each.edges[0], "most": each.edges[-1]}
            bounds |= {f"{end}_{each.kind}": int(edge) for end, edge in ends.items()}
    does = (
        f"each period of {query.period_in_words} has bounds of its own, fixed before its first "
        f"row: {'; '.join(ranges)}. They follow from noisy histograms of the {PERIODS} periods "
        "before; what is told here is of the first ones"
    )
    at = next(number for number, each in enumerate(told.stages) if each.stage == "bound")
    stages = [*told.stages[:at], Stage("choose", does), *told.stages[at:]]
    told.budget["words"] += "; 2% of it is for the histograms by which bounds are chosen"
    return replace(told, stages=stages, bounds=bounds)


def _bounds(query: Query) -> dict[str, Any]:
    """The declared bounds, and those that there are groups for where these are smaller."""
    facts: dict[str, Any] = asdict(query.declared_bounds)
    if query.bounds != query.declared_bounds:
        facts |= {"reachable_groups": query.reachable, "effective": asdict(query.bounds)}
    return facts


def _explain_series(query: SeriesQuery) -> Explanation:
    terms = query.mechanism.terms()
    bins = len(query.public_groups or ())
    return Explanation(
        stages=_series_stages(query),
        unit=_series_unit(query),
        bounds={"groups": 1, "rows_per_group": 1, "rows": 1},
        schedule=_schedule(query, query.window, None, 1),
        budget={
            "measure": terms.measure,
            "total": float(terms.total),
            "windows": terms.window or 1,
            "mechanism": name_of(query.mechanism),
            "words": f"{terms.measure} = {show(terms.total)} within any {terms.window or 1} "
            "successive windows, charged as it is spent, before each noise",
        },
        measures=[
            {
                "measure": query.count.name,
                "sensitivity": 1.0,
                "quantum": 1.0,
                "derivation": "one row per unit and window: one count changes by 1",
                "share": "",
            }
        ],
        columns=[_series_noise(query, bins), *_computed_columns(query.finish)],
        keys=_public_keys(query, "in every window"),
        memory={
            "bytes_per_unit": [_SEEN_BYTES, _SEEN_BYTES],
            "words": f"about {_SEEN_BYTES} bytes per unit of a window that is not published yet, "
            f"and the mechanism's state: {bins} bin{'s' * (bins != 1)}",
        },
        schema=_schema(series_schema(query, types_before_rows(query)), query),
        not_protected=[
            f"what one {query.privacy_unit_column} does over more windows than that, together",
            *(["which groups exist: they were listed as public"] if query.keys else []),
            *_of_tables(query),
            *_NOT_PROTECTED,
        ],
    )


def _schedule(
    query: Query | SeriesQuery, window: Tumble | None, every: int | None, releases: int
) -> dict[str, Any]:
    return {
        "window": None if window is None else in_words(window.size),
        "every": None if every is None else in_words(every),
        "start": None if query.live else iso(query.start),
        "end": iso(query.end),
        "releases_per_window": releases,
    }


def _stages(query: RowSpec, windows: str, own: list[tuple[str, str]]) -> list[Stage]:
    """The plan from source to release; `own` are the stages of this kind of query."""
    read = [name for name in query.source_columns if name != TABLE]
    stages = [("source", f"read {', '.join(read)}")]
    joining: object = query.prepare
    if isinstance(joining, Joining):
        stages += [("join", words) for words in joining.joins_in_words]
        stages.append(("prepare", joining.rows_text))
    elif query.prepare is not None:
        stages.append(("prepare", query.prepare.text))
    if stages[-1][0] == "prepare" and "UNNEST" in stages[-1][1]:
        does = "UNNEST makes several rows of one, all of its unit, bounded below"
        stages.append(("unnest", does))
    if query.time_column is not None:
        allowed = query.allowed_lateness
        late = f", rows up to {in_words(allowed)} late" if allowed else ""
        where = f"{windows} by {query.time_column} in {query.time_zone}{late}"
        stages.append(("window", where))
    if query.per_unit is not None:
        stages.append(("per unit", _inner_words(query, query.per_unit)))
    stages += own
    if query.finish is not None:
        stages.append(("finish", f"{query.finish!r} (of noisy values: costs nothing)"))
    return [Stage(name, does, noisy=name in _NOISY) for name, does in stages]


def _inner_words(query: RowSpec, per_unit: PerUnit) -> str:
    """What becomes of a unit's rows, and when."""
    unit, end = query.privacy_unit_column, "the end"
    if query.window is not None:
        end = "a window closes"
        if query.allowed_lateness:
            end += f" (with its {in_words(query.allowed_lateness)} of lateness)"
    cut = "" if query.window is None else "; cut at the ends of windows"
    if per_unit.across_windows:
        cut = (
            "; the unit is a user for ever, who is protected better than one within a period would "
            "be, and with less noise (1 to 1.41)"
        )
    if query.window is not None and query.privacy_unit_period != "forever":
        cut += f" and of periods of {in_words(query.privacy_unit_period)}"
    rows = f"rows wait; when {end}" if query.window is not None else "rows wait; at the end"
    if per_unit.grows and query.schedule.triggers is not None:
        rows = "rows wait; at each trigger, as soon as they have it"
    return f"{rows}, those of each {unit} become: {per_unit.in_words}{cut}"


def _group_by_stages(query: Query, releases: int) -> list[Stage]:
    bounds = query.declared_bounds
    most = f"{bounds.rows} rows, in at most {bounds.groups} groups, {bounds.rows_per_group} in each"
    if query.bounds != bounds:
        some, rows = query.bounds.groups, query.bounds.rows
        most += (
            f"; there {'is' if some == 1 else 'are'} only {some} group{'s' * (some != 1)} (key and "
            f"window) that a unit can be in, so noise is for {some} with "
            f"{rows} row{'s' * (rows != 1)} in all"
        )
    by = ", ".join(query.keys) or "nothing (one group)"
    if query.grouping_sets:
        by = f"{', '.join(map(set_name, query.grouping_sets))}, of the same rows"
        most += f", a group being all keys ({', '.join(query.keys)}) together"
    stages = [
        *([("settle", _settled(query, releases))] if query.planned else []),
        ("bound", f"keep of each unit at most {most}"),
        ("aggregate", f"{', '.join(a.name for a in query.aggregates) or 'units'} by {by}"),
    ]
    if query.in_rounds:
        does = "publish a key when enough units have come to it since the last time"
        stages.append(("select", does))
    elif query.public_groups is None:
        does = "show a key from the trigger on at which enough units are behind it"
        stages.append(("latch", does))
    times = "once" if releases == 1 else f"{releases} times"
    does = "add noise; publish" if query.aggregates else "publish the keys alone of"
    stages.append(("perturb", f"{does} each window {times}"))
    if query.grouping_sets and query.public_groups is not None:
        does = "make the sets of keys consistent: a total is the sum of its parts"
        stages.append(("least squares", does))
    windows = "one window" if query.window is None else _window_words(query.window)
    return _stages(query, windows, stages)


def _settled(query: Query, releases: int) -> str:
    """What was chosen because nobody gave it, and by what."""
    told = []
    if "max_groups_contributed" in query.planned:
        usual = f"{query.max_groups_contributed} groups of a unit count, as usual of units for ever"
        told.append("each period has a bound of its own" if query.bounds_chosen else usual)
    if "last_budget" in query.planned:
        part = "nothing" if query.last_budget is None else f"{float(query.last_budget):g}"
        told.append(
            f"last_budget = {part}, by the number of releases ({releases}): the product of the "
            "variances of the last one and of those before is least"
        )
    if "debias" in query.planned:
        makes_up = "'groups': counts and sums make up for groups that the bound leaves out"
        told.append(f"debias = {makes_up if query.debias else 'none: floats have no room for it'}")
    return (
        f"nobody gave {', '.join(query.planned)}, so they follow from the query alone, not from "
        f"rows: {'; '.join(told)}"
    )


def _series_stages(query: SeriesQuery) -> list[Stage]:
    by = ", ".join(query.keys) or "nothing (one bin)"
    does = f"{name_of(query.mechanism)} spends, adds noise or repeats"
    stages = [
        ("bound", f"keep of each {query.privacy_unit_column} one row in each window"),
        ("count", f"{query.count.name} by {by}: each window is one step"),
        ("mechanism", f"{does}; each window is published once"),
    ]
    return _stages(query, f"windows of {in_words(query.window.size)}", stages)


def _window_words(window: Tumble) -> str:
    size, cell = in_words(window.size), in_words(window.cell)
    if window.kind == "hop":
        return f"windows of {size}, one every {cell} (a row counts in {window.cells} of them),"
    if window.kind == "cumulate":
        return f"windows that grow by {cell} up to {size} (a row counts in up to {window.cells}),"
    return f"windows of {size}"


def _unit(query: Query) -> str:
    if query.privacy_unit_period == "forever":
        return (
            f"A unit is all rows with one {query.privacy_unit_column}, for ever: whether they are "
            "in the data or not changes the chance of anything that is ever published only within "
            "the budget."
        )
    period = in_words(query.privacy_unit_period)
    return (
        f"A unit is all rows with one {query.privacy_unit_column} within {period} of event time "
        f"({query.time_zone}). Bounds and budget renew with each {period}; what a user "
        "does in several of them is not protected together: over k periods the promise is weaker, "
        "about k times epsilon or more."
    )


def _series_unit(query: SeriesQuery) -> str:
    several = (query.mechanism.terms().window or 1) > 1
    beyond = "windows further apart" if several else "other windows"
    return (
        f"Protected are {query.protected}, there or not: that changes the chance of anything that "
        "is published only within the budget. Other rows in their place count as two such changes. "
        f"What the same {query.privacy_unit_column} does in {beyond} is not protected "
        "together with it."
    )


def measure_name(measure: Measure) -> str:
    """What noise is put on, in words."""
    if isinstance(measure, Level) and measure.share is not None:
        return f"choice among {measure.cells.leaves} leaves of {measure.cells.column}"
    if isinstance(measure, Level):
        cells, count = measure.cells, len(measure.cells.levels)
        if not cells.haar:
            return f"{cells.leaves} bins of {cells.column}"
        return f"{count} levels of {cells.column} ({cells.leaves} leaves)"
    if not measure.column:
        return _KINDS.get(measure.kind, measure.kind)
    if measure.kind == "distinct":
        return f"distinct values of {measure.column}"
    if measure.kind == "clamped":
        return f"{'average' if measure.of_unit == 'mean' else 'sum'} of {measure.column} per unit"
    if isinstance(measure, Moment):
        return measure.in_words
    if measure.power == 0:
        return f"values of {measure.column}"
    if measure.kind != "value":
        return f"sum of {measure.column} of rows that are {measure.kind}"
    return f"sum of {measure.column}{' (squared distances)' if measure.power == 2 else ''}"


def _measures(plan: NoisePlan) -> list[dict[str, Any]]:
    measures, total = [], plan.total
    longest = max(plan.query.schedule.lengths)
    alike = plan.correlated(longest)
    of_columns = (plan.columns, plan.sets, plan.sensitivities, plan.shares, alike)
    for measure, names, change, share, correlated in zip(*of_columns, strict=True):
        if isinstance(measure, Level):  # all of a column at once
            if measure.level:
                continue
            share *= len(measure.cells.levels)
        value = float(change * measure.quantum)
        measures.append(
            {
                "measure": measure_name(measure) + _by_set(names),
                "sensitivity": value,
                "quantum": float(measure.quantum),
                "derivation": _in_all(measure, plan.query, value)
                if plan.query.pure and not isinstance(measure, Level)
                else _per_unit(measure, plan, value)
                if measure.per_unit
                else _derivation(measure, plan.query, value, names)
                + _correlated(plan, correlated, longest),
                "share": f"{float(share / total):.{0 if share * 50 > total else 1}%}",
            }
        )
    return measures


def _correlated(plan: NoisePlan, noise: CorrelatedNoise | None, longest: int) -> str:
    """What it means that groups share noise."""
    if noise is None:
        return ""
    if (plan.whole or plan).query.correlated_noise is None:
        way = "correlated_noise = FALSE, if you add groups up"
    else:
        way = "correlated_noise"
    if longest > 1:
        window, number = plan.window(longest), plan.correlated(longest).index(noise)
        alike = (window.shared[number] / window.stddevs[number, -1]) ** 2
        return (
            f"; {alike:.0%} of the variance of the last release's noise is alike in all groups of "
            f"a window, for less of it in each ({way})"
        )
    alike = float(noise.shared**2 / (noise.own**2 + noise.shared**2))
    return (
        f"; {alike:.0%} of the noise's variance is alike in all groups of a window "
        f"({way}), as if it were {noise.stddev:.4g}"
    )


def _per_unit(measure: Measure, plan: NoisePlan, value: float) -> str:
    """The same for what is bounded for each unit and group, and what that means for its rows."""
    groups, largest = plan.query.bounds.groups, float(measure.largest * measure.quantum)
    lo, hi, most = float(measure.lo), float(measure.hi), f"{largest:g} * sqrt({groups})"
    how = f"at most {largest:g} of a unit in each of {groups} groups: {most} = {value:.4g}"
    if measure.kind == "distinct":
        how += f", the first {float(measure.largest):g} values of a unit to come; a value that "
        how += "goes with one unit may still come with a later one"
        if measure.quantum > 1:
            how += f"; one value in {float(measure.quantum):g} is looked at, and counts for all"
    elif measure.of_unit == "mean":
        how += f"; each unit's own average within [{lo:g}, {hi:g}], counted from "
        how += f"{float(measure.middle):g}: a unit with many rows counts as much as one with few"
    elif measure.of_unit == "sum":
        how += f"; all rows of a unit in a group are added up, then clamped to [{lo:g}, {hi:g}]"
    elif measure.fall:
        how += (
            f"; published more than once, so a unit's positive values count up to {hi:g} and its "
            f"negative ones down to {lo:g}, each apart, where a window that is published once "
            "would clamp their sum"
        )
    else:
        what = "rows of a unit count" if not measure.column else "values add up"
        beyond = "" if not measure.column else "; values on the other side of 0 count as 0"
        how += f"; all {what} within [{lo:g}, {hi:g}], whatever max_rows_per_group is{beyond}"
    factors = [plan.opposed(measure, length) for length in plan.query.schedule.lengths]
    if max(factors) > 1.005:
        how += (
            f"; the noise is {max(factors):.3g} times that of something that only grows, for what "
            "comes at one trigger and goes at another"
        )
    return how


def _in_all(measure: Measure, query: Query, value: float) -> str:
    """The same where all that a unit adds counts together, as for Laplace noise."""
    largest = float(measure.largest * measure.quantum)
    times, what = round(value / largest), "groups"
    if not (measure.kind == "units" or measure.per_unit):
        what = "rows"
    told = f"at most {largest:g} in each of {times} {what}, added up: {value:.4g}"
    if measure.kind == "value" and measure.middle and not isinstance(measure, Moment):
        told += f" (values are counted from {float(measure.middle):g})"
    return told


def _by_set(names: Sequence[str] | None) -> str:
    """Which of several sets of keys it is."""
    return "" if names is None else f" by {set_name(names)}"


def _derivation(
    measure: Measure, query: Query, value: float, names: Sequence[str] | None = None
) -> str:
    """How the sensitivity of a measure is computed, in words; `names`: of a set of keys."""
    bounds = query.bounds
    if isinstance(measure, Level) and measure.share is not None:
        most = bounds.rows_per_group
        moved = float(max(measure.share, 1 - measure.share) * most)
        return (
            f"{most} row{'s' * (most != 1)} of a unit in a group move its distance from any leaf "
            f"by {moved:g} of a rank; a choice in each of {bounds.groups} groups at every release"
        )
    if names is not None and len(names) < len(query.keys):
        groups, largest = query.groups_of_set(names), float(measure.largest * measure.quantum)
        if measure.kind == "units":
            return f"1 in each of {groups} groups: sqrt({groups}) = {value:.4g}"
        return f"at most {largest:g} per row, all {bounds.rows} rows in one group: {value:.4g}"
    if measure.kind == "units":
        return f"1 in each of {bounds.groups} groups: sqrt({bounds.groups}) = {value:.4g}"
    if measure.kind == "weight" and query.key_weights is not None:
        told = query.key_weights.in_words
        return f"{told}; the squares of a unit's weights sum to 1 at most: {value:.4g}"
    if measure.kind == "round":
        return f"1 in each round, {bounds.rows} of them: sqrt({bounds.rows}) = {value:.4g}"
    if measure.kind == "beyond":
        return "1 in one window: sqrt(1) = 1"
    largest = float(measure.largest * measure.quantum)
    if measure.kind in ("dropped", "elsewhere", "kept"):
        most = bounds.rows if measure.kind == "kept" else query.most_dropped
        begin = "" if largest == 1 else f"at most {largest:g} per row, "
        times = "" if largest == 1 else f"{largest:g} * "
        return f"{begin}{most} rows, all in one window: {times}sqrt({most**2}) = {value:.4g}"
    if isinstance(measure, Level):
        begin = "a row moves one node of each level by 1" if measure.signed else "a row is in a bin"
        return f"{begin}; all rows of a unit in one: {value:.4g}"
    rows, each = bounds.rows, bounds.rows_per_group
    full, rest = divmod(min(rows, each * bounds.groups), each)
    how = (
        f"at most {largest:g} per row, {each} rows in each of {full} groups"
        f"{f' and {rest} in one more' if rest else ''}: "
        f"{largest:g} * sqrt({full * each**2 + rest**2}) = {value:.4g}"
    )
    if measure.kind == "value" and measure.middle and not isinstance(measure, Moment):
        how += f" (values are counted from {float(measure.middle):g})"
    return how


def _columns(plan: NoisePlan, releases: int) -> list[dict[str, Any]]:
    """Noise of each published column; an average's depends on how many rows are behind it."""
    query, window = plan.query, plan.window(releases)
    columns: list[dict[str, Any]] = []
    if query.grouping_sets:
        return [
            each for at in range(len(query.grouping_sets)) for each in _of_set(plan, window, at)
        ]
    for aggregate in query.aggregates:
        if isinstance(aggregate, OfCells):
            columns.append(_cells_noise(aggregate, plan, window, releases))
            continue
        if aggregate.error_bar == "with_release":
            note = "each release says its own error bar, which depends on what it is made of"
            columns.append({"column": aggregate.name, "first": None, "last": None, "note": note})
            continue
        spreads = [
            window.stddevs[query.measures.index(measure)] * float(measure.quantum)
            for measure in query.measures_of[aggregate.name]
        ]
        per_row = aggregate.error_bar == "per_row"
        spread = spreads[0]
        if not per_row:
            _, spread = aggregate.answer([(np.zeros(releases), each) for each in spreads], False)
        of = "units" if aggregate.per_unit else "rows"
        note = f" (divided by the number of {of} of the group)" if per_row else ""
        columns.append(
            {
                "column": aggregate.name,
                "first": float(spread[0]),
                "last": float(spread[-1]),
                "most": float(max(spread)),
                "note": note,
            }
        )
    return columns


def _of_set(plan: NoisePlan, window: WindowPlan, at: int) -> list[dict[str, Any]]:
    """The noise of each column in one of several sets of keys, as it is measured."""
    columns, query = [], plan.query
    then = "as measured"
    if query.public_groups is not None:
        then = "as measured; least squares over all sets lowers it, and each release says how far"
    mine = slice(at * window.measures, (at + 1) * window.measures)
    for aggregate in query.aggregates:
        assert not isinstance(aggregate, OfCells)
        used = query.measures_of[aggregate.name]
        spreads = [
            window.stddevs[mine][query.measures.index(each)] * float(each.quantum) for each in used
        ]
        per_row, spread = aggregate.error_bar == "per_row", spreads[0]
        if aggregate.error_bar == "fixed":
            _, spread = aggregate.answer([(np.zeros(len(spread)), e) for e in spreads], False)
        note = f" (divided by the number of rows of the group; {then})" if per_row else f" ({then})"
        columns.append(
            {
                "column": f"{aggregate.name} by {set_name(query.grouping_sets[at])}",
                "first": float(spread[0]),
                "last": float(spread[-1]),
                "most": float(max(spread)),
                "note": note,
            }
            if aggregate.error_bar != "with_release"
            else {"column": aggregate.name, "first": None, "last": None, "note": "in each release"}
        )
    return columns


def _cells_noise(
    aggregate: OfCells, plan: NoisePlan, window: WindowPlan, releases: int
) -> dict[str, Any]:
    """The noise of a quantile in ranks, at the edge where it is largest; that of each bin."""
    query, column = plan.query, {"column": aggregate.name}
    first = next(n for n, each in enumerate(query.levels) if each.cells == aggregate.cells)
    first += len(query.measures)
    if not isinstance(aggregate, Quantile):
        spread = window.stddevs[first]
        ends = {"first": float(spread[0]), "last": float(spread[-1]), "most": float(max(spread))}
        return column | ends | {"note": " in each bin"}
    cells, ranks = aggregate.cells, plan.ranks(aggregate, releases)
    if isinstance(aggregate, ExponentialQuantile):
        each = "each release" if releases > 1 else "the one release of a window"
        other = _other_mechanism(plan, aggregate, "tree", releases)
        note = (
            f"about {ranks[0]:.3g} ranks (rows of the group between it and the quantile): {each} "
            f"chooses one of {cells.leaves} leaves by the exponential mechanism{other}; it tells "
            "no error bar: with mechanism => 'tree', or confidence, there is one"
        )
        return column | {"first": None, "last": None, "note": note, "ranks": float(ranks[-1])}
    extremes = {share for share in aggregate.shares if share in (0, 1)}
    told = {0: "the smallest value", 1: "the largest value"}
    note = (
        f"about {ranks[0]:.3g} ranks at the first release of a window, {ranks[-1]:.3g} at the last "
        f"(rows of the group below the value); read off {cells.depth} noisy levels, one node of "
        f"each{_why_levels(plan, aggregate, releases)}; error bar and interval by rank, in units "
        "of the value, in each release"
    )
    if extremes:
        named = " and ".join(told[int(share)] for share in sorted(extremes))
        note += f"; {named} by rank: two standard deviations inside, so not that of a single row"
    return column | {"first": None, "last": None, "note": note, "ranks": float(ranks[-1])}


def _why_levels(plan: NoisePlan, quantile: Quantile, releases: int) -> str:
    """Why a quantile is read off noisy levels."""
    if quantile.mechanism == "tree":
        return ", as mechanism says"
    if not quantile.inside:
        return ", which the smallest and largest values need"
    other = _other_mechanism(plan, quantile, "exponential", releases)
    if plan.query.confidence is not None:
        return f", since an interval is asked for{other}"
    return f", which every release shares{other}"


def _other_mechanism(plan: NoisePlan, quantile: Quantile, name: str, releases: int) -> str:
    """What the other mechanism would have done in its place."""
    if name == "exponential" and releases > _MOST_TRIED:
        return ""
    aggregates = tuple(a.by(name) if a is quantile else a for a in plan.query.aggregates)
    try:
        other = plan_query(replace(plan.query, aggregates=aggregates, confidence=None))
        (same,) = (a for a in other.query.aggregates if a.name == quantile.name)
        assert isinstance(same, Quantile)
        ranks = float(np.sqrt(np.mean(other.ranks(same, releases) ** 2)))
    except InvalidParameter:
        return ""
    told = "noisy levels" if name == "tree" else "the exponential mechanism, a choice per release,"
    return f" ({told} would be about {ranks:.3g} ranks off)"


def _series_noise(query: SeriesQuery, bins: int) -> dict[str, Any]:
    """From a run over made-up counts that never change: no data are needed, or read."""
    steps = min(_TRIED, query.schedule.steps or _TRIED)
    # made-up data and a fixed draw: the same answer for the same query, every time
    runner = Runner(query.mechanism, secret=bytes(32), run_id=bytes(16))
    releases = [r for batch in runner.feed(np.full((steps, bins), 1000)) for r in batch]
    releases += runner.finish()
    spreads = [float(np.mean(r.stddev)) for r in releases if r.stddev is not None]
    known = [spread for spread in spreads if np.isfinite(spread)]
    column: dict[str, Any] = {"column": query.count.name, "first": None, "last": None}
    if not known:
        return column | {"note": "its releases do not say: the mechanism knows no noise of its own"}
    return column | {
        "note": f"{known[0]:.4g} in the first window, {known[-1]:.4g} in window {len(known)} of a "
        "stream that never changes; the more it changes the more; each release says its own, and "
        "`held` where an earlier value is repeated",
        "tried": {"windows": len(known), "first": known[0], "last": known[-1]},
    }


def _computed_columns(finish: Finish | None) -> list[dict[str, Any]]:
    """The noise of columns that SELECT computes from noisy ones."""
    columns = []
    for name, has_bar in ({} if finish is None else finish.computed).items():
        note = "computed from noisy columns; its error bar follows from theirs"
        if not has_bar:
            note = (
                "computed from noisy columns, without an error bar: only sums and quotients of "
                "aggregates that share no noise have one"
            )
        columns.append({"column": name, "first": None, "last": None, "note": note})
    return columns


def _public_keys(query: Query | SeriesQuery, when: str) -> dict[str, Any]:
    count = len(query.public_groups or ())
    words = f"the {count} public groups are shown {when}; others are dropped"
    if not query.keys:
        words = "there is one group, all rows, and it is always shown"
    return {"public": True, "words": words}


def _keys(query: Query, thresholds: Any, pre: int) -> dict[str, Any]:
    if query.public_groups is not None:
        return _public_keys(query, "from the first release on")
    by_set: dict[str, Any] = {}
    if query.grouping_sets:
        names = [set_name(each) for each in query.grouping_sets]
        by_set = {"by_set": dict(zip(names, [int(each[-1]) for each in thresholds], strict=True))}
        thresholds = thresholds.max(axis=0)
    unit = "units"
    if query.key_weights is not None:
        steps, unit = query.key_weights.steps, "units of weight 1"
        thresholds, pre = -(-thresholds // steps), pre // steps
    first, last = int(thresholds[0]), int(thresholds[-1])
    least, most = int(min(thresholds)), int(max(thresholds))
    stays = "once shown it stays"
    if query.in_rounds:
        stays = "as many again since then for each further release"
    if query.remembered_keys:
        stays += "; one that an earlier window has shown needs no threshold (remember_keys)"
    words = (
        f"a key needs about {last} {unit} to appear by the end of its window"
        f"{_threshold_range(thresholds, least, most)}; {stays}; keys with {pre} "
        f"{'unit' if pre == 1 else 'units'} or fewer are never looked at"
    )
    if query.key_weights is not None:
        words += f"; {query.key_weights.in_words}"
    if by_set:
        words += "; by sets of keys " + ", ".join(f"{n}: {u}" for n, u in by_set["by_set"].items())
        words += "; groups that are not shown have one row in the group that they are a part of"
    return {
        "public": False,
        **by_set,
        "first_threshold": first,
        "last_threshold": last,
        "smallest_threshold": least,
        "largest_threshold": most,
        "pre_threshold": pre,
        "remembered": query.remembered_keys,
        "words": words,
    }


def _threshold_range(thresholds: Any, least: int, most: int) -> str:
    """The releases at which a key needs the fewest and the most units to be seen."""
    if least == most:
        return " (the same at each release)" if len(thresholds) > 1 else ""
    easy, hard = (list(thresholds).index(each) + 1 for each in (least, most))
    return (
        f" (at its smallest {least}, at release {easy}; at its largest {most}, at release {hard})"
    )


def _budget(plan: NoisePlan) -> dict[str, Any]:
    query, delta_slack = plan.query, plan.delta_slack
    if query.pure:
        return {
            "epsilon": float(query.epsilon),
            "delta": 0.0,
            "mu_squared": None,
            "tail": 0.0,
            "words": f"epsilon = {show(query.epsilon)} for the whole run, without a delta, charged "
            "once before the first noise: Laplace noise, and choices by the exponential mechanism",
        }
    words = (
        f"epsilon = {show(query.epsilon)}, delta = {show(query.delta)} for the whole run, charged "
        f"once before the first noise: mu^2 = {show(plan.total)}"
    )
    if query.public_groups is not None and max(query.schedule.lengths) == 1:
        words += "; all groups are public and each window is published once: it works without delta"
    if delta_slack:
        words += f", and {show(delta_slack)} of delta for finding keys"
    return {
        "epsilon": float(query.epsilon),
        "delta": float(query.delta),
        "mu_squared": float(plan.total),
        "tail": float(delta_slack),
        "words": words,
    }


def _memory(query: Query, width: int) -> dict[str, Any]:
    """From the layout of the tables (`group_by`); `width`: numbers of a measure's noise."""
    measures, bounds = len(query.measures), query.bounds
    unit, least, most = row_bytes(2)
    paired = bounds.rows > 1 or bool(query.totals and query.counts_elsewhere)
    tables = 1 + paired + query.rounds_of_units
    pair = row_bytes(bounds.rows_per_group > 1)[0] if paired else 0
    if query.totals and query.counts_units:  # pairs that were counted
        tables, pair = tables + 1, pair + row_bytes()[0]
    if query.rounds_of_units:
        pair += row_bytes(1)[0]
    clamped = sum(measure.kind == "clamped" for measure in query.unit_measures)
    counted = len(query.unit_measures) - clamped
    if query.unit_measures:
        tables, pair = tables + 1 + 2 * counted, pair + row_bytes(2 * clamped + counted)[0]
    group = row_bytes(measures + query.in_rounds)[0]
    noise = _ID + _WORD * width
    shown = group + measures * noise + 4 * _WORD + _WORD * measures * (query.min_change is not None)
    cells = [_cell_bytes(each, query, noise) for each in query.cells]
    shown += sum(least for least, _ in cells)
    fixed = _QUERY_BYTES + tables * LARGE_TABLE // 2
    million = unit + pair * bounds.groups  # bytes each, so megabytes for a million
    lasts = "for ever" if query.privacy_unit_period == "forever" else "until its period is final"
    lost = f" ({row_bytes(1)[0]:.0f} more if it loses rows)" if query.totals else ""
    pairs = f"{pair:.0f} per (unit, group), " if pair else ""
    value = row_bytes()[0]
    if counted:
        values = sum(int(m.largest) for m in query.unit_measures if m.kind == "distinct")
        million += value * values * bounds.groups
        pairs += f"{value:.0f} per (unit, group, value) and per (group, value) counted, "
    waiting = _WAITING_BYTES
    if query.per_unit is not None:
        waiting = _HELD_BYTES + _WORD * len(query.per_unit.held)
    until = "trigger" if query.per_unit is None else "window to close"
    most_cells = sum(most for _, most in cells)
    leaves = f" (up to {most_cells / 1e3:,.0f} kB where its cells are all in use)" if cells else ""
    words = (
        f"about {fixed / 1e6:.1f} MB for the query, {unit:.0f} bytes per unit{lost}, kept "
        f"{lasts}, and until its window is final {pairs}{group:.0f} per group, {shown:.0f} "
        f"and twice the key itself once it is shown{leaves}; a million units that use all "
        f"their groups: {million:.0f} MB; rows that wait for their {until} come "
        f"on top, about {waiting} bytes each"
    )
    if query.per_unit is not None:
        words += " and what is longer of their text, however many a unit has"
        if query.per_unit.across_windows:
            words += "; of each unit that has a cohort one row stays, for ever"
    return {
        "bytes_per_query": fixed,
        "bytes_per_unit": [round(least), round(most)],
        "bytes_per_unit_and_group": round(pair),
        **({"bytes_per_value": round(value)} if counted else {}),
        **({"bytes_per_waiting_row": waiting} if query.per_unit is not None else {}),
        "bytes_per_group": round(group),
        "bytes_per_shown_group": round(shown),
        **({"most_bytes_of_cells_per_group": round(most_cells)} if cells else {}),
        "words": words,
    }


def _cell_bytes(cells: Cells, query: Query, noise: int) -> tuple[float, float]:
    """What the cells of a group take once it is shown: (those of one release's walks, all)."""
    node = row_bytes(2)[0] + noise + _WORD
    if cells.choices:  # exact sums alone
        return 0.0, cells.leaves * row_bytes(2)[0]
    if not cells.haar:
        return cells.leaves * node, cells.leaves * node
    walks = sum(a.found for a in query.aggregates if isinstance(a, OfCells) and a.cells == cells)
    looked_at = sum(min(1 << level, walks) for level in range(cells.depth))
    return looked_at * node, ((1 << cells.depth) - 1) * node


def _schema(schema: pa.Schema, query: RowSpec) -> list[dict[str, str]]:
    """Names and types of the columns of a query's releases; types of keys may be the source's."""
    read = query.source_columns
    facts = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        note = ""
        if name in query.keys and name in query.declared:
            note = " (declared)"
        elif name in query.keys and name in read:
            note = " (or as the source's first schema says; declare it in column_types)"
        elif name in query.keys and set(read) - query.declared.keys():
            note = " (computed; it may depend on the types of the source's columns)"
        facts.append({"name": name, "type": str(kind), "note": note})
    return facts


def _of_tables(query: Query | SeriesQuery) -> list[str]:
    """What is public of joined tables; a registry is the same in every period of a user."""
    joining: object = query.prepare
    if not isinstance(joining, Joining):
        return []
    public = [f"the table {name}: it was declared public" for name in joining.public_tables]
    if isinstance(query, Query) and query.privacy_unit_period == "forever":
        return public
    spans = "periods" if isinstance(query, Query) else "windows"
    return public + [
        f"what the registry {name} says of a user, over several {spans} together: its facts are "
        f"the same in all of them, and protected per {spans[:-1]} only"
        for name in joining.registries
    ]


def _not_protected(query: Query) -> list[str]:
    facts = [*_of_tables(query), *_NOT_PROTECTED]
    if query.privacy_unit_period != "forever":
        period = in_words(query.privacy_unit_period)
        facts.insert(0, f"what a user does in several periods of {period} together")
    if query.public_groups is not None and query.keys:
        facts.insert(0, "which groups exist: they were listed as public")
    return facts
