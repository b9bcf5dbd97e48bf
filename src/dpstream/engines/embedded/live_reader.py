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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, RLock, Thread
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.clock import Clock
from dpstream.query.schedule import Schedule
from dpstream.records import (
    Batch,
    CheckedSource,
    Columns,
    CommittingSource,
    EmptyingSource,
    EndingSource,
    FinitePartitions,
    InferredTypes,
    MeasuredSource,
    Position,
    Source,
    StampedPartitions,
    StartOffsets,
    position_order,
)
from dpstream.rows.row_reader import ParsedColumns

_LOG = logging.getLogger("dpstream.sources")
_LOOK = 0.1  # seconds between two looks of a waiting query at whether it was stopped
_CLOSING = 500_000  # microseconds that may be taken at a trigger to read what came before it
_SHELL = 8192  # bytes that a chunk takes whatever is in it: a file may have one row
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
    number: int = -1
    """Of those that one reader has met, from 0 on."""
    gone: bool = False
    """Every query has passed it, or its rows are part of a later chunk."""
    last: bool = False
    """Nothing follows in its partition, ever; it may have no rows."""

    @property
    def bytes(self) -> int:
        """Memory in use, with what is parsed of it."""
        return 0 if self.batch is None else 2 * int(self.batch.table.nbytes) + _SHELL

    def free(self) -> int:
        """Give its memory back; how many bytes that was."""
        freed, self.batch, self.parsed = self.bytes, None, ParsedColumns()
        return freed


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
        self._users, self._closed = 0, False

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

    def tail_for(self, positions: Positions, finished: Mapping[str, Position]) -> SourceTail:
        """The reader that a query at these positions can follow; a new one if there is none."""
        with self.lock:
            for tail in self.tails:
                if tail.failure is None and tail.fits(positions):
                    return tail
            self.tails.append(SourceTail(self, positions, finished))
            return self.tails[-1]

    def hold(self) -> None:
        """Keep the source open until `release`, though all queries have closed it."""
        with self.lock:
            self._users += 1

    def release(self) -> None:
        """Undo one `hold`."""
        with self.lock:
            self._users -= 1
            unused = self._users == 0
        for view in self.views if unused else ():
            view.closed = True  # also of a query that never began
        self.close_unused()

    def close_unused(self) -> None:
        """Close the source if nobody uses it any more."""
        with self.lock:
            if self._closed or self._users > 0 or not all(view.closed for view in self.views):
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

    def commit(self) -> None:
        """Tell the source which positions no query needs any more."""
        if not isinstance(self.source, CommittingSource):
            return
        with self.lock:
            settled = [view.settled for view in self.views if not view.finished]
            if settled:
                names = set(settled[0]).intersection(*settled[1:])
                least = {n: min((at[n] for at in settled), key=position_order) for n in names}
                self.source.commit(least)
            removed = self.source.removed() if isinstance(self.source, EmptyingSource) else []
            for tail in self.tails:
                tail.removed += removed  # before another partition can take a name
            for view in self.views if removed else []:
                view.removed += removed
                view.settled = {p: at for p, at in view.settled.items() if p not in removed}


