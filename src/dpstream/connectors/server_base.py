"""What the connectors of servers share: address and options, retries, one partition read by number.

    kafka://127.0.0.1:9092/clicks?format=json&patience=30

Options are taken one by one; one that nobody took is unknown. A password is never part of them:
`password_file` or `password_env` says where it is, and nothing here shows what was there. What a
server says may hold what it was asked with, so only the connector's own words are passed on.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from dpstream.errors import InvalidInput, InvalidParameter, SecretError, ServerUnreachable
from dpstream.records import Batch, Columns, Position

# How often, and for how long, a connector tries again to reach a server that is away.
#
# What a server says may hold what it was asked with, so only the connector's own words are passed
# on.

T = TypeVar("T")
PATIENCE = 120.0
"""Seconds that a server may be away: long enough for it to be restarted."""
_SHORTEST, _LONGEST = 0.1, 5.0
_log = logging.getLogger("dpstream")


class ServerAway(Exception):
    """A server does not answer now, and may later. Its text is passed on to the operator."""


def unreachable(server: str, problem: Exception) -> ServerUnreachable:
    """The error for a server that does not answer the very first time it is asked."""
    return ServerUnreachable(f"{server} does not answer: {problem}; start it, or mend the address")


class RetryPolicy:
    """Waits longer from try to try, tells the operator, and gives up after `seconds`.

    The time counts from the server's first failure to its next answer. Readers, which must not
    wait, ask whether it is `too_early` for another try; writers, which may, `insist`.

    >>> now = [0.0]
    >>> retry = RetryPolicy("kafka://127.0.0.1:9", seconds=1, now=lambda: now[0])
    >>> retry.report_failure("nobody answers")
    >>> retry.too_early
    True
    >>> now[0] = 2.0
    >>> retry.report_failure("nobody answers")
    Traceback (most recent call last):
    dpstream.errors.ServerUnreachable: kafka://127.0.0.1:9: nobody answers, for 2 s now; start ...
    """

    def __init__(
        self,
        server: str,
        *,
        seconds: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self.seconds, self._now, self._sleep = server, seconds, now, sleep
        self._since: float | None = None
        self._pause = _SHORTEST
        self._next = 0.0

    def report_failure(self, problem: str) -> None:
        """Note that a try failed; raise if all have failed for too long."""
        now = self._now()
        if self._since is None:
            self._since = now
            _log.warning(
                "%s: %s; trying again for %g s", self._server, problem, round(self.seconds, 1)
            )
        elif now < self._next:
            return  # the same failure, told again
        if now - self._since >= self.seconds:
            raise ServerUnreachable(
                f"{self._server}: {problem}, for {now - self._since:.0f} s now; start the server "
                "and run again, nothing is lost; or allow more with patience= (seconds)"
            )
        self._next = now + self._pause
        self._pause = min(_LONGEST, 2 * self._pause)

    def report_success(self) -> None:
        """Note that the server has answered."""
        if self._since is not None:
            away = self._now() - self._since
            _log.warning("%s: answers again, after %.1f s", self._server, away)
        self._since, self._pause, self._next = None, _SHORTEST, 0.0

    @property
    def failing(self) -> bool:
        """Has the server not answered since its last failure?"""
        return self._since is not None

    @property
    def too_early(self) -> bool:
        """Should the next try wait a little longer?"""
        return self._since is not None and self._now() < self._next

    def wait(self) -> None:
        """Wait for the time of the next try."""
        self._sleep(max(0.0, self._next - self._now()))

    def insist(self, work: Callable[[], T]) -> T:
        """Do some work; while it raises `ServerAway`, wait and do it again."""
        while True:
            try:
                result = work()
            except ServerAway as problem:
                self.report_failure(str(problem))
                self.wait()
            else:
                self.report_success()
                return result


def is_uri(spec: Any) -> bool:
    """Does it name a server or a Delta table, and not a path?"""
    return isinstance(spec, str) and ("://" in spec or spec.startswith("delta:"))


OBJECT_STORES = ("s3", "gs", "az")
"""Schemes of object stores, whose objects are read like files."""


def is_object_uri(spec: Any) -> bool:
    """Does it name objects of a store?"""
    return isinstance(spec, str) and spec.partition("://")[0] in OBJECT_STORES and is_uri(spec)


class ServerOptions:
    """The options that a user gave to a connector, each taken once.

    >>> options = ServerOptions("kafka://localhost:9092/clicks?format=json", {"patience": 5})
    >>> options.servers, options.path, options.number("patience", 60)
    ('localhost:9092', 'clicks', 5.0)
    >>> options.finish()
    Traceback (most recent call last):
    dpstream.errors.InvalidParameter: kafka://localhost:9092/clicks has no option 'format'; ...
    """

    def __init__(self, uri: str, more: Mapping[str, Any] | None = None) -> None:
        try:
            parts = urlsplit(uri)
        except ValueError as problem:
            scheme = uri.partition("://")[0]
            raise InvalidParameter(f"{scheme}:// begins no address here: {problem}") from None
        user, at, servers = parts.netloc.rpartition("@")
        if "@" in uri and not at and ":" in servers and not servers.rpartition(":")[2].isdigit():
            raise InvalidParameter(
                f"{parts.scheme}://... has a '/', '#' or '?' before its '@': write them as %2F, "
                "%23 and %3F; a password must not be in it at all: put it into a file and add "
                "?password_file=PATH, or into a variable and add ?password_env=NAME"
            )
        self.scheme, self.servers, self.path = parts.scheme, servers, unquote(parts.path[1:])
        self.user = unquote(user) if at else None
        slashes = "//" if parts.netloc else ""  # "delta:" is followed by a path
        self.where = f"{parts.scheme}:{slashes}{servers}{parts.path}"
        """What it is called in messages."""
        if ":" in user:
            raise InvalidParameter(
                f"{self.where} must not hold a password, which logs and process lists would show; "
                "put it into a file and add ?password_file=PATH, or into a variable and add "
                "?password_env=NAME"
            )
        self._given = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name, value in (more or {}).items():
            self._given[name] = str(value).lower() if isinstance(value, bool) else str(value)
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
        value = self.text(name, default)
        if value not in among:
            raise InvalidParameter(
                f"{self.where}: {name} must be one of {', '.join(among)}; got {value!r}"
            )
        return str(value)

    def number(self, name: str, default: float, *, least: float = 0.0) -> float:
        """A number."""
        text = self.text(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise InvalidParameter(
                f"{self.where}: {name} must be a number from {least:g} on; got {text!r}"
            )
        return value

    def path_name(self, kind: str, example: str) -> str:
        """The one name that the URI's path must have: that of a topic or stream."""
        if not self.path or "/" in self.path:
            raise InvalidParameter(f"{self.where} must name one {kind}, as in {example}")
        return self.path

    def starts_latest(self) -> bool:
        """Does the option `start` ask for new rows only?"""
        return self.choice("start", ("earliest", "latest"), "earliest") == "latest"

    def retry_policy(self) -> RetryPolicy:
        """How long the option `patience` lets a server be away."""
        return RetryPolicy(self.where, seconds=self.number("patience", PATIENCE))

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


