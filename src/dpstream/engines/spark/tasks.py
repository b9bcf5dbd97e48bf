"""What executors do: take rows in, bound contributions, latch keys, add noise.

A first job reads rows, hashes them, divides them by bucket of the unit, and writes them where they
wait, or leaves them in Spark's shuffle if the next job takes all of them. A second one publishes
steps: stage 1 by bucket of units, stage 2 by bucket of groups. The stages themselves are the
embedded engine's (`group_by/flow.py`), on the state of one bucket.

Spark wraps whatever a task raises into pages of two languages' stacks. An error of ours travels
through them as one line of JSON, and comes out with its type and its message.
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa

from dpstream import errors
from dpstream.engines.spark import bucket_files
from dpstream.engines.spark.bucket_files import (
    Chain,
    SharedFiles,
    StepDigests,
    Waiting,
    add_digests,
)
from dpstream.engines.spark.shuffle_rows import (
    Shape,
    by_number,
    ids,
    notes,
    numbers,
    packed_ids,
    packets,
    unpack_packets,
)
from dpstream.engines.spark.spark_engine import MessageReader
from dpstream.errors import DpstreamError, MissingDependency, NoiseReuse, StateError
from dpstream.group_by.flow import Flow
from dpstream.group_by.groups import sum_groups
from dpstream.group_by.hash_tables import in_buckets
from dpstream.group_by.perturb import NoisySums
from dpstream.group_by.remembered_keys import FirstWords, Known
from dpstream.privacy.query_spend import WindowKeyGrant
from dpstream.privacy.state.secret import seal, unseal
from dpstream.query.noise_plan import NoisePlan, WindowPlan
from dpstream.query.period_bounds import PeriodBounds
from dpstream.query.schedule import DueRelease
from dpstream.records import Batch, CheckedSource, Source, Words
from dpstream.rows.row_batch import RejectedRows, RowKeys, Rows, in_order
from dpstream.rows.row_ids import multiset_digest
from dpstream.rows.row_reader import RowReader

_LOG: Final = logging.getLogger("dpstream.spark")
_ROWS = 1 << 16  # rows that are read at a time

Batches = Iterator[pa.RecordBatch]
Work = Callable[[Any, Batches], Batches]
"""One stage of a job: a task, and what comes to it."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tasks need that nobody else may see.

    They travel sealed in a task's function, from memory to memory, and what opens them as a
    broadcast, which is a file on every machine for a while: neither alone says anything.
    """

    rows: RowKeys
    lent: WindowKeyGrant | None = None

    def seal(self) -> tuple[bytes, bytes]:
        """(what opens them, the sealed keys)."""
        return seal([asdict(self.rows), None if self.lent is None else asdict(self.lent)])

    @classmethod
    def unseal(cls, opener: bytes, sealed: bytes) -> Keys:
        """As they were."""
        rows, lent = unseal(opener, sealed)
        return cls(rows=RowKeys(**rows), lent=None if lent is None else WindowKeyGrant(**lent))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all tasks of a job are told; public."""

    plan: NoisePlan
    types: dict[str, pa.DataType]
    buckets: int
    files: SharedFiles
    job: str
    """Names the files that this job writes; no other job has it."""
    opener: bytes = field(default=b"", repr=False)
    """Opens the keys."""
    keys: Keys | None = field(default=None, repr=False)
    """Added where the task is done."""

    @property
    def shape(self) -> Shape:
        """The columns that pass between tasks."""
        return Shape(self.plan.query)

    @property
    def source_shape(self) -> Shape:
        """The same for rows that were read, and have not been bounded."""
        return Shape.of_source(self.plan.query)

    def reader(self) -> RowReader:
        """Reads rows with the run's keys."""
        assert self.keys is not None
        return RowReader.with_keys(self.plan.query, self.keys.rows, self.types)

    def flow(self, bucket: int) -> Flow:
        """The stages, for one bucket."""
        share = (bucket, self.buckets)
        return Flow(self.plan, self.reader(), buckets=1, threads=1, share=share)

    def divide(self, table: pa.Table, words: Words) -> Iterator[tuple[int, pa.Table]]:
        """A table's rows by the bucket of an id."""
        places = in_buckets(words, self.buckets)
        sorted_table = table.take(pa.array(np.concatenate(places)))
        first = 0
        for bucket, mine in enumerate(places):
            yield bucket, sorted_table.slice(first, len(mine))
            first += len(mine)


