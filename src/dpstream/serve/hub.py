"""The moment that all public answers are of, and who waits for the next one.

Releases become visible on a fixed grid of the clock, whenever they were worked out: how long that
took may depend on the data, and is not shown beyond that grid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dpstream.serve.store.reader import Released, ReleaseReader

_KEPT = 1024  # events in memory; who is further behind reads the book
_AT_ONCE = 256


class Hub:
    """Moves the reader's horizon, and wakes who waits for it."""

    def __init__(
        self, reader: ReleaseReader, *, grid: float = 1.0, most_clients: int = 1000
    ) -> None:
        self.reader, self.grid, self.most_clients = reader, grid, most_clients
        self.clients = 0
        self.closing = False
        self._recent: list[Released] = []
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for releases while this lasts."""
        await self._look()
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()
            self.shut()

    def shut(self) -> None:
        """Let everybody go."""
        self.closing = True
        self._wake()

    async def wait(self, seen: int, timeout: float) -> bool:
        """Return when there is something after `seen` (True), or after a time."""
        if self.reader.horizon > seen or self.closing:
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def events(self, after: int) -> list[Released]:
        """Some of the releases after a number, oldest first."""
        recent = self._recent
        if recent and recent[0].id <= after + 1:
            return [one for one in recent[-(recent[-1].id - after) :] if one.id > after][:_AT_ONCE]
        return await asyncio.to_thread(self.reader.after, after, _AT_ONCE)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.grid - time.time() % self.grid)
            await self._look()

    async def _look(self) -> None:
        before = self.reader.horizon
        if await asyncio.to_thread(self.reader.look) > before:
            last = self._recent[-1].id if self._recent else max(before, self.reader.horizon - _KEPT)
            fresh = await asyncio.to_thread(self.reader.after, last, _KEPT)
            if fresh and fresh[-1].id < self.reader.horizon:  # too many to keep them together
                last = self.reader.horizon - _KEPT
                fresh = await asyncio.to_thread(self.reader.after, last, _KEPT)
                self._recent = []
            self._recent = [*self._recent, *fresh][-_KEPT:]
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
