"""A table of PostgreSQL that grows, read in the order of its key.

A position is [the key before the first row or null, the last key read, how many rows that were].
Rows are read once no transaction can put one before them, see `postgres_horizon`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.connectors.database import identifier
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.postgres import client
from dpstream.connectors.postgres.client import copy_out
from dpstream.connectors.postgres.types import Column, columns_of, decode
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, ServerUnreachable
from dpstream.records import Batch, Position

# A table of PostgreSQL and its key: what is there, and how a range of keys is asked for.

_ABOUT = """
SELECT c.oid::int8, n.nspname, c.relname, c.relkind, pg_is_in_recovery(),
       EXISTS (SELECT 1 FROM pg_inherits i WHERE i.inhparent = c.oid) AND c.relkind <> 'p'
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
_KEY = """
SELECT a.attnum, a.attnotnull, pg_get_serial_sequence(%(name)s, a.attname), EXISTS (
    SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
      AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum)
FROM pg_attribute a WHERE a.attrelid = %(table)s AND a.attname = %(key)s
"""


@dataclass(frozen=True, kw_only=True)
class PostgresTable:
    """A table with a key that grows."""

    oid: int
    number: int
    """Of the key's column."""
    name: str
    quoted: str
    key: str
    columns: dict[str, Column]
    sequence: str | None
    place: str
    """What it is called in messages."""

    @property
    def largest(self) -> str:
        """The statement that asks for the largest key."""
        return f"SELECT max({identifier(self.key)}) FROM {self.quoted}"

    def wanted(self, columns: Sequence[str] | None) -> list[str]:
        """The columns that are asked for, in the table's order."""
        for name in columns or ():
            if name not in self.columns:
                raise InvalidInput(
                    f"{self.place} has no column {name!r}; its columns are "
                    f"{', '.join(self.columns)}"
                )
        return [name for name in self.columns if columns is None or name in columns]

    def none(self, names: Sequence[str]) -> pa.Table:
        """No rows."""
        return pa.table({name: pa.array([], self.columns[name].kind) for name in names})

    def asked(self, names: Sequence[str]) -> list[Column]:
        """The key, and what else is wanted."""
        return [self.columns[name] for name in dict.fromkeys([self.key, *names])]

    def fetch(
        self, connection: Any, names: Sequence[str], after: int | None, upto: int, rows: int
    ) -> bytes:
        """Rows of a range of keys as CSV, the key first."""
        asked = ", ".join(column.asked for column in self.asked(names))
        statement = (
            f"COPY (SELECT {asked} FROM {self.quoted} WHERE {self._range(after, upto)} "
            f"ORDER BY {identifier(self.key)} LIMIT {rows:d}) "
            "TO STDOUT (FORMAT csv, ENCODING 'UTF8')"
        )
        return copy_out(connection, statement)

    def count(self, connection: Any, after: int | None, upto: int, most: int) -> int:
        """How many rows a range of keys has, at most `most`."""
        inside = f"SELECT 1 FROM {self.quoted} WHERE {self._range(after, upto)} LIMIT {most:d}"
        (found,) = connection.execute(f"SELECT count(*) FROM ({inside}) AS found").fetchone()
        return int(found)

    def last_of_sequence(self, connection: Any) -> int | None:
        """The last key that was handed out, if the key has a sequence and it may be seen."""
        if self.sequence is None:
            return None
        import psycopg

        try:
            asked = f"SELECT last_value FROM {self.sequence}"
            return int(connection.execute(asked).fetchone()[0])
        except psycopg.errors.InsufficientPrivilege:
            return None

    def _range(self, after: int | None, upto: int) -> str:
        key = identifier(self.key)
        above = "" if after is None else f"{key} > {after:d} AND "
        return f"{above}{key} <= {upto:d}"


