"""The schedule's clock, injected so that tests own it."""

from __future__ import annotations

import time
from threading import Event
from typing import Protocol


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
    """The machine's clock."""

    real_time = True

    def __init__(self, *, look_every: float = 0.2) -> None:
        self._look_every = look_every

    def now(self) -> int:
        """The time."""
        return time.time_ns() // 1000

    def wait(self, until: int, stop: Event) -> None:
        """Sleep for a moment."""
        left = (until - self.now()) / 1e6
        stop.wait(max(0.0, min(left, self._look_every)))
