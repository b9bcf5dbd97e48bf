"""A table of PostgreSQL that grows, read in the order of its key.

A position is [the key before the first row or null, the last key read, how many rows that were].
Rows are read once no transaction can put one before them: see `Horizon`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa

from dpstream.connectors.postgres.client import (
    PostgresTable,
    connect_function,
    find_table,
    one_line,
    raise_away,
)
from dpstream.connectors.postgres.replication import ReplicationSource
from dpstream.connectors.server_base import ServerAway, ServerLog, ServerOptions, unreachable
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from dpstream.records import Batch, Columns, Position

_ROWS = 1 << 16  # of one chunk
_POLL = 0.05  # seconds between two looks for the end of a bounded source
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


class TablePosition(NamedTuple):
    """A position in a table."""

    begin: int | None
    key: int | None
    rows: int


_START = TablePosition(None, None, 0)


class PostgresSource(ServerLog[TablePosition]):
    """The source of postgres://user@host:5432/database?table=clicks&key=id&...

    One partition, the table. With `until`, a key, it is bounded and ends there.
    """

    position_kind = "a table"

    def __init__(self, options: ServerOptions) -> None:
        self._where, self._lag = options.where, int(options.number("lag", 0))
        table, key = options.text("table"), options.text("key")
        settle, until = options.text("settle"), options.text("until")
        self._latest = options.starts_latest()
        retry, self._connect = options.retry_policy(), connect_function(options)
        options.finish()
        if not table or not key:
            raise InvalidParameter(f"{self._where} needs ?table=NAME&key=COLUMN")
        if settle is not None and settle not in SETTLE:
            raise InvalidParameter(
                f"{self._where}: settle must be one of {', '.join(SETTLE)}; got {settle!r}"
            )
        if until is not None and not until.lstrip("-").isdigit():
            raise InvalidParameter(f"{self._where}: until must be a key; got {until!r}")
        self._connection: Any = None
        self._last_chunk: tuple[int | None, int, int] | None = None  # after, up to, rows
        try:
            with self._use_connection() as connection:
                self._table = find_table(connection, table, key, self._where)
                self._settle = choose_settle(connection, self._table, settle, self._lag)
        except ServerAway as problem:
            raise unreachable(self._where, problem) from problem
        except InvalidInput:
            self.close()
            raise
        super().__init__(self._table.name, end=None if until is None else int(until), retry=retry)

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types of its columns."""
        return {name: column.arrow_type for name, column in self._table.columns.items()}

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def parse_position(self, position: Position) -> TablePosition:
        """The three items of a position."""
        begin, key, rows = position
        return TablePosition(
            None if begin is None else int(begin), None if key is None else int(key), int(rows)
        )

    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """No rows, of the columns that are asked for."""
        return Batch(table=self._table.no_rows(columns), position=position, done=done)

    def read_next(
        self, at: TablePosition | None, goal: TablePosition | None, columns: Columns
    ) -> Batch:
        """The next rows, as far as they are settled."""
        try:
            with self._use_connection():
                return self._fetch(at, goal, columns)
        except ServerAway:
            self.close()
            raise

    @contextmanager
    def _use_connection(self) -> Iterator[Any]:
        """A connection; `ServerAway` if the server is, InvalidInput for what it refuses."""
        try:
            with raise_away():
                if self._connection is None:
                    self._connection = self._connect()
                    self._horizon: Horizon | None = None  # another server may answer
                    self._row_seen = False  # was the row of the position there?
                yield self._connection
        except psycopg.Error as problem:
            raise InvalidInput(f"{self._where} refuses: {one_line(problem)}") from problem

    def _fetch(
        self, at: TablePosition | None, goal: TablePosition | None, columns: Columns
    ) -> Batch:
        stop = self._last_settled(at) if goal is None else goal.key
        if at is None and (goal is not None or self._latest):
            begin = stop if goal is None else goal.begin
            at = TablePosition(begin, begin, 0)
        at = at or _START
        if goal is None:
            self._refuse_straggler(at.key)
        if stop is None or (at.key is not None and at.key >= stop):
            # From now on, though there is nothing yet: a position that says so.
            position = list(at) if at != _START or self._latest else None
            return self.no_rows(position, columns, done=True)
        fetched = self._table.fetch(self._connection, columns, at.key, stop, _ROWS)
        last, full = fetched.last, fetched.rows == _ROWS
        if not full and (goal is not None or self.bounded):
            last = stop
        after = TablePosition(at.begin, at.key if last is None else last, at.rows + fetched.rows)
        if goal is not None and after.key == goal.key and after != goal:
            raise self._other_rows(goal.rows - at.rows, fetched.rows, at.key, goal.key)
        if goal is None and last is not None:
            self._last_chunk = (at.key, last, fetched.rows)
        return Batch(
            table=fetched.table,
            position=None if after == _START else list(after),
            done=not full or last == stop,
            rejected=fetched.rejected,
            where=f"{self._table.place} after {self._table.key} {at.key}",
        )

    def _last_settled(self, at: TablePosition | None) -> int | None:
        """The last key that is settled; of a bounded source its end, which is waited for."""
        horizon = self._horizon = self._horizon or Horizon(self._table, self._settle, self._lag)
        key, settled = None if at is None else at.key, horizon.settled
        if key is None or settled is None or key >= settled:
            largest = horizon.look(self._connection)
            if at is not None and at.rows:
                self._refuse_other_table(at.key, largest)
            while self._end is not None and (horizon.settled or self._end - 1) < self._end:
                if largest is None or largest - self._lag < self._end:
                    behind = f", {self._lag} of which are left alone," if self._lag else ""
                    raise InvalidInput(
                        f"{self._table.place} ends at {self._table.key} {largest}{behind} before "
                        f"until={self._end}; wait, or name an earlier end"
                    )
                time.sleep(_POLL)
                largest = horizon.look(self._connection)
        return horizon.settled if self._end is None else self._end

    def _refuse_other_table(self, key: int | None, largest: int | None) -> None:
        """The last row that was read must be there, or no key was handed out after it.

        Otherwise rows that nobody has read may be gone too. Who has seen the row, and looks again
        and again, need not look for it any more.
        """
        if key is None or (self._row_seen and (largest is None or largest >= key)):
            return
        there = self._table.count(self._connection, key - 1, key, 1)
        last = largest if there else self._table.last_of_sequence(self._connection)
        if last is None or last < key or (not there and last != key):
            raise RowsLost(
                f"{self._table.place} was read up to {self._table.key} {key}, and that row is gone"
                f"{f', while the last key is {last}' if last is not None else ''}: rows that were "
                "not read may be gone too; restore them, or start anew with another state "
                "directory"
            )
        self._row_seen = True

    def _refuse_straggler(self, key: int | None) -> None:
        """Count the last chunk again: a row that came behind it would never be read."""
        if self._last_chunk is None or self._last_chunk[1] != key:
            return
        (after, upto, rows), self._last_chunk = self._last_chunk, None
        if self._table.count(self._connection, after, upto, rows + 1) > rows:
            raise InvalidInput(
                f"{self._table.place}: a row came with a {self._table.key} up to {upto}, after all "
                "rows up to there were read; say settle=transactions if keys are taken before the "
                "INSERT, or lag=N to stay N keys behind the largest"
            )

    def _other_rows(self, were: int, rows: int, after: int | None, key: int | None) -> InvalidInput:
        """A replay found another number of rows."""
        span = (
            f"{were} rows of {self._table.place} with {self._table.key} after {after} up to {key}"
        )
        if rows < were:
            return RowsLost(
                f"a step has read {span}, and {rows} of them are left; restore them, or start anew "
                "with another state directory"
            )
        return InvalidInput(
            f"a step has read {span}, and there are {rows} now: rows were put in behind it, and "
            "the same noise must not meet other rows; remove them"
        )


