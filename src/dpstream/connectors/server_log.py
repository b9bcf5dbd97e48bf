"""One partition of a server that is read by number: what the NATS and PostgreSQL sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from dpstream.connectors.retry import RetryPolicy, ServerAway
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Position

P = TypeVar("P", bound=tuple[Any, ...])


class ServerLog(ABC, Generic[P]):
    """A source of one partition, whose positions are tuples that end in (last number, rows read).

    With `end`, a number, it is bounded and ends there. While the server is away, a read of an
    unbounded source gives no rows, and one of a bounded source waits.
    """

    replayable = True
    position_kind: str
    """What a position belongs to, in words."""

    def __init__(self, name: str, *, end: int | None, retry: RetryPolicy) -> None:
        self.bounded, self._end, self._retry = end is not None, end, retry
        self._name = name if end is None else f"{name} up to {end}"

    def partitions(self) -> list[str]:
        """The one partition."""
        return [self._name]

    def start_offset(self, position: Position) -> Position:
        """Where reading started in a position's partition: all but the last number and rows."""
        return None if position is None else position[:-2]

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
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
    def read_next(self, at: P | None, goal: P | None, columns: Sequence[str] | None) -> Batch:
        """Rows after `at`, up to `goal` if it is given; `ServerAway` if the server is."""

    @abstractmethod
    def no_rows(self, position: Position, columns: Sequence[str] | None, *, done: bool) -> Batch:
        """An empty batch."""

    def _parse(self, position: Position) -> P | None:
        try:
            return None if position is None else self.parse_position(position)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"{position!r} is no position of {self.position_kind}; the state belongs to "
                "another source"
            ) from None