class SourceTail:
    """Follows a source from some positions on; what it meets is there for every query.

    `finished`: partitions that were read to their ends, and where these are.
    """

    def __init__(
        self, shared: Arrivals, positions: Positions, finished: Mapping[str, Position]
    ) -> None:
        source = shared.source
        self._shared, self._source, self._clock = shared, source, shared.clock
        self._begun_anew = not positions
        self.positions = dict(positions)
        self.sealed = self._clock.now()
        """What came before this time was read."""
        self.chunks = {  # by number; those that every query has passed are no longer there
            number: ArrivedChunk(name, None, at, self.sealed, number=number)
            for number, (name, at) in enumerate(positions.items())
        }
        self.ended = False
        self.failure: BaseException | None = None
        self._dropped = 0  # chunks that every query has passed
        self._last_dropped = {name: (at, self.sealed) for name, at in finished.items()}
        self._buffered = 0  # bytes
        self._evicted = 0  # chunks that hold no memory any more
        self._last_evicted: dict[str, ArrivedChunk] = {}
        self._over = set(finished)  # partitions that were read to their end
        self._listed: list[str] | None = None
        self._unread: dict[str, None] = {}  # of what was listed, in order
        self.removed: list[str] = []
        """Partitions that are gone: the next ones of their names are new."""
        self._behind: dict[str, int] = {}
        self._ends = isinstance(source, FinitePartitions) and source.partitions_end
        self._ending = source if isinstance(source, EndingSource) else None
        self._changed, self._halt = Condition(), Event()
        self._thread: Thread | None = None
        if self._clock.real_time:
            self._thread = Thread(target=self._follow, name="dpstream-reader", daemon=True)
            self._thread.start()

    @property
    def count(self) -> int:
        """How many chunks have come."""
        return self._dropped + len(self.chunks)

    def fits(self, positions: Positions) -> bool:
        """Can a query at these positions follow this reader?

        Not if they started elsewhere in a server's log: a query that was added later has not the
        rows from before it.
        """
        if not isinstance(self._source, StartOffsets):
            return True
        if not positions:
            return self._begun_anew
        start = self._source.start_offset
        both = [name for name in positions if self.positions.get(name) is not None]
        return bool(both) and all(
            start(positions[name]) == start(self.positions[name]) for name in both
        )

    def next_chunk(self, number: int, before: int, stop: Event) -> ArrivedChunk | None:
        """Wait for the first chunk from `number` on; None: none before that time, or stopped."""
        while not stop.is_set():
            with self._changed:
                chunk = next(self._chunks_from(number), None)
                if chunk is not None and chunk.time < before:
                    return chunk
                if self.failure is not None:
                    raise self.failure
                if chunk is not None or self.sealed >= before:
                    break
                if self._thread is not None:
                    self._changed.wait(_LOOK)
                    continue
            if self._clock.now() >= before:  # others may look while this thread reads or waits
                self.sealed = before
            elif not self._read_all(before):
                self._clock.wait(before, stop)
        return None

    def is_over(self, number: int) -> bool:
        """Has a source that ended nothing from this chunk on?"""
        if self._ending is None or not self._ending.ended:
            return False
        if self._thread is None:
            while self._read_all(None):
                pass
            self.ended = True
        return self.ended and number >= self.count

    def behind(self) -> dict[str, int]:
        """How many messages the source's server has that were not read, as far as it tells.

        Whoever asks does not wait for a read that goes on: what was known before is told then.
        """
        if isinstance(self._source, MeasuredSource) and self._shared.lock.acquire(blocking=False):
            try:
                self._behind = self._source.behind(self.positions)
            finally:
                self._shared.lock.release()
        return self._behind

    def rows_from(self, number: int) -> int:
        """How many rows have come from a chunk on."""
        with self._changed:
            return sum(chunk.rows for chunk in self._chunks_from(number))

    def drop_passed(self) -> None:
        """Let go of what every query has passed."""
        with self._changed:
            views = [view for view in self._shared.views if not view.closed]
            if not views or any(view.tail is None for view in views):
                return  # one that begins later may need all of it
            first = min(view.next if view.tail is self else self.count for view in views)
            while self._dropped < first:
                chunk = self.chunks.pop(self._dropped)
                self._dropped += 1
                self._buffered -= chunk.free()
                if self._last_evicted.get(chunk.partition) is chunk:
                    del self._last_evicted[chunk.partition]
                if not chunk.gone:
                    self._last_dropped[chunk.partition] = chunk.end, chunk.time
                    chunk.gone = True
            self._evicted = max(self._evicted, first)
            self._changed.notify_all()

    def begin(self, finished: Mapping[str, Position]) -> tuple[int, list[ArrivedChunk]]:
        """For a query that comes later: the first chunk that is there, and what was dropped.

        Of that, a chunk for each partition that it has not finished, whose rows are read from the
        source.
        """
        with self._changed:
            missed = [
                ArrivedChunk(name, None, end, time, last=name in self._over)
                for name, (end, time) in self._last_dropped.items()
                if name not in finished
            ]
            return self._dropped, sorted(missed, key=lambda chunk: chunk.time)

    def _forget_removed(self) -> None:
        removed, self.removed = self.removed, []
        with self._changed:
            self._over.difference_update(removed)
            for name in removed:
                self._last_dropped.pop(name, None)
                self._last_evicted.pop(name, None)

    def stop(self) -> None:
        """End the thread."""
        self._halt.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _chunks_from(self, number: int) -> Iterator[ArrivedChunk]:
        """The chunks from a number on; those whose rows are part of a later one are left out."""
        for place in range(max(number, self._dropped), self.count):
            if not self.chunks[place].gone:
                yield self.chunks[place]

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
        """A trigger has come: what is there now and was not read yet, came before it."""
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
        over = batch.done and self._ends
        rows = batch.size
        if not rows and batch.position == start and not over:
            return not batch.done
        with self._changed:
            self.positions[partition] = batch.position
            if over:
                self._over.add(partition)
                del self.positions[partition]
                self._unread.pop(partition, None)
            arrived = ArrivedChunk(
                partition, start, batch.position, time, rows, batch, number=self.count, last=over
            )
            self.chunks[arrived.number] = arrived
            self._buffered += arrived.bytes
            self._evict()
            self._changed.notify_all()
        return rows > 0 or batch.position != start

    def _partitions_in_order(self) -> list[str]:
        """Partitions that were begun, in the order in which a replay takes them; then new ones."""
        with self._shared.lock:
            listed = self._source.partitions()
            if self.removed:
                self._forget_removed()
            if listed is not self._listed:
                wanted = {name for name in listed if name not in self._over}
                ordered = [*(name for name in self.positions if name in wanted), *listed]
                self._unread = {name: None for name in ordered if name in wanted}
                self._listed = listed
            return [*self._unread]

    def _is_full(self) -> bool:
        """Must reading wait for the slowest query, because nothing can be read again?"""
        return not self._source.replayable and self._buffered > self._shared.buffer

    def _evict(self) -> None:
        """Free the oldest chunks but the newest; who needs them reads them from the source again.

        An evicted chunk of a partition takes the one before it in, if no trigger is between them.
        """
        while self._buffered > self._shared.buffer and self._evicted < self.count - 1:
            if not self._source.replayable:
                return
            chunk = self.chunks[self._evicted]
            self._evicted += 1
            if chunk.batch is None:
                continue
            self._buffered -= chunk.free()
            before = self._last_evicted.get(chunk.partition)
            self._last_evicted[chunk.partition] = chunk
            if before is None or before.gone:
                continue
            between = [view.trigger_after(before.time) for view in self._shared.views]
            if all(time is None or time > chunk.time for time in between):
                chunk.rows += before.rows
                before.gone = True


