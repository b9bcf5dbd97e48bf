"""The life of a run on Spark, seen from the driver: rows in, log, noise, sink, progress.

Rows are hashed and written, by bucket of their unit, where their step will find them; only then
does Spark's own checkpoint move on. When a step comes, by the clock or because all input is there,
its digest is logged durably, one job publishes it, the sink gets the tables, and the new state is
made the current one. A kill at any moment loses nothing: the same rows meet the same noise, and the
sink already has the tables that come out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from dpstream.engines.chunks import RejectHandler
from dpstream.engines.embedded.loop import OpenWindows, content_of
from dpstream.engines.embedded.step_rows import check_columns
from dpstream.engines.query_directory import read_types, write_types
from dpstream.engines.query_run import QueryRun, RunStorage
from dpstream.engines.sender import Sender
from dpstream.engines.spark.bucket_files import DriverProgress, SharedFiles, StepDigests, added
from dpstream.engines.spark.jobs import ADAPTIVE, Jobs, arrow_schema, as_planned, rejected
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    LedgerError,
    NoiseReuse,
    StateError,
)
from dpstream.group_by.release_table import ReleaseTables
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import chain_digest, mint_run_id
from dpstream.privacy.state.run_directory import ANEW
from dpstream.query.column_types import Types
from dpstream.query.query import Query
from dpstream.records import FinitePartitions, Source, fence
from dpstream.rows.row_batch import RowKeys
from dpstream.rows.row_reader import RowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# What a run on Spark may read: DataFrames, streaming or not, and the connectors' sources.


def is_frame(source: Any) -> bool:
    """Is it a DataFrame of Spark?"""
    from pyspark.sql import DataFrame

    return isinstance(source, DataFrame)


def is_stream(source: Any) -> bool:
    """Is it a streaming DataFrame?"""
    return is_frame(source) and bool(source.isStreaming)


def is_bounded(source: Any) -> bool:
    """Has it an end, as a DataFrame that does not stream, or files?"""
    if is_frame(source):
        return not source.isStreaming
    return source is None or bool(source.bounded)


def check_declared(source: Any, query: Query) -> None:
    """Refuse a source that declares other columns before anything is paid for."""
    if not is_frame(source):
        check_columns(source, query)
        return
    for name in query.source_columns:
        if name not in source.columns:
            raise InvalidInput(
                f"the DataFrame has no column {name!r}; it has {', '.join(source.columns)}"
            )


def check_end(source: Any, *, live: bool) -> None:
    """A live run needs a source that goes on; any other one that ends, or a stream of Spark's."""
    grows = isinstance(source, FinitePartitions) and source.partitions_end
    if live and not (is_stream(source) or grows):
        bounded = ", which is bounded" if is_bounded(source) else ""
        raise InvalidParameter(
            "a live run on Spark reads a streaming DataFrame (session.readStream...) or a "
            f"directory that grows; got {type(source).__name__}{bounded}"
        )
    if not live and not is_stream(source) and not is_bounded(source):
        raise InvalidParameter(
            f"{type(source).__name__} has no end; use Spark's own reader for it "
            "(session.readStream...)"
        )


# Rows on their way in: read by executors, hashed, written where their step will find them.
#
# Whatever was taken in is named in the run's progress before its source moves on, so no row is lost
# or taken twice. Rows of a bounded input belong to the step of their own event time; rows of a live
# one belong to the first step whose time is not over when they are read.


