"""The rows of a step: from files by event time, from a live source by when they arrived.

Files may hold their rows in any order, so no step can be taken before it is known where its rows
are: one pass over the time column finds each chunk's first and last step. Then chunks are read
when their first step comes and dropped after their last one. (A step that began when a later row is
seen, as watermarks taken from the data have it, would let one unit move other units' rows.)

How far a step has read a live source is logged with it. A replay reads to exactly there, however
the rows are divided into chunks this time.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Condition, Event, Lock
from typing import Any

import numpy as np

from dpstream.engines.chunks import ChunkReader, OperatorCounts, first_types
from dpstream.engines.clock import Clock, OverdueTriggers
from dpstream.engines.embedded.finished_log import FinishedLog
from dpstream.engines.embedded.live_reader import Arrivals, ArrivedChunk, LiveView, Positions
from dpstream.engines.query_run import Run
from dpstream.engines.table_versions import TableVersions, is_table, refreshed_tables
from dpstream.errors import InvalidInput, NoiseReuse, UnusableFile, no_column
from dpstream.group_by.bounding import StepRows
from dpstream.privacy.state import InputLog
from dpstream.privacy.state.run_directory import read_about
from dpstream.query.column_types import Types
from dpstream.query.query import Query
from dpstream.query.row_spec import Prepare, RowSpec
from dpstream.records import (
    Batch,
    CheckedSource,
    ChunkRanges,
    InferredTypes,
    ParallelReads,
    Position,
    Rejected,
    SizedPartitions,
    Source,
    is_quarantined,
    is_reached,
)
from dpstream.rows.column_values import never_becomes, types_of
from dpstream.rows.row_batch import Rows, RowSlice
from dpstream.rows.row_reader import RowReader

_MOST_READERS = 6  # of files; more of them wait for what follows
_AHEAD = 2  # chunks that are read before they are needed, at least
_AHEAD_BYTES = 1 << 29  # of rows that were made before they are needed, where there are readers
_UNPARSED = 3  # chunks that are read and not made into rows, of whatever size
_UNPARSED_BYTES = 3 << 27  # that more of them may have together
_SMALL = 4096  # rows of chunks that are parsed together
_ROWS_OF_BUCKET = 50_000  # of a step, that one hash bucket takes before there are two
_MOST_BUCKETS, _BUCKETS_UNTOLD = 64, 4
_FILES_ASKED = 64  # for the number of their rows: the others are taken to be like them
_LETTERS = 10_000  # rows that cannot be used, in one file


class RunInput:
    """What a run reads: files by event time, a live source by the clock, or both."""

    def __init__(self, run: Run) -> None:
        """Sources that declare other columns are refused, before anything is paid for."""
        if run.source is not None and run.live and not isinstance(run.source, LiveView):
            # also read while the query is busy
            run.source = Arrivals(run.source, run.clock, buffer=run.options.buffer).views[0]
        self._run = run
        self._sources = [each for each in (run.source, run.history) if each is not None]
        self._bounded = [each for each in self._sources[::-1] if each.bounded]
        self.files: FileInput | None = None
        self.live: LiveInput | None = None
        self._versions: TableVersions | None = None
        begun = run.folder is not None and read_about(run.folder) is not None
        for source in self._sources:
            check_columns(source, run.query, begun=begun)

    def partitions(self) -> list[str]:
        """Every partition of the bounded ones: a run reads a fixed set."""
        return [name for source in self._bounded for name in source.partitions()]

    def schemas(self) -> list[Types | None]:
        """What the first usable partition of each source declares, as far as there is one."""
        columns = self._run.query.source_columns
        return [types for s in self._sources for types in first_types(s, columns)]

    def buckets(self) -> int:
        """How many hash buckets its steps are divided into.

        One more costs every trigger a third of a millisecond, so a step of few rows has one.
        """
        steps, rows = self._run.query.schedule.steps, 0.0
        if self._run.live or steps is None:
            return _BUCKETS_UNTOLD
        for source in self._bounded:
            names = source.partitions()
            told = [
                source.row_estimate(name) if isinstance(source, SizedPartitions) else None
                for name in names[:_FILES_ASKED]
            ]
            known = [each for each in told if each is not None]
            if not known:
                return _BUCKETS_UNTOLD
            rows += sum(known) * len(names) / len(known)
        return max(1, min(_MOST_BUCKETS, int(rows / max(steps, 1) / _ROWS_OF_BUCKET)))

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

    def open(self, reader: RowReader) -> None:
        """Begin to read; types that a source tells are fixed now."""
        run = self._run
        for schema in self.schemas():
            reader.learn(schema)
        if len(self._bounded) > 1:
            raise InvalidInput("history goes with a live source; join two bounded ones in a list")
        for source in self._bounded:
            chunks = ChunkReader(source, reader, run.operator)
            threads = run.options.threads or len(os.sched_getaffinity(0))
            self.files = FileInput(chunks, memory=run.options.memory, threads=threads)
        if isinstance(run.source, LiveView):
            chunks = ChunkReader(run.source, reader, run.operator)
            self.live = LiveInput(
                chunks, run.source, run.clock, run.stopped, most=run.options.overdue_at_once
            )
            if refreshed_tables(run.query):
                self._versions = TableVersions(run.query, run.folder, run.operator)

    def read(self, step: int, log: InputLog | None) -> StepRows | None:
        """A step's rows, those of a logged one to where the log says; None if stopped."""
        slices: StepRows | None = StepRows(1)
        if self.live is not None:
            logged = None if log is None else log.positions.get(step)
            if self._versions is not None:
                self.live.prepare_with(self._versions.begin(step, logged))
            slices = self.live.take(step) if logged is None else self.live.replay(step, logged)
        elif self._run.stopped.is_set():
            return None
        if slices is None or self.files is None:
            return slices
        rows = self.files.take(step, log)
        rows.add(slices)
        return rows

    def ready(self, step: int) -> bool:
        """Are the rows of a step of files here, so that nobody waits for them?"""
        return self.files is None or self.files.ready(step)

    def save(self) -> dict[str, Any]:
        """How far the live source was read and which files are quarantined, for a snapshot.

        What is finished is durable by then.
        """
        quarantined = {} if self.files is None else self.files.quarantined
        if self.live is None:
            return {"positions": dict(quarantined)}
        positions = self.live.positions | quarantined
        saved = {"positions": positions, "finished": [*self.live.finished.save()]}
        return saved if self._versions is None else saved | {"tables": self._versions.save()}

    def go_on_from(self, saved: Mapping[str, Any], folder: Path, run: bytes) -> None:
        """Read the live source from there on, and no file that was quarantined.

        `folder` keeps what is finished.
        """
        mine, positions = set(self.partitions()), saved.get("positions", {})
        if self._versions is not None:
            self._versions.go_on_from(saved)
        if self.files is not None:
            self.files.quarantined = {name: at for name, at in positions.items() if name in mine}
        if self.live is not None:
            self.live.positions = {n: at for n, at in positions.items() if n not in mine}
            self.live.finished = FinishedLog(folder, run, saved.get("finished"))
            with self.live.view.shared.lock:
                self.live.finished.resume(self.live.view.shared.source)
            for name, end in self.live.finished.ends.items():
                if is_quarantined(end):
                    self._run.operator.quarantine(name, end)

    def settle(self, saved: Mapping[str, Any]) -> None:
        """No recovery goes back beyond this snapshot any more."""
        if self.live is None:
            return
        if self._versions is not None:
            self._versions.settle(saved)
        view, mark = self.live.view, saved.get("finished", (1, 0))
        with view.shared.lock:
            finished = self.live.finished.before((mark[0], mark[1]))
            for name in view.removed:
                finished.pop(name, None)
            mine = {} if self.files is None else self.files.quarantined
            live = {name: at for name, at in saved["positions"].items() if name not in mine}
            view.commit(live | finished)

    def moved(self) -> Positions | None:
        """The positions that the last step has changed; None if nothing is live."""
        files = {} if self.files is None else self.files.take_new_marks()
        if self.live is None:
            return files or None
        tables = {} if self._versions is None else self._versions.moved()
        return self.live.moved() | files | tables

    def close(self) -> None:
        """Stop reading."""
        if self.files is not None:
            self.files.close()
        if self.live is not None:
            self.live.finished.close()


