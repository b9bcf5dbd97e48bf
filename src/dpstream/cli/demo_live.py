"""The tour's live query: a made-up stream, and an engine that is killed and started again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
PIPELINE = """\
source = {{path = "clicks/", live = true}}
budget = {{dataset = "clicks", epsilon = 2.5, delta = 1e-8, ledger = "book"}}
state = {{path = "state/"}}
sink = {{to = {sinks}}}
query = [{{name = "pages", file = "pages.sql"}}]
"""
_FILES_PER_SECOND = 2
_LOOK_EVERY = 0.1  # seconds between two looks into the sink
_COMPILED = 4.0  # a start that takes longer has compiled something, or the machine is busy
_TIMEOUT = 120  # seconds that the engine may take beyond its schedule


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
    index: int
    rows: list[dict[str, Any]]
    """The newest release."""
    clicks: int
    truth: dict[str, int]
    pid: int


def play(
    tour: Tour, folder: Path, show: Callable[[Scene], None], *, engine: Engine
) -> dict[str, Any]:
    """Run the query over a live stream, kill it half-way, start it again, compare the bytes."""
    seconds = _warm_up(folder / "compile")
    if seconds > _COMPILED:
        seconds = _warm_up(folder / "start")
    seconds *= engine.starts
    engine.triggers = triggers = tour.triggers(seconds)
    start = math.ceil(time.time() + seconds)
    end = start + triggers
    first, last = (datetime.fromtimestamp(at, tz=UTC).replace(tzinfo=None) for at in (start, end))
    query = QUERY.format(start=first, end=last)
    (folder / "pages.sql").write_text(query)
    feed = Feed(folder / "clicks", start, triggers, rows_per_second=tour.rows_per_second)

    def show_while(state: str) -> int:
        index, rows = engine.newest()
        show(Scene(triggers=triggers, state=state, index=index, rows=rows, clicks=feed.rows,
                   truth=feed.truth(), pid=engine.pid))  # fmt: skip
        time.sleep(_LOOK_EVERY)
        return index

    feed.start()
    try:
        engine.start()
        while show_while("running") < tour.kill_after:
            engine.check(until=end)
        code = engine.kill()
        before = engine.digests("out")
        show_while("killed")
        time.sleep(tour.gone_for)
        engine.start()
        while not engine.check(until=end):
            show_while("running again")
        show_while("over")
        engine.wait_for_reader()
    finally:
        feed.stop()
        engine.end()
    again, now = engine.digests("again"), engine.digests("out")
    repeated = sorted(before.keys() & again.keys())
    return {
        "query": query,
        "rows": feed.rows,
        "users": feed.users,
        "killed_after": len(before),
        "exit_code": code,
        "repeated": repeated,
        "identical": all(again[index] == before[index] for index in repeated)
        and all(now[index] == before[index] for index in before),
        "late": engine.late(),
        "last_release": engine.newest()[1],
        "truth": feed.truth(),
    }


class Feed(threading.Thread):
    """Moves files of made-up clicks into a directory from `start` on, and knows the truth."""

    def __init__(self, folder: Path, start: int, seconds: int, *, rows_per_second: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._begin = folder, start
        self._each = rows_per_second // _FILES_PER_SECOND
        self._files = seconds * _FILES_PER_SECOND - 1  # one more would meet the last trigger
        rows = self._files * self._each
        self._table = clicks(rows, users=max(rows // 2, 1)).select(["user", "page"])
        self._over = threading.Event()
        self.rows = 0
        folder.mkdir()

    def run(self) -> None:
        """Write one file after the other, each when it is due."""
        for number in range(self._files):
            due = self._begin + (number + 0.25) / _FILES_PER_SECOND
            if self._over.wait(max(0.0, due - time.time())):
                return
            part = self._table.slice(self.rows, self._each)
            stamps = pa.array([int(due * 1000)] * len(part), pa.int64())
            hidden = self._folder / f".{number:05d}.csv"
            hidden.write_bytes(csv(part.append_column("at", stamps)))
            hidden.rename(self._folder / f"{number:05d}.csv")  # complete before it is seen
            self.rows += len(part)

    def stop(self) -> None:
        """Write no more."""
        self._over.set()
        self.join()

    @property
    def users(self) -> int:
        """How many different users there are in what was written."""
        return len(self._table["user"][: self.rows].unique())

    def truth(self) -> dict[str, int]:
        """Different users per page so far: what a real stream's publisher never shows."""
        pages = self._table[: self.rows].group_by("page").aggregate([("user", "count_distinct")])
        pages = pages.sort_by([("user_count_distinct", "descending")])
        return dict(zip(*(column.to_pylist() for column in pages.columns), strict=True))


