"""Values that pass between the layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.errors import no_column

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""128-bit key ids, two words a row."""
Position = Any
"""Where a read goes on: whatever JSON can hold; None is the beginning of a partition."""
Columns = Sequence[str] | None
"""The columns that a read is asked for; None asks for all."""


class Frame(Protocol):
    """A data frame: of pandas, Polars, or Spark."""

    @property
    def columns(self) -> Any:
        """Their names."""

    def __getitem__(self, column: Any, /) -> Any:
        """One of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Release:
    """One published step.

    `paid`: budget was spent on publishing this step. `held`: the values repeat an earlier release.
    `stddev`: standard deviation of the noise in `values`, where it is known; of a held value it is
    that of the release it repeats, and says nothing about how far the stream has moved since. Where
    `values` are estimates (`Pacer`, `BlockSmoother`) it is the deviation of the true value from
    them, held steps included, by the mechanism's models of the stream.

    >>> import dpstream as dps
    >>> (one,) = dps.Runner(dps.mechanisms.Uniform(epsilon=1, window=2)).step([5, 7])
    >>> one.step, one.paid, len(one.values), len(one.stddev)
    (0, True, 2, 2)
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
    `parsed`: for the engine alone, what queries that share the chunk have made of it.
    """

    table: pa.Table
    position: Position
    done: bool
    rejected: list[Rejected] = field(default_factory=list)
    where: str | None = None
    parsed: Any = None

    @property
    def size(self) -> int:
        """How many rows were read, with those that were rejected."""
        return len(self.table) + len(self.rejected)


@runtime_checkable
class Source(Protocol):
    """Where rows come from: partitions with stable names, each read from a position on.

    `bounded`: the partitions are fixed and end by themselves. `replayable`: reading again from a
    position gives the same rows.

    The engine keeps the positions, in its own log: a source remembers none, and commits none to a
    server. If a partition was not read from its very beginning, each of its positions says where
    reading started, so that None and the first logged position give the first rows again
    (`StartOffsets`). The positions of a partition that started at one place rise: as numbers, or
    item by item (null is the least).

    If its server is away for a while, the source connects again, waiting longer each time
    (`RetryPolicy`), says so in the log of `dpstream`, and raises `ServerUnreachable` when it
    has waited as long as its user allows.

    What a source may be able to do beside this is a protocol of its own: `CommittingSource`,
    `EndingSource`, `StartOffsets`, `MeasuredSource`, `FinitePartitions`, `StampedPartitions`,
    `EmptyingSource`, `ChunkRanges`, `SizedPartitions`, `ParallelReads`, `CheckedSource`,
    `InferredTypes`. The engine asks `isinstance`; a source without the ability is treated as each
    of them says.
    """

    bounded: bool
    replayable: bool

    def partitions(self) -> list[str]:
        """Their names, in order; a growing source may have more later, which begin at None.

        Quick: it is asked for before every read. While a server is away, those known so far.
        """

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types that a typed format declares; None for text, whose columns are strings."""

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
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

    def close(self) -> None:
        """Release files and threads."""


@runtime_checkable
class CommittingSource(Source, Protocol):
    """A source that keeps rows only for as long as a recovery may need them.

    Any other source keeps its rows as long as its own operator decides.
    """

    def commit(self, positions: Mapping[str, Position]) -> None:
        """What was read before these positions, by partition, is durable: it may be deleted."""


@runtime_checkable
class EndingSource(Source, Protocol):
    """An unbounded source that may end, as a pipe does. Any other one never ends."""

    @property
    def ended(self) -> bool:
        """Has the input ended, and was all of it read?"""


@runtime_checkable
class StartOffsets(Source, Protocol):
    """A source whose partitions may start in the middle, such as at the end of a server's log.

    The partitions of any other source start at their beginning.
    """

    def start_offset(self, position: Position) -> Position:
        """Where reading started in the partition that has this position."""


@runtime_checkable
class MeasuredSource(Source, Protocol):
    """An unbounded source whose server tells how much of it was not read yet, as logs do.

    Of any other one the operator is told what has come alone.
    """

    def behind(self, positions: Mapping[str, Position]) -> dict[str, int]:
        """How many messages the server has after each position, by partition, as it last told.

        It never waits for the server, is asked every second, and leaves out what it does not know.
        """


@runtime_checkable
class FinitePartitions(Source, Protocol):
    """An unbounded source whose partitions may each be complete, as files in a directory are.

    A partition of any other unbounded source may always grow.
    """

    @property
    def partitions_end(self) -> bool:
        """Does nothing follow in a partition whose last read was `done`?"""


@runtime_checkable
class StampedPartitions(FinitePartitions, Protocol):
    """A source that can tell whether a partition is still the one that was read to its end.

    Of any other one that is taken for granted.
    """

    def stamp(self, partition: str) -> Any:
        """What tells a partition that was read from what it, or its name, may become; for JSON."""

    def resume(self, partition: str, position: Position, stamp: Any) -> bool:
        """Take up what a query has read to its end; False: it is gone, or another has its name."""


@runtime_checkable
class EmptyingSource(CommittingSource, StampedPartitions, Protocol):
    """A source of complete partitions that go when they are committed, and give their names free.

    What another source has read to its end stays there, under a name that means nothing else.
    """

    def removed(self) -> list[str]:
        """Partitions that commits have removed since the last call."""


