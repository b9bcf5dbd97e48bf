"""The tour with a page: the query runs under `dpstream serve`, and its worker is what dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import webbrowser
from importlib.util import find_spec
from pathlib import Path

from dpstream.cli.demo_live import Engine, spawn
from dpstream.errors import DpstreamError, MissingDependency

PIPELINE = """\
[source]
path = "clicks/"
live = true
[budget]
dataset = "clicks"
epsilon = 2.5
delta = 1e-8
ledger = "book"
[state]
path = "state/"
[sink]
to = {sinks}
[[query]]
name = "pages"
file = "pages.sql"
"""


def refuse_without_server() -> None:
    """Before anything is started: the page needs an extra."""
    for module in ("dpstream.serve", "starlette", "uvicorn"):
        if find_spec(module) is None:
            raise MissingDependency(
                f"demo --serve shows a live page, which needs {module}; install it with: "
                "pip install 'dpstream[serve]'"
            )


class ServedEngine(Engine):
    """A server that starts the query's process, and starts it again by itself when it dies."""

    command = "dpstream serve demo.toml"
    starts = 2

    def __init__(self, folder: Path, triggers: int = 0) -> None:
        super().__init__(folder)
        self.triggers = triggers
        self._worker = 0

    def start(self, sinks: list[str]) -> None:
        """Start the server once; the second time it has done so itself."""
        self._configure(sinks)
        if self._child is None:
            words = ["serve", "demo.toml", "--port=0", "--operator-port=0", "--json"]
            self._child = spawn(words, self._folder, self._log)
            webbrowser.open(self._address())

    def kill(self) -> int:
        """Kill the worker; what it publishes once more goes to a second sink."""
        worker = self.pid
        self._configure(["out/", "again/"])
        os.kill(worker, signal.SIGKILL)
        return -signal.SIGKILL

    @property
    def pid(self) -> int:
        """The worker's process, a child of the server's."""
        if self._child is not None and self._child.poll() is None:
            server = self._child.pid
            text = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii")
            self._worker = int(text.split()[0]) if text.split() else self._worker
        return self._worker

    def check(self, *, until: float) -> bool:
        """Whether the last release is out; the server itself stays."""
        super().check(until=until)
        return self.newest()[0] >= self.triggers

    def late(self) -> int:
        """Only the operator's side of the server knows."""
        return 0

    def linger(self) -> None:
        """The page stays until Enter, where somebody can press it."""
        if sys.stdin.isatty():
            sys.stdin.readline()

    def end(self) -> None:
        """Stop the server, which stops its worker."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def _configure(self, sinks: list[str]) -> None:
        text = PIPELINE.format(sinks=json.dumps(sinks))
        (self._folder / "demo.toml").write_text(text, encoding="utf-8")

    def _address(self) -> str:
        """Where the page is, once the server says so."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._child and self._child.poll() is None:
            for line in self._log.read_text(encoding="utf-8").splitlines():
                if line.startswith('{"public"'):
                    return str(json.loads(line)["public"]) + "/"
            time.sleep(0.1)
        raise DpstreamError(f"the demo's server does not start: {self._log.read_text()[-2000:]}")
