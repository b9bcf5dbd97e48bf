"""What executors do: read rows, bound contributions, aggregate, latch keys, add noise.

Each function is the body of a task over Arrow batches. The stages themselves are the embedded
engine's (`stages/flow.py`), on the state of one bucket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from dpstream.engines.spark import segments, waiting
from dpstream.engines.spark.files import SharedFiles
from dpstream.engines.spark.packets import (
    Shape,
    as_table,
    by_number,
    ids,
    notes,
    numbers,
    opened,
    packed_ids,
    packets,
)
from dpstream.engines.spark.segments import Chain
from dpstream.engines.spark.waiting import Waiting
from dpstream.errors import StateError
from dpstream.privacy.query_spend import LentKeys
from dpstream.privacy.state.sealing import seal, unseal
from dpstream.records import Rejected, Source, Words
from dpstream.stages.flow import Flow, by_window
from dpstream.stages.perturb import Noisy
from dpstream.stages.plan import Plan, WindowPlan
from dpstream.stages.rows import RowKeys, RowReader, Rows, Setting, in_order
from dpstream.stages.schedule import Due
from dpstream.stages.tables import in_buckets

Batches = Iterator[pa.RecordBatch]
_ROWS = 1 << 16  # rows that are read at a time


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tasks need that nobody else may see.

    They travel sealed in a task's function, from memory to memory, and what opens them as a
    broadcast, which is a file on every machine for a while: neither alone says anything.
    """

    rows: RowKeys
    lent: LentKeys | None = None

    def halves(self) -> tuple[bytes, bytes]:
        """(what opens them, the sealed keys)."""
        return seal([asdict(self.rows), None if self.lent is None else asdict(self.lent)])

    @classmethod
    def joined(cls, opener: bytes, sealed: bytes) -> Keys:
        """As they were."""
        rows, lent = unseal(opener, sealed)
        return cls(rows=RowKeys(**rows), lent=None if lent is None else LentKeys(**lent))


@dataclass(frozen=True)
class ShippedPlan(Plan):
    """A plan as the driver made it: no executor computes noise parameters of its own."""

    windows: dict[int, WindowPlan]
    of_totals: dict[int, WindowPlan]

    def window(self, releases: int) -> WindowPlan:  # type: ignore[override]
        """The noise of a window with so many releases."""
        return self.windows[releases]

    def totals(self, releases: int) -> WindowPlan:  # type: ignore[override]
        """The noise of a window's totals."""
        return self.of_totals[releases]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all tasks of a job are told; public."""

    plan: Plan
    types: dict[str, pa.DataType]
    buckets: int
    files: SharedFiles
    job: str
    """Names the files that this job writes; no other job has it."""
    opener: bytes = field(repr=False)
    """Opens the keys."""
    keys: Keys | None = field(default=None, repr=False)
    """Added where the task is done."""

    @property
    def shape(self) -> Shape:
        """The columns that pass between tasks."""
        return Shape.of(self.plan.query)

    def reader(self) -> RowReader:
        """Reads rows with the run's keys."""
        assert self.keys is not None
        return RowReader.with_keys(self.plan.query, self.keys.rows, self.types)

    def flow(self, bucket: int) -> Flow:
        """The stages, for one bucket."""
        share = (bucket, self.buckets)
        return Flow(self.plan, self.reader(), buckets=1, threads=1, share=share)


@dataclass(frozen=True, kw_only=True)
class Reading(Task):
    """Rows of a frame (`schema` says what it declares) or of the partitions of a source."""

    where: str
    arrived: int | None
    schema: pa.Schema | None = None
    source: Source | None = None
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Publishing(Task):
    """Steps `first` to `end` - 1, from waiting rows and chains of state to noisy sums."""

    first: int
    end: int
    waiting: Sequence[Waiting]
    units: Mapping[int, Chain]
    groups: Mapping[int, Chain]


def opening(
    work: Callable[[Any, Batches], Batches], shared: Any, sealed: bytes, batches: Batches
) -> Batches:
    """Do a task: all that is public comes as a broadcast, the sealed keys with the function."""
    task = shared.value
    return work(replace(task, keys=Keys.joined(task.opener, sealed)), batches)


def read_frame(task: Reading, batches: Batches) -> Batches:
    """Rows of a frame's partition, hashed, on their way to their units' buckets."""
    where, reader = f"{task.where}, partition {_context().partitionId()}", task.reader()
    assert task.schema is not None
    for piece, table in enumerate(_gathered(batches, task.schema)):
        rows, aside = reader.read(table, f"{where}, piece {piece}", arrived=task.arrived)
        yield from _arrived(task, rows, f"{where} {piece}", aside, [], len(table))


