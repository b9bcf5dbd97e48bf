"""Releases in PostgreSQL: one table per query in a schema, one transaction per release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.database import DatabaseSink, identifier
from dpstream.connectors.encode import csv
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.postgres import client
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.errors import InvalidInput, ServerUnreachable

_LONGEST_NAME = 63  # PostgreSQL cuts longer names without a word
_LOCK = 1_685_091_444  # "dpst": one of this number and a schema is held by who writes there


def from_options(options: ServerOptions) -> PostgresSink:
    """The sink that a URI names."""
    schema = options.text("schema", "public")
    patience = options.number("patience", SECONDS)
    connect = client.connector(options)
    options.finish()
    return PostgresSink(options.where, connect, schema=schema or "public", patience=patience)


class PostgresSink(DatabaseSink):
    """A commit that was not answered is looked up in the book before anything is sent again."""

    placeholder = "%s"

    def __init__(
        self, where: str, connect: Callable[[], Any], *, schema: str, patience: float
    ) -> None:
        import psycopg

        self._where, self._connect, self._schema = where, connect, schema
        self._retry = RetryPolicy(where, seconds=patience)
        self.errors = psycopg.Error
        place = f"the schema {schema} of {where}"
        try:
            super().__init__(place, one=place)
        except _Away as problem:
            raise ServerUnreachable(
                f"{where} does not answer: {problem}; start it, or mend the address"
            ) from problem

    def connect(self) -> Any:
        """Connect, and make the schema; two that start at once may both want to."""
        from psycopg.errors import DuplicateSchema, UniqueViolation

        connection = self._connect()
        schema = _name(self._schema)
        if connection.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone()[0] is None:
            with suppress(UniqueViolation, DuplicateSchema):  # another was quicker: it is there
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        connection.execute(f"SET search_path = {schema}, pg_temp")
        connection.execute("SET synchronous_commit = on")  # a commit is there to stay
        return connection

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Insert the rows, unless the release is in the book; waits for a server that is away."""
        write = super().write
        self._insisting(lambda: write(name, window, trigger, table))

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        fence = super().fence
        self._insisting(lambda: fence(name, run))

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

    def advice(self) -> str:
        """It is what the server says."""
        return "grant what is missing to the user of the address, or name another schema"

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One writer at a time in a schema, whatever process it is in."""
        with super().transaction():
            self.connection.execute(
                f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext(%s))", (self._schema,)
            )
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A server that is away is another thing than one that refuses."""
        with super().explained():
            try:
                yield
            except self._all_errors() as problem:
                if client.is_away(problem):
                    raise _Away(client.said(problem)) from problem
                raise

    def _insisting(self, work: Callable[[], None]) -> None:
        """Do it; while the server is away, wait and do it again."""

        def once() -> None:
            if self.connection.closed or self.connection.broken:
                with self.explained():
                    self.connection = self.connect()
            try:
                work()
            except _Away:
                with suppress(*self._all_errors()):
                    self.connection.close()
                raise

        while True:
            try:
                once()
                break
            except _Away as problem:
                self._retry.failed(str(problem))
                self._retry.wait()
        self._retry.well()


class _Away(Exception):
    """The server does not answer."""


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
    return "bytea" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "text"


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What COPY takes: bytes in hex, and no NUL in text, which PostgreSQL cannot hold."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        shown = (None if b is None else f"\\x{b.hex()}" for b in column.to_pylist())
        return pa.chunked_array([pa.array(shown, pa.string())])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.replace_substring(column, "\0", "\ufffd")
    return column
