"""SQL to a query: an ordered tuple of rules checks and completes a draft, then it is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.query.row_spec import RowSpec
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler import from_clause, select, series_options, validate
from dpstream.sql_compiler.draft import Draft
from dpstream.sql_compiler.post_process import Finisher
from dpstream.sql_compiler.privacy_clause import OPTIONS, node_of, parameter_of
from dpstream.sql_compiler.row_expressions import QueryBuilder
from dpstream.sql_compiler.series_options import rows_of_series, series_query
from dpstream.sql_compiler.statement import parse

RULES: tuple[Callable[[Draft], None], ...] = (
    # The statement as it is written.
    validate.require_one_select,
    validate.refuse_unknown_clauses,
    validate.require_privacy_clause,
    validate.refuse_joins,
    validate.refuse_window_functions,
    validate.refuse_subqueries_in_expressions,
    validate.refuse_nondeterminism,
    validate.refuse_unbounded_aggregates,
    validate.refuse_misplaced_aggregates,
    validate.refuse_select_star,
    validate.refuse_session_windows,
    validate.refuse_data_dependent_triggers,
    validate.require_plain_order_and_limit,
    # OPTIONS: the parameters of the query.
    validate.read_parameters,
    series_options.choose_privacy_unit,
    validate.require_unit_and_budget,
    # FROM and EMIT: the table, its windows, its triggers.
    from_clause.inline_subqueries,
    series_options.require_tumbling_windows,
    from_clause.read_window,
    from_clause.read_emit,
    validate.require_unit_column,
    validate.require_time_columns,
    # GROUP BY and SELECT: keys and aggregates.
    select.name_keys,
    select.refuse_unit_as_key,
    select.name_aggregates,
    select.require_grouped_windows,
    select.require_bounded_aggregates,
    series_options.require_one_count,
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


def _query(draft: Draft) -> Query | SeriesQuery:
    """Build the query of a draft that passed all rules."""
    builder = QueryBuilder(draft)
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
        raise _underline_option(draft, error) from None
    return series_query(draft, rows, *aggregates.values())


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
    if not isinstance(query, Query) or "max_rows_per_group" in compiled.given:
        return []
    counted = [repr(each.name) for each in query.aggregates if each.grows]
    if not counted:
        return []
    verb = "counts" if len(counted) == 1 else "count"
    remark = (
        f"{query.name}: {' and '.join(counted)} {verb} one row of each "
        f"{query.privacy_unit_column!r} and group; for up to 3 add max_rows_per_group = 3 to "
        "OPTIONS (more noise), or = 1 if it is meant"
    )
    return [remark]
