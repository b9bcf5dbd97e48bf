"""The sink that keeps releases for the server: durable, each once, numbered as they are announced.

A release is written when the engine has it, and announced when it is handed to who iterates over
the run, which happens in the order of the schedule. So numbers do not tell which of two queries was
worked out faster. A kill in between leaves releases without a number: `announce_rest` numbers
them, again in the order of the schedule, before the run goes on; those of a query that was ahead
then come before earlier ones of a slower query.
"""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import pyarrow as pa

from dpstream.connectors.sinks.directory import file_name
from dpstream.connectors.sinks.numbers import another_run, run_of
from dpstream.connectors.storage import open_folder, put_new
from dpstream.errors import StateError
from dpstream.privacy.state.files import make_directory, remove_leftovers
from dpstream.serve.store.files import BOOK, INLINE, PLACE, SEGMENTS, connect, make_tables
from dpstream.serve.store.segments import Segment, build, decode, encode

_RECENT = 8  # windows whose newest segment is kept in memory


class ReleaseStore:
    """A sink for several queries.

    `keys`: by query, the columns that tell its rows apart. `partial`: queries that publish only
    the rows that have changed.
    """

    concurrent = True

    def __init__(
        self, folder: Path, *, keys: Mapping[str, Sequence[str]], partial: Sequence[str] = ()
    ) -> None:
        self._folder, self._keys, self._partial = folder, keys, frozenset(partial)
        self._lock = RLock()
        self._recent: OrderedDict[tuple[str, int], tuple[int, Segment]] = OrderedDict()
        make_directory(folder, mode=0o700)
        open_folder(folder / SEGMENTS)
        remove_leftovers(folder / SEGMENTS)
        with self._explained():
            self._connection = connect(folder)
            make_tables(self._connection)

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep a release, unless it is there; releases of another run are refused."""
        about = json.loads(table.schema.metadata[b"dpstream"])
        with self._lock, self._explained():
            run = run_of(table)
            self.claim(query, run)
            self._connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (query, run))
            if self._has(query, window, trigger):
                return
            segment = build(
                table,
                keys=self._keys[query],
                release=trigger,
                before=self._before(query, window, trigger),
                carry=query in self._partial,
            )
            content: bytes | None = encode(segment)
            if content is not None and len(content) > INLINE:
                put_new(self._path(query, window, trigger), content, private=True)
                content = None
            span = (about["window_start"], about["window_end"], about["trigger_time"])
            line = (query, window, trigger, *span, about["releases"], table.num_rows, content)
            self._connection.execute(
                "INSERT INTO releases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", line
            )
            self._remember(query, window, trigger, segment)

    def claim(self, query: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._lock, self._explained():
            asked = "SELECT run FROM runs WHERE query = ?"
            found = self._connection.execute(asked, (query,)).fetchone()
            if found is not None and found[0] != run:
                raise another_run(self._folder, query)

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
            left.sort(key=lambda one: (one[0] or "", rank.get(one[1], len(rank)), *one[1:]))
            for _, query, window, trigger in left:
                self.announce(query, window, trigger)
            return len(left)

    def close(self) -> None:
        """Nothing: every query that writes here closes its sink; see `shut`."""

    def shut(self) -> None:
        """Close the book."""
        with self._lock:
            self._connection.close()

    def _has(self, query: str, window: int, trigger: int) -> bool:
        asked = f"SELECT 1 FROM releases WHERE {PLACE}"
        return self._connection.execute(asked, (query, window, trigger)).fetchone() is not None

    def _before(self, query: str, window: int, trigger: int) -> Segment | None:
        """The window's release before this one."""
        known = self._recent.get((query, window))
        if known is not None and known[0] == trigger - 1:
            return known[1]
        found = self._connection.execute(
            f"SELECT content FROM releases WHERE {PLACE}", (query, window, trigger - 1)
        ).fetchone()
        if found is None:
            return None
        path = self._path(query, window, trigger - 1)
        return decode(pa.py_buffer(found[0]) if found[0] is not None else path.read_bytes())

    def _remember(self, query: str, window: int, trigger: int, segment: Segment) -> None:
        self._recent[query, window] = (trigger, segment)
        self._recent.move_to_end((query, window))
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def _path(self, query: str, window: int, trigger: int) -> Path:
        return self._folder / SEGMENTS / file_name(query, window, trigger, "arrow")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise StateError(
                f"{self._folder / BOOK} cannot be written: {problem}; it must be a file that this "
                "user may write, on a disk with space left"
            ) from problem
