"""SQL to a query: checks and rewrites, one after the other, and then the query itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import Cumulate, Hop, Tumble
from dpstream.sql_compiler.draft import Draft, called
from dpstream.sql_compiler.post_process import Finisher
from dpstream.sql_compiler.privacy_clause import OPTIONS, WrongKind, interval, node_of, parameter_of
from dpstream.sql_compiler.relation import inline_tables
from dpstream.sql_compiler.row_expressions import Builder, bounded_aggregates
from dpstream.sql_compiler.select import (
    name_aggregates,
    name_keys,
    unit_stays_hidden,
    windows_are_grouped,
)
from dpstream.sql_compiler.series_options import (
    one_count,
    rows_of_series,
    series_query,
    steps_are_windows,
)
from dpstream.sql_compiler.statement import parse
from dpstream.sql_compiler.validate import CHECKS, times_are_columns, unit_is_a_column


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A query, the name of the table that it reads, and its SQL."""

    query: Query | SeriesQuery
    table: str
    text: str
    given: frozenset[str] = frozenset()
    """The parameters of the query that were said, by the text or beside it."""


def compile_sql(text: str, name: str | None = None, **overrides: Any) -> Compiled:
    """Compile SQL; `overrides` are options by their names in SQL, and go before the text's.

    >>> text = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (delta = 1e-9,
    ...   privacy_unit_column = user_id, max_groups_contributed = 4) page, COUNT(*) AS clicks
    ...   FROM log GROUP BY page'''
    >>> compiled = compile_sql(text, epsilon=2)
    >>> compiled.table, compiled.query.keys, compiled.query.aggregates
    ('log', ('page',), (Count(name='clicks'),))
    """
    draft = Draft(statement=parse(text), overrides=overrides, name=name or "query")
    for rule in RULES:
        rule(draft)
    given = frozenset(draft.parameters)
    return Compiled(query=_query(draft), table=draft.relation.table, text=text, given=given)


class _Window(NamedTuple):
    """What a window function takes after its table and time, and what it makes of it."""

    lengths: int
    takes: str
    example: str
    make: Callable[..., Tumble]


_WINDOWS = {
    "TUMBLE": _Window(
        1, "a size", "write TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY)", Tumble
    ),
    "HOP": _Window(
        2,
        "a slide and a size",
        "write HOP(clicks, DESCRIPTOR(ts), INTERVAL '1' HOUR, INTERVAL '1' DAY)",
        lambda slide, size: Hop(size, slide=slide),
    ),
    "CUMULATE": _Window(
        2,
        "a step and a size",
        "write CUMULATE(clicks, DESCRIPTOR(ts), INTERVAL '1' HOUR, INTERVAL '1' DAY)",
        lambda step, size: Cumulate(size, step=step),
    ),
}


def window_and_time(draft: Draft) -> None:
    """The sizes and the time column of TUMBLE, HOP or CUMULATE, and the triggers of EMIT."""
    window, parameters = draft.relation.window, draft.parameters
    if window is not None:
        time, sizes = window.args.get("time"), window.expressions
        if isinstance(time, exp.Anonymous) and called(time) == "DESCRIPTOR":
            time = time.expressions[0] if len(time.expressions) == 1 else None
        kind = window.args["kind"]
        made = _WINDOWS[kind]
        if not isinstance(time, exp.Column) or len(sizes) != made.lengths:
            raise draft.refusal(
                window, f"{kind} takes a table, the time column and {made.takes}", made.example
            )
        if parameters.setdefault("time_column", time.name) != time.name:
            raise draft.refusal(window, "two time columns are named", "leave time_column out")
        lengths = [_length(draft, kind, size) for size in sizes]
        try:
            parameters["window"] = made.make(*lengths)
        except InvalidParameter as error:
            raise draft.refusal(window, str(error), made.example) from None
    emit = draft.select.args.get("emit")
    if emit is not None and "time_column" not in parameters:
        raise draft.refusal(
            emit,
            "EMIT needs event times",
            "write FROM TUMBLE(...), or add time_column, start and end to OPTIONS",
        )
    every = None if emit is None else emit.args.get("every")
    if every is not None:
        try:
            parameters["every"] = interval(every)
        except WrongKind as wanted:
            raise draft.refusal(every, "EMIT EVERY cannot use this interval", f"{wanted}") from None