@dataclass(frozen=True, kw_only=True)
class ReadTask(Task):
    """Rows of a frame (`schema` says what it declares) or of the partitions of a source."""

    where: str
    arrived: int | None
    schema: pa.Schema | None = None
    messages: MessageReader | None = None
    """How the frame's rows, which are messages, become rows of the query."""
    source: Source | None = None
    partitions: tuple[str, ...] = ()
    tells: bool = False
    """Says with its rows what they are, for they stay in the shuffle."""


@dataclass(frozen=True, kw_only=True)
class PublishTask(Task):
    """Steps `first` to `end` - 1, from waiting rows and chains of state to noisy sums."""

    first: int
    end: int
    waiting: Sequence[Waiting]
    units: Mapping[int, Chain]
    groups: Mapping[int, Chain]
    begins: Mapping[int, Known]
    """What each window that begins with the first of these steps remembers."""
    remembered: Mapping[int, FirstWords]
    """Which keys each open window remembers."""
    chosen: Mapping[int, tuple[PeriodBounds, int]]
    """The bounds of periods that have begun, where they are chosen, and since which period."""
    gathered: Mapping[int, StepDigests] | None = None
    """What was logged of each bucket's rows, where they come from a shuffle."""

    def flow(self, bucket: int) -> Flow:
        """The stages, with what the driver remembers."""
        flow = super().flow(bucket)
        if flow.remembered is not None:
            flow.remembered.of_windows = dict(self.remembered)
        if flow.chosen is not None:
            flow.chosen.of_periods = dict(self.chosen)
        return flow


@dataclass(frozen=True)
class ShippedPlan(NoisePlan):
    """A plan as the driver made it: no executor computes noise parameters of its own."""

    windows: dict[int, WindowPlan]
    of_totals: dict[int, WindowPlan]
    chosen: dict[PeriodBounds, ShippedPlan] = field(default_factory=dict)
    """By bounds, where those of periods are chosen."""
    of_histogram: WindowPlan | None = None

    @classmethod
    def of(
        cls, plan: NoisePlan, due: Iterable[DueRelease], bounds: Iterable[PeriodBounds] = ()
    ) -> ShippedPlan:
        """For a job that publishes these; its rows may enter windows that are due later.

        `bounds`: those that periods have, where they are chosen.
        """
        due = list(due)
        of_due = {release.releases for release in due}
        lengths = of_due | set(plan.query.schedule.lengths)
        totals = of_due if plan.query.totals else set()
        return cls(
            query=plan.query,
            windows={length: plan.window(length) for length in lengths},
            of_totals={length: plan.totals(length) for length in totals},
            chosen={each: cls.of(plan.of_bounds(each), due) for each in dict.fromkeys(bounds)},
            of_histogram=plan.histogram if plan.query.candidates else None,
        )

    def window(self, releases: int) -> WindowPlan:
        """The noise of a window with so many releases."""
        return self.windows[releases]

    def totals(self, releases: int) -> WindowPlan:  # type: ignore[override]
        """The noise of a window's totals."""
        return self.of_totals[releases]

    def of_bounds(self, bounds: PeriodBounds) -> ShippedPlan:
        """The noise of a period with these bounds."""
        return self.chosen[bounds]

    @property
    def histogram(self) -> WindowPlan:
        """The noise of histograms of units."""
        assert self.of_histogram is not None
        return self.of_histogram


