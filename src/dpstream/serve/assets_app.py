"""The page's files: read once, served with their digests."""

from __future__ import annotations

import mimetypes
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpstream.serve.parameters import Refusal

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
