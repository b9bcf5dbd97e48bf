"""Files as a source, each a partition: a fixed list of them, or a directory that grows."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.parquet import ParquetFile
from dpstream.connectors.files.size_limits import LIMITS, SizeLimits
from dpstream.connectors.files.text import TextFile, empty_strings
from dpstream.connectors.files.trial import start_trials, try_parquet
from dpstream.connectors.storage import AgingFolder, printable
from dpstream.errors import InvalidInput, InvalidParameter, UnusableFile, unreadable
from dpstream.privacy.state.durable_files import file_identity, make_directory, sync_directory
from dpstream.records import Batch, Columns, Position, is_quarantined

SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
ON_DAMAGE = ("quarantine", "stop")
ON_DONE = ("keep", "move", "delete")
"""What may become of a file of a live directory that nobody needs any more."""
DONE = "done"
"""The folder in a live directory that such files are moved to."""
COARSE = 2.5
"""Seconds: no file system keeps coarser times of directories."""
_MOST_OPEN = 32
_LONGEST_REASON = 300
_RELIST = 10.0  # seconds after which a directory is listed though its time says that nothing came
_MANY, _PAUSE = 10_000, 0.5  # files, and the seconds between two listings of more that may be vain
_LINE, _PACKED = 64, 8  # bytes of a line, and how much smaller compressed text is: about
_LOOKS = 200  # files that were read are looked at for changes, at a time
_LOG = logging.getLogger("dpstream.sources")


def suffix(path: Path) -> str | None:
    """The known suffix that a file name ends in."""
    name = path.name.lower()
    return next((ending for ending in SUFFIXES if name.endswith(ending)), None)


class Files:
    """Files that are all there, named by their paths as given.

    One thread reads at a time (another has a `reader` of its own); the files read last stay open.
    `on_damage`: a file that cannot be used is quarantined ("quarantine": Parquet is first tried in
    another process), or its error is raised ("stop").
    """

    bounded = True
    replayable = True

    def __init__(
        self, paths: Iterable[Path], *, on_damage: str = "stop", limits: SizeLimits = LIMITS
    ) -> None:
        if on_damage not in ON_DAMAGE:
            raise InvalidParameter(f"on_damage must be {' or '.join(ON_DAMAGE)}; got {on_damage!r}")
        self.quarantines = on_damage == "quarantine"
        self._tried: dict[str, set[str]] = {}  # Parquet files, and which columns can be read
        self._marks: dict[str, Position] = {}
        self._limits = limits
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
            try_parquet(path, columns, self._limits)
            self._tried[partition] = (known or set()).union(columns or ())

    def _quarantine(self, partition: str, problem: UnusableFile, after: Position) -> Position:
        """Tell the operator of a file that cannot be used; the position that says so."""
        if not self.quarantines:
            raise problem
        known = self._marks.get(partition)
        if known is None or known.get("after") != after:
            path, digest = self._paths[partition], ""
            with suppress(OSError), path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            mark = {"quarantined": digest, "reason": str(problem)[:_LONGEST_REASON]}
            self._marks[partition] = mark if after is None else mark | {"after": after}
            _LOG.warning(
                "%s is quarantined: %s of it is counted, now or later, and the run goes on; to "
                "have its rows counted, mend it and give it a new name: %s",
                printable(path),
                "nothing" if after is None else f"nothing after {after}",
                printable(problem),
            )
        return self._marks[partition]

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants for every chunk, if the file tells."""
        reader = self._reader(partition)
        return reader.chunk_ranges(column) if isinstance(reader, ParquetFile) else None

    def row_estimate(self, partition: str) -> int | None:
        """A Parquet file's footer tells it, a text's size about; None of one that is damaged."""
        path = self._paths[partition]
        try:
            self._try(partition, ())
            reader = self._reader(partition)
            if isinstance(reader, ParquetFile):
                return reader.row_count
            packed = _PACKED if path.name.lower().endswith(".gz") else 1
            return path.stat().st_size * packed // _LINE
        except (OSError, UnusableFile):
            return None

    def reader(self) -> Files:
        """The same files, opened by another thread."""
        other = copy(self)
        other._open = OrderedDict()
        return other

    def stretch(self, partition: str, position: Position) -> Hashable:
        """A text, or a row group, is gone through from its beginning."""
        if suffix(self._paths[partition]) != ".parquet":
            return partition
        return partition, 0 if position is None else position[0]

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
            name = self._shown_name(partition)
            if kind == ".parquet":
                self._open[partition] = ParquetFile(path, name=name, limits=self._limits)
            else:
                parser = (CsvParser if kind.startswith(".csv") else JsonlParser)(name)
                self._open[partition] = TextFile(path, parser, name=name, limits=self._limits)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(partition)
        return self._open[partition]

    def _shown_name(self, partition: str) -> str:
        """What a file is called in errors and dead letters."""
        return str(self._paths[partition])


