"""Tables that are read whole, when a run starts: files, frames, databases, Delta Lake.

pages.csv  pages.parquet  pages/*.jsonl     files, as sources have them
pages.duckdb, pages.duckdb?table=names      a table of a DuckDB file
delta:lake/pages                            a table of Delta Lake
postgres://user@host/database?table=pages   a table or view of PostgreSQL
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.database import identifier
from dpstream.connectors.registry import open_source
from dpstream.connectors.server_base import ServerAway, ServerOptions, is_uri, unreachable
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.optional import optional
from dpstream.records import Source


def read_whole(name: str, spec: Any, options: Mapping[str, Any] | None = None) -> pa.Table:
    """All rows of a table; a row that cannot be read is refused, for nobody would miss it.

    `name`: what it is called, also in a database if nothing else is said.
    """
    try:
        if isinstance(spec, str | os.PathLike):
            text = os.fspath(spec)
            path, _, asked = text.partition("?")
            if text.startswith("delta:"):
                return _delta_table(text.removeprefix("delta:"))
            if path.endswith(".duckdb"):
                return _duckdb_table(Path(path), asked.removeprefix("table=") or name)
            if text.startswith(("postgres://", "postgresql://")):
                return _postgres_table(name, text, options)
            if text == "-" or is_uri(text):
                raise InvalidParameter(
                    "it is read whole and again at every start: name a file, a .duckdb file, "
                    "delta:FOLDER or postgres://...?table=NAME"
                )
        source = open_source(spec, options=options)
    except (InvalidInput, InvalidParameter) as problem:
        raise type(problem)(f"the table {name!r}: {problem}") from None
    if not source.bounded or not source.replayable:
        raise InvalidParameter(f"the table {name!r} must be one that ends, such as files")
    try:
        return _all_rows(name, source)
    finally:
        source.close()


def _all_rows(name: str, source: Source) -> pa.Table:
    tables = []
    for partition in source.partitions():
        position, done = None, False
        while not done:
            batch = source.read(partition, position)
            for bad in batch.rejected[:1]:
                raise InvalidInput(f"the table {name!r}: {bad.where}: {bad.reason}; mend it")
            tables.append(batch.table)
            position, done = batch.position, batch.done
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid:
        raise InvalidInput(f"the files of the table {name!r} must have the same columns") from None


def _duckdb_table(path: Path, table: str) -> pa.Table:
    duckdb = optional("duckdb", extra="duckdb", who="a table in a .duckdb file")
    if not path.exists():
        raise InvalidInput(f"there is no file {path}")
    try:
        with duckdb.connect(str(path), read_only=True) as connection:
            found: pa.Table = connection.sql(f"FROM {identifier(table)}").to_arrow_table()
    except duckdb.Error as problem:
        words = str(problem).partition("\n")[0]
        raise InvalidInput(f"{path}: {words}; name its table: {path}?table=NAME") from None
    return found


def _delta_table(place: str) -> pa.Table:
    delta = optional("deltalake", extra="delta", who="a delta: table")
    try:
        found: pa.Table = pa.table(delta.DeltaTable(place).to_pyarrow_table())
    except delta.exceptions.DeltaError as problem:
        raise InvalidInput(f"delta:{place}: {problem}") from None
    return found


def _postgres_table(name: str, uri: str, more: Mapping[str, Any] | None) -> pa.Table:
    psycopg = optional("psycopg", extra="postgres", who="a table of PostgreSQL")
    client = import_module("dpstream.connectors.postgres.client")
    options = ServerOptions(uri, more)
    table, connect = options.text("table") or name, client.connect_function(options)
    options.finish()
    try:
        with client.raise_away(), connect() as connection:
            fetched = client.fetch_whole(connection, table, options.where)
    except ServerAway as problem:
        raise unreachable(options.where, problem) from problem
    except psycopg.Error as problem:
        raise InvalidInput(f"{options.where} refuses: {client.one_line(problem)}") from None
    for bad in fetched.rejected[:1]:
        raise InvalidInput(f"{bad.where}: {bad.reason}; mend it")
    whole: pa.Table = fetched.table
    return whole
