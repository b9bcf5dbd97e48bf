"""What a continual GROUP BY will do and cost: all of it follows from the query and its plan."""

from __future__ import annotations

from typing import Any

from dpstream.explanation.plan_facts import (
    NOT_PROTECTED,
    Explanation,
    Stage,
    computed_columns,
    lateness,
    schema_facts,
)
from dpstream.group_by.release_table import release_schema
from dpstream.privacy.amounts import show
from dpstream.query.aggregates import Measure
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.query import Query
from dpstream.query.windows import Tumble, in_words, iso
from dpstream.rows.column_values import types_before_rows

_UNIT_BYTES = (46, 59)  # state and index of a unit
_PAIR_BYTES = (37, 45)  # of a (unit, group), index included: one row per group, several
_GROUP_BYTES, _NOISE_BYTES = 16, 40
_LOOKED_AT = 48  # windows; cumulating ones differ in how often they are published


def explain_group_by(query: Query) -> Explanation:
    """Explain a query; one that runs live is taken to begin with its first window."""
    plan = plan_query(query.starting(0))
    query = plan.query
    first = range(min(query.schedule.windows or _LOOKED_AT, _LOOKED_AT))
    releases = max([query.schedule.releases(window) for window in first] + [1])
    window = plan.window(releases)
    return Explanation(
        stages=_stages(query, releases),
        unit=_unit(query),
        bounds={
            "groups": query.bounds.groups,
            "rows_per_group": query.bounds.rows_per_group,
            "rows": query.bounds.rows,
        },
        schedule={
            "window": None if query.window is None else in_words(query.window.size),
            "every": None if query.every is None else in_words(query.every),
            "start": None if query.live else iso(query.start),
            "end": iso(query.end),
            "releases_per_window": releases,
        },
        budget=_budget(plan),
        measures=_measures(plan),
        columns=[*_columns(plan, releases), *computed_columns(query.finish)],
        keys=_keys(query, window.thresholds, window.pre_threshold),
        memory=_memory(query),
        schema=schema_facts(release_schema(plan, types_before_rows(query)), query),
        not_protected=_not_protected(query),
    )


def _stages(query: Query, releases: int) -> list[Stage]:
    read = f"read {', '.join(query.source_columns)}"
    bounds = query.bounds
    stages = [("source", read)]
    if query.prepare is not None:
        stages.append(("prepare", query.prepare.text))
    if query.time_column is not None:
        size = "one window" if query.window is None else _window_words(query.window)
        stages.append(
            ("window", f"{size} by {query.time_column} in {query.time_zone}{lateness(query)}")
        )
    most = f"{bounds.rows} rows, in at most {bounds.groups} groups, {bounds.rows_per_group} in each"
    stages.append(("bound", f"keep of each unit at most {most}"))
    by = ", ".join(query.keys) or "nothing (one group)"
    stages.append(("aggregate", f"{', '.join(a.name for a in query.aggregates)} by {by}"))
    if query.in_rounds:
        does = "publish a key when enough units have come to it since the last time"
        stages.append(("select", does))
    elif query.public_groups is None:
        does = "show a key from the trigger on at which enough units are behind it"
        stages.append(("latch", does))
    times = "once" if releases == 1 else f"{releases} times"
    stages.append(("perturb", f"add noise; publish each window {times}"))
    if query.finish is not None:
        stages.append(("finish", f"{query.finish!r} (of noisy values: costs nothing)"))
    noisy = ("latch", "select", "perturb", "finish")
    return [Stage(name, does, noisy=name in noisy) for name, does in stages]


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


_KINDS = {
    "round": "units since a key was last published",
    "offered": "rows before bounding",
    "kept": "rows after bounding",
}


def measure_name(measure: Measure) -> str:
    """What noise is put on, in words."""
    if measure.kind != "value":
        return _KINDS.get(measure.kind, measure.kind)
    return f"sum of {measure.column}{' (squared distances)' if measure.power == 2 else ''}"


def _measures(plan: NoisePlan) -> list[dict[str, Any]]:
    measures, total = [], plan.calibrated.mu_squared
    for measure, change, share in zip(plan.columns, plan.sensitivities, plan.shares, strict=True):
        value = float(change * measure.quantum)
        measures.append(
            {
                "measure": measure_name(measure),
                "sensitivity": value,
                "quantum": float(measure.quantum),
                "derivation": _derivation(measure, plan.query, value),
                "share": f"{float(share / total):.0%}",
            }
        )
    return measures


