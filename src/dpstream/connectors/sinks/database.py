"""What the SQL sinks share: one table per query, and a book of the releases that are done.

One release is one transaction: its rows and its entry in the book.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa

from dpstream.connectors.sinks.numbers import another_run, run_of, with_numbers
from dpstream.connectors.storage import open_folder
from dpstream.errors import InvalidParameter, StateError

_LOCKS: dict[Path, Lock] = {}
BOOK = "dpstream_releases"
QUERIES = "dpstream_queries"


class Connection(Protocol):
    """As much of a database connection as is needed."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any:
        """Run a statement."""
        ...


class DatabaseSink:
    """A file with one table per query; a database says how it connects, creates and inserts."""

    kind = "database"
    errors: type[Exception] | tuple[type[Exception], ...] = ()

    def __init__(self, path: Path) -> None:
        self._path = path
        open_folder(path.parent)
        self._lock = _LOCKS.setdefault(path.resolve(), Lock())
        with self._explained():
            self._connection = self.connect(path)
            with self._transaction():
                prepare(self._connection)

    def connect(self, path: Path) -> Any:
        """A connection without transactions of its own."""
        raise AssertionError("a database says how")

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """Put the rows into the table `name`, which is to be created first."""
        raise AssertionError("a database says how")

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the book."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        with self._explained(), self._transaction():
            refuse_another_run(self._connection, query, run)
            if not is_done(self._connection, query, window, trigger):
                known = is_known(self._connection, query, table.schema, run)
                self.insert(identifier(query), table, create=not known)
                mark_done(self._connection, query, window, trigger)

    def claim(self, query: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._explained():
            refuse_another_run(self._connection, query, run)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:  # queries that run side by side write to one file in turn
            self._connection.execute("BEGIN TRANSACTION")
            try:
                yield
            except BaseException:
                with suppress(*self._all_errors()):  # it may be rolled back already
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._all_errors() as problem:
            raise StateError(
                f"{self._path} cannot be written: {problem}; it must be {self.kind} file that this "
                "user may write and that no other process locks, on a disk with space left"
            ) from problem

    def _all_errors(self) -> tuple[type[Exception], ...]:
        return self.errors if isinstance(self.errors, tuple) else (self.errors,)


def identifier(name: str) -> str:
    """A name in quotes."""
    if "\0" in name or not name:
        raise InvalidParameter(f"a name in a database must be there, without NUL; got {name!r}")
    return '"' + name.replace('"', '""') + '"'


def prepare(connection: Connection) -> None:
    """Create the books."""
    connection.execute(
        f'CREATE TABLE IF NOT EXISTS {BOOK} (query TEXT NOT NULL, "window" BIGINT NOT NULL, '
        '"trigger" BIGINT NOT NULL, PRIMARY KEY (query, "window", "trigger"))'
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {QUERIES} (query TEXT PRIMARY KEY, columns TEXT NOT NULL, "
        "run TEXT NOT NULL)"
    )


def is_done(connection: Connection, query: str, window: int, trigger: int) -> bool:
    """Whether the release was written before."""
    found = connection.execute(
        f'SELECT 1 FROM {BOOK} WHERE query = ? AND "window" = ? AND "trigger" = ?',
        (query, window, trigger),
    )
    return found.fetchone() is not None


def mark_done(connection: Connection, query: str, window: int, trigger: int) -> None:
    """Note the release, in the transaction that writes its rows."""
    connection.execute(f"INSERT INTO {BOOK} VALUES (?, ?, ?)", (query, window, trigger))


def refuse_another_run(connection: Connection, query: str, run: str) -> None:
    """The query's releases here must be those of this run."""
    found = connection.execute(f"SELECT run FROM {QUERIES} WHERE query = ?", (query,)).fetchone()
    if found is not None and found[0] != run:
        raise another_run("the database", query)


def is_known(connection: Connection, query: str, schema: pa.Schema, run: str) -> bool:
    """Whether the query's table is there, with these columns; a query of another shape is refused.

    SQL takes `Clicks` and `clicks` for one name, so two queries must not differ in case only.
    """
    if query.lower().startswith("dpstream_"):
        raise InvalidParameter(
            f"tables named dpstream_... are the sink's own; rename the query {query!r}"
        )
    columns = {one.name: str(one.type) for one in schema}
    if len({name.lower() for name in columns}) < len(columns):
        raise InvalidParameter(
            f"columns of a database must differ in more than case; got {', '.join(columns)}"
        )
    rows = connection.execute(f"SELECT query, columns, run FROM {QUERIES}").fetchall()
    known = {name: json.loads(text) for name, text, _ in rows}
    if query not in known:
        if query.lower() in (name.lower() for name in known):
            raise InvalidParameter(f"another query of this sink is named like {query!r}; rename it")
        entry = (query, json.dumps(columns), run)
        connection.execute(f"INSERT INTO {QUERIES} VALUES (?, ?, ?)", entry)
        return False
    if known[query] != columns or list(known[query]) != list(columns):
        raise StateError(
            f"the table {query!r} of the sink has the columns {_shown(known[query])} but this "
            f"release has {_shown(columns)}; rename the query or use another sink"
        )
    return True


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())