@runtime_checkable
class ChunkRanges(Source, Protocol):
    """A bounded source that knows the range of a column in each chunk, as Parquet files do.

    Any other source is read once more, to find the times of its chunks.
    """

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants for every chunk, if it is known."""


@runtime_checkable
class SizedPartitions(Source, Protocol):
    """A bounded source that knows about how many rows it has, as files do.

    The work on any other source is divided as if it had few.
    """

    def row_estimate(self, partition: str) -> int | None:
        """About how many rows a partition has, without reading them; None if it does not tell."""


@runtime_checkable
class ParallelReads(Source, Protocol):
    """A bounded source that several threads may read at once, each with a reader of its own.

    Any other source is read by one thread.
    """

    def reader(self) -> Source:
        """Another reader of the same partitions; it is closed by itself."""

    def stretch(self, partition: str, position: Position) -> Hashable:
        """What is read in one go: chunks with the same are left to one reader, in order."""


@runtime_checkable
class CheckedSource(Source, Protocol):
    """A source that can try a partition before any row of it is counted, as files can.

    A partition of any other source that cannot be read stops the run.
    """

    @property
    def quarantines(self) -> bool:
        """Is a partition that cannot be used set aside? Otherwise it stops the run."""

    def check(self, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        """None if these columns can be read; else the position that says that it is quarantined.

        `whole`: read all of it, where reading would not find the damage before rows are counted.
        """


@runtime_checkable
class InferredTypes(Source, Protocol):
    """A source that takes the types of some columns from their values, as pandas does.

    Such a column is no key without a declared type. The types of any other source are declared.
    """

    @property
    def inferred(self) -> Mapping[str, str]:
        """Those columns, and what was made of them, in words."""


@runtime_checkable
class Sink(Protocol):
    """Where releases go; called by one thread at a time, not always the same one.

    What a sink may be able to do beside this is a protocol of its own: `CheckedSink`,
    `FencingSink`, `TwoPhaseSink`, `UpsertingSink`, `ConcurrentSink`.
    """

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Durable, and idempotent by (name, window, trigger): a second call does nothing.

        `name` is the query's.
        """

    def close(self) -> None:
        """Release files and connections."""


@runtime_checkable
class CheckedSink(Sink, Protocol):
    """A sink that can tell beforehand what it would refuse of a query's releases.

    Any other sink tells with the first release, when the query is paid for.
    """

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse names, columns, tables and permissions that `write` would; leave nothing behind.

        It is called before a run is charged, with the columns of its releases.
        """


@runtime_checkable
class FencingSink(Sink, Protocol):
    """A sink that tells the releases of one run of a query from those of another.

    A release says which run it is of: `run` in the JSON of its schema's metadata, `dpstream`.
    """

    def fence(self, name: str, run: str) -> None:
        """Refuse a run if the sink has releases of another run of this query.

        It is called before the run is charged. Afterwards `write` refuses such a release, too.
        """


@runtime_checkable
class TwoPhaseSink(Sink, Protocol):
    """A sink that does the slow part of a write first, for several releases at a time.

    `write` does the same as both phases together.
    """

    def prepare(self, name: str, window: int, trigger: int, table: pa.Table) -> Any:
        """Store a release where no reader sees it; called by several threads at a time."""

    def publish(self, prepared: Sequence[Any]) -> None:
        """Show what `prepare` gave for some releases, durably and in this order."""


@runtime_checkable
class UpsertingSink(Sink, Protocol):
    """A sink that can keep the newest release of each window alone (`output="upsert"`).

    Any other sink keeps every release.
    """

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Replace the window's rows by these, all at once; durable, and idempotent like `write`.

        `row_keys` tells the rows of a query apart, over all windows. A row of this window whose
        key is not among them is deleted. A release that is older than the one that is there, or
        that very one, does nothing.
        """

    def check_upsert(self, name: str, schema: pa.Schema) -> None:
        """What `CheckedSink.check` does, for `upsert`."""


@runtime_checkable
class ConcurrentSink(Sink, Protocol):
    """A sink that several queries may write to at the same time, each from its own thread.

    Queries that share any other sink write in turn.
    """

    @property
    def concurrent(self) -> bool:
        """May they?"""


def check_schema(sink: Sink | None, name: str, schema: pa.Schema) -> None:
    """Refuse a query whose releases the sink could not take, as far as it can tell."""
    if isinstance(sink, CheckedSink):
        sink.check(name, schema)


def fence(sink: Sink | None, name: str, run: str) -> None:
    """Refuse a run whose releases the sink cannot take; before it is charged."""
    if isinstance(sink, FencingSink):
        sink.fence(name, run)


def select_columns(place: str, known: Sequence[str], columns: Columns) -> list[str]:
    """The columns that are asked for, in the order of those known; None asks for all."""
    for name in columns or ():
        if name not in known:
            raise no_column(place, name, known)
    return [name for name in known if columns is None or name in columns]


def is_quarantined(position: Position) -> bool:
    """Does a position say that nothing (more) of its partition is ever read?

    It holds the digest of what was there, the reason, and `after`, up to where rows were counted.
    Being a position, it is logged with the step that met it, and every replay follows it.
    """
    return isinstance(position, dict) and "quarantined" in position


def is_reached(position: Position, end: Position) -> bool:
    """Is a position at another one of its partition, or behind it?

    >>> is_reached([3, 0], [2, 50]), is_reached(None, 5), is_reached([None, 7], [None, None])
    (True, False, True)
    """
    return bool(position == end or position_order(position) > position_order(end))


def position_order(position: Position) -> Any:
    """What positions of a partition rise by: numbers, or lists item by item.

    Null is the least, a quarantine the last.
    """
    if isinstance(position, list | tuple):
        return (1, [position_order(item) for item in position])
    if is_quarantined(position):
        return (2, 0)
    return (0, 0) if position is None else (1, position)
