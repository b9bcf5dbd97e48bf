"""The Spark engine seen from the driver: `SparkRun` takes the steps that `query_run.py` names.

Rows are hashed and written, by bucket of their unit, where their step will find them (`Intake`);
only then does Spark's own checkpoint move on. When steps come, by the clock or because all input is
there, their digests are logged durably, one job publishes them, the sink gets the tables, and the
new state is made the current one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.embedded.step_rows import check_columns
from dpstream.engines.query_run import QueryRun
from dpstream.engines.run_storage import step_content
from dpstream.engines.sender import Sender
from dpstream.engines.spark.bucket_files import (
    DriverProgress,
    SharedFiles,
    StepDigests,
    add_digests,
)
from dpstream.engines.spark.jobs import ADAPTIVE, Jobs, arrow_schema, plain_session
from dpstream.errors import InvalidInput, InvalidParameter, NoiseReuse, StateError
from dpstream.privacy.state import mint_run_id
from dpstream.privacy.state.run_directory import ANEW, RunDirectory
from dpstream.query.column_types import Types
from dpstream.query.query import Query
from dpstream.records import FinitePartitions, Rejected, Source
from dpstream.rows.row_batch import RowKeys
from dpstream.rows.row_reader import RowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK = 0.1  # seconds between two looks at a stream that is read to its end
_STREAM = "the stream"  # among the inputs that were read to their end
_MOST_SHOWN = 4_000_000  # rows of releases that a job sends to the driver, if it can be foreseen


@dataclass(kw_only=True, repr=False, eq=False)
class SparkRun(QueryRun):
    """A query that runs on a Spark session; `SparkEngine` says what its own options mean."""

    session: SparkSession
    source: Any
    """A DataFrame, streaming or not, or one of the connectors' sources."""
    history: Any = None
    by_clock: bool = False
    """Is the source live?"""
    sink: Any = None
    buckets: int = 0
    state_location: str | None = None
    steps_at_once: int = 32
    batch_every: str = "1 second"
    engine: ClassVar[str] = "spark"
    _files: SharedFiles | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in (self.source, self.history):
            if is_frame(source):
                _check_frame(source, self.query)
            elif source is not None:
                check_columns(source, self.query)
        _check_end(self.source, live=self.live)

    @property
    def live(self) -> bool:
        """Does the source go by the clock?"""
        return self.by_clock

    def erase_unit(self, unit: Any) -> int:
        """Not here."""
        raise InvalidParameter(
            "the Spark engine does not erase single units from its state; what it holds of a unit "
            "goes when its last window and period are over; to be rid of it now, delete the "
            "state directory (and state_location) and begin a new run, charged anew; runs of the "
            "embedded engine can"
        )

    def _schemas(self) -> list[Types | None]:
        schemas: list[Types | None] = []
        for source in (self.source, self.history):
            if is_frame(source):
                schemas.append(declared_types(source))
            elif source is not None:
                schemas += [source.columns(name) for name in source.partitions()[:1]]
        return schemas

    def _default_buckets(self) -> int:
        return self.buckets or 2 * self.session.sparkContext.defaultParallelism

    def _notes(self) -> dict[str, Any]:
        return super()._notes() | {"partitions": []}

    def _withdraw(self, directory: RunDirectory) -> None:
        if directory.unused and self._files is not None:
            self._files.remove_all()
        super()._withdraw(directory)

    def _open(self, undo: ExitStack) -> None:
        """Everything that the run needs, and its state as the newest progress has it."""
        storage, directory = self._storage, self._storage.directory
        if directory is None:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="dpstream-")))
        else:
            folder = directory.folder
        self._path = folder / "spark.dps"
        if directory is not None and directory.log.last >= 0 and not self._path.exists():
            raise StateError(
                f"{self._path} is missing: it says how far the run is, and which files hold its "
                f"state; restore it, or {ANEW}"
            )
        self._progress = DriverProgress.load(self._path, storage.run_tag)
        self.steps_done = self._progress.step
        shared = self.state_location or str(folder.absolute() / "shared")
        location = f"{shared}/{storage.run_tag}"  # a run meets nothing that another has left
        self._files = SharedFiles(location)
        if directory is None:
            undo.callback(self._files.remove_all)  # nobody can go on with it
        self._nonce = mint_run_id().hex()[:8]
        self._jobs = Jobs(
            session=plain_session(self.session),
            plan=self.plan,
            types=self._reader.types,
            buckets=storage.buckets,
            files=self._files,
            row_keys=RowKeys.of(storage.secret, storage.run),
            run_tag=storage.run_tag,
        )
        self._intake = Intake(
            jobs=self._jobs,
            progress=self._progress,
            save=self._save,
            operator=self.operator,
            reader=self._reader,
            name_job=self._name_job,
            arrival_step=self._arrival_step,
            checkpoint=f"{location}/stream",
        )
        for source in (self.source, self.history):
            if source is not None:
                self._intake.learn(source, [] if is_frame(source) else source.partitions())
        self._windows.settle(self.steps_done)
        self._sender = Sender(self.sink, self.query.name, 0)
        undo.callback(self._sender.close)
        self._clean()

    def _publish_steps(self) -> Iterator[pa.Table]:
        """Take in what has an end; then publish by the clock, or many steps at once."""
        for name, source in (("history", self.history), ("source", self.source)):
            if source is not None and is_bounded(source):
                self._intake.take_all(name, source)
        if self.live:
            yield from self._by_the_clock()
            return
        if is_stream(self.source) and _STREAM not in self._progress.read:
            self._read_stream()
        steps, at_once = self.query.schedule.steps, self.steps_at_once
        assert steps is not None
        while self.steps_done < steps and not self.stopped.is_set():
            tables = self._publish(min(self.steps_done + at_once, steps))
            yield from tables
            shown = max((len(table) for table in tables), default=0)
            at_once = max(1, min(self.steps_at_once, _MOST_SHOWN // max(shown, 1)))

    def _read_stream(self) -> None:
        """All that a stream has by now: only then is it known which rows a step has."""
        query = self._intake.stream(self.source, availableNow=True)
        try:
            while query.isActive:
                if self.stopped.wait(_LOOK):
                    return
            self._intake.raise_failure(query)
        finally:
            query.stop()
        self._progress.read.append(_STREAM)
        self._save()

    def _by_the_clock(self) -> Iterator[pa.Table]:
        """Steps at their times, with data or without: the driver's clock is the heartbeat."""
        schedule, source = self.query.schedule, self.source
        query = None
        if is_frame(source):
            query = self._intake.stream(source, processingTime=self.batch_every)
        try:
            while schedule.steps is None or self.steps_done < schedule.steps:
                time = schedule.time_of(self.steps_done)
                assert time is not None
                while self.clock.now() < time:
                    if self.stopped.is_set():
                        return
                    if query is None:
                        self._intake.look(source)
                    else:
                        self._intake.raise_failure(query)
                    self.clock.wait(time, self.stopped)
                with self._intake.lock:
                    tables = self._publish(self.steps_done + 1)
                yield from tables
        finally:
            if query is not None:
                query.stop()

    def _arrival_step(self) -> int | None:
        """The step that rows which are read now belong to: the first whose time is not over."""
        if not self.live:
            return None
        schedule, directory = self.query.schedule, self._storage.directory
        step, now = self.steps_done, self.clock.now()
        if directory is not None:
            step = max(step, directory.log.last + 1)  # what is logged is closed
        while schedule.steps is None or step < schedule.steps:
            time = schedule.time_of(step)
            if time is None or now < time:
                break
            step += 1
        return step

    def _publish(self, end: int) -> list[pa.Table]:
        """Log the steps' input, draw, send, and make the new state the current one."""
        progress, schedule = self._progress, self.query.schedule
        spend = self._charge()
        chain = self._log(end)
        spend.begin(end - 1)
        windows = {due.window for step in range(progress.step, end) for due in schedule.due(step)}
        self._windows.add(*windows)
        lent = spend.grant_keys(sorted(windows))
        publications, saved = self._jobs.publish(progress, end, lent, job=self._name_job("steps"))
        self._sender.send(publications)
        self._sender.arrived(all_of_them=True)
        progress.advance(end, chain, saved, finished=end == schedule.steps)
        self._save()
        self._clean()
        self.steps_done = end
        self._windows.settle(end)
        if self._storage.directory is not None:
            self._storage.directory.log.forget_before(end)
        return [publication.table for publication in publications]

    def _log(self, end: int) -> bytes:
        """Make the input of the steps up to `end` durable; the chain of digests that it ends."""
        progress = self._progress
        contents = (
            step_content(step, progress.digests.get(step, (0, 0)))
            for step in range(progress.step, end)
        )
        return self._storage.log_steps(progress.step, contents, progress.chain)

    def _name_job(self, name: str) -> str:
        """A name that no other job of the run has, also after a kill."""
        self._progress.jobs += 1
        return f"{self._progress.jobs}-{name}-{self._nonce}"

    def _save(self) -> None:
        self._progress.save(self._path)

    def _clean(self) -> None:
        """Remove what is over, and what was left by tasks whose output was not accepted."""
        needed, files = self._progress.names(), self._jobs.files
        present = [*files.names("rows"), *files.names("state")]
        files.remove(name for name in present if name not in needed)

    def _close_ends(self) -> None:
        for end in (self.source, self.history, self.sink):
            if end is not None and not is_frame(end):
                end.close()


@dataclass(kw_only=True)
class Intake:
    """Takes the rows of one run in: read by executors, hashed, written where their step finds them.

    What was taken in is named in the run's progress before its source moves on, so no row is lost
    or taken twice. Rows of a bounded input belong to the step of their own event time; rows of a
    live one belong to the first step whose time is not over when they are read.
    """

    jobs: Jobs
    progress: DriverProgress
    save: Callable[[], None]
    operator: OperatorCounts
    name_job: Callable[[str], str]
    reader: RowReader
    """Knows the types of unit and keys, once something was read."""
    arrival_step: Callable[[], int | None]
    """The step of rows that arrive now; None: their event times tell."""
    checkpoint: str
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
                self._take(None, source, new, "files", self.arrival_step())
                self.progress.read += new
                self.save()

    def learn(self, source: Any, partitions: Sequence[str]) -> None:
        """Fix the types of unit and keys by what the source declares."""
        if self.reader.query.privacy_unit_column in self.reader.types:
            return
        if is_frame(source):
            self.reader.learn(declared_types(source))
        elif partitions:
            self.reader.learn(source.columns(partitions[0]))

    def stream(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        """Begin to read a stream where it was left."""
        writer = self._wanted(frame).writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", self.checkpoint)
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
        arrived = self.arrival_step()
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
        result = self.jobs.take(frame, source, partitions, job=job, where=name, arrived=arrived)
        for note in sorted(result.chunks, key=lambda note: str(note["chunk"])):
            self.operator.reject(note["chunk"], [Rejected(**row) for row in note["rejected"]])
            self.operator.count(**note["counts"])
        progress = self.progress
        progress.waiting = [*progress.waiting, *result.waiting]
        progress.digests = add_digests([progress.digests, result.digests])
        return result.digests


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


def declared_types(frame: DataFrame) -> Types:
    """The types of a frame's columns."""
    return {column.name: column.type for column in arrow_schema(frame)}


def _check_frame(frame: DataFrame, query: Query) -> None:
    """Refuse a frame that has other columns before anything is paid for."""
    for name in query.source_columns:
        if name not in frame.columns:
            raise InvalidInput(
                f"the DataFrame has no column {name!r}; it has {', '.join(frame.columns)}"
            )


def _check_end(source: Any, *, live: bool) -> None:
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
