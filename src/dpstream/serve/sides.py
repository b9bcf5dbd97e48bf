"""What both sides share: what every request passes, and routes as values.

Limits and the token come before an answer, security headers after it, as plain ASGI, so that
streams are not touched. A route says where it is, what it takes and gives; its OpenAPI follows from
that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send, StatelessLifespan

LONGEST_URL = 8192
_MOST_CLIENTS = 10_000  # addresses that are remembered
_PIECE = 1 << 16  # bytes of an answer that are sent at once
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
_NUMBERS = re.compile(r"-?[0-9]{1,18}")
_SURROGATES = re.compile("[\ud800-\udfff]")
Given = Mapping[str, Any]
Handler = Callable[[Given], Any]
QuickHandler = Callable[[Request, Given], Response | Awaitable[Response]]
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_UNREADABLE = {  # the answer of what reads HTTP, before any of this
    "description": "not a request that can be read, such as one with a line of 64 KB",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
_REFUSALS = {
    401: "the token is missing or wrong",
    403: "this token is not for that",
    404: "there is no such thing",
    409: "not possible here",
    413: "the body is too large",
    414: "the address is too long",
    415: "the body is of a kind that is not taken",
    422: "a parameter or the body cannot be used",
    429: "too many requests",
    503: "not now; try again later",
}


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
        _LOG.error("a request to %.200r failed", request.scope.get("path"), exc_info=problem)
        problem = Refusal(500, "something went wrong here; the operator can see what")
    return problem.response()


HANDLERS: dict[Any, Any] = dict.fromkeys((Refusal, HTTPException, Exception), answer_problem)


class SecurityHeaders:
    """Adds the security headers to every answer, which is sent in small pieces.

    A piece waits until the client has taken those before: what is unsent of an answer is small,
    however long it is, and however little of it is read. `framed_by`: the origins of pages that may
    show the page in a frame; none may otherwise.
    """

    def __init__(self, app: ASGIApp, framed_by: Sequence[str] = ()) -> None:
        self._app = app
        headers = dict(HEADERS)
        if framed_by:
            del headers["x-frame-options"]  # it knows of no list
            headers["content-security-policy"] = _POLICY.replace(
                "frame-ancestors 'none'", f"frame-ancestors {' '.join(framed_by)}"
            )
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            body = message.get("body", b"")
            last = max(len(body) - 1, 0) // _PIECE * _PIECE
            for at in range(0, last, _PIECE):
                await send({**message, "body": body[at : at + _PIECE], "more_body": True})
            if last:
                message["body"] = body[last:]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


class Gate:
    """Passes on the requests that no check refuses."""

    def __init__(self, app: ASGIApp, checks: Sequence[Callable[[Scope], None]]) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        app = self._app
        if scope["type"] == "http":
            try:
                for check in self._checks:
                    check(scope)
            except Refusal as refusal:
                app = refusal.response()
        await app(scope, receive, send)


class Places:
    """Answers that last: so many at the same time, so many of them for one address.

    They are counted on the event loop alone, where nothing comes between the check and the count.
    """

    def __init__(self, what: str, *, most: int, per_address: int) -> None:
        self.what, self.most, self.per_address = what, most, per_address
        self.addresses: Counter[str] = Counter()

    def check(self, address: str) -> None:
        """Refuse one more."""
        later = {"retry-after": "5"}
        if self.addresses.total() >= self.most:
            raise Refusal(503, f"too many {self.what} at the same time", later)
        if self.addresses[address] >= self.per_address:
            raise Refusal(429, f"too many {self.what} from this address at the same time", later)

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """One place is taken while this lasts."""
        self.check(address)
        self.addresses[address] += 1
        try:
            yield
        finally:
            self.addresses -= Counter([address])  # an address without any is forgotten


class LastingResponse(StreamingResponse):
    """A stream that takes a place when it begins, and frees it when it ends, however it does."""

    def __init__(
        self, content: Iterator[bytes] | AsyncIterator[bytes], places: Places, **more: Any
    ):
        super().__init__(content, **more)
        self._content, self._places = content, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; where only the head is wanted (HEAD), nothing is made."""
        address = (scope.get("client") or ("",))[0]
        try:
            with self._places.taken(address):
                if scope["method"] == "HEAD":
                    self.body_iterator = _no_pieces()
                await super().__call__(scope, receive, send)
        finally:
            if isinstance(self._content, Generator):
                self._content.close()  # what it holds goes now, not when it is collected


