"""What passes between tasks: a bucket's number with many rows at once, packed by Arrow.

To Spark a packet is one row with one binary column, whatever it holds: shuffles move a few large
rows instead of many small ones, which Spark would unpack and pack again one by one, and keys may
have types that Spark does not know. Notes are JSON for who comes next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.state_delta import arrow_stream
from dpstream.query.query import Query
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import Rows

PACKETS = pa.schema([("bucket", pa.int32()), ("note", pa.string()), ("rows", pa.binary())])
IN_SPARK = "bucket int, note string, rows binary"
_ID = pa.binary(16)
_ROWS = 1 << 18  # in a packet: far from the two gigabytes that one may have


class Shape:
    """The columns of one query's rows in a packet: values that are summed, measures, keys."""

    def __init__(self, query: Query) -> None:
        self.values = sum(measure.columns_of_values for measure in query.value_measures)
        self.measures, self.keys = len(query.measures) + query.found, query.group_columns

    @classmethod
    def of_source(cls, query: Query) -> Shape:
        """Of rows as they are read: those that wait have a time, and the columns that are held."""
        shape = cls(query)
        if query.per_unit is not None:
            shape.values, shape.keys = 1, tuple(query.per_unit.held)
        return shape

    def packed(self, rows: Rows, **more: Any) -> pa.Table:
        """Rows as a table; `more` are columns beside, or in place of, their own."""
        columns: dict[str, Any] = {
            "step": rows.steps,
            "window": rows.windows,
            "period": rows.periods,
            "unit": packed_ids(rows.units),
            "group": packed_ids(rows.groups),
            "digest": packed_ids(rows.digests),
        }
        columns |= {f"v{number}": rows.values[:, number] for number in range(self.values)}
        columns |= {  # a row has no set of keys yet; each of its groups has one
            f"k{number}": rows.keys[name]
            for number, name in enumerate(self.keys)
            if name in rows.keys.column_names
        }
        return _table({name: c for name, c in (columns | more).items() if c is not None})

    def rows(self, table: pa.Table) -> Rows:
        """Rows as they were; columns that were left out are zero."""
        size, names = len(table), set(table.column_names)
        zero, nobody = np.zeros(size, np.int64), np.zeros((size, 2), np.uint64)
        values = [numbers(table, f"v{number}") for number in range(self.values)]
        return Rows(
            units=ids(table, "unit") if "unit" in names else nobody,
            groups=ids(table, "group"),
            digests=ids(table, "digest") if "digest" in names else nobody,
            windows=numbers(table, "window"),
            periods=numbers(table, "period") if "period" in names else zero,
            steps=numbers(table, "step"),
            values=np.stack(values, axis=1) if values else np.zeros((size, 0), np.int64),
            keys=self.keys_of(table),
        )

    def of_groups(self, groups: Words, sums: Integers, keys: pa.Table, **more: Any) -> pa.Table:
        """Groups with their sums as a table."""
        columns: dict[str, Any] = more | {"group": packed_ids(groups)}
        columns |= {f"m{number}": sums[:, number] for number in range(self.measures)}
        columns |= {f"k{number}": keys[name] for number, name in enumerate(self.keys)}
        return _table(columns)

    def sums(self, table: pa.Table) -> Integers:
        """The sums of groups, groups x measures."""
        return np.stack([numbers(table, f"m{n}") for n in range(self.measures)], axis=1)

    def keys_of(self, table: pa.Table) -> pa.Table:
        """The key columns under their names."""
        if not self.keys:
            return pa.table({"": pa.nulls(len(table))})
        there = {name: f"k{n}" for n, name in enumerate(self.keys) if f"k{n}" in table.column_names}
        return pa.table({name: one_array(table[column]) for name, column in there.items()})


def _table(columns: dict[str, Any]) -> pa.Table:
    """Arrays of NumPy and Arrow as one table."""
    return pa.table({name: one_array(column) for name, column in columns.items()})


def packets(parts: Iterable[tuple[int, pa.Table]]) -> Iterator[pa.RecordBatch]:
    """Tables on their way to buckets."""
    for bucket, table in parts:
        for first in range(0, len(table), _ROWS):
            body = arrow_stream(table.slice(first, _ROWS))
            ends = pa.py_buffer(np.array([0, len(body)], np.int32))
            packed = pa.Array.from_buffers(pa.binary(), 1, [None, ends, body])
            arrays = [pa.array([bucket], pa.int32()), pa.nulls(1, pa.string()), packed]
            yield pa.RecordBatch.from_arrays(arrays, schema=PACKETS)


def notes(bucket: int, texts: Sequence[str]) -> pa.RecordBatch:
    """Notes on their way to a bucket."""
    size = len(texts)
    arrays = [pa.array([bucket] * size, pa.int32()), pa.array(texts, pa.string())]
    return pa.RecordBatch.from_arrays([*arrays, pa.nulls(size, pa.binary())], schema=PACKETS)


def unpack_packets(
    batches: Iterable[pa.RecordBatch],
) -> tuple[dict[int, list[str]], dict[int, pa.Table]]:
    """By bucket: its notes, and the rows of all its packets together."""
    texts: dict[int, list[str]] = defaultdict(list)
    tables: dict[int, list[pa.Table]] = defaultdict(list)
    for batch in batches:
        columns = batch["bucket"].to_pylist(), batch["note"].to_pylist(), batch["rows"]
        for bucket, note, rows in zip(*columns, strict=True):
            if note is None:
                tables[bucket].append(pa.ipc.open_stream(rows.as_buffer()).read_all())
            else:
                texts[bucket].append(note)
    joined = {bucket: pa.concat_tables(parts).combine_chunks() for bucket, parts in tables.items()}
    return dict(texts), joined


def by_number(table: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each number in a column, in their order."""
    if not len(table):
        return
    values = numbers(table, column)
    if (values[0] == values).all():
        yield int(values[0]), table
        return
    order = np.argsort(values, kind="stable")
    in_order = table.take(pa.array(order))
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for first, end in zip([0, *edges], [*edges, len(order)], strict=True):
        yield int(values[order[first]]), in_order.slice(first, end - first)


def numbers(table: pa.Table, name: str) -> Integers:
    """A column of whole numbers without nulls."""
    values: Integers = one_array(table[name]).to_numpy(zero_copy_only=False)
    return values


def ids(table: pa.Table, name: str) -> Words:
    """A column of 128-bit ids."""
    array = one_array(table[name])
    raw = array.buffers()[1]
    if raw is None:
        return np.zeros((0, 2), np.uint64)
    first = array.offset * 16
    return np.frombuffer(raw, np.uint64, 2 * len(array), first).reshape(-1, 2)


def packed_ids(words: Words) -> pa.Array:
    """128-bit ids as a column."""
    raw = pa.py_buffer(np.ascontiguousarray(words))
    return pa.Array.from_buffers(_ID, len(words), [None, raw])


def one_array(column: Any) -> pa.Array:
    """A column of NumPy or Arrow as one array, without copies where it is one already."""
    if isinstance(column, np.ndarray):
        return pa.array(np.ascontiguousarray(column))
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