class Horizon:
    """The largest key that is settled: no transaction can still put a row below it.

    Keys are handed out in order but committed in any: a row with a smaller key may come to light
    after one with a larger key was read, and would be lost. So a look at the largest key is
    followed by a look at who could still write a smaller one, and rows are read when all of those
    are done.

    `writers`: transactions that hold a lock for writing to the table. Enough where the key is
    filled in by the INSERT itself from a sequence: the lock is taken before the sequence is asked
    and kept until the row is visible or rolled back, and the sequence never goes back.
    `transactions`: every transaction of the database, for keys that are taken earlier in the
    transaction that inserts. Neither helps with keys that are handed out in blocks or by
    applications; `lag` stays behind them.
    """

    def __init__(self, table: PostgresTable, settle: str, lag: int) -> None:
        self._table, self._lag = table, lag
        self._statement = _WRITERS if settle == "writers" else _TRANSACTIONS
        self.settled: int | None = None
        self._coming: tuple[int, set[str]] | None = None  # a largest key, and who is waited for
        self._since = 0.0

    def look(self, connection: Any) -> int | None:
        """Look again; the largest key there is, settled or not."""
        if self._coming is not None:
            self._update(*self._coming, self._holders(connection))
        largest = self._table.largest_key(connection)
        known = self.settled
        if self._coming is None and largest is not None and (known is None or largest > known):
            holders, self._since = self._holders(connection), time.monotonic()
            self._update(largest, holders, holders)
        return largest

    def _update(self, key: int, waited_for: set[str], holders: set[str]) -> None:
        """The key is settled when none of those is left that could put a smaller one."""
        left = waited_for & holders
        if left:
            self._coming = (key, left)
            return
        self._coming = None
        below = key - self._lag
        self.settled = below if self.settled is None else max(below, self.settled)

    def _holders(self, connection: Any) -> set[str]:
        rows = connection.execute(self._statement, {"table": self._table.oid}).fetchall()
        if rows and time.monotonic() - self._since > _LONG and self._coming is not None:
            who = ", ".join(str(pid) for _, pid in rows if pid is not None) or "prepared ones"
            _log.warning(
                "%s: rows wait for transactions that were begun before them (process %s of the "
                "server)", self._table.place, who,
            )  # fmt: skip
            self._since = time.monotonic()
        return {name for name, _ in rows}


def choose_settle(connection: Any, table: PostgresTable, settle: str | None, lag: int) -> str:
    """How the keys settle; refused where that is not known."""
    given = {"table": table.oid, "column": table.key_number}
    sequences = connection.execute(_SEQUENCE, given).fetchall()
    for name, cache, step, cycle in sequences:
        if step < 0 or cycle:
            raise InvalidInput(f"{table.place}: the sequence {name} must count up, without a cycle")
        if cache > 1 and not lag:
            raise InvalidInput(
                f"{table.place}: the sequence {name} hands out keys in blocks of {cache}, so they "
                f"come in no order and rows would be missed; run ALTER SEQUENCE {name} CACHE 1, or "
                "say how many keys to stay behind with lag="
            )
    if settle is None and not sequences and not lag:
        raise InvalidInput(
            f"{table.place}: the key is not filled in by a sequence of its own, so it is not known "
            "when all smaller keys are there; say settle=transactions if a key is taken in the "
            "transaction that inserts its row, or lag=N to stay N keys behind the largest"
        )
    return settle or ("writers" if sequences else "transactions")


def from_options(options: ServerOptions) -> PostgresSource | ReplicationSource:
    """The rows of a table by its key, or its changes by a replication slot."""
    if "slot" in options.names:
        return ReplicationSource(options)
    return PostgresSource(options)
