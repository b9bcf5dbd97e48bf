"""The two kinds of Spark jobs of a run: take rows in, and publish steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from dpstream.engines.spark import tasks
from dpstream.engines.spark.bucket_files import (
    DriverProgress,
    SharedFiles,
    StepDigests,
    add_digests,
    digests_of,
)
from dpstream.engines.spark.frame_files import FrameFiles, batch_files, frame_files
from dpstream.engines.spark.shuffle_rows import IN_SPARK, Shape, ids, numbers, unpack_packets
from dpstream.engines.spark.spark_engine import FrameSource, arrow_schema
from dpstream.engines.spark.tasks import Keys, PublishTask, ReadTask, ShippedPlan, Task, Work
from dpstream.errors import StateError
from dpstream.group_by.chosen_bounds import ChosenBounds, period_of
from dpstream.group_by.flow import Publication
from dpstream.group_by.release_table import ReleaseTables
from dpstream.group_by.remembered_keys import Known, RememberedKeys, is_taken_in
from dpstream.privacy.query_spend import WindowKeyGrant
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.row_spec import Prepare
from dpstream.records import Integers, Source, Words
from dpstream.rows.row_batch import RowKeys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOG = logging.getLogger("dpstream.spark")
_TRIES = 5  # of a job that loses executors at bad moments
_TASKS = 4  # that read files, for each core: a task costs as much as ten thousand rows

T = TypeVar("T")
OpenFiles = Callable[[Sequence[Path]], Source]
"""Opens local files as a source."""
Note = dict[str, Any]
"""What a task tells the driver."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Runs the jobs of one query on a session."""

    session: SparkSession
    """As `plain_session` makes it."""
    plan: NoisePlan
    types: dict[str, pa.DataType]
    buckets: int
    files: SharedFiles
    row_keys: RowKeys = field(repr=False)
    run_tag: str
    open_files: OpenFiles

    def files_of(self, frame: DataFrame, paths: Sequence[str]) -> FrameFiles:
        """The files of a frame that only projects them."""
        return FrameFiles(self.open_files([Path(path) for path in paths]), arrow_schema(frame))

    def take(
        self,
        source: FrameSource | Source,
        partitions: Sequence[str],
        *,
        job: str,
        where: str,
        arrived: int | None,
        write: bool = True,
        prepare: Prepare | None = None,
    ) -> list[Note]:
        """Read rows and write them where their steps will find them; or only tell digests.

        `prepare`: in place of the query's own, with other versions of its tables.
        """
        how: dict[str, Any] = {"where": where, "arrived": arrived, "prepare": prepare}
        frame, task, read = self._reading(source, partitions, job=job, **how)
        work = tasks.keep_rows if write else tasks.digest_rows
        with self._doing(task, Keys(rows=self.row_keys)) as done:
            return _collect(done(work, self._placed(done(read, frame))))[0]

    def gather(
        self,
        source: FrameSource | Source,
        partitions: Sequence[str],
        *,
        job: str,
        where: str,
        undo: ExitStack,
    ) -> tuple[Gathered, list[Note]]:
        """Read the rows of a bounded input into a shuffle, which is there until `undo` is closed.

        Only notes come to the driver: nothing is sent to Python for them.
        """
        how: dict[str, Any] = {"where": where, "arrived": None, "prepare": None}
        frame, task, read = self._reading(source, partitions, job=job, **how)
        task = replace(task, tells=True)
        done = undo.enter_context(self._doing(task, Keys(rows=self.row_keys)))
        placed = once(self._placed(done(read, frame)))
        told = _collect(placed.where("note is not null"))[0]
        digests = dict[int, StepDigests]()
        for bucket, listed in _told(told, "gathered"):
            digests[bucket] = add_digests([digests.get(bucket, {}), digests_of(listed)])
        whole = len(set(_told(told, "reaches"))) == self.buckets
        return Gathered(frame=placed, digests=digests, whole=whole, done=done), told

    def _reading(
        self,
        source: FrameSource | Source,
        partitions: Sequence[str],
        *,
        job: str,
        where: str,
        arrived: int | None,
        prepare: Prepare | None,
    ) -> tuple[DataFrame, ReadTask, Work]:
        """The rows that a job begins with, and what reads them."""
        plan = self.plan
        if prepare is not None:
            plan = NoisePlan(replace(plan.query, prepare=prepare))
        common = self._common(job, plan) | {"where": where, "arrived": arrived}
        if isinstance(source, FrameSource):
            frame, paths = source.wanted(self.plan.query.source_columns), None
            if source.messages is None:
                paths = batch_files(frame) if source.of_files else frame_files(frame)
            if paths is None:
                read = ReadTask(**common, schema=arrow_schema(frame), messages=source.messages)
                return frame, read, tasks.read_frame
            source = self.files_of(frame, paths)
            partitions = source.partitions()
        source.close()  # open files do not travel
        most = _TASKS * self.session.sparkContext.defaultParallelism
        size = len(partitions)
        frame = self.session.range(0, size, 1, max(min(size, most), 1))
        task = ReadTask(**common, source=source, partitions=tuple(partitions))
        return frame, task, tasks.read_source

    def publish(
        self,
        progress: DriverProgress,
        end: int,
        lent: WindowKeyGrant,
        *,
        job: str,
        remembered: RememberedKeys,
        begins: Mapping[int, Known],
        chosen: ChosenBounds | None = None,
        gathered: Gathered | None = None,
    ) -> tuple[list[Publication], list[Note], list[tuple[int, int, bytes]]]:
        """The tables of the steps up to `end`, notes for the driver (the files that hold the new
        state, rows that were not used), and what later windows look at.

        `begins`: what windows that begin with the first step remember. `chosen`: the bounds of
        periods, where they are chosen. `gathered`: all rows, where none waits in files.
        """
        first, query = progress.step, self.plan.query
        schedule = query.schedule
        due = [(step, release) for step in range(first, end) for release in schedule.due(step)]
        of_periods = {} if chosen is None else chosen.of_periods
        bounds = [each for each, _ in of_periods.values()]
        plan = ShippedPlan.of(self.plan, (release for _, release in due), bounds)
        task = PublishTask(
            **self._common(job, plan),
            first=first,
            end=end,
            waiting=[w for w in progress.waiting if w.first < end],
            units=progress.units,
            groups=progress.groups,
            begins=begins,
            remembered=remembered.of_windows,
            chosen=of_periods,
            gathered=None if gathered is None else gathered.digests,
        )
        with self._doing(task, Keys(rows=self.row_keys, lent=lent)) as done:
            if gathered is None:
                buckets = self.session.range(0, self.buckets, 1, self.buckets)
                rows = done(tasks.bound, buckets)
            else:
                rows = done(tasks.bound_gathered, gathered.frame)
            notes, table = _collect(done(tasks.publish, self._placed(rows)))
        saved = [note for note in notes if "stage" in note]
        places = {(note["stage"], note["bucket"]) for note in saved}
        if not len(saved) == len(places) == 2 * self.buckets:
            raise StateError(
                f"{2 * self.buckets} buckets were to be saved, and {len(saved)} were; nothing was "
                "published; run again"
            )
        totals = {(step, window): tuple(noisy) for step, window, *noisy in _told(notes, "totals")}
        histograms = {window: bins for window, *bins in _told(notes, "histogram")}
        noisy = _noisy(task.shape, table)
        tables = ReleaseTables(plan=self.plan, types=self.types, run_tag=self.run_tag)
        tables.restore_earlier(progress.earlier)
        none = np.zeros((0, 2), np.uint64)
        nothing = (none, np.zeros((0, task.shape.measures), np.int64), None)
        publications = []
        for step, release in due:
            if release.window not in lent.keys:
                continue  # it was abandoned
            shown, sums, groups = noisy.get((step, release.window), nothing)
            if query.remembered_keys and is_taken_in(query, step, release):
                final, sizes = release.release == release.releases, sums[:, query.sized_by]
                remembered.take_in(release.window, shown, groups, sizes, final=final)
            of_window = totals.get((step, release.window), ())
            told = None if chosen is None else chosen.describe(query, release.window)
            known = None if chosen is None else chosen.bounds_of(query, release.window)
            bounded = None if known is None else self.plan.of_bounds(known)
            of_bounds: dict[str, Any] = {"chosen": told, "bounded": bounded}
            table = tables.table(step, release, sums, groups, of_window, **of_bounds)
            publications.append(Publication(due=release, table=table))
            if chosen is not None and release.release == release.releases:
                chosen.take_in_table(self.plan, release.window, sums)
                if release.window in histograms:
                    bins = histograms[release.window]
                    chosen.take_in_histogram(query, period_of(query, release.window), bins)
        of_rows = [note for note in notes if "unused" in note]
        return publications, saved + of_rows, tables.save_earlier()

    def _common(self, job: str, plan: NoisePlan) -> dict[str, Any]:
        common = {"types": self.types, "buckets": self.buckets, "files": self.files}
        return common | {"plan": plan, "job": job}

    def _placed(self, rows: DataFrame) -> DataFrame:
        """Between two stages rows move to their buckets."""
        return rows.repartitionById(self.buckets, "bucket")

    @contextmanager
    def _doing(self, task: Task, keys: Keys) -> Iterator[Done]:
        """Does work in tasks; what they share is gone from all machines afterwards."""
        opener, sealed = keys.seal()
        content = tasks.serializer().dumps(replace(task, opener=opener))
        shared = self.session.sparkContext.broadcast(content)
        try:
            yield lambda work, frame: frame.mapInArrow(
                partial(tasks.run_task, work, shared, sealed), IN_SPARK
            )
        finally:
            shared.destroy()