def check_columns(source: Source, query: RowSpec, *, begun: bool = False) -> None:
    """Refuse a source that declares other columns before anything is paid for.

    Where single files are quarantined, it is refused if none of them has the columns, unless the
    run has `begun` and the source may still grow. So is a key whose type follows from the rows: one
    of them could change what is published.
    """
    inferred = source.inferred if isinstance(source, InferredTypes) else {}
    for name in inferred.keys() & query.key_columns - query.declared.keys():
        raise InvalidInput(
            f"the column {name!r} of the data frame holds {inferred[name]}: pandas takes the type "
            "from the rows, and a type that is published must not depend on them; declare it: "
            f"column_types={{{name!r}: 'INT64'}} (whole numbers, NULL where one is missing), "
            "'FLOAT64', ... (in SQL: "
            f"OPTIONS (column_types = ({name} = INT64)))"
        )
    alone = isinstance(source, CheckedSource) and source.quarantines
    complete = isinstance(source, LiveView) and source.partitions_end
    partitions = source.partitions()[: 1 if complete and not alone else None]
    kinds, usable = query.declared, False
    first: UnusableFile | None = None
    for partition in () if alone and begun and not source.bounded else partitions:
        try:
            declared = source.columns(partition)
        except UnusableFile as problem:
            if not alone:
                raise
            first = first or (problem if source.bounded else None)
            continue
        if declared is None:
            return
        missing = [name for name in query.source_columns if name not in declared]
        if missing:
            first = first or no_column(partition, missing[0], [*declared])
            if not alone:
                raise first
            continue
        usable = True
        if alone and (begun or not source.bounded):
            break  # others are looked at when they are read
        if not source.bounded:
            continue  # rows of a type that never becomes the run's are set aside when they come
        if query.prepare is None and not kinds.keys() >= {*query.typed_columns}:
            kinds = kinds | types_of(query, declared)
        for name in kinds.keys() & declared.keys():
            if never_becomes(declared[name], kinds[name]):
                raise InvalidInput(
                    f"column {name!r} is {kinds[name]} in this run and {declared[name]} in "
                    f"{partition}, and the one does not become the other by value; give all files "
                    f"one type, or declare another: column_types={{{name!r}: ...}}"
                )
    if first is not None and not usable:
        raise first


