"""What has arrived at a live source, and when: read once for all queries, by one reader.

A row belongs to the first trigger after its *arrival*, the moment at which the reader has met it.
The reader goes on whatever the queries do, so a query that is late (a slow sink, a long
publication, another query with the same trigger) takes the very rows it would have taken in time.

What the reader has met is a list of chunks with their times. Each query goes through it at its own
pace; how far it has come, a position per partition, is logged with its steps. Chunks are held in
memory up to a bound; a query that lags further behind reads them from the source again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, RLock, Thread

import numpy as np
import pyarrow as pa

from dpstream.engines.clock import Clock
from dpstream.query.schedule import Schedule
from dpstream.records import (
    Batch,
    CommittingSource,
    EndingSource,
    FinitePartitions,
    InferredTypes,
    Position,
    Source,
    StartOffsets,
)
from dpstream.rows.row_reader import ParsedColumns

_LOG = logging.getLogger("dpstream.sources")
_LOOK = 0.1  # seconds between two looks of a waiting query at whether it was stopped
_CLOSING = 500_000  # microseconds that may be taken at a trigger to meet what came before it
_IDLE = 1_000_000  # microseconds between two looks where no trigger is to come
BUFFER = 1 << 28
"""Bytes of chunks that are held in memory for the queries of one source."""

Positions = dict[str, Position]


@dataclass(eq=False)
class ArrivedChunk:
    """A chunk that the reader has met: the rows of a partition from `start` to `end`."""

    partition: str
    start: Position
    end: Position
    time: int
    """When, by the run's clock; one that was looked for at a trigger has come before it."""
    rows: int = 0
    batch: Batch | None = None
    """None: not in memory, read it from the source again."""
    parsed: ParsedColumns = field(default_factory=ParsedColumns)

    @property
    def bytes(self) -> int:
        """Memory held, with what is parsed of it."""
        return 0 if self.batch is None else 2 * int(self.batch.table.nbytes)


class Arrivals:
    """One live source for several queries, each with a view of its own.

    `columns`: those of all queries together. `buffer`: bytes of chunks held in memory. A clock that
    goes on by itself has a thread that reads; with any other one (a test's) reading happens while a
    query waits, and time moves only then.
    """

    def __init__(
        self,
        source: Source,
        clock: Clock,
        columns: Sequence[str] | None = None,
        *,
        views: int = 1,
        buffer: int = BUFFER,
    ) -> None:
        self.source, self.clock, self.buffer = source, clock, buffer
        self.columns = None if columns is None else list(columns)
        self.lock = RLock()  # one read at a time
        self.tails: list[SourceTail] = []
        self.views = [LiveView(self) for _ in range(views)]
        self._held_open, self._closed = 0, False

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """A chunk from the source itself."""
        with self.lock:
            return self.source.read(partition, position, columns=columns, until=until)

    def tail_for(self, positions: Positions) -> SourceTail:
        """The reader that a query at these positions can follow; a new one if there is none."""
        with self.lock:
            for tail in self.tails:
                if tail.failure is None and tail.fits(positions):
                    return tail
            self.tails.append(SourceTail(self, positions))
            return self.tails[-1]

    def hold(self) -> None:
        """Keep the source open until `release`, though all queries have closed it."""
        with self.lock:
            self._held_open += 1

    def release(self) -> None:
        """Undo one `hold`."""
        with self.lock:
            self._held_open -= 1
            over = self._held_open == 0
        for view in self.views if over else ():
            view.closed = True  # also of a query that never began
        self.close_unused()

    def close_unused(self) -> None:
        """Close the source if nobody uses it any more."""
        with self.lock:
            if self._closed or self._held_open > 0 or not all(view.closed for view in self.views):
                return
            self._closed = True
        self.stop_reading()
        with self.lock:
            self.source.close()

    def stop_reading(self) -> None:
        """End the readers."""
        for tail in self.tails:
            tail.stop()
        self.tails = []

    def settle(self) -> None:
        """What no query needs any more may go."""
        if not isinstance(self.source, CommittingSource):
            return
        with self.lock:
            known = [view.settled for view in self.views if not view.finished]
            if known:
                common = set(known[0]).intersection(*known[1:])
                self.source.commit({name: min(one[name] for one in known) for name in common})


