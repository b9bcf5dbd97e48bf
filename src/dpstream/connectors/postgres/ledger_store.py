"""A ledger in PostgreSQL, which several hosts share: the lines of a ledger file, as rows.

    postgresql://user@host:5432/database?schema=dpstream_ledger

The schema has three tables. `ledger_lines` has the lines that a file would have, by the offset at
which each begins; every line carries the tag of the one before it, so an altered or missing one is
found. `ledger_head` has one row: where the lines end, and the last tag. `ledger` has one row that
never changes, the ledger's id; who works with the ledger locks this table.

A section (`locked`) is one transaction, which takes that lock before its first look at the tables.
So sections come one after another, and each sees all that those before it have written: they are
serialisable. What a section appends is sent at its end, and written only if the head is where the
section found it: a writer that was paused, and whose session the server has ended, cannot write at
a stale place. If the connection is lost, before or after the commit, the next one waits for the
lock, so that the old transaction is over, and looks: the lines are there, or the head is where it
was and they are sent again, or others have written and the section is done anew (`Overtaken`). Who
does not get to the server waits as long as `patience` says, and then stops; nothing is drawn
without a commit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import psycopg

from dpstream.connectors.database import identifier
from dpstream.connectors.ledger_lines import LedgerEnd, Rows, ServerLedger
from dpstream.connectors.postgres.client import connect_function, one_line, raise_away
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.ledger.store import LedgerAddress
from dpstream.privacy.state.journal import NO_TAG, this_process

# Never a likely role: a schema with a role's own name comes first in its search path, and its new
# tables would go there.
_SCHEMA = "dpstream_ledger"
_LOCK = 1_685_091_436  # "dpsl": one of this number and a schema is held by who makes the tables
_PAUSED = "60s"  # a writer that is silent for so long, in a section, loses its place
_QUEUE = "10s"  # a wait for other writers that the operator hears of
_PASSING = ("40001", "40P01", "55P03", "25P03", "25P04", "57014")
"""States of SQL that mean: not now. A change beside the lock, a deadlock, a lock that was not had,
a session that was silent, or a transaction or statement that took, too long."""
_log = logging.getLogger("dpstream")


def open_store(address: LedgerAddress) -> PostgresLedger:
    """The ledger at an address; its tables are made if they are not there."""
    return PostgresLedger(address)


def exists(address: LedgerAddress) -> bool:
    """Are a ledger's tables there?"""
    options, schema = _options(address)
    options.retry_policy()
    connect = connect_function(options)
    options.finish()
    try:
        with raise_away(), connect() as connection:
            return _is_there(connection, schema)
    except ServerAway as problem:
        raise unreachable(options.where, problem) from None
    except psycopg.Error as problem:
        raise _refused(address, problem) from None


