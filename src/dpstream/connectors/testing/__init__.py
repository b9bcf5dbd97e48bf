"""For tests of sources, sinks and whatever lies between them, of this package or of your own.

`ListSource` and `ListSink` are scripts and memories. `check_source` and `check_sink` look at one
over given rows, in a line: the least that it must do. `SourceSuite`, `ServerSourceSuite`,
`SinkSuite`, `UpsertSinkSuite` and `ServerSinkSuite` are what every source and sink must do:
subclass one in a test file, say how the thing is opened and filled, and pytest runs it.

>>> import pyarrow as pa
>>> from dpstream.connectors.memory import TableSource
>>> table = pa.table({"user": ["a", "b", "c"], "page": ["x", "y", "x"]})
>>> check_source(lambda: TableSource(table, rows=2), columns=["user", "page"])
3
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from dpstream.connectors.testing.suites import (
    ServerSinkSuite,
    ServerSourceSuite,
    SinkSuite,
    SourceSuite,
    UpsertSinkSuite,
    replay,
)
from dpstream.records import Batch, Columns, Position, Sink, Source

__all__ = [
    "Abort",
    "Aborted",
    "ListSink",
    "ListSource",
    "ServerSinkSuite",
    "ServerSourceSuite",
    "SinkSuite",
    "SourceSuite",
    "UpsertSinkSuite",
    "check_sink",
    "check_source",
]


def check_source(open_source: Callable[[], Source], *, columns: Sequence[str]) -> int:
    """Open it several times over the same rows; return how many there are.

    Every position survives JSON, and from each of them another process reads the same rows. A read
    up to an earlier position ends there. A projection leaves out columns, never rows.
    """
    source = open_source()
    rows = 0
    for partition in source.partitions():
        chunks = _chunks(source, partition, columns)
        again = open_source()
        assert partition in again.partitions(), f"{partition} has another name the second time"
        for position, chunk in chunks:
            stored = json.loads(json.dumps(position))
            _check_same(again, partition, stored, chunk, columns)
        again.close()
        rows += sum(len(chunk.table) for _, chunk in chunks)
    source.close()
    return rows


def check_sink(
    open_sink: Callable[[], Sink], read_back: Callable[[], object], table: pa.Table
) -> None:
    """Write, write again, open it anew and write once more: what is there never changes.

    `read_back` gives what the sink holds as one comparable value; `table` is a release.
    """
    sink = open_sink()
    sink.write("contract", 0, 1, table)
    first = read_back()
    sink.write("contract", 0, 1, table)
    assert read_back() == first, "a second write of the same release has changed something"
    sink.close()
    sink = open_sink()
    sink.write("contract", 0, 1, table)
    assert read_back() == first, "after a restart the same release was written again"
    sink.write("contract", 0, 2, table)
    assert read_back() != first, "the next release was not written"
    sink.close()


def _chunks(source: Source, partition: str, columns: Sequence[str]) -> list[tuple[Position, Batch]]:
    """Every chunk with the position that it was read from."""
    chunks: list[tuple[Position, Batch]] = []
    position: Position = None
    while True:
        batch = source.read(partition, position, columns=columns)
        assert set(batch.table.column_names) == set(columns), "the columns are not those asked for"
        chunks.append((position, batch))
        if batch.done:
            return chunks
        assert batch.position != position, f"{partition} stands still at {position!r}"
        position = batch.position


def _check_same(
    source: Source, partition: str, position: Position, chunk: Batch, columns: Sequence[str]
) -> None:
    """The rows up to the end of `chunk`, in as many reads as it takes, and one column of them."""
    end = json.loads(json.dumps(chunk.position))
    again = replay(source, partition, position, end, columns)
    rows = [row for batch in again.batches for row in batch.table.select(columns).to_pylist()]
    wanted = chunk.table.select(columns).to_pylist()
    assert rows == wanted, f"reading {partition} again gave other rows"
    empty = source.read(partition, end, columns=columns, until=end)
    assert len(empty.table) == 0, "a read up to its own position must give nothing"
    assert empty.done, "a read up to its own position must be done"


# A scripted source and a sink that remembers, for tests of whatever lies between them.


class Aborted(Exception):
    """The crash that a script asked for."""


@dataclass(eq=False)
class Abort:
    """In a script: raise `Aborted` here, the first time only."""

    raised: bool = False


class ListSource:
    """Scripted chunks in one partition, "list": tables, lists of dicts, batches or `Abort`.

    >>> source = ListSource([[{"a": 1}], Abort(), [{"a": 2}]])
    >>> first = source.read("list", None)
    >>> source.read("list", first.position)
    Traceback (most recent call last):
    dpstream.connectors.testing.Aborted: the script aborts at chunk 1
    >>> source.read("list", first.position).table.to_pylist()
    [{'a': 2}]
    """

    replayable = True

    def __init__(self, script: Sequence[Any], *, bounded: bool = True) -> None:
        self.bounded = bounded
        self._script = [item if isinstance(item, Abort) else _as_batch(item) for item in script]

    def partitions(self) -> list[str]:
        """The one partition."""
        return ["list"]

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of the first chunk."""
        first = next((item for item in self._script if isinstance(item, Batch)), None)
        return None if first is None else {field.name: field.type for field in first.table.schema}

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """The next chunk of the script."""
        at = position or 0
        end = len(self._script) if until is None else until
        while at < end:
            chunk = self._script[at]
            at += 1
            if isinstance(chunk, Batch):
                done = not any(isinstance(item, Batch) for item in self._script[at:end])
                table = chunk.table if columns is None else chunk.table.select(list(columns))
                return replace(chunk, table=table, position=at, done=done)
            if not chunk.raised:
                chunk.raised = True
                raise Aborted(f"the script aborts at chunk {at - 1}")
        schema = pa.schema([(n, t) for n, t in (self.columns(partition) or {}).items()])
        table = schema.empty_table() if columns is None else schema.empty_table().select(columns)
        return Batch(table=table, position=at, done=True)

    def close(self) -> None:
        """Nothing is held open."""


class ListSink:
    """Keeps releases by (query, window, trigger); `calls` also counts the repeated ones."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int, int], pa.Table] = {}
        self.calls = 0

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep the table, unless there is one."""
        self.calls += 1
        self.tables.setdefault((name, window, trigger), table)

    def close(self) -> None:
        """Nothing is held open."""


def _as_batch(chunk: Any) -> Batch:
    if isinstance(chunk, Batch):
        return chunk
    table = chunk if isinstance(chunk, pa.Table) else pa.Table.from_pylist(chunk)
    return Batch(table=table, position=None, done=False)