def read_source(task: Reading, batches: Batches) -> Batches:
    """Rows of a source's partitions, named by number, hashed, on their way."""
    source, reader = task.source, task.reader()
    assert source is not None
    columns = task.plan.query.source_columns
    for partition in [task.partitions[n] for b in batches for n in b["id"].to_pylist()]:
        position, done = None, False
        while not done:
            chunk = source.read(partition, position, columns=columns)
            where = partition if position is None else f"{partition} from {position}"
            rows, aside = reader.read(chunk.table, where, arrived=task.arrived)
            size = len(chunk.table) + len(chunk.rejected)
            yield from _arrived(task, rows, f"{partition} {position}", aside, chunk.rejected, size)
            position, done = chunk.position, chunk.done
    source.close()


def _arrived(
    task: Reading,
    rows: Rows,
    chunk: str,
    aside: Setting,
    rejected: list[Rejected],
    size: int,
) -> Batches:
    yield from packets(_divided(task, task.shape.packed(rows), rows.units))
    letters = [asdict(row) for row in [*rejected, *aside.rejected]]
    counts = {
        "read": size,
        "outside": aside.outside,
        "late": aside.late,
        "other_keys": aside.other_keys,
    }
    told = json.dumps({"chunk": chunk, "rejected": letters, "counts": counts})
    yield notes(crc32(chunk.encode()) % task.buckets, [told])


def keep_rows(task: Reading, batches: Batches) -> Batches:
    """Write the rows of each unit bucket; say what was written, and pass notes on."""
    heard, rows = opened(batches)
    told = [text for texts in heard.values() for text in texts]
    for bucket, table in rows.items():
        name = f"rows/{task.job}-{bucket}-{_attempt()}.arrow"
        about, digests = waiting.keep(task.files, task.shape, bucket, name, table)
        told.append(json.dumps({"file": about.to_json(), "digests": waiting.as_text(digests)}))
    if told:
        yield notes(0, told)


def digest_rows(task: Reading, batches: Batches) -> Batches:
    """Only say what would be written: for rows that were written before."""
    for table in opened(batches)[1].values():
        digests = waiting.step_digests(in_order(task.shape.rows(table)))
        yield notes(0, [json.dumps({"digests": waiting.as_text(digests)})])


def bound(task: Publishing, batches: Batches) -> Batches:
    """Stage 1, by bucket of units: keep what fits the bounds, send it to its groups' buckets."""
    for bucket in [int(n) for b in batches for n in b["id"].to_pylist()]:
        yield from _bound(task, bucket)


def _bound(task: Publishing, bucket: int) -> Batches:
    flow, shape = task.flow(bucket), task.shape
    chain = task.units.get(bucket, ())
    marks = segments.load(task.files, flow, "units", chain)
    mine = [w for w in task.waiting if w.bucket == bucket]
    parts = [waiting.load(task.files, shape, w, task.first, task.end) for w in mine]
    told: list[dict[str, Any]] = []
    kept_rows: list[pa.Table] = []
    for step in range(task.first, task.end):
        pieces = [(rows, a, b) for rows in parts for at, _, _, a, b in rows.runs if at == step]
        for window, period, rows in by_window(pieces):
            verdicts = flow.bound(window, period, rows)
            if flow.query.totals:
                kept = int(np.count_nonzero(verdicts))
                counts = {"offered": flow.offered(period, rows), "kept": kept}
                told.append({"total": [step, window], **counts})
            places = np.flatnonzero(verdicts)
            kept_rows.append(_kept(task, rows, verdicts, places))
        for due in flow.query.schedule.due(step):
            if due.release == due.releases:
                flow.forget(due.window)
        flow.forget_periods(step + 1)
    name = f"state/{task.job}-units-{bucket}-{_attempt()}.dps"
    size, whole = segments.save(task.files, flow, "units", name, chain, marks)
    saved = {"stage": "units", "bucket": bucket, "segment": [name, size], "whole": whole}
    yield notes(bucket, [json.dumps(saved)])
    if told:
        yield notes(0, [json.dumps(one) for one in told])
    if kept_rows:
        table = pa.concat_tables(kept_rows).combine_chunks()
        yield from packets(_divided(task, table, ids(table, "group")))


