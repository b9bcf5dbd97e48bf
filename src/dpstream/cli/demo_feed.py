"""A made-up live click stream for the tour: files that are moved into a directory, one a beat."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.sinks.encode import csv
from dpstream.data.clicks import clicks

BEATS_PER_SECOND = 2


class Feed:
    """Writes clicks from `start` to `end` (seconds since 1970), and remembers the truth."""

    def __init__(self, folder: Path, *, start: float, end: float, rows_per_second: int) -> None:
        self._folder, self._start = folder, start
        self._beats = int((end - start) * BEATS_PER_SECOND) - 1  # the last beat meets a trigger
        self._each = rows_per_second // BEATS_PER_SECOND
        rows = self._beats * self._each
        self._table = clicks(rows, users=max(rows // 2, 1))
        self._pairs: set[tuple[str, str]] = set()
        self.rows = 0
        self._truth: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        folder.mkdir()

    def begin(self) -> None:
        """Write in the background from now on."""
        self._thread.start()

    def end(self) -> None:
        """Write no more."""
        self._over.set()
        self._thread.join()

    @property
    def users(self) -> int:
        """How many different users there are in what was written."""
        return len(pc.unique(self._table["user"][: self.rows]))

    def truth(self) -> dict[str, int]:
        """Different users per page so far: what a real stream's publisher never shows."""
        return dict(self._truth.copy().most_common())

    def _write_all(self) -> None:
        for beat in range(self._beats):
            due = self._start + (beat + 0.25) / BEATS_PER_SECOND
            if self._over.wait(max(0.0, due - time.time())):
                return
            self._write(beat, at=due)

    def _write(self, beat: int, *, at: float) -> None:
        part = self._table.slice(beat * self._each, self._each).select(["user", "page"])
        stamps = pa.array([int(at * 1000)] * len(part), type=pa.int64())
        hidden = self._folder / f".{beat:05d}.csv"
        hidden.write_bytes(csv(part.append_column("at", stamps)))
        hidden.rename(self._folder / f"{beat:05d}.csv")  # complete before it is seen
        seen = zip(part["user"].to_pylist(), part["page"].to_pylist(), strict=True)
        new = set(seen) - self._pairs
        self._pairs |= new
        self._truth.update(page for _, page in new)
        self.rows += len(part)
