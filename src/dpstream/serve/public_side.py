"""The public side: releases, what is known about queries before a row is read, and the page."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from threading import Semaphore
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dpstream.serve.endpoints import (
    Endpoint,
    Given,
    Handler,
    Parameter,
    Refusal,
    json_answer,
    known,
    openapi,
)
from dpstream.serve.event_stream import EventStream, Hub
from dpstream.serve.middleware import HANDLERS, App, Limits, SecurityHeaders
from dpstream.serve.public_facts import Described, what_if
from dpstream.serve.release_files import FILE_TYPES, Archive, file_stream
from dpstream.serve.release_history import History
from dpstream.serve.release_segments import KEY_ID

_WINDOW = Parameter(
    name="window", about="The number of a window.", kind="integer", least=0, most=2**53
)
_WINDOW_OR_ALL = Parameter(
    name="window",
    about="A window's number, or all.",
    pattern=r"^(all|[0-9]{1,15})$",
    longest=15,
)
_BEFORE = replace(_WINDOW, name="after", about="The cursor `next` of the page before.")
_AFTER = Parameter(
    name="after",
    about="The cursor `next` of the page before.",
    longest=25,
    pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?$",
)
_LIMIT = Parameter(
    name="limit", about="The most that is given.", kind="integer", least=1, most=200, default=50
)
_OFFSET = Parameter(
    name="offset", about="Rows to leave out.", kind="integer", least=0, most=10**9, default=0
)
_SORT = Parameter(name="sort", about="The aggregate to sort by.", longest=200)
_ORDER = Parameter(name="order", about="Its direction.", choices=("desc", "asc"), default="desc")
_TEXT = Parameter(name="q", about="A text that keys must contain.", longest=200)
_KEY = Parameter(name="key", about="A key as a JSON array.", longest=6000)
_ID = Parameter(name="id", about="The id of a key.", pattern=KEY_ID, longest=32)
_FORMAT = Parameter(
    name="format", about="The kind of file.", choices=tuple(FILE_TYPES), required=True
)
_ANY_FORMAT = replace(_FORMAT, choices=("json", *FILE_TYPES), default="json", required=False)
_LAST_ID = Parameter(
    name="last_id",
    about="The last event that was seen; 0: all of them.",
    kind="integer",
    least=0,
    most=10**18 - 1,
)
_ROWS = Parameter(
    name="rows", about="1: with the rows.", kind="integer", least=0, most=1, default=0
)
_CHANGES = (
    Parameter(name="epsilon", about="Another epsilon.", kind="number", least=0.001, most=100),
    Parameter(name="delta", about="Another delta.", kind="number", least=1e-18, most=0.1),
    Parameter(
        name="max_groups_contributed",
        about="Another bound on groups.",
        kind="integer",
        least=1,
        most=100_000,
    ),
    Parameter(
        name="max_rows_per_group",
        about="Another bound on the rows in a group.",
        kind="integer",
        least=1,
        most=100_000,
    ),
)
_FILES: dict[str, Any] = {kind.partition(";")[0]: {} for kind in FILE_TYPES.values()}
_JSON: dict[str, Any] = {"application/json": {"type": "object"}}
_QUERY = "/api/queries/{name}"
_OF_QUERY = (404, 422, 429)


def public_routes(handlers: dict[str, Handler], queries: Sequence[str]) -> list[Endpoint]:
    """Every route but the page, with who answers it."""
    about = "The name of a query."
    name = Parameter(name="name", about=about, place="path", longest=200, names=queries)
    query = replace(name, name="query", place="query", required=True)
    return [
        Endpoint(path="/api/queries", summary="All queries.", handler=handlers["queries"]),
        Endpoint(
            path=_QUERY,
            summary="One query.",
            handler=handlers["query"],
            parameters=[name],
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/windows",
            summary="The windows that were published, newest first.",
            handler=handlers["windows"],
            parameters=[name, _BEFORE, _LIMIT],
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/latest",
            summary="The newest value of every key in a window, sorted and searched.",
            handler=handlers["latest"],
            parameters=[name, _WINDOW, _SORT, _ORDER, _LIMIT, _OFFSET, _TEXT],
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/series",
            summary="The releases of some keys over time.",
            handler=handlers["series"],
            parameters=[
                name,
                replace(_KEY, repeated=12),
                replace(_ID, repeated=12),
                _WINDOW_OR_ALL,
                replace(
                    _LIMIT, about="More releases than this are thinned.", most=2000, default=2000
                ),
            ],
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/keys/{{id}}",
            summary="The full text of a key.",
            handler=handlers["key"],
            parameters=[name, replace(_ID, place="path"), _WINDOW],
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/releases",
            summary="Everything that was published, oldest first, page by page.",
            handler=handlers["releases"],
            parameters=[
                name,
                _WINDOW,
                _AFTER,
                replace(_LIMIT, most=10_000, default=1000),
                _KEY,
                _ID,
                _ANY_FORMAT,
            ],
            gives=_JSON | _FILES,
            refuses=_OF_QUERY,
        ),
        Endpoint(
            path=f"{_QUERY}/download",
            summary="Everything that was published (in a window), in one file.",
            handler=handlers["download"],
            parameters=[name, _FORMAT, _WINDOW],
            gives=_FILES,
            refuses=(*_OF_QUERY, 503),
        ),
        Endpoint(
            path="/api/events",
            summary="An event for each release, from last_id (or Last-Event-ID) on.",
            handler=handlers["events"],
            parameters=[_LAST_ID, _ROWS],
            gives={"text/event-stream": {"type": "string"}},
            refuses=(422, 429, 503),
            quick=True,
        ),
        Endpoint(
            path="/api/ledger",
            summary="What was promised, and what was declared to be spent.",
            handler=handlers["ledger"],
        ),
        Endpoint(
            path="/api/what-if",
            summary="The error that other parameters would have.",
            handler=handlers["what_if"],
            parameters=[query, *_CHANGES],
            refuses=(404, 409, 422, 429, 503),
        ),
        Endpoint(path="/openapi.json", summary="This document.", handler=handlers["openapi"]),
    ]


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
        body = b"".join(file_stream(given["format"], tables, described.schema))
        headers = {"cache-control": "no-cache"}
        if following is not None:
            headers["dpstream-next"] = following
        return Response(body, media_type=FILE_TYPES[given["format"]], headers=headers)

    def _download(self, request: Request, given: Given) -> Response:
        archive = self._archive(given)
        if not self._downloads.acquire(blocking=False):
            raise Refusal(503, "too many downloads at the same time", {"retry-after": "5"})
        body = self._counted(
            file_stream(given["format"], archive.all(given["window"]), archive.described.schema)
        )
        headers = {
            "cache-control": "no-cache",
            "content-disposition": f'attachment; filename="releases.{given["format"]}"',
        }
        return StreamingResponse(body, media_type=FILE_TYPES[given["format"]], headers=headers)

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
_NO_PAGE = b"<!doctype html><title>dpstream</title><p>This is a feed: see /openapi.json.\n"


class Assets:
    """Every file of the package's folder, by its path; a changed name is a changed file."""

    def __init__(self) -> None:
        self._files = dict(_read(files("dpstream.serve") / "assets", ""))
        self._files.setdefault(_PAGE, _NO_PAGE)
        self._marks = {
            name: f'"{blake2b(content, digest_size=16).hexdigest()}"'
            for name, content in self._files.items()
        }

    def routes(self) -> list[Route]:
        """The page, and what it needs."""

        async def page(request: Request) -> Response:
            return self._answer(request, _PAGE)

        async def asset(request: Request) -> Response:
            return self._answer(request, request.path_params["path"])

        return [Route("/", page), Route("/assets/{path:path}", asset)]

    @property
    def names(self) -> list[str]:
        """The files there are."""
        return sorted(self._files)

    def _answer(self, request: Request, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise Refusal(404, "there is nothing here")
        # a new version of the program has other files under the same names: ask, but do not load
        headers = {"etag": self._marks[name], "cache-control": "no-cache"}
        if self._marks[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        suffix = f".{name.rpartition('.')[2]}"
        kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, media_type=kind, headers=headers)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    if not folder.is_dir():
        return found
    for each in folder.iterdir():
        if each.name.startswith((".", "__")):
            continue
        if each.is_dir():
            found += _read(each, f"{prefix}{each.name}/")
        else:
            found.append((f"{prefix}{each.name}", each.read_bytes()))
    return found
