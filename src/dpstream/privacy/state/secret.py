"""The operator's secret: 32 random bytes that every key comes from, and how keys are derived."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes, token_urlsafe
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.cmac import CMAC

from dpstream.errors import SecretError
from dpstream.privacy.state.durable_files import create_exclusive
from dpstream.privacy.state.serial import pack, unpack


def derive(key: bytes, message: bytes) -> bytes:
    """32 bytes from a 32-byte key: CMAC in counter mode (NIST SP 800-108), two AES-256 blocks.

    >>> derive(bytes(32), b"one use") == derive(bytes(32), b"another use")
    False
    """
    halves = []
    for counter in (1, 2):
        mac = CMAC(algorithms.AES(key))
        mac.update(bytes([counter]) + message)
        halves.append(mac.finalize())
    return b"".join(halves)


_PREFIX = "dpstream-secret-1 "
_SEALED = "sealed keys"
_NONCE = bytes(12)  # a key seals once


def mint_run_id() -> bytes:
    """128 random bits: a run draws noise that no other run sees."""
    return token_bytes(16)


def mint_token() -> str:
    """A password that nobody can guess, for who may see what is not private."""
    return token_urlsafe(32)


class Secret:
    """32 bytes that never print themselves."""

    def __init__(self, value: Any, *, path: Path | None = None, fresh: bool = False) -> None:
        if not isinstance(value, bytes) or len(value) != 32:
            given = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
            raise SecretError(
                f"a secret must be 32 bytes; got {given}; "
                "did you forget that a path must be a str or Path?"
            )
        self._value: bytes = value
        self.path, self.fresh = path, fresh

    @classmethod
    def of(cls, given: Secret | bytes | str | Path | None) -> Secret:
        """Bytes as they are, a path read (and created on first use), None a fresh one."""
        if given is None:
            return cls(token_bytes(32), fresh=True)
        if isinstance(given, Secret):
            return given
        if isinstance(given, bytes):
            return cls(given)
        path = Path(given)
        if not path.exists():
            with suppress(SecretError):  # another process may create it first: read that one
                return cls.create(path)
        return cls.load(path)

    @classmethod
    def create(cls, path: str | Path, *, value: bytes | None = None) -> Secret:
        """Write a new secret file, mode 0600; an existing one is never overwritten."""
        secret = cls(token_bytes(32) if value is None else value, path=Path(path))
        try:
            create_exclusive(Path(path), f"{_PREFIX}{secret._value.hex()}\n".encode())
        except FileExistsError:
            raise SecretError(f"{path} exists already; a secret is never overwritten") from None
        return secret

    @classmethod
    def load(cls, path: str | Path) -> Secret:
        """Read a secret file; one that others may read is refused."""
        path = Path(path)
        try:
            with path.open("rb") as file:  # mode and content of one and the same file
                mode = os.fstat(file.fileno()).st_mode & 0o777
                text = file.read(1024)
        except FileNotFoundError:
            raise SecretError(
                f"there is no secret at {path}; restore it from your backup, "
                "or name a new path to create one"
            ) from None
        except OSError as error:
            raise SecretError(f"the secret at {path} cannot be read: {error.strerror}") from None
        if mode & 0o077:
            raise SecretError(
                f"{path} has mode {mode:04o}: others may read it; run chmod 600 {path}, "
                "and replace the secret if it may have been read"
            )
        body = text.removeprefix(_PREFIX.encode()).removesuffix(b"\n")
        try:
            value = bytes.fromhex(body.decode("ascii"))
        except ValueError:
            value = b""
        if not text.startswith(_PREFIX.encode()) or len(value) != 32:
            raise SecretError(f"{path} is not a dpstream secret file, or it is truncated")
        return cls(value, path=path)

    def write(self, path: Path) -> None:
        """Keep a secret that lived in memory in a new file."""
        self.path = type(self).create(path, value=self._value).path

    def key(self, use: str, context: bytes = b"") -> bytes:
        """A 32-byte key for one use; uses share nothing."""
        label = use.encode()
        return derive(self._value, bytes([len(label)]) + label + context)

    def fingerprint(self, run: bytes, facts: str) -> str:
        """Digest of all that fixes a run's releases besides the data, this secret included."""
        mark = self.key("check", run).hex()
        return hashlib.sha256(f"{facts} {mark}".encode()).hexdigest()

    def noise_key(self, run: bytes, fingerprint: str) -> bytes:
        """The key of a run's noise: another run, or another fingerprint, shares none of it."""
        return self.key("runner noise", run + bytes.fromhex(fingerprint))

    def __repr__(self) -> str:
        return f"Secret({str(self.path) if self.path else 'in memory'})"

    def __reduce__(self) -> str:
        raise SecretError("a secret is not serialised; pass its path or bytes instead")


def secret_path(state: Path) -> Path:
    """Where the secret of a state directory is kept: next to it, not in it."""
    return state.with_name(state.name + ".secret")


def seal(value: Any) -> tuple[bytes, bytes]:
    """(key, sealed value): keys on their way to other processes, in two halves that travel apart.

    What carries one half may leave a copy somewhere: a file, a plan, a dump. One half alone says
    nothing about the keys.

    >>> key, sealed = seal({"window": b"secret"})
    >>> b"secret" in sealed, unseal(key, sealed)
    (False, {'window': b'secret'})
    """
    key = token_bytes(32)
    return key, AESGCM(key).encrypt(_NONCE, pack(value, kind=_SEALED), None)


def unseal(key: bytes, sealed: bytes) -> Any:
    """The value of two halves that belong together."""
    try:
        return unpack(AESGCM(key).decrypt(_NONCE, sealed, None), kind=_SEALED)
    except InvalidTag:
        raise SecretError("these two halves of sealed keys do not belong together") from None
