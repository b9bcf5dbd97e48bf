"""Releases in PostgreSQL: one table per query in a schema, one transaction per release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.errors import DuplicateSchema, UniqueViolation

from dpstream.connectors.database import DatabaseSink, identifier
from dpstream.connectors.encode import csv, hexadecimal
from dpstream.connectors.postgres.client import connect_function, raise_away
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import InvalidInput

_LONGEST_NAME = 63  # PostgreSQL cuts longer names without a word
_LOCK = 1_685_091_444  # "dpst": one of this number and a schema is held by who writes there


class PostgresSink(DatabaseSink):
    """The sink of postgres://user@host:5432/database?schema=...

    A commit that was not answered is looked up in the index before anything is sent again.
    """

    placeholder, errors = "%s", psycopg.Error
    advice = "grant what is missing to the user of the address, or name another schema"

    def __init__(self, options: ServerOptions) -> None:
        self._schema = options.text("schema") or "public"
        self._retry, self._connect = options.retry_policy(), connect_function(options)
        options.finish()
        place = f"the schema {self._schema} of {options.where}"
        try:
            super().__init__(place, lock=place)
        except ServerAway as problem:
            raise unreachable(options.where, problem) from problem

    def connect(self) -> Any:
        """Connect, and make the schema; two that start at once may both want to."""
        connection = self._connect()
        schema = _name(self._schema)
        if connection.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone()[0] is None:
            with suppress(UniqueViolation, DuplicateSchema):  # another was quicker: it is there
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        connection.execute(f"SET search_path = {schema}, pg_temp")
        connection.execute("SET synchronous_commit = on")  # a commit is there to stay
        return connection

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the index; wait for a server that is away."""
        write = super().write
        self._insist(lambda: write(name, window, trigger, table))

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Replace the window's rows; wait for a server that is away."""
        upsert = super().upsert
        self._insist(lambda: upsert(name, window, trigger, table, row_keys))

    def check(self, name: str, schema: pa.Schema) -> None:
        """Write a release without rows, and take that back."""
        check = super().check
        self._insist(lambda: check(name, schema))

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        fence = super().fence
        self._insist(lambda: fence(name, run))

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """All rows in one COPY."""
        if create:
            columns = ", ".join(f"{_name(c.name)} {_type(c.type)}" for c in table.schema)
            _name(name[1:-1].replace('""', '"'))
            self.connection.execute(f"CREATE TABLE {name} ({columns})")
            first, second = (identifier(c) for c in table.column_names[:2])
            self.connection.execute(f"CREATE INDEX ON {name} ({first}, {second})")
        texts = pa.table([_text(c) for c in table.columns], names=table.column_names)
        with self.connection.cursor().copy(
            f"COPY {name} FROM STDIN (FORMAT csv, HEADER true, NULL '', ENCODING 'UTF8')"
        ) as copy:
            copy.write(csv(texts))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One writer at a time in a schema, whatever process it is in."""
        with super().transaction():
            self.connection.execute(
                f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext(%s))", (self._schema,)
            )
            yield

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """A server that is away is another thing than one that refuses."""
        with super().explain_errors(), raise_away():
            yield

    def _insist(self, work: Callable[[], None]) -> None:
        """Do it; while the server is away, wait and do it again."""

        def connected_work() -> None:
            if self.connection.closed or self.connection.broken:
                with self.explain_errors():
                    self.connection = self.connect()
            try:
                work()
            except ServerAway:
                with suppress(psycopg.Error):
                    self.connection.close()
                raise

        self._retry.insist(connected_work)


def _name(name: str) -> str:
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidInput(
            f"a name in PostgreSQL has at most {_LONGEST_NAME} bytes, and {name!r} has "
            f"{len(name.encode())}; rename it"
        )
    return identifier(name)


def _type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return "numeric(20)"
    if pa.types.is_integer(kind):
        return "bigint"
    if pa.types.is_floating(kind):
        return "double precision"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_list(kind):
        return "jsonb"
    return "bytea" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "text"


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What COPY takes: bytes in hex, and no NUL in text, which PostgreSQL cannot hold."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.replace_substring(column, "\0", "\ufffd")
    return hexadecimal(column, prefix="\\x")


from_options = PostgresSink
