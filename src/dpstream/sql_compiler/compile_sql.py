"""SQL to a query: an ordered tuple of rules checks and completes a draft, then it is built.

A query through a time-series mechanism is one count per public group and window; a window is one
step.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from sqlglot import exp

from dpstream.counting.noise_scale import HARDLY_PRIVATE
from dpstream.errors import DpstreamError, InvalidParameter, UnexpectedResult
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CountingParameters
from dpstream.query.aggregates import CountDistinct
from dpstream.query.query import Query
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler import (
    from_clause,
    select,
    table_subqueries,
    unit_subquery,
    user_tables,
    validate,
)
from dpstream.sql_compiler.expressions import suggestion
from dpstream.sql_compiler.key_sets import resolve_key_sets
from dpstream.sql_compiler.layer_compiler import with_layers
from dpstream.sql_compiler.outer_select import private_branches, unwrap
from dpstream.sql_compiler.parameters import Params, bind
from dpstream.sql_compiler.privacy_clause import OPTIONS, node_of, parameter_of, read_parameters
from dpstream.sql_compiler.query_builder import QueryBuilder
from dpstream.sql_compiler.statement import Draft, Statement, call_name, parse
from dpstream.sql_compiler.union_rows import prepared_rows
from dpstream.sql_compiler.user_functions import Functions, user_functions

_PRIVACY_UNITS = ("user", "event", "w_event")
_SERIES_OPTIONS = ("w", "mechanism", "mechanism_options")
_OF_MECHANISM = {"privacy_unit", *_SERIES_OPTIONS, "epsilon", "delta"}  # the others are of rows
_OF_ROWS = {field.name for field in dataclasses.fields(RowSpec)}
_OF_USERS = {field.name for field in dataclasses.fields(Query)} - _OF_ROWS - {"epsilon", "delta"}
_USER_OPTIONS = ("privacy_unit_period", "max_values_per_group", *sorted(_OF_USERS))
_LARGE_DELTA = 1e-3  # beyond it a query is told of in plain words
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
        if name in given and not draft.series:
            reason = f"{name} goes with time-series mechanisms"
            raise draft.refusal(node_of(clause, name), reason, "add privacy_unit = 'w_event'")
        if name in given:
            why = "here at most one row of a unit enters each window"
            if name == "privacy_unit_period":
                why = "here a window, or w of them, is what is protected together"
            reason = f"{name} goes with users: {why}"
            raise draft.refusal(node_of(clause, name), reason, "leave it out")
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


RULES: tuple[Callable[[Draft], None], ...] = (
    # The statement as it is written.
    validate.require_one_select,
    validate.refuse_unknown_clauses,
    validate.require_privacy_clause,
    table_subqueries.detach_table_subqueries,
    unit_subquery.detach_unit_subqueries,
    validate.refuse_joins,
    validate.refuse_window_functions_of_rows,
    validate.refuse_unsafe_calls,
    validate.refuse_misplaced_aggregates,
    validate.refuse_select_star,
    validate.refuse_session_windows,
    validate.refuse_data_dependent_triggers,
    validate.require_plain_order_and_limit,
    # OPTIONS: the parameters of the query.
    read_parameters,
    choose_privacy_unit,
    validate.require_unit_and_budget,
    # FROM and EMIT: the table, its windows, its triggers.
    from_clause.inline_subqueries,
    require_tumbling_windows,
    from_clause.read_window,
    from_clause.read_emit,
    validate.require_source_columns,
    # GROUP BY and SELECT: keys and aggregates.
    select.name_keys,
    select.refuse_unit_as_key,
    select.name_aggregates,
    select.require_grouped_windows,
    select.require_bounded_aggregates,
    select.refuse_unit_in_expressions,
    require_one_count,
    user_tables.complete_user_table,
    select.require_group_bound,
    from_clause.require_unit_period,
)
"""One rule is one function: it reads the draft, and adds to it or refuses the statement."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A query, the name of the table that it reads, and its SQL."""

    query: Query | SeriesQuery
    table: str
    text: str
    given: frozenset[str] = frozenset()
    """The parameters of the query that were said, by the text or beside it."""


