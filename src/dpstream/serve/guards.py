"""What every request passes: limits before an answer, headers after it, and errors without words.

Plain ASGI, so that streams are not touched.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dpstream.serve.parameters import Refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LONGEST_URL = 8192
_MOST_CLIENTS = 10_000  # addresses that are remembered
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LOG = logging.getLogger("dpstream.serve")
_WORDS = {404: "there is nothing here", 405: "this method is not allowed here"}


class SecurityHeaders:
    """Adds the security headers to every answer."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


class Limits:
    """A bucket of requests for each address, and a longest URL."""

    def __init__(self, app: App, *, rate: float, burst: int) -> None:
        self._app, self._rate, self._burst = app, rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "http":
            length = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
            if length > LONGEST_URL:
                await refused(Refusal(414, "the address is too long"))(scope, receive, send)
                return
            if not self._has_one((scope.get("client") or ("",))[0]):
                slower = Refusal(429, "too many requests; slow down", {"retry-after": "1"})
                await refused(slower)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _has_one(self, client: str) -> bool:
        now = time.monotonic()
        left, at = self._left.get(client, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._rate)
        self._left[client] = (left - 1 if left >= 1 else left, now)
        self._left.move_to_end(client)
        while len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return left >= 1


def refused(problem: Refusal) -> Response:
    """The answer that a refusal stands for."""
    headers = {"cache-control": "no-store", **problem.headers}
    return Response(
        json.dumps({"error": problem.words}),
        status_code=problem.status,
        media_type="application/json",
        headers=headers,
    )


async def on_refusal(request: Request, problem: Exception) -> Response:
    """A refusal of our own."""
    assert isinstance(problem, Refusal)
    return refused(problem)


async def on_http(request: Request, problem: Exception) -> Response:
    """A refusal of the router."""
    assert isinstance(problem, HTTPException)
    words = _WORDS.get(problem.status_code, "the request cannot be answered")
    return refused(Refusal(problem.status_code, words, dict(problem.headers or {})))


async def on_error(request: Request, problem: Exception) -> Response:
    """Anything else: the operator's log has it, the answer says nothing of it."""
    _LOG.error("a request to %s failed", request.scope.get("path"), exc_info=problem)
    return refused(Refusal(500, "something went wrong here; the operator can see what"))


HANDLERS: dict[Any, Any] = {Refusal: on_refusal, HTTPException: on_http, Exception: on_error}