@dataclass(kw_only=True)
class Intake:
    """Takes the rows of one run in."""

    jobs: Jobs
    progress: DriverProgress
    save: Callable[[], None]
    aside: RejectHandler
    name_job: Callable[[str], str]
    reader: RowReader
    """Knows the types of unit and keys, once something was read."""
    arriving: Callable[[], int | None]
    """The step of rows that arrive now; None: their event times tell."""
    place: str
    """Where Spark keeps its own checkpoint of the stream."""
    lock: Lock = field(default_factory=Lock)
    """Held while rows are taken in, and while a step is published."""
    failure: BaseException | None = field(init=False, default=None)

    def take_all(self, name: str, source: Any) -> None:
        """Read a bounded input, once for all."""
        if name in self.progress.read:
            return
        if is_frame(source):
            self._take(self._wanted(source), None, [], name, None)
        else:
            self._take(None, source, source.partitions(), name, None)
        self.progress.read.append(name)
        self.save()

    def look(self, source: Source) -> None:
        """Read the files that have come into a directory since the last time."""
        known = set(self.progress.read)
        new = [name for name in source.partitions() if name not in known]
        if new:
            self.learn(source, new)
            with self.lock:
                self._take(None, source, new, "files", self.arriving())
                self.progress.read += new
                self.save()

    def learn(self, source: Any, partitions: Sequence[str]) -> None:
        """Fix the types of unit and keys by what the source declares."""
        if self.reader.query.privacy_unit_column in self.reader.types:
            return
        if is_frame(source):
            self.reader.learn({one.name: one.type for one in arrow_schema(source)})
        elif partitions:
            self.reader.learn(source.columns(partitions[0]))

    def stream(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        """Begin to read a stream where it was left."""
        writer = self._wanted(frame).writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", self.place)
        return writer.trigger(**trigger).start()

    def raise_failure(self, query: StreamingQuery) -> None:
        """What has gone wrong in the stream, if anything has."""
        if self.failure is not None:
            raise self.failure
        problem = query.exception()
        if problem is not None:
            raise problem

    def _wanted(self, frame: DataFrame) -> DataFrame:
        return frame.select(*self.jobs.plan.query.source_columns)

    def _batch(self, frame: DataFrame, number: int) -> None:
        frame.sparkSession.conf.set(ADAPTIVE, "false")  # the stream has a session of its own
        try:
            with self.lock:
                self._one_batch(frame, number)
        except BaseException as problem:
            self.failure = problem
            raise

    def _one_batch(self, frame: DataFrame, number: int) -> None:
        """A batch of the stream; one that comes again must be what it was."""
        progress = self.progress
        if number < progress.batch:
            raise NoiseReuse(
                f"the stream begins again with batch {number}, and batch {progress.batch} was read "
                "before; restore the stream's checkpoint, or use a new state directory (a new run)"
            )
        if number == progress.batch:
            self._refuse_other_rows(frame, number)
            return
        if number > progress.batch + 1:
            raise StateError(
                f"the stream goes on with batch {number}, and batch {progress.batch + 1} was never "
                "taken in: the run's progress is older than the stream's checkpoint; restore the "
                "newest spark.dps, or use a new state directory (a new run, charged anew)"
            )
        arrived = self.arriving()
        digests = self._take(frame, None, [], f"batch {number}", arrived)
        progress.batch, progress.batch_digests = number, digests
        progress.batch_arrived = arrived
        self.save()

    def _refuse_other_rows(self, frame: DataFrame, number: int) -> None:
        known, arrived = self.progress.batch_digests, self.progress.batch_arrived
        again = self.jobs.take(
            frame, None, [], job="", where=f"batch {number}", arrived=arrived, write=False
        )
        if again.digests != known:
            raise NoiseReuse(
                f"batch {number} was read before with other rows; the same noise over other data "
                "would reveal the difference, so nothing was published; use a source that can be "
                "read again"
            )

    def _take(
        self,
        frame: DataFrame | None,
        source: Source | None,
        partitions: list[str],
        name: str,
        arrived: int | None,
    ) -> StepDigests:
        job = self.name_job(name.replace(" ", "-"))
        found = self.jobs.take(frame, source, partitions, job=job, where=name, arrived=arrived)
        for one in sorted(found.told, key=lambda told: str(told["chunk"])):
            self.aside.rejected(one["chunk"], rejected(one))
            self.aside.count(**one["counts"])
        progress = self.progress
        progress.waiting = [*progress.waiting, *found.waiting]
        progress.digests = added([progress.digests, found.digests])
        return found.digests


_LOOK = 0.1  # seconds between two looks at a stream that is read to its end
_STREAM = "the stream"  # among the inputs that were read to their end
_MOST_SHOWN = 4_000_000  # rows of releases that a job sends to the driver, if it can be foreseen


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """How the work is divided; none of it changes what is published."""

    buckets: int = 0
    """Hash buckets of units and of groups; 0: twice the cores that the run begins with."""
    state_location: str | None = None
    """Where driver and executors share files; default: in the state directory."""
    steps_at_once: int = 32
    """Steps of a bounded input that one job publishes at most; fewer if releases are large."""
    batch_every: str = "1 second"
    """How often a live stream is asked for rows."""


@dataclass(kw_only=True)
class SparkRun(QueryRun):
    """A running query: iterate over its releases."""

    session: SparkSession
    spark: SparkOptions
    source: Any
    """A DataFrame, streaming or not, or one of the connectors' sources."""
    history: Any = None
    by_clock: bool = False
    """Is the source live?"""
    sink: Any = None
    engine: ClassVar[str] = "spark"
    _progress: DriverProgress = field(init=False, default_factory=lambda: DriverProgress(run=""))
    _shared: SharedFiles | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in (self.source, self.history):
            if source is not None:
                check_declared(source, self.plan.query)
        check_end(self.source, live=self.live)

    @property
    def live(self) -> bool:
        """Does the source go by the clock?"""
        return self.by_clock

    @property
    def steps_done(self) -> int:
        """How many triggers have been published."""
        return self._progress.step

    def erase_unit(self, unit: Any) -> int:
        """Not here."""
        raise InvalidParameter(
            "the Spark engine does not erase single units from its state; what it holds of a unit "
            "goes when its last window and period are over; to be rid of it now, delete the "
            "state directory (and state_location) and begin a new run, charged anew; runs of the "
            "embedded engine can"
        )

    def _buckets(self) -> int:
        return self.spark.buckets or 2 * self.session.sparkContext.defaultParallelism

    def _notes(self) -> dict[str, Any]:
        return super()._notes() | {"partitions": []}

    def _releases(self) -> Generator[pa.Table, None, None]:
        storage = self._storage()
        with ExitStack() as undo:
            undo.callback(self._close, storage)
            try:
                self._open(storage, undo)
                yield from self._life(storage)
            except (BudgetExceeded, LedgerError, InvalidInput, InvalidParameter):
                if storage.directory is not None and not self._progress.step:
                    if storage.directory.unused and self._shared is not None:
                        self._shared.remove_all()
                    storage.directory.withdraw()
                raise

    def _open(self, storage: RunStorage, undo: ExitStack) -> None:
        """Everything that the run needs, as it was left."""
        self._spend: QuerySpend | None = None
        self._nonce = mint_run_id().hex()[:8]
        directory = self._directory = storage.directory
        reader = RowReader(self.plan.query, storage.secret, storage.run)
        if directory is None:
            place = undo.enter_context(tempfile.TemporaryDirectory(prefix="dpstream-"))
            self._place, buckets = Path(place), self._buckets()
        else:
            self._place, buckets = directory.folder, directory.about["buckets"]
            reader.types = read_types(directory.log)
            reader.learned = partial(write_types, directory.log)
        if storage.ledger.terms(self.dataset) is not None:
            self._admit(storage)
        progress = self._place / "spark.dps"
        if directory is not None and directory.log.last >= 0 and not progress.exists():
            raise StateError(
                f"{progress} is missing: it says how far the run is, and which files hold its "
                f"state; restore it, or {ANEW}"
            )
        self._progress = DriverProgress.load(progress, storage.run_tag)
        shared = self.spark.state_location or str(self._place.absolute() / "shared")
        location = f"{shared}/{storage.run_tag}"  # a run meets nothing that another has left
        self._shared = SharedFiles(location)
        if directory is None:
            undo.callback(self._shared.remove_all)  # nobody can go on with it
        self._jobs = Jobs(
            session=as_planned(self.session),
            plan=self.plan,
            types=reader.types,
            buckets=buckets,
            files=self._shared,
            row_keys=RowKeys.of(storage.secret, storage.run),
            run_tag=storage.run_tag,
        )
        self._intake = self._new_intake(reader, f"{location}/stream")
        self._windows = OpenWindows(
            self.plan.query.schedule.last_step, lambda w: self._erase(storage, w)
        )
        if directory is not None:
            self._windows.add(*directory.keys.open_windows())
            self._windows.settle(self._progress.step)
        self._sender = Sender(self.sink, self.plan.query.name, 0)
        undo.callback(self._sender.close)
        self._clean()

    def _new_intake(self, reader: RowReader, place: str) -> Intake:
        """What takes rows in; it knows the types of unit and keys that the sources declare."""
        intake = Intake(
            jobs=self._jobs,
            progress=self._progress,
            save=self._save,
            aside=self.aside,
            reader=reader,
            name_job=self._job,
            arriving=self._arriving,
            place=place,
        )
        for source in (self.source, self.history):
            if source is not None:
                intake.learn(source, [] if is_frame(source) else source.partitions())
        return intake

    def _schemas(self) -> list[Types | None]:
        found: list[Types | None] = []
        for source in (self.source, self.history):
            if is_frame(source):
                found.append({one.name: one.type for one in arrow_schema(source)})
            elif source is not None:
                found += [source.columns(name) for name in source.partitions()[:1]]
        return found

    def _clean(self) -> None:
        """Remove what is over, and what was left by tasks whose output was not accepted."""
        needed, files = self._progress.names(), self._jobs.files
        found = [*files.names("rows"), *files.names("state")]
        files.remove(name for name in found if name not in needed)

    def _life(self, storage: RunStorage) -> Iterator[pa.Table]:
        for name, source in (("history", self.history), ("source", self.source)):
            if source is not None and is_bounded(source):
                self._intake.take_all(name, source)
        if self.live:
            yield from self._by_the_clock(storage)
            return
        if is_stream(self.source) and _STREAM not in self._progress.read:
            self._read_stream()
        steps = self.plan.query.schedule.steps
        assert steps is not None
        at_once = self.spark.steps_at_once
        while self._progress.step < steps and not self._stop.is_set():
            end = min(self._progress.step + at_once, steps)
            tables = self._publish(storage, end)
            yield from tables
            shown = max(len(table) for table in tables) if tables else 0
            at_once = max(1, min(self.spark.steps_at_once, _MOST_SHOWN // max(shown, 1)))

    def _read_stream(self) -> None:
        """All that a stream has by now: only then is it known which rows a step has."""
        query = self._intake.stream(self.source, availableNow=True)
        try:
            while query.isActive:
                if self._stop.wait(_LOOK):
                    return
            self._intake.raise_failure(query)
        finally:
            query.stop()
        self._progress.read.append(_STREAM)
        self._save()

    def _by_the_clock(self, storage: RunStorage) -> Iterator[pa.Table]:
        """Steps at their times, with data or without: the driver's clock is the heartbeat."""
        schedule, source = self.plan.query.schedule, self.source
        query = None
        if is_frame(source):
            query = self._intake.stream(source, processingTime=self.spark.batch_every)
        try:
            while schedule.steps is None or self._progress.step < schedule.steps:
                time = schedule.time_of(self._progress.step)
                assert time is not None
                while self.clock.now() < time:
                    if self._stop.is_set():
                        return
                    if query is None:
                        self._intake.look(source)
                    else:
                        self._intake.raise_failure(query)
                    self.clock.wait(time, self._stop)
                with self._intake.lock:
                    tables = self._publish(storage, self._progress.step + 1)
                yield from tables
        finally:
            if query is not None:
                query.stop()

    def _arriving(self) -> int | None:
        """The step that rows which are read now belong to: the first whose time is not over."""
        if not self.live:
            return None
        schedule = self.plan.query.schedule
        step, now = self._progress.step, self.clock.now()
        if self._directory is not None:
            step = max(step, self._directory.log.last + 1)  # what is logged is closed
        while schedule.steps is None or step < schedule.steps:
            time = schedule.time_of(step)
            if time is None or now < time:
                break
            step += 1
        return step

    def _publish(self, storage: RunStorage, end: int) -> list[pa.Table]:
        """Log the steps' input, draw, send, and make the new state the current one."""
        progress = self._progress
        chain = self._logged(storage, end)
        assert self._spend is not None
        self._spend.begin(end - 1)
        schedule = self.plan.query.schedule
        windows = {due.window for step in range(progress.step, end) for due in schedule.due(step)}
        self._windows.add(*windows)
        lent = self._spend.lend(sorted(windows))
        made, saved = self._jobs.publish(progress, end, lent, job=self._job("steps"))
        self._sender.send(made)
        self._sender.arrived(all_of_them=True)
        for one in saved:
            name, size, checksum = one["segment"]
            stored = (name, size, checksum)
            progress.extend(one["stage"], one["bucket"], stored, whole=one["whole"])
        progress.waiting = [one for one in progress.waiting if one.last >= end]
        if end == schedule.steps:  # the query is over: nothing of its state is needed any more
            progress.waiting, progress.units, progress.groups = [], {}, {}
        progress.digests = {s: d for s, d in progress.digests.items() if s >= end}
        progress.step, progress.chain = end, chain
        self._save()
        self._clean()
        self._windows.settle(end)
        if storage.directory is not None:
            storage.directory.log.forget_before(end)
        return [one.table for one in made]

    def _logged(self, storage: RunStorage, end: int) -> bytes:
        """Charge the run if that was not done; then make the steps' input durable."""
        if self._spend is None:
            fence(self.sink, self.plan.query.name, storage.run_tag)
            tables = ReleaseTables(plan=self.plan, types=self._jobs.types, run_tag=storage.run_tag)
            self._intake.reader.settle_types()
            self._spend = self._pay(storage, lambda: tables.schema)
        progress, chains = self._progress, []
        chain = progress.chain
        for step in range(progress.step, end):
            content = content_of(step, progress.digests.get(step, (0, 0)))
            chain = chain_digest(storage.digest_key, chain, content)
            chains.append(chain)
        if storage.directory is not None:
            storage.directory.record(progress.step, chains)
        return chain

    def _job(self, name: str) -> str:
        """A name that no other job of the run has, also after a kill."""
        self._progress.jobs += 1
        return f"{self._progress.jobs}-{name}-{self._nonce}"

    def _save(self) -> None:
        self._progress.save(self._place / "spark.dps")

    def _erase(self, storage: RunStorage, window: int) -> None:
        if self._spend is not None:
            self._spend.erase(window)
        else:
            storage.keys.erase(window)

    def _close(self, storage: RunStorage) -> None:
        super()._close(storage)
        for part in (self.source, self.history, self.sink):
            if part is not None and not is_frame(part):
                part.close()
