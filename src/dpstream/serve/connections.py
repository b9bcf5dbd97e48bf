"""Connections with limits: of time, of number by address, and for clients that do not read.

A connection waits, is answered, waits again. One that waits has little time for its next request,
and is the first to go when there are too many of its address, or of all; one that is answered goes
if its client does not take what it is sent. So who is slow takes nothing from who is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SECONDS = 10.0
"""For the head of a request, from when the connection is made or its last answer is out."""
STALLED_SECONDS = 30.0
"""For `LEAST_BYTES` of a body, or of an answer that has to wait for its client."""
LEAST_BYTES = 1 << 16
_SAYING = 60.0  # seconds for which a line that was logged is counted and not repeated
_LINES = 5  # of one kind that are logged before that


class Connections:
    """The open connections of one side, and which of them wait for a request, oldest first."""

    def __init__(self, *, most: int, per_address: int) -> None:
        self.most, self.per_address = most, per_address
        self.open: Counter[str] = Counter()
        self._waiting: OrderedDict[LimitedConnection, None] = OrderedDict()
        self._waiting_at: dict[str, OrderedDict[LimitedConnection, None]] = {}

    def enter(self, one: LimitedConnection) -> bool:
        """Let a connection in, for one that waits if there are too many; False: none does."""
        before = self._waiting_at.get(one.address, OrderedDict())
        crowd: OrderedDict[LimitedConnection, None] | None = None
        if self.open[one.address] >= self.per_address:
            crowd = before
        elif self.open.total() >= self.most:
            crowd = self._waiting
        oldest = next(iter(crowd), None) if crowd else None
        self.open[one.address] += 1
        self.wait(one)
        if oldest is not None:
            oldest.drop()
        return crowd is None or oldest is not None

    def wait(self, one: LimitedConnection) -> None:
        """It waits for a request."""
        self._waiting[one] = None
        self._waiting_at.setdefault(one.address, OrderedDict())[one] = None

    def answer(self, one: LimitedConnection) -> None:
        """It has a request that is to be answered."""
        self._waiting.pop(one, None)
        there = self._waiting_at.get(one.address, OrderedDict())
        there.pop(one, None)
        if not there:
            self._waiting_at.pop(one.address, None)

    def leave(self, one: LimitedConnection) -> None:
        """It is over."""
        self.answer(one)
        self.open -= Counter([one.address])  # an address without connections is forgotten


class LimitedConnection(H11Protocol):
    """One connection; uvicorn's own, with a clock beside it."""

    def __init__(self, *args: Any, limits: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits, self.address = limits, ""
        self._clock: asyncio.TimerHandle | None = None  # of a request that is to come
        self._stalled: asyncio.TimerHandle | None = None  # of an answer that is to go
        self._came, self._resumed, self._open = 0, 0, False

    def connection_made(self, transport: Any) -> None:
        """Count it; one too many is answered with 503, and goes when the next one comes."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._open = True
        if not self._limits.enter(self):
            self.limit_concurrency = 0
        self._set_clock(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of it stays."""
        self._set_clock(None)
        self._stop_stalled()
        if self._open:
            self._open = False
            self._limits.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A request begins when its head is whole; of its body enough must come in time."""
        self._came += len(data)
        before = self.cycle
        super().data_received(data)
        answer = self._answer()
        if answer is not None and answer is not before:
            self._begin(answer)
        elif answer is not None and not answer.more_body:
            self._set_clock(None)

    def eof_received(self) -> None:
        """The client sends no more; what it is still sent must be out in time."""
        super().eof_received()
        self._set_clock(STALLED_SECONDS)

    def on_response_complete(self) -> None:
        """It waits again, and what is unsent, or unread of the last body, must be over in time."""
        answered = self.cycle
        if self._open:
            self._limits.wait(self)
        unsent = self.transport.get_write_buffer_size()
        self._set_clock(STALLED_SECONDS if unsent else HEAD_SECONDS)
        super().on_response_complete()
        if self.cycle is not answered:  # the next request was there already
            self._begin(self.cycle)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered; it may, within limits."""
        super().pause_writing()
        if self._stalled is None:
            self._watch_stalled()

    def resume_writing(self) -> None:
        """The client has taken most of what had to wait: at least 48 KiB."""
        self._resumed += 1
        super().resume_writing()

    def drop(self) -> None:
        """End it now, whatever is unsent."""
        if self._open:
            self._open = False
            self._limits.leave(self)
        self.transport.abort()

    def _answer(self) -> RequestResponseCycle | None:
        """The answer that is under way."""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _begin(self, answer: RequestResponseCycle) -> None:
        self._limits.answer(self)
        self._set_clock(STALLED_SECONDS if answer.more_body else None)

    def _set_clock(self, seconds: float | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock, self._came = None, 0
        if seconds is not None and self._open:
            self._clock = self.loop.call_later(seconds, self._out_of_time)

    def _out_of_time(self) -> None:
        """Go on if a body comes along fast enough; end it otherwise."""
        answer = self._answer()
        if answer is not None and self._came >= LEAST_BYTES:
            self._set_clock(STALLED_SECONDS if answer.more_body else None)
        else:
            self.drop()

    def _watch_stalled(self) -> None:
        self._resumed = 0
        self._stalled = self.loop.call_later(STALLED_SECONDS, self._out_of_patience)

    def _out_of_patience(self) -> None:
        self._stalled = None
        if not self._resumed:
            self.drop()
        elif self.flow.write_paused:
            self._watch_stalled()

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = None


class Throttle(logging.Filter):
    """Lets a few lines of each kind through a minute; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # text -> since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Is it logged?"""
        now, kind = time.monotonic(), str(record.msg)
        since, count = self._seen.get(kind, (now, 0))
        if now - since >= _SAYING:
            if count > _LINES:
                record.msg = f"{kind} ({count - _LINES} more like it were left out)"
            since, count = now, 0
        self._seen[kind] = (since, count + 1)
        return count < _LINES


@contextmanager
def throttled(*names: str) -> Iterator[None]:
    """What these loggers say is throttled while this lasts: a client must not fill a log."""
    throttle = Throttle()
    for name in names:
        logging.getLogger(name).addFilter(throttle)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(throttle)
