"""Releases, kept for those who read them: written by the run, read by the server.

releases.sqlite     one line per release; small ones are in it
segments/           large ones, a file each, which is durable before its line

A release is written when the engine has it, and gets its number when it is announced: when it is
handed to the caller who iterates over the run, in the order of the schedule. So numbers do not tell
which of two queries was worked out faster; they grow by 1 and are never given twice. A kill in
between leaves releases without a number: `announce_rest` numbers them, again in the order of the
schedule, before the run goes on; those of a query that was ahead then come before earlier ones of a
slower query.

Old releases may go (`drop_old`): lines first, with a note of how far, so that a replay does not
bring them back; then their files.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from threading import Lock, RLock
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.connectors.encode import another_run, run_of
from dpstream.connectors.files.sink import file_name
from dpstream.connectors.storage import open_folder, put_new
from dpstream.errors import StateError
from dpstream.privacy.state.durable_files import make_directory, remove_leftovers
from dpstream.serve.release_segments import Segment, build, decode, encode
from dpstream.session.pipeline import Pipeline
from dpstream.session.retention import Waste

FORMAT = 1
BOOK, SEGMENTS = "releases.sqlite", "segments"
INLINE = 1 << 16
"""Bytes of a release that is kept in the book itself."""

_RELEASES = (
    'CREATE TABLE IF NOT EXISTS releases (query TEXT NOT NULL, "window" INTEGER NOT NULL, '
    '"trigger" INTEGER NOT NULL, start TEXT, "end" TEXT, time TEXT, planned INTEGER NOT NULL, '
    "rows INTEGER NOT NULL, content BLOB, id INTEGER, "
    'PRIMARY KEY (query, "window", "trigger"))'
)
_DROPPED = "CREATE TABLE IF NOT EXISTS dropped (query TEXT PRIMARY KEY, before TEXT NOT NULL)"
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs (query TEXT PRIMARY KEY, run TEXT NOT NULL)",
    _RELEASES,
    "CREATE UNIQUE INDEX IF NOT EXISTS by_number ON releases (id)",
    "CREATE INDEX IF NOT EXISTS by_query ON releases (query, id)",
    _DROPPED,
    f"PRAGMA user_version = {FORMAT}",
)
Place = tuple[str, int, int]
"""Query, window and trigger of a release."""
PLACE = 'query = ? AND "window" = ? AND "trigger" = ?'
_RECENT = 8  # windows whose newest segment is kept in memory
_COLUMNS = 'id, query, "window", "trigger", start, "end", time, planned, rows'
_NO_WINDOW = 2**63 - 1  # no window has this number
_DROPPED_AT_ONCE = 1000  # lines of one transaction
_DAY = timedelta(days=1)
_OPEN = 512  # segments that are kept open; large ones are mapped, not read


def connect(folder: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Open the book; a commit is on the disk, and readers do not wait for it."""
    connection = sqlite3.connect(
        folder / BOOK, isolation_level=None, timeout=30, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if tables and version != FORMAT:
        connection.close()
        raise StateError(
            f"{folder / BOOK} has format {version}; this version of dpstream reads format "
            f"{FORMAT}; use the version that wrote it"
        )
    if reading:
        connection.execute("PRAGMA query_only = ON")
    return connection


def segment_path(folder: Path, place: Place) -> Path:
    """Where a large release is kept."""
    return folder / SEGMENTS / file_name(*place, "arrow")


def store_folder(pipeline: Pipeline) -> Path:
    """Where a pipeline's releases are kept for the server."""
    return pipeline.state / "served"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder that is there; refused if another process holds it. A kill lets it go."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"{folder} is served by another process already; stop that first, or show what is "
                "there with --no-run"
            ) from None
        yield
    finally:
        os.close(fd)


def old_releases(
    connection: sqlite3.Connection, folder: Path, query: str, before: str
) -> Iterator[tuple[Place, int]]:
    """Releases of a query with a trigger before a time, and their bytes, oldest first.

    Not the newest one of a window that goes on, which the next one of it builds on, nor the one
    with the greatest number, which the next number follows.
    """
    (newest,) = connection.execute("SELECT MAX(id) FROM releases").fetchone()
    asked = (
        'SELECT id, "window", "trigger", time, planned, LENGTH(content), (SELECT "trigger" '
        'FROM releases AS o WHERE o.query = r.query AND o."window" = r."window" AND o.id > 0 '
        'ORDER BY "trigger" DESC LIMIT 1) '
        "FROM releases AS r WHERE query = ? AND id > ? ORDER BY id LIMIT ?"
    )
    after = 0
    while lines := connection.execute(asked, (query, after, _DROPPED_AT_ONCE)).fetchall():
        for number, window, trigger, time, planned, size, last in lines:
            after = number
            if time is not None and time >= before:
                return
            if time is None or number == newest or trigger == last < planned:
                continue
            place = (query, window, trigger)
            if size is None:
                path = segment_path(folder, place)
                size = path.stat().st_size if path.exists() else 0
            yield place, size


