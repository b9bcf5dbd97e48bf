"""The Spark engine seen from the driver: `SparkRun` takes the steps that `query_run.py` names.

Rows are hashed and written, by bucket of their unit, where their step will find them (`Intake`);
only then does Spark's own checkpoint move on. When steps come, by the clock or because all input is
there, their digests are logged durably, one job publishes them, the sink gets the tables, and the
new state is made the current one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from dpstream.engines.chunks import OperatorCounts, first_types
from dpstream.engines.clock import OverdueTriggers
from dpstream.engines.embedded.step_rows import check_columns
from dpstream.engines.query_run import QueryRun
from dpstream.engines.release_sender import Sender
from dpstream.engines.run_storage import step_content
from dpstream.engines.spark.bucket_files import (
    DriverProgress,
    SharedFiles,
    StepDigests,
    Waiting,
    add_digests,
    digests_of,
)
from dpstream.engines.spark.frame_files import (
    FrameFiles,
    files_now,
    frame_files,
    projects_files,
)
from dpstream.engines.spark.jobs import ADAPTIVE, Gathered, Jobs, Note, OpenFiles, plain_session
from dpstream.engines.spark.spark_engine import FrameSource, SparkEngine
from dpstream.engines.table_versions import TableVersions, refreshed_tables
from dpstream.errors import InvalidParameter, NoiseReuse, StateError
from dpstream.group_by.chosen_bounds import ChosenBounds, digest_of
from dpstream.group_by.remembered_keys import RememberedKeys
from dpstream.privacy.state.run_directory import ANEW, RunDirectory
from dpstream.query.column_types import Types
from dpstream.query.row_spec import Prepare
from dpstream.records import FinitePartitions, Rejected, Source
from dpstream.rows.row_batch import RejectedRows, RowKeys
from dpstream.rows.row_reader import RowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK = 0.1  # seconds between two looks at a stream that is read to its end
_STREAM = "the stream"  # among the inputs that were read to their end
_MOST_SHOWN = 4_000_000  # rows of releases that a job sends to the driver, if it can be foreseen
_MOST_GATHERED = 4_000_000  # rows of a bucket that a task takes at once: half a gigabyte


@dataclass(kw_only=True, repr=False, eq=False)
class SparkRun(QueryRun):
    """A query that runs on the session of a `SparkEngine`, and as that says."""

    spark: SparkEngine
    source: Any
    """A DataFrame, streaming or not, or one of the connectors' sources."""
    history: Any = None
    open_files: OpenFiles
    """How executors open the files of a frame that only projects them."""
    by_clock: bool = False
    """Is the source live?"""
    sink: Any = None
    engine: ClassVar[str] = "spark"
    _files: SharedFiles | None = field(init=False, default=None)
    _remembered: RememberedKeys = field(init=False)
    _chosen: ChosenBounds | None = field(init=False, default=None)
    _versions: TableVersions | None = field(init=False, default=None)
    """Of public tables that are read anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in self._sources:
            check_columns(source, self.query)
        _check_end(self.source, live=self.live)

    @property
    def live(self) -> bool:
        """Does the source go by the clock?"""
        return self.by_clock

    @property
    def _sources(self) -> list[Any]:
        return [source for source in (self.source, self.history) if source is not None]

    def erase_unit(self, unit: Any) -> int:
        """Not here."""
        raise InvalidParameter(
            "the Spark engine does not erase single units from its state; what it holds of a unit "
            "goes when its last window and period are over; to be rid of it now, delete the "
            "state directory (and state_location) and begin a new run, charged anew; runs of the "
            "embedded engine can"
        )

    def _schemas(self) -> list[Types | None]:
        columns = self.query.source_columns
        return [types for s in self._sources for types in first_types(s, columns)]

    def _default_buckets(self) -> int:
        return self.spark.buckets or 2 * self.spark.session.sparkContext.defaultParallelism

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
        path = folder / "spark.dps"
        if directory is not None and directory.log.last >= 0 and not path.exists():
            raise StateError(
                f"{path} is missing: it says how far the run is, and which files hold its "
                f"state; restore it, or {ANEW}"
            )
        self._progress = DriverProgress.load(path, storage.run_tag)
        self._remembered = RememberedKeys(most=self.query.remembered_keys)
        if self._progress.remembered:
            self._remembered.restore(self._progress.remembered)
        self._chosen = ChosenBounds.of(self.query)
        if self._chosen is not None and "published" in self._progress.chosen:
            self._chosen.restore(self._progress.chosen)
        self.steps_done = self._progress.step
        shared = self.spark.state_location or str(folder.absolute() / "shared")
        location = f"{shared}/{storage.run_tag}"  # a run meets nothing that another has left
        self._files = SharedFiles(location)
        if directory is None:
            undo.callback(self._files.remove_all)  # nobody can go on with it
        self._jobs = Jobs(
            session=plain_session(self.spark.session),
            plan=self.plan,
            types=self._reader.types,
            buckets=storage.buckets,
            files=self._files,
            row_keys=RowKeys.of(storage.secret, storage.run),
            run_tag=storage.run_tag,
            open_files=self.open_files,
        )
        if refreshed_tables(self.query):
            self._versions = TableVersions(self.query, self.folder, self.operator)
            for step, tables in (
                (self._progress.batch_arrived or 0, self._progress.batch_tables),
                (self._progress.tables_step + 1, self._progress.tables),
            ):
                self._versions.go_on_from({"step": step, "tables": tables})
        self._intake = Intake(
            versions=self._versions,
            jobs=self._jobs,
            progress=self._progress,
            operator=self.operator,
            reader=self._reader,
            arrival_step=self._arrival_step,
            checkpoint=f"{location}/stream",
        )
        for source in self._sources:
            self._intake.learn(source, source.partitions())
        self._windows.settle(self.steps_done)
        self._sender = Sender(self.sink, self.query.name, 0)
        undo.callback(self._sender.close)
        self._clean()

    def _publish_steps(self) -> Iterator[pa.Table]:
        """Take in what has an end; then publish by the clock, or many steps at once."""
        with ExitStack() as shuffles:
            gathered = self._take_in(shuffles)
            if self.live:
                yield from self._by_the_clock()
                return
            steps, at_once = self.query.schedule.steps, self.spark.steps_at_once
            assert steps is not None
            while self.steps_done < steps and not self.stopped.is_set():
                end = self._until(min(self.steps_done + at_once, steps))
                tables = self._publish(end, gathered)
                shuffles.close()
                yield from tables
                shown = max((len(table) for table in tables), default=0)
                at_once = max(1, min(self.spark.steps_at_once, _MOST_SHOWN // max(shown, 1)))

    def _take_in(self, shuffles: ExitStack) -> Gathered | None:
        """Read all inputs that have an end; their rows wait in files for their steps.

        The rows of a single input that one job publishes whole need not be written and read once
        more: they stay in the shuffle that brings them together, and are read anew after a kill.
        """
        progress, several = self._progress, {"history": self.history, "source": self.source}
        inputs = {name: one for name, one in several.items() if one is not None and one.bounded}
        if not self.live and isinstance(self.source, FrameSource):
            name = "source" if self.source.bounded else _STREAM
            files = None if name in progress.read else self._intake.list_files(self.source)
            if files is not None:
                inputs[name] = files
        inputs = {name: one for name, one in inputs.items() if name not in progress.read}
        if len(inputs) == 1 and self._is_one_job():
            ((name, source),) = inputs.items()
            return self._intake.gather(name, source, shuffles)
        for name, source in inputs.items():
            self._intake.take_all(name, source)
        if not self.live and _is_stream(self.source) and _STREAM not in progress.read:
            self._read_stream()
        return None

    def _is_one_job(self) -> bool:
        """Does the next job publish all steps, of rows that are not read yet?"""
        steps = self.query.schedule.steps
        if self.live or steps is None or self._progress.waiting:
            return False
        return self._until(min(self.steps_done + self.spark.steps_at_once, steps)) == steps

    def _until(self, end: int) -> int:
        """The end of a job that begins now: a window begins with what earlier steps tell."""
        opens = self.query.schedule.opens_windows
        if not self.query.begins_with_tables:
            return end
        return next((step for step in range(self.steps_done + 1, end) if opens(step)), end)

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
        self._progress.save()

    def _by_the_clock(self) -> Iterator[pa.Table]:
        """Steps at their times, with data or without: the driver's clock is the heartbeat."""
        schedule, source = self.query.schedule, self.source
        overdue = OverdueTriggers(self.clock, self.stopped, self.options.overdue_at_once)
        query = None
        if isinstance(source, FrameSource):
            query = self._intake.stream(source, processingTime=self.spark.batch_every)
        try:
            while self.steps is None or self.steps_done < self.steps:
                time = schedule.time_of(self.steps_done)
                assert time is not None
                overdue.pace(time)
                with self._intake.lock:
                    self._intake.begin_tables(self.steps_done)
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

    def _publish(self, end: int, gathered: Gathered | None = None) -> list[pa.Table]:
        """Log the steps' input, draw, send, and make the new state the current one."""
        progress, schedule = self._progress, self.query.schedule
        spend, directory = self._charge(), self._storage.directory
        first, left_out = progress.step, self._left_out
        new = [due.window for due in schedule.due(first) if due.release == 1]
        new = [window for window in new if not any(window in some for some in left_out)]
        begins, digests = self._remembered.begin(new if self.query.remembered_keys else [])
        if self._chosen is not None:
            bounds = self._chosen.begin(self.plan, new)
            digests = {w: digest_of(digests.get(w, b""), bounds[w]) for w in bounds}
        contents = (
            step_content(step, progress.digests.get(step, (0, 0))) for step in range(first, end)
        )
        *_, chain = self._storage.log_steps(progress.step, contents, progress.chain)
        for window, digest in digests.items():
            self._storage.keys.note_content(window, digest)
        spend.begin(end - 1)
        steps = range(progress.step, end)
        windows = {
            due.window
            for step in steps
            for due in schedule.due(step)
            if not any(due.window in some for some in left_out)
        }
        self._windows.add(*windows)
        lent = spend.grant_keys(sorted(windows))
        publications, told, earlier = self._jobs.publish(
            progress,
            end,
            lent,
            job=progress.name_job("steps"),
            remembered=self._remembered,
            begins=begins,
            chosen=self._chosen,
            gathered=gathered,
        )
        saved = [note for note in told if "stage" in note]
        self._intake.tell_operator(note for note in told if "chunk" in note)
        self._sender.send(publications)
        self._sender.arrived(all_of_them=True)
        progress.earlier = earlier
        progress.remembered = self._remembered.save() if self.query.remembered_keys else {}
        progress.chosen = {} if self._chosen is None else self._chosen.save()
        if self._chosen is not None:
            progress.chosen["bounds"] = self._chosen.newest(self.query)
        progress.advance(end, chain, saved, finished=end == schedule.steps)
        progress.save()
        self._clean()
        self.steps_done = end
        self._windows.settle(end)
        if self._versions is not None:
            needed = {"step": progress.tables_step + 1, "tables": progress.batch_tables}
            self._versions.settle(needed)
        if directory is not None:
            directory.settle(end, endless=self.live)
        return [publication.table for publication in publications]

    def _clean(self) -> None:
        """Remove what is over, and what was left by tasks whose output was not accepted."""
        needed, files = self._progress.names(), self._jobs.files
        present = [*files.names("rows"), *files.names("state")]
        files.remove(name for name in present if name not in needed)