class SourceTail:
    """Follows a source from some positions on; what it meets is there for every query."""

    def __init__(self, shared: Arrivals, positions: Positions) -> None:
        self._shared, self._source, self._clock = shared, shared.source, shared.clock
        self._begun_anew = not positions
        self.positions = dict(positions)
        self.sealed = began = self._clock.now()
        """What came before this time was met."""
        self.chunks: list[ArrivedChunk | None] = [
            ArrivedChunk(name, None, at, began) for name, at in positions.items()
        ]
        self.ended = False
        self.failure: BaseException | None = None
        self._gone = 0  # chunks that every query has passed, no longer in the list
        self._held = 0
        self._oldest = 0  # the first chunk that may hold memory
        self._evicted: dict[str, int] = {}
        self._dropped: dict[str, ArrivedChunk] = {}
        self._over: set[str] = set()  # partitions that were read to their end
        source = self._source
        self._ends = isinstance(source, FinitePartitions) and source.partitions_end
        self._ending = source if isinstance(source, EndingSource) else None
        self._offsets = source if isinstance(source, StartOffsets) else None
        self._changed, self._halt = Condition(), Event()
        self._thread: Thread | None = None
        if shared.clock.real_time:
            self._thread = Thread(target=self._follow, name="dpstream-reader", daemon=True)
            self._thread.start()

    def fits(self, positions: Positions) -> bool:
        """Can a query at these positions follow this reader?

        Not if they started elsewhere in a server's log: a query that was added later has not the
        rows from before it.
        """
        if self._offsets is None:
            return True
        if not positions:
            return self._begun_anew
        start = self._offsets.start_offset
        both = [name for name in positions if self.positions.get(name) is not None]
        return bool(both) and all(
            start(positions[name]) == start(self.positions[name]) for name in both
        )

    def end(self) -> int:
        """How many chunks were met."""
        return self._gone + len(self.chunks)

    def _chunk(self, number: int) -> ArrivedChunk | None:
        """One of them; None if its rows are part of a later one."""
        return self.chunks[number - self._gone]

    def pending(self, number: int, before: int) -> tuple[int, ArrivedChunk | None]:
        """The first chunk from a number on, if it came before a time, and its number."""
        with self._changed:
            for at in range(max(number, self._gone), self.end()):
                chunk = self._chunk(at)
                if chunk is not None:
                    return at, chunk if chunk.time < before else None
        return number, None

    def wait(self, number: int, before: int, stop: Event) -> bool:
        """Wait for chunk `number`, if it comes before a time; False: no more will, or stopped."""
        if self._thread is None:
            return self._read_while_waiting(number, before, stop)
        with self._changed:
            while not stop.is_set():
                if self.failure is not None:
                    raise self.failure
                if number < self.end():
                    return self._time_at(number) < before
                if self.sealed >= before:
                    return False
                self._changed.wait(_LOOK)
        return False

    def is_over(self, number: int) -> bool:
        """Has a source that ended nothing from this chunk on?"""
        if self._ending is None or not self._ending.ended:
            return False
        if self._thread is None:
            while self._read_all(None):
                pass
            self.ended = True
        return self.ended and number >= self.end()

    def waiting(self, number: int) -> int:
        """How many rows have come from a chunk on."""
        with self._changed:
            later = self.chunks[max(number - self._gone, 0) :]
            return sum(chunk.rows for chunk in filter(None, later))

    def drop_passed(self) -> None:
        """Let go of what every query has passed."""
        with self._changed:
            at = [view.number_of(self) for view in self._shared.views if not view.closed]
            gone = min((number for number in at if number is not None), default=self._gone)
            if None in at or gone <= self._gone:
                return
            for chunk in filter(None, self.chunks[: gone - self._gone]):
                self._held -= chunk.bytes
                name = chunk.partition
                self._dropped[name] = ArrivedChunk(name, None, chunk.end, chunk.time)
            del self.chunks[: gone - self._gone]
            self._gone = gone
            self._oldest = max(self._oldest, gone)
            self._changed.notify_all()

    def begin(self) -> tuple[int, list[ArrivedChunk]]:
        """For a query that comes later: the first chunk that is there, and what was let go.

        Of that, a chunk for each partition; its rows are read from the source.
        """
        with self._changed:
            return self._gone, sorted(self._dropped.values(), key=lambda chunk: chunk.time)

    def stop(self) -> None:
        """End the thread."""
        self._halt.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _read_while_waiting(self, number: int, before: int, stop: Event) -> bool:
        """Read, or let time pass, in the thread of a query that waits."""
        while not stop.is_set():
            if number < self.end():
                return self._time_at(number) < before
            if self._clock.now() >= before:
                self.sealed = max(self.sealed, before)
                return False
            if not self._read_all(before):
                self._clock.wait(before, stop)
        return False

    def _follow(self) -> None:
        """Read for as long as anybody wants it."""
        try:
            while not self._halt.is_set():
                due, now = self._next_trigger(), self._clock.now()
                if due is not None and now >= due:
                    self._close_trigger(due, now)
                elif self._is_full() or not self._read_all(due):
                    self._clock.wait(now + _IDLE if due is None else due, self._halt)
            for view in self._shared.views:
                view.stop()  # the clock may have been told to, by a signal
        except BaseException as problem:
            with self._changed:
                self.failure = problem
                self._changed.notify_all()

    def _close_trigger(self, due: int, now: int) -> None:
        """A trigger has come: what is there now and was not met, came before it."""
        while not self._is_full() and self._read_all(None, time=due - 1):
            if self._clock.now() >= now + _CLOSING or self._halt.is_set():
                break
        with self._changed:
            self.sealed = now
            self._changed.notify_all()

    def _next_trigger(self) -> int | None:
        times = [view.trigger_after(self.sealed) for view in self._shared.views if not view.closed]
        return min((time for time in times if time is not None), default=None)

    def _read_all(self, before: int | None, *, time: int | None = None) -> bool:
        """One read of each partition, until a time; was there anything?"""
        any_rows = False
        for partition in self._partitions_in_order():  # in turn: a busy one keeps no others out
            now = self._clock.now()
            if (before is not None and now >= before) or self._halt.is_set():
                break
            any_rows = self._read(partition, now if time is None else time) or any_rows
        if not any_rows and not self.ended and self._ending is not None and self._ending.ended:
            self.ended = True
            _LOG.warning("the source has ended; its queries end after their next triggers")
        return any_rows

    def _read(self, partition: str, time: int) -> bool:
        start = self.positions.get(partition)
        batch = self._shared.read(partition, start, columns=self._shared.columns)
        if batch.done and self._ends:
            self._over.add(partition)
        rows = len(batch.table) + len(batch.rejected)
        if not rows and batch.position == start:
            return not batch.done
        with self._changed:
            self.positions[partition] = batch.position
            arrived = ArrivedChunk(partition, start, batch.position, time, rows, batch)
            self.chunks.append(arrived)
            self._held += arrived.bytes
            self._evict()
            self._changed.notify_all()
        return True

    def _partitions_in_order(self) -> list[str]:
        """Partitions that were begun, in the order in which a replay takes them; then new ones."""
        with self._shared.lock:
            listed = self._source.partitions()
        known = set(listed)
        begun = [name for name in self.positions if name in known]
        fresh = [name for name in listed if name not in self.positions]
        return [name for name in begun + fresh if name not in self._over]

    def _is_full(self) -> bool:
        """Must reading wait for the slowest query, because nothing can be read again?"""
        return not self._source.replayable and self._held > self._shared.buffer

    def _evict(self) -> None:
        """Free the oldest chunks; who still needs them reads them from the source again."""
        if not self._source.replayable:
            return
        while self._held > self._shared.buffer and self._oldest < self.end() - 1:
            number = max(self._oldest, self._gone)
            chunk = self._chunk(number)
            if chunk is not None and chunk.batch is not None:
                self._held -= chunk.bytes
                chunk.batch, chunk.parsed = None, ParsedColumns()
                self._join(number, chunk)
            self._oldest = number + 1

    def _join(self, number: int, chunk: ArrivedChunk) -> None:
        """Make one of two evicted chunks of a partition, if no trigger is between them."""
        last = self._evicted.get(chunk.partition, -1)
        self._evicted[chunk.partition] = number
        before = self._chunk(last) if last >= self._gone else None
        if before is None:
            return
        between = [view.trigger_after(before.time) for view in self._shared.views]
        if all(time is None or time > chunk.time for time in between):
            chunk.rows += before.rows
            self.chunks[last - self._gone] = None

    def _time_at(self, number: int) -> int:
        """When the chunk of a number came, or the one that its rows are part of."""
        return next(filter(None, self.chunks[max(number - self._gone, 0) :])).time


