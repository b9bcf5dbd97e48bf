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

from dpstream.engines.chunks import ChunkReader, RejectHandler
from dpstream.engines.clock import Clock
from dpstream.engines.embedded.arrivals import Arrivals, ArrivedChunk, LiveView, Positions
from dpstream.errors import InvalidInput, NoiseReuse
from dpstream.query.column_types import Types
from dpstream.query.row_spec import RowSpec
from dpstream.records import (
    Batch,
    ChunkRanges,
    InferredTypes,
    Position,
    Rejected,
    Source,
    is_reached,
)
from dpstream.rows.row_batch import Rows, RowSlice
from dpstream.rows.row_reader import RowReader

# A step's rows from a source that grows: those that arrived before its trigger.
#
# How far a step has read is logged with it. A replay reads to exactly there, however the rows are
# divided into chunks this time.

_LETTERS = 10_000  # rows that cannot be used, in one file


class LiveInput:
    """Rows of a source that grows: those that arrived before a trigger belong to it."""

    def __init__(self, chunks: ChunkReader, clock: Clock, stop: Event) -> None:
        self._chunks, self._clock, self._stop = chunks, clock, stop
        self.positions: Positions = {}
        self._before: Positions = {}
        self._replayed = False
        self._letters = StepLetters(chunks)
        query, source = chunks.reader.query, chunks.source
        self._own: Arrivals | None = None
        if isinstance(source, LiveView):
            self._view = source
        else:
            self._own = Arrivals(source, clock)
            self._view = self._own.views[0]
        self._view.expect(query.schedule, query.source_columns, stop)

    def moved(self) -> Positions:
        """The positions that this step has changed: what a replay of it must reach."""
        known = self._before
        return {p: at for p, at in self.positions.items() if p not in known or known[p] != at}

    def take(self, step: int) -> list[RowSlice] | None:
        """Rows that come until the trigger's time; None if stopped, or if no more can come."""
        view, time = self._view, self._time_of(step)
        tail = view.tail or view.join(self.positions)
        if tail.is_over(view.next):
            return None
        pieces: list[RowSlice] = []
        self._begin(step)
        self._replayed = False
        while view.missed and view.missed[0].time < time and not self._stop.is_set():
            pieces += self._taken(view.missed.pop(0), step)
        number = view.next
        while True:
            number, chunk = tail.pending(number, time)
            if chunk is not None:
                pieces += self._taken(chunk, step)
                number += 1
                view.took(number)
            elif not tail.wait(number, time, self._stop):
                break
            if self._stop.is_set():
                break
        if self._stop.is_set():
            self._break_off()
            return None
        self._letters.finish()
        return pieces

    def replay(self, step: int, logged: Positions) -> list[RowSlice] | None:
        """The very rows that a step has read before; None if stopped."""
        pieces: list[RowSlice] = []
        self._begin(step)
        self._replayed = True
        for partition, target in logged.items():
            found = self._up_to(partition, target, step)
            if found is None:
                self._break_off()
                return None
            pieces += found
        self._letters.finish()
        return pieces

    def released(self, step: int) -> None:
        """A step's tables are out: tell the operator how long after their trigger."""
        if self._replayed:
            return  # they were out before
        behind = max(0, self._clock.now() - self._time_of(step)) / 1e6
        self._chunks.tell_lag(behind)

    def close(self) -> None:
        """Follow the source no longer."""
        if self._own is not None:
            self._own.stop_reading()

    def _time_of(self, step: int) -> int:
        time = self._chunks.reader.query.schedule.time_of(step)
        assert time is not None
        return time

    def _begin(self, step: int) -> None:
        self._before = dict(self.positions)
        self._letters.begin(step)

    def _break_off(self) -> None:
        """What was read since the last step is read again."""
        self.positions = self._before

    def _taken(self, chunk: ArrivedChunk, step: int) -> list[RowSlice]:
        """The rows of a chunk that the query has not read yet."""
        partition, batch = chunk.partition, chunk.batch
        position = self.positions.get(partition)
        if batch is None or position != chunk.start:  # it lags, or was broken off elsewhere
            behind = not is_reached(position, chunk.end)
            return (self._up_to(partition, chunk.end, step) or []) if behind else []
        rows, rejected = self._chunks.shared(partition, position, batch, chunk.parsed, arrived=step)
        self._letters.add(partition, rejected)
        self.positions[partition] = chunk.end
        return _pieces(rows)

    def _up_to(self, partition: str, target: Position, step: int) -> list[RowSlice] | None:
        """A partition's rows until a position, from the source; None if stopped."""
        pieces: list[RowSlice] = []
        while (before := self.positions.get(partition)) != target:
            if self._stop.is_set():
                return None
            rows, batch, rejected = self._chunks.divided(
                partition, before, arrived=step, until=target
            )
            self._letters.add(partition, rejected)
            if batch.position is not None:
                self.positions[partition] = batch.position
            pieces += _pieces(rows)
            if self.positions.get(partition) == before:  # its server is away: is this stopped?
                self._clock.wait(self._clock.now(), self._stop)
            if batch.done and self.positions.get(partition) != target:
                raise NoiseReuse(
                    f"step {step} has read {partition} up to {target}, which ends at {before} "
                    "now; nothing was published; restore what was removed from the source"
                )
        return pieces


class StepLetters:
    """Rows of a live source that cannot be used, kept by step and partition.

    Where a read ends depends on what has come by then; which rows a step has, does not. So a step
    that is taken again writes the same files again, and a row is in one file.
    """

    def __init__(self, chunks: ChunkReader) -> None:
        self._chunks = chunks
        self._step = 0
        self._held: dict[str, list[Rejected]] = {}
        self._files: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """Rows of this step follow; what an unfinished one had will come again."""
        self._step = step
        self._held.clear()
        self._files.clear()

    def add(self, partition: str, rows: list[Rejected]) -> None:
        """Keep rows; a flood goes to disk before the step is over, in files of one size."""
        held = self._held.setdefault(partition, [])
        held += rows
        while len(held) > _LETTERS:
            self._write(partition, held[:_LETTERS])
            del held[:_LETTERS]

    def finish(self) -> None:
        """The step has all its rows."""
        for partition, rows in self._held.items():
            if rows:
                self._write(partition, rows)
        self._held.clear()

    def _write(self, partition: str, rows: list[Rejected]) -> None:
        number = self._files[partition] = self._files.get(partition, 0) + 1
        self._chunks.set_aside(f"{partition} step {self._step} file {number}", rows)


def _pieces(rows: Rows) -> list[RowSlice]:
    return [(rows, first, end) for *_, first, end in rows.runs]


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

    def take(self, step: int) -> list[RowSlice]:
        """The rows of one step; steps are taken in order."""
        index = self._index = self._indexed() if self._index is None else self._index
        pieces: list[RowSlice] = []
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
        plain = query.prepare is None and query.arrival_column is None and query.time_unit is None
        if query.time_column is None or query.time_column in query.declared:
            return None
        if not isinstance(source, ChunkRanges) or declared is None or not plain:
            return None
        kind = declared.get(query.time_column)
        if query.time_zone != "UTC" and getattr(kind, "tz", None) is None:
            return None  # times without an offset, in a zone with daylight saving
        told = source.chunk_ranges(partition, query.time_column)
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
        elif query.time_column is None:
            wanted = [query.privacy_unit_column]
        else:
            wanted = [
                name for name in (query.time_column, query.arrival_column) if name is not None
            ]
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
class RunSources:
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
        self, reader: RowReader, aside: RejectHandler, clock: Clock, stop: Event, *, memory: int
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


def check_columns(source: Source, query: RowSpec) -> None:
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
