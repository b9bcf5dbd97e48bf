"""The changes of a table of PostgreSQL, by logical replication: a slot and the plugin `pgoutput`.

A position is [server, slot and table; where reading began; [a place in the log, how many changes of
the transaction there were read]; how many rows]. The slot keeps the log from the place on that no
recovery goes back beyond: it is told so when the engine says it, not before. So whatever is killed,
a replay has the same changes, in the order of commits.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import conninfo, errors, pq

from dpstream.connectors.changes import STOP, VERSIONS, UnwantedChange, adds_row, refusal, rule_from
from dpstream.connectors.database import identifier
from dpstream.connectors.postgres.client import (
    Column,
    columns_of,
    connection_settings,
    connector,
    one_line,
    raise_away,
    usable_rows,
)
from dpstream.connectors.postgres.pgoutput import (
    UNSENT,
    Begin,
    Change,
    Commit,
    Relation,
    Values,
    parse,
)
from dpstream.connectors.server_base import ServerAway, ServerLog, ServerOptions, unreachable
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from dpstream.records import Batch, Columns, Position, Rejected, select_columns

_ROWS = 1 << 16  # of one chunk
_BYTES = 32 << 20
_WAIT = 0.1  # seconds for a first change
_POLL, _FREE = 0.005, 5.0  # seconds: between looks for a free slot, and of waiting for it
_LOOK_EVERY = 30.0  # seconds between looks whether the publication has the table
_QUIET = 16 << 20  # bytes of the log without a change of the table, after which the slot moves on
_SESSION = "-c TimeZone=UTC -c DateStyle=ISO,YMD -c extra_float_digits=1 -c bytea_output=hex"

_TABLE = """
SELECT c.oid::int8, quote_ident(n.nspname) || '.' || quote_ident(c.relname), c.relkind,
       (SELECT system_identifier FROM pg_control_system()), pg_is_in_recovery()
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
_SLOT = """
SELECT plugin, database = current_database(), two_phase, wal_status,
       coalesce(confirmed_flush_lsn, '0/0') - '0/0'::pg_lsn, pg_current_wal_flush_lsn() - '0/0'
FROM pg_replication_slots WHERE slot_name = %s
"""
_PUBLISHED = """
SELECT p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       EXISTS (SELECT 1 FROM pg_publication_rel r
               WHERE r.prpubid = p.oid AND r.prrelid = %(table)s
                 AND coalesce(to_jsonb(r) ->> 'prqual', to_jsonb(r) ->> 'prattrs') IS NOT NULL)
FROM pg_publication p WHERE p.pubname = %(publication)s
  AND EXISTS (SELECT 1 FROM pg_publication_tables t WHERE t.pubname = p.pubname
              AND to_regclass(quote_ident(t.schemaname) || '.' || quote_ident(t.tablename)) IN (
                  SELECT relid FROM pg_partition_tree(%(table)s) UNION SELECT %(table)s::regclass))
"""
_TYPES = """
SELECT attname, atttypid::int8, atttypmod, attgenerated <> '' FROM pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""

Place = tuple[int, int]
"""A place in the log, and how many changes of the transaction that follows were read."""


class ChangePosition(NamedTuple):
    """A position in a table's changes."""

    source: str
    begin: int
    place: Place
    rows: int


