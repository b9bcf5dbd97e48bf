"""The operator's token: from the environment, or a file that is made on first use."""

from __future__ import annotations

import hmac
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from dpstream.errors import SecretError
from dpstream.privacy.state.files import create_exclusive
from dpstream.privacy.state.secret import mint_token
from dpstream.serve.guards import App, Receive, Scope, Send, refused
from dpstream.serve.parameters import Refusal

VARIABLE = "DPSTREAM_OPERATOR_TOKEN"
_SHORTEST = 16


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
        """Is this the header of who knows the token?"""
        scheme, _, given = (authorization or "").partition(" ")
        found = sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(found, self._digest) and scheme.lower() == "bearer"

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


class TokenGate:
    """Lets nobody in without the token."""

    def __init__(self, app: App, token: Token) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("latin-1")
            if not self._token.fits(given):
                refusal = Refusal(
                    401, "the operator's token is needed", {"www-authenticate": "Bearer"}
                )
                await refused(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
