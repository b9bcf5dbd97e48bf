"""Clients that follow a server's events while its pipeline reads as fast as it can.

The pipeline's process always has more rows to read than it can, on a core of its own; server and
clients share another. First nobody follows, then all clients do, then nobody again; some clients
break off again and again and go on by their last event's number. Every client must have seen every
number from its first one on, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Findings, Progress, Row, child_environment, target


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    clients: int
    seconds: float
    alone: float
    """Seconds without clients, before and after."""
    breaking: int = 10
    """One client in so many breaks off."""


_DELAY: Final = (
    "a delay is from the trigger's scheduled time to the client: the release is worked out, and "
    "becomes visible at the next whole second"
)
FULL: Final = Plan(clients=200, seconds=60, alone=30)
QUICK: Final = Plan(clients=50, seconds=8, alone=4)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Follow, count, and compare the pipeline's speed."""
    plan, places = QUICK if quick else FULL, cores()
    with tempfile.TemporaryDirectory(prefix="dpstream-serve-") as folder:
        progress(0, 4, "starting")
        with busy_server(Path(folder), places) as server:
            server.rate(plan.alone / 2)  # the tables have grown to their size
            progress(1, 4, "without clients")
            before = server.rate(plan.alone)
            progress(2, 4, f"{plan.clients} clients")
            with_clients, seen = _followed(server, plan, places)
            progress(3, 4, "without clients")
            after = server.rate(plan.alone)
    progress(4, 4, "done")
    return findings(plan, before=before, with_clients=with_clients, after=after, seen=seen)


def findings(
    plan: Plan, *, before: float, with_clients: float, after: float, seen: Sequence[dict[str, Any]]
) -> Findings:
    """The table, and what it says about the targets."""
    lost, twice = zip(*(_gaps(one["ids"]) for one in seen), strict=True)
    last = max((one["ids"][-1] for one in seen if one["ids"]), default=0)
    behind = sum(last - one["ids"][-1] if one["ids"] else 1 for one in seen)
    delays = np.array([delay for one in seen for delay in one["delays"]] or [np.nan])
    alone = (before + after) / 2
    rows: list[Row] = [
        {"phase": "no clients, before", "rows_per_second": before},
        {
            "phase": f"{plan.clients} clients",
            "rows_per_second": with_clients,
            "clients": len(seen),
            "events": int(sum(len(one["ids"]) for one in seen)),
            "connections": int(sum(one["connections"] for one in seen)),
            "lost": sum(lost) + behind,
            "twice": sum(twice),
            "median_delay": float(np.median(delays)),
            "slowest": float(np.max(delays)),
        },
        {"phase": "no clients, after", "rows_per_second": after},
    ]
    slower = 1 - with_clients / alone
    return Findings(
        rows=rows,
        targets=[
            target("clients that followed to the end", len(seen), ">=", plan.clients),
            target("events lost", sum(lost) + behind, "==", 0),
            target("events seen twice", sum(twice), "==", 0),
        ],
        notes=[
            f"with {plan.clients} clients the pipeline reads {slower:+.1%} slower than without",
            _DELAY,
            f"{plan.seconds:g} s with clients; one in {plan.breaking} breaks off again and again",
        ],
        draw=lambda figure: draw(figure, delays, rows),
    )


def _followed(server: Busy, plan: Plan, places: Cores) -> tuple[float, list[dict[str, Any]]]:
    """The pipeline's speed while clients follow, and what they have seen."""
    at = urlsplit(server.public)
    module = [sys.executable, "-m", "benchmarks.serve_clients", str(at.hostname), str(at.port)]
    module += [str(plan.clients), str(plan.breaking), str(places.rest)]
    process = subprocess.Popen(
        module, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        while server.health()["clients"] < plan.clients:
            server.rate(0.5)
        found = server.rate(plan.seconds)
        last = server.health()["newest_release"]
        told, _ = process.communicate(f"{last}\n".encode())
    finally:
        process.kill()
        process.wait()
    seen: list[dict[str, Any]] = json.loads(told)["clients"]
    for one in seen:  # who was told to stop may have seen a few more
        one["ids"] = [number for number in one["ids"] if number <= last]
    return found, seen


def _gaps(ids: Sequence[int]) -> tuple[int, int]:
    """Numbers that are missing between the first and the last, and those that came again.

    >>> _gaps([4, 5, 7, 7, 8])
    (1, 1)
    """
    known = set(ids)
    missing = (max(known) - min(known) + 1 - len(known)) if known else 0
    return missing, len(ids) - len(known)


def draw(figure: Any, delays: Any, rows: Sequence[Row]) -> None:
    """How long events take, and how fast rows are read in each phase."""
    left, right = figure.subplots(1, 2)
    left.hist(delays, bins=60, color="#0b6e99")
    left.set(xlabel="seconds from trigger to client", ylabel="events")
    names = [str(row["phase"]) for row in rows]
    right.barh(names[::-1], [row["rows_per_second"] / 1e6 for row in rows][::-1], color="#0b6e99")
    right.set(xlabel="million rows read per second")
    for panel in (left, right):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)


