"""A route as a value: where it is, what it takes, what it gives; its OpenAPI follows from that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpstream.serve.parameters import Parameter, Refusal, read_all

Given = Mapping[str, Any]
Handler = Callable[[Request, Given], Response | Awaitable[Response]]
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


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route; `quick` ones are answered on the event loop, others on a thread."""

    path: str
    summary: str
    handler: Handler
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

        async def answer(request: Request) -> Response:
            given = {
                each.name: each.read([request.path_params[each.name]])
                for each in self.parameters
                if each.place == "path"
            }
            given |= read_all(self.parameters, request.query_params)
            if self.quick:
                found = self.handler(request, given)
            else:
                found = await asyncio.get_running_loop().run_in_executor(
                    pool, self.handler, request, given
                )
            return found if isinstance(found, Response) else await found

        return Route(self.path, answer, methods=[self.method], name=self.path)

    def openapi(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        content = {kind: {"schema": schema} for kind, schema in self.gives.items()}
        responses: dict[str, Any] = {str(self.status): {"description": "ok", "content": content}}
        if self.method == "GET":
            responses["304"] = {"description": "it has not changed"}
        for status in self.refuses:
            responses[str(status)] = {"description": _REFUSALS[status], "content": _ERROR}
        found: dict[str, Any] = {
            "summary": self.summary,
            "operationId": _operation(self.method, self.path),
            "parameters": [each.openapi() for each in self.parameters],
            "responses": responses,
        }
        if self.takes is not None:
            body = {kind: {"schema": schema} for kind, schema in self.takes.items()}
            found["requestBody"] = {"required": True, "content": body}
        return found


def openapi(
    title: str, endpoints: Sequence[Endpoint], *, version: str, about: str, secured: bool = False
) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    paths: dict[str, Any] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = each.openapi()
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    components: dict[str, Any] = {"schemas": {"Error": error}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": about},
        "paths": paths,
        "components": components,
    }
    if secured:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def json_answer(request: Request, content: Any, status: int = 200) -> Response:
    """JSON; who has the very same already is told so."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    etag = f'"{blake2b(body, digest_size=16).hexdigest()}"'
    headers = {"etag": etag, "cache-control": "no-cache"}
    if status == 200 and etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def known(things: Mapping[str, Any], name: str, what: str) -> Any:
    """A thing by its name, or 404."""
    found = things.get(name)
    if found is None:
        raise Refusal(404, f"there is no such {what}")
    return found


def _operation(method: str, path: str) -> str:
    words = [word.strip("{}").replace("-", "_").replace(".", "_") for word in path.split("/")]
    return "_".join([method.lower(), *(word for word in words if word)])
