"""Keys on their way to other processes, in two halves that travel apart.

What carries one half may leave a copy somewhere: a file, a plan, a dump. One half alone says
nothing about the keys.
"""

from __future__ import annotations

from secrets import token_bytes
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpstream.errors import SecretError
from dpstream.privacy.state.serial import pack, unpack

_KIND = "sealed keys"
_NONCE = bytes(12)  # a key seals once


def seal(value: Any) -> tuple[bytes, bytes]:
    """(key, sealed value): the two halves.

    >>> key, sealed = seal({"window": b"secret"})
    >>> b"secret" in sealed, unseal(key, sealed)
    (False, {'window': b'secret'})
    """
    key = token_bytes(32)
    return key, AESGCM(key).encrypt(_NONCE, pack(value, kind=_KIND), None)


def unseal(key: bytes, sealed: bytes) -> Any:
    """The value of two halves that belong together."""
    try:
        return unpack(AESGCM(key).decrypt(_NONCE, sealed, None), kind=_KIND)
    except InvalidTag:
        raise SecretError("these two halves of sealed keys do not belong together") from None