def find_table(connection: Any, table: str, key: str, where: str) -> PostgresTable:
    """The table; refused if its rows cannot be read in order, each once."""
    place = f"the table {table} of {where}"
    about = connection.execute(_ABOUT, (table,)).fetchone()
    if about is None:
        raise InvalidInput(f"there is no table {table!r} at {where}; create it first")
    oid, schema, name, kind, standby, parent = about
    if kind not in ("r", "p") or parent:
        raise InvalidInput(f"{place} must be a table of its own, not a view and not inherited")
    if standby:
        raise InvalidInput(f"{where} is a standby, which does not see who writes; read the primary")
    quoted = f"{identifier(schema)}.{identifier(name)}"
    columns = columns_of(connection, oid)
    if key not in columns:
        raise InvalidInput(
            f"{place} has no column {key!r} for a key; its columns are {', '.join(columns)}"
        )
    given = {"name": quoted, "table": oid, "key": key}
    number, filled, sequence, unique = connection.execute(_KEY, given).fetchone()
    if not pa.types.is_integer(columns[key].kind) or not filled or not unique:
        raise InvalidInput(
            f"{place}: the key {key!r} must be whole numbers, NOT NULL, with a unique index of its "
            f"own, such as a primary key; it is {columns[key].sort}"
            f"{'' if filled else ', may be NULL'}{'' if unique else ', and has no such index'}"
        )
    return PostgresTable(
        oid=oid,
        number=number,
        name=f"{schema}.{name}",
        quoted=quoted,
        key=key,
        columns=columns,
        sequence=sequence,
        place=place,
    )


# Signs that a table is not what was read before, and that rows were missed.


class Checks:
    """What a source remembers of its table, to notice that it changed behind it."""

    def __init__(self, table: PostgresTable) -> None:
        self._table = table
        self.seen = False
        """The row of the position was there, for who is connected now."""
        self.passed: tuple[int | None, int, int] | None = None
        """The last chunk: after which key, up to which, and how many rows."""

    def long_enough(self, largest: int | None, lag: int, end: int) -> None:
        """A bounded source must have its end."""
        if largest is None or largest - lag < end:
            behind = f", {lag} of which are left alone," if lag else ""
            raise InvalidInput(
                f"{self._table.place} ends at {self._table.key} {largest}{behind} before until="
                f"{end}; wait, or name an earlier end"
            )

    def same_table(self, connection: Any, key: int | None, largest: int | None) -> None:
        """The last row that was read must be there, or no key was handed out after it.

        Otherwise rows that nobody has read may be gone too. Who has seen the row, and looks again
        and again, need not look for it any more.
        """
        if key is None or (self.seen and (largest is None or largest >= key)):
            return
        there = self._table.count(connection, key - 1, key, 1)
        last = largest if there else self._table.last_of_sequence(connection)
        if last is None or last < key or (not there and last != key):
            raise RowsLost(
                f"{self._table.place} was read up to {self._table.key} {key}, and that row is gone"
                f"{f', while the last key is {last}' if last is not None else ''}: rows that were "
                "not read may be gone too; restore them, or start anew with another state "
                "directory"
            )
        self.seen = True

    def no_straggler(self, connection: Any, key: int | None) -> None:
        """Count the last chunk again: a row that came behind it would never be read."""
        if self.passed is None or self.passed[1] != key:
            return
        (after, upto, rows), self.passed = self.passed, None
        if self._table.count(connection, after, upto, rows + 1) > rows:
            raise InvalidInput(
                f"{self._table.place}: a row came with a {self._table.key} up to {upto}, after all "
                "rows up to there were read; say settle=transactions if keys are taken before the "
                "INSERT, or lag=N to stay N keys behind the largest"
            )

    def other_rows(self, were: int, rows: int, after: int | None, key: int | None) -> InvalidInput:
        """A replay found another number of rows."""
        span = f"with {self._table.key} after {after} up to {key}"
        if rows < were:
            return RowsLost(
                f"a step has read {were} rows of {self._table.place} {span}, and {rows} of them "
                "are left; restore them, or start anew with another state directory"
            )
        return InvalidInput(
            f"a step has read {were} rows of {self._table.place} {span}, and there are {rows} now: "
            "rows were put in behind it, and the same noise must not meet other rows; remove them"
        )


