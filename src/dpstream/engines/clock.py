"""The schedule's clock, injected so that tests own it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event, Lock
from typing import Protocol

_LOG = logging.getLogger("dpstream.sources")
_JUMP = 10_000_000  # microseconds; what is less is followed: clocks are set right all the time
_PAUSE = 1_000_000  # microseconds


class Clock(Protocol):
    """What time it is, and waiting for it, in microseconds since the Unix epoch.

    `real_time`: time passes while nobody waits. Then live sources are read and queries are served
    on threads of their own; with any other clock everything happens in the caller's thread, in one
    order.
    """

    real_time: bool

    def now(self) -> int:
        """The time."""

    def wait(self, until: int, stop: Event) -> None:
        """Return at `until`, or earlier: soon enough to look for new rows, or when stopped."""


class SystemClock:
    """The machine's clock. A jump is told of once, and one ahead is believed only if it stays.

    A trigger that is published cannot be taken back. So for `believe_after` seconds after a jump
    ahead time goes on as before: a clock that is set right by then has published nothing early.
    """

    real_time = True

    def __init__(
        self,
        *,
        look_every: float = 0.2,
        believe_after: float = 60.0,
        wall: Callable[[], int] = time.time_ns,
        steady: Callable[[], int] | None = None,
    ) -> None:
        self._look_every, self._believe_after = look_every, int(believe_after * 1e6)
        self._wall, self._steady = wall, steady or _steady
        self._lock = Lock()
        self._offset = (wall() - self._steady()) // 1000
        """Of the time that is believed, from one that never jumps."""
        self._ahead_since: int | None = None

    def now(self) -> int:
        """The time."""
        with self._lock:
            steady = self._steady() // 1000
            offset = self._wall() // 1000 - steady
            jump, since = offset - self._offset, self._ahead_since
            if abs(jump) < _JUMP:
                if since is not None:
                    _LOG.warning("the clock was set back to where it was: nothing came early")
                self._offset, self._ahead_since = offset, None
            elif jump < 0:
                _LOG.warning(
                    "the clock went back by %d s: what was published stays, and the next trigger "
                    "comes when the clock is there again",
                    -jump // 1_000_000,
                )
                self._offset, self._ahead_since = offset, None
            elif since is None:
                _LOG.warning(
                    "the clock went ahead by %d s: triggers come as before for %d s, until it is "
                    "set back or believed",
                    jump // 1_000_000,
                    self._believe_after // 1_000_000,
                )
                self._ahead_since = steady
            elif steady - since >= self._believe_after:
                self._offset, self._ahead_since = offset, None
            return steady + self._offset

    def wait(self, until: int, stop: Event) -> None:
        """Sleep for a moment."""
        left = (until - self.now()) / 1e6
        stop.wait(max(0.0, min(left, self._look_every)))


def _steady() -> int:
    """Nanoseconds that nobody sets, also while the machine sleeps where the system has that."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class OverdueTriggers:
    """Counts triggers that are taken after their time; after `most` in a row there is a pause."""

    def __init__(self, clock: Clock, stop: Event, most: int) -> None:
        self._clock, self._stop, self._most, self._row = clock, stop, most, 0

    def pace(self, due: int) -> None:
        """Take the next trigger, whose time is `due`; pause before it if it is one too many."""
        now = self._clock.now()
        self._row = self._row + 1 if due <= now else 0
        if self._row <= self._most:
            return
        if self._row == self._most + 1:
            _LOG.warning(
                "%d triggers in a row were overdue, this one by %d s; they go on, %d at once and "
                "then a second's pause (overdue_at_once)",
                self._most,
                (now - due) // 1_000_000,
                self._most,
            )
        if self._row % self._most == 1 or self._most == 1:
            while self._clock.now() < now + _PAUSE and not self._stop.is_set():
                self._clock.wait(now + _PAUSE, self._stop)
