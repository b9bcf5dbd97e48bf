"""Keeps the process that runs the pipeline alive, and remembers what it tells."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dpstream.serve.worker import NOT_AGAIN, PATIENCE

_LOG = logging.getLogger("dpstream.serve")
_STOPPING = 5.0  # seconds that a stop may take
_LONGEST_LINE = 1 << 24
_SAYING = 60.0  # seconds between two notes about rows that were not used
State = Literal["starting", "running", "restarting", "finished", "stopped", "not run", "refused"]


@dataclass(kw_only=True)
class Supervisor:
    """Starts a pipeline's process, and starts it again when it dies."""

    path: Path
    engine: str = "embedded"
    """Where the queries run."""
    command: tuple[str, ...] = (sys.executable, "-m", "dpstream.serve.worker")
    state: State = "not run"
    restarts: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    """What the process has told last; not private."""
    problem: dict[str, Any] | None = None
    """What it has died of; not private."""
    pid: int | None = None
    say: Callable[[str], None] = lambda words: None
    """Tells the operator, and nobody else, about rows that were not used."""
    _said: str = field(default="", init=False)
    _said_at: float = field(default=-_SAYING, init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The pipeline runs while this lasts."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.state = "stopped" if self.state not in ("finished", "refused") else self.state

    async def _keep(self) -> None:
        tries = 0
        while True:
            self.state = "starting"
            try:
                code: int | None = await self._once()
            except Exception as problem:  # it could not even be started
                code = None
                self.problem = {"error": type(problem).__name__, "message": str(problem)}
            if code == 0:
                self.state = "finished"
                return
            if code is not None and self._is_refused():
                return
            _LOG.warning("the pipeline's process has left with %s: %s", code, self.problem)
            self.state = "restarting"
            self.restarts += 1
            await asyncio.sleep(PATIENCE[min(tries, len(PATIENCE) - 1)])
            tries += 1

    def _is_refused(self) -> bool:
        """Has it left for a reason that the next try would find unchanged?"""
        if self.problem is None or self.problem.get("error") not in NOT_AGAIN:
            return False
        self.state = "refused"
        self.problem["next"] = (
            "it is not tried again; what was released is still served; mend the budget or the "
            "pipeline file, and start dpstream serve again"
        )
        self.say(f"the pipeline does not run: {self.problem['message']}; {self.problem['next']}")
        return True

    async def _once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            str(self.path),
            self.engine,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
        )
        assert process.stdout is not None
        self.pid = process.pid
        try:
            async for line in process.stdout:
                self._hear(line)
            return await process.wait()
        finally:
            self.pid = None
            if process.returncode is None:
                await _end(process)

    def _hear(self, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return
        if not isinstance(told, dict):
            return
        if "error" in told:
            self.problem = told
        else:
            self.state, self.told, self.problem = "running", told, None
            self._note_rows()

    @property
    def failed(self) -> dict[str, Any]:
        """Queries that have failed while the others go on, and why; not private."""
        told = self.told.get("queries", {})
        return {name: one["failed"] for name, one in told.items() if "failed" in one}

    @property
    def starved(self) -> list[str]:
        """Queries that have read nothing though others over their source have; not private."""
        told = self.told.get("queries", {})
        return [name for name, one in told.items() if one.get("starved")]

    def _note_rows(self) -> None:
        words = "; ".join(
            f"{name}: {one['rejected']} of {one['read']} rows rejected since this start, "
            f"{one['outside']} outside the range"
            for name, one in self.told.get("queries", {}).items()
            if one["rejected"] or one["outside"]
        )
        for name in self.starved:
            words = f"{name} has read nothing, and others over its source have; {words}"
        for name, why in self.failed.items():
            words = f"{name} has failed, the others go on: {why['message']}; {words}"
        now = time.monotonic()
        if words and words != self._said and now >= self._said_at + _SAYING:
            self._said, self._said_at = words, now
            self.say(f"operator only: {words}; see /dead-letters and /lag")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask it to stop; if that takes too long its input ends, and it leaves where it is."""
    pipe = process.stdin
    assert pipe is not None
    for ending in (partial(pipe.write, b"stop\n"), pipe.close, process.kill):
        with suppress(OSError):
            ending()
        try:
            await asyncio.wait_for(process.wait(), _STOPPING)
        except TimeoutError:
            continue
        return