async def _no_pieces() -> AsyncIterator[bytes]:
    nothing: list[bytes] = []
    for piece in nothing:
        yield piece


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


@dataclass(frozen=True)
class Parameter:
    """One parameter of a query string or path."""

    name: str
    about: str
    _: KW_ONLY
    kind: Literal["integer", "number", "string"] = "string"
    default: Any = None
    least: float | None = None
    most: float | None = None
    longest: int = 4096
    choices: Sequence[str] | None = None
    pattern: str | None = None
    names: Sequence[str] = ()
    """What there is; another name is not refused here, but not found."""
    repeated: int = 1
    """How often it may be given."""
    required: bool = False
    place: Literal["query", "path"] = "query"

    def of_request(self, request: Request) -> Any:
        """The checked value of a request; what nobody asked for is not looked at."""
        if self.place == "path":
            return self.read([request.path_params[self.name]])
        return self.read(request.query_params.getlist(self.name))

    def read(self, given: Sequence[str]) -> Any:
        """The checked value, or values."""
        if not given:
            if self.required:
                raise Refusal(422, f"the parameter {self.name} is missing")
            return [] if self.repeated > 1 else self.default
        if len(given) > self.repeated:
            times = "once" if self.repeated == 1 else f"{self.repeated} times"
            raise Refusal(422, f"the parameter {self.name} may be given {times} at most")
        values = [self._value(text) for text in given]
        return values if self.repeated > 1 else values[0]

    def _value(self, text: str) -> Any:
        value: Any = text
        fits = len(text) <= self.longest
        if self.kind == "integer":
            fits = fits and _NUMBERS.fullmatch(text) is not None
            value = int(text) if fits else 0
        elif self.kind == "number":
            value = _number(text) if fits else math.nan
            fits = math.isfinite(value)
        if self.kind == "string":
            fits = fits and (self.choices is None or text in self.choices)
            fits = fits and (self.pattern is None or re.fullmatch(self.pattern, text) is not None)
            fits = fits and _SURROGATES.search(text) is None
        else:
            fits = fits and (self.least is None or value >= self.least)
            fits = fits and (self.most is None or value <= self.most)
        if not fits:
            raise Refusal(422, f"the parameter {self.name} must be {self.wanted}")
        return value

    @property
    def wanted(self) -> str:
        """What may be given, in words."""
        if self.choices is not None:
            return f"one of {', '.join(self.choices)}"
        if self.kind == "string":
            shape = f" that matches {self.pattern}" if self.pattern else ""
            return f"text of at most {self.longest} characters{shape}"
        ends = (("at least", self.least), ("at most", self.most))
        limits = " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)
        return f"{'a whole number' if self.kind == 'integer' else 'a number'} {limits}".strip()

    def openapi(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        schema: dict[str, Any] = {"type": self.kind}
        if self.kind == "string":
            schema["maxLength"] = self.longest
        for key, value in (("minimum", self.least), ("maximum", self.most)):
            if value is not None and self.kind != "string":
                schema[key] = int(value) if self.kind == "integer" else value
        if self.choices or self.names:
            schema = {"type": "string", "enum": list(self.names or self.choices or ())}
        if self.pattern is not None:
            schema["pattern"] = self.pattern
        if self.default is not None:
            schema["default"] = self.default
        if self.repeated > 1:
            schema = {"type": "array", "items": schema, "maxItems": self.repeated}
        return {
            "name": self.name,
            "in": self.place,
            "required": self.required or self.place == "path",
            "description": self.about,
            "schema": schema,
        }


def _number(text: str) -> float:
    try:
        return float(text) if len(text) < 40 else math.nan
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class Endpoint:
    """One route.

    Its handler runs on a thread, and gives what is answered as JSON, or a response. That of a
    `quick` one runs on the event loop, sees the request too, and always gives a response.
    """

    path: str
    summary: str
    handler: Handler | QuickHandler
    _: KW_ONLY
    parameters: Sequence[Parameter] = ()
    method: str = "GET"
    gives: Mapping[str, Any] = field(
        default_factory=lambda: {"application/json": {"type": "object"}}
    )
    """Content types of a success, and their schemas."""
    status: int = 200
    refuses: Sequence[int] = (422, 429)
    takes: Mapping[str, Any] | None = None
    """Content types of the body."""
    quick: bool = False

    def route(self, pool: Executor | None = None) -> Route:
        """For the router; `pool`: the threads that answer, by default those that all share."""

        handler: Any = self.handler

        def answer_on_thread(request: Request, given: Given) -> Response:
            content = handler(given)
            return content if isinstance(content, Response) else json_answer(request, content)

        async def answer(request: Request) -> Response:
            given = {each.name: each.of_request(request) for each in self.parameters}
            if self.quick:
                answered = handler(request, given)
                return answered if isinstance(answered, Response) else await answered
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, answer_on_thread, request, given)

        return Route(self.path, answer, methods=[self.method], name=self.path)

    def openapi(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        content = {kind: {"schema": schema} for kind, schema in self.gives.items()}
        responses: dict[str, Any] = {str(self.status): {"description": "ok", "content": content}}
        if self.method == "GET":
            responses["304"] = {"description": "it has not changed"}
        responses["400"] = _UNREADABLE
        for status in (*self.refuses, 414):
            responses[str(status)] = {"description": _REFUSALS[status], "content": _ERROR}
        operation: dict[str, Any] = {
            "summary": self.summary,
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{self.path}").strip("_"),
            "parameters": [each.openapi() for each in self.parameters],
            "responses": responses,
        }
        if self.takes is not None:
            body = {kind: {"schema": schema} for kind, schema in self.takes.items()}
            operation["requestBody"] = {"required": True, "content": body}
        return operation


class Side:
    """The routes of one server, and the document that describes them."""

    title: ClassVar[str]
    about: ClassVar[str]
    secured: ClassVar[bool] = False
    """Does every route ask for the token?"""

    def endpoints(self) -> list[Endpoint]:
        """Every route of the document."""
        raise NotImplementedError  # the public side and the operator's have their own

    def asgi(
        self,
        lifespan: StatelessLifespan[Starlette],
        *checks: Callable[[Scope], None],
        rate: float,
        burst: int,
        pool: Executor | None = None,
        more: Sequence[Route] = (),
        framed_by: Sequence[str] = (),
    ) -> ASGIApp:
        """The application of all routes; `lifespan`: what runs while it does.

        `rate`, `burst`: the requests of one address, a second and at once. `framed_by`: origins of
        pages that may show it in a frame.
        """
        routes = [*(each.route(pool) for each in self.endpoints()), *more]
        app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        gate = Gate(app, [Limits(rate=rate, burst=burst).check, *checks])
        return SecurityHeaders(gate, framed_by)

    @staticmethod
    def find(things: Mapping[str, Any], name: str, what: str) -> Any:
        """A thing by its name, or 404."""
        thing = things.get(name)
        if thing is None:
            raise Refusal(404, f"there is no such {what}")
        return thing

    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        text = {"type": "string"}
        error = {"type": "object", "required": ["error"], "properties": {"error": text}}
        components: dict[str, Any] = {"schemas": {"Error": error}}
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {
                "title": self.title,
                "version": version("dpstream"),
                "description": self.about,
            },
            "paths": {
                each.path: {each.method.lower(): each.openapi()} for each in self.endpoints()
            },
            "components": components,
        }
        if self.secured:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
        return document


def json_answer(request: Request, content: Any, status: int = 200) -> Response:
    """The content as JSON."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return tagged_answer(request, body, "application/json", status)


def tagged_answer(request: Request, body: bytes, kind: str, status: int = 200) -> Response:
    """The bytes under their digest; a client that has the same bytes already gets 304."""
    tag = f'"{blake2b(body, digest_size=16).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if status == 200 and tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type=kind, headers=headers)
