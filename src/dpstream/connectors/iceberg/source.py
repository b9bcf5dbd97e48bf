"""An Iceberg table as a source: one partition, read snapshot by snapshot.

A version is a snapshot's sequence number. Rows are those of append snapshots; a snapshot that only
replaces files by others with the same rows (compaction) adds none.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dpstream.connectors.iceberg.client import (
    iceberg_errors,
    open_catalog,
    raise_if_away,
    split_path,
)
from dpstream.connectors.lake_tables import VersionedSource, VersionPosition, one_line
from dpstream.connectors.server_base import ServerAway, ServerOptions
from dpstream.errors import InvalidInput, RowsLost


class IcebergSource(VersionedSource):
    """The source of iceberg://CATALOG/NAMESPACE/TABLE?...: what each snapshot appends."""

    position_kind = "an Iceberg table"
    first_version = 1

    def __init__(self, options: ServerOptions) -> None:
        names = split_path(options, parts=2, example="iceberg://CATALOG/NAMESPACE/TABLE")
        self._catalog, self._identifier = open_catalog(options), ".".join(names)
        self._errors = iceberg_errors()
        super().__init__(options, names[-1])
        try:
            self._table = self._catalog.load_table(self._identifier)
        except self._errors as problem:
            raise_if_away(problem, self.where)
            raise InvalidInput(
                f"{self.where} is no table that can be read: {one_line(problem)}"
            ) from None
        if self._table.metadata.format_version < 2:
            raise InvalidInput(
                f"{self.where} is a table of format version 1, whose snapshots have no order of "
                "their own; upgrade it to version 2"
            )
        self.check_end(self._last())

    def schema(self) -> pa.Schema:
        """The columns of the table as it is now."""
        found: pa.Schema = self._table.schema().as_arrow()
        kinds = ((field.name, _plain(field.type)) for field in found)
        return pa.schema(list(kinds))

    def look(self) -> tuple[str, int]:
        """Load the table's metadata anew."""
        try:
            self._table = self._catalog.load_table(self._identifier)
        except self._errors as problem:
            if type(problem).__name__ == "NoSuchTableError":
                raise RowsLost(
                    f"{self.where} is gone; restore the table, or start anew with another state "
                    "directory"
                ) from None
            raise_if_away(problem, self.where)
            raise ServerAway(one_line(problem)) from None
        return str(self._table.metadata.table_uuid), self._last()

    def next_version(self, at: VersionPosition, names: list[str]) -> tuple[int, pa.Table]:
        """What the snapshot after a position appends."""
        following = self._after(at)
        version = following.sequence_number
        schema = self.schema()
        wanted = pa.schema([schema.field(name) for name in names])
        operation = following.summary.operation.value if following.summary else "unknown"
        if operation not in ("append", "replace"):
            count = following.summary["deleted-records"] if following.summary else None
            what = "deletes" if operation == "delete" else "changes"
            self.pass_over(version, f"{what} {count} rows" if count else f"{what} rows")
        if operation != "append":
            return version, wanted.empty_table()
        known = self._table.metadata.snapshot_by_id(following.parent_snapshot_id or -1)
        try:
            rows = self._table.incremental_append_scan(
                from_snapshot_id_exclusive=None if known is None else known.snapshot_id,
                to_snapshot_id_inclusive=following.snapshot_id,
                selected_fields=tuple(names),
            ).to_arrow()
        except self._errors as problem:
            raise_if_away(problem, self.where)
            raise RowsLost(
                f"version {version} of {self.where} cannot be read: {one_line(problem)}; restore "
                "its files, or start anew from a later version (start=NUMBER)"
            ) from None
        return version, rows.select(names).cast(wanted)

    def _last(self) -> int:
        current = self._table.current_snapshot()
        return 0 if current is None else int(current.sequence_number)

    def _after(self, at: VersionPosition) -> Any:
        """The first snapshot behind a position, of those that the table's state has come from."""
        by_id = {each.snapshot_id: each for each in self._table.metadata.snapshots}
        following, before = None, self._table.current_snapshot()
        while before is not None and before.sequence_number > at.version:
            following, before = before, by_id.get(before.parent_snapshot_id)
        if before is None and following is not None and following.sequence_number > at.version + 1:
            raise self._expired(at, following)
        if at.version > at.begin and (before is None or before.sequence_number < at.version):
            raise RowsLost(
                f"{self.where} has no version {at.version} any more, which was read before: the "
                "table was rolled back; restore it, or start anew with another state directory"
            )
        return following

    def _expired(self, at: VersionPosition, oldest: Any) -> RowsLost:
        return RowsLost(
            f"{self.where} has dropped the versions {at.version + 1} to "
            f"{oldest.sequence_number - 1} before they were read: its snapshots expire sooner than "
            "this was down; start anew from a later version (start=NUMBER), and keep snapshots "
            "for longer"
        )


def _plain(kind: pa.DataType) -> pa.DataType:
    """Text and bytes as other sources have them."""
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


from_options = IcebergSource
