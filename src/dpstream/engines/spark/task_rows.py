"""Tasks that take rows in: read, hash, divide by bucket of the unit, write where they wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from zlib import crc32

import pyarrow as pa

from dpstream.engines.spark import bucket_files
from dpstream.engines.spark.packets import notes, opened, packets
from dpstream.engines.spark.tasks import Batches, Task, attempt, context, divided
from dpstream.records import Rejected, Source
from dpstream.rows.row_batch import RejectedRows, Rows, in_order

_ROWS = 1 << 16  # rows that are read at a time


@dataclass(frozen=True, kw_only=True)
class ReadTask(Task):
    """Rows of a frame (`schema` says what it declares) or of the partitions of a source."""

    where: str
    arrived: int | None
    schema: pa.Schema | None = None
    source: Source | None = None
    partitions: tuple[str, ...] = ()


def read_frame(task: ReadTask, batches: Batches) -> Batches:
    """Rows of a frame's partition, hashed, on their way to their units' buckets."""
    where, reader = f"{task.where}, partition {context().partitionId()}", task.reader()
    assert task.schema is not None
    for piece, table in enumerate(_gathered(batches, task.schema)):
        rows, aside = reader.read(table, f"{where}, piece {piece}", arrived=task.arrived)
        yield from _arrived(task, rows, f"{where} {piece}", aside, [], len(table))


def read_source(task: ReadTask, batches: Batches) -> Batches:
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
    task: ReadTask,
    rows: Rows,
    chunk: str,
    aside: RejectedRows,
    rejected: list[Rejected],
    size: int,
) -> Batches:
    yield from packets(divided(task, task.shape.packed(rows), rows.units))
    letters = [asdict(row) for row in [*rejected, *aside.rejected]]
    counts = {
        "read": size,
        "outside": aside.outside,
        "late": aside.late,
        "other_keys": aside.other_keys,
    }
    told = json.dumps({"chunk": chunk, "rejected": letters, "counts": counts})
    yield notes(crc32(chunk.encode()) % task.buckets, [told])


def keep_rows(task: ReadTask, batches: Batches) -> Batches:
    """Write the rows of each unit bucket; say what was written, and pass notes on."""
    heard, rows = opened(batches)
    told = [text for texts in heard.values() for text in texts]
    for bucket, table in rows.items():
        name = f"rows/{task.job}-{bucket}-{attempt()}.arrow"
        about, digests = bucket_files.keep(task.files, task.shape, bucket, name, table)
        told.append(json.dumps({"file": about.to_json(), "digests": bucket_files.as_text(digests)}))
    if told:
        yield notes(0, told)


def digest_rows(task: ReadTask, batches: Batches) -> Batches:
    """Only say what would be written: for rows that were written before."""
    for table in opened(batches)[1].values():
        digests = bucket_files.step_digests(in_order(task.shape.rows(table)))
        yield notes(0, [json.dumps({"digests": bucket_files.as_text(digests)})])


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
