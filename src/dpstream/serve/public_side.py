"""The public side: releases, what is known about queries before a row is read, and the page."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dpstream.serve.event_stream import EventStream, Hub
from dpstream.serve.public_facts import QueryDescription, what_if
from dpstream.serve.release_history import FILE_TYPES, History, file_stream
from dpstream.serve.release_segments import KEY_ID
from dpstream.serve.sides import (
    Endpoint,
    Given,
    LastingResponse,
    Parameter,
    Places,
    Refusal,
    Side,
    tagged_answer,
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
_LONG_LIMIT = replace(_LIMIT, most=10_000, default=1000)
_OFFSET = Parameter("offset", "Rows to leave out.", kind="integer", least=0, most=10**9, default=0)
_SORT = Parameter("sort", "The aggregate to sort by.", longest=200)
_ORDER = Parameter("order", "Its direction.", choices=("desc", "asc"), default="desc")
_TEXT = Parameter("q", "A text that keys must contain.", longest=200)
_KEY = Parameter("key", "A key as a JSON array.", longest=6000)
_ID = Parameter("id", "The id of a key.", pattern=KEY_ID, longest=32)
_FORMAT = Parameter("format", "The kind of file.", choices=tuple(FILE_TYPES), required=True)
_ANY_FORMAT = replace(_FORMAT, choices=("json", *FILE_TYPES), default="json", required=False)
_ESCAPE = Parameter(
    "escape_formulas",
    "1: in CSV, text that a spreadsheet would take for a formula begins with an apostrophe.",
    kind="integer",
    least=0,
    most=1,
    default=0,
)
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
_MOST_DOWNLOADS = (8, 4)  # at the same time, of one address; each has a release in memory
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True)
class PublicSide(Side):
    """What the public side shows."""

    title: ClassVar[str] = "dpstream feed"
    about: ClassVar[str] = (
        "Releases under differential privacy, with error bars, and what is public about them. "
        "Nothing here depends on the data but the releases themselves."
    )
    queries: Mapping[str, QueryDescription]
    hub: Hub
    ledger: Sequence[Mapping[str, Any]]
    rate: float = 200.0
    burst: int = 1000
    refused: Callable[[str], bool] = lambda query: False
    """Has the book of this query refused it?"""
    framed_by: Sequence[str] = ()
    """Origins of pages that may show this one in a frame."""
    _downloads: Places = field(
        default_factory=lambda: Places(
            "downloads", most=_MOST_DOWNLOADS[0], per_address=_MOST_DOWNLOADS[1]
        )
    )

    def app(self) -> ASGIApp:
        """As an ASGI application."""
        return self.asgi(
            lambda app: self.hub.running(),
            rate=self.rate,
            burst=self.burst,
            more=asset_routes(),
            framed_by=self.framed_by,
        )

    def endpoints(self) -> list[Endpoint]:
        """Every route but the page."""
        query = replace(self._name, name="query", place="query", required=True)
        thinned = replace(
            _LIMIT, about="More releases than this are thinned.", most=2000, default=2000
        )
        return [
            Endpoint("/api/queries", "All queries.", self._all),
            self._of_query("", "One query.", lambda history, _: self._shown(history.description)),
            self._of_query(
                "/windows",
                "The windows that were published, newest first.",
                History.windows,
                [_BEFORE, _LIMIT],
            ),
            self._of_query(
                "/latest",
                "The newest value of every key in a window, sorted and searched.",
                History.latest,
                [_WINDOW, _SORT, _ORDER, _LIMIT, _OFFSET, _TEXT],
            ),
            self._of_query(
                "/series",
                "The releases of some keys over time.",
                History.series,
                [*(replace(each, repeated=12) for each in (_KEY, _ID)), _WINDOW_OR_ALL, thinned],
            ),
            self._of_query(
                "/keys/{id}",
                "The full text of a key.",
                History.key,
                [replace(_ID, place="path"), _WINDOW],
            ),
            self._of_query(
                "/releases",
                "Everything that was published, oldest first, page by page.",
                _releases,
                [_WINDOW, _AFTER, _LONG_LIMIT, _KEY, _ID, _ANY_FORMAT, _ESCAPE],
                gives={"application/json": {"type": "object"}} | _FILES,
            ),
            self._of_query(
                "/download",
                "Everything that was published (in a window), in one file.",
                self._download,
                [_FORMAT, _WINDOW, _ESCAPE],
                gives=_FILES,
                refuses=(404, 422, 429, 503),
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
                lambda given: {"datasets": self.ledger},
            ),
            Endpoint(
                "/api/what-if",
                "The error that other parameters would have.",
                self._what_if,
                parameters=[query, *_CHANGES],
                refuses=(404, 409, 422, 429, 503),
            ),
            Endpoint("/openapi.json", "This document.", lambda given: self.document()),
        ]

    def _of_query(
        self,
        path: str,
        summary: str,
        answer: Callable[[History, Given], Any],
        parameters: Sequence[Parameter] = (),
        *,
        refuses: Sequence[int] = (404, 422, 429),
        **more: Any,
    ) -> Endpoint:
        """A route below a query's, which answers from the query's releases."""

        def handler(given: Given) -> Any:
            description = self.find(self.queries, given["name"], "query")
            return answer(History(description=description, reader=self.hub.reader), given)

        path, parameters = f"/api/queries/{{name}}{path}", [self._name, *parameters]
        return Endpoint(path, summary, handler, parameters=parameters, refuses=refuses, **more)

    @property
    def _name(self) -> Parameter:
        about, names = "The name of a query.", list(self.queries)
        return Parameter("name", about, place="path", longest=200, names=names)

    def _all(self, given: Given) -> dict[str, Any]:
        return {"queries": [self._shown(each) for each in self.queries.values()]}

    def _shown(self, description: QueryDescription) -> dict[str, Any]:
        newest = self.hub.reader.newest(description.name)
        windows = description.query.schedule.windows
        finished = description.ended or (
            newest is not None
            and windows is not None
            and (newest.window, newest.release) == (windows - 1, newest.planned)
        )
        refused = not finished and self.refused(description.name)
        return description.public | {"finished": finished, "refused": refused}

    def _download(self, history: History, given: Given) -> Response:
        kind = given["format"]
        body = file_stream(
            kind, history.all(given["window"]), history.description.schema, escape=_escapes(given)
        )
        headers = {
            "cache-control": "no-cache",
            "content-disposition": f'attachment; filename="releases.{kind}"',
        }
        return LastingResponse(body, self._downloads, media_type=FILE_TYPES[kind], headers=headers)

    def _what_if(self, given: Given) -> dict[str, Any]:
        description = self.find(self.queries, given["query"], "query")
        changes = {name: value for name, value in given.items() if name != "query"}
        return what_if(description, changes)


def _escapes(given: Given) -> bool:
    if given["escape_formulas"] and given["format"] != "csv":
        raise Refusal(422, "escape_formulas is for format=csv")
    return bool(given["escape_formulas"])


def _releases(history: History, given: Given) -> Any:
    escape = _escapes(given)
    if given["format"] == "json":
        return history.page(given)
    tables, following = history.tables(given)
    schema = history.description.schema
    body = b"".join(file_stream(given["format"], tables, schema, escape=escape))
    headers = {"cache-control": "no-cache"}
    if following is not None:
        headers["dpstream-next"] = following
    return Response(body, media_type=FILE_TYPES[given["format"]], headers=headers)


def asset_routes() -> list[Route]:
    """The page and what it needs: files, read once, and served with their digests."""
    folder = Path(__file__).parent / "assets"
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }

    async def answer(request: Request) -> Response:
        name = request.path_params.get("path", "index.html")
        if name not in files:
            raise Refusal(404, "there is nothing here")
        kind = _TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0]
        # a new version of the program has other files under the same names: ask, but do not load
        return tagged_answer(request, files[name], kind or "application/octet-stream")

    return [Route("/", answer), Route("/assets/{path:path}", answer)]
