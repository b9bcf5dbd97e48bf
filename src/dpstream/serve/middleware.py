"""What every request passes: limits and the token before an answer, headers after it.

Plain ASGI, so that streams are not touched.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpstream.errors import SecretError
from dpstream.privacy.state.durable_files import create_exclusive
from dpstream.privacy.state.secret import mint_token

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
VARIABLE = "DPSTREAM_OPERATOR_TOKEN"
_SHORTEST = 16


class Refusal(Exception):
    """An answer that is no success; its words are fixed, and hold nothing of data or request."""

    def __init__(self, status: int, words: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.headers = status, words, headers or {}

    def response(self) -> Response:
        """The answer that it stands for."""
        return Response(
            json.dumps({"error": self.words}),
            status_code=self.status,
            media_type="application/json",
            headers={"cache-control": "no-store", **self.headers},
        )


async def answer_problem(request: Request, problem: Exception) -> Response:
    """A refusal of our own or of the router; the operator's log alone says more of an error."""
    if isinstance(problem, HTTPException):
        words = _WORDS.get(problem.status_code, "the request cannot be answered")
        problem = Refusal(problem.status_code, words, dict(problem.headers or {}))
    if not isinstance(problem, Refusal):
        _LOG.error("a request to %s failed", request.scope.get("path"), exc_info=problem)
        problem = Refusal(500, "something went wrong here; the operator can see what")
    return problem.response()


HANDLERS: dict[Any, Any] = dict.fromkeys((Refusal, HTTPException, Exception), answer_problem)


class SecurityHeaders:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


class Gate:
    """Passes on the requests that a check does not refuse."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        app = self._app
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Refusal as refusal:
                app = refusal.response()
        await app(scope, receive, send)


class Limits:
    """A bucket of requests for each address, and a longest URL."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, scope: Scope) -> None:
        """Refuse an address that is too long, or a client that asks too often."""
        length = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if length > LONGEST_URL:
            raise Refusal(414, "the address is too long")
        client, now = (scope.get("client") or ("",))[0], time.monotonic()
        left, at = self._left.get(client, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._rate)
        self._left[client] = (left - 1 if left >= 1 else left, now)
        self._left.move_to_end(client)
        while len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        if left < 1:
            raise Refusal(429, "too many requests; slow down", {"retry-after": "1"})


class Token:
    """Compares what is given with what is wanted, in a time that tells nothing."""

    def __init__(self, value: str, *, source: str) -> None:
        if len(value) < _SHORTEST or not value.isascii() or not value.isprintable():
            raise SecretError(
                f"the operator's token in {source} must be at least {_SHORTEST} printable ASCII "
                "characters; choose a longer one, or leave it out and let one be made"
            )
        self._digest = sha256(value.encode()).digest()
        self.source = source

    def fits(self, authorization: str | None) -> bool:
        """Does this header carry the token?"""
        scheme, _, given = (authorization or "").partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"

    def check(self, scope: Scope) -> None:
        """Refuse a request without the token."""
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if not self.fits(given):
            raise Refusal(401, "the operator's token is needed", {"www-authenticate": "Bearer"})

    def __repr__(self) -> str:
        return f"Token(from {self.source})"


def load_token(path: Path) -> Token:
    """The token of the environment, or of the file, which is made if it is not there."""
    given = os.environ.get(VARIABLE)
    if given:
        return Token(given, source=VARIABLE)
    if not path.exists():
        with suppress(FileExistsError):  # another process was first: that one counts
            create_exclusive(path, f"{mint_token()}\n".encode())
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        text = file.read(4096)
    if mode & 0o077:
        raise SecretError(
            f"{path} has mode {mode:04o}: others may read the operator's token; run chmod 600 "
            f"{path}, and replace the token if it may have been read"
        )
    try:
        value = text.decode("ascii").strip()
    except UnicodeDecodeError:
        value = ""
    return Token(value, source=str(path))