def _kept(task: Publishing, rows: Rows, verdicts: Any, places: Any) -> pa.Table:
    """The rows that are kept, with what their groups need to know."""
    table = task.shape.packed(
        rows,
        unit=packed_ids(rows.units) if task.plan.query.rounds_of_units else None,
        digest=None,
        period=None,
        verdict=verdicts,
    )
    return table if len(places) == len(table) else table.take(pa.array(places))


def _divided(task: Task, table: pa.Table, words: Words) -> Iterator[tuple[int, pa.Table]]:
    """A table's rows by the bucket of an id."""
    places = in_buckets(words, task.buckets)
    in_order = table.take(pa.array(np.concatenate(places)))
    first = 0
    for bucket, mine in enumerate(places):
        yield bucket, in_order.slice(first, len(mine))
        first += len(mine)


def publish(task: Publishing, batches: Batches) -> Batches:
    """Stage 2, by bucket of groups: add up, latch keys, draw noise; what is shown goes out."""
    heard, rows = opened(batches)
    if not rows.keys() <= heard.keys():  # every bucket of units sends a note to its namesake
        raise StateError("the rows of a bucket came without its notes: the shuffle was divided")
    for bucket, told in heard.items():
        yield from _publish(task, bucket, rows.get(bucket), told)


def _publish(task: Publishing, bucket: int, table: pa.Table | None, told: list[str]) -> Batches:
    flow, shape = task.flow(bucket), task.shape
    assert task.keys is not None
    assert task.keys.lent is not None
    doors = task.keys.lent.doors()
    chain = task.groups.get(bucket, ())
    marks = segments.load(task.files, flow, "groups", chain)
    heard = [json.loads(text) for text in told]
    by_step = {} if table is None else dict(by_number(table, "step"))
    for step in range(task.first, task.end):
        for window, mine in by_number(by_step[step], "window") if step in by_step else ():
            verdicts = numbers(mine, "verdict").astype(np.uint8)
            flow.aggregate(window, shape.rows(mine), verdicts)
        for one in (one for one in heard if one.get("total", [None])[0] == step):
            flow.totals(one["total"][1]).add(offered=one["offered"], kept=one["kept"])
        for due in flow.query.schedule.due(step):
            (noisy,) = flow.perturb(due, doors)
            if len(noisy.ids):
                yield from packets([(0, _shown(flow, shape, step, due, noisy))])
            if flow.query.totals and bucket == 0:
                share = [number.hex() for number in flow.kept_share(due, doors)]
                yield notes(0, [json.dumps({"share": [step, due.window, *share]})])
            if due.release == due.releases:
                flow.forget(due.window)
    name = f"state/{task.job}-groups-{bucket}-{_attempt()}.dps"
    size, whole = segments.save(task.files, flow, "groups", name, chain, marks)
    saved = {"stage": "groups", "bucket": bucket, "segment": [name, size], "whole": whole}
    passed = [text for text, one in zip(told, heard, strict=True) if "stage" in one]
    yield notes(0, [*passed, json.dumps(saved)])


def _shown(flow: Flow, shape: Shape, step: int, due: Due, noisy: Noisy) -> pa.Table:
    (bucket,) = flow.groups(due.window)
    keys, size = bucket.key_columns(noisy.groups), len(noisy.ids)
    columns: dict[str, Any] = {
        "step": np.full(size, step, np.int64),
        "window": np.full(size, due.window, np.int64),
        "since": noisy.since,
        "group": packed_ids(noisy.ids),
    }
    columns |= {f"m{number}": noisy.sums[:, number] for number in range(shape.measures)}
    columns |= {f"k{number}": keys[name] for number, name in enumerate(shape.keys)}
    return as_table(columns)


def _attempt() -> int:
    """Different for every try of every task: the driver learns the name that was accepted.

    A copy of a task that is still at work when another was accepted, and its input is removed,
    writes where nobody looks.
    """
    context = _context()
    return 0 if context is None else int(context.taskAttemptId())  # None: not in a task of Spark's


def _context() -> Any:
    """Spark's own description of the task."""
    from pyspark import TaskContext

    return TaskContext.get()


def _gathered(batches: Batches, schema: pa.Schema) -> Iterator[pa.Table]:
    """Batches together, in the types that the frame declares."""
    held: list[pa.RecordBatch] = []
    size = 0
    for one in batches:
        held.append(one)
        size += len(one)
        if size >= _ROWS:
            yield pa.Table.from_batches(held).cast(schema)
            held, size = [], 0
    if size:
        yield pa.Table.from_batches(held).cast(schema)