def run_task(work: Work, shared: Any, sealed: bytes, batches: Batches) -> Batches:
    """Do a task: all that is public comes as a broadcast, the sealed keys with the function."""
    try:
        task = serializer().loads(shared.value)
        yield from work(replace(task, keys=Keys.unseal(task.opener, sealed)), batches)
    except DpstreamError as problem:
        raise TaskFailed.of(problem) from None
    _freeze_garbage(work.__name__)


_FROZEN: set[str] = set()


def _freeze_garbage(work: str) -> None:
    """Take what the first task of a kind has loaded out of the garbage collector's sight.

    A worker of Spark's collects garbage after every task. With all that Numba and Arrow keep loaded
    this takes 0.1 s of processor time, more than most tasks; what stays for good need not be
    looked at again.
    """
    if work not in _FROZEN and _context() is not None:
        _FROZEN.add(work)
        gc.collect()
        gc.freeze()


def serializer() -> Any:
    """Spark's own way to send objects: a query may hold functions that were made of its SQL."""
    return import_module("pyspark.serializers").CloudPickleSerializer()


def _context() -> Any:
    """Spark's own description of the task."""
    from pyspark import TaskContext

    return TaskContext.get()


def _attempt() -> int:
    """Different for every try of every task: the driver learns the name that was accepted.

    A copy of a task that is still at work when another was accepted, and its input is removed,
    writes where nobody looks.
    """
    task = _context()
    return 0 if task is None else int(task.taskAttemptId())  # None: not in a task of Spark's


def read_frame(task: ReadTask, batches: Batches) -> Batches:
    """Rows of a frame's partition, hashed, on their way to their units' buckets."""
    where, reader = f"{task.where}, partition {_context().partitionId()}", task.reader()
    assert task.schema is not None
    columns = task.plan.query.source_columns
    for number, table in enumerate(_gather(batches, task.schema)):
        read = Batch(table=table, position=None, done=True)
        if task.messages is not None:
            read = task.messages.batch(table, columns)
        rows, unused = reader.read(read.table, f"{where}, piece {number}", arrived=task.arrived)
        unused.rejected = [*read.rejected, *unused.rejected]
        size = len(read.table) + len(read.rejected)
        yield from _send_rows(task, rows, f"{where} {number}", unused, size)
    yield from _end(task)


def _gather(batches: Batches, schema: pa.Schema) -> Iterator[pa.Table]:
    """Batches together, in the types that the frame declares."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += len(batch)
        if size >= _ROWS:
            yield pa.Table.from_batches(held).cast(schema)
            held, size = [], 0
    if size:
        yield pa.Table.from_batches(held).cast(schema)


def read_source(task: ReadTask, batches: Batches) -> Batches:
    """Rows of a source's partitions, named by number, hashed, on their way."""
    source, reader = task.source, task.reader()
    assert source is not None
    columns = task.plan.query.source_columns
    for partition in [task.partitions[n] for b in batches for n in b["id"].to_pylist()]:
        position, done = None, False
        if isinstance(source, CheckedSource) and (
            mark := source.check(partition, columns, whole=True)
        ):
            yield notes(0, [json.dumps({"quarantined": partition, "mark": mark})])
            continue
        while not done:
            chunk = source.read(partition, position, columns=columns)
            where = partition if position is None else f"{partition} from {position}"
            rows, unused = reader.read(chunk.table, where, arrived=task.arrived)
            unused.rejected = [*chunk.rejected, *unused.rejected]
            size, name = len(chunk.table) + len(chunk.rejected), f"{partition} {position}"
            yield from _send_rows(task, rows, name, unused, size)
            position, done = chunk.position, chunk.done
    source.close()
    yield from _end(task)


