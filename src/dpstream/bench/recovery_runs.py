"""One run in a process of its own, killed as aimed and started again until it ends."""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpstream.bench.recovery_case import damage, difference, left_behind
from dpstream.errors import StateError

_PATIENCE: Final = 300.0  # seconds for one line of the child
Job = dict[str, Any]
Said = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to kill: before an operation counted in `where`, or ("") at any moment."""

    name: str
    where: str = ""
    torn: bool = False
    """Half of what was being written is lost, as when the power fails."""
    damages: str = ""
    """What is spoilt after the kill: the newest "snapshot", or the end of the "log"."""
    fixed: bool = True
    """Run id and keys are fixed, so that bytes can be compared with those of an unbroken run."""


@dataclass(kw_only=True)
class Outcome:
    """One run, killed until it ended."""

    kind: Kind
    source: str
    kills: int = 0
    restarts: list[float] = field(default_factory=list)
    """Seconds from a process's start to the first release that the sink did not have."""
    difference: str = ""
    """How it differs from an unbroken run, or why it failed; empty: identical."""
    untidy: str = ""
    """What it should not have left: a second charge, keys, segments."""


class Child:
    """The process that runs jobs, each in a fork."""

    def __init__(self, process: subprocess.Popen[bytes], began: float) -> None:
        self._process, self.began = process, began
        self.imported: float = self._until("imported")[-1]["at"] - began
        self._until("ready")

    def run(self, job: Job) -> Said:
        """Run a job until it ends or is killed; all that was said of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return self._until("ended")

    def _until(self, event: str) -> Said:
        assert self._process.stdout is not None
        said: Said = []
        while not said or said[-1]["event"] != event:
            if not select.select([self._process.stdout], [], [], _PATIENCE)[0]:
                raise StateError(f"the killed query said nothing for {_PATIENCE:.0f} s")
            line = self._process.stdout.readline()
            if not line:
                raise StateError(f"the process that runs the query ended before {event!r}")
            said.append(json.loads(line))
        return said


@contextmanager
def started(*options: str) -> Iterator[Child]:
    """Start the child; it ends with its input."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "dpstream.bench.recovery_child", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield Child(process, began)
    finally:
        process.communicate()


def job(folder: Path, source: str, *, fixed: bool = True) -> Job:
    """The run of the query in `folder`."""
    return {"folder": str(folder), "source": source, "fixed": fixed}


def kill_and_compare(
    child: Child,
    found: Outcome,
    folder: Path,
    *,
    aims: Iterator[Job],
    expected: dict[str, str],
    rng: np.random.Generator,
) -> None:
    """Kill a run as aimed, start it again until it ends, and look at what it has published."""
    work, status = job(folder, found.source, fixed=found.kind.fixed), None
    while status != 0 and not found.difference:
        said = child.run(work | next(aims, {}))
        status = said[-1]["status"]
        at = {line["event"]: line.get("at", 0.0) for line in said}
        if found.kills and "new" in at:
            found.restarts.append(at["new"] - at["started"])
        found.difference = " ".join(line["error"] for line in said if line["event"] == "failed")
        if status == -signal.SIGKILL:
            found.kills += 1
            damage(folder / "state", found.kind.damages, rng)
    if not found.difference:
        found.difference = difference(folder, expected, same_keys=found.kind.fixed)
        found.untidy = left_behind(folder / "state")
        shutil.rmtree(folder)


def cold_restart(folder: Path, source: str) -> tuple[float, float]:
    """Seconds until a new interpreter has imported everything, and from there to a new release."""
    with started("--cold") as child:
        child.run(job(folder, source) | {"kill": {"where": "save", "nth": 6, "torn": False}})
    with started("--cold") as child:
        said = child.run(job(folder, source))
        new = [line["at"] for line in said if line["event"] == "new"]
        if not new:
            raise StateError(f"a killed run published nothing after its restart: {said}")
        return child.imported, new[0] - child.began - child.imported
