"""A scripted source and a sink that remembers, for tests of whatever lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dpstream.records import Batch, Position


class Aborted(Exception):
    """The crash that a script asked for."""


class Abort:
    """In a script: raise `Aborted` here, the first time only."""

    def __init__(self) -> None:
        self.raised = False


class ListSource:
    """Scripted chunks in one partition, "list": tables, lists of dicts, batches or `Abort`.

    >>> source = ListSource([[{"a": 1}], Abort(), [{"a": 2}]])
    >>> first = source.read("list", None)
    >>> source.read("list", first.position)
    Traceback (most recent call last):
    dpstream.connectors.testing.lists.Aborted: the script aborts at chunk 1
    >>> source.read("list", first.position).table.to_pylist()
    [{'a': 2}]
    """

    replayable = True

    def __init__(self, script: Sequence[Any], *, bounded: bool = True) -> None:
        self.bounded = bounded
        self._script = [one if isinstance(one, Abort) else _as_batch(one) for one in script]

    def partitions(self) -> list[str]:
        """The one partition."""
        return ["list"]

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of the first chunk."""
        first = next((one for one in self._script if isinstance(one, Batch)), None)
        return None if first is None else {one.name: one.type for one in first.table.schema}

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """The next chunk of the script."""
        at = position or 0
        end = len(self._script) if until is None else until
        while at < end:
            chunk = self._script[at]
            at += 1
            if isinstance(chunk, Batch):
                done = not any(isinstance(one, Batch) for one in self._script[at:end])
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

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep the table, unless there is one."""
        self.calls += 1
        self.tables.setdefault((query, window, trigger), table)

    def close(self) -> None:
        """Nothing is held open."""


def _as_batch(chunk: Any) -> Batch:
    if isinstance(chunk, Batch):
        return chunk
    table = chunk if isinstance(chunk, pa.Table) else pa.Table.from_pylist(chunk)
    return Batch(table=table, position=None, done=False)