class PostgresLedger(ServerLedger):
    """The store of one ledger; see `LedgerStore`."""

    _head = "the row of ledger_head"

    def __init__(self, address: LedgerAddress) -> None:
        options, self._schema = _options(address)
        super().__init__(address, options.retry_policy())
        self._connect = connect_function(options)
        options.finish()
        self._connection: Any = None
        self._in_transaction = False
        try:
            self._connected(make=True)
        except ServerAway as problem:
            raise unreachable(options.where, problem) from None

    # Sections

    def _begin(self) -> LedgerEnd | None:
        """Wait for the lock; what the head says now, None if it is lost.

        The lock comes before the transaction's first look, so that this sees all that was written.
        """
        with self._explained():
            cursor = self._connected().execute(
                "BEGIN ISOLATION LEVEL REPEATABLE READ; "
                f"LOCK TABLE {self._schema}.ledger IN EXCLUSIVE MODE; "
                f'SELECT "end", tag, base FROM {self._schema}.ledger_head',
                prepare=False,
            )
            while cursor.nextset():
                pass
            row = cursor.fetchone()
        self._in_transaction = True
        return None if row is None else LedgerEnd(*row)

    def _resume(self) -> None:
        """Be in the section's transaction, or in one that sees the same ledger."""
        if not self._in_transaction and self._begin() != self._noted:
            raise self._overtaken()

    def _commit(self) -> None:
        """Write what is pending at the place that the section has found, or not at all."""
        assert self._noted is not None
        if not self._in_transaction:
            now = self._begin()
            if self._is_written():  # the commit was done, its answer was lost
                self._drop()
                return
            if now != self._noted:
                raise self._overtaken()
        starts, lines = zip(*self._pending, strict=True)
        with self._explained():
            written = self._finish(
                f'WITH head AS (UPDATE {self._schema}.ledger_head SET "end" = %s, tag = %s '
                'WHERE "end" = %s AND tag = %s RETURNING 1) '
                f"INSERT INTO {self._schema}.ledger_lines (start, line) SELECT new.* FROM head, "
                "unnest(%s::bigint[], %s::text[]) AS new",
                (self._offset, self._tag, *self._noted[:2], list(starts), list(lines)),
            )
            if written != len(starts):
                raise self._overtaken()

    def _finish(self, statement: str = "", given: Sequence[Any] = ()) -> int:
        """Commit, after one more statement in the same message; how many rows that has written."""
        cursor = psycopg.ClientCursor(self._connection)
        cursor.execute(f"{statement}; COMMIT", given)
        written: int = cursor.rowcount
        while cursor.nextset():
            pass
        self._in_transaction = False
        if cursor.statusmessage != "COMMIT":
            raise LedgerError(f"{self.place}: the server has not committed; run it again")
        return written

    def _is_written(self) -> bool:
        """Are the lines of this section in the ledger?"""
        start, line = self._pending[-1]
        asked = f"SELECT 1 FROM {self._schema}.ledger_lines WHERE start = %s AND line = %s"
        with self._explained():
            return self._connection.execute(asked, (start, line)).fetchone() is not None

    def _leave(self) -> None:
        """Roll back."""
        if self._in_transaction:
            self._in_transaction = False
            with suppress(ServerAway), self._explained():
                self._connection.execute("ROLLBACK")

    # Records

    def _put_end(self, added: tuple[int, str], new: LedgerEnd) -> None:
        with self._explained():
            run = self._connection.execute
            run(f"INSERT INTO {self._schema}.ledger_lines VALUES (%s, %s)", added)
            run(f"DELETE FROM {self._schema}.ledger_head")
            run(f"INSERT INTO {self._schema}.ledger_head VALUES (%s, %s, %s)", new)
            self._finish()

    def _put_all(self, rows: Rows, new: LedgerEnd) -> None:
        starts, texts = zip(*rows, strict=True)
        with self._explained():
            run = self._connection.execute
            run(
                f"INSERT INTO {self._schema}.ledger_lines (start, line) "
                "SELECT * FROM unnest(%s::bigint[], %s::text[])",
                (list(starts), list(texts)),
            )
            run(f'UPDATE {self._schema}.ledger_head SET "end" = %s, tag = %s, base = %s', new)
            self._finish()

    def _put_folded(self, header: str, base: int) -> None:
        with self._explained():
            run, lines = self._connection.execute, f"{self._schema}.ledger_lines"
            run(f"UPDATE {lines} SET line = %s WHERE start = 0", (header,))
            run(f"DELETE FROM {lines} WHERE start > 0 AND start < %s", (base,))
            run(f"UPDATE {self._schema}.ledger_head SET base = %s", (base,))
            self._finish()

    def close(self) -> None:
        """Leave the server."""
        self._closed = True
        if this_process.id == self._process:  # a forked child has its parent's connection
            self._drop()

    def __del__(self) -> None:
        """Nobody has it any more, and nobody has closed it."""
        if hasattr(self, "_in_transaction"):
            self.close()

    def _fetch(self, first: int, most: int | None = None) -> Rows:
        return self._rows("start >= %s ORDER BY start LIMIT %s", first, most)

    def _last_before(self, offset: int) -> Rows:
        return self._rows("start < %s ORDER BY start DESC LIMIT 1", offset)

    # The connection

    def _rows(self, which: str, *given: Any) -> Rows:
        """Lines of the ledger, as the section sees it."""

        def work() -> Rows:
            self._resume()
            asked = f"SELECT start, line FROM {self._schema}.ledger_lines WHERE {which}"
            with self._explained():
                rows: Rows = self._connection.execute(asked, given).fetchall()
                return rows

        return self._retry.insist(work)

    def _connected(self, *, make: bool = False) -> Any:
        """The connection, made anew if it was lost."""
        if self._connection is None or self._connection.closed:
            with self._explained():
                self._connection = connection = self._connect()
                waits, fsync = connection.execute(
                    "SELECT current_setting('synchronous_commit'), current_setting('fsync')"
                ).fetchone()
                waits = "remote_apply" if waits == "remote_apply" else "on"
                connection.execute(
                    f"SET synchronous_commit = {waits}; "
                    f"SET idle_in_transaction_session_timeout = '{_PAUSED}'; "
                    f"SET lock_timeout = '{_QUEUE}'; SET client_encoding = 'UTF8'"
                )
                if make and fsync != "on":
                    _warn_of_lost_charges(str(self.place), fsync)
                if make and not _is_there(connection, self._schema):
                    _make(connection, self._schema)
                self._recognise(connection)
        return self._connection

    def _recognise(self, connection: Any) -> None:
        """Note which ledger it is, or see that it is still that one."""
        found = connection.execute(
            "SELECT system_identifier::text, current_database(), id "
            f"FROM pg_control_system(), {self._schema}.ledger"
        ).fetchone()
        identity = "" if found is None else f"postgresql/{'/'.join(found)}/{self._schema}"
        if not identity or self._identity not in ("", identity):
            raise LedgerError(f"{self.place} is not the ledger that was there; restore it")
        self._identity = identity

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever fails in here leaves no connection in an unknown state."""
        try:
            with raise_away():
                yield
        except psycopg.Error as problem:
            self._drop()
            if problem.sqlstate in _PASSING:
                raise ServerAway(f"another writer is in the way ({one_line(problem)})") from None
            raise _refused(self.place, problem) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Close the connection; the server takes back what was not committed."""
        connection, self._connection, self._in_transaction = self._connection, None, False
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


