"""A step's rows from a source that grows: those that were read before its trigger.

How far a step has read is logged with it. A replay reads to exactly there, however the rows are
divided into chunks this time.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event

from dpstream.engines.chunks import ChunkReader
from dpstream.engines.clock import Clock
from dpstream.errors import NoiseReuse
from dpstream.records import Batch, Position, Rejected
from dpstream.stages.pieces import Piece
from dpstream.stages.rows import Rows

Positions = dict[str, Position]
_LETTERS = 10_000  # rows that cannot be used, in one file


class LiveInput:
    """Rows of a source that grows: those read before a trigger belong to it."""

    def __init__(self, chunks: ChunkReader, clock: Clock, stop: Event) -> None:
        self._chunks, self._clock, self._stop = chunks, clock, stop
        self.positions: Positions = {}
        self._before: Positions = {}
        self._ends = getattr(chunks.source, "partitions_end", False)
        self._over: set[str] = set()  # partitions that were read to their end
        self._letters = StepLetters(chunks)

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
        self._begin(step)
        while self._clock.now() < time:
            if self._stop.is_set():
                self._break_off()
                return None
            waiting = True
            for partition in self._in_order():  # in turn: a busy one must not keep the others out
                if self._clock.now() >= time:
                    break
                found, batch = self._read(partition, step)
                pieces += found
                waiting = waiting and batch.done
                if batch.done and self._ends:
                    self._over.add(partition)
            if waiting:
                self._clock.wait(time, self._stop)
        self._letters.finish()
        return pieces

    def replay(self, step: int, logged: Positions) -> list[Piece] | None:
        """The very rows that a step has read before; None if stopped."""
        pieces: list[Piece] = []
        self._begin(step)
        for partition, target in logged.items():
            while (before := self.positions.get(partition)) != target:
                if self._stop.is_set():
                    self._break_off()
                    return None
                found, batch = self._read(partition, step, until=target)
                pieces += found
                if self.positions.get(partition) == before:  # its server is away: is this stopped?
                    self._clock.wait(self._clock.now(), self._stop)
                if batch.done and self.positions.get(partition) != target:
                    raise NoiseReuse(
                        f"step {step} has read {partition} up to {target}, which ends at {before} "
                        "now; nothing was published; restore what was removed from the source"
                    )
        self._letters.finish()
        return pieces

    def _begin(self, step: int) -> None:
        self._before = dict(self.positions)
        self._letters.begin(step)

    def _break_off(self) -> None:
        """What was read since the last step is read again."""
        self.positions = self._before
        self._over.clear()

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

    def _read(
        self, partition: str, step: int, until: Position = None
    ) -> tuple[Iterable[Piece], Batch]:
        position = self.positions.get(partition)
        rows, batch, rejected = self._chunks.divided(partition, position, arrived=step, until=until)
        self._letters.add(partition, rejected)
        if batch.position is not None:
            self.positions[partition] = batch.position
        return _pieces(rows), batch


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


def _pieces(rows: Rows) -> Iterable[Piece]:
    return [(rows, first, end) for *_, first, end in rows.runs]
