"""How fast rows come from each source and releases go into each sink, beside files.

Servers are started here, on loopback, from the system's packages; one that is absent has a row that
says so. A source is read to its end by the same calls that the engine makes, without the engine. A
sink gets one release after another, each durable before the next. Last, a topic is published into
PostgreSQL by a run that is killed again and again, beside one that is not.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dpstream.bench.connector_kills import Storm
from dpstream.bench.connector_storm import STORM, judged, killed
from dpstream.bench.connector_systems import SYSTEMS, System
from dpstream.bench.harness import Findings, Progress, Row
from dpstream.connectors.sinks import open_sink
from dpstream.connectors.sources import open_source

_SEED: Final = 13
_BASE: Final = {"source": "JSON lines", "sink": "Parquet"}
_DEADLINE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rows: int
    releases: int
    release_rows: int
    times: int
    storm: Storm


FULL: Final = Plan(
    rows=500_000,
    releases=50,
    release_rows=10_000,
    times=3,
    storm=Storm(kills=30, restarts=2, rows=1_000, longest=1.5),
)
QUICK: Final = Plan(
    rows=20_000,
    releases=5,
    release_rows=2_000,
    times=1,
    storm=Storm(kills=4, restarts=1, rows=200),
)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Each system in turn: sources, then sinks."""
    plan = QUICK if quick else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="dpstream-connectors-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # PostgreSQL does not run as root, and must get in
        for number, kind in enumerate(SYSTEMS):
            system = kind()
            progress(number, len(SYSTEMS), system.name)
            rows += _rows(system, place / str(number), plan)
        row = killed(place / "storm", plan.storm, partial(_told, progress, plan.storm))
    progress(len(SYSTEMS), len(SYSTEMS), "done")
    return Findings(
        rows=[*_compared(rows), row],
        targets=[judged(row)],
        notes=_notes(plan),
    )


def _told(progress: Progress, plan: Storm, kills: int) -> None:
    progress(len(SYSTEMS) - 1, len(SYSTEMS), f"{STORM}, killed {kills} of {plan.kills} times")


def _notes(plan: Plan) -> list[str]:
    sources = (
        f"sources: {plan.rows:,} rows of three columns, read to the end; the median of "
        f"{plan.times} after one that is not counted"
    )
    sinks = (
        f"sinks: {plan.releases} releases of {plan.release_rows:,} rows, each there for good "
        "before the next"
    )
    storm = (
        f"Kafka to PostgreSQL: {plan.storm.sent:,} messages; both tables of releases and the dead "
        "letters are compared whole"
    )
    files = "times files: JSON lines from a file for sources, Parquet files for sinks"
    return [sources, sinks, files, storm]


def clicks(rows: int) -> pa.Table:
    """Who looked at what, and when."""
    rng = np.random.default_rng(_SEED)
    users = rng.integers(0, max(rows // 10, 1), rows)
    return pa.table(
        {
            "user": [f"user-{number}" for number in users.tolist()],
            "page": [f"/page/{number}" for number in (rng.zipf(1.5, rows) % 1000).tolist()],
            "at": pa.array(1_700_000_000 + np.arange(rows), pa.int64()),
        }
    )


def _rows(system: System, folder: Path, plan: Plan) -> Iterator[Row]:
    reason = system.absent()
    if reason is not None:
        yield {"system": system.name, "note": f"left out: {reason}"}
        return
    folder.mkdir()
    folder.chmod(0o755)
    system.start(folder / "data" if system.package else folder)
    try:
        for word, source in system.fill(clicks(plan.rows)).items():
            seconds = [_read(source, plan.rows) for _ in range(plan.times + 1)]
            yield _row(system, "source", word, plan.rows, median(seconds[1:]), 0)
        for word, sink in system.sinks().items():
            total = plan.releases * plan.release_rows
            yield _row(system, "sink", word, total, _written(sink, plan), plan.releases)
    finally:
        system.stop()


def _row(system: System, role: str, word: str, rows: int, seconds: float, releases: int) -> Row:
    return {
        "system": system.name,
        "role": role,
        "how": word,
        "records_per_second": rows / seconds,
        "releases_per_second": releases / seconds if releases else None,
    }


def _read(spec: Any, rows: int) -> float:
    """Seconds from the first read to the last row."""
    source = open_source(spec)
    try:
        partitions, positions, count = source.partitions(), dict[str, Any](), 0
        began = time.perf_counter()
        while count < rows:
            for name in partitions:
                batch = source.read(name, positions.get(name), columns=["user", "page", "at"])
                positions[name] = batch.position
                count += batch.table.num_rows
            if time.perf_counter() - began > _DEADLINE:
                raise TimeoutError(f"{spec} gave {count} of {rows} rows in {_DEADLINE} s")
        return time.perf_counter() - began
    finally:
        source.close()


def _written(spec: Any, plan: Plan) -> float:
    """Seconds for all releases, after one that makes tables and the like."""
    rng = np.random.default_rng(_SEED)
    sink = open_sink(spec)
    assert sink is not None
    try:
        began = 0.0
        for number in range(plan.releases + 1):
            sink.write("bench", 0, number, _release(number, plan.release_rows, rng))
            began = began or time.perf_counter()
        return time.perf_counter() - began
    finally:
        sink.close()


def _release(number: int, rows: int, rng: np.random.Generator) -> pa.Table:
    about = {"query": "bench", "run": "bench", "window": 0, "release_index": number}
    table = pa.table(
        {
            "page": [f"/page/{key}" for key in range(rows)],
            "clicks": rng.normal(size=rows),
            "clicks_stddev": np.full(rows, 1.5),
        }
    )
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def _compared(rows: list[Row]) -> list[Row]:
    """Each row with how often its figure is that of files."""
    base = {
        role: next(
            row["records_per_second"]
            for row in rows
            if (row.get("role"), row.get("how")) == (role, how)
        )
        for role, how in _BASE.items()
    }
    return [
        row | {"times_files": row["records_per_second"] / base[row["role"]]}
        if "role" in row
        else row
        for row in rows
    ]
