"""A Delta Lake table as a source: one partition, read version by version from its change feed.

A position is [the table's id, the version before the first one, the last version read, how many
rows that were]. The feed tells rows that were added from rows that were only moved to other files
(OPTIMIZE), which a list of files does not. Rows that were changed or deleted cannot be taken back
from what is published, so such a version stops the run unless the user says otherwise.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.server_base import ServerAway, ServerLog, ServerOptions, is_uri
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from dpstream.optional import optional
from dpstream.records import Batch, Columns, Position, select_columns

_FEED = "delta.enableChangeDataFeed"
_KIND = "_change_type"


class VersionPosition(NamedTuple):
    """A position in a table's versions."""

    table: str
    begin: int
    version: int
    rows: int


class DeltaSource(ServerLog[VersionPosition]):
    """The source of delta:FOLDER?...: the rows that each version of a table adds.

    `start`: earliest, latest, or the number of the first version that is read. `until`: the last
    one; it makes the source bounded. `changes`: `stop` at a version that changes or deletes rows,
    or take its `inserts` alone. A version is read in one piece.
    """

    position_kind = "a Delta table"

    def __init__(self, options: ServerOptions) -> None:
        self._delta = optional("deltalake", extra="delta", who="a delta: source")
        self._place = options.where.removeprefix("delta:").rstrip("/") or "."
        self._where = options.where
        self._start = options.text("start") or "earliest"
        self._inserts = options.choice("changes", ("stop", "inserts"), "stop") == "inserts"
        until = options.text("until")
        for name, text in (("start", self._start), ("until", until)):
            words = ("earliest", "latest") if name == "start" else ()
            if text is not None and text not in words and not text.isdecimal():
                raise InvalidParameter(
                    f"{self._where}: {name} must be {''.join(f'{word}, ' for word in words)}"
                    f"{'or ' if words else ''}the number of a version; got {text!r:.80}"
                )
        end = None if until is None else int(until)
        super().__init__(Path(self._place).resolve().name, end=end, retry=options.retry_policy())
        self._table = self._open()
        if end is not None and end > self._table.version():
            raise InvalidInput(
                f"{self._where} ends at version {self._table.version()}, before until={end}; wait, "
                "or name an earlier end"
            )

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The types that the newest version declares."""
        schema = pa.schema(self._table.schema().to_arrow())
        return {field.name: field.type for field in schema}

    def close(self) -> None:
        """Nothing is held open."""

    def parse_position(self, position: Position) -> VersionPosition:
        """The four items of a position."""
        table, begin, version, rows = position
        return VersionPosition(str(table), int(begin), int(version), int(rows))

    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """An empty batch of the table's types."""
        types = self.columns("")
        names = select_columns(self._where, list(types), columns)
        empty = pa.schema([(name, types[name]) for name in names]).empty_table()
        return Batch(table=empty, position=position, done=done)

    def read_next(
        self, at: VersionPosition | None, goal: VersionPosition | None, columns: Columns
    ) -> Batch:
        """The rows that the next version adds."""
        self._look()
        last = self._table.version()
        at = self._place_in(at, goal, last)
        stop = (
            goal.version
            if goal is not None
            else min(last, last if self._end is None else self._end)
        )
        if at.version >= stop:
            return self.no_rows(list(at), columns, done=True)
        version = at.version + 1
        table = self._added(version, columns)
        after = at._replace(version=version, rows=at.rows + len(table))
        if goal is not None and version == goal.version and after != goal:
            raise RowsLost(
                f"a step has read {goal.rows} rows of {self._where} up to version {version}, and "
                f"they are {after.rows} now; restore the table, or start anew with another state "
                "directory"
            )
        return Batch(
            table=table,
            position=list(after),
            done=version >= stop,
            where=f"{self._where}, version {version}",
        )

    def _open(self) -> Any:
        """The table, which must be there and keep its changes."""
        try:
            table = self._delta.DeltaTable(self._place)
        except (self._delta.exceptions.DeltaError, OSError) as problem:
            raise InvalidInput(
                f"{self._where} is no Delta table that can be read: {_one_line(problem)}"
            ) from None
        if table.metadata().configuration.get(_FEED, "").lower() != "true":
            raise InvalidInput(
                f"{self._where} does not keep its changes, and its files alone do not tell new "
                f"rows from old ones that were moved; set {_FEED} = true for the table, and give "
                f"start={table.version() + 2}, or the version after that setting"
            )
        return table

    def _look(self) -> None:
        """See the versions that have come since; `ServerAway` if the storage does not answer."""
        try:
            self._table.update_incremental()
        except (self._delta.exceptions.DeltaError, OSError) as problem:
            if is_uri(self._place):
                raise ServerAway(_one_line(problem)) from None
            with suppress(InvalidInput):  # another table may have its place, which `_place_in` sees
                self._table = self._open()
                return
            raise RowsLost(
                f"{self._where} cannot be read any more: {_one_line(problem)}; restore the table, "
                "or start anew with another state directory"
            ) from None

    def _place_in(
        self, at: VersionPosition | None, goal: VersionPosition | None, last: int
    ) -> VersionPosition:
        """Where to read on in the table that is there now; refuse one that is not as it was."""
        known, table = at or goal, str(self._table.metadata().id)
        if known is not None and known.table != table:
            raise RowsLost(
                f"{self._where} is another table than the one that was read before (its id was "
                f"{known.table} and is {table}); restore that, or start anew with another state "
                "directory"
            )
        if at is None:
            first = {"earliest": 0, "latest": last + 1}.get(self._start)
            begin = (int(self._start) if first is None else first) - 1
            begin = begin if goal is None else goal.begin
            at = VersionPosition(table, begin, begin, 0)
        reached = at.version if goal is None else goal.version
        if reached > last and reached > at.begin:
            raise RowsLost(
                f"{self._where} ends at version {last} now, and was read up to {reached}; restore "
                "the table, or start anew with another state directory"
            )
        return at

    def _added(self, version: int, columns: Columns) -> pa.Table:
        """The rows that a version adds, in the table's types."""
        types = self.columns("")
        names = select_columns(self._where, list(types), columns)
        try:
            feed = self._table.load_cdf(
                starting_version=version, ending_version=version, columns=[*names, _KIND]
            )
            rows = pa.table(feed)
        except (self._delta.exceptions.DeltaError, OSError, pa.ArrowException) as problem:
            if isinstance(problem, OSError) and is_uri(self._place):
                raise ServerAway(_one_line(problem)) from None
            raise RowsLost(
                f"version {version} of {self._where} cannot be read: {_one_line(problem)}; it was "
                "removed (VACUUM, or a log that was cleaned), or is older than the table's change "
                "feed: restore it, or start anew from a later version (start=NUMBER)"
            ) from None
        kinds = pc.cast(rows[_KIND], pa.string())
        added = pc.equal(kinds, "insert")
        others = Counter(kinds.filter(pc.invert(added)).to_pylist())
        if others and not self._inserts:
            what = {"delete": "deletes", "update_postimage": "changes"}
            counts = [(what[kind], count) for kind, count in others.items() if kind in what]
            words = [f"{does} {count} row{'s' * (count > 1)}" for does, count in counts]
            raise InvalidInput(
                f"version {version} of {self._where} {' and '.join(words)}: what was published of "
                "them cannot be taken back; changes=inserts goes on with the rows that versions "
                "add, and leaves changes and deletions out"
            )
        schema = pa.schema([(name, types[name]) for name in names])
        return rows.select(names).cast(schema).filter(added)


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]


from_options = DeltaSource
