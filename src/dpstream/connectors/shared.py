"""One source for several queries, one sink for several queries, several sinks for one query.

Live sources are shared by `engines.embedded.live_reader` instead, which goes by the clock.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock, RLock
from typing import Any

import pyarrow as pa

from dpstream.connectors.encode import row_keys
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import (
    Batch,
    CheckedSource,
    ChunkRanges,
    Columns,
    ConcurrentSink,
    InferredTypes,
    Position,
    Sink,
    SizedPartitions,
    Source,
    UpsertingSink,
    check_schema,
    fence,
)
from dpstream.rows.row_reader import ParsedColumns


class SharedSource:
    """A bounded source that several queries read side by side, each at its own pace.

    `wanted`: the columns of each query. A chunk is read once with all of them and kept until each
    has it, or while there is room; what one query parses of it, ids of units and groups above all,
    the others share. Other projections (a look at the time column) are read as they are asked for.
    The source is closed when each query has closed it. Of the source's abilities it has
    `chunk_ranges`, `row_estimate`, `check` and `inferred`.
    """

    def __init__(
        self, source: Source, wanted: Sequence[Sequence[str]], *, memory: int = 1 << 28
    ) -> None:
        self._source = source
        self.bounded, self.replayable = source.bounded, source.replayable
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self._wanted = [frozenset(columns) for columns in wanted]
        self._all = list(dict.fromkeys(name for columns in wanted for name in columns))
        self._memory, self._bytes = memory, 0
        self._chunks: OrderedDict[tuple[str, str], Batch] = OrderedDict()
        self._apart: set[str] = set()  # partitions of which not all wanted columns can be read
        self.quarantines = isinstance(source, CheckedSource) and source.quarantines
        self._taken = Counter[tuple[str, str]]()  # by how many queries
        self._lock = RLock()
        self._open = len(wanted)

    def views(self) -> list[SharedSource]:
        """The source as each of the queries sees it, in their order."""
        return [self] * len(self._wanted)

    def partitions(self) -> list[str]:
        """Those of the source."""
        with self._lock:
            return self._source.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """Those of the source."""
        with self._lock:
            return self._source.columns(partition)

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """A chunk with the columns that are asked for."""
        with self._lock:
            if columns is None or not self._shares(partition, columns):
                return self._source.read(partition, position, columns=columns, until=until)
            chunk = self._chunk(partition, position, until)
        return replace(chunk, table=chunk.table.select(list(columns)))

    def peek(self, partition: str, position: Position, *, columns: Sequence[str]) -> Batch:
        """A chunk that is looked at, and read later: it is kept until then."""
        with self._lock:
            if not self._shares(partition, columns):
                return self._source.read(partition, position, columns=columns)
            chunk = self._chunk(partition, position, None, taken=False)
        return replace(chunk, table=chunk.table.select(list(columns)))

    def _shares(self, partition: str, columns: Sequence[str]) -> bool:
        """Is this what a query reads together with the others?"""
        return partition not in self._apart and frozenset(columns) in self._wanted

    def check(self, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        """As the source says, of what is read for all queries or else of these columns alone."""
        with self._lock:
            if not isinstance(self._source, CheckedSource):
                return None
            if self._source.check(partition, self._all, whole=whole) is None:
                return None
            self._apart.add(partition)
            return self._source.check(partition, columns, whole=whole)

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """What the source knows of them."""
        with self._lock:
            if not isinstance(self._source, ChunkRanges):
                return None
            return self._source.chunk_ranges(partition, column)

    def row_estimate(self, partition: str) -> int | None:
        """What the source knows of it."""
        with self._lock:
            if not isinstance(self._source, SizedPartitions):
                return None
            return self._source.row_estimate(partition)

    def close(self) -> None:
        """Close the source when the last query has closed it."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._chunks.clear()
                self._taken.clear()
                self._source.close()

    def _chunk(
        self, partition: str, position: Position, until: Position, *, taken: bool = True
    ) -> Batch:
        """A chunk with the columns of all queries, from memory if it is there."""
        place, looked_at = ((partition, json.dumps([position, end])) for end in (until, None))
        if looked_at in self._chunks and self._chunks[looked_at].position == until:
            place = looked_at
        if place in self._chunks:
            self._chunks.move_to_end(place)
        else:
            batch = self._source.read(partition, position, columns=self._all, until=until)
            if batch.position == position and not batch.done:
                return batch  # nothing yet
            if len(self._wanted) > 1:
                batch = replace(batch, parsed=ParsedColumns())
            self._chunks[place] = batch
            self._bytes += int(batch.table.nbytes)
        batch = self._chunks[place]
        self._taken[place] += taken
        if self._taken[place] == len(self._wanted):
            self._drop(place)
        while self._bytes > self._memory and len(self._chunks) > 1:
            self._drop(next(iter(self._chunks)))
        return batch

    def _drop(self, place: tuple[str, str]) -> None:
        """Keep a chunk no longer: every query has it, or there is no room."""
        self._bytes -= int(self._chunks.pop(place).table.nbytes)
        del self._taken[place]


