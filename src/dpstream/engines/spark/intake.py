"""Rows on their way in: read by executors, hashed, written where their step will find them.

Whatever was taken in is named in the run's progress before its source moves on, so no row is lost
or taken twice. Rows of a bounded input belong to the step of their own event time; rows of a live
one belong to the first step whose time is not over when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from dpstream.engines.chunks import Aside
from dpstream.engines.spark.jobs import ADAPTIVE, Jobs, arrow_schema, rejected
from dpstream.engines.spark.progress import Progress
from dpstream.engines.spark.sources import is_frame
from dpstream.engines.spark.waiting import StepDigests, added
from dpstream.errors import NoiseReuse, StateError
from dpstream.records import Source
from dpstream.stages.row_reader import RowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(kw_only=True)
class Intake:
    """Takes the rows of one run in."""

    jobs: Jobs
    progress: Progress
    save: Callable[[], None]
    aside: Aside
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
        if self.reader.query.unit in self.reader.types:
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
