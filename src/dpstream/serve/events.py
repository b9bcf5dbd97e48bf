"""Server-Sent Events: one for each release, from wherever the client has stopped."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dpstream.serve.described import Described
from dpstream.serve.hub import Hub
from dpstream.serve.parameters import Refusal
from dpstream.serve.shown_rows import rows_of
from dpstream.serve.store.reader import Released

HEARTBEAT = 15.0
"""Seconds after which a comment shows that the connection is alive."""
_RENDERED = 64  # events whose bytes are kept for the next client


class EventStream:
    """Writes releases as events; clients are never waited for, and hold nothing up."""

    def __init__(self, hub: Hub, queries: Mapping[str, Described]) -> None:
        self._hub, self._queries = hub, queries
        self._rendered: OrderedDict[tuple[int, bool], bytes] = OrderedDict()

    def answer(self, request: Request, given: Mapping[str, Any]) -> Response:
        """The stream, from after `last_id` or the client's last event; from now on otherwise."""
        hub, address = self._hub, "" if request.client is None else request.client.host
        if hub.clients >= hub.most_clients:
            raise Refusal(503, "too many clients follow the events", {"retry-after": "5"})
        if hub.addresses[address] >= hub.most_per_address:
            raise Refusal(429, "too many from this address follow the events", {"retry-after": "5"})
        last = given["last_id"]
        told = request.headers.get("last-event-id", "")
        if told.isascii() and told.isdigit() and len(told) <= 18:
            last = int(told)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        content = self._follow(last, address, rows=given["rows"] == 1)
        return StreamingResponse(content, media_type="text/event-stream", headers=headers)

    async def _follow(self, last: int | None, address: str, *, rows: bool) -> AsyncIterator[bytes]:
        hub = self._hub
        with hub.following(address):
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
            known = (
                await asyncio.to_thread(self._render, released, rows)
                if rows
                else self._render(released, rows)
            )
            self._rendered[place] = known
            while len(self._rendered) > _RENDERED:
                self._rendered.popitem(last=False)
        return known

    def _render(self, released: Released, rows: bool) -> bytes:
        data: dict[str, Any] = {
            "id": released.id,
            "query": released.query,
            "window": released.window,
            "start": released.start,
            "end": released.end,
            "release_index": released.release,
            "releases": released.planned,
            "time": released.time,
            "groups": released.rows,
        }
        described = self._queries.get(released.query)
        if rows and described is not None:
            segment = self._hub.reader.segment(released)
            data["rows"] = rows_of(described, segment, segment.fresh)
        text = json.dumps(data, separators=(",", ":"))  # one line: line ends are escaped
        return f"id: {released.id}\nevent: release\ndata: {text}\n\n".encode()
