"""Files as a source, each a partition: a fixed list of them, or a directory that grows."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.parquet import ParquetFile
from dpstream.connectors.files.text import TextFile, empty_strings
from dpstream.connectors.files.trial import start_trials, try_parquet
from dpstream.errors import InvalidInput, InvalidParameter, UnusableFile, unreadable
from dpstream.records import Batch, Columns, Position, is_quarantined

SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
ON_DAMAGE = ("quarantine", "stop")
_MOST_OPEN = 32
_LONGEST_REASON = 300
_LOG = logging.getLogger("dpstream.sources")


def suffix(path: Path) -> str | None:
    """The known suffix that a file name ends in."""
    name = path.name.lower()
    return next((ending for ending in SUFFIXES if name.endswith(ending)), None)


class Files:
    """Files that are all there, named by their paths as given.

    One thread reads at a time; the files read last stay open. `on_damage`: a file that cannot be
    used is quarantined ("quarantine": Parquet is tried in another process first), or its error is
    raised ("stop").
    """

    bounded = True
    replayable = True

    def __init__(self, paths: Iterable[Path], *, on_damage: str = "stop") -> None:
        if on_damage not in ON_DAMAGE:
            raise InvalidParameter(f"on_damage must be {' or '.join(ON_DAMAGE)}; got {on_damage!r}")
        self.quarantines = on_damage == "quarantine"
        self._tried: dict[str, set[str]] = {}  # Parquet files, and which columns can be read
        self._marks: dict[str, Position] = {}
        self._paths: dict[str, Path] = {}
        self._open: OrderedDict[str, TextFile | ParquetFile] = OrderedDict()
        for path in paths:
            self._add(str(path), path)

    def partitions(self) -> list[str]:
        """The paths, in the order given."""
        return list(self._paths)

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of a Parquet file; None for text."""
        self._try(partition, ())
        return self._reader(partition).columns()

    def check(self, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        """None if these columns can be read; else the position that says that it is quarantined."""
        try:
            self._try(partition, columns)
            reader = self._reader(partition)
            if isinstance(reader, TextFile):
                reader.check(columns)
                if whole:
                    reader.read_through()
        except UnusableFile as problem:
            return self._quarantine(partition, problem, None)
        return None

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """One row group or block of the file; none of one that is quarantined."""
        for place in (position, until):
            if is_quarantined(place):
                return Batch(table=empty_strings(columns), position=place, done=True)
        try:
            return self._read(partition, position, columns, until)
        except UnusableFile as problem:
            if until is not None:
                raise
            mark = self._quarantine(partition, problem, position)
            return Batch(table=empty_strings(columns), position=mark, done=True)

    def _read(self, partition: str, position: Position, columns: Columns, until: Position) -> Batch:
        self._try(partition, columns)
        batch = self._reader(partition).read(position, columns, until)
        if batch.done:
            self._open.pop(partition).close()
        return batch

    def _try(self, partition: str, columns: Columns) -> None:
        """Have a Parquet file read where it can do no harm, once for each column."""
        path = self._paths.get(partition)
        if path is None or suffix(path) != ".parquet" or not self.quarantines:
            return
        known = self._tried.get(partition)
        if known is None or columns is None or not known.issuperset(columns):
            try_parquet(path, columns)
            self._tried[partition] = (known or set()).union(columns or ())

    def _quarantine(self, partition: str, problem: UnusableFile, after: Position) -> Position:
        """Tell the operator of a file that cannot be used; the position that says so."""
        if not self.quarantines:
            raise problem
        if partition not in self._marks:
            path, digest = self._paths[partition], ""
            with suppress(OSError), path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            mark = {"quarantined": digest, "reason": str(problem)[:_LONGEST_REASON]}
            self._marks[partition] = mark if after is None else mark | {"after": after}
            _LOG.warning(
                "%s is quarantined: %s of it is counted, now or later, and the run goes on; to "
                "have its rows counted, mend it and give it a new name: %s",
                path,
                "nothing" if after is None else f"nothing after {after}",
                problem,
            )
        return self._marks[partition]

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants for every chunk, if the file tells."""
        reader = self._reader(partition)
        return reader.chunk_ranges(column) if isinstance(reader, ParquetFile) else None

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def _add(self, partition: str, path: Path) -> None:
        """Take one more file; a second time changes nothing."""
        if suffix(path) is None:
            raise InvalidInput(f"{path} must end in {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise InvalidInput(f"there is no file {path}")
        self._paths[partition] = path
        if suffix(path) == ".parquet" and self.quarantines:
            start_trials()

    def _reader(self, partition: str) -> TextFile | ParquetFile:
        """A reader for the file's format, which its suffix tells."""
        if partition not in self._paths:
            raise InvalidInput(
                f"the source has no file {partition!r} any more; put it back, or start anew with "
                "another state directory"
            )
        if partition not in self._open:
            path, kind = self._paths[partition], str(suffix(self._paths[partition]))
            if kind == ".parquet":
                self._open[partition] = ParquetFile(path, name=str(path))
            else:
                parser = (CsvParser if kind.startswith(".csv") else JsonlParser)(str(path))
                self._open[partition] = TextFile(path, parser, name=str(path))
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(partition)
        return self._open[partition]


class GrowingDirectory(Files):
    """A directory into which complete files are moved while the stream runs.

    A partition is named by its file name. Files must not change once they are there: write a file
    under a name that is ignored (one that begins with "." or "_", or ends in ".tmp" or ".part") and
    rename it when it is complete. New files come after those already known, in the order of their
    names. One that is written to after it was read is not read again: that is said once, in the
    log `dpstream.sources`.
    """

    bounded = False
    partitions_end = True  # a file is complete when it comes

    def __init__(self, folder: Path, *, on_damage: str = "stop") -> None:
        super().__init__([], on_damage=on_damage)
        _check_folder(folder)
        self._folder = folder
        self._known: list[str] = []
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, Batch] = {}
        self._written: dict[str, tuple[int, int]] = {}  # size and time when it was read

    def partitions(self) -> list[str]:
        """The files seen so far, in the order of their names; newer ones behind."""
        try:
            with os.scandir(self._folder) as entries:
                files = [entry for entry in entries if _is_complete(entry)]
                names = sorted(entry.name for entry in files)
                for entry in files:
                    self._notice(entry)
        except OSError as problem:
            raise unreadable(self._folder, problem) from problem
        known = set(self._known)
        self._known += [name for name in names if name not in known]
        return list(self._known)

    def _try(self, partition: str, columns: Columns) -> None:
        if columns == ():  # its types are those that it had
            self._add(partition, self._folder / partition)
        else:
            self._check(partition)
        super()._try(partition, columns)

    def _read(self, partition: str, position: Position, columns: Columns, until: Position) -> Batch:
        """One row group or block; before the first, it is known that all can be read."""
        self._check(partition)
        end = self._ends.get(partition)
        same = end is not None and set(columns or ()) == set(end.table.column_names)
        if end is not None and end.position == position and same:
            return end  # polled again and again: a file that was read is not opened for that
        batch = super()._read(partition, position, columns, until)
        if position is None and not batch.done and until is None:
            reader = self._reader(partition)
            if isinstance(reader, TextFile):
                reader.read_through()
        if batch.done and until is None:
            self._ends[partition] = replace(batch, table=batch.table.slice(0, 0), rejected=[])
            if partition not in self._written:
                self._written[partition] = _size_and_time(os.stat(self._folder / partition))
        return batch

    def _notice(self, entry: os.DirEntry[str]) -> None:
        """Tell the operator of a file that was written to after it was read, once."""
        before = self._written.get(entry.name)
        if before is None:
            return
        now = _size_and_time(entry.stat())
        if now != before:
            self._written[entry.name] = now
            _LOG.warning(
                "%s was written to after it was read (%d bytes then, %d now): what was added or "
                "changed is not counted; write new rows to a new file, under a name that begins "
                "with '.', and rename it when it is complete",
                entry.path,
                before[0],
                now[0],
            )

    def _check(self, partition: str) -> None:
        """The file is there and as long as when it was first read."""
        path = self._folder / partition
        try:
            size = path.stat().st_size
        except OSError:
            raise InvalidInput(
                f"{path} was read before but is gone; move it back, and keep files until the "
                "stream has ended or no state needs them any more"
            ) from None
        first = self._sizes.setdefault(partition, size)
        if size != first:
            raise UnusableFile(
                f"{path} had {first} bytes when it was first read and has {size} now; write files "
                "under a name that begins with '.' and rename them when they are complete"
            )
        self._add(partition, path)


def _check_folder(folder: Path) -> None:
    """Refuse what cannot grow file by file, with what can be done instead."""
    if folder.is_dir():
        return
    instead = (
        "name a directory into which complete files are moved, '-' to pipe rows in, or 'http:' "
        "to post them to dpstream serve"
    )
    if folder.is_file():
        raise InvalidInput(
            f"{folder} is a file, and live reads whole files as they come: rows appended to one "
            f"would not be seen; {instead}; without live the file is read once, by event time"
        )
    if any(sign in str(folder) for sign in "*?["):
        raise InvalidInput(f"live cannot read the pattern {folder}; {instead}")
    raise InvalidInput(f"there is no directory {folder}; create it before the stream runs")


def _size_and_time(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _is_complete(entry: os.DirEntry[str]) -> bool:
    hidden = entry.name.startswith((".", "_")) or entry.name.endswith((".tmp", ".part"))
    return not hidden and suffix(Path(entry.name)) is not None and entry.is_file()