class ReplicationSource(ServerLog[ChangePosition]):
    """The source of postgres://user@host:5432/database?table=clicks&slot=clicks&...

    The slot and the publication (of the slot's name, or `publication`) must be there. With `until`,
    a place in the log such as 0/16B3748, it is bounded and ends with what was committed before.
    """

    position_kind = "a table's changes"

    def __init__(self, options: ServerOptions) -> None:
        self.where, self._rule = options.where, rule_from(options)
        table, slot = options.text("table"), str(options.text("slot"))
        self._slot, self._publication = slot, options.text("publication", slot) or slot
        until = options.text("until")
        retry, self._settings = options.retry_policy(), connection_settings(options)
        options.finish()
        if not table:
            raise InvalidParameter(f"{self.where} needs ?table=NAME&slot=NAME")
        end = None if until is None else _parse_lsn(until, self.where)
        self._connect = connector(self._settings)
        self._connection: Any = None
        self._stream: _Stream | None = None
        self._confirmed = 0
        self._next_look = 0.0
        self._last: tuple[Place, list[str], Batch, ChangePosition] | None = None
        self._checked: tuple[Relation | None, Sequence[str]] = (None, ())
        try:
            with self._use_connection() as connection:
                self._find_table(connection, table)
                self._look_after(connection)
                self._confirmed_by_slot(connection, None)
                if end is not None and end > self._flushed:
                    raise InvalidInput(
                        f"the log of {self.where} ends at {_lsn(self._flushed)}, before until="
                        f"{until}; wait, or name an earlier end"
                    )
        except ServerAway as problem:
            raise unreachable(self.where, problem) from problem
        except InvalidInput:
            self.close()
            raise
        said = "" if end is None else _lsn(end)
        name = f"{self._name_of_table} by {slot}"
        super().__init__(name, end=end, retry=retry, end_in_words=said)

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types of the table's columns."""
        return {name: column.arrow_type for name, column in self._columns.items()}

    def close(self) -> None:
        """Close the connections."""
        connection, self._connection = self._connection, None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if connection is not None:
            connection.close()

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Let the slot go on to where no recovery goes back beyond."""
        for position in positions.values():
            at = self._parse(position)
            if at is not None and at.source == self._source:
                self._confirmed = max(self._confirmed, at.place[0])
        if self._stream is not None:
            try:
                self._stream.confirm(self._confirmed)
            except psycopg.Error:  # the server is away: the next stream says it
                self.close()

    def parse_position(self, position: Position) -> ChangePosition:
        """The four items of a position."""
        source, begin, (lsn, changes), rows = position
        if min(int(lsn) - int(begin), int(changes), int(rows)) < 0:
            raise ValueError(position)
        return ChangePosition(str(source), int(begin), (int(lsn), int(changes)), int(rows))

    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """No rows, of the columns that are asked for."""
        names = select_columns(self._place_of_table, list(self._columns), columns)
        empty = pa.table({name: pa.array([], self._columns[name].arrow_type) for name in names})
        return Batch(table=empty, position=position, done=done)

    def read_next(
        self, at: ChangePosition | None, goal: ChangePosition | None, columns: Columns
    ) -> Batch:
        """The changes that were committed since, as rows."""
        try:
            with self._use_connection() as connection:
                return self._fetch(connection, at, goal, columns)
        except (ServerAway, InvalidInput):
            self.close()
            raise

    @contextmanager
    def _use_connection(self) -> Iterator[Any]:
        """A connection; `ServerAway` if the server is, InvalidInput for what it refuses."""
        try:
            with raise_away():
                if self._connection is None:
                    self._connection = self._connect()
                yield self._connection
        except errors.ObjectInUse as problem:  # by a process that was killed, or by another one
            raise ServerAway(one_line(problem)) from problem
        except psycopg.Error as problem:
            raise InvalidInput(f"{self.where} refuses: {one_line(problem)}") from problem

    def _fetch(
        self,
        connection: Any,
        at: ChangePosition | None,
        goal: ChangePosition | None,
        columns: Columns,
    ) -> Batch:
        known = at or goal
        if known is not None and known.source != self._source:
            raise RowsLost(
                f"{self._place_of_table} is another table, or on another server, than the one that "
                "was read before; restore that, or start anew with another state directory"
            )
        if time.monotonic() >= self._next_look:
            self._look_after(connection)
        names = select_columns(self._place_of_table, list(self._columns), columns)
        again = self._again(at, names) if goal is None else None
        if again is not None:
            return again
        if self._stream is None or at is None or self._stream.place != at.place:
            at = self._open_stream(connection, at, goal)
        stream = self._stream
        assert stream is not None
        stop = (self._end, 0) if goal is None and self._end is not None else None
        stop = stop if goal is None else goal.place
        rows, size, places = list[Values](), 0, list[int]()
        if stop is not None and at.place > stop:
            raise InvalidInput(
                f"{self._place_of_table} cannot be read from {_lsn(at.place[0])} back to "
                f"{_lsn(stop[0])}"
            )
        while len(rows) < _ROWS and size < _BYTES:
            change = stream.next_change(stop, wait=not rows)
            if change is None:
                break
            try:
                if not adds_row(self._rule, change.operation):
                    continue
            except UnwantedChange as problem:
                where = f"the transaction after {_lsn(stream.place[0])} in {self._place_of_table}"
                raise refusal(where, problem.operation) from None
            rows.append(self._row(connection, stream.relation, change, names))
            size += sum(len(value) for value in rows[-1] if isinstance(value, str))
            places.append(stream.place[0])
        after = ChangePosition(at.source, at.begin, stream.place, at.rows + len(rows))
        ended = stop is not None and stream.place == stop
        if goal is not None and ended and after != goal:
            raise RowsLost(
                f"a step has read {goal.rows} rows of {self._place_of_table} up to "
                f"{_lsn(goal.place[0])}, and they are {after.rows} now; go on with the option "
                "`changes` as it was, or start anew with another state directory"
            )
        table, rejected = self._rows(names, rows, places)
        batch = Batch(
            table=table,
            position=[after.source, after.begin, list(after.place), after.rows],
            done=ended if stop is not None else change is None,
            rejected=rejected,
            where=f"{self._place_of_table} after {_lsn(at.place[0])}",
        )
        if rows and stop is None:
            self._last = (at.place, names, batch, after._replace(rows=len(rows)))
        return batch

    def _again(self, at: ChangePosition | None, names: list[str]) -> Batch | None:
        """The last chunk, for another query that is where it began: the server sends it once."""
        if self._last is None or at is None or self._last[:2] != (at.place, names):
            return None
        _, _, batch, after = self._last
        return replace(batch, position=[*at[:2], list(after.place), at.rows + after.rows])

    def _row(
        self, connection: Any, relation: Relation | None, change: Change, names: Sequence[str]
    ) -> Values:
        """The values of the columns that are asked for."""
        if relation is None:
            raise InvalidInput(f"{self.where} sent a change of a table that it did not describe")
        if relation is not self._checked[0] or self._checked[1] != names:
            self._check(connection, relation, names)
        row = []
        for at in self._places:
            value = None if at is None else change.row[at]
            if value is UNSENT and at is not None and change.before:
                value = change.before[at]
            row.append(value)
        return tuple(row)

    def _check(self, connection: Any, relation: Relation, names: Sequence[str]) -> None:
        """Refuse columns that are not of the type, or not there any more, that they were."""
        sent = {name: (at, (kind, size)) for at, (name, kind, size) in enumerate(relation.columns)}
        there = {name: kind for name, *kind, _ in connection.execute(_TYPES, (self._table,))}
        self._places: list[int | None] = []
        for name in names:
            at, kind = sent.get(name, (None, self._types[name]))
            self._places.append(at)
            if kind != self._types[name]:
                was, now = (
                    connection.execute("SELECT format_type(%s, %s)", each).fetchone()[0]
                    for each in (kind, self._types[name])
                )
                raise InvalidInput(
                    f"{self._place_of_table} has rows whose column {name!r} is {was}, while it is "
                    f"{now} in others; a run has one type for a column: start anew with another "
                    "state directory, and a slot that begins after the change"
                )
            if name not in there:
                raise InvalidInput(
                    f"{self._place_of_table} has no column {name!r} any more; end the queries that "
                    "use it, or add it again"
                )
        self._checked = (relation, names)

    def _rows(
        self, names: Sequence[str], rows: list[Values], places: list[int]
    ) -> tuple[pa.Table, list[Rejected]]:
        """The rows as Arrow, and those that have a value that was not sent or Arrow lacks."""

        def where(row: int) -> str:
            return f"{self._place_of_table}, the transaction after {_lsn(places[row])}"

        rejected = []
        for row, values in enumerate(rows):
            if UNSENT in values:
                name = names[values.index(UNSENT)]
                reason = f"the value of {name!r}, which has not changed, was not sent"
                todo = f"ALTER TABLE {self._name_of_table} REPLICA IDENTITY FULL"
                rejected.append(Rejected(where=where(row), reason=f"{reason}; {todo}", row=""))
        kept = [row for row, values in enumerate(rows) if UNSENT not in values]
        columns = [self._columns[name] for name in names]
        if not columns:
            return pa.table({}), rejected
        texts = [
            pa.array([_copied(column, rows[row][at]) for row in kept], pa.string())
            for at, column in enumerate(columns)
        ]
        found = usable_rows(columns, texts, lambda row: where(kept[row]))
        return found.table, [*rejected, *found.rejected]

    def _open_stream(
        self, connection: Any, at: ChangePosition | None, goal: ChangePosition | None
    ) -> ChangePosition:
        """Let the server send from a position on; where that is, if there was none."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._wait_until_free(connection)
        confirmed = self._confirmed_by_slot(connection, at or goal)
        if at is None:
            begin = confirmed if goal is None else goal.begin
            at = ChangePosition(self._source, begin, (begin, 0), 0)
        if at.place[0] < confirmed or at.place[0] > self._flushed:
            why = (
                f"the slot {self._slot!r} goes on at {_lsn(confirmed)} only"
                if at.place[0] < confirmed
                else f"the server's log ends at {_lsn(self._flushed)}"
            )
            raise RowsLost(
                f"{self._place_of_table} has to be read from {_lsn(at.place[0])} on, and {why}: "
                "changes are gone (another reader has moved the slot, it was made again, or the "
                "server was restored); start anew with another state directory"
            )
        self._checked = (None, ())
        self._stream = _Stream(self._settings, self._slot, self._publication, self._table, at.place)
        self._stream.confirm(self._confirmed)
        return at

    def _wait_until_free(self, connection: Any) -> None:
        """Wait until the server has noticed that a stream of ours has ended."""
        asked = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
        deadline = time.monotonic() + _FREE
        while connection.execute(asked, (self._slot,)).fetchone() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _find_table(self, connection: Any, table: str) -> None:
        """The table and its columns, as they are now."""
        about = connection.execute(_TABLE, (table,)).fetchone()
        if about is None:
            raise InvalidInput(f"there is no table {table!r} at {self.where}; create it first")
        oid, name, kind, server, standby = about
        self._place_of_table = f"the table {table} of {self.where}"
        if kind not in ("r", "p"):
            raise InvalidInput(f"{self._place_of_table} must be a table, not a view")
        if standby:
            raise InvalidInput(f"{self.where} is a standby; read the primary")
        kinds = connection.execute(_TYPES, (oid,)).fetchall()
        self._types = {name: (oid, size) for name, oid, size, made in kinds if not made}
        self._columns = {n: c for n, c in columns_of(connection, oid).items() if n in self._types}
        self._table, self._name_of_table, self._partitioned = oid, name, kind == "p"
        self._source = f"{server}/{self._slot}/{oid}"

    def _look_after(self, connection: Any) -> None:
        """Refuse a publication that does not send every change that the rule asks about."""
        self._next_look = time.monotonic() + _LOOK_EVERY
        given = {"table": self._table, "publication": self._publication}
        about = connection.execute(_PUBLISHED, given).fetchone()
        made = f"CREATE PUBLICATION {identifier(self._publication)} FOR TABLE {self._name_of_table}"
        if about is None:
            raise InvalidInput(
                f"{self.where}: the publication {self._publication!r} does not have the table "
                f"{self._name_of_table}; run {made}"
            )
        inserts, updates, deletes, truncates, by_root, filtered = about
        wanted = {
            STOP: inserts and updates and deletes and truncates,
            VERSIONS: inserts and updates,
        }
        if not wanted.get(self._rule, inserts):
            raise InvalidInput(
                f"{self.where}: the publication {self._publication!r} leaves out changes that "
                f"changes={self._rule} has to see; publish them, or say changes=inserts"
            )
        if filtered:
            raise InvalidInput(
                f"{self.where}: the publication {self._publication!r} has a row filter or a list "
                "of columns, so that updates come as inserts and values as NULL; publish the table "
                "whole, and choose in the query"
            )
        if self._partitioned and not by_root:
            raise InvalidInput(
                f"{self.where}: {self._name_of_table} has partitions; publish it as one table: "
                f"ALTER PUBLICATION {identifier(self._publication)} SET "
                "(publish_via_partition_root = true)"
            )

    def _confirmed_by_slot(self, connection: Any, known: ChangePosition | None) -> int:
        """From where on the slot keeps the log; refuse one that cannot be used."""
        about = connection.execute(_SLOT, (self._slot,)).fetchone()
        if about is None and known is not None:
            raise RowsLost(
                f"{self.where}: the slot {self._slot!r} is gone, and with it the changes since "
                f"{_lsn(known.place[0])}; start anew with another state directory"
            )
        if about is None:
            raise InvalidInput(
                f"{self.where} has no replication slot {self._slot!r}; with wal_level = logical, "
                f"run SELECT pg_create_logical_replication_slot('{self._slot}', 'pgoutput'). (If "
                "there was one that a run has read, it has to start anew)"
            )
        plugin, here, two_phase, status, confirmed, flushed = about
        if plugin != "pgoutput" or not here or two_phase:
            raise InvalidInput(
                f"{self.where}: the slot {self._slot!r} must be one of this database, of the "
                "plugin pgoutput, made without two_phase"
            )
        if status == "lost":
            raise RowsLost(
                f"{self.where}: the slot {self._slot!r} has lost changes that were not read "
                "(max_slot_wal_keep_size); start anew with another slot and state directory"
            )
        self._flushed = int(flushed)
        return int(confirmed)


