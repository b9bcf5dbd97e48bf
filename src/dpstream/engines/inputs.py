"""A step's rows from a source: by event time from files, by the clock from a live source.

Files may hold their rows in any order, so no step can be taken before it is known where its rows
are: one pass over the time column finds each chunk's first and last step. Then chunks are read
when their first step comes and dropped after their last one. (A step that began when a later row is
seen, as watermarks taken from the data have it, would let one unit move other units' rows.)
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import numpy as np

from dpstream.engines.clock import Clock
from dpstream.errors import InvalidInput, NoiseReuse
from dpstream.records import Batch, Position, Rejected, Source
from dpstream.stages.flow import Piece
from dpstream.stages.rows import RowReader, Rows

Positions = dict[str, Position]
_AHEAD = 2  # chunks that are read before they are needed; more take memory and save no time


class Aside(Protocol):
    """Takes the rows that are set aside, for the operator alone."""

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        """Rows that could not be used."""

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        """How many rows were read, and how many were dropped by the query's own rules."""


@dataclass(kw_only=True, eq=False)
class Chunk:
    """A piece of a partition and the steps that its rows belong to."""

    partition: str
    position: Position
    first: int
    last: int
    rows: Future[Rows] | None = None


class ChunkReader:
    """Reads chunks and sets aside what cannot be used, always under the same names."""

    def __init__(self, source: Source, reader: RowReader, aside: Aside) -> None:
        self.source, self.reader, self._aside = source, reader, aside

    def learn(self, partition: str) -> None:
        """Fix the types of unit and keys by the first partition."""
        if self.reader.query.unit not in self.reader.types:
            self.reader.learn(self.source.columns(partition))

    def read(self, partition: str, position: Position, arrived: int | None) -> tuple[Rows, Batch]:
        """The rows of the chunk at a position."""
        query = self.reader.query
        self.learn(partition)
        batch = self.source.read(partition, position, columns=query.source_columns)
        where = partition if position is None else f"{partition} from {position}"
        rows, setting = self.reader.read(batch.table, where, arrived=arrived)
        rejected = [*batch.rejected, *setting.rejected]
        self._aside.rejected(f"{partition} {position}", rejected)
        self._aside.count(
            read=len(batch.table) + len(batch.rejected),
            outside=setting.outside,
            late=setting.late,
            other_keys=setting.other_keys,
        )
        return rows, batch


class FileInput:
    """Rows of partitions that are complete, by event time (or by their arrival column)."""

    def __init__(self, chunks: ChunkReader, *, memory: int) -> None:
        self._chunks, self._memory = chunks, memory
        self._thread = ThreadPoolExecutor(1)  # all reading happens here
        self._index: list[Chunk] | None = None

    def take(self, step: int) -> list[Piece]:
        """The rows of one step; steps are taken in order."""
        index = self._index = self._indexed() if self._index is None else self._index
        pieces: list[Piece] = []
        needed = [chunk for chunk in index if chunk.first <= step <= chunk.last]
        later = [chunk for chunk in index if chunk.first > step]
        held = 0
        for chunk in [*needed, *later[:_AHEAD]]:
            if chunk.rows is None:
                chunk.rows = self._thread.submit(self._rows, chunk)
        for chunk in needed:
            if chunk.rows is None:
                chunk.rows = self._thread.submit(self._rows, chunk)
            rows = chunk.rows.result()
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

    def _rows(self, chunk: Chunk) -> Rows:
        rows = self._chunks.read(chunk.partition, chunk.position, None)[0]
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
                if chunk is None:  # nothing of use: set aside what is in it
                    self._thread.submit(self._chunks.read, partition, position, None).result()
                else:
                    found.append(chunk)
                position, done = batch.position, batch.done
        return sorted(found, key=lambda chunk: chunk.first)

    def _told(self, partition: str) -> list[Chunk] | None:
        """The chunks of a file whose statistics tell the times of each; None if they do not."""
        query = self._chunks.reader.query
        spans = getattr(self._chunks.source, "spans", None)
        declared = self._chunks.source.columns(partition)
        plain = query.prepare is None and query.arrival is None and query.time_unit is None
        if spans is None or declared is None or query.time is None or not plain:
            return None
        kind = declared.get(query.time)
        if query.time_zone != "UTC" and getattr(kind, "tz", None) is None:
            return None  # times without an offset, in a zone with daylight saving
        told = spans(partition, query.time)
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
        return Chunk(partition=partition, position=position, first=first, last=end), batch