def most_kept(query: RowSpec) -> int:
    """How many rows of a unit in a group can matter in one step."""
    if not isinstance(query, Query):
        return 1
    if query.unit_measures or query.per_unit is not None:
        return sys.maxsize  # all rows of a unit that is in a group, or that become inner rows
    each = query.bounds.rows_per_group + query.choose_rows  # one more shows units beyond the bound
    if not query.totals or query.counts_units:
        return each
    return each + query.most_dropped + 1  # all that count, and one that is beyond them


class LiveInput:
    """Rows of a source that grows: those that arrived before a trigger belong to it."""

    def __init__(
        self,
        chunks: ChunkReader,
        view: LiveView,
        clock: Clock,
        stop: Event,
        *,
        most: int = 1000,
    ) -> None:
        self._chunks, self.view, self._clock, self._stop = chunks, view, clock, stop
        self._overdue = OverdueTriggers(clock, stop, most)
        self.positions: Positions = {}
        """Of partitions that are being read."""
        self.finished = FinishedLog()
        self._begin(0, replayed=False)
        view.expect(chunks.reader.query.schedule, chunks.reader.query.source_columns, stop)

    def moved(self) -> Positions:
        """The positions that this step has changed: what a replay of it must reach."""
        return {p: self._at(p) for p, before in self._before.items() if self._at(p) != before}

    def take(self, step: int) -> StepRows | None:
        """Rows that come until the trigger's time; None if stopped, or if no more can come."""
        if not self.view.follow(self.positions, self.finished.ends):
            return None
        self._overdue.pace(self._time_of(step))
        slices = StepRows(most_kept(self._chunks.reader.query))
        self._begin(step, replayed=False)
        for chunk in self.view.chunks_before(self._time_of(step)):
            self._rows_of(chunk, step, slices)
        return self._end(step, slices)

    def replay(self, step: int, logged: Positions) -> StepRows | None:
        """The very rows that a step has read before; None if stopped."""
        slices = StepRows(most_kept(self._chunks.reader.query))
        self._begin(step, replayed=True)
        for partition, target in logged.items():
            if is_table(partition):
                continue
            self.finished.forget(partition)  # what was finished moves no more: this has its name
            self._read_up_to(partition, target, step, slices)
        return self._end(step, slices)

    def prepare_with(self, prepare: Prepare | None) -> None:
        """Prepare the rows of the next step so."""
        self._chunks.prepare = prepare

    def note_release(self, step: int) -> None:
        """A step's tables are out: tell the operator how long after their trigger."""
        if not self._replayed:  # else they were out before
            behind = max(0, self._clock.now() - self._time_of(step)) / 1e6
            self._chunks.operator.note_lag(behind)

    def _time_of(self, step: int) -> int:
        time = self._chunks.reader.query.schedule.time_of(step)
        assert time is not None
        return time

    def _begin(self, step: int, *, replayed: bool) -> None:
        self._before: Positions = {}  # of partitions that this step has moved
        self._ends: Positions = {}  # of those that it has met the end of
        self._small: list[tuple[str, Position, Batch]] = []  # chunks to parse, with their places
        self._waiting = 0  # rows of these
        self._replayed = replayed
        self._forget_removed()
        self._rejects = StepRejects(self._chunks.operator, step)

    def _forget_removed(self) -> None:
        """What the source has removed is finished no more: another may take its name."""
        if self.view.removed:
            with self.view.shared.lock:
                for name in self.view.removed:
                    self.finished.forget(name)
                self.view.removed = []

    def _end(self, step: int, slices: StepRows) -> StepRows | None:
        """The step has its rows; None: it was stopped, and what it has read is read again."""
        if self._stop.is_set():
            self.positions |= self._before
            self.positions = {p: at for p, at in self.positions.items() if at is not None}
            return None
        self._parse_small(step, slices)
        self._rejects.finish()
        for partition, end in self._ends.items():
            if self.positions.get(partition) == end:
                del self.positions[partition]
                self.finished.add(partition, end, self.view.stamp(partition))
        return slices

    def _at(self, partition: str) -> Position:
        """How far a partition was read."""
        at = self.positions.get(partition)
        return self.finished.ends.get(partition) if at is None else at

    def _rows_of(self, chunk: ArrivedChunk, step: int, slices: StepRows) -> None:
        """Add the rows of a chunk that the query has not read yet."""
        self._forget_removed()
        partition, batch = chunk.partition, chunk.batch
        position = self.positions.get(partition)
        if partition in self.finished.ends:  # before this reader came, which starts anew
            return
        if chunk.last:
            self._ends[partition] = chunk.end
            if position == chunk.end:
                return
        if batch is None or position != chunk.start or is_quarantined(chunk.end):
            # it lags, or was broken off elsewhere, or has no rows
            if not is_reached(position, chunk.end):
                self._read_up_to(partition, chunk.end, step, slices)
            return
        self._chunks.learn(partition)
        columns = self._chunks.reader.query.source_columns
        batch = replace(batch, table=batch.table.select(columns))  # of all that queries want
        self._add(partition, replace(batch, parsed=chunk.parsed), step, slices)

    def _add(self, partition: str, batch: Batch, step: int, slices: StepRows) -> None:
        """Add the rows of the next batch of a partition; small ones wait for those after them."""
        before = self.positions.get(partition)
        if batch.position is not None:
            self._before.setdefault(partition, before)
            self.positions[partition] = batch.position
        if not batch.size:
            return
        self._chunks.operator.read += batch.size  # parsed at the trigger, perhaps, but it is here
        size, small = len(batch.table), self._small
        if small and (
            self._waiting + size > _SMALL or small[0][2].table.schema != batch.table.schema
        ):
            self._parse_small(step, slices)
        self._small.append((partition, before, batch))
        self._waiting += size
        if size > _SMALL:  # alone: what other queries have parsed of it serves this one
            self._parse_small(step, slices)

    def _parse_small(self, step: int, slices: StepRows) -> None:
        """Parse the chunks that wait, as one: a call costs as much as a thousand rows."""
        small, self._small, self._waiting = self._small, [], 0
        joined = None
        if len(small) > 1:
            joined = self._chunks.joined_rows([batch for *_, batch in small], arrived=step)
        if joined is not None:
            slices.add(_slices(joined))
        for partition, before, batch in small:
            rejected = batch.rejected
            if joined is None:
                rows, rejected = self._chunks.rows(partition, before, batch, arrived=step)
                slices.add(_slices(rows))
            self._rejects.add(partition, rejected)

    def _read_up_to(self, partition: str, target: Position, step: int, slices: StepRows) -> None:
        """Add a partition's rows until a position, from the source, or until the run is stopped."""
        if is_quarantined(target):
            before, after = self.positions.get(partition), target.get("after")
            if not is_reached(before, after):
                self._read_up_to(partition, after, step, slices)
            self._before.setdefault(partition, before)
            self.positions[partition] = target
            self._chunks.operator.quarantine(partition, target)
            return
        while (before := self.positions.get(partition)) != target and not self._stop.is_set():
            batch = self._chunks.batch(partition, before, until=target)
            self._add(partition, batch, step, slices)
            if self.positions.get(partition) == before:  # its server is away: is this stopped?
                self._clock.wait(self._clock.now(), self._stop)
            if batch.done and self.positions.get(partition) != target:
                raise NoiseReuse(
                    f"step {step} has read {partition} up to {target}, which ends at {before} "
                    "now; nothing was published; restore what was removed from the source"
                )