def _length(draft: Draft, kind: str, size: exp.Expr) -> Any:
    """One length of a window function, which is longer than nothing."""
    try:
        length = interval(size)
    except WrongKind as wanted:
        raise draft.refusal(size, f"{kind} cannot use this interval", f"write {wanted}") from None
    if not length:
        raise draft.refusal(size, f"{kind} needs an interval longer than 0", "make it longer")
    return length


def bounded_groups(draft: Draft) -> None:
    """How many groups a unit may reach has no default, unless there is only one."""
    if draft.series or "max_groups_contributed" in draft.parameters:
        return
    if draft.keys or draft.windowed:
        raise draft.refusal(
            draft.clause,
            "max_groups_contributed is missing: in how many groups (key and window) a unit counts",
            "add max_groups_contributed = 8 to OPTIONS; the noise grows with its square root",
        )
    draft.parameters["max_groups_contributed"] = 1


def endless_windows_need_a_period(draft: Draft) -> None:
    """Over endless windows one budget per unit needs saying for how long a unit is one."""
    parameters = draft.parameters
    endless = "time_column" in parameters and parameters.get("end") is None and not draft.series
    if endless and "privacy_unit_period" not in parameters:
        raise draft.refusal(
            draft.relation.window or draft.clause,
            "the windows have no end, and it is not said for how long a user is one unit",
            "add privacy_unit_period = INTERVAL '1' DAY (bounds and budget renew daily), or "
            "'forever' (they hold for all time), or start and end",
        )


RULES: tuple[Callable[[Draft], None], ...] = (
    *CHECKS,
    inline_tables,
    steps_are_windows,
    window_and_time,
    unit_is_a_column,
    times_are_columns,
    name_keys,
    unit_stays_hidden,
    name_aggregates,
    windows_are_grouped,
    bounded_aggregates,
    one_count,
    bounded_groups,
    endless_windows_need_a_period,
)
"""Checks and rewrites, in order; each is a function of the draft."""


def _query(draft: Draft) -> Query | SeriesQuery:
    builder = Builder(draft)
    for name, node in draft.keys.items():
        builder.key(name, node)
    aggregates = {name: builder.aggregate(name, call) for name, call in draft.aggregates.items()}
    parts: dict[str, Any] = {
        "name": draft.name,
        "keys": tuple(draft.keys),
        "prepare": builder.prepare(),
        "finish": Finisher(builder, aggregates).finish(),
    }
    try:
        if not draft.series:
            return Query(**parts, aggregates=list(aggregates.values()), **draft.parameters)
        rows = RowSpec(**parts, **rows_of_series(draft))
    except InvalidParameter as error:
        raise _pointed(draft, error) from None
    return series_query(draft, rows, *aggregates.values())


def _pointed(draft: Draft, error: InvalidParameter) -> InvalidParameter:
    """A complaint about a parameter, under the option that gave it."""
    message = str(error)
    for parameter in map(parameter_of, OPTIONS):
        node = node_of(draft.clause, parameter)
        if node is not None and re.match(rf"(the )?{parameter}\b", message):
            return draft.refusal(node, message, "change the option")
    return draft.refusal(draft.clause, message, "change the options")


# What somebody who wrote a query may not expect of it, said before it runs.


def remarks(compiled: Compiled) -> list[str]:
    """A sentence each; none for a query that says what it means.

    >>> from dpstream.sql_compiler.compile_sql import compile_sql
    >>> text = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
    ...   privacy_unit_column = user, max_groups_contributed = 4) page, COUNT(*) AS clicks
    ...   FROM log GROUP BY page'''
    >>> remarks(compile_sql(text))[0].partition(";")[0]
    "query: 'clicks' counts one row of each 'user' and group"
    >>> remarks(compile_sql(text, max_rows_per_group=1))
    []
    """
    query = compiled.query
    if not isinstance(query, Query) or "max_rows_per_group" in compiled.given:
        return []
    counted = [repr(one.name) for one in query.aggregates if one.grows]
    if not counted:
        return []
    verb = "counts" if len(counted) == 1 else "count"
    told = (
        f"{query.name}: {' and '.join(counted)} {verb} one row of each "
        f"{query.privacy_unit_column!r} and group; for up to 3 add max_rows_per_group = 3 to "
        "OPTIONS (more noise), or = 1 if it is meant"
    )
    return [told]
