"""What the server reads: releases up to a horizon, so that all answers of a moment agree."""

from __future__ import annotations

import os
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.sinks.directory import file_name
from dpstream.serve.store.files import BOOK, PLACE, SEGMENTS, connect
from dpstream.serve.store.segments import Segment, decode

_COLUMNS = 'id, query, "window", "trigger", start, "end", time, planned, rows'
_OPEN = 512  # segments that are kept open; large ones are mapped, not read


@dataclass(frozen=True, kw_only=True)
class Released:
    """A line of the book."""

    id: int
    query: str
    window: int
    release: int
    start: str | None
    end: str | None
    time: str | None
    planned: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class WindowLine:
    """A window, and how often it was published."""

    window: int
    start: str | None
    end: str | None
    releases: int
    planned: int
    last_release: int
    last_time: str | None


class ReleaseReader:
    """Reads the store of a run that may still write; a store that is not there yet is empty.

    `horizon`: releases with a greater number are not seen. `look` moves it to the newest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        self._lock = Lock()
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self.horizon = 0

    def look(self) -> int:
        """See what was announced by now."""
        found = self._rows("SELECT COALESCE(MAX(id), 0) FROM releases", ())
        newest = int(found[0][0]) if found else 0
        self.horizon = max(self.horizon, newest)
        return self.horizon

    def after(self, number: int, limit: int) -> list[Released]:
        """Releases of all queries after a number, oldest first."""
        return self._released("id > ? AND id <= ? ORDER BY id LIMIT ?", number, self.horizon, limit)

    def releases(self, query: str, window: int | None, *, after: int, limit: int) -> list[Released]:
        """Releases of one query (and window) after a number, oldest first."""
        if window is None:
            where = "query = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?"
            return self._released(where, query, after, self.horizon, limit)
        where = 'query = ? AND "window" = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?'
        return self._released(where, query, window, after, self.horizon, limit)

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
        found = self._released(where, query, window, self.horizon, last, stride, *fixed)
        return found, stride == 1

    def newest(self, query: str, window: int | None = None) -> Released | None:
        """The newest release of a window, or of the newest window."""
        most = 'id <= ? ORDER BY "window" DESC, "trigger" DESC LIMIT 1'
        if window is None:
            found = self._released(f"query = ? AND {most}", query, self.horizon)
        else:
            found = self._released(
                f'query = ? AND "window" = ? AND {most}', query, window, self.horizon
            )
        return found[0] if found else None

    def last_of_windows(self, query: str, limit: int) -> list[Released]:
        """The newest release of each of the newest windows, oldest first."""
        newest = (
            f'SELECT {_COLUMNS}, MAX("trigger") FROM releases WHERE query = ? AND id <= ? '
            'GROUP BY "window" ORDER BY "window" DESC LIMIT ?'
        )
        found = self._rows(newest, (query, self.horizon, limit))
        return [_released(line[:-1]) for line in found][::-1]

    def windows(self, query: str, *, before: int | None, limit: int) -> list[WindowLine]:
        """Windows, newest first."""
        most = "" if before is None else 'AND "window" < ?'
        asked = (
            'SELECT "window", start, "end", COUNT(*), planned, MAX("trigger"), time '
            f"FROM releases WHERE query = ? AND id <= ? {most} "
            'GROUP BY "window" ORDER BY "window" DESC LIMIT ?'
        )
        given: list[Any] = [query, self.horizon]
        given += [] if before is None else [before]
        return [
            WindowLine(
                window=window,
                start=start,
                end=end,
                releases=count,
                planned=planned,
                last_release=last,
                last_time=time,
            )
            for window, start, end, count, planned, last, time in self._rows(asked, [*given, limit])
        ]

    def segment(self, released: Released) -> Segment:
        """The content of a release."""
        with self._lock:
            known = self._open.get(released.id)
            if known is not None:
                self._open.move_to_end(released.id)
                return known
        place = (released.query, released.window, released.release)
        ((content,),) = self._rows(f"SELECT content FROM releases WHERE {PLACE}", place)
        if content is None:
            segment = decode(pa.memory_map(str(self._path(released))))
        else:
            segment = decode(pa.py_buffer(content))
        with self._lock:
            self._open[released.id] = segment
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return segment

    def expect(self, released: Released) -> None:
        """Have the system fetch a large release: it was written past the system's memory."""
        path = self._path(released)
        if path.exists():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def _path(self, released: Released) -> Path:
        place = (released.query, released.window, released.release)
        return self._folder / SEGMENTS / file_name(*place, "arrow")

    def close(self) -> None:
        """Close the book."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _released(self, where: str, *given: Any) -> list[Released]:
        return [
            _released(line)
            for line in self._rows(f"SELECT {_COLUMNS} FROM releases WHERE {where}", given)
        ]

    def _rows(self, statement: str, given: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            if self._connection is None:
                if not (self._folder / BOOK).exists():
                    return []
                self._connection = connect(self._folder, reading=True)
            try:
                found: list[tuple[Any, ...]] = self._connection.execute(statement, given).fetchall()
            except sqlite3.OperationalError as problem:
                if "no such table" in str(problem):  # it is being made
                    return []
                raise
            return found


def _released(line: Sequence[Any]) -> Released:
    number, query, window, release, start, end, time, planned, rows = line
    return Released(
        id=number,
        query=query,
        window=window,
        release=release,
        start=start,
        end=end,
        time=time,
        planned=planned,
        rows=rows,
    )