def _slices(rows: Rows) -> list[RowSlice]:
    return [(rows, first, end) for *_, first, end in rows.runs]


class StepRejects:
    """Rows of one step of a live source that cannot be used, kept by partition.

    Where a read ends depends on what has come by then; which rows a step has, does not. So a step
    that is taken again writes the same files again, and a row is in one file.
    """

    def __init__(self, operator: OperatorCounts, step: int) -> None:
        self._operator, self._step = operator, step
        self._unwritten: dict[str, list[Rejected]] = {}
        self._files = Counter[str]()

    def add(self, partition: str, rows: list[Rejected]) -> None:
        """Keep rows; a flood goes to disk before the step is over, in files of one size."""
        unwritten = self._unwritten.setdefault(partition, [])
        unwritten += rows
        while len(unwritten) > _LETTERS:
            self._write(partition, unwritten[:_LETTERS])
            del unwritten[:_LETTERS]

    def finish(self) -> None:
        """The step has all its rows."""
        for partition, rows in self._unwritten.items():
            if rows:
                self._write(partition, rows)

    def _write(self, partition: str, rows: list[Rejected]) -> None:
        self._files[partition] += 1
        chunk = f"{partition} step {self._step} file {self._files[partition]}"
        self._operator.reject(chunk, rows)