class _Stream:
    """What the server sends of a table's changes, from a place on."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        slot: str,
        publication: str,
        table: int,
        place: Place,
    ) -> None:
        self.place = (place[0], 0)
        self.relation: Relation | None = None
        self._table, self._skip = table, place[1]
        self._read: deque[Begin | Commit | Relation | Change] = deque()
        self._inside, self._seen, self._confirmed, self._asked = False, place[0], 0, False
        given = dict(settings) | {"replication": "database", "options": _SESSION}
        self._channel = pq.PGconn.connect(
            conninfo.make_conninfo(**given, application_name="dpstream").encode()
        )
        if self._channel.status != pq.ConnStatus.OK:
            words = self._channel.error_message.decode(errors="replace")
            self._channel.finish()
            raise psycopg.OperationalError(words)
        quoted = publication.replace('"', '""').replace("'", "''")
        asked = self._channel.exec_(
            f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {_lsn(place[0])} "
            f"(proto_version '1', publication_names '\"{quoted}\"')".encode()
        )
        if asked.status != pq.ExecStatus.COPY_BOTH:
            self.close()
            raise errors.error_from_result(asked)

    def close(self) -> None:
        """Leave the server."""
        self._channel.finish()

    def confirm(self, lsn: int) -> None:
        """Tell the slot what it need not keep."""
        if lsn > self._confirmed:
            self._confirmed = lsn
            self._answer()

    def next_change(self, stop: Place | None, *, wait: bool) -> Change | None:
        """The next change of the table; None: none came in time, or none is before `stop`."""
        deadline = time.monotonic() + (_WAIT if wait else 0.0)
        while stop is None or self.place != stop:
            if not self._read and not self._receive(deadline):
                self._wait_for(stop)
                return None
            if not self._read:
                continue
            said = self._read[0]
            if isinstance(said, Begin) and stop is not None and _is_behind(said.commit, stop):
                self.place = stop
                return None
            self._read.popleft()
            if isinstance(said, Begin):
                self._inside = True
            elif isinstance(said, Commit):
                self._inside, self.place, self._skip = False, (said.end, 0), 0
            elif isinstance(said, Relation):
                self.relation = said if said.table == self._table else self.relation
            elif said.table == self._table:
                self.place = (self.place[0], self.place[1] + 1)
                if self.place[1] > self._skip:
                    return said
        return None

    def _wait_for(self, stop: Place | None) -> None:
        """Nothing has come: is the log read up to `stop`, or far enough for the slot to go on?"""
        if self._inside:
            return
        if stop is None and self._seen - self.place[0] > _QUIET:
            self.place = (self._seen, 0)
        elif stop is not None and _is_behind(self._seen, stop):
            self.place = stop
        elif stop is not None and not self._asked:
            self._answer(ask=True)

    def _receive(self, deadline: float) -> bool:
        """Take in what has come; False: nothing until then."""
        while True:
            size, content = self._channel.get_copy_data(1)
            if size > 0:
                self._take_in(bytes(content))
                return True
            if size < 0:
                result = self._channel.get_result()
                if result is not None and result.error_message:
                    raise errors.error_from_result(result)
                raise ServerAway("the server has ended the stream of changes")
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._channel.socket], [], [], left)[0]:
                return False
            self._channel.consume_input()  # raises if the server is gone

    def _take_in(self, frame: bytes) -> None:
        if frame[:1] == b"w":
            self._read.extend(parse(frame[25:]))
        elif frame[:1] == b"k":
            seen, _, answer = struct.unpack(">QqB", frame[1:])
            self._seen, self._asked = max(self._seen, seen), False
            if answer:
                self._answer()

    def _answer(self, *, ask: bool = False) -> None:
        """Say what is confirmed; `ask` for an answer that says how far the log was read."""
        self._asked = self._asked or ask
        done = self._confirmed
        self._channel.put_copy_data(b"r" + struct.pack(">QQQqB", done, done, done, 0, ask))
        self._channel.flush()


def _is_behind(lsn: int, stop: Place) -> bool:
    """Does nothing before the end of a reading stand at this place in the log, or behind it?"""
    return stop[1] == 0 and lsn >= stop[0]


def _copied(column: Column, text: str | None) -> str | None:
    """A value as the expression of its column gives it."""
    if text is None or column.arrow_type == pa.string():
        if text is not None and column.postgres_type == "numeric" and "." in text:
            return text.rstrip("0").rstrip(".")  # 1.5 and 1.50 are one number
        return text
    if column.postgres_type == "bool":
        return "1" if text == "t" else "0"
    return text.removeprefix("\\x") if column.postgres_type == "bytea" else text


def _lsn(number: int) -> str:
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"


def _parse_lsn(text: str, where: str) -> int:
    high, slash, low = text.partition("/")
    try:
        if slash and max(len(high), len(low)) <= 8:
            return (int(high, 16) << 32) + int(low, 16)
    except ValueError:
        pass
    raise InvalidParameter(
        f"{where}: until must be a place in the log, as SELECT pg_current_wal_lsn() says it; got "
        f"{text!r:.80}"
    )