class GrowingDirectory(Files):
    """A directory into which complete files are moved while the stream runs.

    A partition is named by its file name. Files must not change once they are there: write a file
    under a name that is ignored (one that begins with "." or "_", or ends in ".tmp" or ".part") and
    rename it when it is complete. New files come after those already known, in the order of their
    names. One that is written to while it is read is read to where it ends then, and one that is
    written to after it was read is not read again: either is said once, in the log
    `dpstream.sources`.

    While the directory's own time stands still nothing is listed, and the same list is given again.
    """

    bounded = False
    partitions_end = True  # a file is complete when it comes
    _sharing = fcntl.LOCK_SH

    def __init__(
        self, folder: Path, *, on_damage: str = "stop", limits: SizeLimits = LIMITS
    ) -> None:
        super().__init__([], on_damage=on_damage, limits=limits)
        _check_folder(folder)
        self._folder = folder
        self._known: set[str] = set()
        self._listed: list[str] = []
        self._time, self._time_seen, self._looked, self._trusted = -1, 0.0, 0.0, False
        self._keeps_time = True  # does the file system date what comes into the directory?
        self._stats: dict[str, tuple[int, int]] = {}  # size and time before it was first read
        self._watched: deque[str] = deque()  # read to their ends; the first is looked at next
        self._told: set[str] = set()
        self._held: weakref.finalize[..., GrowingDirectory] | None = None

    def partitions(self) -> list[str]:
        """The files seen so far, in the order of their names; newer ones behind."""
        try:
            if self._may_have_grown():
                self._list()
        except OSError as problem:
            raise unreadable(self._folder, problem) from problem
        for _ in range(min(_LOOKS, len(self._watched))):
            name = self._watched.popleft()
            if self._is_unchanged(name, "after it was read"):
                self._watched.append(name)
        return self._listed

    def _try(self, partition: str, columns: Columns) -> None:
        """Have a Parquet file tried again if it was written to: what is open has its old footer."""
        now = self._stat(partition)
        changed = columns != () and self._stats.get(partition, now) != now
        if changed and self.quarantines and suffix(self._paths[partition]) == ".parquet":
            self._tried.pop(partition, None)
            if partition in self._open:
                self._open.pop(partition).close()
        super()._try(partition, columns)

    def _read(self, partition: str, position: Position, columns: Columns, until: Position) -> Batch:
        """One row group or block; before the first, it is known that all can be read."""
        if partition not in self._stats:
            self._stats[partition] = self._stat(partition)
        batch = super()._read(partition, position, columns, until)
        if position is None and not batch.done and until is None:
            reader = self._reader(partition)
            if isinstance(reader, TextFile):
                reader.read_through()
        if batch.done:
            del self._paths[partition]
        if batch.done and until is None:
            self._tried.pop(partition, None)
            if self._is_unchanged(partition, "while it was read"):
                self._watched.appendleft(partition)
        return batch

    def stamp(self, partition: str) -> Any:
        """Size and time of a file before it was read; zeros if it was quarantined and is gone."""
        return [*self._stats.get(partition, (0, 0))]

    def resume(self, partition: str, position: Position, stamp: Any) -> bool:
        """Look from now on whether a file that a query has finished stays as it was.

        One that is quarantined is not looked at again, whatever becomes of it.
        """
        if is_quarantined(position):
            self._marks[partition] = position
        elif partition not in self._stats:
            self._stats[partition] = stamp[0], stamp[1]
            self._watched.append(partition)
        return True

    def claim(self) -> None:
        """Keep away, until it is closed, who would remove the files that this source reads."""
        fd = os.open(self._folder, os.O_RDONLY)
        self._held = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, self._sharing | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held()
            raise InvalidInput(
                f"{self._folder} is read by another run or source, and one of the two has on_done: "
                "it removes files that it needs no more, which the other may need; read them in "
                "one pipeline from one source, or give each a directory of its own"
            ) from None
        except OSError:  # a file system without locks
            self._held()

    def close(self) -> None:
        """Close every file."""
        super().close()
        if self._held is not None:
            self._held()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to read files; the lock stays here."""
        return self.__dict__ | {"_held": None}

    def _may_have_grown(self) -> bool:
        """Must the directory be listed?

        A file system's time may be coarse: two files that come within its grain have one time. So a
        listing counts only if it began when the directory had that time for longer than a grain;
        until then it is listed again and again, a large one with pauses.
        """
        now, changed = time.monotonic(), os.stat(self._folder).st_mtime_ns
        if changed != self._time:
            self._time, self._time_seen = changed, now
        elif len(self._known) > _MANY and now < self._looked + _PAUSE:
            return False
        trusted = self._keeps_time and self._looked >= self._time_seen + COARSE
        if trusted and now < self._looked + _RELIST:
            return False
        self._looked, self._trusted = now, trusted
        return True

    def _list(self) -> None:
        """Add what is new."""
        names = [name for name in os.listdir(self._folder) if name not in self._known]
        new = sorted(name for name in names if _is_complete(self._folder, name))
        if not new:
            return
        self._known.update(new)
        self._listed = [*self._listed, *new]
        if self._trusted and os.stat(self._folder).st_mtime_ns == self._time:
            self._keeps_time = False

    def _is_unchanged(self, partition: str, when: str) -> bool:
        """Is a file as it was before it was read? If not, the operator is told, once."""
        path, before = os.path.join(self._folder, partition), self._stats[partition]
        try:
            now = _size_and_time(os.stat(path))
        except OSError:  # somebody has taken it away
            return False
        if now != before and partition not in self._told:
            self._told.add(partition)
            _LOG.warning(
                "%s was written to %s (%d bytes then, %d now): what was added or changed may not "
                "be counted, and is not read again; write new rows to a new file, under a name "
                "that begins with '.', and rename it when it is complete",
                printable(path),
                when,
                before[0],
                now[0],
            )
        return now == before

    def _stat(self, partition: str) -> tuple[int, int]:
        """Size and time of a file, which is there."""
        path = self._folder / partition
        self._paths[partition] = path
        try:
            return _size_and_time(os.stat(path))
        except OSError:
            raise InvalidInput(
                f"{path} was read before but is gone; move it back, and keep files until the "
                "stream has ended or no state needs them any more"
            ) from None


class EmptiedDirectory(GrowingDirectory):
    """A growing directory whose files go when no query needs them: deleted, or moved to `done/`.

    A file that was written to since it was read stays, and so does a quarantined one. A file that
    goes gives its name free: another file of that name is a new one. Nobody else may read the
    directory meanwhile.
    """

    _sharing = fcntl.LOCK_EX

    def __init__(
        self,
        folder: Path,
        on_done: str,
        *,
        on_damage: str = "stop",
        limits: SizeLimits = LIMITS,
        keep: timedelta | None = None,
    ) -> None:
        super().__init__(folder, on_damage=on_damage, limits=limits)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidInput(f"on_done: files cannot be removed from {folder}; allow it to write")
        self._on_done, self._done = on_done, AgingFolder(folder / DONE, keep)
        self._ends: dict[str, Position] = {}
        self._files: dict[str, str] = {}  # which file it is, whatever its name
        self._removed: list[str] = []

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """One row group or block of the file."""
        if partition not in self._files:
            self._files[partition] = self._identity(partition)
        batch = super().read(partition, position, columns=columns, until=until)
        if batch.done and until is None and not is_quarantined(batch.position):
            self._ends[partition] = batch.position
        return batch

    def stamp(self, partition: str) -> Any:
        """The same, and which file it is: another one may take its name later."""
        return [*super().stamp(partition), self._files[partition]]

    def resume(self, partition: str, position: Position, stamp: Any) -> bool:
        """The same; False: it is gone, or another file has its name."""
        if is_quarantined(position):
            return super().resume(partition, position, stamp)
        if self._identity(partition) != stamp[-1]:
            return False
        self._ends[partition], self._files[partition] = position, stamp[-1]
        return super().resume(partition, position, stamp)

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Remove the files that end where all queries have settled."""
        ended = [p for p in positions if p in self._ends and self._ends[p] == positions[p]]
        gone = {name for name in ended if name not in self._marks and self._remove(name)}
        if not gone:
            return
        sync_directory(self._folder)
        for name in gone:
            del self._ends[name], self._files[name], self._stats[name]
            self._tried.pop(name, None)
            if name in self._open:
                self._open.pop(name).close()
        self._known -= gone
        self._told -= gone
        self._listed = [name for name in self._listed if name not in gone]
        self._watched = deque(name for name in self._watched if name not in gone)
        self._removed += gone
        self._done.clean()

    def removed(self) -> list[str]:
        """Partitions that are gone since the last call: their names are free."""
        removed, self._removed = self._removed, []
        return removed

    def _identity(self, partition: str) -> str:
        """Which file this is; "": none."""
        try:
            fd = os.open(self._folder / partition, os.O_RDONLY)
        except OSError:
            return ""
        try:
            return file_identity(fd)
        finally:
            os.close(fd)

    def _remove(self, partition: str) -> bool:
        """Delete or move a file that is as it was when it was read; is it gone?"""
        path = self._folder / partition
        try:
            if path.exists() and not self._is_unchanged(partition, "after it was read"):
                return False
            if self._on_done == "move":
                self._keep_in_done(path)
            path.unlink()
        except FileNotFoundError:
            return True
        except OSError as problem:
            if partition not in self._told:
                _LOG.warning(
                    "%s is done and cannot be removed: %s", printable(path), problem.strerror
                )
            self._told.add(partition)
            return False
        return True

    def _keep_in_done(self, path: Path) -> None:
        """Give a file a second name in `done/`: its own, or with a number if that is taken."""
        folder = self._folder / DONE
        make_directory(folder)
        cut = len(path.name) - len(str(suffix(path)))
        stem, ending = path.name[:cut], path.name[cut:]
        for number in count(1):
            place = folder / (path.name if number == 1 else f"{stem}.{number}{ending}")
            try:
                os.link(path, place)
                break
            except FileExistsError:
                if os.path.samefile(path, place):  # a kill came before it lost its first name
                    break
        sync_directory(folder)


def open_directory(
    folder: Path,
    on_done: str = "keep",
    *,
    on_damage: str = "stop",
    limits: SizeLimits = LIMITS,
    keep: timedelta | None = None,
) -> GrowingDirectory:
    """A live directory; `on_done`: what becomes of files that no recovery needs any more.

    `keep`: for how long they stay in `done/`; None: for ever.
    """
    if on_done not in ON_DONE:
        raise InvalidParameter(f"on_done must be one of {', '.join(ON_DONE)}; got {on_done!r}")
    if on_done == "keep":
        opened = GrowingDirectory(folder, on_damage=on_damage, limits=limits)
    else:
        opened = EmptiedDirectory(folder, on_done, on_damage=on_damage, limits=limits, keep=keep)
    opened.claim()
    return opened


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


def _is_complete(folder: Path, name: str) -> bool:
    if name.startswith((".", "_")) or name.endswith((".tmp", ".part")):
        return False
    return name.lower().endswith(SUFFIXES) and os.path.isfile(os.path.join(folder, name))
