"""Records per second from Parquet files to durable releases, beside the peers on the same files.

Ours: a day of clicks per URL in 100 triggers, every one of them fsynced, a snapshot every 10. The
peers count the same rows once (Spark: by micro-batches). Every library may use every core; rounds
go through the libraries in turns, and ratios compare neighbours in time. Files are read once before
the clock starts, so that all read from memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks import click_log
from benchmarks.click_log import ClickLog
from benchmarks.harness import Findings, Progress, Row, child_environment, target
from benchmarks.peers import PeerError, Peers, started
from benchmarks.throughput_run import DELTA, EPSILON, GROUPS

_WARM_UP: Final = 20_000
_PATIENCE: Final = 900.0  # seconds for one run of ours
_SYNCS: Final = 50
_PAGES: Final = 100_000  # rows of the table that is joined


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which library meets which size, and how often; Spark with how many files a micro-batch."""

    sizes: tuple[int, ...]
    one_shot: int
    spark: int
    spark_files: tuple[int, ...]
    rounds: int
    joined: int = 1_000_000
    """Records of the log that is joined to a table."""


FULL: Final = Plan(
    sizes=(1_000_000, 10_000_000, 60_000_000),
    one_shot=1_000_000,
    spark=10_000_000,
    spark_files=(1, click_log.FILES),
    rounds=3,
    joined=10_000_000,
)
QUICK: Final = Plan(
    sizes=(200_000, 1_000_000),
    one_shot=200_000,
    spark=1_000_000,
    spark_files=(click_log.FILES,),
    rounds=1,
)