class SharedSink:
    """A sink object that several queries write to, each from a thread of its own, in turn.

    A `ConcurrentSink` is called by several threads at once. It is closed, by `release`, when all
    queries are over. Releases are written one by one, also to a `TwoPhaseSink`.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.sinks = [sink]
        at_once = isinstance(sink, ConcurrentSink) and sink.concurrent
        self._turn = nullcontext() if at_once else Lock()

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write when no other query writes."""
        with self._turn:
            self._sink.write(name, window, trigger, table)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse a query whose releases it could not take."""
        with self._turn:
            check_schema(self._sink, name, schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a run whose releases it cannot take, before it is paid for."""
        with self._turn:
            fence(self._sink, name, run)

    def close(self) -> None:
        """Do nothing: other queries may still write."""

    def release(self) -> None:
        """Close the sink: nobody writes any more."""
        self._sink.close()


def shared_sinks(spec: Any) -> Any:
    """What several queries write to: each opens what is named, and shares what is an object."""
    if isinstance(spec, list | tuple):
        return [shared_sinks(each) for each in spec]
    return SharedSink(spec) if isinstance(spec, Sink) else spec


class UpsertSink:
    """A sink that keeps the newest release of each window alone, by the keys of each query."""

    def __init__(self, sink: UpsertingSink) -> None:
        self._sink = sink
        self._keys: dict[str, Sequence[str]] = {}

    def tell_keys(self, name: str, keys: Sequence[str]) -> None:
        """The columns that tell the groups of a query's window apart."""
        self._keys[name] = keys

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Replace what the window has."""
        keys = self._keys[name]
        texts = row_keys(name, window, table, keys)
        if len(set(texts)) < len(texts):
            raise InvalidInput(
                f"output = 'upsert' must tell the rows of {name!r} apart by {', '.join(keys)}; "
                f"{len(texts) - len(set(texts))} of window {window} have the keys of others, and "
                "would be lost: use output = 'append' with another sink"
            )
        self._sink.upsert(name, window, trigger, table, texts)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse releases without the columns that tell rows apart, and what the sink refuses."""
        keys = self._keys[name]
        missing = [key for key in keys if key not in schema.names]
        if missing:
            raise InvalidParameter(
                f"output = 'upsert' tells the rows of {name!r} apart by {', '.join(keys)}; its "
                f"releases have no column {missing[0]!r}: add it to SELECT"
            )
        self._sink.check_upsert(name, schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a run whose releases it cannot take, before it is paid for."""
        fence(self._sink, name, run)

    def close(self) -> None:
        """Close it."""
        self._sink.close()


def tell_keys(sink: Sink | None, name: str, keys: Sequence[str]) -> None:
    """Tell those sinks that upsert what the keys of a query are."""
    if isinstance(sink, AllSinks | SharedSink):
        for each in sink.sinks:
            tell_keys(each, name, keys)
    elif isinstance(sink, UpsertSink):
        sink.tell_keys(name, keys)


class AllSinks:
    """Every release goes to each of several sinks, in order; to a `TwoPhaseSink` in one step."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write to all; after a failure the next run writes again where it is missing."""
        for sink in self.sinks:
            sink.write(name, window, trigger, table)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse a query whose releases one of them could not take."""
        for sink in self.sinks:
            check_schema(sink, name, schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a run whose releases one of them cannot take, before it is paid for."""
        for sink in self.sinks:
            fence(sink, name, run)

    def close(self) -> None:
        """Close all."""
        for sink in self.sinks:
            sink.close()
