"""Releases in SQL databases: one table per query, and an index of the releases that are done.

One release is one transaction: its rows and its entry in the index. SQLite and DuckDB are here;
PostgreSQL has a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.encode import (
    KEY_COLUMN,
    another_run,
    run_of,
    simple_column,
    with_key_column,
    with_numbers,
)
from dpstream.connectors.storage import open_folder
from dpstream.errors import InvalidParameter, StateError
from dpstream.optional import optional

_LOCKS: dict[str, Lock] = {}
_RELEASES, _QUERIES = "dpstream_releases", "dpstream_queries"
_NEW = "dpstream_new"  # a release on its way into a table with keys


class _TakenBackError(Exception):
    """Ends a transaction that was only tried."""


class DatabaseSink(ABC):
    """One table per query; a database says how it connects, creates and inserts."""

    placeholder = "?"
    """Stands for a parameter in a statement."""
    errors: type[Exception]
    """What the database raises."""
    advice: str
    """What to do when it cannot be written."""

    def __init__(self, place: str, *, lock: str) -> None:
        """`place`: as it is shown; `lock`: the same for all sinks that write to one database."""
        self.place = place
        self._lock = _LOCKS.setdefault(lock, Lock())
        with self.explain_errors():
            self.connection = self.connect()
            with self.transaction():
                self.connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {_RELEASES} (query TEXT NOT NULL, "
                    '"window" BIGINT NOT NULL, "trigger" BIGINT NOT NULL, '
                    'PRIMARY KEY (query, "window", "trigger"))'
                )
                self.connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {_QUERIES} (query TEXT PRIMARY KEY, "
                    "columns TEXT NOT NULL, run TEXT NOT NULL)"
                )

    @abstractmethod
    def connect(self) -> Any:
        """A connection without transactions of its own."""

    @abstractmethod
    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """Put the rows into the table `name`; `create` it first if so told."""

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the index."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        with self.explain_errors(), self.transaction():
            self._refuse_another_run(name, run)
            if not self._select(_RELEASES, query=name, window=window, trigger=trigger):
                known = self._has_table(name, table.schema, run)
                self.insert(identifier(name), table, create=not known)
                self.mark_done(name, window, trigger)

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Insert or update the rows and delete the window's others, unless it has a newer one."""
        run, table = run_of(table), with_key_column(with_numbers(table, window, trigger), row_keys)
        with self.explain_errors(), self.transaction():
            self._refuse_another_run(name, run)
            done = self._select(_RELEASES, query=name, window=window)
            if all(earlier < trigger for _, _, earlier in done):
                known = self._has_table(name, table.schema, run)
                self._replace(name, window, table, create=not known)
                self.mark_done(name, window, trigger)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Write a release without rows, and take that back."""
        table = with_numbers(schema.empty_table(), 0, 1)
        with self.explain_errors(), suppress(_TakenBackError), self.transaction():
            known = self._has_table(name, table.schema, "")
            self.insert(identifier(name), table, create=not known)
            raise _TakenBackError

    def check_upsert(self, name: str, schema: pa.Schema) -> None:
        """The same, of a table with keys."""
        self.check(name, with_key_column(schema.empty_table()).schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self.explain_errors():
            self._refuse_another_run(name, run)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; queries that run side by side write to one database in turn."""
        with self._lock:
            self.connection.execute("BEGIN TRANSACTION")
            try:
                yield
            except BaseException:
                with suppress(self.errors):  # it may be rolled back already
                    self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Raise what the database says, with what to do."""
        try:
            yield
        except self.errors as problem:
            raise StateError(
                f"{self.place} cannot be written: {problem}; {self.advice}"
            ) from problem

    def mark_done(self, name: str, window: int, trigger: int) -> None:
        """Add a release to the index, in the transaction that writes its rows."""
        self._insert(_RELEASES, name, window, trigger)

    def _replace(self, query: str, number: int, table: pa.Table, *, create: bool) -> None:
        """The rows of the window with this number, in place of those that are there."""
        name, window = identifier(query), identifier(table.column_names[0])
        if create:
            self.insert(name, table, create=True)
            index = hashlib.sha256(query.encode()).hexdigest()[:16]  # names may be cut
            self.connection.execute(
                f"CREATE UNIQUE INDEX dpstream_{index} ON {name} ({window}, {KEY_COLUMN})"
            )
            return
        columns = ", ".join(
            f"{column} = excluded.{column}" for column in map(identifier, table.column_names)
        )
        self.connection.execute(f"CREATE TEMP TABLE {_NEW} AS SELECT * FROM {name} WHERE 1 = 0")
        self.insert(identifier(_NEW), table, create=False)
        self.connection.execute(
            f"DELETE FROM {name} WHERE {window} = {self.placeholder} "
            f"AND {KEY_COLUMN} NOT IN (SELECT {KEY_COLUMN} FROM {_NEW})",
            (number,),
        )
        self.connection.execute(
            f"INSERT INTO {name} SELECT * FROM {_NEW} WHERE 1 = 1 "
            f"ON CONFLICT ({window}, {KEY_COLUMN}) DO UPDATE SET {columns}"
        )
        self.connection.execute(f"DROP TABLE {_NEW}")

    def _insert(self, table: str, *values: Any) -> None:
        placeholders = ", ".join([self.placeholder] * len(values))
        self.connection.execute(f"INSERT INTO {table} VALUES ({placeholders})", values)

    def _select(self, table: str, **where: Any) -> list[Any]:
        """The entries of the index that have these values."""
        terms = " AND ".join(f'"{column}" = {self.placeholder}' for column in where) or "1 = 1"
        asked = f"SELECT * FROM {table} WHERE {terms}"
        rows: list[Any] = self.connection.execute(asked, tuple(where.values())).fetchall()
        return rows

    def _refuse_another_run(self, query: str, run: str) -> None:
        """The query's releases here must be those of this run."""
        if any(known != run for _, _, known in self._select(_QUERIES, query=query)):
            raise another_run("the database", query)

    def _has_table(self, query: str, schema: pa.Schema, run: str) -> bool:
        """Whether the query's table is there, with these columns; another shape is refused.

        SQL takes `Clicks` and `clicks` for one name, so two queries must not differ in case only.
        """
        if query.lower().startswith("dpstream_"):
            raise InvalidParameter(
                f"tables named dpstream_... are the sink's own; rename the query {query!r}"
            )
        columns = {field.name: str(field.type) for field in schema}
        if len({name.lower() for name in columns}) < len(columns):
            raise InvalidParameter(
                f"columns of a database must differ in more than case; got {', '.join(columns)}"
            )
        known = {name: json.loads(text) for name, text, _ in self._select(_QUERIES)}
        if query not in known:
            if query.lower() in (name.lower() for name in known):
                raise InvalidParameter(
                    f"another query of this sink is named like {query!r}; rename it"
                )
            self._insert(_QUERIES, query, json.dumps(columns), run)
            return False
        if known[query] != columns or list(known[query]) != list(columns):
            raise StateError(
                f"the table {query!r} of the sink has the columns {_shown(known[query])} but this "
                f"release has {_shown(columns)}; rename the query or use another sink"
            )
        return True