_TOKEN: Final = "a token for the bench alone"
_ROWS, _USERS, _KEYS = 1_000_000, 200_000, 20_000
_AHEAD: Final = 8  # files that wait to be read
_START: Final = 120.0  # seconds until rows are read
_COMMAND: Final = "from dpstream.cli import main; main()"

PIPELINE: Final = '''
[source]
path = "arriving/"
live = true
[budget]
dataset = "clicks"
epsilon = 6
delta = 1e-8
[state]
path = "state/"
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 6, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 32,
                privacy_unit_period = INTERVAL '1' DAY, allowed_lateness = INTERVAL '1' HOUR)
       page, window_start, COUNT(*) AS clicks
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' SECOND
"""
'''


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Where the pipeline's process runs, and where server and clients do; -1: anywhere."""

    ingest: int
    rest: int


def cores() -> Cores:
    """The first two there are; with one alone nothing is pinned."""
    found = sorted(os.sched_getaffinity(0))
    return Cores(ingest=found[0], rest=found[1]) if len(found) > 1 else Cores(ingest=-1, rest=-1)


class Busy:
    """The running server; rows arrive as long as somebody asks for numbers."""

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes], told: dict[str, str]
    ) -> None:
        self._folder, self.process = folder, process
        self.public, self._operator = told["public"], told["operator"]
        self._linked = 0

    def health(self) -> dict[str, Any]:
        """What the operator sees."""
        found: dict[str, Any] = json.loads(self._ask("/health"))
        return found

    def rows(self) -> int:
        """How many rows were read by now; more are put where they are found."""
        queries = json.loads(self._ask("/lag"))["queries"]
        read = int(queries["pages"]["read"]) if queries else 0
        while self._linked < read // _ROWS + _AHEAD:
            place = self._folder / "arriving" / f"{self._linked:09d}.parquet"
            os.link(self._folder / "rows.parquet", place)
            self._linked += 1
        return read

    def rate(self, seconds: float) -> float:
        """Rows a second over a time."""
        began, first = time.monotonic(), self.rows()
        while time.monotonic() - began < seconds:
            time.sleep(0.25)
            last = self.rows()
        return (last - first) / (time.monotonic() - began)

    def _ask(self, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {_TOKEN}"}
        asked = urllib.request.Request(f"{self._operator}{path}", headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            body: bytes = answer.read()
            return body


@contextmanager
def busy_server(folder: Path, places: Cores) -> Iterator[Busy]:
    """Start it, wait for its first release, and move its pipeline to a core of its own."""
    (folder / "arriving").mkdir()
    (folder / "pipeline.toml").write_text(PIPELINE)
    pq.write_table(_table(), folder / "rows.parquet")
    command = [sys.executable, "-c", _COMMAND, "serve", str(folder / "pipeline.toml"), "--json"]
    command += ["--port", "0", "--operator-port", "0", "--clients", "2000"]
    command += ["--clients-per-address", "2000"]
    environment = os.environ | {"DPSTREAM_OPERATOR_TOKEN": _TOKEN}
    pin = None if places.rest < 0 else (lambda: os.sched_setaffinity(0, {places.rest}))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env=environment,
        preexec_fn=pin,
    )
    try:
        assert process.stdout is not None
        found = Busy(folder, process, json.loads(process.stdout.readline()))
        end = time.monotonic() + _START
        while found.rows() < _ROWS:  # triggers since the beginning of the hour come first
            if time.monotonic() > end:
                raise TimeoutError(f"the server has read nothing within {_START:g} s")
            time.sleep(0.25)
        _pin_children(process.pid, places.ingest)
        yield found
    finally:
        process.terminate()
        process.wait()


def _table() -> pa.Table:
    """Rows of this hour, by users and pages that are used unevenly."""
    rng = np.random.default_rng(14)
    users = rng.integers(0, _USERS, _ROWS)
    pages = (_KEYS * rng.random(_ROWS) ** 3).astype(np.int64)
    now = np.full(_ROWS, time.time_ns() // 1000, np.int64)
    names = pa.array([f"user-{n}" for n in range(_USERS)])
    addresses = pa.array([f"/page/{n}" for n in range(_KEYS)])
    return pa.table(
        {
            "user": names.take(pa.array(users)),
            "page": addresses.take(pa.array(pages)),
            "at": pa.array(now).cast(pa.timestamp("us", tz="UTC")),
        }
    )


def _pin_children(parent: int, core: int) -> None:
    """All threads of the process's children."""
    if core < 0:
        return
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        for thread in os.listdir(f"/proc/{child}/task"):
            os.sched_setaffinity(int(thread), {core})
