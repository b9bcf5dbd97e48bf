"""Who may reach a server: the address it listens on, and the tokens of operator and analysts."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from dpstream.errors import InvalidParameter, SecretError
from dpstream.privacy.state.durable_files import create_exclusive
from dpstream.privacy.state.secret import mint_token

VARIABLE = "DPSTREAM_OPERATOR_TOKEN"
_SHORTEST = 16


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "0.0.0.0", "")]
    [True, True, False, False]
    """
    if not host:
        return False  # every address of this machine
    try:
        infos = socket.getaddrinfo(host, None)
    except OSError:
        raise InvalidParameter(
            f"the address {host!r} is not known; name one of this machine's, such as 127.0.0.1"
        ) from None
    addresses = {str(each[4][0]) for each in infos}
    return all(ipaddress.ip_address(each).is_loopback for each in addresses)


def check_binding(host: str, what: str, *, encrypted: bool, allowed: bool) -> None:
    """Refuse an address that others can reach, unless what goes over it is encrypted."""
    if not is_loopback(host) and not encrypted and not allowed:
        raise InvalidParameter(
            f"{what} would listen on {host}, where others can reach it, without encryption; give "
            "--tls-cert and --tls-key, keep it on 127.0.0.1 behind a proxy that encrypts, or say "
            "--allow-plain-http"
        )


def bound_socket(host: str, port: int, option: str) -> socket.socket:
    """A socket to listen on; port 0 is any free one. `option` is what names another port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as problem:
        raise InvalidParameter(
            f"{host}:{port} cannot be listened on: {problem.strerror or problem}; name another "
            f"port with {option} (0 is any free one), or stop what uses it"
        ) from None
    return bound


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

    def __repr__(self) -> str:
        return f"Token(from {self.source})"


def load_token(path: Path) -> Token:
    """The token of the environment, or of the file, which is made if it is not there."""
    given = os.environ.get(VARIABLE)
    return Token(given, source=VARIABLE) if given else read_token(path)


def read_token(path: Path) -> Token:
    """The token of a file, which is made if it is not there."""
    if not path.exists():
        with suppress(FileExistsError):  # another process was first: that one counts
            create_exclusive(path, f"{mint_token()}\n".encode())
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        text = file.read(4096)
    if mode & 0o077:
        raise SecretError(
            f"{path} has mode {mode:04o}: others may read the token; run chmod 600 {path}, and "
            "replace the token if it may have been read"
        )
    return Token(text.decode("ascii", "replace").strip(), source=str(path))
