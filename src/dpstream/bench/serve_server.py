"""A server whose pipeline always has more rows to read than it can, on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
