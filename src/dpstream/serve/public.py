"""The public side: releases, what is known about queries before a row is read, and the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from threading import Semaphore
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dpstream.serve import formats
from dpstream.serve.archive import Archive
from dpstream.serve.assets_app import Assets
from dpstream.serve.described import Described
from dpstream.serve.events import EventStream
from dpstream.serve.guards import HANDLERS, App, Limits, SecurityHeaders
from dpstream.serve.history import History
from dpstream.serve.hub import Hub
from dpstream.serve.parameters import Refusal
from dpstream.serve.public_routes import public_routes
from dpstream.serve.routes import Endpoint, Given, json_answer, known, openapi
from dpstream.serve.what_if import what_if

_MOST_DOWNLOADS = 4  # at the same time; each takes a thread and a release in memory
_ABOUT = (
    "Releases under differential privacy, with error bars, and what is public about them. Nothing "
    "here depends on the data but the releases themselves."
)


@dataclass(frozen=True, kw_only=True)
class Public:
    """What the public side shows."""

    queries: Mapping[str, Described]
    hub: Hub
    ledger: Sequence[Mapping[str, Any]]
    rate: float = 200.0
    burst: int = 1000
    _downloads: Semaphore = field(default_factory=lambda: Semaphore(_MOST_DOWNLOADS))

    def app(self) -> App:
        """As an ASGI application."""
        routes = [*(each.route() for each in self.endpoints()), *Assets().routes()]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with self.hub.running():
                yield

        inner = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        return SecurityHeaders(Limits(inner, rate=self.rate, burst=self.burst))

    def endpoints(self) -> list[Endpoint]:
        """Every route but the page."""
        return public_routes(
            {
                "queries": self._all,
                "query": self._one,
                "windows": self._windows,
                "latest": self._latest,
                "series": self._series,
                "key": self._key,
                "releases": self._releases,
                "download": self._download,
                "events": EventStream(self.hub, self.queries).answer,
                "ledger": self._ledger,
                "what_if": self._what_if,
                "openapi": self._openapi,
            },
            list(self.queries),
        )

    def _all(self, request: Request, given: Given) -> Response:
        return json_answer(
            request, {"queries": [self._shown(each) for each in self.queries.values()]}
        )

    def _one(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._shown(self._query(given)))

    def _shown(self, described: Described) -> dict[str, Any]:
        newest = self.hub.reader.newest(described.name)
        windows = described.query.schedule.windows
        over = newest is not None and windows is not None and newest.window == windows - 1
        return described.public | {
            "finished": over and newest is not None and newest.release == newest.planned
        }

    def _query(self, given: Given) -> Described:
        found: Described = known(self.queries, given["name"], "query")
        return found

    def _history(self, given: Given) -> History:
        return History(described=self._query(given), reader=self.hub.reader)

    def _archive(self, given: Given) -> Archive:
        return Archive(described=self._query(given), reader=self.hub.reader)

    def _windows(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).windows(given["after"], given["limit"]))

    def _latest(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).latest(given))

    def _series(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).series(given))

    def _key(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).key(given["id"], given["window"]))

    def _releases(self, request: Request, given: Given) -> Response:
        archive = self._archive(given)
        if given["format"] == "json":
            return json_answer(request, archive.page(given))
        tables, following = archive.tables(given)
        described = archive.described
        body = b"".join(formats.stream(given["format"], tables, described.schema))
        headers = {"cache-control": "no-cache"}
        if following is not None:
            headers["dpstream-next"] = following
        return Response(body, media_type=formats.TYPES[given["format"]], headers=headers)

    def _download(self, request: Request, given: Given) -> Response:
        archive = self._archive(given)
        if not self._downloads.acquire(blocking=False):
            raise Refusal(503, "too many downloads at the same time", {"retry-after": "5"})
        body = self._counted(
            formats.stream(given["format"], archive.all(given["window"]), archive.described.schema)
        )
        headers = {
            "cache-control": "no-cache",
            "content-disposition": f'attachment; filename="releases.{given["format"]}"',
        }
        return StreamingResponse(body, media_type=formats.TYPES[given["format"]], headers=headers)

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces; when they are over, or nobody wants them any more, another may begin."""

        def until_over() -> Iterator[bytes]:
            try:
                yield b""
                yield from pieces
            finally:
                self._downloads.release()

        begun = until_over()
        next(begun)  # a generator that has begun is closed however the answer ends
        return begun

    def _ledger(self, request: Request, given: Given) -> Response:
        return json_answer(request, {"datasets": self.ledger})

    def _what_if(self, request: Request, given: Given) -> Response:
        described = known(self.queries, given["query"], "query")
        changes = {name: value for name, value in given.items() if name != "query"}
        return json_answer(request, what_if(described, changes))

    def _openapi(self, request: Request, given: Given) -> Response:
        return json_answer(request, self.document())

    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi("dpstream feed", self.endpoints(), version=version("dpstream"), about=_ABOUT)