@dataclass(kw_only=True)
class Lane:
    """One library at one size: what each round has seen, or why nothing was."""

    library: str
    records: int
    what: str
    asked: dict[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    @property
    def rates(self) -> list[float]:
        """Records per second, by round."""
        return [self.records / one["seconds"] for one in self.seen]


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Every library at its sizes, in turns."""
    plan = QUICK if quick else FULL
    lanes = _lanes(plan)
    total, done = len(plan.sizes) + plan.rounds * len(lanes), 0
    for records in (_WARM_UP, *plan.sizes):
        progress(min(done, total), total, f"a log of {records:,} records")
        _read_once(click_log.files(ClickLog(records=records)))
        done += records != _WARM_UP
    versions: dict[str, str] = {}
    for records in plan.sizes:
        here = [lane for lane in lanes if lane.records == records]
        # A process for each library: its peak memory is its own, and gone before the next size.
        with ExitStack() as stack:
            peers = {
                name: stack.enter_context(started("group_by_counts"))
                for name in dict.fromkeys(lane.library for lane in here)
                if name != OURS
            }
            for each in peers.values():
                versions |= each.versions
            for _ in range(plan.rounds):
                for lane in here:
                    progress(done, total, f"{lane.library}, {records:,} records")
                    _take(lane, peers.get(lane.library))
                    done += 1
    progress(total, total, "a join")
    joined = _joined(plan.joined, plan.rounds)
    rows = [_row(lane, lanes) for lane in lanes]
    progress(total, total, "more and more cores")
    by_cores = [row for cores in _cores() for row in _on_cores(cores, plan)]
    cores, sync = len(os.sched_getaffinity(0)), _sync_ms()
    return Findings(
        rows=[*rows, joined, *by_cores],
        targets=[
            *targets(rows, plan.one_shot, plan.spark),
            *targets_of_cores(by_cores),
            target(
                f"share of the speed that a join to {_PAGES:,} rows costs",
                joined["cost"],
                "<=",
                JOIN_COST,
                reason=joined["note"],
            ),
        ],
        peers=versions,
        notes=[f"{cores} cores for every library; an idle disk takes {sync:.2g} ms for an fsync"],
        draw=lambda figure: draw(figure, rows, PER_SECOND),
    )


def _lanes(plan: Plan) -> list[Lane]:
    found = []
    for records in plan.sizes:
        found.append(Lane(library=OURS, records=records, what="100 durable releases"))
        found.append(Lane(library="polars", records=records, what="plain group-by"))
        if records == plan.one_shot:
            found += [
                Lane(library=name, records=records, what="one private release")
                for name in ("opendp", "pipeline-dp")
            ]
        if records == plan.spark:
            for files in plan.spark_files:
                batches = -(-click_log.FILES // files)
                what = f"plain streaming group-by, {batches} micro-batch{'es' * (batches > 1)}"
                asked = {"files": files}
                found.append(Lane(library="spark", records=records, what=what, asked=asked))
    return found


def _take(lane: Lane, peers: Peers | None) -> None:
    """One round of one lane; a library that once could not is left out from there on."""
    if lane.note:
        return
    try:
        if peers is None:
            lane.seen.append(_ours(lane.records))
            return
        if not lane.seen:  # loads its code, starts its JVM, fills its caches
            _theirs(peers, lane, _WARM_UP)
        lane.seen.append(_theirs(peers, lane, lane.records))
    except PeerError as error:
        lane.note = str(error)


def _theirs(peers: Peers, lane: Lane, records: int) -> dict[str, Any]:
    return peers.ask(
        library=lane.library,
        folder=str(click_log.files(ClickLog(records=records))),
        scratch=str(click_log.cache()),
        records=records,
        epsilon=EPSILON,
        delta=DELTA,
        groups=GROUPS,
        **lane.asked,
    )


def _joined(records: int, rounds: int) -> Row:
    """Clicks by URL, and by the title that a table of as many URLs has for each, in turns."""
    keys = min(_PAGES, records)
    folder = click_log.files(ClickLog(records=records, keys=keys))
    _read_once(folder)
    urls = click_log.urls(keys)
    table = folder.with_name(f"{folder.name}-pages.parquet")
    pq.write_table(pa.table({"url": urls, "title": pc.replace_substring(urls, "/", " ")}), table)
    costs, processor, note = [], [], ""
    for _ in range(rounds):
        try:
            plain, joined = (_ours(records, keys=keys, table=each) for each in (None, table))
        except PeerError as error:
            note = str(error)
            break
        costs.append(1 - plain["seconds"] / joined["seconds"])
        processor.append(1 - plain["processor_seconds"] / joined["processor_seconds"])
    return {
        "records": records,
        "library": f"{OURS}, joined",
        "what": f"100 durable releases, joined to a table of {keys:,} rows",
        "cost": statistics.median(costs) if costs else None,
        "cost_in_processor_time": statistics.median(processor) if processor else None,
        "note": note,
    }


def _cores() -> list[int]:
    """1, 2, 4 and so on, and as many as there are."""
    every = len(os.sched_getaffinity(0))
    return sorted({every, *(2**n for n in range(every.bit_length()) if 2**n < every)})


def _on_cores(cores: int, plan: Plan) -> Iterator[Row]:
    """Ours, the distinct count and the plain group-by on the first `cores` cores, in turns."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:cores]))  # what is started here inherits it
    try:
        for records in plan.sizes:
            lanes = [Lane(library=name, records=records, what="") for name in (OURS, *_RIVALS)]
            with started("group_by_counts") as peers:
                for _ in range(plan.rounds):
                    for lane in lanes:
                        _take(lane, None if lane.library == OURS else peers)
            yield {
                "records": records,
                "library": f"{OURS}, by cores",
                "what": f"on {cores} cores",
                "cores": cores,
                "note": next((lane.note for lane in lanes if lane.note), ""),
            } | {
                f"{lane.library} s": min((one["seconds"] for one in lane.seen), default=None)
                for lane in lanes
            }
    finally:
        os.sched_setaffinity(0, allowed)


def targets_of_cores(rows: Sequence[Row]) -> list[Row]:
    """Ours beside the distinct count over a large log, a small log, and cores that only help."""
    found = {(row["cores"], row["records"]): row for row in rows}
    judged: list[Row] = []
    for cores, bound in DISTINCT_TIMES.items():
        row = found.get((cores, LARGE), {"note": "no such log, or no so many cores, in this run"})
        ours, theirs = row.get(f"{OURS} s"), row.get(f"{_RIVALS[0]} s")
        value = ours / theirs if ours and theirs else None
        name = f"times polars' distinct count, {LARGE:,} records, {cores} cores"
        judged.append(target(name, value, "<=", bound, reason=_why(row)))
    for records in dict.fromkeys(row["records"] for row in rows):
        seconds = [row[f"{OURS} s"] for row in rows if row["records"] == records]
        slower = [after / before for before, after in pairwise(seconds) if before and after]
        judged.append(
            target(
                f"time after more cores over that before, {records:,} records",
                max(slower, default=None),
                "<=",
                NO_SLOWER,
                reason="there is one core, or a run failed",
            )
        )
    return judged


def _ours(records: int, *, keys: int = 1_000_000, table: Path | None = None) -> dict[str, Any]:
    logs = [click_log.files(ClickLog(records=size, keys=keys)) for size in (records, _WARM_UP)]
    command = [sys.executable, "-m", "benchmarks.throughput_run", *map(str, logs)]
    # The scratch folder is made here: a run that is ended leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=click_log.cache()) as scratch:
        try:
            done = subprocess.run(
                [*command, scratch, *([] if table is None else [str(table)])],
                env=child_environment(),
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"the run took more than {_PATIENCE:.0f} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise PeerError(" ".join(["the run failed:", *last]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(lane: Lane, lanes: Sequence[Lane]) -> Row:
    """Bytes per unit and per key: all the memory that a run adds, over the one and the other."""
    log = click_log.about(click_log.files(ClickLog(records=lane.records)))
    ours = next(one for one in lanes if (one.library, one.records) == (OURS, lane.records))
    ratios = [mine / theirs for mine, theirs in zip(ours.rates, lane.rates, strict=False)]
    last = lane.seen[-1] if lane.seen else {}
    grown = max((one["grown_mb"] for one in lane.seen if "grown_mb" in one), default=None)
    return {
        "records": lane.records,
        "library": lane.library,
        "what": lane.what,
        "records_per_second": round(statistics.median(lane.rates)) if lane.rates else None,
        "times_slower": statistics.median(ratios) if ratios else None,
        "seconds": statistics.median(one["seconds"] for one in lane.seen) if lane.seen else None,
        "keys": last.get("keys"),
        "peak_mb": max((one["peak_mb"] for one in lane.seen if one["peak_mb"]), default=None),
        "snapshot_mb": last.get("snapshot_mb"),
        "bytes_per_unit": None if grown is None else grown * 2**20 / log["users"],
        "bytes_per_key": None if grown is None else grown * 2**20 / log["keys"],
        "note": lane.note,
    }


def _read_once(folder: Path) -> None:
    for path in sorted(folder.glob("*.parquet")):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _sync_ms() -> float:
    """The median time of an fsync after a small write, where the runs keep their state."""
    seconds = []
    with tempfile.NamedTemporaryFile(dir=click_log.cache()) as file:
        for _ in range(_SYNCS):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"a line of a log", 0)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


OURS: Final = "dpstream"
PER_SECOND: Final = 3_000_000
TIMES: Final = {"opendp": 15, "pipeline-dp": 30}
FLAT: Final = (10_000_000, 60_000_000, 1.3)
JOIN_COST: Final = 0.3
_RIVALS: Final = ("polars, distinct", "polars")
DISTINCT_TIMES: Final = {2: 0.75, 4: 0.85, 16: 1.5}
NO_SLOWER: Final = 1.05
LARGE: Final = 60_000_000


def targets(rows: list[Row], one_shot: int, spark: int) -> list[Row]:
    """Speed at each size, ratios with the peers, and how speed holds up as a log grows.

    A one-shot peer is judged twice: at the same number of records, where 100 durable releases
    cost as much as ever, and against our speed over the largest log.
    """
    ours = {row["records"]: row for row in rows if row["library"] == OURS}
    largest = max(ours)
    judged = [
        target(
            f"records/s, {records:,} records",
            row["records_per_second"],
            ">=",
            PER_SECOND,
            reason=_why(row),
        )
        for records, row in ours.items()
    ]
    for library, times in TIMES.items():
        row = _fastest(rows, library, one_shot)
        judged += [
            target(
                f"times {library} ({one_shot:,} records), over {records:,} records",
                _ratio(ours[records], row, same=records == one_shot),
                ">=",
                times,
                reason=_why(ours[records], row),
            )
            for records in dict.fromkeys((one_shot, largest))
        ]
    row = _fastest(rows, "spark", spark)
    judged.append(
        target(
            f"times spark's plain group-by, {spark:,} records",
            _ratio(ours[spark], row, same=True),
            ">=",
            1,
            reason=_why(ours[spark], row),
        )
    )
    return [*judged, _flat(ours)]


def _flat(ours: dict[int, Row]) -> Row:
    small, large, bound = FLAT
    name = f"time per record, {large:,} over {small:,} records"
    if not {small, large} <= set(ours):
        return target(name, None, "<=", bound, reason="a short run has no logs of these sizes")
    before, after = ours[small]["records_per_second"], ours[large]["records_per_second"]
    value = before / after if before and after else None
    return target(name, value, "<=", bound, reason=_why(ours[small], ours[large]))


def _fastest(rows: list[Row], library: str, records: int) -> Row:
    """The library's best row at this size: a peer is judged in its strongest form."""
    found = [row for row in rows if (row["library"], row["records"]) == (library, records)]
    return max(found, key=lambda row: row["records_per_second"] or 0)


def _ratio(ours: Row, theirs: Row, *, same: bool) -> float | None:
    if not (ours["records_per_second"] and theirs["records_per_second"]):
        return None
    if same:  # measured in turns
        ratio: float = theirs["times_slower"]
        return ratio
    return float(ours["records_per_second"] / theirs["records_per_second"])


def _why(*rows: Row) -> str:
    """Why there is no figure."""
    return next((row["note"] for row in rows if row["note"]), "it was not measured")


# Told apart by colour-blind readers and in print: hue and marker.
_LOOKS = {
    "dpstream": ("#0b6e99", "o"),
    "opendp": ("#d1495b", "s"),
    "pipeline-dp": ("#8f6bb3", "^"),
    "spark": ("#c98a1b", "D"),
    "polars": ("#8a8f98", "x"),
}


def draw(figure: Any, rows: list[Row], aim: float) -> None:
    """Log-log lines, peak memory beside them, and the target as a dashed line."""
    speed, memory = figure.subplots(1, 2)
    for library, (colour, marker) in _LOOKS.items():
        for panel, key in ((speed, "records_per_second"), (memory, "peak_mb")):
            points = [
                (row["records"], row[key]) for row in rows if row["library"] == library and row[key]
            ]
            if points:
                private = "" if library not in ("polars", "spark") else " (no privacy)"
                label = f"{library}{private}"
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    speed.axhline(aim, color="#444444", linestyle="--", linewidth=1, label="target")
    speed.set(title="speed", ylabel="records per second")
    memory.set(title="peak memory", ylabel="MB")
    for panel in (speed, memory):
        panel.set(xscale="log", yscale="log", xlabel="records")
        panel.grid(alpha=0.25, which="major")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