def oldest_kept(connection: sqlite3.Connection, served: timedelta) -> dict[str, str]:
    """Before which trigger each query's releases may go: `served` before its newest one.

    A query that has stopped keeps what it has: nobody finds an empty page.
    """
    newest = connection.execute("SELECT query, MAX(time) FROM releases WHERE id > 0 GROUP BY query")
    return {
        query: (datetime.fromisoformat(time) - served).isoformat()
        for query, time in newest
        if time is not None
    }


def drop_old(connection: sqlite3.Connection, folder: Path, served: timedelta) -> tuple[int, int]:
    """Delete what is older than the newest release by more than `served`; how many, and bytes.

    A kill in between leaves files without a line, which nobody reads: `unnamed_segments` has them.
    """
    count = total = 0
    for query, before in oldest_kept(connection, served).items():
        old = old_releases(connection, folder, query, before)
        while batch := [*islice(old, _DROPPED_AT_ONCE)]:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                connection.execute(
                    "INSERT INTO dropped VALUES (?, ?) ON CONFLICT (query) DO UPDATE SET "
                    "before = MAX(before, excluded.before)",
                    (query, before),
                )
                places = [place for place, _ in batch]
                connection.executemany(f"DELETE FROM releases WHERE {PLACE}", places)
            for place, size in batch:
                segment_path(folder, place).unlink(missing_ok=True)
                count, total = count + 1, total + size
    return count, total


def unnamed_segments(connection: sqlite3.Connection, folder: Path) -> list[Path]:
    """Files of releases that have no line: a kill came in between."""
    large = 'SELECT query, "window", "trigger" FROM releases WHERE content IS NULL'
    named = {segment_path(folder, place) for place in connection.execute(large)}
    return sorted(path for path in (folder / SEGMENTS).glob("*.arrow") if path not in named)


def collect_served(folder: Path, served: timedelta | None, remove: bool) -> list[Waste]:
    """What may go of a pipeline's store; with `remove` it is gone."""
    if not (folder / BOOK).exists():
        return []
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_folder(folder))
        except StateError:
            why = "it is served, and the server removes what is old itself"
            return [Waste(what="in use", where=folder, why=why, files=0, bytes=0)]
        connection = stack.enter_context(closing(connect(folder)))
        waste = partial(Waste, where=folder, removed=remove)
        found, paths = [], unnamed_segments(connection, folder)
        size, why = sum(path.stat().st_size for path in paths), "a kill has left them"
        found.append(waste(what="unnamed files", why=why, files=len(paths), bytes=size))
        for path in paths if remove else ():
            path.unlink()
        if served is not None:
            sizes = [
                size
                for query, before in oldest_kept(connection, served).items()
                for _, size in old_releases(connection, folder, query, before)
            ]
            if remove and sizes:
                connection.execute(_DROPPED)
                drop_old(connection, folder, served)
                connection.execute("VACUUM")
            why = "older than the newest of their query by more than [retention] served"
            what, count = "served releases", len(sizes)
            found.append(waste(what=what, why=why, files=count, bytes=sum(sizes)))
        return found


