"""Time-series mechanisms in SQL: one count per public group and window; a window is one step."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from typing import Any

from sqlglot import exp

from dpstream.errors import DpstreamError, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CountingParameters
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler.draft import Draft, call_name
from dpstream.sql_compiler.expressions import suggestion
from dpstream.sql_compiler.privacy_clause import node_of

_PRIVACY_UNITS = ("user", "event", "w_event")
_SERIES_OPTIONS = ("w", "mechanism", "mechanism_options")
_USER_OPTIONS = (
    "max_groups_contributed",
    "max_rows_per_group",
    "max_rows_contributed",
    "privacy_unit_period",
    "pre_threshold",
    "min_change",
    "nonnegative",
    "strategy",
    "weights",
    "confidence",
    "debias",
    "debias_rows",
)
_DEFAULT_MECHANISM = "pacer"  # the w-event mechanism that is nowhere far from the best


def choose_privacy_unit(draft: Draft) -> None:
    """Protect users, or events through a time-series mechanism; each has options of its own."""
    given, clause = draft.parameters, draft.clause
    unit = given.pop("privacy_unit", None)
    if unit is None and "mechanism" in given:
        raise draft.refusal(
            node_of(clause, "mechanism"),
            "a mechanism publishes events, and it is not said which are protected together",
            "add privacy_unit = 'w_event' and w = 24 to OPTIONS, or privacy_unit = 'event'",
        )
    if unit is not None and unit not in _PRIVACY_UNITS:
        raise draft.refusal(
            node_of(clause, "privacy_unit"),
            f"privacy_unit cannot be {unit!r}",
            "use 'user' (the default), 'event' or 'w_event'",
        )
    draft.series = unit in ("event", "w_event")
    for name in _USER_OPTIONS if draft.series else _SERIES_OPTIONS:
        if name in given:
            raise draft.refusal(node_of(clause, name), *_misplaced(name, series=draft.series))
    if not draft.series:
        return
    if (unit == "w_event") != ("w" in given):
        raise draft.refusal(
            node_of(clause, "w") or node_of(clause, "privacy_unit"),
            "w is missing: how many successive windows are protected together"
            if unit == "w_event"
            else "w goes with privacy_unit = 'w_event'; 'event' protects one window",
            "add w = 24 to OPTIONS" if unit == "w_event" else "leave w out",
        )
    if "mechanism" not in given and unit == "event":
        raise draft.refusal(
            node_of(clause, "privacy_unit"),
            "mechanism is missing",
            f"add mechanism = '...' to OPTIONS: {', '.join(_mechanisms_for('event'))}",
        )
    given["privacy_unit"] = unit
    given.setdefault("mechanism", _DEFAULT_MECHANISM)


def _misplaced(name: str, *, series: bool) -> tuple[str, str]:
    """Why an option does not go with the privacy unit, and what to do."""
    if not series:
        return f"{name} goes with time-series mechanisms", "add privacy_unit = 'w_event'"
    if name == "privacy_unit_period":
        why = "here a window, or w of them, is what is protected together"
    else:
        why = "here at most one row of a unit enters each window"
    return f"{name} goes with users: {why}", "leave it out"


def _mechanisms_for(unit: str) -> list[str]:
    """The mechanisms that protect this unit: events within w windows, or single events."""
    kinds = (HistogramMechanism,) if unit == "w_event" else (SeriesMechanism, CountingParameters)
    return [name for name in REGISTRY if issubclass(find(name), kinds)]


def require_tumbling_windows(draft: Draft) -> None:
    """A mechanism has windows side by side, each published once: they are its steps."""
    if not draft.series:
        return
    window, emit = draft.relation.window, draft.select.args.get("emit")
    if window is None:
        raise draft.refusal(
            draft.select.args["from_"].this,
            "a time-series mechanism goes step by step, and FROM has no windows to be its steps",
            "write FROM TUMBLE(table, DESCRIPTOR(time), INTERVAL '1' HOUR)",
        )
    if window.args["kind"] != "TUMBLE":
        raise draft.refusal(
            window,
            f"{window.args['kind']} puts a row into several windows, and a mechanism's steps must "
            "not share rows",
            "use TUMBLE",
        )
    if emit is not None and emit.args.get("every") is not None:
        raise draft.refusal(
            emit,
            "each window is one step, published once, when it closes",
            "leave EMIT out, or write smaller windows",
        )


def require_one_count(draft: Draft) -> None:
    """A mechanism fills one histogram: rows per public group, a unit in one bin at most."""
    if not draft.series:
        return
    for call in draft.aggregates.values():
        argument = call.expressions[0]
        if call_name(call) != "COUNT" or not isinstance(argument, exp.Star | exp.Distinct):
            raise draft.refusal(
                call,
                f"{call_name(call)} cannot be published through a time-series mechanism: it fills "
                "a histogram with one row per unit and window",
                "use COUNT(*), and filter in WHERE",
            )
    if len(draft.aggregates) > 1:
        raise draft.refusal(
            [*draft.aggregates.values()][1],
            "a time-series mechanism publishes one count, and each row is one unit's only one",
            "keep one COUNT(*)",
        )
    if draft.keys and "public_groups" not in draft.parameters:
        raise draft.refusal(
            draft.select.args["group"],
            "a time-series mechanism does not find groups: which ones there are must be public",
            "add public_groups = ('a', 'b') to OPTIONS, or publish to users (leave privacy_unit "
            "out)",
        )


def rows_of_series(draft: Draft) -> dict[str, Any]:
    """The parameters that say which rows are read; the others are the mechanism's."""
    of_mechanism = ("privacy_unit", "w", "mechanism", "mechanism_options", "epsilon", "delta")
    return {key: value for key, value in draft.parameters.items() if key not in of_mechanism}


