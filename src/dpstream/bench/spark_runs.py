"""A driver in a process of its own, asked for jobs, and killed with or without its executors."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dpstream.bench.spark_cluster import Cluster, cpu_seconds, descendants, executors, gone, kill
from dpstream.errors import StateError

_PATIENCE: Final = 600.0  # seconds for one answer


class Driver:
    """A running driver; `log` is the file that its standard error goes to."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log
        self._known: set[int] = set()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def begin(self, **job: Any) -> None:
        """Ask for a job; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def answer(self, seconds: float = _PATIENCE) -> dict[str, Any]:
        """The next answer; a driver that has ended, or a job that failed, is an error."""
        if not self.waits(seconds):
            raise StateError(f"the Spark driver gave no answer in {seconds:.0f} s{self._last()}")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StateError(f"the Spark driver ended{self._last()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StateError(f"a job failed on Spark: {answer['error']}")
        return answer

    def waits(self, seconds: float) -> bool:
        """Is there an answer, or the end, within this time?"""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def ask(self, **job: Any) -> dict[str, Any]:
        """A job and its answer, with the processor time that it took on all processes."""
        before = cpu_seconds(self.pid)
        self.begin(**job)
        answer = self.answer()
        after = cpu_seconds(self.pid)
        # Spark ends Python workers that were idle for a minute: what is gone has used nothing.
        used = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
        return answer | {"cpu_seconds": used}

    def executors(self) -> list[int]:
        """The process numbers of its executors."""
        return executors(self._process.pid)

    def kill_executor(self, number: int) -> bool:
        """Kill one of those that run now; False if there is none."""
        running = self.executors()
        if running:
            kill(running[number % len(running)])
        return bool(running)

    def kill(self) -> None:
        """Kill the driver and its JVM. Executors are left to find out by themselves."""
        below = descendants(self._process.pid)
        left = set(executors(self._process.pid))
        for pid in list(left):
            left.update(descendants(pid))
        self._known.update(left)
        kill(self._process.pid, *(pid for pid in below if pid not in left))
        self._process.wait()

    def close(self) -> None:
        """End the driver, and whatever it has left running."""
        self._known.update(descendants(self._process.pid))
        try:
            self._process.communicate(timeout=20)
        except (subprocess.TimeoutExpired, ValueError, BrokenPipeError):
            self.kill()
        if not gone(*self._known, seconds=10):
            kill(*self._known)
            gone(*self._known)

    def _last(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "; ".join([": " + line for line in lines[-1:]])


@contextmanager
def started(cluster: Cluster) -> Iterator[Driver]:
    """Start a driver on a cluster of its own; at the end nothing of it runs any more."""
    cluster.folder.mkdir(parents=True, exist_ok=True)
    log = cluster.folder / f"driver-{time.time_ns()}.log"
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpstream.bench.spark_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            bufsize=0,
        )
        driver = Driver(process, log)
        try:
            driver.begin(**asdict(cluster) | {"folder": str(cluster.folder)})
            yield driver
        finally:
            driver.close()