# One partition of a server that is read by number: what the NATS and PostgreSQL sources share.

P = TypeVar("P", bound=tuple[Any, ...])


class ServerLog(ABC, Generic[P]):
    """A source of one partition, whose positions are tuples that end in (last number, rows read).

    With `end`, a number, it is bounded and ends there, and `end_in_words` is how people write it.
    While the server is away, a read of an unbounded source gives no rows, and one of a bounded
    source waits.
    """

    replayable = True
    position_kind: str
    """What a position belongs to, in words."""

    def __init__(
        self, name: str, *, end: int | None, retry: RetryPolicy, end_in_words: str = ""
    ) -> None:
        self.bounded, self._end, self._retry = end is not None, end, retry
        self._name = name if end is None else f"{name} up to {end_in_words or end}"

    def partitions(self) -> list[str]:
        """The one partition."""
        return [self._name]

    def start_offset(self, position: Position) -> Position:
        """Where reading started in a position's partition: all but the last number and rows."""
        return None if position is None else position[:-2]

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """The next rows."""
        if partition != self._name:
            raise InvalidInput(f"the source reads {self._name!r} now, not {partition!r}")
        at, goal = self._parse(position), self._parse(until)
        if goal is not None and at is not None and at[-2] == goal[-2]:
            return self.no_rows(position, columns, done=True)
        while self.bounded and self._retry.too_early:
            self._retry.wait()
        if not self._retry.too_early:
            try:
                batch = self.read_next(at, goal, columns)
            except ServerAway as problem:
                self._retry.report_failure(str(problem))
            else:
                self._retry.report_success()
                return batch
        return self.no_rows(position, columns, done=until is None and not self.bounded)

    @abstractmethod
    def parse_position(self, position: Position) -> P:
        """A position as a tuple; TypeError or ValueError if it is none."""

    @abstractmethod
    def read_next(self, at: P | None, goal: P | None, columns: Columns) -> Batch:
        """Rows after `at`, up to `goal` if it is given; `ServerAway` if the server is."""

    @abstractmethod
    def no_rows(self, position: Position, columns: Columns, *, done: bool) -> Batch:
        """An empty batch."""

    def _parse(self, position: Position) -> P | None:
        try:
            return None if position is None else self.parse_position(position)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"{position!r} is no position of {self.position_kind}; the state belongs to "
                "another source"
            ) from None