# Up to which key a table can be read: below it no transaction can still put a row.
#
# Keys are handed out in order but committed in any: a row with a smaller key may come to light
# after one with a larger key was read, and would be lost. So a look at the largest key is followed
# by a look at who could still write a smaller one, and rows are read when all of those are done.
#
# `writers`: transactions that hold a lock for writing to the table. Enough where the key is filled
# in by the INSERT itself from a sequence: the lock is taken before the sequence is asked and kept
# until the row is visible or rolled back, and the sequence never goes back. `transactions`: every
# transaction of the database, for keys that are taken earlier in the transaction that inserts.
# Neither helps with keys that are handed out in blocks or by applications; `lag` stays behind them.

SETTLE = ("writers", "transactions")
_LONG = 60.0  # seconds of waiting after which the operator is told
_log = logging.getLogger("dpstream")

_WRITERS = """
SELECT DISTINCT virtualtransaction, pid FROM pg_locks
WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (relation = %(table)s OR relation IN (SELECT relid FROM pg_partition_tree(%(table)s)))
"""
_TRANSACTIONS = """
SELECT virtualtransaction, l.pid FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND granted
  AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND (a.datname IS NULL OR a.datname = current_database())
UNION SELECT 'prepared ' || gid, NULL FROM pg_prepared_xacts WHERE database = current_database()
"""

_SEQUENCE = """
SELECT s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle
FROM pg_sequence s JOIN pg_depend d
  ON d.refclassid = 'pg_class'::regclass AND d.refobjid = s.seqrelid
JOIN pg_attrdef f ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
WHERE f.adrelid = %(table)s AND f.adnum = %(column)s
UNION
SELECT s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle
FROM pg_sequence s JOIN pg_depend d
  ON d.classid = 'pg_class'::regclass AND d.objid = s.seqrelid AND d.deptype = 'i'
WHERE d.refobjid = %(table)s AND d.refobjsubid = %(column)s
"""


class Horizon:
    """The largest key that is settled; it never goes back."""

    def __init__(self, *, table: int, largest: str, settle: str, lag: int, place: str) -> None:
        self._table, self._largest, self._lag, self._place = table, largest, lag, place
        self._asked = _WRITERS if settle == "writers" else _TRANSACTIONS
        self.settled: int | None = None
        self._coming: tuple[int, set[str]] | None = None  # a largest key, and who is waited for
        self._since = 0.0

    def look(self, connection: Any) -> int | None:
        """Look again; the largest key there is, settled or not."""
        if self._coming is not None:
            self._settle(*self._coming, self._holders(connection))
        (largest,) = connection.execute(self._largest).fetchone()
        found: int | None = largest
        known = self.settled
        if self._coming is None and found is not None and (known is None or found > known):
            holders, self._since = self._holders(connection), time.monotonic()
            self._settle(found, holders, holders)
        return found

    def _settle(self, key: int, waited_for: set[str], holders: set[str]) -> None:
        """The key is settled when none of those is left that could put a smaller one."""
        left = waited_for & holders
        if left:
            self._coming = (key, left)
            return
        self._coming = None
        below = key - self._lag
        self.settled = below if self.settled is None else max(below, self.settled)

    def _holders(self, connection: Any) -> set[str]:
        found = connection.execute(self._asked, {"table": self._table}).fetchall()
        if found and time.monotonic() - self._since > _LONG and self._coming is not None:
            who = ", ".join(str(pid) for _, pid in found if pid is not None) or "prepared ones"
            _log.warning(
                "%s: rows wait for transactions that were begun before them (process %s of the "
                "server)", self._place, who,
            )  # fmt: skip
            self._since = time.monotonic()
        return {name for name, _ in found}


