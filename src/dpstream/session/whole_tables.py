"""The tables that queries join, or take their keys from, are read and given to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from dpstream.connectors.whole_tables import read_whole
from dpstream.engines.query_run import AnyQuery
from dpstream.errors import InvalidParameter
from dpstream.query.public_tables import WholeTable
from dpstream.rows.whole_table import whole_table

Given = Mapping[str, Any] | None
"""Tables by their names: what `read_whole` takes, or a `WholeTable`."""
Q = TypeVar("Q", bound=AnyQuery)


def read_tables(
    names: Collection[str], public: Given = None, registry: Given = None
) -> dict[str, WholeTable]:
    """The tables of these names, as far as they are given; each is read once."""
    public, registry = public or {}, registry or {}
    for name in public.keys() & registry.keys():
        raise InvalidParameter(
            f"the table {name!r} is declared public and a registry of units; it can be one of both"
        )
    tables: dict[str, WholeTable] = {}
    for given, private in ((public, False), (registry, True)):
        for name in [name for name in given if name in names]:
            spec = given[name]
            if not isinstance(spec, WholeTable):
                spec = whole_table(name, read_whole(name, spec), registry=private)
            tables[name] = spec
    return tables


def with_tables(query: Q, *, public: Given = None, registry: Given = None) -> Q:
    """A query with the tables that its SQL joins, or takes its public groups from.

    `public`: tables that everybody may know, by their names: a frame, a file, a `.duckdb` file,
    "delta:FOLDER", "postgres://...". `registry`: tables whose rows belong to units, which are
    joined on the privacy unit. `run` takes both, too; with them a query can be explained.

    >>> import pyarrow as pa
    >>> from dpstream.sql_compiler import sql
    >>> query = sql('''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
    ...   privacy_unit_column = user, max_groups_contributed = 4) category, COUNT(*) AS clicks
    ...   FROM log JOIN pages USING (page) GROUP BY category''')
    >>> pages = pa.table({"page": ["a", "b"], "category": ["x", "y"]})
    >>> query.table_names, with_tables(query, public={"pages": pages}).source_columns
    (['pages'], ['page', 'user'])
    """
    names = query.table_names
    if not names:
        return query
    return cast("Q", query.with_tables(read_tables(names, public, registry)))
