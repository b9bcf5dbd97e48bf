"""One measured run of the engine over a click log, in a process of its own.

`python -m benchmarks.throughput_run LOG WARM_UP SCRATCH [TABLE]` prints one line of JSON. A fresh
process makes the peak memory that of this run; the log WARM_UP is published first, so that every
loop is compiled and every file of Python is read before the clock starts. With TABLE the clicks are
counted by the title that a table of pages has for each URL.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import dpstream as dps
from benchmarks.click_log import START
from dpstream.engines.embedded.process_memory import keep_freed_memory
from dpstream.engines.query_run import EngineOptions

TRIGGERS: Final = 100
SNAPSHOT_EVERY: Final = 10
EPSILON: Final = 6.0
DELTA: Final = 1e-9
GROUPS: Final = 32


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`grown_mb`: peak memory beyond that of the warm process. `keys`: in the last release."""

    seconds: float
    processor_seconds: float
    releases: int
    keys: int
    peak_mb: float
    grown_mb: float
    snapshot_mb: float


def clicks(triggers: int) -> dps.Query:
    """A day's clicks per URL, published so many times."""
    day = timedelta(days=1)
    return dps.Query(
        name="clicks",
        privacy_unit_column="user_id",
        keys=("url",),
        aggregates=(dps.Count("clicks"),),
        epsilon=EPSILON,
        delta=DELTA,
        time_column="ts",
        window=dps.Tumble("1 day"),
        every=f"{day.total_seconds() / triggers:.0f} seconds",
        start=START,
        end=START + day,
        max_groups_contributed=GROUPS,
        max_rows_per_group=1,
    )


def by_title(triggers: int, table: Path) -> dps.Query:
    """The same of titles: each URL has one in a public table."""
    text = """SELECT WITH DIFFERENTIAL_PRIVACY
        OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user_id, time_column = ts,
                 start = '2023-07-01', end = '2023-07-02', max_groups_contributed = 1)
        title, COUNT(*) AS clicks FROM clicks JOIN pages USING (url) GROUP BY title"""
    joined = dps.with_tables(dps.sql(text, max_rows_per_group=1), public={"pages": table})
    return replace(clicks(triggers), keys=("title",), prepare=joined.prepare)


def publish(log: Path, place: Path, table: Path | None = None) -> tuple[int, int, int]:
    """Publish a day's counts per URL, durably; how many releases, keys and bytes of snapshots."""
    keep_freed_memory()  # as the command line does
    run = dps.run(
        clicks(TRIGGERS) if table is None else by_title(TRIGGERS, table),
        source=str(log / "*.parquet"),
        sink=str(place / "out"),
        state=place / "state",
        options=EngineOptions(snapshot_every=SNAPSHOT_EVERY),
    )
    releases = keys = stored = 0
    for release in run:
        releases, keys = releases + 1, release.num_rows
        if releases == TRIGGERS - 1:  # the last one ends the window, and its state goes
            stored = _bytes_under(place / "state" / "segments")
    return releases, keys, stored


def _bytes_under(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def measured(log: Path, warm_up: Path, scratch: Path, table: Path | None = None) -> Measured:
    """Publish `warm_up`, then `log` against the clock."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        publish(warm_up, Path(place), table)
    before = _resident_mb()
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        began, processor = time.perf_counter(), time.process_time()
        releases, keys, stored = publish(log, Path(place), table)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(
        seconds=seconds,
        processor_seconds=processor,
        releases=releases,
        keys=keys,
        peak_mb=peak,
        grown_mb=peak - before,
        snapshot_mb=stored / 2**20,
    )


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    print(json.dumps(asdict(measured(*map(Path, sys.argv[1:5])))))