@cache
def _warn_of_lost_charges(place: str, fsync: str) -> None:
    """Tell the operator once in a process, however often the ledger is opened."""
    _log.warning(
        "%s: the server runs with fsync = %s; charges may be lost when its machine dies, and "
        "their noise would be published",
        place,
        fsync,
    )


def _options(address: LedgerAddress) -> tuple[ServerOptions, str]:
    """The options of an address, of which the schema is taken; it names the primary of several."""
    options = ServerOptions(address.uri)
    if "target_session_attrs" not in options.names:
        options = ServerOptions(address.uri, {"target_session_attrs": "read-write"})
    schema = options.text("schema") or _SCHEMA
    if "%" in schema:
        raise InvalidParameter(f"the schema {schema!r} of a ledger must not have a '%' in its name")
    return options, identifier(schema)


def _is_there(connection: Any, schema: str) -> bool:
    asked = connection.execute("SELECT to_regclass(%s)", (f"{schema}.ledger",))
    return asked.fetchone()[0] is not None


def _make(connection: Any, schema: str) -> None:
    """Make the tables; two that start at once make them once."""
    one = "one boolean PRIMARY KEY DEFAULT true CHECK (one)"
    with connection.transaction():
        connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext(%s))", (schema,))
        if _is_there(connection, schema):
            return
        for statement in (
            f"CREATE SCHEMA IF NOT EXISTS {schema}",
            f"CREATE TABLE {schema}.ledger (id text NOT NULL, {one})",
            f'CREATE TABLE {schema}.ledger_head ("end" bigint, tag text, base bigint, {one})',
            f"CREATE TABLE {schema}.ledger_lines (start bigint PRIMARY KEY, line text NOT NULL)",
            f"INSERT INTO {schema}.ledger VALUES (gen_random_uuid()::text)",
            f"INSERT INTO {schema}.ledger_head VALUES (0, '{NO_TAG}', 0)",
        ):
            connection.execute(statement)


def _refused(place: LedgerAddress, problem: psycopg.Error) -> LedgerError:
    """What to say when the server answers, and does not do it."""
    words = problem.diag.message_primary or one_line(problem)
    return LedgerError(
        f"{place}: PostgreSQL refuses: {words}; the user of the address must be able to log in, "
        "and own the ledger's schema, or be allowed to create it"
    )
