"""The least that a source and a sink must do, as checks over whatever rows it has.

The suites beside this file ask for more, and fill the source themselves.

>>> import pyarrow as pa
>>> from dpstream.connectors.sources import TableSource
>>> table = pa.table({"user": ["a", "b", "c"], "page": ["x", "y", "x"]})
>>> check_source(lambda: TableSource(table, rows=2), columns=["user", "page"])
3
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pyarrow as pa

from dpstream.records import Batch, Position, Sink, Source


def check_source(open_source: Callable[[], Source], *, columns: Sequence[str]) -> int:
    """Open it several times over the same rows; return how many there are.

    Every position survives JSON, and from each of them another process reads the same rows. A read
    up to an earlier position ends there. A projection leaves out columns, never rows.
    """
    source = open_source()
    rows = 0
    for partition in source.partitions():
        chunks = _chunks(source, partition, columns)
        again = open_source()
        assert partition in again.partitions(), f"{partition} has another name the second time"
        for position, chunk in chunks:
            kept = json.loads(json.dumps(position))
            _check_same(again, partition, kept, chunk, columns)
        again.close()
        rows += sum(len(chunk.table) for _, chunk in chunks)
    source.close()
    return rows


def check_sink(
    open_sink: Callable[[], Sink], read_back: Callable[[], object], table: pa.Table
) -> None:
    """Write, write again, open it anew and write once more: what is there never changes.

    `read_back` gives what the sink holds as one comparable value; `table` is a release.
    """
    sink = open_sink()
    sink.write("contract", 0, 1, table)
    first = read_back()
    sink.write("contract", 0, 1, table)
    assert read_back() == first, "a second write of the same release has changed something"
    sink.close()
    sink = open_sink()
    sink.write("contract", 0, 1, table)
    assert read_back() == first, "after a restart the same release was written again"
    sink.write("contract", 0, 2, table)
    assert read_back() != first, "the next release was not written"
    sink.close()


def _chunks(source: Source, partition: str, columns: Sequence[str]) -> list[tuple[Position, Batch]]:
    """Every chunk with the position that it was read from."""
    found: list[tuple[Position, Batch]] = []
    position: Position = None
    while True:
        batch = source.read(partition, position, columns=columns)
        assert set(batch.table.column_names) == set(columns), "the columns are not those asked for"
        found.append((position, batch))
        if batch.done:
            return found
        assert batch.position != position, f"{partition} stands still at {position!r}"
        position = batch.position


def _check_same(
    source: Source, partition: str, position: Position, chunk: Batch, columns: Sequence[str]
) -> None:
    """The rows up to the end of `chunk`, in as many reads as it takes, and one column of them."""
    tables, end = [], json.loads(json.dumps(chunk.position))
    while True:
        batch = source.read(partition, position, columns=columns, until=end)
        tables.append(batch.table.select(list(columns)))
        if batch.done or json.loads(json.dumps(batch.position)) == end:
            break
        position = batch.position
    rows = [row for table in tables for row in table.to_pylist()]
    wanted = chunk.table.select(list(columns)).to_pylist()
    assert rows == wanted, f"reading {partition} again gave other rows"
    one = source.read(partition, end, columns=columns, until=end)
    assert len(one.table) == 0, "a read up to its own position must give nothing"
    assert one.done, "a read up to its own position must be done"