class LiveInput:
    """Rows of a source that grows: those read before a trigger belong to it."""

    def __init__(self, chunks: ChunkReader, clock: Clock, stop: Event) -> None:
        self._chunks, self._clock, self._stop = chunks, clock, stop
        self.positions: Positions = {}
        self._before: Positions = {}
        self._ends = getattr(chunks.source, "partitions_end", False)
        self._over: set[str] = set()  # partitions that were read to their end

    def moved(self) -> Positions:
        """The positions that this step has changed: what a replay of it must reach."""
        known = self._before
        return {p: at for p, at in self.positions.items() if p not in known or known[p] != at}

    def take(self, step: int) -> list[Piece] | None:
        """Rows that come until the trigger's time; None if stopped, or if no more can come."""
        if getattr(self._chunks.source, "ended", False) and not self._waiting():
            return None
        time = self._chunks.reader.query.schedule.time_of(step)
        assert time is not None
        pieces: list[Piece] = []
        before = self._before = dict(self.positions)
        while self._clock.now() < time:
            if self._stop.is_set():
                self.positions = before  # what was read since the last step is read again
                self._over.clear()
                return None
            for partition in self._in_order():
                while self._clock.now() < time:
                    rows, batch = self._read(partition, step)
                    pieces += _pieces(rows)
                    if batch.done:
                        self._over |= {partition} if self._ends else set()
                        break
            self._clock.wait(time, self._stop)
        return pieces

    def replay(self, step: int, logged: Positions) -> list[Piece]:
        """The very rows that a step has read before."""
        pieces: list[Piece] = []
        self._before = dict(self.positions)
        for partition, target in logged.items():
            while self.positions.get(partition) != target:
                before = self.positions.get(partition)
                rows, batch = self._read(partition, step)
                pieces += _pieces(rows)
                if batch.done and self.positions[partition] == before:
                    raise NoiseReuse(
                        f"step {step} has read {partition} up to {target}, which ends at {before} "
                        "now; nothing was published; restore what was removed from the source"
                    )
        return pieces

    def _waiting(self) -> bool:
        """Has a source that ended rows that were not read yet?"""
        for partition in self._in_order():
            batch = self._chunks.source.read(partition, self.positions.get(partition))
            if len(batch.table) or batch.rejected:
                return True
        return False

    def _in_order(self) -> list[str]:
        """Partitions that were begun, in the order in which a replay takes them; then new ones."""
        listed = self._chunks.source.partitions()
        begun = [name for name in self.positions if name in listed]
        fresh = [name for name in listed if name not in self.positions]
        return [name for name in begun + fresh if name not in self._over]

    def _read(self, partition: str, step: int) -> tuple[Rows, Batch]:
        rows, batch = self._chunks.read(partition, self.positions.get(partition), step)
        if batch.position is not None:
            self.positions[partition] = batch.position
        return rows, batch


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a run reads: a source, live unless it is bounded, and files before and beside it."""

    source: Source | None
    history: Source | None = None

    def partitions(self) -> list[str]:
        """Every partition of the bounded ones: a run reads a fixed set."""
        return [name for source in self._bounded() for name in source.partitions()]

    def refuse_others(self, was: list[str]) -> None:
        """Refuse other files than those that the run began with."""
        now = self.partitions()
        if was != now:
            raise InvalidInput(
                f"the source had {len(was)} files when this run began and has {len(now)} now, or "
                "other ones; a run over files reads a fixed set; use a live source for a directory "
                "that grows, or a new state directory"
            )

    def inputs(
        self, reader: RowReader, aside: Aside, clock: Clock, stop: Event, *, memory: int
    ) -> tuple[FileInput | None, LiveInput | None]:
        """Rows by event time, and rows by the clock."""
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


def _pieces(rows: Rows) -> Iterable[Piece]:
    return [(rows, first, end) for *_, first, end in rows.runs]


def check_columns(source: Source, wanted: list[str]) -> None:
    """Refuse a source that declares other columns before anything is paid for."""
    for partition in source.partitions():
        declared: dict[str, Any] | None = source.columns(partition)
        if declared is None:
            return
        missing = [name for name in wanted if name not in declared]
        if missing:
            raise InvalidInput(
                f"{partition} has no column {missing[0]!r}; it has {', '.join(declared)}"
            )