def sql(
    text: str,
    name: str | None = None,
    *,
    params: Params | None = None,
    functions: Functions | None = None,
    **options: Any,
) -> Query | SeriesQuery:
    """The query that SQL stands for, ready for `dps.run`.

    `name`: what its releases are called. `params`: values of @name, :name or ? in the text.
    `functions`: functions in Python that it may call, by name: trusted code, of one row alone.
    `options`: options of the privacy clause by their names, as Python values; they go before those
    of the text. What would break the promise is refused with the offending SQL underlined; what may
    not be meant is an `UnexpectedResult` warning.

    >>> query = sql('''
    ...     SELECT WITH DIFFERENTIAL_PRIVACY
    ...            OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user_id,
    ...                     max_groups_contributed = 4)
    ...            page, COUNT(*) AS clicks
    ...     FROM log GROUP BY page''')
    >>> query.privacy_unit_column, query.keys, query.bounds
    ('user_id', ('page',), Bounds(rows=4, groups=4, rows_per_group=1))
    """
    if not isinstance(name, str | None):
        raise InvalidParameter(
            f"name must be text, what the releases are called; got a {type(name).__name__}; rows "
            "are given to dps.run(query, source=...)"
        )
    compiled = compile_sql(text, name, params=params, functions=functions, **options)
    warn_of_remarks(compiled, stacklevel=2)
    return compiled.query


def compile_sql(
    text: str,
    name: str | None = None,
    *,
    params: Params | None = None,
    functions: Functions | None = None,
    folder: Path | None = None,
    unbounded: bool = False,
    **overrides: Any,
) -> Compiled:
    """Compile SQL; `overrides` are options by their names in SQL, and go before the text's.

    `folder`: where modules of `functions` are looked for, too. `unbounded`: bounds and clamps may
    be missing, for they are still to be chosen.

    >>> text = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (delta = 1e-9,
    ...   privacy_unit_column = user_id, max_groups_contributed = 4) page, COUNT(*) AS clicks
    ...   FROM log GROUP BY page'''
    >>> compiled = compile_sql(text, epsilon=2)
    >>> compiled.table, compiled.query.keys, compiled.query.aggregates
    ('log', ('page',), (Count(name='clicks'),))
    """
    statement = bind(parse(text), params)
    parts: dict[str, Any] = {"functions": functions, "folder": folder, "unbounded": unbounded}
    return _compiled(statement, name or "query", overrides, **parts)


def compile_all(
    text: str,
    name: str | None = None,
    *,
    params: Params | None = None,
    functions: Functions | None = None,
    folder: Path | None = None,
    **overrides: Any,
) -> list[Compiled]:
    """Compile SQL as `compile_sql` does; a UNION ALL of private queries is one query a branch.

    Their names are `name` with numbers, from 1 on. `overrides` are of each.

    >>> branch = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
    ...   privacy_unit_column = user) COUNT(*) AS n FROM log WHERE page = '''
    >>> text = f"{branch} 'a' UNION ALL {branch} 'b'"
    >>> [each.query.name for each in compile_all(text, "pages", max_rows_per_group=1)]
    ['pages_1', 'pages_2']
    """
    statement = bind(parse(text), params)
    branches = private_branches(statement) or [statement]
    names = [f"{name or 'query'}_{n}" for n in range(1, len(branches) + 1)]
    parts: dict[str, Any] = {"functions": functions, "folder": folder}
    return [
        _compiled(branch, one if len(branches) > 1 else name or "query", overrides, **parts)
        for branch, one in zip(branches, names, strict=True)
    ]


def _compiled(
    statement: Statement,
    name: str,
    overrides: dict[str, Any],
    *,
    functions: Functions | None,
    folder: Path | None,
    unbounded: bool = False,
) -> Compiled:
    """The query of one statement."""
    text = statement.text
    statement, layers = unwrap(statement)
    draft = Draft(statement=statement, overrides=overrides, name=name, unbounded=unbounded)
    draft.functions = user_functions(functions, folder)
    for rule in RULES:
        rule(draft)
    given = frozenset(draft.parameters)
    query, builder = _query(draft)
    query = with_layers(draft, builder, query, layers)
    return Compiled(query=query, table=draft.relation.table, text=text, given=given)


