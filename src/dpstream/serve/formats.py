"""Releases as files: Arrow, CSV, Parquet and JSON lines, a release at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.connectors.sinks.encode import csv, jsonl
from dpstream.connectors.sinks.numbers import with_numbers

TYPES = {
    "arrow": "application/vnd.apache.arrow.stream",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/jsonl",
}
Numbered = tuple[int, int, pa.Table]
"""Window, release and table."""


def stream(kind: str, releases: Iterable[Numbered], empty: pa.Schema) -> Iterator[bytes]:
    """The bytes of a file with all releases, as they are made; one without any has a header."""
    tables = (with_numbers(table, window, release) for window, release, table in releases)
    return _STREAMS[kind](tables, empty)


def _arrow(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    return _written(tables, empty, lambda file, schema: pa.ipc.new_stream(file, schema))


def _parquet(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    return _written(tables, empty, lambda file, schema: pq.ParquetWriter(file, schema))


def _written(
    tables: Iterable[pa.Table],
    empty: pa.Schema,
    open_writer: Callable[[_Pieces, pa.Schema], pa.ipc.RecordBatchStreamWriter | pq.ParquetWriter],
) -> Iterator[bytes]:
    pieces, writer = _Pieces(), None
    for table in tables:
        if writer is None:
            writer = open_writer(pieces, table.schema)
        writer.write_table(table)
        yield pieces.take()
    if writer is None:
        writer = open_writer(pieces, empty)
    writer.close()
    yield pieces.take()


def _csv(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    first = True
    for table in tables:
        text = csv(table)
        yield text if first else text[len(csv(table.slice(0, 0))) :]
        first = False
    if first:
        yield csv(empty.empty_table())


def _jsonl(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    yield from map(jsonl, tables)


_STREAMS: dict[str, Callable[[Iterable[pa.Table], pa.Schema], Iterator[bytes]]] = {
    "arrow": _arrow,
    "csv": _csv,
    "parquet": _parquet,
    "jsonl": _jsonl,
}


class _Pieces:
    """A file that is given away while it is written."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._at = 0

    def write(self, piece: bytes) -> int:
        """Take a piece."""
        self._pieces.append(bytes(piece))
        self._at += len(self._pieces[-1])
        return len(self._pieces[-1])

    def tell(self) -> int:
        """How much was written."""
        return self._at

    def take(self) -> bytes:
        """What was written since the last time."""
        found, self._pieces = b"".join(self._pieces), []
        return found

    def flush(self) -> None:
        """Nothing waits."""

    def writable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is not."""
        return False

    def seekable(self) -> bool:
        """It is not."""
        return False

    def close(self) -> None:
        """The pieces stay until they are taken."""
