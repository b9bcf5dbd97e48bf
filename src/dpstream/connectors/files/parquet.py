"""Parquet: typed columns, one row group a read; a position is [row group, row offset].

A string column that the file stores by dictionary comes as a dictionary array: reading it is two
to six times as fast, and what follows has fewer strings to look at.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.errors import UnusableFile, unreadable
from dpstream.records import Batch, Columns, Position, select_columns

ROWS = 1 << 20
"""A larger row group is delivered in slices of this many rows."""

_DICTIONARY_BYTES = 4
"""Strings stored one by one take more than this many bytes each, indices into a dictionary less."""


class ParquetFile:
    """A reader of one Parquet file."""

    def __init__(self, path: Path, *, name: str, rows: int = ROWS, threads: bool = False) -> None:
        self._path, self._name, self._rows, self._threads = path, name, rows, threads
        try:
            self._bytes = pa.OSFile(str(path))
            self._file = pq.ParquetFile(self._bytes)
            repeated = _repeated_strings(self._file)
            if repeated:
                self._file = pq.ParquetFile(self._bytes, read_dictionary=repeated)
        except (OSError, pa.ArrowException) as problem:
            raise unreadable(path, problem, kind="Parquet") from problem
        self._schema = self._file.schema_arrow
        self._cached: tuple[int, tuple[str, ...], pa.Table] | None = None

    def columns(self) -> dict[str, pa.DataType]:
        """The types; a string column may be delivered as a dictionary of strings."""
        return {field.name: plain_type(field.type) for field in self._schema}

    def read(self, position: Position, columns: Columns, until: Position = None) -> Batch:
        """The rest of a row group, or its next slice."""
        known = self._schema.names
        if len(set(known)) < len(known):
            raise UnusableFile(f"{self._name}: column names must differ; got {', '.join(known)}")
        names = select_columns(self._name, known, columns)
        groups = self._file.num_row_groups
        group, offset = self._parse(position, [0, 0])
        last, rest = self._parse(until, [groups, 0])
        if [group, offset] >= [last, rest]:
            empty = pa.schema([(name, self.columns()[name]) for name in names]).empty_table()
            return Batch(table=empty, position=[group, offset], done=True)
        total = self._file.metadata.row_group(group).num_rows
        end = rest if group == last else total
        table = self._row_group(group, names).slice(offset, min(self._rows, end - offset))
        after = offset + table.num_rows
        if after >= total:
            group, after = group + 1, 0
            self._cached = None
        return Batch(table=table, position=[group, after], done=[group, after] >= [last, rest])

    def chunk_ranges(self, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants, in microseconds, for every read.

        Taken from the file's statistics; None where they do not tell.
        """
        place = self._schema.get_field_index(column)
        kind = self._schema.field(place).type if place >= 0 else None
        if kind is None or not pa.types.is_timestamp(kind):
            return None
        ranges: list[tuple[Position, int, int]] = []
        for group in range(self._file.num_row_groups):
            about = self._file.metadata.row_group(group)
            chunks = map(about.column, range(about.num_columns))
            by_path = {chunk.path_in_schema: chunk.statistics for chunk in chunks}
            statistics = by_path.get(column)
            if statistics is None or not statistics.has_min_max or statistics.null_count:
                return None
            try:
                edges = pa.array([statistics.min, statistics.max])
                edges = edges.cast(pa.timestamp("us", tz=kind.tz))
            except (OverflowError, ValueError, pa.ArrowException):  # a time that Python lacks
                return None
            least, largest = edges.cast(pa.int64()).to_pylist()
            offsets = range(0, max(about.num_rows, 1), self._rows)
            ranges += [([group, at] if group or at else None, least, largest) for at in offsets]
        return ranges

    def close(self) -> None:
        """Close the file."""
        self._cached = None
        self._file.close()
        self._bytes.close()

    def _parse(self, position: Position, default: list[int]) -> list[int]:
        """A position that the file has."""
        if position is None:
            return default
        group, offset = position
        about = self._file.metadata
        if [group, offset] == [about.num_row_groups, 0]:
            return [group, offset]
        inside = 0 <= group < about.num_row_groups
        if not inside or not 0 <= offset < max(1, about.row_group(group).num_rows):
            raise UnusableFile(
                f"{self._name} has no row {offset} in row group {group}; it is not the file that "
                "was read before: put that one back"
            )
        return [group, offset]

    def _row_group(self, group: int, names: list[str]) -> pa.Table:
        """The row group; a large one is kept until its last slice is read."""
        wanted = (group, tuple(names))
        if self._cached is not None and self._cached[:2] == wanted:
            return self._cached[2]
        try:
            # One thread: readers run beside other work, and a thread per column costs more in all.
            table = self._file.read_row_group(group, columns=names, use_threads=self._threads)
        except (OSError, pa.ArrowException) as problem:
            raise unreadable(self._path, problem, kind="Parquet") from problem
        # a name with a dot is taken for a path into a struct as well; `select` is exact
        table = table.select(names)
        fields = [(field.name, _delivered_type(field.type)) for field in table.schema]
        table = table.cast(pa.schema(fields)).unify_dictionaries()
        if table.num_rows > self._rows:
            self._cached = (*wanted, table)
        return table


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Strings of every encoding as plain strings."""
    if pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return kind


def _delivered_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind) and plain_type(kind) == pa.string():
        return pa.dictionary(pa.int32(), pa.string())
    return plain_type(kind)


def _repeated_strings(file: pq.ParquetFile) -> list[str]:
    """String columns that every row group stores as indices into a dictionary."""
    repeated = []
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    for j in range(len(file.schema)):
        name = file.schema.column(j).path
        at = file.schema_arrow.get_field_index(name)
        chunks = [group.column(j) for group in groups]
        if (
            at >= 0
            and plain_type(file.schema_arrow.field(at).type) == pa.string()
            and all(chunk.has_dictionary_page for chunk in chunks)
            and sum(chunk.total_uncompressed_size for chunk in chunks)
            <= _DICTIONARY_BYTES * sum(chunk.num_values for chunk in chunks)
        ):
            repeated.append(name)
    return repeated
