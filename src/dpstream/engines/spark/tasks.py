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
from dpstream.engines.spark.segments import Chain
from dpstream.engines.spark.shapes import NOTE, ROW, Shape, batch, notes, numbers
from dpstream.engines.spark.waiting import Waiting
from dpstream.privacy.query_spend import LentKeys
from dpstream.privacy.state import mint_run_id
from dpstream.records import Rejected, Source
from dpstream.stages.flow import Flow, by_window
from dpstream.stages.perturb import Noisy
from dpstream.stages.plan import Plan, WindowPlan
from dpstream.stages.rows import RowKeys, RowReader, Rows, Setting, in_order
from dpstream.stages.schedule import Due
from dpstream.stages.tables import bucket_numbers

Batches = Iterator[pa.RecordBatch]
_ROWS = 1 << 16  # rows that are read at a time


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What tasks need that nobody else may see.

    They travel inside a task's function: from memory to memory, and through a pipe to Python. A
    broadcast would be a file on the disk of every machine, and a setting would be logged.
    """

    rows: RowKeys
    lent: LentKeys | None = None


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
    """Begins the names of the files that this job writes; no other job has it."""
    keys: Keys | None = field(default=None, repr=False)
    """Added where the task is done."""

    @property
    def shape(self) -> Shape:
        """The columns that pass between tasks."""
        return Shape.of(self.plan.query, self.types)

    def reader(self) -> RowReader:
        """Reads rows with the run's keys."""
        assert self.keys is not None
        return RowReader.with_keys(self.plan.query, self.keys.rows, self.types)

    def name(self, folder: str, what: str, ending: str) -> str:
        """A name for a file that no other attempt has.

        A task may be done twice, at the same time or after it was given up, and its rows may come
        in another order: what one attempt wrote must stay as its successors know it.
        """
        return f"{folder}/{self.job}-{what}-{mint_run_id().hex()}.{ending}"

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


@dataclass(frozen=True, kw_only=True)
class Publishing(Task):
    """Steps `first` to `end` - 1, from waiting rows and chains of state to noisy sums."""

    first: int
    end: int
    waiting: Sequence[Waiting]
    units: Mapping[int, Chain]
    groups: Mapping[int, Chain]


def with_keys(
    work: Callable[[Any, Batches], Batches], shared: Any, keys: Keys, batches: Batches
) -> Batches:
    """Do a task: what is public comes as a broadcast, keys with the function itself."""
    return work(replace(shared.value, keys=keys), batches)


def read_frame(task: Reading, batches: Batches) -> Batches:
    """Rows of a frame's partition, hashed, on their way to their units' buckets."""
    from pyspark import TaskContext

    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    where, reader = f"{task.where}, partition {number}", task.reader()
    assert task.schema is not None
    for piece, table in enumerate(_gathered(batches, task.schema)):
        rows, aside = reader.read(table, f"{where}, piece {piece}", arrived=task.arrived)
        yield from _arrived(task, rows, f"{where} {piece}", aside, [], len(table))


def read_source(task: Reading, batches: Batches) -> Batches:
    """Rows of a source's partitions, named by number, hashed, on their way."""
    source, reader = task.source, task.reader()
    assert source is not None
    columns = task.plan.query.source_columns
    listed = source.partitions()
    for partition in [listed[n] for b in batches for n in b["id"].to_pylist()]:
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
    schema = task.shape.arrived
    found = task.shape.of_rows(rows)
    found["bucket"] = bucket_numbers(rows.units, task.buckets).astype(np.int32)
    if len(rows):
        yield batch(schema, found, len(rows), ROW)
    letters = [asdict(row) for row in [*rejected, *aside.rejected]]
    counts = {
        "read": size,
        "outside": aside.outside,
        "late": aside.late,
        "other_keys": aside.other_keys,
    }
    told = json.dumps({"chunk": chunk, "rejected": letters, "counts": counts})
    yield notes(schema, crc32(chunk.encode()) % task.buckets, [told])


def keep_rows(task: Reading, batches: Batches) -> Batches:
    """Write the rows of each unit bucket; say what was written, and pass notes on."""
    schema = task.shape.arrived
    table = pa.Table.from_batches(batches, schema)
    kinds = numbers(table, "kind")
    told = table["note"].filter(pa.array(kinds == NOTE)).to_pylist()
    rows = table.filter(pa.array(kinds == ROW))
    for bucket, mine in _by_number(rows, "bucket"):
        name = task.name("rows", str(bucket), "arrow")
        about, digests = waiting.keep(task.files, task.shape, bucket, name, mine)
        told.append(json.dumps({"file": about.to_json(), "digests": waiting.as_text(digests)}))
    if told:
        yield notes(schema, 0, told)


def digest_rows(task: Reading, batches: Batches) -> Batches:
    """Only say what would be written: for rows that were written before."""
    schema = task.shape.arrived
    table = pa.Table.from_batches(batches, schema)
    rows = table.filter(pa.array(numbers(table, "kind") == ROW))
    for _, mine in _by_number(rows, "bucket"):
        digests = waiting.step_digests(in_order(task.shape.rows_of(mine)))
        yield notes(schema, 0, [json.dumps({"digests": waiting.as_text(digests)})])


def bound(task: Publishing, batches: Batches) -> Batches:
    """Stage 1, by bucket of units: keep what fits the bounds, send it to its groups' buckets."""
    for bucket in [int(n) for b in batches for n in b["id"].to_pylist()]:
        yield from _bound(task, bucket)