def _send_rows(task: ReadTask, rows: Rows, chunk: str, unused: RejectedRows, size: int) -> Batches:
    parts = list(task.divide(task.source_shape.packed(rows), rows.units))
    yield from packets(parts, keys_of_groups=task.plan.query.per_unit is None)
    note = {"chunk": chunk, "read": size, "unused": asdict(unused)}
    yield notes(crc32(chunk.encode()) % task.buckets, [json.dumps(note)])
    if task.tells:
        for bucket, table in parts:
            if len(table):
                listed = bucket_files.listed_digests(_digests_in(table))
                yield notes(bucket, [json.dumps({"gathered": [bucket, listed]})])


def _digests_in(table: pa.Table) -> StepDigests:
    """The digest of every step's rows in a table that is sorted by step."""
    steps, words = numbers(table, "step"), ids(table, "digest")
    edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    return {int(steps[a]): multiset_digest(words[a:b]) for a, b in pairwise(edges)}


def _end(task: ReadTask) -> Batches:
    """A note for each bucket, so that the next stage comes to all of them, with rows or without."""
    if task.tells:
        for bucket in range(task.buckets):
            yield notes(bucket, [json.dumps({"reaches": bucket})])


def keep_rows(task: ReadTask, batches: Batches) -> Batches:
    """Write the rows of each unit bucket; say what was written, and pass notes on."""
    received, rows = unpack_packets(batches)
    passed = [text for texts in received.values() for text in texts]
    for bucket, table in rows.items():
        name = f"rows/{task.job}-{bucket}-{_attempt()}.arrow"
        file, digests = bucket_files.keep(task.files, task.source_shape, bucket, name, table)
        listed = bucket_files.listed_digests(digests)
        passed.append(json.dumps({"file": astuple(file), "digests": listed}))
    if passed:
        yield notes(0, passed)


def digest_rows(task: ReadTask, batches: Batches) -> Batches:
    """Only say what would be written: for rows that were written before."""
    for table in unpack_packets(batches)[1].values():
        digests = bucket_files.step_digests(in_order(task.source_shape.rows(table)))
        yield notes(0, [json.dumps({"digests": bucket_files.listed_digests(digests)})])


def bound(task: PublishTask, batches: Batches) -> Batches:
    """Stage 1, by bucket of units: keep what fits the bounds, send it to its groups' buckets."""
    for bucket in [int(n) for b in batches for n in b["id"].to_pylist()]:
        parts = [
            bucket_files.load_waiting(task.files, task.source_shape, file, task.first, task.end)
            for file in task.waiting
            if file.bucket == bucket
        ]
        yield from _bound(task, bucket, parts)


def bound_gathered(task: PublishTask, batches: Batches) -> Batches:
    """The same for rows that come from a shuffle: they must be those that were logged.

    Spark makes a part of a shuffle again if its machine is lost, and the source may be another one
    by then.
    """
    assert task.gathered is not None
    received, tables = unpack_packets(batches)
    for bucket in received:
        table = tables.pop(bucket, None)
        rows = [] if table is None else [in_order(task.source_shape.rows(table))]
        found = add_digests(bucket_files.step_digests(one) for one in rows)
        if found != task.gathered.get(bucket, {}):
            raise NoiseReuse(
                "the source gave other rows when a part of it was read again than those that were "
                "logged; the same noise over other data would reveal the difference, so nothing "
                "was published; put the source back as it was, and run again"
            )
        yield from _bound(task, bucket, rows)


