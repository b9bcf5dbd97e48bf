"""The Spark engine on a cluster of this machine: speed beside a plain group-by, growth, kills.

Both count the clicks of a day per URL from the same Parquet files, on one cluster, in turns, in as
many micro-batches as there are releases; a ratio compares neighbours in time. The plain group-by
promises nothing and writes its updates nowhere; beside it Spark counts every user of a URL once,
which is our work without privacy. Ours writes every release durably. Ours reads the
same stream as the plain one, or the files with its own reader. Processor time is that of all
processes: on a machine with other work it says more than the clock.

What a bucket's state costs is measured in this process, without a cluster: one bucket of units and
one of groups, filled with a log by the tasks themselves, so the figures are the engine's own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks import click_log
from benchmarks.click_log import ClickLog
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.recovery_case import published, write_source
from benchmarks.spark_cluster import (
    ALL,
    DRIVER,
    EXECUTOR,
    MEMORY_MB,
    Cluster,
    Disturbed,
    Driver,
    compared,
    disturbed,
    drawn,
    peak_mb,
    started,
)
from benchmarks.throughput_run import clicks
from dpstream.connectors.registry import open_source
from dpstream.engines.spark import bucket_files, tasks
from dpstream.engines.spark.bucket_files import SharedFiles
from dpstream.engines.spark.shuffle_rows import by_number, unpack_packets
from dpstream.engines.spark.tasks import Keys, PublishTask, ReadTask
from dpstream.errors import StateError
from dpstream.privacy.state import Secret
from dpstream.query.noise_plan import plan_query
from dpstream.records import Source
from dpstream.rows.row_batch import RowKeys

_SEED: Final = 12
_WARM_UP: Final = 20_000
PLAIN, DISTINCT = "spark", "spark, distinct"
STREAM, READER = "dpstream", "dpstream, its own reader"
WAYS: Final = (PLAIN, STREAM, READER, DISTINCT)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A log, how many micro-batches it comes in, and how many executors there are."""

    executors: int
    records: int
    keys: int
    batches: int
    uniform: bool = False

    @property
    def log(self) -> ClickLog:
        """The log."""
        return ClickLog(records=self.records, keys=self.keys, uniform=self.uniform)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: cases in order of executors, rounds of each, and the kills of each run."""

    cases: tuple[Case, ...]
    rounds: int
    kills: tuple[tuple[str, ...], ...]
    state: ClickLog
    """What a bucket's state is measured with."""


