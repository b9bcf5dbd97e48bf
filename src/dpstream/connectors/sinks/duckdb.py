"""Releases in a DuckDB file: one table per query with DuckDB's own types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.sinks import database
from dpstream.connectors.sinks.numbers import run_of, with_numbers
from dpstream.connectors.storage import open_folder
from dpstream.errors import MissingDependency, StateError


class DuckdbSink:
    """One transaction per release; DuckDB syncs its log when one commits."""

    def __init__(self, path: Path) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingDependency(
                "a .duckdb sink needs the package duckdb: pip install 'dpstream[duckdb]'"
            ) from None
        self._path, self._error = path, duckdb.Error
        open_folder(path.parent)
        with self._explained():
            self._connection: Any = duckdb.connect(str(path))
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
            self._connection.register("dpstream_rows", table)
            try:
                verb = f"INSERT INTO {name}"
                if not database.is_known(self._connection, query, table.schema, run):
                    verb = f"CREATE TABLE {name} AS"
                self._connection.execute(f"{verb} SELECT * FROM dpstream_rows")
            finally:
                self._connection.unregister("dpstream_rows")
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
        self._connection.execute("BEGIN TRANSACTION")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._error as problem:
            raise StateError(
                f"{self._path} cannot be written: {problem}; it must be a DuckDB file that this "
                "user may write and that no other process has open, on a disk with space left"
            ) from problem