def _bound(task: PublishTask, bucket: int, parts: Sequence[Rows]) -> Batches:
    flow = task.flow(bucket)
    chain = task.units.get(bucket, ())
    watermarks = bucket_files.load_segments(task.files, flow, "units", chain)
    totals: list[dict[str, Any]] = []
    of_operator: list[str] = []

    def note_unused(where: str, unused: RejectedRows) -> None:
        told = {"chunk": f"{where}, bucket {bucket}", "read": 0, "unused": asdict(unused)}
        of_operator.append(json.dumps(told))

    flow.note_unused = note_unused
    kept_rows: list[pa.Table] = []
    for step in range(task.first, task.end):
        slices = [(rows, a, b) for rows in parts for at, _, _, a, b in rows.runs if at == step]
        for window, period, rows in flow.rows_of_step(step, slices):
            reached = flow.count_reached(window, period, rows)
            if reached is not None:
                totals.append({"reached": [step, window], "counts": reached.tolist()})
            rows = flow.clamp(window, rows)
            keep_mask = flow.bound(window, period, rows)
            counts = flow.count_totals(window, period, rows, keep_mask)
            if counts is not None:
                totals.append({"total": [step, window], "counts": counts.tolist()})
            added = flow.contributions(window, rows, keep_mask)
            if flow.query.grouping_sets:
                added, keep_mask = flow.in_every_set(window, added, keep_mask)
            if keep_mask.any():
                kept_rows.append(_kept(task, added, keep_mask))
        for due in flow.query.schedule.due(step):
            if due.release == due.releases:
                flow.evict(due.window)
        flow.evict_periods(step + 1)
    yield notes(bucket, [_save(task, flow, "units", bucket, chain, watermarks)])
    if of_operator:
        yield notes(0, of_operator)
    if totals:
        yield notes(0, [json.dumps(total) for total in totals])
    if kept_rows:
        table = pa.concat_tables(kept_rows).combine_chunks()
        yield from packets(task.divide(table, ids(table, "group")))


def _kept(task: PublishTask, rows: Rows, keep_mask: Any) -> pa.Table:
    """What is kept of a step and window: a row for each group, however many it has here.

    So a key that half of the rows have costs its bucket no more than others. Where keys are found
    in rounds, distinct values are counted or values fall into cells, the rows themselves go on.
    """
    query, shape = task.plan.query, task.shape
    if not query.sends_rows:
        groups, sums, first = sum_groups(query.measures, rows.groups, keep_mask, rows.values)
        of = {"step": rows.steps[first], "window": rows.windows[first]}
        return shape.of_groups(groups, sums, rows.keys.take(pa.array(first)), **of)
    table = shape.packed(
        rows,
        unit=packed_ids(rows.units) if query.rounds_of_units else None,
        digest=None,
        period=None,
        verdict=keep_mask,
    )
    return table.take(pa.array(np.flatnonzero(keep_mask)))


def _save(
    task: PublishTask, flow: Flow, stage: str, bucket: int, chain: Chain, watermarks: Any
) -> str:
    """Write the new state of a bucket; a note for the driver."""
    name = f"state/{task.job}-{stage}-{bucket}-{_attempt()}.dps"
    stored, whole = bucket_files.save(task.files, flow, stage, name, chain, watermarks)
    return json.dumps({"stage": stage, "bucket": bucket, "segment": stored, "whole": whole})


def publish(task: PublishTask, batches: Batches) -> Batches:
    """Stage 2, by bucket of groups: add up, latch keys, draw noise; what is shown goes out."""
    received, rows = unpack_packets(batches)
    if not rows.keys() <= received.keys():  # every bucket of units sends a note to its namesake
        raise StateError("the rows of a bucket came without its notes: the shuffle was divided")
    for bucket, texts in received.items():
        yield from _publish(task, bucket, rows.get(bucket), texts)


