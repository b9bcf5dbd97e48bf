"""A directory into which complete files are moved while the stream runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from dpstream.connectors.sources.files import Files, suffix
from dpstream.connectors.sources.text import unreadable
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Position


class GrowingDirectory:
    """Each file is a partition, named by its file name; files must not change once they are there.

    Write a file under a name that is ignored (one that begins with "." or "_", or ends in ".tmp"
    or ".part") and rename it when it is complete. New files come after those already known, in
    the order of their names.
    """

    bounded = False
    replayable = True

    partitions_end = True  # a file is complete when it comes

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InvalidInput(f"there is no directory {folder}; create it before the stream runs")
        self._folder = folder
        self._known: list[str] = []
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, Batch] = {}
        self._files = Files([])

    def partitions(self) -> list[str]:
        """The files seen so far, in the order of their names; newer ones behind."""
        try:
            found = sorted(path.name for path in self._folder.iterdir() if _is_complete(path))
        except OSError as problem:
            raise unreadable(self._folder, problem) from problem
        known = set(self._known)
        self._known += [name for name in found if name not in known]
        return list(self._known)

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of a Parquet file; None for text."""
        self._check(partition)
        return self._files.columns(str(self._folder / partition))

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """One row group or block of the file."""
        self._check(partition)
        end = self._ends.get(partition)
        if end is not None and end.position == position and _has(end, columns):
            return end  # polled again and again: a file that was read is not opened for that
        path = str(self._folder / partition)
        batch = self._files.read(path, position, columns=columns, until=until)
        if batch.done and until is None:
            self._ends[partition] = replace(batch, table=batch.table.slice(0, 0), rejected=[])
        return batch

    def close(self) -> None:
        """Close every file."""
        self._files.close()

    def _check(self, partition: str) -> None:
        """The file is there and as long as when it was first read."""
        path = self._folder / partition
        try:
            size = path.stat().st_size
        except OSError:
            raise InvalidInput(
                f"{path} was read before but is gone; move it back, and keep files until the "
                "stream has ended or a checkpoint no longer needs them"
            ) from None
        first = self._sizes.setdefault(partition, size)
        if size != first:
            raise InvalidInput(
                f"{path} had {first} bytes when it was first read and has {size} now; write files "
                "under a name that begins with '.' and rename them when they are complete"
            )
        self._files.add(path)


def _has(batch: Batch, columns: Sequence[str] | None) -> bool:
    return columns is not None and set(columns) == set(batch.table.column_names)


def _is_complete(path: Path) -> bool:
    hidden = path.name.startswith((".", "_")) or path.name.endswith((".tmp", ".part"))
    return not hidden and suffix(path) is not None and path.is_file()
