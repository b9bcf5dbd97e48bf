"""Parquet: typed columns, one row group a read; a position is [row group, row offset].

A string column that the file stores by dictionary comes as a dictionary array: reading it is two
to six times as fast, and what follows has fewer strings to look at. A few bytes may stand for
millions of rows, or for a long value in each of them: a large row group is read in slices, and long
values stay in their dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.connectors.files.size_limits import LIMITS, SizeLimits
from dpstream.errors import UnusableFile, unreadable
from dpstream.records import Batch, Columns, Position, select_columns

ROWS = 1 << 20
"""A larger row group is delivered in slices of this many rows."""

_THRIFT_NUMBER = 0x15  # the next field, of 32 bits
_MOST_TEXT = 1 << 30  # bytes of a column that is not left in its dictionary
_SLICE_BYTES = 1 << 28  # on average: of a slice, as the file says
_DICTIONARY_BYTES = 4
"""Strings stored one by one take more than this many bytes each, indices into a dictionary less."""


class ParquetFile:
    """A reader of one Parquet file."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        rows: int = ROWS,
        limits: SizeLimits = LIMITS,
        threads: bool = False,
    ) -> None:
        self._path, self._name, self._rows, self._threads = path, name, rows, threads
        try:
            self._bytes = pa.OSFile(os.fsencode(path))
            self._file = pq.ParquetFile(self._bytes)
            self._sizes = _unpacked_bytes(path, self._file, self._bytes.size())
            limits.refuse_unpacked(path, sum(self._sizes))
            repeated = _repeated_strings(self._file, self._bytes)
            if repeated:
                self._file = pq.ParquetFile(self._bytes, read_dictionary=repeated)
        except (OSError, pa.ArrowException) as problem:
            raise unreadable(path, problem, kind="Parquet") from problem
        self._schema, about = self._file.schema_arrow, self._file.metadata
        self._groups = [about.row_group(i) for i in range(about.num_row_groups)]
        self._slices: RowSlices | None = None

    def columns(self) -> dict[str, pa.DataType]:
        """The types; a string column may be delivered as a dictionary of strings."""
        return {field.name: plain_type(field.type) for field in self._schema}

    @property
    def row_count(self) -> int:
        """All its rows, as its footer says."""
        return int(self._file.metadata.num_rows)

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
        total = self._groups[group].num_rows
        end = rest if group == last else total
        table = self._table(group, names, offset, min(self._slice_rows(group), end - offset))
        after = offset + table.num_rows
        if after >= total:
            group, after = group + 1, 0
            self._slices = None
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
        for group, about in enumerate(self._groups):
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
            offsets = range(0, max(about.num_rows, 1), self._slice_rows(group))
            ranges += [([group, at] if group or at else None, least, largest) for at in offsets]
        return ranges

    def close(self) -> None:
        """Close the file."""
        self._slices = None
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

    def _slice_rows(self, group: int) -> int:
        """How many rows of a row group are read at once."""
        about = self._groups[group]
        few: int = _SLICE_BYTES * about.num_rows // max(self._sizes[group], 1)
        return max(1, min(self._rows, few))

    def _table(self, group: int, names: list[str], offset: int, count: int) -> pa.Table:
        """Rows of a row group; one that is read in slices is gone through once."""
        try:
            # One thread: readers run beside other work, and a thread per column costs more in all.
            threads = self._threads
            if self._groups[group].num_rows <= self._slice_rows(group):
                table = self._file.read_row_group(group, columns=names, use_threads=threads)
                table = table.slice(offset, count)
            else:
                wanted = (group, tuple(names))
                if self._slices is None or not self._slices.serves(wanted, offset):
                    rows = self._slice_rows(group)
                    batches = self._file.iter_batches(rows, [group], names, use_threads=threads)
                    self._slices = RowSlices(wanted, batches)
                table = self._slices.take(offset, count)
        except (OSError, pa.ArrowException) as problem:
            raise unreadable(self._path, problem, kind="Parquet") from problem
        # a name with a dot is taken for a path into a struct as well; `select` is exact
        table = table.select(names)
        fields = [(field.name, _delivered_type(field.type)) for field in table.schema]
        return table.cast(pa.schema(fields)).unify_dictionaries()


