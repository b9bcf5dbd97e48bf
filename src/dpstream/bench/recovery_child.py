"""The process that is killed: a query that runs in a state directory and dies where it is told to.

`python -m dpstream.bench.recovery_child` imports everything, warms the kernels and then takes jobs,
one line of JSON each. Every job runs in a fork: a process of its own that a SIGKILL really ends,
without the seconds that an interpreter takes to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.connectors.sinks import AllSinks, open_sink
from dpstream.connectors.sinks.encode import parquet
from dpstream.engines.local import Options
from dpstream.engines.snapshots import Snapshots
from dpstream.session import run
from dpstream.stages.aggregates import Avg, Count, CountUnits, Sum
from dpstream.stages.query import Query, Tumble

Job = dict[str, Any]
OPERATIONS = ("fsync", "replace", "link", "unlink", "mkdir", "pwrite", "ftruncate")
SECRET, RUN = bytes(range(32)), bytes(range(16))
_DAY, _HOUR = 86_400, 3_600

# 48 steps, 6 windows that overlap by their lateness, 3 periods
QUERY = Query(
    name="clicks",
    unit="user",
    keys=("page",),
    aggregates=(
        Count("clicks"),
        CountUnits("users"),
        Sum("seconds", column="seconds", lo=0, hi=600),
        Avg("mean", column="seconds", lo=0, hi=600),
    ),
    epsilon=6,
    delta=1e-6,
    time="at",
    time_unit="s",
    arrival="came",
    start="1970-01-01",
    end="1970-01-02",
    window=Tumble("4 hours"),
    every="30 minutes",
    allowed_lateness="90 minutes",
    period="8 hours",
    max_groups_contributed=6,
    max_rows_per_group=2,
)


def write_source(folder: Path, *, rows: int = 4_000) -> dict[str, Path]:
    """The same rows as Parquet (several row groups, in no order) and as CSV; some are malformed."""
    rng = np.random.default_rng(4)
    at = rng.integers(0, _DAY, rows)
    units = [f"user {n}" if n else None for n in rng.integers(0, rows // 5, rows)]
    table = pa.table(
        {
            "user": pa.array(units, pa.string()),
            "page": pa.array([f"/{n}" for n in np.minimum(rng.zipf(1.4, rows), 40)]),
            "at": pa.array(at),
            "came": pa.array(at + (rng.exponential(_HOUR, rows)).astype(np.int64)),
            "seconds": pa.array(rng.integers(0, 700, rows)),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "clicks.parquet", row_group_size=rows // 6)
    pyarrow.csv.write_csv(table, folder / "clicks.csv")
    return {"parquet": folder / "clicks.parquet", "csv": folder / "clicks.csv"}


class CheckingSink:
    """A directory and a database; a release that comes again must have the bytes it had."""

    def __init__(self, folder: Path, on_new: Callable[[], None]) -> None:
        self._out, self._on_new = folder / "out", on_new
        both = [open_sink(folder / "out"), open_sink(folder / "out.sqlite")]
        self._sinks = AllSinks([one for one in both if one is not None])

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write to both; without the file, this is the first step after a restart."""
        path = self._out / f"{query}-w{window:06d}-t{trigger:06d}.parquet"
        if path.exists() and path.read_bytes() != parquet(table):
            raise AssertionError(f"{path.name} came again with other bytes")
        if not path.exists():
            self._on_new()
        self._sinks.write(query, window, trigger, table)

    def close(self) -> None:
        """Close both."""
        self._sinks.close()


def go(job: Job, on_new: Callable[[], None]) -> None:
    """Run the query of a job to its end."""
    folder = Path(job["folder"])
    run(
        QUERY,
        source=job["source"],
        sink=CheckingSink(folder, on_new),
        checkpoint_location=folder / "state",
        secret=SECRET if job["fixed"] else None,
        run_id=RUN if job["fixed"] else None,
        options=Options(buckets=2, threads=1, snapshot_every=4),
    ).finish()


@contextmanager
def watched(each: Callable[[str, str, Any], None]) -> Iterator[None]:
    """Call `each(operation, phase, argument)` before everything that changes the disk.

    The phase is "save" as a snapshot begins, "snapshot" on the thread that writes it, else "".
    """
    here = threading.local()
    real = {name: getattr(os, name) for name in OPERATIONS}
    save, write = Snapshots.save, Snapshots._write

    def wrapped(name: str) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            each(name, getattr(here, "phase", ""), args[0])
            return real[name](*args, **named)

        return operation

    def saving(self: Snapshots, *args: Any) -> None:
        each("save", "save", None)
        save(self, *args)

    def writing(self: Snapshots, *args: Any) -> None:
        here.phase = "snapshot"
        write(self, *args)

    try:
        for name in OPERATIONS:
            setattr(os, name, wrapped(name))
        Snapshots.save, Snapshots._write = saving, writing  # type: ignore[method-assign]
        yield
    finally:
        for name in OPERATIONS:
            setattr(os, name, real[name])
        Snapshots.save, Snapshots._write = save, write  # type: ignore[method-assign]


def tear(fd: int) -> bool:
    """What a file may look like if the power fails before its fsync: half of what is new."""
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if path.is_dir() or not (path.suffix in (".new", ".log") or path.name == "ledger"):
        return False
    content = path.read_bytes()
    old = 0 if path.suffix == ".new" else content.rstrip(b"\n").rfind(b"\n") + 1
    os.truncate(path, (old + len(content)) // 2)
    return True


def killer(job: Job, counts: Counter[str]) -> Callable[[str, str, Any], None]:
    """Count operations by phase; at the one that the job names, kill this process."""
    kill, lock = job.get("kill"), threading.Lock()

    def each(operation: str, phase: str, argument: Any) -> None:
        with lock:  # the snapshot's thread counts too
            mine = {"any", phase or "step", operation}
            counts.update(mine)
            if kill is None or kill["where"] not in mine or counts[kill["where"]] < kill["nth"]:
                return
            if kill["torn"] and not (operation == "fsync" and tear(argument)):
                return  # go on to the next file that can be torn
            os.kill(os.getpid(), signal.SIGKILL)

    return each


def main() -> None:
    """Take jobs until the input ends; each answer is a line with the job's end."""
    _say(event="imported", at=time.monotonic())
    if "--cold" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            source = write_source(Path(folder))["parquet"]
            go({"folder": folder, "source": str(source), "fixed": True}, lambda: None)
    _say(event="ready", at=time.monotonic())
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _one(json.loads(line))
        _say(event="ended", status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _one(job: Job) -> None:
    """In the fork: run the job, say when a new release is out, and leave without a farewell."""
    new: list[float] = []

    def on_new() -> None:
        if not new:
            new.append(time.monotonic())
            _say(event="new", at=new[0])

    status = 1
    counts: Counter[str] = Counter()
    _say(event="started", at=time.monotonic(), pid=os.getpid())
    try:
        with watched(killer(job, counts)):
            go(job, on_new)
        _say(event="counted", counts=dict(counts))
        status = 0
    except BaseException as error:
        _say(event="failed", error=f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(status)


def _say(**answer: Any) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