_MILLION: Final = 1_000_000
FULL: Final = Plan(
    cases=(
        Case(executors=2, records=5 * _MILLION, keys=_MILLION, batches=1),
        Case(executors=2, records=5 * _MILLION, keys=_MILLION, batches=4),
        Case(executors=2, records=5 * _MILLION, keys=_MILLION, batches=24),
        Case(executors=2, records=5 * _MILLION, keys=_MILLION // 10, batches=4),
        Case(executors=2, records=3 * _MILLION, keys=_MILLION, batches=6, uniform=True),
        Case(executors=1, records=5 * _MILLION, keys=_MILLION, batches=4),
    ),
    rounds=3,
    kills=(
        (EXECUTOR, EXECUTOR, EXECUTOR, EXECUTOR),
        (DRIVER, DRIVER, DRIVER),
        (EXECUTOR, DRIVER, ALL, DRIVER, EXECUTOR),
    ),
    state=ClickLog(records=6 * _MILLION, keys=_MILLION, uniform=True),
)
QUICK: Final = Plan(
    cases=(Case(executors=2, records=_MILLION // 2, keys=_MILLION // 10, batches=2),),
    rounds=1,
    kills=(),
    state=ClickLog(records=_MILLION // 10, keys=_MILLION // 60, uniform=True),
)


@dataclass(kw_only=True)
class Lane:
    """One case, every way: what each round has seen."""

    case: Case
    seen: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {what: [] for what in WAYS}
    )
    peaks: dict[str, float] = field(default_factory=dict)

    def times(self, what: str, figure: str, than: str = PLAIN) -> float:
        """Ours over theirs, round by round."""
        pairs = zip(self.seen[what], self.seen[than], strict=True)
        return statistics.median(float(our[figure] / their[figure]) for our, their in pairs)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Every case in turns; then runs that are killed and must publish the same bytes."""
    plan = QUICK if quick else FULL
    lanes = [Lane(case=case) for case in plan.cases]
    total, done = plan.rounds * len(lanes) + len(plan.kills), 0
    for lane in lanes:
        click_log.files(lane.case.log)
    with tempfile.TemporaryDirectory(dir=click_log.cache(), prefix="spark-") as folder:
        for size in sorted({lane.case.executors for lane in lanes}, reverse=True):
            here = [lane for lane in lanes if lane.case.executors == size]
            with started(Cluster(folder=Path(folder) / f"of{size}", executors=size)) as driver:
                driver.answer()
                _warm_up(driver, Path(folder))
                for number in range(plan.rounds):
                    for lane in here:
                        progress(done, total, f"{size} executors, {lane.case.keys:,} keys")
                        _take(driver, lane, Path(folder), number)
                        done += 1
        killed: list[Disturbed] = []
        for kinds in plan.kills:
            progress(done, total, f"killing {len(kinds)} times")
            try:
                killed.append(_kill(Path(folder) / f"kill{len(killed)}", kinds, len(killed)))
            except StateError as problem:  # it is a finding, too, and the rest is not lost
                killed.append(Disturbed(kills=list(kinds), difference=str(problem)))
            done += 1
    progress(total, total, "done")
    rows = [row for lane in lanes for row in _rows(lane)]
    rows += [_kill_row(one) for one in killed]
    rows += state_rows(plan.state)
    return Findings(
        rows=rows,
        targets=targets(rows, killed),
        peers={"pyspark": _version()},
        notes=[f"each executor has a core and {MEMORY_MB} MB; the driver shares their cores"],
        draw=lambda figure: draw(figure, rows),
    )


def _version() -> str:
    import pyspark

    found: str = pyspark.__version__
    return found


def _warm_up(driver: Driver, scratch: Path) -> None:
    """Load code, compile loops and start Python workers, all ways."""
    log = ClickLog(records=_WARM_UP)
    for what in (*WAYS, STREAM):  # every executor has its turn
        _ask(driver, what, log, batches=2, scratch=scratch)


def _take(driver: Driver, lane: Lane, scratch: Path, number: int) -> None:
    """One round of one case; who goes first moves on from round to round."""
    whats = list(lane.seen)
    first = number % len(whats)
    for what in whats[first:] + whats[:first]:
        found = _ask(driver, what, lane.case.log, batches=lane.case.batches, scratch=scratch)
        lane.seen[what].append(found)
    lane.peaks = peak_mb(driver.pid)


def _ask(
    driver: Driver, what: str, log: ClickLog, *, batches: int, scratch: Path
) -> dict[str, Any]:
    job = {"folder": str(click_log.files(log)), "scratch": str(scratch), "batches": batches}
    if what in (PLAIN, DISTINCT):
        return driver.ask(job="count", **job, distinct=what == DISTINCT)
    return driver.ask(job="clicks", stream=what == STREAM, **job)


def _kill(folder: Path, kinds: Sequence[str], number: int) -> Disturbed:
    """A run that is killed, beside the same run in the embedded engine, undisturbed."""
    from benchmarks.recovery_child import go

    rng = np.random.default_rng([_SEED, number])
    source = str(write_source(folder / "source")[0])
    go({"folder": str(folder / "whole"), "source": source, "fixed": True}, lambda: None)
    expected = published(folder / "whole")
    releases = sum(name.endswith(".parquet") for name in expected)
    cluster = Cluster(folder=folder / "cluster", speculate=True, hasty=True)
    job = {"job": "publish", "source": source}
    found = disturbed(cluster, folder / "run", job, drawn(kinds, releases, rng))
    return compared(found, folder / "run", expected)


def _rows(lane: Lane) -> list[Row]:
    log = click_log.about(click_log.files(lane.case.log))
    rows = []
    for what, seen in lane.seen.items():
        seconds = statistics.median(one["seconds"] for one in seen)
        row: Row = {
            "library": what,
            "executors": lane.case.executors,
            "records": lane.case.records,
            "keys": log["keys"],
            "units": log["users"],
            "batches": lane.case.batches,
            "seconds": seconds,
            "cpu_seconds": statistics.median(one["cpu_seconds"] for one in seen),
            "records_per_second": round(lane.case.records / seconds),
            "keys_out": seen[-1]["keys"],
        }
        if what != PLAIN:
            times = {name: lane.times(what, name) for name in ("seconds", "cpu_seconds")}
            row |= {"times_slower": times["seconds"], "times_cpu": times["cpu_seconds"]}
        if what in (STREAM, READER):
            row["times_distinct"] = lane.times(what, "seconds", DISTINCT)
            row["times_distinct_cpu"] = lane.times(what, "cpu_seconds", DISTINCT)
            row |= lane.peaks
        rows.append(row)
    return rows


def _kill_row(found: Disturbed) -> Row:
    waits = [seconds for _, seconds in found.waits]
    return {
        "library": STREAM,
        "executors": 2,
        "killed": ", ".join(found.kills),
        "kills": len(found.kills),
        "starts": found.starts,
        "seconds": found.seconds,
        "next_release_seconds": statistics.median(waits) if waits else None,
        "identical": not found.difference,
        "note": found.difference,
    }


_TRIGGERS: Final = 24
_RUN: Final = bytes(16)


def state_rows(log: ClickLog) -> list[Row]:
    """Rows of the bench: records that wait, units and their groups, groups."""
    source = open_source(str(click_log.files(log) / "*.parquet"))
    with tempfile.TemporaryDirectory(dir=click_log.cache()) as folder:
        return _measured(log, source, SharedFiles(folder))


def _measured(log: ClickLog, source: Source, files: SharedFiles) -> list[Row]:
    common: dict[str, Any] = {
        "plan": plan_query(clicks(_TRIGGERS)),
        "types": {"user_id": pa.string(), "url": pa.string()},
        "buckets": 1,
        "files": files,
        "opener": b"",
        "keys": Keys(rows=RowKeys.of(Secret(bytes(32)), _RUN)),
    }
    parts = tuple(source.partitions())
    takes = ReadTask(**common, job="read", where="", arrived=None, source=source, partitions=parts)
    read, rows = _timed(lambda: list(tasks.read_source(takes, _numbered(len(parts)))))
    kept, told = _timed(lambda: list(tasks.keep_rows(takes, iter(rows))))
    files_of = [one["file"] for one in _notes(told) if "file" in one]
    bounds = PublishTask(
        **common,
        job="bound",
        first=0,
        end=_TRIGGERS - 1,
        waiting=[bucket_files.Waiting(*one) for one in files_of],
        units={},
        groups={},
        begins={},
        remembered={},
        chosen={},
    )
    bounded, sent = _timed(lambda: list(tasks.bound(bounds, _numbered(1))))
    flow = bounds.flow(0)
    added, _ = _timed(lambda: _add(bounds, flow, unpack_packets(sent)[1][0]))
    chains: dict[str, list[bucket_files.Stored]] = {}
    stored, _ = bucket_files.save(files, flow, "groups", "state/groups.dps", (), {})
    chains["groups"] = [stored]
    chains["units"] = [tuple(one["segment"]) for one in _notes(sent) if "stage" in one]
    found = []
    for stage, chain in chains.items():
        again = replace(bounds, job="again").flow(0)
        seconds, _ = _timed(lambda: bucket_files.load_segments(files, again, stage, chain))  # noqa: B023
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


def _add(task: PublishTask, flow: Any, table: pa.Table) -> None:
    for _, of_step in by_number(table, "step"):
        for window, mine in by_number(of_step, "window"):
            tasks.add(task, flow, window, mine)


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


SLOWER: Final = 1.5
EXECUTORS: Final = 2


def targets(rows: Sequence[Row], killed: Sequence[Disturbed]) -> list[Row]:
    """The ratio in every case with two executors, and the same bytes after every kill."""
    judged = [
        target(
            f"{row['library']}: times slower than the plain group-by, {row['records']:,} records, "
            f"{row['keys']:,} keys, micro-batches: {row['batches']}",
            row["times_slower"],
            "<=",
            SLOWER,
        )
        for row in rows
        if row.get("times_distinct") is not None and row["executors"] == EXECUTORS
    ]
    if not killed:
        why = "a short run kills nothing"
        return [*judged, target("killed runs with identical bytes", None, "==", 1, reason=why)]
    same = sum(not one.difference for one in killed) / len(killed)
    return [*judged, target("share of killed runs with identical bytes", same, "==", 1.0)]


_LOOKS = {
    "dpstream": ("#0b6e99", "dpstream"),
    "dpstream, its own reader": ("#7fb6cc", "dpstream, its own reader"),
    "spark": ("#c98a1b", "plain group-by (no privacy)"),
    "spark, distinct": ("#8c6d31", "distinct users (no privacy)"),
}
_WIDTH = 0.21


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Bars side by side."""
    panel = figure.subplots()
    cases: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        if "records_per_second" in row:
            case = (row["executors"], row["keys"], row["batches"])
            cases.setdefault(case, {})[row["library"]] = row["records_per_second"]
    for number, (library, (colour, label)) in enumerate(_LOOKS.items()):
        places = [place + _WIDTH * number for place in range(len(cases))]
        heights = [speeds.get(library, 0.0) for speeds in cases.values()]
        panel.bar(places, heights, width=0.9 * _WIDTH, color=colour, label=label)
    names = [
        f"{executors} executor{'s' * (executors > 1)}\n{keys:,} keys\n{batches} micro-batches"
        for executors, keys, batches in cases
    ]
    panel.set(ylabel="records per second", xticks=[n + 1.5 * _WIDTH for n in range(len(cases))])
    panel.set_xticklabels(names)
    panel.grid(alpha=0.25, axis="y")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
