"""A step's rows from a source that grows: those that arrived before its trigger.

How far a step has read is logged with it. A replay reads to exactly there, however the rows are
divided into chunks this time.
"""

from __future__ import annotations

from threading import Event

from dpstream.engines.arrivals import Arrivals, Arrived, LiveView, Positions
from dpstream.engines.chunks import ChunkReader
from dpstream.engines.clock import Clock
from dpstream.errors import NoiseReuse
from dpstream.records import Position, Rejected, is_reached
from dpstream.stages.pieces import Piece
from dpstream.stages.rows import Rows

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

    def take(self, step: int) -> list[Piece] | None:
        """Rows that come until the trigger's time; None if stopped, or if no more can come."""
        view, time = self._view, self._time_of(step)
        tail = view.tail or view.join(self.positions)
        if tail.is_over(view.next):
            return None
        pieces: list[Piece] = []
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

    def replay(self, step: int, logged: Positions) -> list[Piece] | None:
        """The very rows that a step has read before; None if stopped."""
        pieces: list[Piece] = []
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

    def _taken(self, chunk: Arrived, step: int) -> list[Piece]:
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

    def _up_to(self, partition: str, target: Position, step: int) -> list[Piece] | None:
        """A partition's rows until a position, from the source; None if stopped."""
        pieces: list[Piece] = []
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


def _pieces(rows: Rows) -> list[Piece]:
    return [(rows, first, end) for *_, first, end in rows.runs]