def _bound(task: Publishing, bucket: int) -> Batches:
    flow, shape, schema = task.flow(bucket), task.shape, task.shape.kept
    chain = task.units.get(bucket, ())
    marks = segments.load(task.files, flow, "units", chain)
    mine = [w for w in task.waiting if w.bucket == bucket]
    parts = [waiting.load(task.files, shape, w, task.first, task.end) for w in mine]
    told = []
    for step in range(task.first, task.end):
        pieces = [(rows, a, b) for rows in parts for at, _, _, a, b in rows.runs if at == step]
        for window, period, rows in by_window(pieces):
            verdicts = flow.bound(window, period, rows)
            if flow.query.totals:
                kept = int(np.count_nonzero(verdicts))
                counts = {"offered": flow.offered(period, rows), "kept": kept}
                told.append({"total": [step, window], **counts})
            places = np.flatnonzero(verdicts)
            if len(places):
                yield _kept(task, rows, verdicts, places)
        for due in flow.query.schedule.due(step):
            if due.release == due.releases:
                flow.forget(due.window)
        flow.forget_periods(step + 1)
    name = task.name("state", f"units-{bucket}", "dps")
    size, whole = segments.save(task.files, flow, "units", name, chain, marks)
    saved = {"stage": "units", "bucket": bucket, "segment": [name, size], "whole": whole}
    yield notes(schema, bucket, [json.dumps(saved)])
    if told:
        yield notes(schema, 0, [json.dumps(one) for one in told])


def _kept(task: Publishing, rows: Rows, verdicts: Any, places: Any) -> pa.RecordBatch:
    shape, taken = task.shape, pa.array(places)
    groups = rows.groups[places]
    columns: dict[str, Any] = {
        "bucket": bucket_numbers(groups, task.buckets).astype(np.int32),
        "step": rows.steps[places],
        "window": rows.windows[places],
        "verdict": verdicts[places].astype(np.int64),
        "g0": groups.view(np.int64)[:, 0],
        "g1": groups.view(np.int64)[:, 1],
    }
    if shape.units:
        units = rows.units[places].view(np.int64)
        columns |= {"u0": units[:, 0], "u1": units[:, 1]}
    columns |= shape.of_values(rows.values[places]) | shape.of_keys(rows.keys.take(taken))
    return batch(shape.kept, columns, len(places), ROW)


def publish(task: Publishing, batches: Batches) -> Batches:
    """Stage 2, by bucket of groups: add up, latch keys, draw noise; what is shown goes out."""
    table = pa.Table.from_batches(batches, task.shape.kept)
    kinds = numbers(table, "kind")
    told = table.filter(pa.array(kinds == NOTE))
    rows = dict(_by_number(table.filter(pa.array(kinds == ROW)), "bucket"))
    for bucket, notes_of_mine in _by_number(told, "bucket"):
        mine = rows.get(bucket, table.slice(0, 0))
        yield from _publish(task, bucket, mine, notes_of_mine["note"].to_pylist())


def _publish(task: Publishing, bucket: int, table: pa.Table, told: list[str]) -> Batches:
    flow, shape, schema = task.flow(bucket), task.shape, task.shape.noisy
    assert task.keys is not None
    lent = task.keys.lent
    assert lent is not None
    doors = lent.doors()
    chain = task.groups.get(bucket, ())
    marks = segments.load(task.files, flow, "groups", chain)
    heard = [json.loads(text) for text in told]
    by_step = dict(_by_number(table, "step"))
    for step in range(task.first, task.end):
        for window, mine in _by_number(by_step.get(step, table.slice(0, 0)), "window"):
            verdicts = numbers(mine, "verdict").astype(np.uint8)
            flow.aggregate(window, shape.rows_of(mine), verdicts)
        for one in (one for one in heard if one.get("total", [None])[0] == step):
            flow.totals(one["total"][1]).add(offered=one["offered"], kept=one["kept"])
        for due in flow.query.schedule.due(step):
            (noisy,) = flow.perturb(due, doors)
            if len(noisy.ids):
                yield _shown(task, flow, step, due, noisy)
            if flow.query.totals and bucket == 0:
                share = [number.hex() for number in flow.kept_share(due, doors)]
                yield notes(schema, 0, [json.dumps({"share": [step, due.window, *share]})])
            if due.release == due.releases:
                flow.forget(due.window)
    name = task.name("state", f"groups-{bucket}", "dps")
    size, whole = segments.save(task.files, flow, "groups", name, chain, marks)
    saved = {"stage": "groups", "bucket": bucket, "segment": [name, size], "whole": whole}
    passed = [text for text, one in zip(told, heard, strict=True) if "stage" in one]
    yield notes(schema, 0, [*passed, json.dumps(saved)])


def _shown(task: Publishing, flow: Flow, step: int, due: Due, noisy: Noisy) -> pa.RecordBatch:
    (bucket,) = flow.groups(due.window)
    keys = bucket.key_columns(noisy.groups)
    signed = np.ascontiguousarray(noisy.ids).view(np.int64)
    size = len(signed)
    columns: dict[str, Any] = {
        "bucket": np.zeros(size, np.int32),
        "step": np.full(size, step, np.int64),
        "window": np.full(size, due.window, np.int64),
        "since": noisy.since,
        "g0": signed[:, 0],
        "g1": signed[:, 1],
    }
    columns |= {f"m{n}": noisy.sums[:, n] for n in range(noisy.sums.shape[1])}
    return batch(task.shape.noisy, columns | task.shape.of_keys(keys), size, ROW)


def _by_number(table: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each number in a column, in their order."""
    if not len(table):
        return
    found = numbers(table, column)
    if (found[0] == found).all():
        yield int(found[0]), table
        return
    order = np.argsort(found, kind="stable")
    sorted_table = table.take(pa.array(order))
    edges = np.flatnonzero(np.diff(found[order])) + 1
    for first, end in zip([0, *edges], [*edges, len(order)], strict=True):
        yield int(found[order[first]]), sorted_table.slice(first, end - first)


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
