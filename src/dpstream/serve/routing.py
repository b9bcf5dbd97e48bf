"""Routes as values: where each is, what it takes and gives; their OpenAPI follows from that."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import StatelessLifespan

from dpstream.serve.middleware import HANDLERS, Refusal

_NUMBERS = re.compile(r"-?[0-9]{1,18}")
_SURROGATES = re.compile("[\ud800-\udfff]")
Given = Mapping[str, Any]
Handler = Callable[[Given], Any]
QuickHandler = Callable[[Request, Given], Response | Awaitable[Response]]
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_REFUSALS = {
    401: "the token is missing or wrong",
    404: "there is no such thing",
    409: "not possible here",
    413: "the body is too large",
    414: "the address is too long",
    415: "the body is of a kind that is not taken",
    422: "a parameter or the body cannot be used",
    429: "too many requests",
    503: "not now; try again later",
}


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
        values = [self._one(text) for text in given]
        return values if self.repeated > 1 else values[0]

    def _one(self, text: str) -> Any:
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
        for status in self.refuses:
            responses[str(status)] = {"description": _REFUSALS[status], "content": _ERROR}
        operation: dict[str, Any] = {
            "summary": self.summary,
            "operationId": _operation(self.method, self.path),
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
        raise NotImplementedError

    def starlette(
        self,
        lifespan: StatelessLifespan[Starlette],
        *,
        pool: Executor | None = None,
        more: Sequence[Route] = (),
    ) -> Starlette:
        """The application of all routes; `lifespan`: what runs while it does."""
        routes = [*(each.route(pool) for each in self.endpoints()), *more]
        return Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)

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


def find_or_404(things: Mapping[str, Any], name: str, what: str) -> Any:
    """A thing by its name, or 404."""
    thing = things.get(name)
    if thing is None:
        raise Refusal(404, f"there is no such {what}")
    return thing


def _operation(method: str, path: str) -> str:
    words = [word.strip("{}").replace("-", "_").replace(".", "_") for word in path.split("/")]
    return "_".join([method.lower(), *(word for word in words if word)])
