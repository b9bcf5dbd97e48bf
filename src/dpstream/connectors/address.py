"""Where a server is, as one line of text: scheme://user@host:port/name?option=value.

Such lines stand in commands, pipeline files and messages, so they hold no secrets: those come from
the environment or from files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from dpstream.errors import InvalidParameter, SecretError

_URI = re.compile(r"([a-z][a-z0-9+]*)://")
_SECRET = re.compile(r"pass(word|wd)?$|^sslpassword$|secret|token", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Address:
    """A server, what is meant on it, and how it is used."""

    scheme: str
    user: str = ""
    hosts: tuple[str, ...] = ()
    """`host` or `host:port` each; none: what the environment says."""
    name: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """For messages: the server and the name, without options."""
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{','.join(self.hosts)}/{self.name}"

    def take(self, *, needed: Iterable[str] = (), known: Iterable[str]) -> dict[str, str]:
        """The options, all of them known, and the needed ones there."""
        known, needed = [*needed, *known], [*needed]
        for name in self.options:
            if name not in known:
                raise InvalidParameter(
                    f"{self.shown} has an unknown option {name!r}; known are {', '.join(known)}"
                )
        for name in needed:
            if not self.options.get(name):
                raise InvalidParameter(f"{self.shown} needs the option {name}; add ?{name}=...")
        return dict(self.options)


def scheme_of(spec: object) -> str | None:
    """The scheme of a URI; None for a path and for everything else."""
    found = _URI.match(spec) if isinstance(spec, str) else None
    return None if found is None else found[1]


def parse_address(text: str) -> Address:
    """Take a URI apart. One that holds a password is refused, and not repeated in the error."""
    parts = urlsplit(text)
    server, _, rest = parts.netloc.rpartition("@")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    inside = [name for name in options if _SECRET.search(name) and not name.endswith("file")]
    if ":" in server or inside:
        raise InvalidParameter(
            f"the address of a {parts.scheme} server holds a "
            f"{inside[0] if inside else 'password'}; it would be seen in process lists and files: "
            "leave it out, and name a file that holds it (?password_file=...), or use the "
            "environment as the connectors' documentation says"
        )
    if parts.fragment:
        raise InvalidParameter(f"write # as %23 in the address of a {parts.scheme} server")
    return Address(
        scheme=parts.scheme,
        user=unquote(server),
        hosts=tuple(host for host in rest.split(",") if host),
        name=unquote(parts.path.strip("/")),
        options=options,
    )


def secret_from(path: str | Path) -> str:
    """A secret from a file that only its owner may read."""
    place = Path(path)
    try:
        mode = place.stat().st_mode
        text = place.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SecretError(f"the password file {place} cannot be read: {reason}") from None
    if mode & 0o077:
        raise SecretError(f"{place} may be read by others; run: chmod 600 {place}")
    if not text:
        raise SecretError(f"the password file {place} is empty")
    return text
