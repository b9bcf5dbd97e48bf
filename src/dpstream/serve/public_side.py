"""The public side: releases, what is known about queries before a row is read, and the page."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from threading import Semaphore
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dpstream.serve.event_stream import EventStream, Hub
from dpstream.serve.middleware import HANDLERS, App, Limits, SecurityHeaders
from dpstream.serve.public_facts import QueryDescription, what_if
from dpstream.serve.release_files import FILE_TYPES, Archive, file_stream
from dpstream.serve.release_history import History
from dpstream.serve.release_segments import KEY_ID
from dpstream.serve.routing import (
    Endpoint,
    Given,
    Parameter,
    Refusal,
    etag,
    find_or_404,
    json_answer,
    openapi,
)

_WINDOW = Parameter("window", "The number of a window.", kind="integer", least=0, most=2**53)
_WINDOW_OR_ALL = Parameter(
    "window", "A window's number, or all.", pattern=r"^(all|[0-9]{1,15})$", longest=15
)
_BEFORE = replace(_WINDOW, name="after", about="The cursor `next` of the page before.")
_AFTER = Parameter("after", _BEFORE.about, longest=25, pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?$")
_LIMIT = Parameter(
    "limit", "The most that is given.", kind="integer", least=1, most=200, default=50
)
_OFFSET = Parameter("offset", "Rows to leave out.", kind="integer", least=0, most=10**9, default=0)
_SORT = Parameter("sort", "The aggregate to sort by.", longest=200)
_ORDER = Parameter("order", "Its direction.", choices=("desc", "asc"), default="desc")
_TEXT = Parameter("q", "A text that keys must contain.", longest=200)
_KEY = Parameter("key", "A key as a JSON array.", longest=6000)
_ID = Parameter("id", "The id of a key.", pattern=KEY_ID, longest=32)
_FORMAT = Parameter("format", "The kind of file.", choices=tuple(FILE_TYPES), required=True)
_ANY_FORMAT = replace(_FORMAT, choices=("json", *FILE_TYPES), default="json", required=False)
_LAST_ID = Parameter(
    "last_id",
    "The last event that was seen; 0: all of them.",
    kind="integer",
    least=0,
    most=10**18 - 1,
)
_ROWS = Parameter("rows", "1: with the rows.", kind="integer", least=0, most=1, default=0)
_BOUND = Parameter(
    "max_groups_contributed", "Another bound on groups.", kind="integer", least=1, most=100_000
)
_CHANGES = (
    Parameter("epsilon", "Another epsilon.", kind="number", least=0.001, most=100),
    Parameter("delta", "Another delta.", kind="number", least=1e-18, most=0.1),
    _BOUND,
    replace(_BOUND, name="max_rows_per_group", about="Another bound on the rows in a group."),
)
_FILES: dict[str, Any] = {kind.partition(";")[0]: {} for kind in FILE_TYPES.values()}
_QUERY = "/api/queries/{name}"
_OF_QUERY = (404, 422, 429)
_MOST_DOWNLOADS = 4  # at the same time; each takes a thread and a release in memory
_ABOUT = (
    "Releases under differential privacy, with error bars, and what is public about them. Nothing "
    "here depends on the data but the releases themselves."
)
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_PAGE = "index.html"


@dataclass(frozen=True, kw_only=True)
class PublicSide:
    """What the public side shows."""

    queries: Mapping[str, QueryDescription]
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
        about = "The name of a query."
        name = Parameter("name", about, place="path", longest=200, names=list(self.queries))
        query = replace(name, name="query", place="query", required=True)
        thinned = replace(
            _LIMIT, about="More releases than this are thinned.", most=2000, default=2000
        )
        return [
            Endpoint("/api/queries", "All queries.", self._all),
            Endpoint(_QUERY, "One query.", self._one, parameters=[name], refuses=_OF_QUERY),
            Endpoint(
                f"{_QUERY}/windows",
                "The windows that were published, newest first.",
                self._windows,
                parameters=[name, _BEFORE, _LIMIT],
                refuses=_OF_QUERY,
            ),
            Endpoint(
                f"{_QUERY}/latest",
                "The newest value of every key in a window, sorted and searched.",
                self._latest,
                parameters=[name, _WINDOW, _SORT, _ORDER, _LIMIT, _OFFSET, _TEXT],
                refuses=_OF_QUERY,
            ),
            Endpoint(
                f"{_QUERY}/series",
                "The releases of some keys over time.",
                self._series,
                parameters=[
                    name,
                    *(replace(one, repeated=12) for one in (_KEY, _ID)),
                    _WINDOW_OR_ALL,
                    thinned,
                ],
                refuses=_OF_QUERY,
            ),
            Endpoint(
                f"{_QUERY}/keys/{{id}}",
                "The full text of a key.",
                self._key,
                parameters=[name, replace(_ID, place="path"), _WINDOW],
                refuses=_OF_QUERY,
            ),
            Endpoint(
                f"{_QUERY}/releases",
                "Everything that was published, oldest first, page by page.",
                self._releases,
                parameters=[
                    name,
                    _WINDOW,
                    _AFTER,
                    replace(_LIMIT, most=10_000, default=1000),
                    _KEY,
                    _ID,
                    _ANY_FORMAT,
                ],
                gives={"application/json": {"type": "object"}} | _FILES,
                refuses=_OF_QUERY,
            ),
            Endpoint(
                f"{_QUERY}/download",
                "Everything that was published (in a window), in one file.",
                self._download,
                parameters=[name, _FORMAT, _WINDOW],
                gives=_FILES,
                refuses=(*_OF_QUERY, 503),
            ),
            Endpoint(
                "/api/events",
                "An event for each release, from last_id (or Last-Event-ID) on.",
                EventStream(self.hub, self.queries).answer,
                parameters=[_LAST_ID, _ROWS],
                gives={"text/event-stream": {"type": "string"}},
                refuses=(422, 429, 503),
                quick=True,
            ),
            Endpoint(
                "/api/ledger",
                "What was promised, and what was declared to be spent.",
                self._ledger,
            ),
            Endpoint(
                "/api/what-if",
                "The error that other parameters would have.",
                self._what_if,
                parameters=[query, *_CHANGES],
                refuses=(404, 409, 422, 429, 503),
            ),
            Endpoint("/openapi.json", "This document.", self._openapi),
        ]

    def _all(self, request: Request, given: Given) -> Response:
        return json_answer(
            request, {"queries": [self._shown(each) for each in self.queries.values()]}
        )

    def _one(self, request: Request, given: Given) -> Response:
        return json_answer(request, self._shown(self._query(given)))

    def _shown(self, description: QueryDescription) -> dict[str, Any]:
        newest = self.hub.reader.newest(description.name)
        windows = description.query.schedule.windows
        over = newest is not None and windows is not None and newest.window == windows - 1
        return description.public | {
            "finished": over and newest is not None and newest.release == newest.planned
        }

    def _query(self, given: Given) -> QueryDescription:
        query: QueryDescription = find_or_404(self.queries, given["name"], "query")
        return query

    def _history(self, given: Given) -> History:
        return History(description=self._query(given), reader=self.hub.reader)

    def _archive(self, given: Given) -> Archive:
        return Archive(description=self._query(given), reader=self.hub.reader)

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
        description = archive.description
        body = b"".join(file_stream(given["format"], tables, description.schema))
        headers = {"cache-control": "no-cache"}
        if following is not None:
            headers["dpstream-next"] = following
        return Response(body, media_type=FILE_TYPES[given["format"]], headers=headers)

    def _download(self, request: Request, given: Given) -> Response:
        archive = self._archive(given)
        if not self._downloads.acquire(blocking=False):
            raise Refusal(503, "too many downloads at the same time", {"retry-after": "5"})
        body = self._count_download(
            file_stream(given["format"], archive.all(given["window"]), archive.description.schema)
        )
        headers = {
            "cache-control": "no-cache",
            "content-disposition": f'attachment; filename="releases.{given["format"]}"',
        }
        return StreamingResponse(body, media_type=FILE_TYPES[given["format"]], headers=headers)

    def _count_download(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
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
        description = find_or_404(self.queries, given["query"], "query")
        changes = {name: value for name, value in given.items() if name != "query"}
        return json_answer(request, what_if(description, changes))

    def _openapi(self, request: Request, given: Given) -> Response:
        return json_answer(request, self.document())

    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi("dpstream feed", self.endpoints(), version=version("dpstream"), about=_ABOUT)


class Assets:
    """The files of the page, read once, and served with their digests."""

    def __init__(self) -> None:
        folder = Path(__file__).parent / "assets"
        self._files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        self._etags = {name: etag(content) for name, content in self._files.items()}

    def routes(self) -> list[Route]:
        """The page, and what it needs."""

        async def page(request: Request) -> Response:
            return self._answer(request, _PAGE)

        async def asset(request: Request) -> Response:
            return self._answer(request, request.path_params["path"])

        return [Route("/", page), Route("/assets/{path:path}", asset)]

    def _answer(self, request: Request, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise Refusal(404, "there is nothing here")
        # a new version of the program has other files under the same names: ask, but do not load
        headers = {"etag": self._etags[name], "cache-control": "no-cache"}
        if self._etags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        suffix = f".{name.rpartition('.')[2]}"
        kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, media_type=kind, headers=headers)
