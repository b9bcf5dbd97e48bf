"""A live directory of very many files: a trigger without news, the first one, a restart, memory.

The clock moves only when the run waits for it, so a trigger takes what its work takes. One file in
twenty has a row, the others none: what a row costs is measured elsewhere (`live`, `throughput`).
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.harness import Findings, Progress, Row, target
from dpstream.connectors.files import source as files
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.query import Query
from dpstream.session import run

BOUND = 50.0
"""Milliseconds that a trigger without news may take, with 100,000 files."""
_TRIGGERS = 40
_ROWS = 20  # one file in this many has a row


class WaitedClock:
    """Time that moves only when it is waited for."""

    real_time = False

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        """The time."""
        return self.time

    def wait(self, until: int, stop: Event) -> None:
        """It is then."""
        self.time = until


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Seconds of the first trigger, of those without news while the directory is listed each time
    and while it is not, and of a restart; of the processor for the first and for one without news;
    mebibytes that the process has grown by, and of its state."""

    first: float
    first_cpu: float
    listed: list[float]
    idle: list[float]
    cpu: float
    restart: float
    grown: float
    state: float


def measure(*, quick: bool, progress: Progress) -> Findings:
    """One row for each number of files."""
    counts = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    _seen(10)  # compiles
    seen = {}
    for number, count in enumerate(counts):
        progress(number, len(counts), f"{count} files")
        seen[count] = _seen(count)
    return findings(seen)


def findings(seen: dict[int, Seen]) -> Findings:
    """The table, and whether triggers without news are quick."""
    rows: list[Row] = [
        {
            "files": count,
            "first_trigger_s": one.first,
            "first_trigger_cpu_s": one.first_cpu,
            "idle_median_ms": 1000 * statistics.median(one.idle),
            "idle_worst_ms": 1000 * max(one.idle),
            "idle_cpu_ms": 1000 * one.cpu,
            "listed_median_ms": 1000 * statistics.median(one.listed),
            "restart_s": one.restart,
            "memory_mib": one.grown,
            "state_mib": one.state,
        }
        for count, one in seen.items()
    ]
    return Findings(
        rows=rows,
        targets=[
            target(f"ms a trigger, {row['files']} files, {kind}", row[f"{kind}_ms"], "<=", BOUND)
            for row in rows
            for kind in ("idle_median", "listed_median")
        ],
        notes=[
            "idle: nothing has come for some seconds; listed: the directory has changed just now",
            "restart: from the start of a run in the state directory to its next release",
            "memory: what the process has grown by since before the first trigger, at its largest",
        ],
    )


def _seen(count: int, *, settle: float = files.COARSE) -> Seen:
    """Make the files, and let a run publish over them."""
    with tempfile.TemporaryDirectory(prefix="dpstream-bench-") as folder:
        place, clock = Path(folder), WaitedClock()
        (place / "in").mkdir()
        for number in range(count):
            row = "" if number % _ROWS else f"user {number},/1,{number % 1000}\n"
            (place / "in" / f"part-{number:08d}.csv").write_text(f"user,page,at\n{row}")
        before = _peak()
        releases = _releases(place, clock)
        used = time.process_time()
        first = _timed(releases)
        first_cpu = time.process_time() - used
        listed = [_timed(releases) for _ in range(_TRIGGERS)]
        time.sleep(settle)
        _timed(releases)  # lists for the last time
        used = time.process_time()
        idle = [_timed(releases) for _ in range(_TRIGGERS)]
        used = time.process_time() - used
        releases.close()
        began = time.perf_counter()
        again = _releases(place, clock)
        next(again)
        restart = time.perf_counter() - began
        again.close()
        state = sum(path.stat().st_size for path in (place / "state").rglob("*"))
    grown = (_peak() - before) / 2**20
    return Seen(
        first=first,
        first_cpu=first_cpu,
        listed=listed,
        idle=idle,
        cpu=used / len(idle),
        restart=restart,
        grown=grown,
        state=state / 2**20,
    )


def _releases(place: Path, clock: WaitedClock) -> Generator[Any, None, None]:
    """What a query publishes every hour of ten days."""
    query = Query(
        privacy_unit_column="user",
        keys=["page"],
        public_groups=["/1", "/2"],
        epsilon=1,
        delta="1e-6",
        max_groups_contributed=1,
        time_column="at",
        time_unit="us",
        start="1970-01-01",
        end="1970-01-11",
        every="1 hour",
    )
    book = Ledger(place / "book")
    book.open("stream", query.promise(epsilon=2, delta="1e-5"))
    yield from run(
        query,
        source=place / "in",
        live=True,
        sink=place / "out",
        state=place / "state",
        ledger=book,
        clock=clock,
        options=EngineOptions(threads=1, buckets=1),
    )


def _timed(releases: Generator[Any, None, None]) -> float:
    began = time.perf_counter()
    next(releases)
    return time.perf_counter() - began


def _peak() -> float:
    """The most memory that this process ever had, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(size if sys.platform == "darwin" else size * 1024)
