"""The moment that all public answers are of, and who waits for the next one.

Releases become visible on a fixed grid of the clock, whenever they were worked out: how long that
took may depend on the data, and is not shown beyond that grid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

from dpstream.serve.store.reader import Released, ReleaseReader

_LOG = logging.getLogger("dpstream.serve")
_KEPT = 1024  # events in memory; who is further behind reads the book
_AT_ONCE = 256
_AHEAD = 16  # new releases whose content is fetched before anybody asks


class Hub:
    """Moves the reader's horizon, and wakes who waits for it."""

    def __init__(
        self,
        reader: ReleaseReader,
        *,
        grid: float = 1.0,
        most_clients: int = 1000,
        most_per_address: int = 100,
    ) -> None:
        self.reader, self.grid = reader, grid
        self.most_clients, self.most_per_address = most_clients, most_per_address
        self.addresses: Counter[str] = Counter()  # of those who follow the events
        self.closing = False
        self.newest = 0  # what events go up to; the reader may be ahead of it for a moment
        self._recent: list[Released] = []
        self._changed = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "hub")  # however busy the threads of requests are

    @property
    def clients(self) -> int:
        """How many follow the events."""
        return self.addresses.total()

    @contextmanager
    def following(self, address: str) -> Iterator[None]:
        """Somebody at this address follows the events while this lasts."""
        self.addresses[address] += 1
        try:
            yield
        finally:
            self.addresses[address] -= 1
            if not self.addresses[address]:
                del self.addresses[address]

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
        if self.newest > seen or self.closing:
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
            first = max(after + 1 - recent[0].id, 0)  # numbers have no gaps
            return recent[first : first + _AT_ONCE]
        return await asyncio.to_thread(self.reader.after, after, _AT_ONCE)

    async def _tick(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(self.grid - time.time() % self.grid)
            try:
                await self._look()
            except Exception as problem:
                if not failing:
                    _LOG.error("releases cannot be read, and are tried again: %s", problem)
                failing = True
            else:
                failing = False

    async def _look(self) -> None:
        """See what is new, in an order in which nobody sees an event without its release."""
        fresh = await asyncio.get_running_loop().run_in_executor(self._pool, self._fresh)
        if fresh:
            self._recent = [*self._recent, *fresh][-_KEPT:] if self._follows(fresh) else fresh
            self.newest = fresh[-1].id
            self._wake()

    def _fresh(self) -> list[Released]:
        after = max(self.newest, self.reader.look() - _KEPT)
        fresh = self.reader.after(after, _KEPT)
        for released in fresh[-_AHEAD:]:
            with suppress(OSError):  # it would be fetched later
                self.reader.expect(released)
        return fresh

    def _follows(self, fresh: list[Released]) -> bool:
        return not self._recent or fresh[0].id == self._recent[-1].id + 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
