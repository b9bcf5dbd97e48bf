"""SQL with a privacy clause, compiled to queries; the only importer of sqlglot."""

from __future__ import annotations

from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler.compile_sql import Compiled, compile_sql

__all__ = ["Compiled", "compile_sql", "sql"]


def sql(text: str, name: str | None = None, **options: Any) -> Query | SeriesQuery:
    """The query that SQL stands for, ready for `dps.run`.

    `name`: what its releases are called. `options`: options of the privacy clause by their names,
    as Python values; they go before those of the text. What would break the promise is refused with
    the offending SQL underlined.

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
    return compile_sql(text, name, **options).query
