"""The address and options of a server: from a URI and a table, secrets from files and environment.

    kafka://127.0.0.1:9092/clicks?format=json&patience=30

Options are taken one by one; one that nobody took is unknown. A password is never part of them:
`password_file` or `password_env` says where it is, and nothing here shows what was found there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dpstream.errors import InvalidParameter, SecretError


def is_uri(spec: Any) -> bool:
    """Does it name a server, and not a path?"""
    return isinstance(spec, str) and "://" in spec


class ServerOptions:
    """What a user asked of a connector.

    >>> options = ServerOptions("kafka://localhost:9092/clicks?format=json", {"patience": 5})
    >>> options.servers, options.path, options.number("patience", 60)
    ('localhost:9092', 'clicks', 5.0)
    >>> options.finish()
    Traceback (most recent call last):
    dpstream.errors.InvalidParameter: kafka://localhost:9092/clicks has no option 'format'; ...
    """

    def __init__(self, uri: str, more: Mapping[str, Any] | None = None) -> None:
        parts = urlsplit(uri)
        user, at, servers = parts.netloc.rpartition("@")
        self.scheme, self.servers, self.path = parts.scheme, servers, unquote(parts.path[1:])
        self.user = unquote(user) if at else None
        self.where = f"{parts.scheme}://{servers}{parts.path}"
        """What it is called in messages."""
        if ":" in user:
            raise InvalidParameter(
                f"{self.where} must not hold a password, which logs and process lists would show; "
                "put it into a file and add ?password_file=PATH, or into a variable and add "
                "?password_env=NAME"
            )
        self._given = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._given |= {name: _text(value) for name, value in (more or {}).items()}
        self._known: list[str] = []

    @property
    def names(self) -> list[str]:
        """The options that were given and not taken yet."""
        return list(self._given)

    def text(self, name: str, default: str | None = None) -> str | None:
        """An option as it stands."""
        self._known.append(name)
        return self._given.pop(name, default)

    def choice(self, name: str, among: Sequence[str], default: str) -> str:
        """One of several words."""
        found = self.text(name, default)
        if found not in among:
            raise InvalidParameter(
                f"{self.where}: {name} must be one of {', '.join(among)}; got {found!r}"
            )
        return str(found)

    def number(self, name: str, default: float, *, least: float = 0.0) -> float:
        """A number."""
        found = self.text(name)
        try:
            value = default if found is None else float(found)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise InvalidParameter(
                f"{self.where}: {name} must be a number from {least:g} on; got {found!r}"
            )
        return value

    def secret(self, name: str) -> str | None:
        """What the file `<name>_file` or the environment variable `<name>_env` holds."""
        if name in self._given:
            raise InvalidParameter(
                f"{self.where}: {name} must not stand here; put it into a file and give "
                f"{name}_file, or into a variable and give {name}_env"
            )
        path, variable = self.text(f"{name}_file"), self.text(f"{name}_env")
        if path is not None and variable is not None:
            raise InvalidParameter(f"{self.where}: give {name}_file or {name}_env, not both")
        if path is not None:
            return self.file(path, f"{name}_file").rstrip("\r\n")
        if variable is not None and variable not in os.environ:
            raise SecretError(
                f"{self.where}: {name}_env names the environment variable {variable!r}, which is "
                "not set; export it"
            )
        return None if variable is None else os.environ[variable]

    def file(self, path: str, option: str) -> str:
        """The text of a file that may hold secrets."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
            raise SecretError(f"{self.where}: {option} {path} cannot be read: {reason}") from None

    def finish(self) -> None:
        """Refuse what nobody took."""
        for name in self._given:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._known)}"
            raise InvalidParameter(f"{self.where} has no option {name!r}; {hint}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
