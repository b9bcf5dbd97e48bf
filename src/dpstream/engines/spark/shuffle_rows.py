"""What passes between tasks: a bucket's number with many rows at once, packed by Arrow.

To Spark a packet is one row with one binary column, whatever it holds: shuffles move a few large
rows instead of many small ones, which Spark would unpack and pack again one by one, and keys may
have types that Spark does not know. Numbers travel as what they are above the least one, and the
key of a group that several rows have travels once. Notes are JSON for who comes next.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.state_delta import arrow_stream
from dpstream.group_by.hash_tables import HashTable
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


def packets(
    parts: Iterable[tuple[int, pa.Table]], *, keys_of_groups: bool = False
) -> Iterator[pa.RecordBatch]:
    """Tables on their way to buckets. `keys_of_groups`: rows of one group have one key."""
    for bucket, table in parts:
        for first in range(0, len(table), _ROWS):
            body = arrow_stream(_slim(table.slice(first, _ROWS), keys_of_groups))
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
                tables[bucket].append(_restored(pa.ipc.open_stream(rows.as_buffer()).read_all()))
            else:
                texts[bucket].append(note)
    joined = {bucket: pa.concat_tables(parts).combine_chunks() for bucket, parts in tables.items()}
    return dict(texts), joined


_COLUMNS, _LEAST, _GROUPS = b"columns", b"least", "groups"
_NARROW = (np.uint8, np.uint16, np.uint32)
_FEW_GROUPS = 0.75  # of the rows: with more of them their keys are sent as they are


def _slim(table: pa.Table, keys_of_groups: bool) -> pa.Table:
    """The same rows in fewer bytes, for `_restored`.

    A column of whole numbers becomes its least number and what each row has beyond it, in as few
    bytes as do; one that is the same in all rows becomes nothing. Groups with their keys become
    numbers of a dictionary, unless nearly every row has a group of its own.
    """
    least, columns = dict[str, int](), dict[str, Any]()
    for name in table.column_names:
        columns[name] = table[name]
        if table.schema.field(name).type == pa.int64() and not name.startswith("k"):
            values = numbers(table, name)
            low = int(values.min())
            span = int(values.max()) - low
            kind = next((kind for kind in _NARROW if span <= np.iinfo(kind).max), None)
            if kind is not None:
                least[name] = low
                columns[name] = (values - low).astype(kind) if span else None
    if keys_of_groups:
        known = HashTable()
        rows = known.rows(ids(table, "group"))
        if known.used <= _FEW_GROUPS * len(table):
            first: Integers = np.empty(known.used, np.int64)
            first[rows[::-1]] = np.arange(len(table))[::-1]
            names = [name for name in columns if name == "group" or name.startswith("k")]
            items = [one_array(columns.pop(name).take(pa.array(first))) for name in names]
            kind = np.uint16 if known.used <= np.iinfo(np.uint16).max else np.uint32
            groups = pa.StructArray.from_arrays(items, names)
            columns[_GROUPS] = pa.DictionaryArray.from_arrays(pa.array(rows.astype(kind)), groups)
    sent = {name: column for name, column in columns.items() if column is not None}
    about = {_COLUMNS: json.dumps(table.column_names), _LEAST: json.dumps(least)}
    if not sent:  # a table without columns has no rows
        return table
    return _table(sent).replace_schema_metadata(about)


def _restored(table: pa.Table) -> pa.Table:
    """The table that `_slim` was given."""
    about = table.schema.metadata or {}
    if _COLUMNS not in about:
        return table
    size, columns = len(table), {name: one_array(table[name]) for name in table.column_names}
    if _GROUPS in columns:
        coded = columns.pop(_GROUPS)
        groups = coded.dictionary
        taken = zip(groups.type, groups.flatten(), strict=True)
        columns |= {field.name: items.take(coded.indices) for field, items in taken}
    for name, low in json.loads(about[_LEAST]).items():
        if name in columns:
            columns[name] = columns[name].to_numpy().astype(np.int64) + low
        else:
            columns[name] = np.full(size, low, np.int64)
    return _table({name: columns[name] for name in json.loads(about[_COLUMNS])})


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
