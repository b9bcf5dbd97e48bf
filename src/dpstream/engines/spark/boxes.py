"""Rows between tasks travel in boxes: one cell of bytes holds many rows for one bucket.

Spark's JVM takes Arrow batches apart into rows, writes those to a shuffle and builds batches again,
a dozen columns each time; it moves a cell of bytes at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from dpstream.engines.spark.shapes import by_number

COLUMNS = "bucket int, box binary"
"""As Spark declares them."""
_SCHEMA = pa.schema([("bucket", pa.int32()), ("box", pa.binary())])
_ROWS = 1 << 18  # rows that are packed together


def packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Boxes by bucket; the rows of a bucket keep their order."""
    held: list[pa.RecordBatch] = []
    size = 0
    for one in batches:
        held.append(one)
        size += len(one)
        if size >= _ROWS:
            yield from _boxes(held)
            held, size = [], 0
    yield from _boxes(held)


def unpacked(boxes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What is in the boxes."""
    for one in boxes:
        for box in one["box"]:
            yield from pa.ipc.open_stream(box.as_buffer())


def _boxes(held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if not held:
        return
    for bucket, mine in by_number(pa.Table.from_batches(held), "bucket"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, mine.schema) as writer:
            writer.write_table(mine.combine_chunks())
        content = sink.getvalue()
        ends = pa.py_buffer(np.array([0, len(content)], np.int32))
        box = pa.Array.from_buffers(pa.binary(), 1, [None, ends, content])
        yield pa.RecordBatch.from_arrays([pa.array([bucket], pa.int32()), box], schema=_SCHEMA)
