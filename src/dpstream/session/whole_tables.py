"""The tables that queries join, or take their keys from, are read and given to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa

from dpstream.connectors.whole_tables import read_whole
from dpstream.engines.query_run import AnyQuery
from dpstream.engines.table_versions import kept_first_version
from dpstream.errors import InvalidParameter
from dpstream.query.public_tables import WholeTable
from dpstream.query.windows import SECOND, duration
from dpstream.rows.whole_table import whole_table

Q = TypeVar("Q", bound=AnyQuery)


@dataclass(frozen=True)
class Refreshed:
    """A public table that a live run reads anew at a public interval.

    `place`: a file or files, "names.duckdb", "delta:FOLDER", "postgres://...". `every`: such as
    "1 day"; the first trigger after each interval reads it, and rows meet that version until the
    next. A table that cannot be read then stays as it was, and the operator is told.

    >>> Refreshed("pages.csv", every="1 day")
    Refreshed(place='pages.csv', every='1 day')
    """

    place: str | os.PathLike[str] | list[str]
    every: str | timedelta


Given = Mapping[str, Any] | None
"""Tables by their names: what `read_whole` takes, a `Refreshed`, or a `WholeTable`."""


def read_tables(
    names: Collection[str],
    public: Given = None,
    registry: Given = None,
    *,
    kept: Path | None = None,
    known: dict[str, WholeTable] | None = None,
) -> dict[str, WholeTable]:
    """The tables of these names, as far as they are given.

    `kept`: the state directory of a run that may have begun; of a table that is read anew it has
    the copy that the run began with. `known`: what was read for other queries, which is not read
    again; what is read now is added.
    """
    known = {} if known is None else known
    public, registry = public or {}, registry or {}
    for name in public.keys() & registry.keys():
        raise InvalidParameter(
            f"the table {name!r} is declared public and a registry of units; it can be one of both"
        )
    tables: dict[str, WholeTable] = {}
    for given, private in ((public, False), (registry, True)):
        for name in [name for name in given if name in names]:
            spec = given[name]
            if isinstance(spec, WholeTable):
                tables[name] = spec
            elif isinstance(spec, Refreshed) and (copy := kept_first_version(kept, name)):
                tables[name] = _refreshed(name, spec, copy)
            elif name in known:
                tables[name] = known[name]
            elif isinstance(spec, Refreshed):
                if private:
                    raise InvalidParameter(
                        f"the registry {name!r} is read at the start of a run: only a public table "
                        "is read anew; leave refresh out"
                    )
                known[name] = tables[name] = _refreshed(name, spec)
            else:
                whole = whole_table(name, read_whole(name, spec), registry=private)
                known[name] = tables[name] = whole
    return tables


def _refreshed(name: str, spec: Refreshed, copy: pa.Table | None = None) -> WholeTable:
    """A table that is read anew: a copy of what a run began with, or what is there now."""
    if not isinstance(spec.place, str | os.PathLike | list):
        raise InvalidParameter(
            f"the public table {name!r} is a frame, which never changes: name a file or a table "
            "to be read anew, or leave refresh out"
        )
    read = partial(read_whole, name, spec.place)
    every = duration(spec.every, f"refresh of the table {name!r}", least=SECOND)
    whole = whole_table(name, read() if copy is None else copy)
    return replace(whole, refresh=int(every), read=read)


def with_tables(
    query: Q,
    *,
    public: Given = None,
    registry: Given = None,
    state: str | os.PathLike[str] | None = None,
    known: dict[str, WholeTable] | None = None,
) -> Q:
    """A query with the tables that its SQL joins, or takes its public groups from.

    `public`: tables that everybody may know, by their names: a frame, a file, a `.duckdb` file,
    "delta:FOLDER", "postgres://...", or a `Refreshed`. `registry`: tables whose rows belong to
    units, which are joined on the privacy unit. `run` takes both, too; with them a query can be
    explained. `state`: the state directory of the run, which has copies of tables that are
    refreshed. `known`: gets the tables that are read, and has those that need not be read again.

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
    kept = None if state is None else Path(state)
    tables = read_tables(names, public, registry, kept=kept, known=known)
    return cast("Q", query.with_tables(tables))
