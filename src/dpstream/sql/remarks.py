"""What somebody who wrote a query may not expect of it, said before it runs."""

from __future__ import annotations

from dpstream.sql.plan import Compiled
from dpstream.stages.query import Query


def remarks(compiled: Compiled) -> list[str]:
    """A sentence each; none for a query that says what it means.

    >>> from dpstream.sql.plan import compile_sql
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
        f"{query.name}: {' and '.join(counted)} {verb} one row of each {query.unit!r} and group; "
        "for up to 3 add max_rows_per_group = 3 to OPTIONS (more noise), or = 1 if it is meant"
    )
    return [told]
