"""A table of PostgreSQL that grows, read in the order of its key.

A position is [the key before the first row or null, the last key read, how many rows that were].
Rows are read once no transaction can put one before them, see `postgres_horizon`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.connectors import postgres
from dpstream.connectors.options import Options
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.connectors.sources.postgres_checks import Checks
from dpstream.connectors.sources.postgres_horizon import SETTLE, Horizon, refuse_unsettled
from dpstream.connectors.sources.postgres_table import Table, find_table
from dpstream.connectors.sources.postgres_types import decode
from dpstream.errors import InvalidInput, InvalidParameter, ServerUnreachable
from dpstream.records import Batch, Position

_ROWS = 1 << 16
_POLL = 0.05


class Place(NamedTuple):
    """A position in a table."""

    begin: int | None
    key: int | None
    rows: int


def from_options(options: Options) -> PostgresSource:
    """The source of postgres://user@host:5432/database?table=clicks&key=id."""
    table, key = options.text("table"), options.text("key")
    settle, lag = options.text("settle"), options.number("lag", 0)
    start = options.choice("start", ("earliest", "latest"), "earliest")
    until = options.text("until")
    retry = RetryPolicy(options.where, seconds=options.number("patience", SECONDS))
    connect = postgres.connector(options)
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
            self._table: Table = find_table(self._connection, table, key, where)
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
                if not postgres.is_away(problem):
                    raise self._explained(problem) from problem
                self.close()
                self._retry.failed(postgres.said(problem))
        done = goal is None and not self.bounded
        return Batch(table=self._table.none(names), position=position, done=done)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._horizon = self._looking()  # another server may answer next time
        self._checks.seen = False

    def _next(self, at: Place | None, goal: Place | None, names: list[str]) -> Batch:
        stop = self._reachable(at) if goal is None else goal.key
        if at is None and (goal is not None or self._latest):
            begin = stop if goal is None else goal.begin
            at = Place(begin, begin, 0)
        at = at or Place(None, None, 0)
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
        after = Place(at.begin, at.key if last is None else last, at.rows + found.rows)
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

    def _reachable(self, at: Place | None) -> int | None:
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
        if postgres.is_away(problem):
            return ServerUnreachable(
                f"{self._where} does not answer: {postgres.said(problem)}; start it, or mend the "
                "address"
            )
        return InvalidInput(f"{self._where} refuses: {postgres.said(problem)}")


def _placed(position: Position) -> Place | None:
    if position is None:
        return None
    try:
        begin, key, rows = position
        edges = [None if one is None else int(one) for one in (begin, key)]
        return Place(edges[0], edges[1], int(rows))
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{position!r} is no position of a table; the checkpoint belongs to another source"
        ) from None
