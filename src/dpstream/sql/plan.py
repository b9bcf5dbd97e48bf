"""SQL to a query: checks and rewrites, one after the other, and then the query itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql.bounded import bounded_aggregates
from dpstream.sql.build import Builder
from dpstream.sql.draft import Draft, called
from dpstream.sql.figures import name_aggregates
from dpstream.sql.finish import Finisher
from dpstream.sql.option_values import NotThat, interval
from dpstream.sql.options import OPTIONS, node_of
from dpstream.sql.outputs import name_keys, unit_stays_hidden, windows_are_grouped
from dpstream.sql.parse import parse
from dpstream.sql.relation import inline_tables
from dpstream.sql.series import one_count, rows_of_series, series_query, steps_are_windows
from dpstream.sql.validate import CHECKS, times_are_columns, unit_is_a_column
from dpstream.stages.query import Query
from dpstream.stages.series_query import SeriesQuery
from dpstream.stages.windows import Cumulate, Hop, Tumble


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
        if parameters.setdefault("time", time.name) != time.name:
            raise draft.refusal(window, "two time columns are named", "leave time_column out")
        lengths = [_length(draft, kind, size) for size in sizes]
        try:
            parameters["window"] = made.make(*lengths)
        except InvalidParameter as error:
            raise draft.refusal(window, str(error), made.example) from None
    emit = draft.select.args.get("emit")
    if emit is not None and "time" not in parameters:
        raise draft.refusal(
            emit,
            "EMIT needs event times",
            "write FROM TUMBLE(...), or add time_column, start and end to OPTIONS",
        )
    every = None if emit is None else emit.args.get("every")
    if every is not None:
        try:
            parameters["every"] = interval(every)
        except NotThat as wanted:
            raise draft.refusal(every, "EMIT EVERY cannot use this interval", f"{wanted}") from None


def _length(draft: Draft, kind: str, size: exp.Expr) -> Any:
    """One length of a window function, which is longer than nothing."""
    try:
        length = interval(size)
    except NotThat as wanted:
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
    endless = "time" in parameters and parameters.get("end") is None and not draft.series
    if endless and "period" not in parameters:
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
        "aggregates": list(aggregates.values()),
        "prepare": builder.prepare(),
        "finish": Finisher(builder, aggregates).finish(),
    }
    parameters = rows_of_series(draft) if draft.series else draft.parameters
    try:
        query = Query(**parts, **parameters)
    except InvalidParameter as error:
        raise _pointed(draft, error) from None
    return series_query(draft, query) if draft.series else query


def _pointed(draft: Draft, error: InvalidParameter) -> InvalidParameter:
    """A complaint about a parameter, under the option that gave it."""
    message = str(error)
    for option in OPTIONS.values():
        node = node_of(draft.clause, option.parameter)
        if node is not None and re.match(rf"(the )?{option.parameter}\b", message):
            return draft.refusal(node, message, "change the option")
    return draft.refusal(draft.clause, message, "change the options")
