"""Values that pass between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""128-bit key ids, two words a row."""
Position = Any
"""Where a read goes on: whatever JSON can hold; None is the beginning of a partition."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """One published step.

    `paid`: budget was spent on publishing this step. `held`: the values repeat an earlier release.
    `stddev`: standard deviation of the noise in `values`, where it is known; of a held value it is
    that of the release it repeats, and says nothing about how far the stream has moved since.
    """

    step: int
    values: Reals
    paid: bool
    held: bool = False
    stddev: Reals | None = None


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A line or row that could not be read at all.

    `where`: such as "clicks.csv, line 17". `row`: its raw text, cut at 4,096 characters.
    """

    where: str
    reason: str
    row: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One chunk of a partition.

    `table`: the wanted columns. Those of CSV are strings (an empty field is ""), those of JSON
    lines strings or null (JSON null, or an absent key), those of Parquet as the file types them.
    `position`: where the next read goes on. `done`: nothing follows in this partition, or not yet.
    `where`: the place of the chunk in words, if its partition and position do not tell it well.
    """

    table: pa.Table
    position: Position
    done: bool
    rejected: list[Rejected] = field(default_factory=list)
    where: str | None = None


@runtime_checkable
class Source(Protocol):
    """Where rows come from: partitions with stable names, each read from a position on.

    `bounded`: the partitions are fixed and end by themselves. `replayable`: reading again from a
    position gives the same rows.

    Positions are the engine's to keep, in its own log: a source remembers none, and commits none
    to a server. A position says by itself where a partition was begun, if that is not its very
    beginning, so that None and the first logged position give the first rows again; `begun`, a
    method that such a source has beside those here, gives that part of it. The positions of a
    partition that was begun at one place rise: as numbers, or item by item (null is the least).

    A server that is away for a while is the source's own affair: it connects again, waiting longer
    each time (`connectors.patience`), says so in the log of `dpstream`, and raises
    `ServerUnreachable` when it has waited as long as its user allows.
    """

    bounded: bool
    replayable: bool

    def partitions(self) -> list[str]:
        """Their names, in order; a growing source may have more later, which begin at None.

        Quick: it is asked for before every read. While a server is away, those known so far.
        """
        ...

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types that a typed format declares; None for text, whose columns are strings."""
        ...

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """One natural chunk from `position` on; `columns` projects, None takes all.

        `until`: a position that an earlier read gave. This one, which gives those rows again, ends
        there or before, never behind it; at `until` it gives nothing and is `done`.

        An unbounded source waits for new rows for a fraction of a second at most. If its server is
        away, it gives no rows: `done` if it was asked for new ones; not `done` if `until` is given,
        for those rows are there and will come.

        Rows that can never be had again raise `RowsLost`, a position that the source cannot have
        given `InvalidInput`: rows are never left out in silence.
        """
        ...

    def close(self) -> None:
        """Release files and threads."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Where releases go; called by one thread at a time, not always the same one.

    An object that several live queries write to may say `concurrent = True`: then their threads
    call it at the same time, and none of them waits for another's release.
    """

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Durable, and idempotent by (query, window, trigger): a second call does nothing."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


def is_reached(position: Position, end: Position) -> bool:
    """Is a position at another one of its partition, or behind it?

    >>> is_reached([3, 0], [2, 50]), is_reached(None, 5), is_reached([None, 7], [None, None])
    (True, False, True)
    """
    return bool(position == end or position_order(position) > position_order(end))


def position_order(position: Position) -> Any:
    """What positions of a partition rise by: numbers, or lists item by item; null is the least."""
    if isinstance(position, list | tuple):
        return (1, [position_order(item) for item in position])
    return (0, 0) if position is None else (1, position)
