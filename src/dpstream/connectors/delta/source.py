"""A Delta Lake table as a source: one partition, read version by version from its change feed.

The feed tells rows that were added from rows that were only moved to other files (OPTIMIZE), which
a list of files does not.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.lake_tables import VersionedSource, VersionPosition, one_line
from dpstream.connectors.server_base import ServerAway, ServerOptions, is_uri
from dpstream.errors import InvalidInput, RowsLost
from dpstream.optional import optional

_FEED = "delta.enableChangeDataFeed"
_KIND = "_change_type"


class DeltaSource(VersionedSource):
    """The source of delta:FOLDER?...: the rows that each version of a table adds."""

    position_kind = "a Delta table"
    first_version = 0

    def __init__(self, options: ServerOptions) -> None:
        self._delta = optional("deltalake", extra="delta", who="a delta: source")
        self._place = options.where.removeprefix("delta:").rstrip("/") or "."
        super().__init__(options, Path(self._place).resolve().name)
        self._table = self._open()
        self.check_end(self._table.version())

    def schema(self) -> pa.Schema:
        """The columns of the last version."""
        return pa.schema(self._table.schema().to_arrow())

    def look(self) -> tuple[str, int]:
        """See the versions that have come since."""
        try:
            self._table.update_incremental()
        except (self._delta.exceptions.DeltaError, OSError) as problem:
            if is_uri(self._place):
                raise ServerAway(one_line(problem)) from None
            with suppress(InvalidInput):  # another table may have its place: its id will tell
                self._table = self._open()
                return str(self._table.metadata().id), int(self._table.version())
            raise RowsLost(
                f"{self.where} cannot be read any more: {one_line(problem)}; restore the table, "
                "or start anew with another state directory"
            ) from None
        return str(self._table.metadata().id), int(self._table.version())

    def next_version(self, at: VersionPosition, names: list[str]) -> tuple[int, pa.Table]:
        """The rows that the next version adds, in the table's types."""
        version, schema = at.version + 1, self.schema()
        quoted = ['"' + name.replace('"', '""') + '"' for name in (*names, _KIND)]  # as in SQL
        try:
            feed = self._table.load_cdf(
                starting_version=version, ending_version=version, columns=quoted
            )
            rows = pa.table(feed)
        except (self._delta.exceptions.DeltaError, OSError, pa.ArrowException) as problem:
            if isinstance(problem, OSError) and is_uri(self._place):
                raise ServerAway(one_line(problem)) from None
            raise RowsLost(
                f"version {version} of {self.where} cannot be read: {one_line(problem)}; it was "
                "removed (VACUUM, or a log that was cleaned), or is older than the table's change "
                "feed: restore it, or start anew from a later version (start=NUMBER)"
            ) from None
        kinds = pc.cast(rows[_KIND], pa.string())
        added = pc.equal(kinds, "insert")
        others = Counter(kinds.filter(pc.invert(added)).to_pylist())
        does = {"delete": "deletes", "update_postimage": "changes"}
        counts = [(does[kind], count) for kind, count in others.items() if kind in does]
        if counts:
            words = [f"{does} {count} row{'s' * (count > 1)}" for does, count in counts]
            self.pass_over(version, " and ".join(words))
        wanted = pa.schema([schema.field(name) for name in names])
        return version, rows.select(names).cast(wanted).filter(added)

    def _open(self) -> Any:
        """The table, which must be there and keep its changes."""
        try:
            table = self._delta.DeltaTable(self._place)
        except (self._delta.exceptions.DeltaError, OSError) as problem:
            raise InvalidInput(
                f"{self.where} is no Delta table that can be read: {one_line(problem)}"
            ) from None
        if table.metadata().configuration.get(_FEED, "").lower() != "true":
            raise InvalidInput(
                f"{self.where} does not keep its changes, and its files alone do not tell new "
                f"rows from old ones that were moved; set {_FEED} = true for the table, and give "
                f"start={table.version() + 2}, or the version after that setting"
            )
        return table


from_options = DeltaSource