class ReleaseStore:
    """A sink for several queries.

    `keys`: by query, the columns that tell its rows apart. `partial`: queries that publish only
    the rows that have changed. `served`: for how long before the newest release of a query its
    others are kept; None: for ever.
    """

    concurrent = True

    def __init__(
        self,
        folder: Path,
        *,
        keys: Mapping[str, Sequence[str]],
        partial: Sequence[str] = (),
        served: timedelta | None = None,
    ) -> None:
        self._served, self._drop_at = served, ""  # the trigger from which on old ones go again
        self._folder, self._keys, self._partial = folder, keys, frozenset(partial)
        self._lock = RLock()
        self._recent: OrderedDict[tuple[str, int], tuple[int, Segment]] = OrderedDict()
        make_directory(folder, mode=0o700)
        open_folder(folder / SEGMENTS)
        remove_leftovers(folder / SEGMENTS)
        with self._explained():
            self._connection = connect(folder)
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # the tables and the number of their format: all or none
                for statement in _SCHEMA:
                    self._connection.execute(statement)

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep a release, unless it is there; releases of another run are refused."""
        about = json.loads(table.schema.metadata[b"dpstream"])
        with self._lock, self._explained():
            run = run_of(table)
            self.fence(name, run)
            self._connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (name, run))
            place = (name, window, trigger)
            if self._content(place) is not None or self._was_dropped(name, about["trigger_time"]):
                return
            segment = build(
                table,
                keys=self._keys[name],
                release=trigger,
                before=self._before(name, window, trigger),
                carry=name in self._partial,
            )
            content = encode(segment)
            inline = len(content) <= INLINE
            if not inline:
                put_new(segment_path(self._folder, place), content, private=True)
            span = (about["window_start"], about["window_end"], about["trigger_time"])
            line = (*place, *span, about["releases"], table.num_rows, content if inline else None)
            self._connection.execute(
                "INSERT INTO releases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", line
            )
            self._recent[name, window] = (trigger, segment)
            self._recent.move_to_end((name, window))
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
            self._drop_old(about["trigger_time"])

    def _drop_old(self, now: str | None) -> None:
        """Let old releases go, if that was not done for a twentieth of the time, or a day."""
        if self._served is None or now is None or now < self._drop_at:
            return
        drop_old(self._connection, self._folder, self._served)
        pause = min(self._served / 20, _DAY)
        self._drop_at = (datetime.fromisoformat(now) + pause).isoformat()

    def _was_dropped(self, query: str, time: str | None) -> bool:
        """Was a release of this time published, and has gone since? A replay has it again."""
        asked = "SELECT 1 FROM dropped WHERE query = ? AND before > ?"
        return time is not None and bool(self._connection.execute(asked, (query, time)).fetchone())

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._lock, self._explained():
            asked = "SELECT run FROM runs WHERE query = ?"
            known = self._connection.execute(asked, (name,)).fetchone()
            if known is not None and known[0] != run:
                raise another_run(self._folder, name)

    def announce(self, query: str, window: int, trigger: int) -> None:
        """Give a release its number; a second call does nothing."""
        with self._lock, self._explained():
            self._connection.execute(
                "UPDATE releases SET id = (SELECT COALESCE(MAX(id), 0) + 1 FROM releases) "
                f"WHERE {PLACE} AND id IS NULL",
                (query, window, trigger),
            )

    def announce_rest(self, order: Sequence[str]) -> int:
        """Number what a kill has left without; how many there were."""
        with self._lock, self._explained():
            left = self._connection.execute(
                'SELECT time, query, "window", "trigger" FROM releases WHERE id IS NULL'
            ).fetchall()
            rank = {name: number for number, name in enumerate(order)}
            left.sort(key=lambda line: (line[0] or "", rank.get(line[1], len(rank)), *line[1:]))
            for _, query, window, trigger in left:
                self.announce(query, window, trigger)
            return len(left)

    def close(self) -> None:
        """Nothing: every query that writes here closes its sink; see `shut`."""

    def shut(self) -> None:
        """Close the book."""
        with self._lock:
            self._connection.close()

    def _content(self, place: Place) -> tuple[bytes | None] | None:
        """What the book has of a release (None: its file has it); None if it is not there."""
        asked = f"SELECT content FROM releases WHERE {PLACE}"
        line: tuple[bytes | None] | None = self._connection.execute(asked, place).fetchone()
        return line

    def _before(self, query: str, window: int, trigger: int) -> Segment | None:
        """The window's release before this one."""
        known = self._recent.get((query, window))
        if known is not None and known[0] == trigger - 1:
            return known[1]
        place = (query, window, trigger - 1)
        line = self._content(place)
        if line is None:
            return None
        return decode(line[0] or segment_path(self._folder, place).read_bytes())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise StateError(
                f"{self._folder / BOOK} cannot be written: {problem}; it must be a file that this "
                "user may write, on a disk with space left"
            ) from problem


class Released(NamedTuple):
    """A line of the book, in the order of `_COLUMNS`."""

    id: int
    query: str
    window: int
    release: int
    start: str | None
    end: str | None
    time: str | None
    planned: int
    rows: int

    @property
    def place(self) -> Place:
        """Where it stands in the schedule."""
        return self.query, self.window, self.release

    @property
    def facts(self) -> dict[str, Any]:
        """Which release it is, as answers and events say it."""
        return {
            "id": self.id,
            "query": self.query,
            "window": self.window,
            "start": self.start,
            "end": self.end,
            "release_index": self.release,
            "releases": self.planned,
            "time": self.time,
        }


