"""The public routes: what each one takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpstream.serve.formats import TYPES
from dpstream.serve.parameters import Parameter
from dpstream.serve.routes import Endpoint, Handler
from dpstream.serve.store.keys import KEY_ID

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
_FORMAT = Parameter(name="format", about="The kind of file.", choices=tuple(TYPES), required=True)
_ANY_FORMAT = replace(_FORMAT, choices=("json", *TYPES), default="json", required=False)
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
_FILES: dict[str, Any] = {kind.partition(";")[0]: {} for kind in TYPES.values()}
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