def _query(draft: Draft) -> tuple[Query | SeriesQuery, QueryBuilder]:
    """Build the query of a draft that passed all rules."""
    builder = QueryBuilder(draft)
    resolve_key_sets(draft, builder)
    aggregates = list(builder.aggregates.values())
    most = draft.parameters.pop("max_values_per_group", None)
    if most is not None and not any(isinstance(each, CountDistinct) for each in aggregates):
        raise draft.refusal(
            node_of(draft.clause, "max_values_per_group"),
            "max_values_per_group goes with COUNT(DISTINCT column)",
            "leave it out; max_rows_per_group bounds rows",
        )
    parts: dict[str, Any] = {
        "name": draft.name,
        "keys": tuple(draft.keys),
        "prepare": prepared_rows(draft, builder),
        "finish": builder.finish(),
    }
    try:
        if not draft.series:
            parts |= {"aggregates": aggregates, "grouping_sets": draft.sets}
            return Query(**parts, **draft.parameters), builder
        rows = {key: draft.parameters[key] for key in draft.parameters.keys() - _OF_MECHANISM}
        spec = RowSpec(**parts, **rows)
    except InvalidParameter as error:
        raise _underline_option(draft, error) from None
    return _series_query(draft, spec, *aggregates), builder


def _underline_option(draft: Draft, error: InvalidParameter) -> InvalidParameter:
    """The same error, with the option underlined that gave the parameter."""
    message = str(error)
    for parameter in map(parameter_of, OPTIONS):
        node = node_of(draft.clause, parameter)
        if node is not None and re.match(rf"(the )?{parameter}\b", message):
            return draft.refusal(node, message, "change the option")
    return draft.refusal(draft.clause, message, "change the options")


def remarks(compiled: Compiled) -> list[str]:
    """What the author of a query may not expect of it, a sentence each.

    >>> text = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
    ...   privacy_unit_column = user, max_groups_contributed = 4) page, COUNT(*) AS clicks
    ...   FROM log GROUP BY page'''
    >>> remarks(compile_sql(text))[0].partition(";")[0]
    "query: 'clicks' counts one row of each 'user' and group"
    >>> remarks(compile_sql(text, max_rows_per_group=1))
    []
    """
    query = compiled.query
    budget = _budget_remarks(query)
    if not isinstance(query, Query) or "max_rows_per_group" in compiled.given:
        return budget
    if query.per_unit is not None and query.per_unit.at_most_one:
        return budget
    counted = [repr(each.name) for each in query.aggregates if each.grows]
    if not counted:
        return budget
    verb = "counts" if len(counted) == 1 else "count"
    remark = (
        f"{query.name}: {' and '.join(counted)} {verb} one row of each "
        f"{query.privacy_unit_column!r} and group; for up to 3 add max_rows_per_group = 3 to "
        "OPTIONS (more noise), or = 1 if it is meant"
    )
    return [remark, *budget]


def _budget_remarks(query: Query | SeriesQuery) -> list[str]:
    """Plain words for an epsilon and a delta that promise little."""
    asked = query.mechanism if isinstance(query, SeriesQuery) else query
    epsilon, delta = (float(getattr(asked, name, 0) or 0) for name in ("epsilon", "delta"))
    words = []
    if epsilon > HARDLY_PRIVATE:
        words.append(
            f"{query.name}: epsilon = {epsilon:g} protects nobody: with somebody's rows a release "
            "may be e^epsilon times as likely as without them; usual are 0.1 to 5"
        )
    if delta > _LARGE_DELTA:
        words.append(
            f"{query.name}: delta = {delta:g} is the chance that the promise fails for somebody, "
            "whose rows may then be shown; it should be far below one over the number of users, "
            "such as 1e-9 (it is never compared with the data's own number)"
        )
    return words


def warn_of_remarks(compiled: Compiled, *, stacklevel: int) -> None:
    """Say as warnings what the author of a query may not expect of it."""
    for words in remarks(compiled):
        _warned.add(words)
        warnings.warn(words, UnexpectedResult, stacklevel=stacklevel + 1)


def warn_of_budget(query: Query | SeriesQuery, *, stacklevel: int) -> None:
    """The same of the epsilon and delta of a query, unless it was said when its SQL was read."""
    for words in _budget_remarks(query):
        if words not in _warned:
            warnings.warn(words, UnexpectedResult, stacklevel=stacklevel + 1)


_warned: set[str] = set()


def _series_query(draft: Draft, rows: RowSpec, count: Any) -> SeriesQuery:
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