@dataclass(kw_only=True)
class Intake:
    """Takes the rows of one run in: read by executors, hashed, written where their step finds them.

    What was taken in is named in the run's progress before its source moves on, so no row is lost
    or taken twice. Rows of a bounded input belong to the step of their own event time; rows of a
    live one belong to the first step whose time is not over when they are read.
    """

    jobs: Jobs
    progress: DriverProgress
    operator: OperatorCounts
    reader: RowReader
    """Knows the types of unit and keys, once something was read."""
    arrival_step: Callable[[], int | None]
    """The step of rows that arrive now; None: their event times tell."""
    checkpoint: str
    """Where Spark keeps its own checkpoint of the stream."""
    versions: TableVersions | None = None
    """Of public tables that are read anew between triggers."""
    lock: Lock = field(default_factory=Lock)
    """Held while rows are taken in, and while a step is published."""
    failure: BaseException | None = field(init=False, default=None)
    _stream: FrameSource | None = field(init=False, default=None)

    def take_all(self, name: str, source: Any) -> None:
        """Read a bounded input, once for all."""
        if name in self.progress.read:
            return
        self._take(source, source.partitions(), name, None)
        self.progress.read.append(name)
        self.progress.save()

    def list_files(self, source: FrameSource) -> FrameFiles | None:
        """The files that a frame has by now, which are read in its place; None if it may have
        other rows than they. The list stays as it is after a kill."""
        if source.messages is not None:
            return None
        progress, wanted = self.progress, source.wanted(self.jobs.plan.query.source_columns)
        if not progress.listed:
            find = frame_files if source.bounded else files_now
            paths = find(wanted) if progress.batch < 0 else None
            if paths is None:
                return None
            progress.listed = paths
            progress.save()
        return self.jobs.files_of(wanted, progress.listed)

    def gather(self, name: str, source: Any, shuffles: ExitStack) -> Gathered | None:
        """Read a bounded input into a shuffle, for a job that publishes all of it.

        None if there is too much of it, or nothing: then its rows wait in files.
        """
        progress = self.progress
        how: dict[str, Any] = {"job": progress.name_job(name.replace(" ", "-")), "where": name}
        progress.save()  # it is there before anything is logged: without it a log is of a lost run
        gathered, notes = self.jobs.gather(source, source.partitions(), **how, undo=shuffles)
        self._tell(notes)
        progress.read.append(name)
        if gathered.whole and gathered.most_rows <= _MOST_GATHERED:
            progress.digests = add_digests([progress.digests, *gathered.digests.values()])
            return gathered  # nothing is saved: after a kill it is read again
        self._let_wait(gathered.keep())
        progress.save()
        return None

    def begin_tables(self, step: int) -> None:
        """Read what tables are due up to a step; the rows that it takes in will meet them."""
        progress, versions = self.progress, self.versions
        if versions is None or step <= progress.tables_step:
            return
        for each in range(progress.tables_step + 1, step + 1):
            versions.begin(each, None)
        progress.tables_step, progress.tables = step, versions.save()
        progress.save()  # what rows have met is known before they are taken in

    def look(self, source: Source) -> None:
        """Read the files that have come into a directory since the last time."""
        known = set(self.progress.read)
        new = [name for name in source.partitions() if name not in known]
        if new:
            self.learn(source, new)
            with self.lock:
                self._take(source, new, "files", self.arrival_step())
                self.progress.read += new
                self.progress.save()

    def learn(self, source: Any, partitions: Sequence[str]) -> None:
        """Fix the types of unit and keys by what the source declares."""
        if self.reader.query.privacy_unit_column not in self.reader.types:
            for types in first_types(source, self.reader.query.source_columns, partitions):
                self.reader.learn(types)

    def stream(self, source: FrameSource, **trigger: Any) -> StreamingQuery:
        """Begin to read a stream where it was left."""
        wanted = source.wanted(self.jobs.plan.query.source_columns)
        of_files = source.messages is None and projects_files(wanted)
        self._stream = replace(source, of_files=of_files)
        writer = wanted.writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", self.checkpoint)
        return writer.trigger(**trigger).start()

    def raise_failure(self, query: StreamingQuery) -> None:
        """What has gone wrong in the stream, if anything has."""
        if self.failure is not None:
            raise self.failure
        problem = query.exception()
        if problem is not None:
            raise problem

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
        assert self._stream is not None
        source = replace(self._stream, frame=frame)
        progress, where = self.progress, f"batch {number}"
        if number < progress.batch:
            raise NoiseReuse(
                f"the stream begins again with batch {number}, and batch {progress.batch} was read "
                "before; restore the stream's checkpoint, or use a new state directory (a new run)"
            )
        arrived = progress.batch_arrived if number == progress.batch else self.arrival_step()
        if number == progress.batch:
            notes = self.jobs.take(
                source,
                [],
                job="",
                where=where,
                arrived=arrived,
                write=False,
                prepare=self._prepare(arrived, progress.batch_tables),
            )
            if _digests_of(notes) != progress.batch_digests:
                raise NoiseReuse(
                    f"{where} was read before with other rows; the same noise over other data "
                    "would reveal the difference, so nothing was published; use a source that can "
                    "be read again"
                )
            return
        if number > progress.batch + 1:
            raise StateError(
                f"the stream goes on with batch {number}, and batch {progress.batch + 1} was never "
                "taken in: the run's progress is older than the stream's checkpoint; restore the "
                "newest spark.dps, or use a new state directory (a new run, charged anew)"
            )
        digests = self._take(source, [], where, arrived)
        progress.batch, progress.batch_digests = number, digests
        progress.batch_arrived, progress.batch_tables = arrived, progress.tables
        progress.save()

    def _take(
        self, source: Any, partitions: list[str], name: str, arrived: int | None
    ) -> StepDigests:
        progress = self.progress
        if arrived is not None:
            self.begin_tables(arrived)
        job = progress.name_job(name.replace(" ", "-"))
        prepare = self._prepare(arrived, progress.tables)
        how: dict[str, Any] = {"job": job, "where": name, "arrived": arrived, "prepare": prepare}
        notes = self.jobs.take(source, partitions, **how)
        self._tell(notes)
        return self._let_wait(notes)

    def _let_wait(self, notes: list[Note]) -> StepDigests:
        """Name the files of rows that were written, and what is in them."""
        progress, digests = self.progress, _digests_of(notes)
        progress.waiting += [Waiting(*note["file"]) for note in notes if "file" in note]
        progress.digests = add_digests([progress.digests, digests])
        return digests

    def _tell(self, notes: list[Note]) -> None:
        """Tell the operator what became of rows and files that are not used."""
        self.tell_operator(note for note in notes if "chunk" in note)
        for note in notes:
            if "quarantined" in note:
                self.operator.quarantine(note["quarantined"], note["mark"])

    def _prepare(self, arrived: int | None, digests: dict[str, str]) -> Prepare | None:
        """What rows are prepared with that meet these versions; None: the query's own.

        Rows of files that are divided by event time meet the tables that the run began with.
        """
        if self.versions is None or arrived is None or not digests:
            return None
        return self.versions.prepared_as(digests, arrived)

    def tell_operator(self, notes: Iterable[Note]) -> None:
        """Count and keep the rows that are not used."""
        for note in sorted(notes, key=lambda note: str(note["chunk"])):
            rejected = [Rejected(**row) for row in note["unused"].pop("rejected")]
            self.operator.reject(note["chunk"], rejected)
            self.operator.count(note["read"], RejectedRows(**note["unused"]))


def _digests_of(notes: list[Note]) -> StepDigests:
    return add_digests(digests_of(note["digests"]) for note in notes if "digests" in note)


def _is_stream(source: Any) -> bool:
    return isinstance(source, FrameSource) and not source.bounded


def _check_end(source: Any, *, live: bool) -> None:
    """A live run needs a source that goes on; any other one that ends, or a stream of Spark's."""
    grows = isinstance(source, FinitePartitions) and source.partitions_end
    bounded = source is None or source.bounded
    name = type(source.frame if isinstance(source, FrameSource) else source).__name__
    if live and not (_is_stream(source) or grows):
        raise InvalidParameter(
            "a live run on Spark reads a streaming DataFrame (session.readStream...) or a "
            f"directory that grows; got {name}{', which is bounded' if bounded else ''}"
        )
    if not live and not _is_stream(source) and not bounded:
        raise InvalidParameter(
            f"{name} has no end; use Spark's own reader for it (session.readStream...)"
        )
