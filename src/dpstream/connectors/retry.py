"""How often, and for how long, a connector tries again to reach a server that is away.

What a server says may hold what it was asked with, so only the connector's own words are passed on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from dpstream.errors import ServerUnreachable

T = TypeVar("T")
PATIENCE = 120.0
"""Seconds that a server may be away: long enough for it to be restarted."""
_SHORTEST, _LONGEST = 0.1, 5.0
_log = logging.getLogger("dpstream")


class ServerAway(Exception):
    """A server does not answer now, and may later. Its text is passed on to the operator."""


def unreachable(server: str, problem: Exception) -> ServerUnreachable:
    """The error for a server that does not answer the very first time it is asked."""
    return ServerUnreachable(f"{server} does not answer: {problem}; start it, or mend the address")


class RetryPolicy:
    """Waits longer from try to try, tells the operator, and gives up after `seconds`.

    The time counts from the server's first failure to its next answer. Readers, which must not
    wait, ask whether it is `too_early` for another try; writers, which may, `insist`.

    >>> now = [0.0]
    >>> retry = RetryPolicy("kafka://127.0.0.1:9", seconds=1, now=lambda: now[0])
    >>> retry.report_failure("nobody answers")
    >>> retry.too_early
    True
    >>> now[0] = 2.0
    >>> retry.report_failure("nobody answers")
    Traceback (most recent call last):
    dpstream.errors.ServerUnreachable: kafka://127.0.0.1:9: nobody answers, for 2 s now; start ...
    """

    def __init__(
        self,
        server: str,
        *,
        seconds: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self.seconds, self._now, self._sleep = server, seconds, now, sleep
        self._since: float | None = None
        self._pause = _SHORTEST
        self._next = 0.0

    def report_failure(self, problem: str) -> None:
        """Note that a try failed; raise if all have failed for too long."""
        now = self._now()
        if self._since is None:
            self._since = now
            _log.warning(
                "%s: %s; trying again for %g s", self._server, problem, round(self.seconds, 1)
            )
        elif now < self._next:
            return  # the same failure, told again
        if now - self._since >= self.seconds:
            raise ServerUnreachable(
                f"{self._server}: {problem}, for {now - self._since:.0f} s now; start the server "
                "and run again, nothing is lost; or allow more with patience= (seconds)"
            )
        self._next = now + self._pause
        self._pause = min(_LONGEST, 2 * self._pause)

    def report_success(self) -> None:
        """Note that the server has answered."""
        if self._since is not None:
            away = self._now() - self._since
            _log.warning("%s: answers again, after %.1f s", self._server, away)
        self._since, self._pause, self._next = None, _SHORTEST, 0.0

    @property
    def failing(self) -> bool:
        """Has the server not answered since its last failure?"""
        return self._since is not None

    @property
    def too_early(self) -> bool:
        """Should the next try wait a little longer?"""
        return self._since is not None and self._now() < self._next

    def wait(self) -> None:
        """Wait for the time of the next try."""
        self._sleep(max(0.0, self._next - self._now()))

    def insist(self, work: Callable[[], T]) -> T:
        """Do some work; while it raises `ServerAway`, wait and do it again."""
        while True:
            try:
                result = work()
            except ServerAway as problem:
                self.report_failure(str(problem))
                self.wait()
            else:
                self.report_success()
                return result
