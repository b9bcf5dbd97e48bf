"""What the SQL sinks share: one table per query, and a book of the releases that are done.

One release is one transaction: its rows and its entry in the book.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa

from dpstream.connectors.encode import another_run, run_of, with_numbers
from dpstream.connectors.storage import open_folder
from dpstream.errors import InvalidParameter, StateError

_LOCKS: dict[str, Lock] = {}
BOOK = "dpstream_releases"
QUERIES = "dpstream_queries"


class Connection(Protocol):
    """As much of a database connection as is needed."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any:
        """Run a statement."""
        ...


class DatabaseSink:
    """One table per query; a database says how it connects, creates and inserts."""

    placeholder = "?"
    """Stands for a parameter in a statement."""
    errors: type[Exception] | tuple[type[Exception], ...] = ()

    def __init__(self, place: str, *, one: str) -> None:
        """`place`: as it is shown; `one`: the same for all sinks that write to one database."""
        self.place = place
        self._lock = _LOCKS.setdefault(one, Lock())
        with self.explained():
            self.connection = self.connect()
            with self.transaction():
                self._books().prepare()

    def connect(self) -> Any:
        """A connection without transactions of its own."""
        raise AssertionError("a database says how")

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """Put the rows into the table `name`, which is to be created first."""
        raise AssertionError("a database says how")

    def advice(self) -> str:
        """What to do when it cannot be written."""
        raise AssertionError("a database says what")

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the book."""
        run, table = run_of(table), with_numbers(table, window, trigger)
        with self.explained(), self.transaction():
            books = self._books()
            books.refuse_another_run(name, run)
            if not books.is_done(name, window, trigger):
                known = books.is_known(name, table.schema, run)
                self.insert(identifier(name), table, create=not known)
                books.mark_done(name, window, trigger)

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self.explained():
            self._books().refuse_another_run(name, run)

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
                with suppress(*self._all_errors()):  # it may be rolled back already
                    self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What the database says, with what to do."""
        try:
            yield
        except self._all_errors() as problem:
            raise StateError(
                f"{self.place} cannot be written: {problem}; {self.advice()}"
            ) from problem

    def _books(self) -> ReleaseIndex:
        return ReleaseIndex(self.connection, self.placeholder)

    def _all_errors(self) -> tuple[type[Exception], ...]:
        return self.errors if isinstance(self.errors, tuple) else (self.errors,)


class FileDatabase(DatabaseSink):
    """A database in a file."""

    kind = "a database"

    def __init__(self, path: Path) -> None:
        self.path = path
        open_folder(path.parent)
        super().__init__(str(path), one=str(path.resolve()))

    def advice(self) -> str:
        """It is the file."""
        return (
            f"it must be {self.kind} file that this user may write and that no other process "
            "locks, on a disk with space left"
        )


@dataclass(frozen=True, eq=False)
class ReleaseIndex:
    """The releases that are done, and the queries: their columns and runs."""

    connection: Connection
    placeholder: str

    def prepare(self) -> None:
        """Create them."""
        self.connection.execute(
            f'CREATE TABLE IF NOT EXISTS {BOOK} (query TEXT NOT NULL, "window" BIGINT NOT NULL, '
            '"trigger" BIGINT NOT NULL, PRIMARY KEY (query, "window", "trigger"))'
        )
        self.connection.execute(
            f"CREATE TABLE IF NOT EXISTS {QUERIES} (query TEXT PRIMARY KEY, "
            "columns TEXT NOT NULL, run TEXT NOT NULL)"
        )

    def is_done(self, query: str, window: int, trigger: int) -> bool:
        """Whether the release was written before."""
        columns = ("query", '"window"', '"trigger"')
        where = " AND ".join(f"{column} = {self.placeholder}" for column in columns)
        found = self.connection.execute(
            f"SELECT 1 FROM {BOOK} WHERE {where}", (query, window, trigger)
        )
        return found.fetchone() is not None

    def mark_done(self, query: str, window: int, trigger: int) -> None:
        """Note the release, in the transaction that writes its rows."""
        self._insert(BOOK, (query, window, trigger))

    def refuse_another_run(self, query: str, run: str) -> None:
        """The query's releases here must be those of this run."""
        asked = f"SELECT run FROM {QUERIES} WHERE query = {self.placeholder}"
        found = self.connection.execute(asked, (query,)).fetchone()
        if found is not None and found[0] != run:
            raise another_run("the database", query)

    def is_known(self, query: str, schema: pa.Schema, run: str) -> bool:
        """Whether the query's table is there, with these columns; another shape is refused.

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
        rows = self.connection.execute(f"SELECT query, columns, run FROM {QUERIES}").fetchall()
        known = {name: json.loads(text) for name, text, _ in rows}
        if query not in known:
            if query.lower() in (name.lower() for name in known):
                raise InvalidParameter(
                    f"another query of this sink is named like {query!r}; rename it"
                )
            self._insert(QUERIES, (query, json.dumps(columns), run))
            return False
        if known[query] != columns or list(known[query]) != list(columns):
            raise StateError(
                f"the table {query!r} of the sink has the columns {_shown(known[query])} but this "
                f"release has {_shown(columns)}; rename the query or use another sink"
            )
        return True

    def _insert(self, book: str, values: tuple[Any, ...]) -> None:
        placeholders = ", ".join([self.placeholder] * len(values))
        self.connection.execute(f"INSERT INTO {book} VALUES ({placeholders})", values)


def identifier(name: str) -> str:
    """A name in quotes."""
    if "\0" in name or not name:
        raise InvalidParameter(f"a name in a database must be there, without NUL; got {name!r}")
    return '"' + name.replace('"', '""') + '"'


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())