Done = Callable[[Work, "DataFrame"], "DataFrame"]
"""What a stage makes of the rows that come to it."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """All rows of a bounded input, hashed, in a shuffle by bucket of their unit."""

    frame: DataFrame = field(repr=False)
    digests: dict[int, StepDigests]
    """By bucket: what was told of its rows."""
    whole: bool
    """Does a stage behind it come to every bucket?"""
    done: Done = field(repr=False)

    @property
    def most_rows(self) -> int:
        """Of one bucket."""
        counts = (sum(n for _, n in steps.values()) for steps in self.digests.values())
        return max(counts, default=0)

    def keep(self) -> list[Note]:
        """Write the rows where their steps will find them."""
        return _collect(self.done(tasks.keep_rows, self.frame))[0]


def once(placed: DataFrame) -> DataFrame:
    """A frame behind the shuffle that `placed` ends with: several jobs share it.

    Spark plans a frame anew for each job that is made of it, and every plan has shuffles of its
    own; rows of one plan's execution have one.
    """
    session, planned = placed.sparkSession, placed._jdf.queryExecution()
    rows = _run(planned.toRdd)  # with adaptive execution this makes the shuffle, else the next job
    behind = session._jsparkSession.internalCreateDataFrame(rows, placed._jdf.schema(), False)
    return type(placed)(behind, session)


def _told(notes: Sequence[Note], name: str) -> list[Any]:
    """What all notes of a kind tell."""
    return [note[name] for note in notes if name in note]


def _noisy(
    shape: Shape, table: pa.Table | None
) -> dict[tuple[int, int], tuple[Words, Integers, pa.Table]]:
    """What is shown, by step and window: ids, sums, keys; oldest appearance first, then by id."""
    if table is None:
        return {}
    words, since = ids(table, "group"), numbers(table, "since")
    steps, windows = numbers(table, "step"), numbers(table, "window")
    order = np.lexsort((words[:, 1], words[:, 0], since, windows, steps))
    table, steps, windows = table.take(pa.array(order)), steps[order], windows[order]
    edges = np.flatnonzero((np.diff(steps) != 0) | (np.diff(windows) != 0)) + 1
    words, sums, keys = words[order], shape.sums(table), shape.keys_of(table)
    return {
        (int(steps[a]), int(windows[a])): (words[a:b], sums[a:b], keys.slice(a, b - a))
        for a, b in zip([0, *edges], [*edges, len(steps)], strict=True)
    }


ADAPTIVE = "spark.sql.adaptive.enabled"


def plain_session(session: SparkSession) -> SparkSession:
    """A session beside the caller's own, whose jobs run as they are written.

    Adaptive execution would make a job of every stage, to look at its sizes before the next one:
    ours are fixed, and it may not change them.
    """
    beside = session.newSession()
    beside.conf.set(ADAPTIVE, "false")
    type(session)(session.sparkContext, session._jsparkSession)  # RDD.toDF is the caller's again
    return beside


def _collect(frame: DataFrame) -> tuple[list[Note], pa.Table | None]:
    """Run it: all notes, and the rows of all packets."""
    notes, rows = _run(lambda: unpack_packets(frame.toArrow().to_batches()))
    return [json.loads(text) for texts in notes.values() for text in texts], rows.get(0)


def _run(job: Callable[[], T]) -> T:
    """Run a job of Spark's; an error of ours comes out as itself."""
    for left in reversed(range(_TRIES)):
        try:
            return job()
        except Exception as problem:
            if left and tasks.is_passing(problem):
                _LOG.warning("an executor was lost; the job runs again, with the same result")
                continue
            meaning = tasks.translate_error(problem)
            if meaning is None:
                raise
            raise meaning from None
    raise AssertionError("the last try returns or raises")
