"""Time-series mechanisms in SQL: one count per public group and window, each window one step."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from typing import Any

from sqlglot import exp

from dpstream.errors import DpstreamError, InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.parts.factorised_counter import CountingParameters
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler.draft import Draft, called
from dpstream.sql_compiler.expressions import nearest
from dpstream.sql_compiler.privacy_clause import node_of

_UNITS = ("user", "event", "w_event")
_OF_SERIES = ("w", "mechanism", "mechanism_options")
_OF_USERS = (
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
_DEFAULT = "pacer"  # the w-event mechanism that is nowhere far from the best
_ITSELF = ("epsilon", "window")  # given as options of their own


def which_unit(draft: Draft) -> None:
    """Users, or events through a time-series mechanism: options of one do not go with the other."""
    given, clause = draft.parameters, draft.clause
    unit = given.pop("privacy_unit", None)
    if unit is None and "mechanism" in given:
        raise draft.refusal(
            node_of(clause, "mechanism"),
            "a mechanism publishes events, and it is not said which are protected together",
            "add privacy_unit = 'w_event' and w = 24 to OPTIONS, or privacy_unit = 'event'",
        )
    if unit is not None and unit not in _UNITS:
        raise draft.refusal(
            node_of(clause, "privacy_unit"),
            f"privacy_unit cannot be {unit!r}",
            "use 'user' (the default), 'event' or 'w_event'",
        )
    draft.series = unit in ("event", "w_event")
    for name in _OF_USERS if draft.series else _OF_SERIES:
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
            f"add mechanism = '...' to OPTIONS: {', '.join(_fitting('event'))}",
        )
    given["privacy_unit"] = unit
    given.setdefault("mechanism", _DEFAULT)


def _misplaced(name: str, *, series: bool) -> tuple[str, str]:
    if not series:
        return f"{name} goes with time-series mechanisms", "add privacy_unit = 'w_event'"
    if name == "privacy_unit_period":
        return (
            f"{name} goes with users: here a window, or w of them, is what is protected together",
            "leave it out",
        )
    return (
        f"{name} goes with users: here at most one row of a unit enters each window",
        "leave it out",
    )


def _fitting(unit: str) -> list[str]:
    """Mechanisms that protect this unit: events within a window, or single events."""
    return [name for name in REGISTRY if _fits(find(name), unit)]


def _fits(mechanism: type[Mechanism], unit: str) -> bool:
    if unit == "w_event":
        return issubclass(mechanism, HistogramMechanism)
    return issubclass(mechanism, SeriesMechanism | CountingParameters)


def steps_are_windows(draft: Draft) -> None:
    """Each window is one step: there must be windows, side by side, published once."""
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


def one_count(draft: Draft) -> None:
    """The mechanism fills one histogram: rows per public group, a unit in one bin at most."""
    if not draft.series:
        return
    for call in draft.aggregates.values():
        argument = call.expressions[0]
        if called(call) != "COUNT" or not isinstance(argument, exp.Star | exp.Distinct):
            raise draft.refusal(
                call,
                f"{called(call)} cannot be published through a time-series mechanism: it fills a "
                "histogram with one row per unit and window",
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
    """The query; the mechanism is made with the options that it knows."""
    given = draft.parameters
    own = {"epsilon": given["epsilon"], "window": given.get("w")}
    more = dict(given.get("mechanism_options", {}))
    if "delta" in given:
        more = {"delta": given["delta"]} | more
    mechanism = _built(draft, given["privacy_unit"], given["mechanism"], own, more, rows)
    try:
        of_rows = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
        return SeriesQuery(mechanism=mechanism, count=count, **of_rows)
    except DpstreamError as error:
        node = node_of(draft.clause, "mechanism_options") or node_of(draft.clause, "mechanism")
        raise draft.refusal(node or draft.clause, str(error), "change its parameters") from None


def _built(
    draft: Draft, unit: str, name: str, own: dict[str, Any], more: dict[str, Any], rows: RowSpec
) -> Mechanism:
    clause = draft.clause
    place = node_of(clause, "mechanism") or clause
    if name not in REGISTRY:
        raise draft.refusal(place, f"there is no mechanism {name!r}", nearest(name, REGISTRY))
    cls: Any = find(name)
    if not _fits(cls, unit):
        raise draft.refusal(
            place,
            f"{name} does not protect privacy_unit = {unit!r}",
            f"those that do: {', '.join(_fitting(unit))}",
        )
    values = _parameters(draft, cls, name, own, more, rows)
    try:
        made: Mechanism = cls(**values)
    except InvalidParameter as error:
        raise draft.refusal(place, str(error), "change its parameters") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # a text where a number belongs
        option = node_of(clause, "mechanism_options") or place
        raise draft.refusal(
            option, f"{name} cannot use its parameters: {error}", "change them"
        ) from None
    return made


def _parameters(
    draft: Draft, cls: Any, name: str, own: dict[str, Any], more: dict[str, Any], rows: RowSpec
) -> dict[str, Any]:
    """What the mechanism is made with: nothing that it does not know, all that it needs."""
    clause = draft.clause
    place = node_of(clause, "mechanism") or clause
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    values = {key: value for key, value in own.items() if key in fields and value is not None}
    for key, value in more.items():
        if key not in fields or key in _ITSELF:
            option = node_of(clause, "delta" if key == "delta" else "mechanism_options")
            known = [each for each in fields if each not in _ITSELF]
            raise draft.refusal(
                option or place,
                f"{name} has no parameter {key!r} here",
                nearest(key, known) if known else "leave it out",
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
            place,
            f"{name} needs {' and '.join(missing)}",
            f"add mechanism_options = ({', '.join(f'{key} = ...' for key in missing)})",
        )
    return values