class LiveView:
    """What one query sees of a live source, and how far it is.

    Of the source's abilities it has those that are asked of a view: `commit` (for this query),
    `partitions_end` and `inferred`. `SourceTail` asks the source itself for its end and offsets.
    """

    bounded = False

    def __init__(self, shared: Arrivals) -> None:
        self.shared = shared
        self.replayable = shared.source.replayable
        source = shared.source
        self.partitions_end = isinstance(source, FinitePartitions) and source.partitions_end
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self.read = shared.read
        self.closed, self.finished = False, False
        self.settled: Positions = {}
        self.tail: SourceTail | None = None
        self.next = 0
        """The number of the first chunk that was not taken."""
        self.missed: list[ArrivedChunk] = []
        """What had come and gone before it followed."""
        self._schedule: Schedule | None = None
        self._due: tuple[int, int | None] | None = None
        self._stop: Event | None = None

    def partitions(self) -> list[str]:
        """Those of the source."""
        with self.shared.lock:
            return self.shared.source.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """As the source declares them."""
        with self.shared.lock:
            return self.shared.source.columns(partition)

    def expect(self, schedule: Schedule, columns: Sequence[str], stop: Event) -> None:
        """A query with these triggers will follow; `stop` ends it."""
        self._schedule, self._stop, self.closed = schedule, stop, False
        self._due, self.tail, self.next = None, None, 0
        if self.shared.columns is None:
            self.shared.columns = list(columns)

    def join(self, positions: Positions) -> SourceTail:
        """Follow the source from these positions on."""
        self.tail = self.shared.tail_for(positions)
        self.next, self.missed = self.tail.begin()
        return self.tail

    def advance(self, number: int) -> None:
        """All chunks before this one were taken."""
        self.next = number
        if self.tail is not None:
            self.tail.drop_passed()

    def number_of(self, tail: SourceTail) -> int | None:
        """How far the query is in what a reader has met; None: not known yet."""
        if self.tail is None:
            return None
        return self.next if self.tail is tail else tail.end()

    def trigger_after(self, time: int) -> int | None:
        """The query's first trigger after a time."""
        if self._schedule is None or self.finished:
            return None
        if self._due is None or not self._due[0] <= time < (self._due[1] or time + 1):
            self._due = (time, _trigger_after(self._schedule, time))
        return self._due[1]

    @property
    def waiting(self) -> int:
        """Rows that have come and that the query has not read."""
        return 0 if self.tail is None else self.tail.waiting(self.next)

    def commit(self, positions: Mapping[str, Position]) -> None:
        """This query needs nothing before these positions."""
        self.settled = dict(positions)
        self.shared.settle()

    def finish(self) -> None:
        """The query has published all it ever will."""
        self.finished = True
        self.shared.settle()

    def stop(self) -> None:
        """End the query."""
        if self._stop is not None and not self.closed:
            self._stop.set()

    def close(self) -> None:
        """Close the source when the last query has closed it."""
        if not self.closed:
            self.closed = True
            if self.tail is not None:
                self.tail.drop_passed()
            self.shared.close_unused()


def finish_reading(source: Source | None) -> None:
    """A query has published all it ever will, and needs no rows any more."""
    if isinstance(source, LiveView):
        source.finish()


def _trigger_after(schedule: Schedule, time: int) -> int | None:
    step = int(schedule.step_of(np.array([time], np.int64))[0])
    while schedule.steps is None or step < schedule.steps:
        trigger = schedule.time_of(step)
        if trigger is None or trigger > time:
            return trigger
        step += 1
    return None