class RowSlices:
    """Goes through a large row group, a slice at a time."""

    def __init__(self, wanted: object, batches: Iterator[pa.RecordBatch]) -> None:
        self._wanted, self._batches = wanted, batches
        self._start, self._batch = 0, next(batches, None)

    def serves(self, wanted: object, offset: int) -> bool:
        """Are these its columns and row group, and does it not have to go back?"""
        return self._wanted == wanted and self._start <= offset

    def take(self, offset: int, count: int) -> pa.Table:
        """So many rows from a place on."""
        parts: list[pa.RecordBatch] = []
        while count and self._batch is not None:
            skipped = min(offset - self._start, len(self._batch))
            part = self._batch.slice(skipped, count)
            parts += [part] if len(part) else []
            offset, count = offset + len(part), count - len(part)
            if count:
                self._start += len(self._batch)
                self._batch = next(self._batches, None)
        if count:
            raise pa.ArrowInvalid("it has fewer rows than it says")
        return pa.Table.from_batches(parts)


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


def _repeated_strings(file: pq.ParquetFile, content: pa.NativeFile) -> list[str]:
    """String columns that every row group stores as indices into a dictionary."""
    repeated = []
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    for j in range(len(file.schema)):
        name = file.schema.column(j).path
        at = file.schema_arrow.get_field_index(name)
        chunks = [group.column(j) for group in groups]
        if (
            at < 0
            or plain_type(file.schema_arrow.field(at).type) != pa.string()
            or not all(chunk.has_dictionary_page for chunk in chunks)
        ):
            continue
        values = sum(chunk.num_values for chunk in chunks)
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if size > _DICTIONARY_BYTES * values:
            dictionaries = [_dictionary_bytes(content, chunk) for chunk in chunks]
            if max(dictionaries) * values > _MOST_TEXT:  # it may be one long value, in every row
                size -= sum(dictionaries)
        if size <= _DICTIONARY_BYTES * values:
            repeated.append(name)
    return repeated


def _unpacked_bytes(path: Path, file: pq.ParquetFile, size: int) -> list[int]:
    """The bytes of each row group when it is unpacked; sizes that cannot be true are refused.

    They are those of its columns: what the group says itself may be anything.
    """
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    unpacked = [0] * len(groups)
    for j in range(len(file.schema)):
        has_lists = file.schema.column(j).max_repetition_level > 0  # any number of values in a row
        for i, group in enumerate(groups):
            column = group.column(j)
            start = min(column.data_page_offset, column.dictionary_page_offset or size)
            packed, values = column.total_compressed_size, column.num_values
            numbers = (start, packed, values, column.total_uncompressed_size, group.num_rows)
            if (
                min(numbers) < 0
                or start + packed > size
                or not (has_lists or values == group.num_rows)
            ):
                raise UnusableFile(
                    f"{path} cannot be read as Parquet: its footer has sizes of the column "
                    f"{column.path_in_schema!r} that cannot be true; write the file again"
                )
            unpacked[i] += column.total_uncompressed_size
    return unpacked


def _dictionary_bytes(content: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> int:
    """The size of a dictionary, from the head of its page: its kind, then its size.

    Both are numbers of Thrift's compact protocol, seven bits a byte; 0 if they are not there.
    """
    content.seek(chunk.dictionary_page_offset)
    head, size = iter(content.read(16)), 0
    for _ in range(2):
        if next(head, None) != _THRIFT_NUMBER:
            return 0
        size, shift, more = 0, 0, True
        while more and (byte := next(head, None)) is not None:
            size, shift, more = size | (byte & 127) << shift, shift + 7, byte > 127
    return size >> 1  # the last bit is the sign
