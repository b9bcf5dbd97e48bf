"""A fixed list of files as a source: each file is a partition, named by its path as given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from dpstream.connectors.sources.csv import CsvParser
from dpstream.connectors.sources.jsonl import JsonlParser
from dpstream.connectors.sources.parquet import ParquetFile
from dpstream.connectors.sources.text import TextFile
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Position

SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
_MOST_OPEN = 32


class Reader(Protocol):
    """One open file."""

    def columns(self) -> dict[str, pa.DataType] | None:
        """The types that the file declares."""
        ...

    def read(
        self, position: Position, columns: Sequence[str] | None, until: Position = None
    ) -> Batch:
        """The chunk from `position` on, up to `until`."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def suffix(path: Path) -> str | None:
    """The known suffix that a file name ends in."""
    name = path.name.lower()
    return next((one for one in SUFFIXES if name.endswith(one)), None)


def open_file(path: Path, name: str) -> Reader:
    """A reader for the file's format, which its suffix tells."""
    kind = suffix(path)
    if kind == ".parquet":
        return ParquetFile(path, name=name)
    if kind is None:
        raise InvalidInput(f"{path} must end in {', '.join(SUFFIXES)}")
    parser = CsvParser(name) if kind.startswith(".csv") else JsonlParser(name)
    return TextFile(path, parser, name=name)


class Files:
    """Files that are all there. One thread reads at a time; the files read last stay open."""

    bounded = True
    replayable = True

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths: dict[str, Path] = {}
        self._open: OrderedDict[str, Reader] = OrderedDict()
        for path in paths:
            self.add(path)

    def add(self, path: Path) -> None:
        """Take one more file; a second time changes nothing."""
        if suffix(path) is None:
            raise InvalidInput(f"{path} must end in {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise InvalidInput(f"there is no file {path}")
        self._paths[str(path)] = path

    def partitions(self) -> list[str]:
        """The paths, in the order given."""
        return list(self._paths)

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of a Parquet file; None for text."""
        return self._reader(partition).columns()

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """One row group or block of the file."""
        batch = self._reader(partition).read(position, columns, until)
        if batch.done:
            self._open.pop(partition).close()
        return batch

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants for every chunk, if the file tells."""
        reader = self._reader(partition)
        return reader.chunk_ranges(column) if isinstance(reader, ParquetFile) else None

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def path(self, partition: str) -> Path:
        """Where the partition's file is."""
        if partition not in self._paths:
            raise InvalidInput(
                f"the source has no file {partition!r} any more; put it back, or start anew with "
                "another checkpoint location"
            )
        return self._paths[partition]

    def _reader(self, partition: str) -> Reader:
        if partition not in self._open:
            self._open[partition] = open_file(self.path(partition), partition)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(partition)
        return self._open[partition]
