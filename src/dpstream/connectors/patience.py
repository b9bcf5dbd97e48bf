"""Servers that are away for a while: how often to try again, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from dpstream.errors import InvalidParameter, ServerUnreachable

T = TypeVar("T")

SECONDS = 60.0
"""How long a run waits for a server that went away, unless its address says `patience`."""
_FIRST, _LONGEST = 0.05, 5.0
_log = logging.getLogger("dpstream")


class Away:
    """Since when a server is away, and when it is worth trying again: ever less often.

    >>> away = Away("the server at nowhere:1", seconds=0)
    >>> away.due()
    True
    >>> away.failed("connection refused")
    Traceback (most recent call last):
    dpstream.errors.ServerUnreachable: the server at nowhere:1 did not answer for ... seconds...
    """

    def __init__(self, what: str, *, seconds: float = SECONDS) -> None:
        self._what, self._seconds = what, seconds
        self._since: float | None = None
        self._next, self._pause = 0.0, _FIRST

    def due(self) -> bool:
        """Is it time to try?"""
        return time.monotonic() >= self._next

    def failed(self, problem: object) -> None:
        """A try has failed; raises once the patience is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            _log.warning("%s does not answer (%s); trying again", self._what, problem)
        if now - self._since >= self._seconds:
            raise ServerUnreachable(
                f"{self._what} did not answer for {now - self._since:.0f} seconds: {problem}; "
                "start it, or mend the address, and run again: nothing is lost"
            )
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST)

    def wait(self) -> None:
        """Sleep until it is time to try."""
        time.sleep(max(0.0, self._next - time.monotonic()))

    def back(self) -> None:
        """It has answered."""
        if self._since is not None:
            _log.warning("%s is back", self._what)
        self._since, self._next, self._pause = None, 0.0, _FIRST


def keep_trying(
    work: Callable[[], T],
    *,
    again: type[Exception] | tuple[type[Exception], ...],
    what: str,
    seconds: float = SECONDS,
) -> T:
    """Do the work; while it fails with `again`, wait and do it again, until patience is over."""
    away = Away(what, seconds=seconds)
    while True:
        try:
            found = work()
        except again as problem:
            away.failed(problem)
            away.wait()
        else:
            away.back()
            return found


def seconds_of(text: str | None) -> float:
    """The patience that an address asks for."""
    try:
        found = SECONDS if text is None else float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise InvalidParameter(f"patience must be a number of seconds; got {text!r}")
    return found