def _publish(task: PublishTask, bucket: int, table: pa.Table | None, texts: list[str]) -> Batches:
    flow = task.flow(bucket)
    assert task.keys is not None
    assert task.keys.lent is not None
    streams = task.keys.lent.noise_streams()
    chain = task.groups.get(bucket, ())
    watermarks = bucket_files.load_segments(task.files, flow, "groups", chain)
    for window, known in task.begins.items():
        flow.begin_window(window, *known)
    received = [json.loads(text) for text in texts]
    by_step = {} if table is None else dict(by_number(table, "step"))
    for step in range(task.first, task.end):
        for window, mine in by_number(by_step[step], "window") if step in by_step else ():
            add(task, flow, window, mine)
        for note in (note for note in received if note.get("total", [None])[0] == step):
            flow.totals(note["total"][1]).add(np.array(note["counts"], np.int64))
        for note in (note for note in received if note.get("reached", [None])[0] == step):
            flow.histogram(note["reached"][1]).add(np.array(note["counts"], np.int64))
        for due in flow.query.schedule.due(step):
            if due.window in task.keys.lent.keys:  # others were abandoned
                (noisy,) = flow.perturb(due, streams)
                if len(noisy.ids):
                    yield from packets([(0, _shown(flow, task.shape, step, due, noisy))])
                if flow.query.totals and bucket == 0:
                    totals = flow.noisy_totals(due, streams)
                    yield notes(0, [json.dumps({"totals": [step, due.window, *totals]})])
                if bucket == 0 and (histogram := flow.noisy_histogram(due, streams)):
                    yield notes(0, [json.dumps({"histogram": [due.window, *histogram]})])
            if due.release == due.releases:
                flow.evict(due.window)
    passed = [
        text
        for text, note in zip(texts, received, strict=True)
        if "stage" in note or "unused" in note
    ]
    yield notes(0, [*passed, _save(task, flow, "groups", bucket, chain, watermarks)])


def add(task: PublishTask, flow: Flow, window: int, table: pa.Table) -> None:
    """Take in what `_kept` has sent of a step and window."""
    shape = task.shape
    if flow.query.sends_rows:
        keep_mask = numbers(table, "verdict").astype(np.uint8)
        flow.aggregate(window, shape.rows(table), keep_mask)
    else:
        flow.add_sums(window, ids(table, "group"), shape.sums(table), shape.keys_of(table))


def _shown(flow: Flow, shape: Shape, step: int, due: DueRelease, noisy: NoisySums) -> pa.Table:
    (bucket,) = flow.groups(due.window)
    keys, size = bucket.key_columns(noisy.groups), len(noisy.ids)
    of = {"step": np.full(size, step, np.int64), "window": np.full(size, due.window, np.int64)}
    return shape.of_groups(noisy.ids, noisy.sums, keys, **of, since=noisy.since)


_FAILED: Final = re.compile(r'TaskFailed: (\["\w+", ".*"\])\s*$', re.MULTILINE)
_OUTRUN: Final = "shuffle map stage with indeterminate output was failed and retried"
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class TaskFailed(Exception):
    """An error of ours on its way to the driver."""

    @classmethod
    def of(cls, problem: DpstreamError) -> TaskFailed:
        """In one line, whatever its message is."""
        return cls(json.dumps([type(problem).__name__, str(problem)]))


def is_passing(problem: Exception) -> bool:
    """Did a job fail only because an executor was lost at a bad moment, so that it may run again?

    Spark repeats the tasks of a lost executor, but not once tasks behind them have come to their
    end: it cannot know that ours give the same rows in any order and at any time.
    """
    return _OUTRUN in str(problem)


def translate_error(problem: Exception) -> DpstreamError | None:
    """What a failed job means; None: nothing that we know of.

    What Spark had to say is in the log `dpstream.spark`, for those who look for it.
    """
    text = str(problem)
    failed, missing = _FAILED.search(text), _MISSING.search(text)
    meaning: DpstreamError
    if failed is not None:
        name, message = json.loads(failed[1])
        meaning = getattr(errors, name, StateError)(message)
    elif missing is not None:
        how = "install it there, or call ship_code(session) before"
        if missing[1].partition(".")[0] != "dpstream":
            how = "install dpstream's dependencies there"
        meaning = MissingDependency(f"executors have no module {missing[1]!r}; {how}")
    elif "spark.driver.maxResultSize" in text:
        meaning = StateError(
            "the releases of one job exceed what the driver takes; nothing of this job was "
            "published; raise spark.driver.maxResultSize (and spark.driver.memory), or lower "
            "steps_at_once"
        )
    else:
        return None
    _LOG.debug("a job failed on Spark", exc_info=problem)
    return meaning
