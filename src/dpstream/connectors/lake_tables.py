"""What Delta Lake and Iceberg tables share: versions that add rows, marks of releases, types.

A source reads the rows that each version adds. A position is [the table's id, the version before
the first one, the last version read, how many rows that were]. Rows that were changed or deleted
cannot be taken back from what is published, so such a version stops the run unless the user says
otherwise.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import pyarrow as pa

from dpstream.connectors.changes import INSERTS, STOP
from dpstream.connectors.server_base import ServerLog, ServerOptions
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, StateError
from dpstream.records import Batch, Columns, Position, select_columns

_MARKS = 1 << 16
_TRIGGERS = 1 << 32  # of a window; two numbers in one that only grows


class VersionPosition(NamedTuple):
    """A position in a table's versions."""

    table: str
    begin: int
    version: int
    rows: int


class VersionedSource(ServerLog[VersionPosition]):
    """The rows that each version of a table adds; a version is read in one piece.

    `start`: earliest, latest, or the number of the first version that is read. `until`: the last
    one; it makes the source bounded. `changes`: `stop` at a version that changes or deletes rows,
    or take the `inserts` alone.
    """

    first_version: int
    """The number of a table's first version."""

    def __init__(self, options: ServerOptions, name: str) -> None:
        self.where = options.where
        self._start = options.text("start") or "earliest"
        self._inserts_alone = options.choice("changes", (STOP, INSERTS), STOP) == INSERTS
        until = options.text("until")
        if self._start not in ("earliest", "latest") and not self._start.isdecimal():
            raise InvalidParameter(
                f"{self.where}: start must be earliest, latest or the number of a version; got "
                f"{self._start!r:.80}"
            )
        if until is not None and not until.isdecimal():
            raise InvalidParameter(
                f"{self.where}: until must be the number of a version; got {until!r:.80}"
            )
        end = None if until is None else int(until)
        first = self.first_version if self._start == "earliest" else self._start
        if end is not None and (first == "latest" or int(first) > end):
            raise InvalidParameter(
                f"{self.where}: from start={first} up to until={end} there is no version; give a "
                "later end, or leave until out to wait for what comes"
            )
        super().__init__(name, end=end, retry=options.retry_policy())

    @abstractmethod
    def look(self) -> tuple[str, int]:
        """The table's id and its last version now; `ServerAway` if the storage is."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of the table's last version."""

    @abstractmethod
    def next_version(self, at: VersionPosition, names: list[str]) -> tuple[int, pa.Table]:
        """The version after a position, and the rows that it adds.

        RowsLost if it cannot be read any more.
        """

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types that the last version declares."""
        return {field.name: field.type for field in self.schema()}

    def close(self) -> None:
        """Nothing is held open."""

    def parse_position(self, position: Position) -> VersionPosition:
        """The four items of a position."""
        table, begin, version, rows = position
        return VersionPosition(str(table), int(begin), int(version), int(rows))

    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """An empty batch of the table's types."""
        schema = self.schema()
        names = select_columns(self.where, schema.names, columns)
        empty = pa.schema([schema.field(name) for name in names]).empty_table()
        return Batch(table=empty, position=position, done=done)

    def read_next(
        self, at: VersionPosition | None, goal: VersionPosition | None, columns: Columns
    ) -> Batch:
        """The rows that the next version adds."""
        table, last = self.look()
        at = self._place_in(table, last, at, goal)
        stop = min(last, last if self._end is None else self._end)
        stop = stop if goal is None else goal.version
        if at.version >= stop:
            return self.no_rows(list(at), columns, done=True)
        names = select_columns(self.where, self.schema().names, columns)
        version, rows = self.next_version(at, names)
        after = at._replace(version=version, rows=at.rows + len(rows))
        if goal is not None and version >= goal.version and after != goal:
            raise RowsLost(
                f"a step has read {goal.rows} rows of {self.where} up to version {goal.version}, "
                f"and they are {after.rows} now; restore the table, or start anew with another "
                "state directory"
            )
        where = f"{self.where}, version {version}"
        return Batch(table=rows, position=list(after), done=version >= stop, where=where)

    def check_end(self, last: int) -> None:
        """Refuse to end at a version that is not there yet."""
        if self._end is not None and self._end > last:
            raise InvalidInput(
                f"{self.where} ends at version {last}, before until={self._end}; wait, or name an "
                "earlier end"
            )

    def pass_over(self, version: int, what: str) -> None:
        """Refuse a version that does not only add rows, unless the user leaves that out."""
        if not self._inserts_alone:
            raise InvalidInput(
                f"version {version} of {self.where} {what}: what was published of them cannot be "
                "taken back; changes=inserts goes on with the rows that versions add, and leaves "
                "changes and deletions out"
            )

    def _place_in(
        self, table: str, last: int, at: VersionPosition | None, goal: VersionPosition | None
    ) -> VersionPosition:
        """Where to read on in the table that is there now; refuse one that is not as it was."""
        known = at or goal
        if known is not None and known.table != table:
            raise RowsLost(
                f"{self.where} is another table than the one that was read before (its id was "
                f"{known.table} and is {table}); restore that, or start anew with another state "
                "directory"
            )
        if at is None:
            begin = {"earliest": self.first_version - 1, "latest": last}.get(self._start)
            begin = int(self._start) - 1 if begin is None else begin
            begin = begin if goal is None else goal.begin
            at = VersionPosition(table, begin, begin, 0)
        reached = at.version if goal is None else goal.version
        if reached > last and reached > at.begin:
            raise RowsLost(
                f"{self.where} ends at version {last} now, and was read up to {reached}; restore "
                "the table, or start anew with another state directory"
            )
        return at


def one_line(problem: Exception) -> str:
    """What a library says, as part of a sentence."""
    return " ".join(str(problem).split())[:300]


def release_mark(window: int, trigger: int) -> tuple[str, int]:
    """The name of a release's mark, and a number; those of one name only grow.

    Names are at most 65,536: windows whose numbers are that far apart share one.
    """
    return f"dpstream release {window % _MARKS}", window // _MARKS * _TRIGGERS + trigger


def has_release(marked: int | None, window: int, trigger: int, place: str) -> bool:
    """Does a table whose mark of that name has this number have the release?"""
    _, asked = release_mark(window, trigger)
    if marked is None or marked < asked:
        return False
    if marked // _TRIGGERS != asked // _TRIGGERS:
        raise StateError(
            f"{place} has releases of windows that are more than {_MARKS} after window {window}, "
            "so it cannot tell whether it has this one; use another sink"
        )
    return True


def run_mark(run: str) -> str:
    """The name of the mark that a run leaves in its tables."""
    return f"dpstream run {run}"


def lake_types(table: pa.Table) -> pa.Table:
    """Columns of types that both formats have; times have microseconds, and what is finer goes."""
    kinds = pa.schema([(field.name, _kind(field.type)) for field in table.schema])
    return table.cast(kinds, safe=False).replace_schema_metadata(None)


def _kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_unsigned_integer(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_time(kind) or pa.types.is_null(kind) or pa.types.is_decimal256(kind):
        return pa.string()
    return pa.float32() if pa.types.is_float16(kind) else kind