class Engine:
    """The query in a process of its own: the command that people type.

    With `serve` that is a server with a page: its worker runs the query, and when the worker dies
    the server starts it again by itself.
    """

    def __init__(self, folder: Path, *, serve: bool = False) -> None:
        self._folder, self._serve = folder, serve
        self._child: subprocess.Popen[bytes] | None = None
        self._worker = 0
        self.starts = 2 if serve else 1
        """How many processes start one after the other."""
        self.triggers = 0
        self.command = (
            "dpstream serve demo.toml"
            if serve
            else "dpstream sql pages.sql --source clicks=clicks/ --live "
            "--state state --ledger book --dataset clicks"
        )
        self._publish_to("out/")

    def _publish_to(self, *sinks: str) -> None:
        self._sinks = sinks
        (self._folder / "demo.toml").write_text(PIPELINE.format(sinks=list(sinks)))

    @property
    def pid(self) -> int:
        """The process that runs the query; a server's worker is its only child."""
        if self._child is not None and self._child.poll() is None:
            self._worker = pid = self._child.pid
            if self._serve:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                self._worker = int(children[0]) if children else self._worker
        return self._worker

    def start(self) -> None:
        """Run the command; a server has started its second worker itself."""
        if not self._serve:
            sinks = [f"--sink={sink}" for sink in self._sinks]
            self._child = _spawn([*self.command.split()[1:], *sinks, "--json"], self._folder)
        elif self._child is None:
            words = [*self.command.split()[1:], "--port=0", "--operator-port=0", "--json"]
            self._child = _spawn(words, self._folder)
            webbrowser.open(self._address())

    def kill(self) -> int:
        """Kill it with signal 9; what is published once more goes to a second sink, too."""
        assert self._child is not None
        self._publish_to("out/", "again/")
        os.kill(self.pid, signal.SIGKILL)
        return -signal.SIGKILL if self._serve else self._child.wait()

    def check(self, *, until: float) -> bool:
        """Whether the last release is out; raises if it will not come."""
        assert self._child is not None
        code = self._child.poll()
        if code is None and time.time() > until + _TIMEOUT:
            raise DpstreamError(f"the engine is still busy {_TIMEOUT} s after its last trigger")
        if code:
            raise DpstreamError(f"the engine ended with {code}: {_last_words(self._folder)}")
        return self.newest()[0] >= self.triggers if self._serve else code == 0

    def wait_for_reader(self) -> None:
        """A page stays until Enter, where somebody can press it."""
        if self._serve and sys.stdin.isatty():
            sys.stdin.readline()

    def end(self) -> None:
        """Leave no process behind."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def newest(self) -> tuple[int, list[dict[str, Any]]]:
        """The number of the latest release, and its rows."""
        files = self._files("out")
        if not files:
            return 0, []
        names = ["page", "visitors", "visitors_stddev"]
        return max(files), pq.read_table(files[max(files)], columns=names).to_pylist()

    def digests(self, sink: str) -> dict[int, str]:
        """A hash of the bytes of each release, by its number."""
        files = self._files(sink).items()
        return {index: hashlib.sha256(path.read_bytes()).hexdigest() for index, path in files}

    def late(self) -> int:
        """Rows that a slow machine read after the last trigger; a server's operator knows them."""
        if self._serve:
            return 0
        report = json.loads((self._folder / "stdout").read_bytes())
        return int(report["operator_only"]["late"])

    def _files(self, sink: str) -> dict[int, Path]:
        """The files of a sink, by the number of the trigger in their names."""
        paths = (self._folder / sink).glob("*.parquet")
        return {int(path.stem.rpartition("-t")[2]): path for path in paths}

    def _address(self) -> str:
        """Where the page is, once the server says so."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._child and self._child.poll() is None:
            line = (self._folder / "stdout").read_text()
            if line.endswith("\n"):
                return f"{json.loads(line)['public']}/"
            time.sleep(0.1)
        raise DpstreamError(f"the demo's server does not start: {_last_words(self._folder)}")


def _warm_up(folder: Path) -> float:
    """Compile what the query needs, once per installation; how long a start takes."""
    folder.mkdir()
    (folder / "clicks.csv").write_bytes(csv(clicks(2_000, 500)))
    text = QUERY.replace("'ms'", "'s'").replace("SECOND", "DAY")
    text = text.format(start="2024-05-01", end="2024-05-02")
    began = time.perf_counter()
    words = ["sql", text, "--source=clicks=clicks.csv", "--sink=out/", "--state=state"]
    if _spawn(words, folder).wait():
        raise DpstreamError(f"the demo's engine does not start: {_last_words(folder)}")
    return time.perf_counter() - began


def _spawn(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """`dpstream ...` in a process of its own, which writes to files of the folder."""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        command = [sys.executable, "-m", "dpstream", *words]
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )


def _last_words(folder: Path) -> str:
    return (folder / "stderr").read_text()[-2000:]
