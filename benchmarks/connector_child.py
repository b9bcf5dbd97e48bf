"""Runs that are killed: forks of one process that has everything imported.

A line of JSON is a job, answered with the pid of its process. Time is that of the producer: it
reaches a trigger when every message that was sent before it has been read, however long that takes
a run that is killed or a broker that is away. So two runs that see the same messages publish the
same releases exactly if neither loses, repeats or misplaces one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa

import dpstream as dps
from dpstream.connectors.registry import open_source
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import DpstreamError
from dpstream.records import Batch, Position, Source

SECRET, RUN = bytes(range(32)), bytes(range(16))
HOUR = 3_600_000_000
_LOOK = 0.02  # seconds between two looks at where the producer is


def query(steps: int) -> dps.Query:
    """A trigger every hour, windows of three, rows up to an hour late."""
    end = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=steps - 1)
    return dps.Query(
        name="clicks",
        privacy_unit_column="user",
        keys=("page",),
        aggregates=(
            dps.Count("clicks"),
            dps.Sum("seconds", column="seconds", contribution_bounds_per_row=(0, 60)),
        ),
        epsilon=20,
        delta=1e-5,
        time_column="at",
        time_unit="us",
        start="1970-01-01",
        end=end.strftime("%Y-%m-%dT%H:%M"),
        window=dps.Tumble("3 hours"),
        every="1 hour",
        allowed_lateness="1 hour",
        privacy_unit_period="3 hours",
        max_groups_contributed=3,
        max_rows_per_group=2,
    )


class Watched:
    """A source that knows how far it was read."""

    bounded, replayable = False, True

    def __init__(self, source: Source) -> None:
        self._source, self.offsets = source, dict[str, int]()
        self.partitions, self.columns = source.partitions, source.columns
        self.close = source.close

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """As it is, and noted."""
        batch = self._source.read(partition, position, columns=columns, until=until)
        if isinstance(batch.position, list):
            self.offsets[partition] = batch.position[2]
        return batch


class ProducersClock:
    """`ends`: a file of lines, by step: the partitions' offsets behind its last message.

    `keep`: the time, as of the last step that was published. A step that was not, is taken again.
    """

    real_time = False

    def __init__(self, ends: Path, keep: Path, source: Watched) -> None:
        self._ends, self._keep, self._source = ends, keep, source
        self._time = self._kept = int(keep.read_text()) if keep.exists() else 0

    def now(self) -> int:
        """Microseconds since 1970, as the producer counts them."""
        return self._time

    def wait(self, until: int, stop: Event) -> None:
        """A while, unless all messages before `until` were read: then it is that time."""
        lines = self._ends.read_text().splitlines() if self._ends.exists() else []
        step = until // HOUR - 1
        self._time = max(self._time, step * HOUR)  # a step that was replayed is over, too
        if step < len(lines):
            wanted = json.loads(lines[step])
            if all(self._source.offsets.get(name, 0) >= at for name, at in wanted.items()):
                self._time = until
                return
        if self._kept != self._time:
            new = self._keep.with_suffix(".new")
            new.write_text(str(self._time))
            os.rename(new, self._keep)
            self._kept = self._time
        time.sleep(_LOOK)


def _go(job: dict[str, Any]) -> None:
    place = Path(job["place"])
    source = Watched(open_source(job["source"]))
    dps.run(
        query(job["steps"]),
        source=source,
        sink=job["sinks"],
        state=place / "state",
        secret=SECRET,
        options=EngineOptions(buckets=2, threads=1, snapshot_every=3, run_id=RUN),
        clock=ProducersClock(Path(job["ends"]), place / "clock", source),
    ).finish()


def _main() -> None:
    rows = [{"user": f"{n}", "page": "/", "at": f"{n}", "seconds": "1"} for n in range(100)]
    one = EngineOptions(buckets=2, threads=1)
    dps.run(query(4), source=pa.Table.from_pylist(rows), options=one).finish()  # compiles
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        place, code = Path(job["place"]), 0
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            _go(job)
            (place / "done").touch()
        except DpstreamError as problem:
            (place / "failed").write_text(f"{type(problem).__name__}: {problem}")
            code = 1
        os._exit(code)


if __name__ == "__main__":
    _main()
