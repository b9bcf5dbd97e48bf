"""Releases in an SQLite file: one table per query, one durable transaction per release."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.sinks import database
from dpstream.connectors.sinks.encode import plain
from dpstream.connectors.sinks.numbers import run_of, with_numbers
from dpstream.connectors.storage import open_folder
from dpstream.errors import StateError

_LARGEST = 2**63 - 1


class SqliteSink:
    """Times are ISO 8601 text; whole numbers beyond 64 signed bits are text too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        open_folder(path.parent)
        with self._explained():
            self._connection = sqlite3.connect(
                path, isolation_level=None, timeout=30, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                database.prepare(self._connection)

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the book."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        with self._explained(), self._transaction():
            database.refuse_another_run(self._connection, query, run)
            if database.is_done(self._connection, query, window, trigger):
                return
            name = database.identifier(query)
            if not database.is_known(self._connection, query, table.schema, run):
                columns = ", ".join(
                    f"{database.identifier(one.name)} {_affinity(one.type)}" for one in table.schema
                )
                self._connection.execute(f"CREATE TABLE {name} ({columns})")
            values = zip(*(_values(column) for column in table.columns), strict=True)
            marks = ", ".join("?" * table.num_columns)
            self._connection.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
            database.mark_done(self._connection, query, window, trigger)

    def claim(self, query: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._explained():
            database.refuse_another_run(self._connection, query, run)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._connection.rollback()
            raise
        self._connection.commit()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise StateError(
                f"{self._path} cannot be written: {problem}; it must be an SQLite file that this "
                "user may write and that no other process locks, on a disk with space left"
            ) from problem


def _affinity(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return ""  # no conversion: SQLite would round text that looks like a number
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "TEXT"


def _values(column: pa.ChunkedArray) -> list[Any]:
    column = plain(column)
    values: list[Any] = column.to_pylist()
    simple = pa.types.is_primitive(column.type) or pa.types.is_string(column.type)
    if pa.types.is_uint64(column.type):
        return [str(value) if (value or 0) > _LARGEST else value for value in values]
    if simple or pa.types.is_binary(column.type):
        return values
    return [None if value is None else str(value) for value in values]