class LiveView:
    """What one query sees of a live source, and how far it is.

    Of the source's abilities it has those that are asked of a view: `commit` (for this query) and
    `inferred` and `check`. `SourceTail` asks the source itself for its end and offsets. `removed`:
    partitions that are gone, for the query to forget.
    """

    bounded = False

    def __init__(self, shared: Arrivals) -> None:
        source = shared.source
        self.shared, self.read = shared, shared.read
        self.replayable = source.replayable
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self.quarantines = isinstance(source, CheckedSource) and source.quarantines
        self._stamped = source if isinstance(source, StampedPartitions) else None
        self.closed, self.finished = False, False
        self.settled: Positions = {}
        self.removed: list[str] = []
        self.tail: SourceTail | None = None
        self.next = 0
        """The number of the first chunk that was not taken."""
        self._missed: list[ArrivedChunk] = []  # what had come and gone before it followed
        self._schedule: Schedule | None = None
        self._due: tuple[int, int | None] | None = None
        self._stop = Event()

    def partitions(self) -> list[str]:
        """Those of the source."""
        with self.shared.lock:
            return self.shared.source.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """As the source declares them."""
        with self.shared.lock:
            return self.shared.source.columns(partition)

    def check(self, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        """As the source says, if it can tell."""
        source = self.shared.source
        if not isinstance(source, CheckedSource):
            return None
        with self.shared.lock:
            return source.check(partition, columns, whole=whole)

    @property
    def partitions_end(self) -> bool:
        """Is each partition complete, as a file in a directory is?"""
        source = self.shared.source
        return isinstance(source, FinitePartitions) and source.partitions_end

    def expect(self, schedule: Schedule, columns: Sequence[str], stop: Event) -> None:
        """A query with these triggers will follow; `stop` ends it."""
        self._schedule, self._stop, self.closed = schedule, stop, False
        self._due, self.tail, self.next = None, None, 0
        if self.shared.columns is None:
            self.shared.columns = list(columns)

    def follow(self, positions: Positions, finished: Mapping[str, Position]) -> bool:
        """Follow the source from these positions on, unless it does; False: nothing can come."""
        if self.tail is None:
            self.tail = self.shared.tail_for(positions, finished)
            self.next, self._missed = self.tail.begin(finished)
        return not self.tail.is_over(self.next)

    def chunks_before(self, time: int) -> Iterator[ArrivedChunk]:
        """What comes before a time, as it comes, until the query is stopped."""
        assert self.tail is not None
        while self._missed and self._missed[0].time < time and not self._stop.is_set():
            yield self._missed.pop(0)
        while chunk := self.tail.next_chunk(self.next, time, self._stop):
            yield chunk
            self.next = chunk.number + 1
            self.tail.drop_passed()

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
        return 0 if self.tail is None else self.tail.rows_from(self.next)

    @property
    def behind(self) -> dict[str, int]:
        """Messages of each partition that its server has and that were not read."""
        return {} if self.tail is None else self.tail.behind()

    def commit(self, positions: Mapping[str, Position]) -> None:
        """This query needs nothing before these positions."""
        self.settled = dict(positions)
        self.shared.commit()

    def stamp(self, partition: str) -> Any:
        """What tells it from others of its name, where the source has such; None: it has not."""
        if self._stamped is None:
            return None
        with self.shared.lock:
            return self._stamped.stamp(partition)

    def finish(self) -> None:
        """The query has published all it ever will."""
        self.finished = True
        self.shared.commit()

    def stop(self) -> None:
        """End the query."""
        if not self.closed:
            self._stop.set()

    def close(self) -> None:
        """Close the source when the last query has closed it."""
        if not self.closed:
            self.closed = True
            if self.tail is not None:
                self.tail.drop_passed()
            self.shared.close_unused()


def _trigger_after(schedule: Schedule, time: int) -> int | None:
    step = int(schedule.step_of(np.array([time], np.int64))[0])
    while schedule.steps is None or step < schedule.steps:
        trigger = schedule.time_of(step)
        if trigger is None or trigger > time:
            return trigger
        step += 1
    return None
