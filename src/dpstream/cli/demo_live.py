"""The tour's first part: a live query in a process of its own, killed and started again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.cli.demo_feed import Feed
from dpstream.connectors.sinks.encode import csv
from dpstream.data.clicks import clicks
from dpstream.errors import DpstreamError

QUERY = """\
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 4,
                time_column = at, time_unit = 'ms', start = '{start}', end = '{end}')
       page, COUNT(*) AS visitors
FROM clicks
GROUP BY page
EMIT EVERY INTERVAL '1' SECOND
"""
LOOK_EVERY = 0.1  # seconds between two looks into the sink
_COMPILED = 4.0  # a start that takes longer has compiled something, or the machine is busy
PATIENCE = 120  # seconds that a child may take beyond its schedule


@dataclass(frozen=True, kw_only=True)
class Tour:
    """How long it takes, and when the engine dies."""

    kill_after: int = 8
    gone_for: float = 2.0
    then: int = 8
    rows_per_second: int = 400

    def triggers(self, start_takes: float) -> int:
        """One a second: until the kill, while the engine is away, and some more."""
        return self.kill_after + math.ceil(self.gone_for + 1.5 * start_takes) + self.then


QUICK = Tour(kill_after=2, gone_for=0.0, then=3, rows_per_second=1000)


@dataclass(kw_only=True)
class Scene:
    """What there is to see at one moment."""

    triggers: int
    state: str
    release: pa.Table | None = None
    index: int = 0
    truth: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    pid: int = 0


@dataclass(kw_only=True)
class Found:
    """What came of it."""

    query: str
    command: str
    rows: int
    users: int
    killed_after: int
    exit_code: int
    repeated: list[int]
    identical: bool
    late: int
    last: pa.Table
    truth: dict[str, int]
    ledger: Path


def play(
    tour: Tour, folder: Path, show: Callable[[Scene], None], *, engine: Engine | None = None
) -> Found:
    """Run the query over a live stream, kill it half-way, start it again, compare."""
    seconds = _warm_up(folder / "compile")
    if seconds > _COMPILED:
        seconds = _warm_up(folder / "start")
    engine = engine or Engine(folder)
    seconds *= engine.starts
    triggers = tour.triggers(seconds)
    start = math.ceil(time.time() + seconds)
    end = start + triggers
    query = QUERY.format(start=_stamp(start), end=_stamp(end))
    (folder / "pages.sql").write_text(query)
    feed = Feed(folder / "clicks", start=start, end=end, rows_per_second=tour.rows_per_second)
    engine.triggers = triggers

    def scene(state: str) -> Scene:
        index, release = engine.newest()
        return Scene(triggers=triggers, state=state, release=release, index=index,
                     truth=feed.truth(), rows=feed.rows, pid=engine.pid)  # fmt: skip

    feed.begin()
    try:
        engine.start(["out/"])
        while engine.newest()[0] < tour.kill_after:
            engine.check(until=end)
            show(scene("running"))
            time.sleep(LOOK_EVERY)
        code = engine.kill()
        before = engine.digests("out")
        show(scene("killed"))
        time.sleep(tour.gone_for)
        engine.start(["out/", "again/"])  # a second sink shows what is published once more
        while not engine.check(until=end):
            show(scene("running again"))
            time.sleep(LOOK_EVERY)
        show(scene("over"))
        engine.linger()
    finally:
        feed.end()
        engine.end()
    again, now = engine.digests("again"), engine.digests("out")
    repeated = sorted(before.keys() & again.keys())
    same = all(again[name] == before[name] for name in repeated)
    last = engine.newest()[1]
    assert last is not None
    return Found(
        query=query,
        command=engine.command,
        rows=feed.rows,
        users=feed.users,
        killed_after=len(before),
        exit_code=code,
        repeated=[_index(name) for name in repeated],
        identical=same and all(now[name] == before[name] for name in before),
        late=engine.late(),
        last=last,
        truth=feed.truth(),
        ledger=folder / "book",
    )


class Engine:
    """The query in a process of its own: the command that people type."""

    command = (
        "dpstream sql pages.sql --source clicks=clicks/ --live "
        "--state state --ledger book --dataset clicks"
    )

    starts: ClassVar[int] = 1
    """How many processes start one after the other."""
    triggers: int

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._log = folder / "engine.log"

    @property
    def pid(self) -> int:
        """Its process."""
        return 0 if self._child is None else self._child.pid

    def start(self, sinks: list[str]) -> None:
        """Run the command, with these sinks."""
        words = [*self.command.split()[1:], *(f"--sink={sink}" for sink in sinks), "--json"]
        self._child = spawn(words, self._folder, self._log)

    def kill(self) -> int:
        """No goodbye; the exit code says which signal it was."""
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGKILL)
        return self._child.wait()

    def check(self, *, until: float) -> bool:
        """Whether it has ended well; raises if it has not."""
        assert self._child is not None
        code = self._child.poll()
        if code is None and time.time() > until + PATIENCE:
            raise DpstreamError(f"the engine is still busy {PATIENCE} s after its last trigger")
        if code:
            raise DpstreamError(f"the engine ended with {code}: {self._log.read_text()[-2000:]}")
        return code == 0

    def linger(self) -> None:
        """Stay for who looks at it."""

    def end(self) -> None:
        """Leave nothing behind."""
        if self._child is not None and self._child.poll() is None:
            self.kill()

    def newest(self) -> tuple[int, pa.Table | None]:
        """The latest release and its number."""
        names = list(self._files("out"))
        if not names:
            return 0, None
        return _index(names[-1].name), pq.read_table(names[-1])

    def digests(self, sink: str) -> dict[str, str]:
        """File name -> hash of its bytes."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in self._files(sink)
        }

    def late(self) -> int:
        """Rows that a slow machine read after the last trigger, from its last words."""
        said = self._log.read_text().partition("{\n")[2]
        report: dict[str, Any] = json.loads("{\n" + said.rpartition("}")[0] + "}")
        return int(report["operator_only"]["late"])

    def _files(self, sink: str) -> Iterator[Path]:
        yield from sorted((self._folder / sink).glob("*.parquet"))


def _warm_up(place: Path) -> float:
    """Compile what the query needs, once per installation; how long a start takes."""
    place.mkdir()
    (place / "clicks.csv").write_bytes(csv(clicks(2_000, 500)))
    text = QUERY.replace("'ms'", "'s'").replace("SECOND", "DAY")
    text = text.format(start="2024-05-01", end="2024-05-02")
    words = ["sql", text, "--source=clicks=clicks.csv", "--sink=out/", "--state=state"]
    began = time.perf_counter()
    if spawn(words, place, place / "log").wait():
        raise DpstreamError(f"the demo's engine does not start: {(place / 'log').read_text()}")
    return time.perf_counter() - began


def spawn(words: list[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """`dpstream ...` in a process of its own."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "dpstream", *words],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _index(name: str) -> int:
    """The trigger's number in the name of its file."""
    return int(name.rpartition("-t")[2].partition(".")[0])


def _stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
