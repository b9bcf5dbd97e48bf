"""Server-Sent Events: one for each release, from wherever the client has stopped.

Releases become visible on a fixed grid of the clock, whenever they were worked out: how long that
took may depend on the data, and is not shown beyond that grid.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_history import rows_of
from dpstream.serve.release_store import Released, ReleaseReader
from dpstream.serve.sides import LastingResponse, Places

_LOG = logging.getLogger("dpstream.serve")
_KEPT = 1024  # events in memory; a client that is further behind reads the store
_AT_ONCE = 256
_AHEAD = 16  # new releases whose content is fetched before anybody asks
HEARTBEAT = 15.0
"""Seconds after which a comment shows that the connection is alive."""
_RENDERED = 64  # events whose bytes are kept for the next client


class Hub:
    """Moves the reader's horizon, and wakes the clients that wait for it."""

    def __init__(
        self,
        reader: ReleaseReader,
        *,
        grid: float = 1.0,
        most_clients: int = 1000,
        most_per_address: int = 100,
    ) -> None:
        self.reader, self.grid = reader, grid
        self.followers = Places(
            "clients follow the events", most=most_clients, per_address=most_per_address
        )
        self.closing = False
        self.newest = 0  # what events go up to; the reader may be ahead of it for a moment
        self._recent: list[Released] = []
        self.looked = asyncio.Event()
        """Set once it is known what was there at the beginning."""
        self._changed = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "hub")  # however busy the threads of requests are

    @property
    def clients(self) -> int:
        """How many follow the events."""
        return self.followers.addresses.total()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for releases while this lasts."""
        await self._look()
        self.looked.set()
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()
            self.shut()

    def shut(self) -> None:
        """Wake every client, and end its stream."""
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
            first = bisect_right(recent, after, key=lambda released: released.id)
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
            follows = not self._recent or fresh[0].id == self._recent[-1].id + 1
            self._recent = [*self._recent, *fresh][-_KEPT:] if follows else fresh
            self.newest = fresh[-1].id
            self._wake()

    def _fresh(self) -> list[Released]:
        after = max(self.newest, self.reader.look() - _KEPT)
        fresh = self.reader.after(after, _KEPT)
        for released in fresh[-_AHEAD:]:
            with suppress(OSError):  # it would be fetched later
                self.reader.expect(released)
        return fresh

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventStream:
    """Writes releases as events; clients are never waited for, and hold nothing up."""

    def __init__(self, hub: Hub, queries: Mapping[str, QueryDescription]) -> None:
        self._hub, self._queries = hub, queries
        self._rendered: OrderedDict[tuple[int, bool], bytes] = OrderedDict()

    def answer(self, request: Request, given: Mapping[str, Any]) -> Response:
        """The stream, from after `last_id` or the client's last event; from now on otherwise."""
        last = given["last_id"]
        told = request.headers.get("last-event-id", "")
        if told.isascii() and told.isdigit() and len(told) <= 18:
            last = int(told)
        return LastingResponse(
            self._follow(last, rows=given["rows"] == 1),
            self._hub.followers,
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _follow(self, last: int | None, *, rows: bool) -> AsyncIterator[bytes]:
        hub = self._hub
        at = hub.newest if last is None else last
        yield b"retry: 2000\n\n"
        if at > hub.newest:  # of another store: there is nothing to go on from
            at = hub.newest
            yield f"id: {at}\nevent: reset\ndata: {json.dumps({'id': at})}\n\n".encode()
        while not hub.closing:
            if not await hub.wait(at, HEARTBEAT):
                yield b": still here\n\n"
                continue
            for released in await hub.events(at):
                yield await self._bytes(released, rows=rows)
                at = released.id

    async def _bytes(self, released: Released, *, rows: bool) -> bytes:
        place = (released.id, rows)
        known = self._rendered.get(place)
        if known is None:
            render = partial(self._render, released, rows)
            known = await asyncio.to_thread(render) if rows else render()
            self._rendered[place] = known
            while len(self._rendered) > _RENDERED:
                self._rendered.popitem(last=False)
        return known

    def _render(self, released: Released, rows: bool) -> bytes:
        data = released.facts | {"groups": released.rows}
        description = self._queries.get(released.query)
        if rows and description is not None:
            try:
                segment = self._hub.reader.segment(released)
            except KeyError:
                return b""  # it is no longer served
            data["rows"] = rows_of(description, segment, segment.fresh)
        text = json.dumps(data, separators=(",", ":"))  # one line: line ends are escaped
        return f"id: {released.id}\nevent: release\ndata: {text}\n\n".encode()