@dataclass(kw_only=True, eq=False)
class FileChunk:
    """A chunk of a partition and the steps that its rows belong to."""

    partition: str
    position: Position
    first: int
    last: int
    until: Position = None
    """Where it ends, if a second read of it need not end by itself where the first one did."""
    rows: Future[list[Rows]] | None = None
    is_counted: bool = False
    """Has the operator been told of its rows? It may be read again."""


@dataclass(kw_only=True, eq=False)
class ParsedChunk:
    """A chunk that became rows, or could not, and what the operator is to be told of it."""

    chunk: FileChunk
    rows: Future[list[Rows]]
    """Who waits for it."""
    made: list[Rows] = field(default_factory=list)
    problem: BaseException | None = None
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    letters: list[tuple[str, list[Rejected]]] = field(default_factory=list)
    """Rows that cannot be used, under a name that they always have."""


class Reader:
    """One of the threads that read chunks, each with its own view of the source."""

    def __init__(self, chunks: ChunkReader) -> None:
        self.chunks, self.thread = chunks, ThreadPoolExecutor(1)


class ReadingRoom:
    """Bounds what is read and not made into rows: a few chunks, or more that are small together."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._chunks, self._largest = 0, 0

    def enter(self) -> None:
        """Wait until there is room for one more chunk."""
        with self._changed:
            self._changed.wait_for(self._has_room)
            self._chunks += 1

    def _has_room(self) -> bool:
        small = 0 < self._largest * (self._chunks + 1) <= _UNPARSED_BYTES
        return small or self._chunks < _UNPARSED

    def note(self, size: int) -> None:
        """A chunk was read, and has so many bytes."""
        with self._changed:
            self._largest = max(self._largest, size)

    def leave(self) -> None:
        """One became rows, or could not."""
        with self._changed:
            self._chunks -= 1
            self._changed.notify_all()


class FileInput:
    """Rows of partitions that are complete, by event time (or by their arrival column).

    Several chunks are read and made into rows at once. The operator is told of them, and who waits
    gets them, in the order in which they were begun.
    """

    def __init__(self, chunks: ChunkReader, *, memory: int, threads: int = 2) -> None:
        self._chunks, self._memory = chunks, memory
        several = isinstance(chunks.source, ParallelReads)
        count = max(1, min(threads, _MOST_READERS)) if several else 1
        self._readers = [Reader(chunks), *(Reader(chunks.beside()) for _ in range(count - 1))]
        self._reader_of: dict[Hashable, Reader] = {}
        self._parsing = ThreadPoolExecutor(count)  # what was read becomes rows
        self._room = ReadingRoom()
        self._largest = 0  # bytes of the rows of a chunk
        self._begun, self._told = 0, 0  # chunks, and those of them that the operator knows
        self._parsed: dict[int, ParsedChunk] = {}  # by number, until those before them are told
        self._telling = Lock()
        self._index: list[FileChunk] | None = None
        self.quarantined: Positions = {}
        self._new_marks: Positions = {}

    def take(self, step: int, log: InputLog | None = None) -> StepRows:
        """The rows of one step; steps are taken in order.

        Which files are quarantined is found before the first step and logged with it.
        """
        if self._index is None:
            for positions in {} if log is None else log.positions.values():
                marks = {name: at for name, at in positions.items() if is_quarantined(at)}
                self.quarantined |= marks
            self._index = self._find_chunks(decided=log is not None and log.last >= 0)
        index = self._index
        slices = StepRows(most_kept(self._chunks.reader.query))
        needed = [chunk for chunk in index if chunk.first <= step <= chunk.last]
        later = [chunk for chunk in index if chunk.first > step]
        held, ahead = 0, iter([*needed, *later])
        for chunk in islice(ahead, self._ahead()):
            self._begin(chunk)
        for chunk in needed:
            for another in islice(ahead, 1):
                self._begin(another)
            for rows in self._begin(chunk).result():
                slices.add([(rows, first, end) for at, *_, first, end in rows.runs if at == step])
                held += rows.bytes
            if chunk.last == step or held > self._memory:
                chunk.rows = None  # its time is over, or it is read again when needed
        return slices

    def take_new_marks(self) -> Positions:
        """The files that were quarantined since this was last asked for."""
        marks, self._new_marks = self._new_marks, {}
        return marks

    def ready(self, step: int) -> bool:
        """Are the rows of a step here, so that nobody waits for them?"""
        needed = [chunk for chunk in self._index or () if chunk.first <= step <= chunk.last]
        return all(chunk.rows is not None and chunk.rows.done() for chunk in needed)

    def close(self) -> None:
        """Stop reading."""
        for reader in self._readers:
            reader.thread.shutdown(cancel_futures=True)
        self._parsing.shutdown(cancel_futures=True)
        for reader in self._readers[1:]:
            reader.chunks.source.close()

    def _ahead(self) -> int:
        """How many chunks are begun before they are needed: as many as there are readers for."""
        room = _AHEAD_BYTES // self._largest if self._largest else 0
        return max(_AHEAD, min(len(self._readers), room))

    def _begin(self, chunk: FileChunk) -> Future[list[Rows]]:
        """Read a chunk, unless that was begun."""
        if chunk.rows is None:
            chunk.rows = Future()
            found, number = ParsedChunk(chunk=chunk, rows=chunk.rows), self._begun
            reader = self._reader(chunk)
            self._begun += 1
            reader.thread.submit(self._read, reader.chunks, found, number)
        return chunk.rows

    def _reader(self, chunk: FileChunk) -> Reader:
        """Who reads a chunk: whoever has read what it follows, else the next in turn."""
        source, readers = self._chunks.source, self._readers
        if not isinstance(source, ParallelReads):
            return readers[0]
        stretch = source.stretch(chunk.partition, chunk.position)
        known = self._reader_of
        return known.setdefault(stretch, readers[len(known) % len(readers)])

    def _read(self, chunks: ChunkReader, found: ParsedChunk, number: int) -> None:
        """Read a chunk, and have it made into rows."""
        self._room.enter()
        try:
            batches = self._batches(chunks, found.chunk)
            self._room.note(sum(int(batch.table.nbytes) for _, batch in batches))
            self._parsing.submit(self._parse, found, batches, number)
        except BaseException as problem:  # for who waits
            self._room.leave()
            found.problem = problem
            self._tell(found, number)

    def _batches(self, chunks: ChunkReader, chunk: FileChunk) -> list[tuple[Position, Batch]]:
        """What the source has of a chunk, and where."""
        batches: list[tuple[Position, Batch]] = []
        position, done = chunk.position, False
        while not done:
            batch = chunks.batch(chunk.partition, position, until=chunk.until)
            if is_quarantined(batch.position):
                raise InvalidInput(
                    f"{chunk.partition} could be read when this run began and cannot any more: "
                    f"{batch.position['reason']}; put back what was there"
                )
            batches.append((position, batch))
            position, done = batch.position, batch.done or chunk.until in (None, batch.position)
        return batches

    def _parse(
        self, found: ParsedChunk, batches: list[tuple[Position, Batch]], number: int
    ) -> None:
        """Make rows of what was read of a chunk."""
        chunk = found.chunk
        try:
            for position, batch in batches:
                rows, rejected = self._chunks.rows(
                    chunk.partition, position, batch, counts=found.counts
                )
                found.letters.append((f"{chunk.partition} {position}", rejected))
                if len(rows) and not chunk.first <= rows.steps[0] <= rows.steps[-1] <= chunk.last:
                    raise InvalidInput(
                        f"{chunk.partition} has times that its own statistics, or an earlier look "
                        "at it, do not have; write the file again, and leave it alone while it is "
                        "read"
                    )
                found.made.append(rows)
        except BaseException as problem:  # for who waits
            found.problem = problem
        self._room.leave()
        self._tell(found, number)

    def _tell(self, found: ParsedChunk, number: int) -> None:
        """Tell the operator of chunks, then who waits for them, in the order of their numbers."""
        with self._telling:
            self._parsed[number] = found
            while (each := self._parsed.pop(self._told, None)) is not None:
                self._told += 1
                try:
                    self._count(each)
                    if each.problem is not None:
                        raise each.problem
                except BaseException as problem:  # for who waits
                    each.rows.set_exception(problem)
                else:
                    self._largest = max(self._largest, sum(rows.bytes for rows in each.made))
                    each.rows.set_result(each.made)

    def _count(self, found: ParsedChunk) -> None:
        """Count a chunk's rows, and keep those that cannot be used."""
        if found.chunk.is_counted:
            return
        self._chunks.operator.add(found.counts)
        for name, rejected in found.letters:
            self._chunks.operator.reject(name, rejected)
        found.chunk.is_counted = found.problem is None

    def _find_chunks(self, *, decided: bool) -> list[FileChunk]:
        """Every chunk that has rows of some step, by its first step.

        `decided`: steps are logged, so that no other file may be quarantined.
        """
        chunks: list[FileChunk] = []
        partitions = self._chunks.source.partitions()
        for partition in partitions:
            mark = self.quarantined.get(partition)
            if mark is None:
                found, mark = self._chunks_of(partition)
                chunks += found if mark is None else []
                if mark is not None and decided:
                    raise InvalidInput(
                        f"{partition} was read before and cannot be read any more: "
                        f"{mark['reason']}; put back what was there, or use a new state directory "
                        "(a new run, charged anew)"
                    )
                if mark is not None:
                    self.quarantined[partition] = self._new_marks[partition] = mark
            if mark is not None:
                self._chunks.operator.quarantine(partition, mark)
        if partitions and len(self.quarantined) == len(partitions):
            raise UnusableFile(self.quarantined[partitions[0]]["reason"])
        return sorted(chunks, key=lambda chunk: chunk.first)

    def _chunks_of(self, partition: str) -> tuple[list[FileChunk], Position]:
        """The chunks of a partition, and what says that it is quarantined, if it is."""
        chunks: list[FileChunk] = []
        source, columns = self._chunks.source, self._chunks.reader.query.source_columns
        if isinstance(source, CheckedSource) and (mark := source.check(partition, columns)):
            return [], mark
        self._chunks.learn(partition)
        known = self._chunks_by_statistics(partition)
        if known is not None:
            return known, None
        position, done = None, False
        while not done:
            chunk, done = self._readers[0].thread.submit(self._scan, partition, position).result()
            if is_quarantined(chunk.until):
                return [], chunk.until
            if chunk.until == position:
                pass  # nothing at all, or not yet
            elif chunk.first > chunk.last:  # nothing of use: reject what is in it
                self._begin(chunk).result()
            else:
                chunks.append(chunk)
            position = chunk.until
        return chunks, None

    def _chunks_by_statistics(self, partition: str) -> list[FileChunk] | None:
        """The chunks of a file whose statistics tell the times of each; None if they do not."""
        query, source = self._chunks.reader.query, self._chunks.source
        declared, column = source.columns(partition), query.time_column
        plain = query.times_are_plain and query.arrival_column is None and query.time_unit is None
        if column is None or column in query.declared or declared is None or not plain:
            return None
        if query.time_zone != "UTC" and getattr(declared.get(column), "tz", None) is None:
            return None  # times without an offset, in a zone with daylight saving
        ranges = None
        if isinstance(source, ChunkRanges):
            ranges = source.chunk_ranges(partition, column)
        if ranges is None:
            return None
        chunks = []
        for position, least, largest in ranges:
            first, last = query.schedule.step_of(np.array([least, largest])).tolist()
            if query.schedule.steps is not None:
                last = min(last, query.schedule.steps - 1)
            chunks.append(FileChunk(partition=partition, position=position, first=first, last=last))
        return chunks

    def _scan(self, partition: str, position: Position) -> tuple[FileChunk, bool]:
        """The steps of a chunk, none if no row is of use; and whether it is the last."""
        query = self._chunks.reader.query
        if not query.times_are_plain:  # the time may be made of anything
            wanted = query.source_columns
        elif query.time_column is None:
            wanted = [query.privacy_unit_column]
        else:
            wanted = [
                name for name in (query.time_column, query.arrival_column) if name is not None
            ]
        batch = self._chunks.source.read(partition, position, columns=wanted)
        steps, end = self._chunks.reader.steps_of(batch.table), query.schedule.steps
        steps = steps[(steps >= 0) & (steps < end if end is not None else True)]
        first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, -1)
        chunk = FileChunk(
            partition=partition, position=position, first=first, last=last, until=batch.position
        )
        return chunk, batch.done