class ReleaseReader:
    """Reads the store of a run that may still write; a store that is not there yet is empty.

    `horizon`: releases with a greater number are not seen. `look` moves it to the newest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        self._lock = Lock()
        self.segment = lru_cache(_OPEN)(self._segment)
        self.horizon = 0

    def look(self) -> int:
        """See what was announced by now."""
        lines = self._rows("SELECT COALESCE(MAX(id), 0) FROM releases", ())
        newest = int(lines[0][0]) if lines else 0
        self.horizon = max(self.horizon, newest)
        return self.horizon

    def after(self, number: int, limit: int) -> list[Released]:
        """Releases of all queries after a number, oldest first."""
        return self._lines("id > ? AND id <= ? ORDER BY id LIMIT ?", number, self.horizon, limit)

    def releases(self, query: str, window: int | None, *, after: int, limit: int) -> list[Released]:
        """Releases of one query (and window) after a number, oldest first."""
        rest = "id > ? AND id <= ? ORDER BY id LIMIT ?"
        return self._of_query(query, window, rest, after, self.horizon, limit)

    def spread(
        self, query: str, window: int, *, last: int, also: Sequence[int], limit: int
    ) -> tuple[list[Released], bool]:
        """Releases of a window up to the `last`, and whether they are all of them.

        More than `limit` are thinned evenly; the last and `also` are always among them. Strides are
        powers of two: who asks again finds the same ones, until every second of them has left.
        """
        fixed = sorted({last, *also})
        stride = 1
        while last > limit and last // stride > max(0, limit - len(fixed)):
            stride *= 2
        placeholders = ", ".join("?" for _ in fixed)
        where = (
            f'query = ? AND "window" = ? AND id <= ? AND "trigger" <= ? '
            f'AND ("trigger" % ? = 0 OR "trigger" IN ({placeholders})) ORDER BY "trigger"'
        )
        thinned = self._lines(where, query, window, self.horizon, last, stride, *fixed)
        return thinned, stride == 1 and [one.release for one in thinned[:1]] in ([], [1])

    def newest(self, query: str, window: int | None = None) -> Released | None:
        """The newest release of a window, or of the newest window."""
        rest = 'id <= ? ORDER BY "window" DESC, "trigger" DESC LIMIT 1'
        return next(iter(self._of_query(query, window, rest, self.horizon)), None)

    def last_of_windows(self, query: str, limit: int) -> list[Released]:
        """The newest release of each of the newest windows, oldest first."""
        newest = (
            f'SELECT {_COLUMNS}, MAX("trigger") FROM releases WHERE query = ? AND id <= ? '
            'GROUP BY "window" ORDER BY "window" DESC LIMIT ?'
        )
        lines = self._rows(newest, (query, self.horizon, limit))
        return [Released._make(line[:-1]) for line in lines][::-1]

    def windows(self, query: str, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Windows and how often each was published, newest first, as answers say it."""
        columns = {
            "window": '"window"',
            "start": "start",
            "end": '"end"',
            "releases": "COUNT(*)",
            "planned": "planned",
            "last_release_index": 'MAX("trigger")',
            "last_release_time": "time",
        }
        asked = (
            f"SELECT {', '.join(columns.values())} FROM releases WHERE query = ? AND id <= ? "
            'AND "window" < ? GROUP BY "window" ORDER BY "window" DESC LIMIT ?'
        )
        end = _NO_WINDOW if before is None else before
        lines = self._rows(asked, (query, self.horizon, end, limit))
        return [dict(zip(columns, line, strict=True)) for line in lines]

    def _segment(self, released: Released) -> Segment:
        """The content of a release; KeyError: it has gone since its line was read."""
        asked = f"SELECT content FROM releases WHERE {PLACE}"
        path = segment_path(self._folder, released.place)
        for (content,) in self._rows(asked, released.place):
            with suppress(FileNotFoundError):
                return decode(
                    pa.memory_map(str(path)) if content is None else pa.py_buffer(content)
                )
        raise KeyError(released.place)

    def expect(self, released: Released) -> None:
        """Have the system fetch a large release: it was written past the system's memory."""
        path = segment_path(self._folder, released.place)
        if path.exists():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def close(self) -> None:
        """Close the book."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _of_query(self, query: str, window: int | None, where: str, *given: Any) -> list[Released]:
        if window is None:
            return self._lines(f"query = ? AND {where}", query, *given)
        return self._lines(f'query = ? AND "window" = ? AND {where}', query, window, *given)

    def _lines(self, where: str, *given: Any) -> list[Released]:
        statement = f"SELECT {_COLUMNS} FROM releases WHERE {where}"
        return [Released._make(line) for line in self._rows(statement, given)]

    def _rows(self, statement: str, given: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            if self._connection is None:
                if not (self._folder / BOOK).exists():
                    return []
                self._connection = connect(self._folder, reading=True)
            try:
                lines: list[tuple[Any, ...]] = self._connection.execute(statement, given).fetchall()
            except sqlite3.OperationalError as problem:
                if "no such table" in str(problem):  # it is being made
                    return []
                raise
            return lines