def refuse_unsettled(
    connection: Any, *, table: int, column: int, place: str, settle: str | None, lag: int
) -> str:
    """How the keys settle; refused where that is not known."""
    given = {"table": table, "column": column}
    sequences = connection.execute(_SEQUENCE, given).fetchall()
    for name, cache, step, cycle in sequences:
        if step < 0 or cycle:
            raise InvalidInput(f"{place}: the sequence {name} must count up, without a cycle")
        if cache > 1 and not lag:
            raise InvalidInput(
                f"{place}: the sequence {name} hands out keys in blocks of {cache}, so they come "
                f"in no order and rows would be missed; run ALTER SEQUENCE {name} CACHE 1, or say "
                "how many keys to stay behind with lag="
            )
    if settle is None and not sequences and not lag:
        raise InvalidInput(
            f"{place}: the key is not filled in by a sequence of its own, so it is not known when "
            "all smaller keys are there; say settle=transactions if a key is taken in the "
            "transaction that inserts its row, or lag=N to stay N keys behind the largest"
        )
    return settle or ("writers" if sequences else "transactions")


_ROWS = 1 << 16
_POLL = 0.05


class TablePosition(NamedTuple):
    """A position in a table."""

    begin: int | None
    key: int | None
    rows: int


def from_options(options: ServerOptions) -> PostgresSource:
    """The source of postgres://user@host:5432/database?table=clicks&key=id."""
    table, key = options.text("table"), options.text("key")
    settle, lag = options.text("settle"), options.number("lag", 0)
    start = options.choice("start", ("earliest", "latest"), "earliest")
    until = options.text("until")
    retry = RetryPolicy(options.where, seconds=options.number("patience", SECONDS))
    connect = client.connector(options)
    options.finish()
    if not table or not key:
        raise InvalidParameter(f"{options.where} needs ?table=NAME&key=COLUMN")
    if settle is not None and settle not in SETTLE:
        raise InvalidParameter(
            f"{options.where}: settle must be one of {', '.join(SETTLE)}; got {settle!r}"
        )
    if until is not None and not until.lstrip("-").isdigit():
        raise InvalidParameter(f"{options.where}: until must be a key; got {until!r}")
    return PostgresSource(
        connect,
        where=options.where,
        table=table,
        key=key,
        retry=retry,
        settle=settle,
        lag=int(lag),
        latest=start == "latest",
        end=None if until is None else int(until),
    )


