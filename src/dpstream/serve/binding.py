"""Where the server listens: loopback, unless it is said in so many words."""

from __future__ import annotations

import ipaddress
import socket

from dpstream.errors import InvalidParameter


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "0.0.0.0", "")]
    [True, True, False, False]
    """
    if not host:
        return False  # every address of this machine
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        raise InvalidParameter(
            f"the address {host!r} is not known; name one of this machine's, such as 127.0.0.1"
        ) from None
    addresses = {str(each[4][0]) for each in found}
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
    """A listening socket; port 0 is any free one. `option` is what names another port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(1024)
    except OSError as problem:
        raise InvalidParameter(
            f"{host}:{port} cannot be listened on: {problem.strerror or problem}; name another "
            f"port with {option} (0 is any free one), or stop what uses it"
        ) from None
    return found