class FileDatabase(DatabaseSink):
    """A database in a file."""

    kind: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self.advice = (
            f"it must be {self.kind} file that this user may write and that no other process "
            "locks, on a disk with space left"
        )
        open_folder(path.parent)
        super().__init__(str(path), lock=str(path.resolve()))


def identifier(name: str) -> str:
    """A name in quotes."""
    if "\0" in name or not name:
        raise InvalidParameter(f"a name in a database must be there, without NUL; got {name!r}")
    return '"' + name.replace('"', '""') + '"'


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())


# Releases in an SQLite file: one table per query, one durable transaction per release.

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


# Releases in a DuckDB file: one table per query with DuckDB's own types.


class DuckdbSink(FileDatabase):
    """DuckDB syncs its log when a transaction commits."""

    kind = "a DuckDB"

    def __init__(self, path: Path) -> None:
        self._duckdb = optional("duckdb", extra="duckdb", who="a .duckdb sink")
        self.errors = self._duckdb.Error
        super().__init__(path)

    def connect(self) -> Any:
        """Open or make the file."""
        return self._duckdb.connect(str(self.path))

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """DuckDB reads Arrow tables as they are, but for decimals that it has not."""
        wide = [n for n, kind in enumerate(table.schema.types) if pa.types.is_decimal256(kind)]
        for n in wide:
            table = table.set_column(n, table.column_names[n], table.column(n).cast(pa.string()))
        self.connection.register("dpstream_rows", table)
        try:
            verb = f"CREATE TABLE {name} AS" if create else f"INSERT INTO {name}"
            self.connection.execute(f"{verb} SELECT * FROM dpstream_rows")
        finally:
            with suppress(self.errors):  # a failed transaction refuses: it has said why
                self.connection.unregister("dpstream_rows")
