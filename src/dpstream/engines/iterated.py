"""What every run has in common, whatever it publishes: it is iterated once, stopped and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.privacy.ledger import Ledger
from dpstream.records import Source


@dataclass(kw_only=True)
class IteratedRun(ABC):
    """A running query: iterate over its releases."""

    source: Source | None
    """Read live (by the clock) unless it is bounded."""
    _iterator: Generator[pa.Table, None, None] | None = field(init=False, default=None)
    _stop: Event = field(init=False, default_factory=Event)

    def stop(self) -> None:
        """End at the next occasion, durably; a later run goes on from there."""
        self._stop.set()

    def __iter__(self) -> Iterator[pa.Table]:
        """The releases. There is one iterator: a second one would be a second noisy copy."""
        if self._iterator is None:
            self._iterator = self._releases()
        return self._iterator

    def close(self) -> None:
        """Give up where it is: as a kill would, but with everything closed."""
        if self._iterator is None:
            return
        if getgeneratorstate(self._iterator) == GEN_RUNNING:
            self.stop()  # in a thread of its own, which closes it
        else:
            self._iterator.close()

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""

    @abstractmethod
    def erase_unit(self, unit: Any) -> int:
        """Erase one unit from the state directory, instead of running; how many places it had."""

    @abstractmethod
    def _releases(self) -> Generator[pa.Table, None, None]:
        """The life of the run."""


def refuse_shared_noise(
    run_id: bytes | None, folder: Path | None, ledger: Ledger | str | Path | None
) -> None:
    """Refuse a fixed run id where nothing remembers what its noise has met."""
    if run_id is not None and folder is None and ledger is not None:
        raise InvalidParameter(
            "a fixed run id needs a state directory: without its log the same noise could "
            "meet other data"
        )


def refuse_endless_files(*, query_is_live: bool, source_is_live: bool) -> None:
    """Refuse a query without a public range over files."""
    if query_is_live and not source_is_live:
        raise InvalidParameter(
            "a query over files needs its public range: give start and end (in SQL among OPTIONS: "
            "start = '2024-05-01', end = '2024-06-01'), from what is known and not from the rows; "
            "or read a directory that grows, live"
        )
