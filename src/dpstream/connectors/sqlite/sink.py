"""Releases in an SQLite file: one table per query, one durable transaction per release."""

from __future__ import annotations

import sqlite3
from typing import Any

import pyarrow as pa

from dpstream.connectors.database import FileDatabase, identifier
from dpstream.connectors.encode import simple_column

_LARGEST = 2**63 - 1


class SqliteSink(FileDatabase):
    """Times are ISO 8601 text; whole numbers beyond 64 signed bits are text too."""

    kind, errors = "an SQLite", sqlite3.Error

    def connect(self) -> Any:
        """Open or make the file; a commit is on the disk."""
        connection = sqlite3.connect(
            self.path, isolation_level=None, timeout=30, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """Rows one by one, as SQLite takes them."""
        if create:
            columns = ", ".join(f"{identifier(c.name)} {_affinity(c.type)}" for c in table.schema)
            self.connection.execute(f"CREATE TABLE {name} ({columns})")
        values = zip(*(_values(column) for column in table.columns), strict=True)
        placeholders = ", ".join("?" * table.num_columns)
        self.connection.executemany(f"INSERT INTO {name} VALUES ({placeholders})", values)


def _affinity(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return ""  # no conversion: SQLite would round text that looks like a number
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "TEXT"


def _values(column: pa.ChunkedArray) -> list[Any]:
    column = simple_column(column)
    values: list[Any] = column.to_pylist()
    simple = pa.types.is_primitive(column.type) or pa.types.is_string(column.type)
    if pa.types.is_uint64(column.type):
        return [str(value) if (value or 0) > _LARGEST else value for value in values]
    if simple or pa.types.is_binary(column.type):
        return values
    return [None if value is None else str(value) for value in values]
