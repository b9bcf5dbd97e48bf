"""Where a ledger's records are kept: in a file on this machine, or on a server that many share.

The ledger asks for what `LedgerStore` lists and does not know which of the two it has. A server's
store is a connector, which this room does not import: it is found by its scheme when one is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from dpstream.errors import LedgerError, ServerUnreachable
from dpstream.optional import optional
from dpstream.privacy.state.journal import Fold, Journal, JournalEnd, Record

_POSTGRES = ("dpstream.connectors.postgres.ledger_store", "psycopg", "postgres")
_OBJECTS = ("dpstream.connectors.objects.ledger_store", "obstore", "objects")
_SERVERS = {"postgresql": _POSTGRES, "postgres": _POSTGRES} | dict.fromkeys(
    ("s3", "gs", "az"), _OBJECTS
)
"""By scheme: the module of the store, the package that it needs, and the extra with that."""


class Overtaken(ServerUnreachable):
    """Others wrote while a server was away, and nothing of a section is written: do it anew."""


class LedgerStore(Protocol):
    """Records in one order, for several writers; `Journal` says what each method does.

    Inside `with store.locked()` nobody else writes, and what is appended is durable when it ends:
    all of it or, if that raises, nothing.
    """

    @property
    def place(self) -> LedgerPlace:
        """Where it is."""

    @property
    def is_long(self) -> bool:
        """May a compaction be worth its while?"""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the ledger against other writers."""

    def read_new(self) -> list[Record]:
        """Records that were appended since the last call, by anyone."""

    def read_all(self) -> list[Record]:
        """Every record from the first on."""

    def read_lines(self) -> list[tuple[int, str]]:
        """Every line as it stands, with the offset at which it begins."""

    def append(self, records: Iterable[Record]) -> None:
        """Write a record after everything read so far."""

    def rewind(self) -> None:
        """Forget what was read, and what was appended and is not durable."""

    def head(self) -> tuple[int, str]:
        """How far it was read or written, and the tag of the last record."""

    def has(self, head: tuple[int, str]) -> bool:
        """Does it begin with what it held at `head`?"""

    def accept(self, record: Callable[[JournalEnd | None], Record]) -> None:
        """Take it as it is, whatever its head says."""

    def compact(self, fold: Fold) -> None:
        """Fold the oldest records."""

    def identity(self) -> str:
        """Which ledger this is: a copy has another identity."""

    def replaces(self, identity: str) -> bool:
        """Is this the ledger with that identity?"""

    def close(self) -> None:
        """Let it go."""


class ServerStore(LedgerStore, Protocol):
    """A ledger on a server, to which one in a file may be moved."""

    def fill(self, lines: list[tuple[int, str]], record: Record) -> None:
        """Take the lines of another ledger as they are, and a record behind them."""


class LedgerPlace(Protocol):
    """A `Path` to a ledger file, or a `LedgerAddress`."""

    @property
    def suffix(self) -> str:
        """How its name ends."""

    def __hash__(self) -> int:
        """It names one of several ledgers."""

    def exists(self) -> bool:
        """Is there a ledger? Asking makes none."""

    def is_file(self) -> bool:
        """Is there a ledger, and not a directory?"""

    def is_dir(self) -> bool:
        """Is it a directory?"""


@dataclass(frozen=True)
class LedgerAddress:
    """A ledger on a server.

    >>> print(LedgerAddress("postgresql://ana:hunter2@db/books?schema=b&password=x"))
    postgresql://ana@db/books?schema=b
    """

    uri: str
    suffix: ClassVar[str] = ""

    def __str__(self) -> str:
        """The address without passwords, which are refused when it is opened."""
        try:
            parts = urlsplit(self.uri)
            user, at, servers = parts.netloc.rpartition("@")
            options = parse_qsl(parts.query, keep_blank_values=True)
        except ValueError:
            return f"{self.uri.partition('://')[0]}://..."
        if "@" in self.uri and not at:  # a password with an unescaped /, # or ? in it
            return f"{parts.scheme}://..."
        shown = [
            (name, value)
            for name, value in options
            if not any(word in name.lower() for word in ("password", "secret"))
            or name.endswith(("_file", "_env"))
        ]
        query = urlencode(shown, safe="/:")
        clean = parts._replace(netloc=user.partition(":")[0] + at + servers, query=query)
        return clean.geturl()

    __repr__ = __str__

    def open(self) -> ServerStore:
        """The ledger, made if there is none."""
        store: ServerStore = self._module().open_store(self)
        return store

    def exists(self) -> bool:
        """Is there a ledger? Asking makes none."""
        there: bool = self._module().exists(self)
        return there

    is_file = exists

    def is_dir(self) -> bool:
        """It is no directory."""
        return False

    def _module(self) -> Any:
        module, package, extra = _SERVERS[self.uri.partition("://")[0]]
        optional(package, extra=extra, who=f"the ledger {self}")
        return import_module(module)


def as_ledger_place(given: str | LedgerPlace) -> LedgerPlace:
    """A path, or the address of a server.

    >>> as_ledger_place("clicks.ledger"), as_ledger_place("postgresql://db/books")
    (PosixPath('clicks.ledger'), postgresql://db/books)
    """
    if not isinstance(given, str):
        return given
    scheme, server, _ = given.partition("://")
    if not server:
        return Path(given)
    if scheme not in _SERVERS:
        raise LedgerError(
            "a ledger is a file, in PostgreSQL (postgresql://user@host/database) or in an object "
            f"store (s3://bucket/books/clicks); got {scheme}:"
        )
    return LedgerAddress(given)


def open_store(place: LedgerPlace) -> LedgerStore:
    """The ledger at a place, made if there is none."""
    if isinstance(place, LedgerAddress):
        return place.open()
    return Journal(Path(str(place)), kind="ledger", error=LedgerError, head=True)
