"""A step's rows from files, by event time; and what a run reads in all.

Files may hold their rows in any order, so no step can be taken before it is known where its rows
are: one pass over the time column finds each chunk's first and last step. Then chunks are read
when their first step comes and dropped after their last one. (A step that began when a later row is
seen, as watermarks taken from the data have it, would let one unit move other units' rows.)
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Semaphore
from typing import Any

import numpy as np

from dpstream.engines.chunks import Aside, ChunkReader
from dpstream.engines.clock import Clock
from dpstream.engines.live_input import LiveInput
from dpstream.errors import InvalidInput
from dpstream.records import Batch, ChunkRanges, InferredTypes, Position, Source
from dpstream.stages.column_types import Types
from dpstream.stages.pieces import Piece
from dpstream.stages.query import Query
from dpstream.stages.row_reader import RowReader
from dpstream.stages.rows import Rows

_AHEAD = 2  # chunks that are read before they are needed; more take memory and save no time
_UNMADE = 3  # chunks that are read and not made into rows: read, waiting, in the making


@dataclass(kw_only=True, eq=False)
class Chunk:
    """A piece of a partition and the steps that its rows belong to."""

    partition: str
    position: Position
    first: int
    last: int
    until: Position = None
    """Where it ends, if a second read of it need not end by itself where the first one did."""
    rows: Future[list[Rows]] | None = None


class FileInput:
    """Rows of partitions that are complete, by event time (or by their arrival column)."""

    def __init__(self, chunks: ChunkReader, *, memory: int) -> None:
        self._chunks, self._memory = chunks, memory
        self._thread = ThreadPoolExecutor(1)  # all reading happens here
        self._maker = ThreadPoolExecutor(1)  # and here what was read becomes rows
        self._room = Semaphore(_UNMADE)  # what is read may be far larger than its rows
        self._index: list[Chunk] | None = None

    def take(self, step: int) -> list[Piece]:
        """The rows of one step; steps are taken in order."""
        index = self._index = self._indexed() if self._index is None else self._index
        pieces: list[Piece] = []
        needed = [chunk for chunk in index if chunk.first <= step <= chunk.last]
        later = [chunk for chunk in index if chunk.first > step]
        held = 0
        for chunk in [*needed, *later[:_AHEAD]]:
            self._begin(chunk)
        for chunk in needed:
            for rows in self._begin(chunk).result():
                pieces += [(rows, first, end) for at, *_, first, end in rows.runs if at == step]
                held += rows.bytes
            if chunk.last == step or held > self._memory:
                chunk.rows = None  # its time is over, or it is read again when needed
        return pieces

    def ready(self, step: int) -> bool:
        """Are the rows of a step here, so that nobody waits for them?"""
        needed = [chunk for chunk in self._index or () if chunk.first <= step <= chunk.last]
        return all(chunk.rows is not None and chunk.rows.done() for chunk in needed)

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(cancel_futures=True)
        self._maker.shutdown(cancel_futures=True)

    def _begin(self, chunk: Chunk) -> Future[list[Rows]]:
        """Read a chunk, unless that was begun."""
        if chunk.rows is None:
            batches = self._thread.submit(self._batches, chunk)
            chunk.rows = self._maker.submit(self._rows, chunk, batches)
        return chunk.rows

    def _batches(self, chunk: Chunk) -> list[tuple[Position, Batch]]:
        """What the source has of a chunk, and where."""
        self._room.acquire()
        found: list[tuple[Position, Batch]] = []
        position, done = chunk.position, False
        while not done:
            batch = self._chunks.batch(chunk.partition, position, until=chunk.until)
            found.append((position, batch))
            position, done = batch.position, batch.done or chunk.until in (None, batch.position)
        return found

    def _rows(self, chunk: Chunk, batches: Future[list[tuple[Position, Batch]]]) -> list[Rows]:
        try:
            return [self._made(chunk, *one) for one in batches.result()]
        finally:
            self._room.release()

    def _made(self, chunk: Chunk, position: Position, batch: Batch) -> Rows:
        rows = self._chunks.rows(chunk.partition, position, batch)
        if len(rows) and not chunk.first <= rows.steps[0] <= rows.steps[-1] <= chunk.last:
            raise InvalidInput(
                f"{chunk.partition} has times that its own statistics, or an earlier look at it, "
                "do not have; write the file again, and leave it alone while it is read"
            )
        return rows

    def _indexed(self) -> list[Chunk]:
        """Every chunk that has rows of some step, by its first step."""
        found = []
        for partition in self._chunks.source.partitions():
            self._chunks.learn(partition)
            known = self._told(partition)
            if known is not None:
                found += known
                continue
            position, done = None, False
            while not done:
                chunk, batch = self._thread.submit(self._looked_at, partition, position).result()
                if batch.position == position:
                    pass  # nothing at all, or not yet
                elif chunk is None:  # nothing of use: set aside what is in it
                    useless = Chunk(
                        partition=partition,
                        position=position,
                        first=0,
                        last=-1,
                        until=batch.position,
                    )
                    self._begin(useless).result()
                else:
                    found.append(chunk)
                position, done = batch.position, batch.done
        return sorted(found, key=lambda chunk: chunk.first)

    def _told(self, partition: str) -> list[Chunk] | None:
        """The chunks of a file whose statistics tell the times of each; None if they do not."""
        query = self._chunks.reader.query
        source = self._chunks.source
        declared = source.columns(partition)
        plain = query.prepare is None and query.arrival is None and query.time_unit is None
        if query.time is None or query.time in query.declared:
            return None
        if not isinstance(source, ChunkRanges) or declared is None or not plain:
            return None
        kind = declared.get(query.time)
        if query.time_zone != "UTC" and getattr(kind, "tz", None) is None:
            return None  # times without an offset, in a zone with daylight saving
        told = source.chunk_ranges(partition, query.time)
        if told is None:
            return None
        last = query.schedule.steps
        chunks = []
        for position, least, largest in told:
            first, end = query.schedule.step_of(np.array([least, largest])).tolist()
            end = end if last is None else min(end, last - 1)
            chunks.append(Chunk(partition=partition, position=position, first=first, last=end))
        return chunks

    def _looked_at(self, partition: str, position: Position) -> tuple[Chunk | None, Batch]:
        reader = self._chunks.reader
        query = reader.query
        if query.prepare is not None:  # the time may be made of anything
            wanted = query.source_columns
        elif query.time is None:
            wanted = [query.unit]
        else:
            wanted = [name for name in (query.time, query.arrival) if name is not None]
        batch = self._chunks.source.read(partition, position, columns=wanted)
        steps = reader.steps_of(batch.table)
        last = query.schedule.steps
        steps = steps[(steps >= 0) & (steps < last if last is not None else True)]
        if not len(steps):
            return None, batch
        first, end = int(np.min(steps)), int(np.max(steps))
        return Chunk(
            partition=partition, position=position, first=first, last=end, until=batch.position
        ), batch


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a run reads: a source, live unless it is bounded, and files before and beside it."""

    source: Source | None
    history: Source | None = None

    def partitions(self) -> list[str]:
        """Every partition of the bounded ones: a run reads a fixed set."""
        return [name for source in self._bounded() for name in source.partitions()]

    def schemas(self) -> list[Types | None]:
        """What the first partition of each source declares, as far as there is one by now."""
        sources = [source for source in (self.source, self.history) if source is not None]
        return [source.columns(name) for source in sources for name in source.partitions()[:1]]

    def refuse_others(self, was: list[str]) -> None:
        """Refuse other files than those that the run began with."""
        now = self.partitions()
        if was != now:
            gone, new = ([n for n in a if n not in b] for a, b in ((was, now), (now, was)))
            named = [f"{n[0]!r} is {how}" for n, how in ((gone, "gone"), (new, "new")) if n]
            raise InvalidInput(
                f"the source had {len(was)} files when this run began and has {len(now)} now: "
                f"{' and '.join(named) or 'they come in another order'}; a run over files reads a "
                "fixed set, named as before; use a live source for a directory that grows, or a "
                "new state directory"
            )

    def inputs(
        self, reader: RowReader, aside: Aside, clock: Clock, stop: Event, *, memory: int
    ) -> tuple[FileInput | None, LiveInput | None]:
        """Rows by event time, and rows by the clock; types that a source tells are fixed now."""
        for told in self.schemas():
            reader.learn(told)
        bounded = self._bounded()
        if len(bounded) > 1:
            raise InvalidInput("history goes with a live source; join two bounded ones in a list")
        files = live = None
        if bounded:
            files = FileInput(ChunkReader(bounded[0], reader, aside), memory=memory)
        if self.source is not None and not self.source.bounded:
            live = LiveInput(ChunkReader(self.source, reader, aside), clock, stop)
        return files, live

    def _bounded(self) -> list[Source]:
        return [s for s in (self.history, self.source) if s is not None and s.bounded]


def check_columns(source: Source, query: Query) -> None:
    """Refuse a source that declares other columns before anything is paid for.

    So is a key whose type follows from the rows: one of them could change what is published.
    """
    wanted = query.source_columns
    inferred = source.inferred if isinstance(source, InferredTypes) else {}
    for name in inferred.keys() & query.key_columns - query.declared.keys():
        raise InvalidInput(
            f"the column {name!r} of the data frame holds {inferred[name]}: pandas takes the type "
            "from the rows, and a type that is published must not depend on them; declare it: "
            f"column_types={{{name!r}: 'INT64'}} (whole numbers, NULL where one is missing), "
            "'FLOAT64', ... (in SQL: "
            f"OPTIONS (column_types = ({name} = INT64)))"
        )
    for partition in source.partitions():
        declared: dict[str, Any] | None = source.columns(partition)
        if declared is None:
            return
        missing = [name for name in wanted if name not in declared]
        if missing:
            raise InvalidInput(
                f"{partition} has no column {missing[0]!r}; it has {', '.join(declared)}"
            )