def _derivation(measure: Measure, query: Query, value: float) -> str:
    """How the sensitivity of a measure is computed, in words."""
    bounds = query.bounds
    if measure.kind == "units":
        return f"1 in each of {bounds.groups} groups: sqrt({bounds.groups}) = {value:.4g}"
    if measure.kind == "round":
        return f"1 in each round, {bounds.rows} of them: sqrt({bounds.rows}) = {value:.4g}"
    if measure.kind in ("offered", "kept"):
        rows = (query.debias_rows or 0) if measure.kind == "offered" else bounds.rows
        return f"{rows} rows, all in one window: sqrt({rows**2}) = {value:.4g}"
    largest = float(measure.largest * measure.quantum)
    rows, each = bounds.rows, bounds.rows_per_group
    full, rest = divmod(min(rows, each * bounds.groups), each)
    how = (
        f"at most {largest:g} per row, {each} rows in each of {full} groups"
        f"{f' and {rest} in one more' if rest else ''}: "
        f"{largest:g} * sqrt({full * each**2 + rest**2}) = {value:.4g}"
    )
    if measure.kind == "value" and measure.middle:
        how += f" (values are counted from {float(measure.middle):g})"
    return how


def _columns(plan: NoisePlan, releases: int) -> list[dict[str, Any]]:
    """Noise of each published column; an average's depends on how many rows are behind it."""
    query, window = plan.query, plan.window(releases)
    columns: list[dict[str, Any]] = []
    for aggregate in query.aggregates:
        if aggregate.error_bar == "with_release":
            note = "each release says its own error bar, which depends on what it is made of"
            columns.append({"column": aggregate.name, "first": None, "last": None, "note": note})
            continue
        measure = aggregate.measures(query.one_row)[0]
        spread = window.stddevs[query.measures.index(measure)] * float(measure.quantum)
        per_row = aggregate.error_bar == "per_row"
        note = " (divided by the number of rows of the group)" if per_row else ""
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


def _keys(query: Query, thresholds: Any, pre: int) -> dict[str, Any]:
    if query.public_groups is not None:
        count = len(query.public_groups)
        words = f"the {count} public groups are shown from the first release on; others are dropped"
        if not query.keys:
            words = "there is one group, all rows, and it is always shown"
        return {"public": True, "words": words}
    first, last = int(thresholds[0]), int(thresholds[-1])
    least, most = int(min(thresholds)), int(max(thresholds))
    stays = "once shown it stays"
    if query.in_rounds:
        stays = "as many again since then for each further release"
    words = (
        f"a key needs about {last} units to appear by the end of its window"
        f"{_threshold_range(thresholds, least, most)}; {stays}; keys with {pre} "
        f"{'unit' if pre == 1 else 'units'} or fewer are never looked at"
    )
    return {
        "public": False,
        "first_threshold": first,
        "last_threshold": last,
        "smallest_threshold": least,
        "largest_threshold": most,
        "pre_threshold": pre,
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
    query, tail = plan.query, plan.delta_slack
    words = (
        f"epsilon = {show(query.epsilon)}, delta = {show(query.delta)} for the whole run, charged "
        f"once before the first noise: mu^2 = {show(plan.calibrated.mu_squared)}"
    )
    if tail:
        words += f", and {show(tail)} of delta for finding keys"
    return {
        "epsilon": float(query.epsilon),
        "delta": float(query.delta),
        "mu_squared": float(plan.calibrated.mu_squared),
        "tail": float(tail),
        "words": words,
    }


def _memory(query: Query) -> dict[str, Any]:
    low, high = _UNIT_BYTES
    pair = _PAIR_BYTES[0 if query.one_row else 1]
    measures = len(query.measures)
    group = 2 * _GROUP_BYTES + 8 * measures
    shown = group + _NOISE_BYTES * measures
    million = high + pair * query.bounds.groups  # bytes each, so megabytes for a million
    lasts = "for ever" if query.privacy_unit_period == "forever" else "until its period is final"
    words = (
        f"about {low} to {high} bytes per unit and {pair} per (unit, group), kept {lasts}; "
        f"a million units that use all their groups: {million} MB; {group} bytes per "
        f"group, {shown} and the key itself once it is shown, until its window is final"
    )
    return {
        "bytes_per_unit": [low, high],
        "bytes_per_unit_and_group": pair,
        "bytes_per_group": group,
        "bytes_per_shown_group": shown,
        "words": words,
    }


def _not_protected(query: Query) -> list[str]:
    facts = list(NOT_PROTECTED)
    if query.privacy_unit_period != "forever":
        period = in_words(query.privacy_unit_period)
        facts.insert(0, f"what a user does in several periods of {period} together")
    if query.public_groups is not None and query.keys:
        facts.insert(0, "which groups exist: they were listed as public")
    return facts
