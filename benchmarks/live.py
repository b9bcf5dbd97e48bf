"""Several queries over one live directory: rows a second, delays, processor time, rows missed.

A thread moves files into the directory at a steady pace, up to half a second before the last
trigger. Every query publishes every second, all at the same time. The processor time of a row and
query, of everything in this process, says on a busy machine, too, what queries share.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Findings, Progress, Row, target
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.query import Query
from dpstream.query.windows import instant
from dpstream.session import run_all

QUERIES = (1, 5, 20)
_FILES = 20  # a second
_QUIET = 0.5  # seconds before the last trigger in which no file comes
_MICROS = 1_000_000
_MEDIAN, _WORST = 150, 1000  # milliseconds: targets for delays


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much comes, and for how long."""

    rows: int
    """A second."""
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was fed, what each query has read in time, and how long its releases took."""

    fed: int
    seconds: float
    read: list[int]
    delays: list[float]
    cpu: float
    """Seconds, with those of the thread that feeds."""


def measure(*, quick: bool, progress: Progress) -> Findings:
    """One row for each number of queries."""
    plan = Plan(rows=20_000, seconds=5) if quick else Plan(rows=100_000, seconds=20)
    _watched(Plan(rows=1000, seconds=2), 1)  # compiles
    seen = {}
    for number, queries in enumerate(QUERIES):
        progress(number, len(QUERIES), f"{queries} queries")
        seen[queries] = _watched(plan, queries)
    return findings(seen)


def findings(seen: dict[int, Seen]) -> Findings:
    """The table, and whether every query has read every row."""
    rows: list[Row] = [
        {
            "queries": queries,
            "rows_fed": one.fed,
            "rows_read": sum(one.read),
            "rows_per_second": sum(one.read) / one.seconds,
            "cpu_us_per_row": 1e6 * one.cpu / max(sum(one.read), 1),
            "delay_median_ms": 1000 * statistics.median(one.delays) if one.delays else None,
            "delay_worst_ms": 1000 * max(one.delays) if one.delays else None,
            "releases": len(one.delays),
            "rows_missed": sum(one.fed - read for read in one.read),
        }
        for queries, one in seen.items()
    ]
    return Findings(
        rows=rows,
        targets=[each for row in rows for each in _targets(row)],
        notes=[
            "rows_per_second: of all queries together, from the first row fed to the last release",
            "cpu_us_per_row: processor time of this process for a row that one query has read",
            "a delay is from a trigger to when its release was durable in the sink, and handed on",
        ],
    )


def _targets(row: Row) -> list[Row]:
    """What every number of queries is held to."""
    queries, of_none = row["queries"], {"reason": "nothing was released"}
    median, worst = row["delay_median_ms"], row["delay_worst_ms"]
    return [
        target(f"rows missed by {queries} queries", row["rows_missed"], "==", 0),
        target(f"median delay of {queries} queries, ms", median, "<=", _MEDIAN, **of_none),
        target(f"worst delay of {queries} queries, ms", worst, "<=", _WORST, **of_none),
    ]


def _watched(plan: Plan, count: int) -> Seen:
    """Feed a directory, and run queries over it."""
    with tempfile.TemporaryDirectory(prefix="dpstream-bench-") as folder:
        place = Path(folder)
        (place / "in").mkdir()
        start = int(time.time()) + 3  # by then all queries wait
        asked = [_query(number, start, start + plan.seconds) for number in range(count)]
        book = Ledger()
        book.open("stream", asked[0].promise(epsilon=20, delta="1e-2"))
        runs = run_all(
            asked,
            source=place / "in",
            live=True,
            sink=place / "out",
            state=place / "state",
            ledger=book,
            options=EngineOptions(threads=1, buckets=1),
        )
        fed = [0]
        feeder = Thread(target=_feed, args=(place / "in", plan, start, fed))
        feeder.start()
        delays, began = [], time.process_time()
        for _, table in runs:
            now = time.time_ns() // 1000
            due = instant(table["trigger_time"][0].as_py(), "trigger_time")
            delays.append((now - due) / _MICROS)
        seconds = time.time() - start
        feeder.join()
        cpu = time.process_time() - began
        read = [run.operator.read - run.operator.late for run in runs.runs.values()]
    return Seen(fed=fed[0], seconds=seconds, read=read, delays=delays, cpu=cpu)


def _query(number: int, start: int, end: int) -> Query:
    first, last = (datetime.fromtimestamp(at, UTC).isoformat() for at in (start, end))
    return Query(
        name=f"query{number}",
        privacy_unit_column="user",
        keys=["page"],
        public_groups=[f"/{n}" for n in range(10)],
        epsilon="0.2",
        delta="1e-6",
        max_groups_contributed=2,
        time_column="at",
        time_unit="us",
        start=first,
        end=last,
        every="1 second",
    )


def _feed(folder: Path, plan: Plan, start: int, fed: list[int]) -> None:
    """A file many times a second, moved in whole."""
    rng = np.random.default_rng(1)
    size = plan.rows // _FILES
    for number in range(int((plan.seconds - _QUIET) * _FILES)):
        time.sleep(max(0.0, start + number / _FILES - time.time()))
        if time.time() > start + plan.seconds - _QUIET:
            return
        now = np.full(size, time.time_ns() // 1000)
        users = rng.integers(0, 1_000_000, size)
        pages = rng.integers(0, 10, size)
        table = pa.table(
            {
                "user": pa.array(users).cast(pa.string()),
                "page": pa.array([f"/{page}" for page in pages.tolist()]),
                "at": now,
            }
        )
        hidden = folder / f".{number:06d}.parquet"
        pq.write_table(table, hidden)
        os.rename(hidden, folder / hidden.name[1:])
        fed[0] += size
