"""What a bucket's state costs: bytes on disk and in memory, and processor time to take it up again.

One bucket of units and one of groups, filled with a log by the tasks themselves, in this process:
no cluster, so the figures are the engine's own. Times are this process's, not the clock's.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dpstream.bench import click_log
from dpstream.bench.click_log import ClickLog
from dpstream.bench.harness import Row
from dpstream.bench.throughput_run import clicks
from dpstream.connectors.sources import open_source
from dpstream.engines.spark import publishing, reading, segments, waiting
from dpstream.engines.spark.files import SharedFiles
from dpstream.engines.spark.packets import by_number, opened
from dpstream.engines.spark.publishing import Publishing
from dpstream.engines.spark.reading import Reading
from dpstream.engines.spark.tasks import Keys
from dpstream.privacy.state import Secret
from dpstream.records import Source
from dpstream.stages.plan import planned
from dpstream.stages.rows import RowKeys

_TRIGGERS: Final = 24
_RUN: Final = bytes(16)


def state_rows(log: ClickLog) -> list[Row]:
    """Rows of the bench: records that wait, units and their groups, groups."""
    source = open_source(str(click_log.files(log) / "*.parquet"))
    with tempfile.TemporaryDirectory(dir=click_log.cache()) as folder:
        return _measured(log, source, SharedFiles(folder))


def _measured(log: ClickLog, source: Source, files: SharedFiles) -> list[Row]:
    common: dict[str, Any] = {
        "plan": planned(clicks(_TRIGGERS)),
        "types": {"user_id": pa.string(), "url": pa.string()},
        "buckets": 1,
        "files": files,
        "opener": b"",
        "keys": Keys(rows=RowKeys.of(Secret(bytes(32)), _RUN)),
    }
    parts = tuple(source.partitions())
    takes = Reading(**common, job="read", where="", arrived=None, source=source, partitions=parts)
    read, rows = _timed(lambda: list(reading.read_source(takes, _numbered(len(parts)))))
    kept, told = _timed(lambda: list(reading.keep_rows(takes, iter(rows))))
    files_of = [one["file"] for one in _notes(told) if "file" in one]
    bounds = Publishing(
        **common,
        job="bound",
        first=0,
        end=_TRIGGERS - 1,
        waiting=[waiting.Waiting.from_json(one) for one in files_of],
        units={},
        groups={},
    )
    bounded, sent = _timed(lambda: list(publishing.bound(bounds, _numbered(1))))
    flow = bounds.flow(0)
    added, _ = _timed(lambda: _add(bounds, flow, opened(sent)[1][0]))
    chains: dict[str, list[segments.Stored]] = {}
    stored, _ = segments.save(files, flow, "groups", "state/groups.dps", (), {})
    chains["groups"] = [stored]
    chains["units"] = [tuple(one["segment"]) for one in _notes(sent) if "stage" in one]
    found = []
    for stage, chain in chains.items():
        again = replace(bounds, job="again").flow(0)
        seconds, _ = _timed(lambda: segments.load(files, again, stage, chain))  # noqa: B023
        size = sum(size for _, size, _ in chain)
        entries, held = _entries(again, stage)
        found.append(
            {
                "library": "dpstream",
                "state": stage,
                "entries": entries,
                "bytes_each": size / max(entries, 1),
                "memory_each": held / max(entries, 1),
                "load_us_each": seconds * 1e6 / max(entries, 1),
            }
        )
    size = sum(_size(files, one[1]) for one in files_of)
    total = read + kept + bounded + added
    waits = {"library": "dpstream", "state": "records", "entries": log.records}
    found.append(
        waits | {"bytes_each": size / log.records, "load_us_each": total * 1e6 / log.records}
    )
    return found


def _add(task: Publishing, flow: Any, table: pa.Table) -> None:
    for _, of_step in by_number(table, "step"):
        for window, mine in by_number(of_step, "window"):
            publishing.add(task, flow, window, mine)


def _entries(flow: Any, stage: str) -> tuple[int, int]:
    """How many entries a bucket has, and the memory that they take."""
    state = flow.state
    if stage == "groups":
        buckets = [bucket for several in state.windows.values() for bucket in several]
        return sum(one.table.used for one in buckets), sum(one.bytes for one in buckets)
    kinds = [kind for one in state.units for kind in (one.periods, one.windows)]
    tables = [table for kind in kinds for table in kind.values()]
    return sum(one.used for one in tables), sum(one.bytes for one in tables)


def _numbered(count: int) -> Any:
    return iter([pa.record_batch({"id": pa.array(range(count), pa.int64())})])


def _notes(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    texts = [text for one in batches for text in one["note"].to_pylist() if text]
    return [json.loads(text) for text in texts]


def _size(files: SharedFiles, name: str) -> int:
    return (Path(files.location) / name).stat().st_size


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds, and what came out."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found
