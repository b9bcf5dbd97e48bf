"""The public side: releases, what is known about queries before a row is read, and the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from threading import Semaphore
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dpstream.serve import formats
from dpstream.serve.assets_app import Assets
from dpstream.serve.described import Described
from dpstream.serve.events import EventStream
from dpstream.serve.guards import HANDLERS, App, Limits, SecurityHeaders
from dpstream.serve.history import History
from dpstream.serve.hub import Hub
from dpstream.serve.parameters import Parameter, Refusal
from dpstream.serve.routes import Endpoint, Given, json_answer, known, openapi
from dpstream.serve.store.keys import KEY_ID
from dpstream.serve.what_if import what_if

_MOST_DOWNLOADS = 4  # at the same time; each takes a thread and a release in memory
_NAME = Parameter(name="name", about="The name of a query.", place="path", longest=200)
_WINDOW = Parameter(
    name="window", about="The number of a window.", kind="integer", least=0, most=2**53
)
_LIMIT = Parameter(
    name="limit", about="The most that is given.", kind="integer", least=1, most=200, default=50
)
_FORMAT = Parameter(
    name="format", about="The kind of file.", choices=tuple(formats.TYPES), required=True
)
_FILES: dict[str, Any] = {kind.partition(";")[0]: {} for kind in formats.TYPES.values()}
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
        endpoints = self.endpoints()
        assets = Assets()
        routes = [
            *(each.route() for each in endpoints),
            *assets.routes(),
        ]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with self.hub.running():
                yield

        inner = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        return SecurityHeaders(Limits(inner, rate=self.rate, burst=self.burst))

    def endpoints(self) -> list[Endpoint]:
        """Every route but the page."""
        events = EventStream(self.hub, self.queries)
        text = {"text/event-stream": {"type": "string"}}
        of_query = "/api/queries/{name}"
        whole = Parameter(
            name="window",
            about="A window's number, or all.",
            pattern=r"^(all|[0-9]{1,15})$",
            longest=15,
        )
        after = Parameter(
            name="after",
            about="The cursor `next` of the page before.",
            longest=40,
            pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?$",
        )
        one_key = Parameter(name="key", about="A key as a JSON array.", longest=6000)
        one_id = Parameter(name="id", about="The id of a key.", pattern=KEY_ID, longest=32)
        return [
            Endpoint(path="/api/queries", summary="All queries.", handler=self._all),
            Endpoint(
                path=of_query,
                summary="One query.",
                handler=self._one,
                parameters=[_NAME],
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/windows",
                summary="The windows that were published, newest first.",
                handler=self._windows,
                parameters=[
                    _NAME,
                    replace(_WINDOW, name="after", about="The cursor `next` of the page before."),
                    _LIMIT,
                ],
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/latest",
                summary="The newest value of every key in a window, sorted and searched.",
                handler=self._latest,
                parameters=[
                    _NAME,
                    _WINDOW,
                    Parameter(name="sort", about="The aggregate to sort by.", longest=200),
                    Parameter(
                        name="order",
                        about="Its direction.",
                        choices=("desc", "asc"),
                        default="desc",
                    ),
                    _LIMIT,
                    Parameter(
                        name="offset",
                        about="Rows to leave out.",
                        kind="integer",
                        least=0,
                        most=10**9,
                        default=0,
                    ),
                    Parameter(name="q", about="A text that keys must contain.", longest=200),
                ],
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/series",
                summary="The releases of some keys over time.",
                handler=self._series,
                parameters=[
                    _NAME,
                    replace(one_key, repeated=12),
                    replace(one_id, repeated=12),
                    whole,
                    replace(_LIMIT, most=2000, default=2000),
                ],
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/keys/{{id}}",
                summary="The full text of a key.",
                handler=self._key,
                parameters=[_NAME, replace(one_id, place="path"), _WINDOW],
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/releases",
                summary="Everything that was published, oldest first, page by page.",
                handler=self._releases,
                parameters=[
                    _NAME,
                    _WINDOW,
                    after,
                    replace(_LIMIT, most=10_000, default=1000),
                    one_key,
                    one_id,
                    replace(
                        _FORMAT, choices=("json", *formats.TYPES), default="json", required=False
                    ),
                ],
                gives={"application/json": {"type": "object"}, **_FILES},
                refuses=(404, 422, 429),
            ),
            Endpoint(
                path=f"{of_query}/download",
                summary="Everything that was published (in a window), in one file.",
                handler=self._download,
                parameters=[_NAME, _FORMAT, _WINDOW],
                gives=_FILES,
                refuses=(404, 422, 429, 503),
            ),
            Endpoint(
                path="/api/events",
                summary="An event for each release, from last_id (or Last-Event-ID) on.",
                handler=events.answer,
                parameters=[
                    Parameter(
                        name="last_id",
                        about="The last event that was seen; 0: all.",
                        kind="integer",
                        least=0,
                        most=10**18 - 1,
                    ),
                    Parameter(
                        name="rows",
                        about="1: with the rows.",
                        kind="integer",
                        least=0,
                        most=1,
                        default=0,
                    ),
                ],
                gives=text,
                refuses=(422, 429, 503),
                quick=True,
            ),
            Endpoint(
                path="/api/ledger",
                summary="What was promised, and declared to be spent.",
                handler=self._ledger,
            ),
            Endpoint(
                path="/api/what-if",
                summary="The error that other parameters would have.",
                handler=self._what_if,
                parameters=[
                    Parameter(
                        name="query", about="The name of a query.", longest=200, required=True
                    ),
                    Parameter(
                        name="epsilon",
                        about="Another epsilon.",
                        kind="number",
                        least=0.001,
                        most=100,
                    ),
                    Parameter(
                        name="delta", about="Another delta.", kind="number", least=1e-18, most=0.1
                    ),
                    Parameter(
                        name="max_groups_contributed",
                        about="Another bound on groups.",
                        kind="integer",
                        least=1,
                        most=100_000,
                    ),
                    Parameter(
                        name="max_rows_per_group",
                        about="Another bound on rows in a group.",
                        kind="integer",
                        least=1,
                        most=100_000,
                    ),
                ],
                refuses=(404, 409, 422, 429),
            ),
            Endpoint(path="/openapi.json", summary="This document.", handler=self._openapi),
        ]

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

    def _windows(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).windows(given["after"], given["limit"]))

    def _latest(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).latest(given))

    def _series(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).series(given))

    def _key(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._history(given).key(given["id"], given["window"]))

    def _releases(self, request: Request, given: Given) -> Response:
        history = self._history(given)
        if given["format"] == "json":
            return json_answer(request, history.page(given))
        tables, following = history.tables(given)
        described = history.described
        body = b"".join(formats.stream(given["format"], tables, described.schema))
        headers = {"cache-control": "no-cache"}
        if following is not None:
            headers["dpstream-next"] = following
        return Response(body, media_type=formats.TYPES[given["format"]], headers=headers)

    def _download(self, request: Request, given: Given) -> Response:
        history = self._history(given)
        if not self._downloads.acquire(blocking=False):
            raise Refusal(503, "too many downloads at the same time", {"retry-after": "5"})
        body = self._counted(
            formats.stream(given["format"], history.all(given["window"]), history.described.schema)
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