def series_query(draft: Draft, rows: RowSpec, count: Any) -> SeriesQuery:
    """Build the query; the mechanism takes the options that it knows."""
    name = draft.parameters["mechanism"]
    node = node_of(draft.clause, "mechanism") or draft.clause
    options = node_of(draft.clause, "mechanism_options") or node
    parameters = _mechanism_parameters(draft, node, rows)
    try:
        mechanism: Mechanism = find(name)(**parameters)
    except InvalidParameter as error:
        raise draft.refusal(node, str(error), "change its parameters") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # a text where a number belongs
        raise draft.refusal(
            options, f"{name} cannot use its parameters: {error}", "change them"
        ) from None
    try:
        of_rows = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
        return SeriesQuery(mechanism=mechanism, count=count, **of_rows)
    except DpstreamError as error:
        raise draft.refusal(options, str(error), "change its parameters") from None


def _mechanism_parameters(draft: Draft, node: exp.Expr, rows: RowSpec) -> dict[str, Any]:
    """What the mechanism is built with: nothing that it does not know, all that it needs."""
    given = draft.parameters
    name, unit = given["mechanism"], given["privacy_unit"]
    if name not in REGISTRY:
        raise draft.refusal(node, f"there is no mechanism {name!r}", suggestion(name, REGISTRY))
    if name not in _mechanisms_for(unit):
        raise draft.refusal(
            node,
            f"{name} does not protect privacy_unit = {unit!r}",
            f"those that do: {', '.join(_mechanisms_for(unit))}",
        )
    mechanism: Any = find(name)
    fields = {field.name: field for field in dataclasses.fields(mechanism) if field.init}
    own = {"epsilon": given["epsilon"], "window": given.get("w")}
    values = {key: value for key, value in own.items() if key in fields and value is not None}
    delta = {"delta": given["delta"]} if "delta" in given else {}
    for key, value in {**delta, **given.get("mechanism_options", {})}.items():
        if key not in fields or key in own:
            option = node_of(draft.clause, "delta" if key == "delta" else "mechanism_options")
            known = [each for each in fields if each not in own]
            raise draft.refusal(
                option or node,
                f"{name} has no parameter {key!r} here",
                suggestion(key, known) if known else "leave it out",
            )
        values[key] = value
    if "steps" in fields and "steps" not in values and rows.schedule.steps is not None:
        values["steps"] = rows.schedule.steps
    missing = [
        key
        for key, field in fields.items()
        if key not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise draft.refusal(
            node,
            f"{name} needs {' and '.join(missing)}",
            f"add mechanism_options = ({', '.join(f'{key} = ...' for key in missing)})",
        )
    return values
