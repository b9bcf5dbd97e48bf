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

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import psycopg

from dpstream.connectors.database import identifier
from dpstream.connectors.postgres.client import connect_function, one_line, raise_away
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import InvalidParameter, LedgerError, ServerUnreachable
from dpstream.privacy.ledger.store import LedgerAddress, Overtaken
from dpstream.privacy.state.journal import (
    COMPACTED,
    FORMAT,
    LARGE,
    NO_TAG,
    Fold,
    JournalEnd,
    Record,
    check_header,
    this_process,
    to_lines,
    verifies,
)

_KIND = "ledger"
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

Rows = list[tuple[int, str]]


class _End(NamedTuple):
    """Where the ledger ends, by its head; what is folded ends at `base`."""

    offset: int
    tag: str
    base: int


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


class PostgresLedger:
    """The store of one ledger; see `LedgerStore`."""

    def __init__(self, address: LedgerAddress) -> None:
        self.place = address
        options, self._schema = _options(address)
        self._retry, self._connect = options.retry_policy(), connect_function(options)
        options.finish()
        self._thread_lock, self._depth = threading.RLock(), 0
        self._process, self._closed = this_process.id, False
        self._connection: Any = None
        self._in_transaction = False
        self._identity = ""
        self._offset, self._tag = 0, NO_TAG
        self._noted: _End | None = None  # what the head said when the section began
        self._pending: Rows = []  # appended in this section
        try:
            self._connected(make=True)
        except ServerAway as problem:
            raise unreachable(options.where, problem) from None

    # Sections

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger against all other writers; what is appended is durable at the end."""
        with self._thread_lock:
            if not self._depth:
                self._acquire()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._release()

    def _acquire(self) -> None:
        if this_process.id != self._process:
            raise LedgerError(f"{self.place} was opened before a fork; open it in each process")
        if self._closed:
            raise LedgerError(f"{self.place} was closed; open it again")
        self._noted = self._retry.insist(self._begin)
        if self._noted is not None and self._offset < self._noted.base:
            self.rewind()  # what was read is folded since

    def _release(self) -> None:
        """Write what is pending, durably; if that cannot be done nothing counts as read."""
        try:
            if self._pending:
                self._retry.insist(self._commit)
                self._pending = []
            elif self._in_transaction:
                self._in_transaction = False
                with suppress(ServerAway), self._explained():
                    self._connection.execute("ROLLBACK")
        except BaseException:
            self.rewind()
            self._drop()
            raise

    def _begin(self) -> _End | None:
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
        return None if row is None else _End(*row)

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

    def _overtaken(self) -> Overtaken:
        self._drop()
        return Overtaken(
            f"others have written to {self.place} while this process was not connected to it; "
            "nothing was charged by it: run it again"
        )

    # Records

    def read_new(self) -> list[Record]:
        """Records appended since the last call, by anyone; checked against the head."""
        noted = self._noted
        if noted is None:
            raise LedgerError(
                f"{self.place}: the row of ledger_head, which says how far the ledger had come, is "
                f"missing: records may be lost from its end; restore it, or {self._repair}"
            )
        if self._pending or (self._offset, self._tag) == noted[:2]:
            return []
        if noted.offset <= self._offset:
            raise LedgerError(f"{self.place} went back while it was in use; restore it")
        records, ends = self._parse(self._fetch(self._offset), self._offset, self._tag)
        if ends[-1] != noted[:2]:
            raise LedgerError(
                f"{self.place} is not what its head says: its lines end at {ends[-1][0]}, and it "
                f"held {noted.offset}; records are lost; restore it, or take it as it is, without "
                f"them: {self._repair}"
            )
        self._offset, self._tag = ends[-1]
        return records

    def read_all(self) -> list[Record]:
        """Every record from the first on, with those of this section."""
        return self._parse([*self._fetch(0), *self._pending], 0, NO_TAG)[0]

    def read_lines(self) -> Rows:
        """Every line as it stands, with the offset at which it begins."""
        return self._fetch(0)

    def append(self, records: Iterable[Record]) -> None:
        """Add records to those that the section writes at its end."""
        header = [] if self._offset else [{"dpstream": _KIND, "format": FORMAT}]
        for record in [*header, *records]:
            line, tag = to_lines(self._tag, [record])
            self._pending.append((self._offset, line[:-1].decode()))
            self._offset, self._tag = self._offset + len(line), tag

    def rewind(self) -> None:
        """Forget what was read, and what this section has appended."""
        self._offset, self._tag, self._pending = 0, NO_TAG, []

    def accept(self, record: Callable[[JournalEnd | None], Record]) -> None:
        """Take the lines as they are, whatever the head says; `record` notes that."""
        self.rewind()
        rows, noted = self._fetch(0), self._noted
        if not rows:
            raise LedgerError(f"{self.place} is empty: there is nothing to go on with; restore it")
        offset, tag = self._parse(rows, 0, NO_TAG)[1][-1]
        had = None if noted is None else JournalEnd(noted.offset, noted.tag)
        line, tag = to_lines(tag, [record(had)])
        new = _End(offset + len(line), tag, _base(rows[0][1])[0])
        with self._explained():
            run = self._connection.execute
            run(
                f"INSERT INTO {self._schema}.ledger_lines VALUES (%s, %s)",
                (offset, line[:-1].decode()),
            )
            run(f"DELETE FROM {self._schema}.ledger_head")
            run(f"INSERT INTO {self._schema}.ledger_head VALUES (%s, %s, %s)", new)
            self._finish()
        self._noted = new

    def fill(self, lines: Rows, record: Record) -> None:
        """Take the lines of another ledger as they are, and `record` behind them.

        Offsets and tags stay, so whoever has noted an end of the other one finds it here. A ledger
        that holds anything is refused.
        """
        if self._noted is None or self._noted.offset or self._fetch(0):
            raise LedgerError(f"{self.place} is a ledger with records of its own; name another")
        offset, tag = self._parse(lines, 0, NO_TAG)[1][-1]
        line, tag = to_lines(tag, [record])
        new = _End(offset + len(line), tag, _base(lines[0][1])[0])
        starts, texts = zip(*lines, (offset, line[:-1].decode()), strict=True)
        with self._explained():
            run = self._connection.execute
            run(
                f"INSERT INTO {self._schema}.ledger_lines (start, line) "
                "SELECT * FROM unnest(%s::bigint[], %s::text[])",
                (list(starts), list(texts)),
            )
            run(f'UPDATE {self._schema}.ledger_head SET "end" = %s, tag = %s, base = %s', new)
            self._finish()
        self._noted = new

    def compact(self, fold: Fold) -> None:
        """Put what the oldest lines fold to into the first one; the others stay as they are."""
        try:
            records, ends = self._parse(self._fetch(0), 0, NO_TAG)
            before = len(records) - (len(ends) - 2)
            folded, count = fold(records, before)
            if count <= before:
                return
            base = ends[1 + count - before]
            header = {"dpstream": _KIND, "format": COMPACTED, "base": base, "folded": folded}
            line = to_lines(NO_TAG, [header])[0][:-1].decode()
            with self._explained():
                run, lines = self._connection.execute, f"{self._schema}.ledger_lines"
                run(f"UPDATE {lines} SET line = %s WHERE start = 0", (line,))
                run(f"DELETE FROM {lines} WHERE start > 0 AND start < %s", (base[0],))
                run(f"UPDATE {self._schema}.ledger_head SET base = %s", (base[0],))
                self._finish()
            assert self._noted is not None
            self._noted = self._noted._replace(base=base[0])
        except (ServerAway, ServerUnreachable) as problem:
            _log.warning("%s is not compacted now: %s", self.place, problem)

    @property
    def is_long(self) -> bool:
        """May a compaction be worth its while?"""
        return self._noted is not None and self._offset - self._noted.base >= LARGE

    def head(self) -> tuple[int, str]:
        """How far the ledger was read or written, and the tag of its last record."""
        return self._offset, self._tag

    def has(self, head: tuple[int, str]) -> bool:
        """Does the ledger begin with what it held at `head`? Not if it was rolled back."""
        offset, tag = head
        base = 0 if self._noted is None else self._noted.base
        if offset < base or offset == 0:
            return True  # of what was folded since, this cannot be seen
        if offset == base:
            return _base(self._rows("start = %s", 0)[0][1]) == [offset, tag]
        last = self._rows("start < %s ORDER BY start DESC LIMIT 1", offset)
        return any(begin + len(line) + 1 == offset and line[:16] == tag for begin, line in last)

    def identity(self) -> str:
        """Which ledger this is, where: a copy in another database or server is another one."""
        return self._identity

    def replaces(self, identity: str) -> bool:
        """Is this the ledger with that identity? Compactions leave it as it is."""
        return identity == self._identity

    def close(self) -> None:
        """Leave the server."""
        self._closed = True
        if this_process.id == self._process:  # a forked child has its parent's connection
            self._drop()

    def __del__(self) -> None:
        """Nobody has it any more, and nobody has closed it."""
        if hasattr(self, "_in_transaction"):
            self.close()

    def _parse(
        self, rows: Rows, offset: int, tag: str
    ) -> tuple[list[Record], list[tuple[int, str]]]:
        """Records of these rows, and where each of them ends (the offset first)."""
        ends, records = [(offset, tag)], list[Record]()
        for start, text in rows:
            (offset, tag), line = ends[-1], text.encode()
            if start != offset or not verifies(tag, line):
                raise LedgerError(
                    f"{self.place} is damaged after byte {offset}: a record is missing or does not "
                    "match its checksum; restore it from a backup"
                )
            record: Record = json.loads(line[17:])
            end = start + len(line) + 1, text[:16]
            if offset:
                records.append(record)
            else:
                check_header(record, self.place, _KIND, LedgerError)
                records += record.get("folded", [])
                end = tuple(record.get("base", end))
            ends.append(end)
        return records, ends

    def _fetch(self, first: int) -> Rows:
        return self._rows("start >= %s ORDER BY start", first)

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

    @property
    def _repair(self) -> str:
        return f"dpstream ledger repair '{self.place}' --because TEXT"


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


def _base(header: str) -> list[Any]:
    """Where what is folded has ended, and its last tag, by the first line."""
    base: list[Any] = json.loads(header[17:]).get("base", [0, NO_TAG])
    return base


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