class PostgresSource:
    """One partition, the table; with `end`, a key, it is bounded and ends there."""

    replayable = True

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        where: str,
        table: str,
        key: str,
        retry: RetryPolicy,
        settle: str | None = None,
        lag: int = 0,
        latest: bool = False,
        end: int | None = None,
        rows: int = _ROWS,
    ) -> None:
        self._connect, self._where, self._retry = connect, where, retry
        self._latest, self._end, self._rows = latest, end, rows
        self.bounded = end is not None
        import psycopg

        self._errors = psycopg.Error
        try:
            self._connection: Any = connect()
            self._table: PostgresTable = find_table(self._connection, table, key, where)
            settle = refuse_unsettled(
                self._connection, table=self._table.oid, column=self._table.number,
                place=self._table.place, settle=settle, lag=lag,
            )  # fmt: skip
        except self._errors as problem:
            raise self._explained(problem) from problem
        except InvalidInput:
            self._connection.close()
            raise
        self._settle, self._lag = settle, lag
        self._horizon = self._looking()
        self._checks = Checks(self._table)
        self._name = self._table.name if end is None else f"{self._table.name} up to {end}"

    def partitions(self) -> list[str]:
        """The table."""
        return [self._name]

    def start_offset(self, position: Position) -> Position:
        """Where reading started in a position's partition: the key before the first row."""
        return None if position is None else position[:1]

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types of its columns."""
        return {name: one.kind for name, one in self._table.columns.items()}

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """The next rows, as far as they are settled."""
        if partition != self._name:
            raise InvalidInput(f"the source reads {self._name!r} now, not {partition!r}")
        names = self._table.wanted(columns)
        at, goal = _placed(position), _placed(until)
        if goal is not None and at is not None and at.key == goal.key:
            return Batch(table=self._table.none(names), position=position, done=True)
        while self.bounded and self._retry.too_early:
            self._retry.wait()
        if not self._retry.too_early:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                found = self._next(at, goal, names)
                self._retry.well()
                return found
            except self._errors as problem:
                if not client.is_away(problem):
                    raise self._explained(problem) from problem
                self.close()
                self._retry.failed(client.said(problem))
        done = goal is None and not self.bounded
        return Batch(table=self._table.none(names), position=position, done=done)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._horizon = self._looking()  # another server may answer next time
        self._checks.seen = False

    def _next(
        self, at: TablePosition | None, goal: TablePosition | None, names: list[str]
    ) -> Batch:
        stop = self._reachable(at) if goal is None else goal.key
        if at is None and (goal is not None or self._latest):
            begin = stop if goal is None else goal.begin
            at = TablePosition(begin, begin, 0)
        at = at or TablePosition(None, None, 0)
        if goal is None:
            self._checks.no_straggler(self._connection, at.key)
        if stop is None or (at.key is not None and at.key >= stop):
            # From now on, though there is nothing yet: a position that says so.
            begun = at != (None, None, 0) or self._latest
            position = list(at) if begun else None
            return Batch(table=self._table.none(names), position=position, done=True)
        content = self._table.fetch(self._connection, names, at.key, stop, self._rows)
        found = decode(content, self._table.asked(names), place=self._table.place)
        last, full = found.last, found.rows == self._rows
        if not full and (goal is not None or self.bounded):
            last = stop
        after = TablePosition(at.begin, at.key if last is None else last, at.rows + found.rows)
        if goal is not None and after.key == goal.key and after != goal:
            raise self._checks.other_rows(goal.rows - at.rows, found.rows, at.key, goal.key)
        if goal is None and last is not None:
            self._checks.passed = (at.key, last, found.rows)
        return Batch(
            table=found.table.select(names),
            position=None if after == (None, None, 0) else list(after),
            done=not full or last == stop,
            rejected=found.rejected,
            where=f"{self._table.place} after {self._table.key} {at.key}",
        )

    def _looking(self) -> Horizon:
        return Horizon(
            table=self._table.oid,
            largest=self._table.largest,
            settle=self._settle,
            lag=self._lag,
            place=self._table.place,
        )

    def _reachable(self, at: TablePosition | None) -> int | None:
        """Up to where rows are settled."""
        known = self._horizon.settled
        key = None if at is None else at.key
        if key is None or known is None or key >= known:
            largest = self._horizon.look(self._connection)
            if at is not None and at.rows:
                self._checks.same_table(self._connection, at.key, largest)
            while self._end is not None and (self._horizon.settled or self._end - 1) < self._end:
                self._checks.long_enough(largest, self._lag, self._end)
                time.sleep(_POLL)
                largest = self._horizon.look(self._connection)
        settled = self._horizon.settled
        return settled if self._end is None else self._end

    def _explained(self, problem: Exception) -> Exception:
        """The server's words, with what to do."""
        if client.is_away(problem):
            return ServerUnreachable(
                f"{self._where} does not answer: {client.said(problem)}; start it, or mend the "
                "address"
            )
        return InvalidInput(f"{self._where} refuses: {client.said(problem)}")


def _placed(position: Position) -> TablePosition | None:
    if position is None:
        return None
    try:
        begin, key, rows = position
        edges = [None if one is None else int(one) for one in (begin, key)]
        return TablePosition(edges[0], edges[1], int(rows))
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{position!r} is no position of a table; the state belongs to another source"
        ) from None
