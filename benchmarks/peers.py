"""Other libraries, in an environment of their own, asked over a pipe.

One process stays up for a whole bench, so that ours and theirs can be timed in turns. Each request
and each answer is one line of JSON; `peer_side/` holds what runs over there.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dpstream.errors import MissingDependency

_SIDE = Path(__file__).with_name("peer_side")
_VARIABLE = "DPSTREAM_BENCH_PYTHON"
_PATIENCE = 120.0  # seconds for one answer


class PeerError(MissingDependency):
    """A peer is absent, or could not do what was asked."""


class Peers:
    """A process that answers for the peers; absent ones refuse every question with `reason`."""

    def __init__(self, process: subprocess.Popen[bytes] | None, reason: str = "") -> None:
        self._process, self.reason = process, reason
        self.versions: dict[str, str] = {}

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        if self._process is None:
            raise PeerError(self.reason)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading says so
        answer: dict[str, Any] = json.loads(self._line() or self._lost("ended"))
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _PATIENCE)[0]:
            self._process.kill()
            self._lost(f"gave no answer in {_PATIENCE:.0f} s")
        return self._process.stdout.readline()

    def _lost(self, how: str) -> bytes:
        self.reason, self._process = f"the peers' process {how}", None
        raise PeerError(self.reason)


def python_of_peers() -> Path | None:
    """The peers' interpreter: the one named in the environment, or that of `.venv-bench`."""
    if named := os.environ.get(_VARIABLE):
        return Path(named) if Path(named).is_file() else None
    roots = (Path.cwd(), Path(__file__).resolve().parents[1])
    places = (root / ".venv-bench" / "bin" / "python" for root in roots)
    return next((place for place in places if place.is_file()), None)


@contextmanager
def started(script: str) -> Iterator[Peers]:
    """Start `peer_side/<script>.py` in the peers' environment; absent peers are a value, no error.

    The process inherits this one's core.
    """
    python = python_of_peers()
    if python is None:
        yield Peers(None, _absence())
        return
    command = [
        str(python),
        "-I",
        "-u",
        str(_SIDE / "answer_requests.py"),
        str(_SIDE / f"{script}.py"),
    ]
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                bufsize=0,
            )
        except OSError as error:
            yield Peers(None, f"the peers' Python does not start: {error.strerror}")
            return
        try:
            yield _greeted(Peers(process), complaints)
        finally:
            process.kill()
            process.communicate()


def _greeted(peers: Peers, complaints: IO[bytes]) -> Peers:
    try:
        peers.versions = peers.ask(versions=True)["versions"]
    except PeerError:
        complaints.seek(0)
        last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
        return Peers(None, " ".join([f"{peers.reason} as it started;", *last]).rstrip(";"))
    return peers


def _absence() -> str:
    if named := os.environ.get(_VARIABLE):
        return f"{_VARIABLE} must name a Python interpreter; got {Path(named).name!r}"
    return f"no .venv-bench; make it with `make bench-peers`, or set {_VARIABLE}"
