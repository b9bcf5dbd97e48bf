"""The Spark engine on a cluster of this machine: speed beside a plain group-by, growth, kills.

Both count the clicks of a day per URL from the same Parquet files, on one cluster, in turns, in as
many micro-batches as there are releases; a ratio compares neighbours in time. The plain group-by
promises nothing and writes its updates nowhere; ours writes every release durably. Ours reads the
same stream as the plain one, or the files with its own reader. Processor time is that of all
processes: on a machine with other work it says more than the clock.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpstream.bench import click_log
from dpstream.bench.click_log import ClickLog
from dpstream.bench.harness import Findings, Progress, Row
from dpstream.bench.recovery_case import published, write_source
from dpstream.bench.spark_cluster import MEMORY_MB, Cluster, peak_mb
from dpstream.bench.spark_kills import ALL, DRIVER, EXECUTOR, Disturbed, compared, disturbed, drawn
from dpstream.bench.spark_plot import draw
from dpstream.bench.spark_runs import Driver, started
from dpstream.bench.spark_state import state_rows
from dpstream.bench.spark_targets import targets
from dpstream.errors import StateError

_SEED: Final = 12
_WARM_UP: Final = 20_000
PLAIN, STREAM, READER = "spark", "dpstream", "dpstream, its own reader"


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
    """One case, both ways: what each round has seen."""

    case: Case
    seen: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {what: [] for what in (PLAIN, STREAM, READER)}
    )
    peaks: dict[str, float] = field(default_factory=dict)

    def times(self, what: str, figure: str) -> float:
        """Ours over theirs, round by round."""
        pairs = zip(self.seen[what], self.seen[PLAIN], strict=True)
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
    for what in (PLAIN, STREAM, READER, STREAM):  # every executor has its turn
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
    if what == PLAIN:
        return driver.ask(job="count", **job)
    return driver.ask(job="clicks", stream=what == STREAM, **job)


def _kill(folder: Path, kinds: Sequence[str], number: int) -> Disturbed:
    """A run that is killed, beside the same run in the embedded engine, undisturbed."""
    from dpstream.bench.recovery_child import go

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
