"""The two kinds of Spark jobs of a run: take rows in, and publish steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dpstream.engines.spark import tasks
from dpstream.engines.spark.bucket_files import DriverProgress, SharedFiles
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
        plan = self.plan
        if prepare is not None:
            plan = NoisePlan(replace(plan.query, prepare=prepare))
        common = self._common(job, plan) | {"where": where, "arrived": arrived}
        source.close()  # open files do not travel
        if isinstance(source, FrameSource):
            frame = source.wanted(self.plan.query.source_columns)
            task = ReadTask(**common, schema=arrow_schema(frame), messages=source.messages)
            read = tasks.read_frame
        else:
            most = _TASKS * self.session.sparkContext.defaultParallelism
            size = len(partitions)
            frame = self.session.range(0, size, 1, max(min(size, most), 1))
            task = ReadTask(**common, source=source, partitions=tuple(partitions))
            read = tasks.read_source
        work = tasks.keep_rows if write else tasks.digest_rows
        return self._run(frame, task, Keys(rows=self.row_keys), read, work)[0]

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
    ) -> tuple[list[Publication], list[Note], list[tuple[int, int, bytes]]]:
        """The tables of the steps up to `end`, notes for the driver (the files that hold the new
        state, rows that were not used), and what later windows look at.

        `begins`: what windows that begin with the first step remember. `chosen`: the bounds of
        periods, where they are chosen.
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
        )
        buckets = self.session.range(0, self.buckets, 1, self.buckets)
        keys = Keys(rows=self.row_keys, lent=lent)
        notes, table = self._run(buckets, task, keys, tasks.bound, tasks.publish)
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

    def _run(
        self, frame: DataFrame, task: Task, keys: Keys, first: Work, second: Work
    ) -> tuple[list[Note], pa.Table | None]:
        """Run a job of two stages; between them rows move to their buckets.

        What its tasks share is gone from all machines afterwards.
        """
        opener, sealed = keys.seal()
        content = tasks.serializer().dumps(replace(task, opener=opener))
        shared = self.session.sparkContext.broadcast(content)
        try:
            rows = frame.mapInArrow(partial(tasks.run_task, first, shared, sealed), IN_SPARK)
            placed = rows.repartitionById(self.buckets, "bucket")
            last = placed.mapInArrow(partial(tasks.run_task, second, shared, sealed), IN_SPARK)
            return _collect(last)
        finally:
            shared.destroy()


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
    """Run it: all notes, and the rows of all packets; an error of ours comes out as itself."""
    for left in reversed(range(_TRIES)):
        try:
            notes, rows = unpack_packets(frame.toArrow().to_batches())
            return [json.loads(text) for texts in notes.values() for text in texts], rows.get(0)
        except Exception as problem:
            if left and tasks.is_passing(problem):
                _LOG.warning("an executor was lost; the job runs again, with the same result")
                continue
            meaning = tasks.translate_error(problem)
            if meaning is None:
                raise
            raise meaning from None
    raise AssertionError("the last try returns or raises")
