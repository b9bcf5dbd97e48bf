"""The process that is killed: a query that runs in a state directory and dies where it is told to.

`python -m benchmarks.recovery_child` imports everything, warms the kernels and then takes jobs,
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.recovery_case import QUERY, RUN, SECRET, CheckingSink, write_source
from dpstream.engines.embedded.snapshots import DamagedSnapshot, Snapshots
from dpstream.engines.query_run import EngineOptions
from dpstream.session import run

Job = dict[str, Any]
OPERATIONS = ("fsync", "replace", "link", "unlink", "mkdir", "pwrite", "ftruncate")


def go(job: Job, on_new: Callable[[], None]) -> None:
    """Run the query of a job to its end."""
    folder = Path(job["folder"])
    run_id = RUN if job["fixed"] else None
    run(
        QUERY,
        source=job["source"],
        sink=CheckingSink(folder, on_new),
        state=folder / "state",
        secret=SECRET if job["fixed"] else None,
        options=EngineOptions(buckets=2, threads=2, snapshot_every=4, run_id=run_id),
    ).finish()


@contextmanager
def watched(each: Callable[[str, str, Any], None]) -> Iterator[None]:
    """Call `each(operation, phase, argument)` before everything that changes the disk.

    The phase is "save" as a snapshot begins, "snapshot" on the thread that writes it, else "".
    """
    here = threading.local()
    real = {name: getattr(os, name) for name in OPERATIONS}
    patched: Any = Snapshots
    save, write = patched.save, patched._write

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
        patched.save, patched._write = saving, writing
        yield
    finally:
        for name in OPERATIONS:
            setattr(os, name, real[name])
        patched.save, patched._write = save, write


def tear(fd: int) -> bool:
    """What a file may look like if the power fails before its fsync: half of what is new."""
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if path.suffix == ".head":  # the slot that was written in place: the one of the later end
        slots = bytearray(path.read_bytes())
        half = 4096 * (slots[4096:4116] > slots[:20]) + 30
        slots[half : half + 20] = bytes(20)
        path.write_bytes(slots)
        return True
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
    warnings.simplefilter("ignore", DamagedSnapshot)  # it is damaged on purpose
    _say(event="imported", at=time.monotonic())
    if "--cold" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            source = write_source(Path(folder))[0]
            go({"folder": folder, "source": str(source), "fixed": True}, lambda: None)
    _say(event="ready", at=time.monotonic())
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            _one(job)
        if job.get("kill after") is not None:
            time.sleep(job["kill after"])
            os.kill(pid, signal.SIGKILL)  # if it has ended, its number is not free yet
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
    _say(event="started", at=time.monotonic())
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
