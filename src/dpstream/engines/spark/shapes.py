"""The columns that pass between tasks: plain numbers and keys that every Spark type system has.

arrived   one row of the source, read and hashed, on its way to its unit's bucket
kept      a row that bounding kept, on its way to its group's bucket
noisy     a group's noisy sums at one release, on their way to the driver

Beside rows of data (`kind` 0) there are notes, JSON for who comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Integers, Words
from dpstream.stages.query import Query
from dpstream.stages.rows import Rows

ROW, NOTE = 0, 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The columns of one query."""

    values: int
    """Columns that are summed."""
    measures: int
    keys: tuple[tuple[str, pa.DataType], ...]
    units: bool
    """Must groups know which units their rows are of?"""

    @classmethod
    def of(cls, query: Query, types: Mapping[str, pa.DataType]) -> Shape:
        """That of a query whose key types are known."""
        return cls(
            values=sum(measure.kind == "value" for measure in query.measures),
            measures=len(query.measures),
            keys=tuple((name, types[name]) for name in query.keys),
            units=query.rounds_of_units,
        )

    @property
    def arrived(self) -> pa.Schema:
        """Rows that were read."""
        longs = ["step", "window", "period", "u0", "u1", "g0", "g1", "d0", "d1", *self._values]
        return self._schema(longs)

    @property
    def kept(self) -> pa.Schema:
        """Rows that were kept."""
        units = ["u0", "u1"] if self.units else []
        return self._schema(["step", "window", "verdict", "g0", "g1", *units, *self._values])

    @property
    def noisy(self) -> pa.Schema:
        """Groups that are published."""
        sums = [f"m{number}" for number in range(self.measures)]
        return self._schema(["step", "window", "since", "g0", "g1", *sums])

    @property
    def _values(self) -> list[str]:
        return [f"v{number}" for number in range(self.values)]

    def _schema(self, longs: list[str]) -> pa.Schema:
        keys = [(f"k{number}", _carried(kind)) for number, (_, kind) in enumerate(self.keys)]
        head = [("bucket", pa.int32()), ("kind", pa.int8())]
        names = [(name, pa.int64()) for name in longs]
        return pa.schema([*head, *names, *keys, ("note", pa.string())])

    def of_rows(self, rows: Rows) -> dict[str, Any]:
        """The columns of rows."""
        found = {"step": rows.steps, "window": rows.windows, "period": rows.periods}
        found |= _split("u", rows.units) | _split("g", rows.groups) | _split("d", rows.digests)
        return found | self.of_values(rows.values) | self.of_keys(rows.keys)

    def of_values(self, values: Integers) -> dict[str, Any]:
        """The columns of values."""
        return {name: values[:, number] for number, name in enumerate(self._values)}

    def of_keys(self, keys: pa.Table) -> dict[str, Any]:
        """The columns of keys, as they are carried."""
        return {f"k{n}": carried(keys[name]) for n, (name, _) in enumerate(self.keys)}

    def keys_of(self, table: pa.Table, *, typed: bool = False) -> pa.Table:
        """The key columns, as they are carried, or in their own types."""
        if not self.keys:
            return pa.table({"": pa.nulls(len(table))})
        columns = {name: _whole(table[f"k{n}"]) for n, (name, _) in enumerate(self.keys)}
        if typed:
            columns = {name: _own(columns[name], kind) for name, kind in self.keys}
        return pa.table(columns)

    def rows_of(self, table: pa.Table) -> Rows:
        """Rows as they were; columns that were not carried are zero."""
        size = len(table)
        values = [numbers(table, name) for name in self._values]
        return Rows(
            units=_joined(table, "u", size),
            groups=_joined(table, "g", size),
            digests=_joined(table, "d", size),
            windows=numbers(table, "window"),
            periods=_or_zero(table, "period", size),
            steps=numbers(table, "step"),
            values=np.stack(values, axis=1) if values else np.zeros((size, 0), np.int64),
            keys=self.keys_of(table),
        )


def batch(schema: pa.Schema, columns: Mapping[str, Any], size: int, kind: int) -> pa.RecordBatch:
    """A batch of a schema; columns that are not given are null."""
    named: dict[str, Any] = {**columns, "kind": np.full(size, kind, np.int8)}
    arrays = []
    for field in schema:
        given = named.get(field.name)
        if given is None:
            arrays.append(pa.nulls(size, field.type))
        elif isinstance(given, np.ndarray):
            arrays.append(pa.array(np.ascontiguousarray(given), field.type))
        else:
            arrays.append(_whole(given).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def notes(schema: pa.Schema, bucket: int, texts: list[str]) -> pa.RecordBatch:
    """Notes on their way to a bucket."""
    columns = {"bucket": np.full(len(texts), bucket, np.int32), "note": pa.array(texts)}
    return batch(schema, columns, len(texts), NOTE)


def numbers(table: pa.Table, name: str) -> Integers:
    """A column of whole numbers without nulls."""
    found: Integers = _whole(table[name]).to_numpy(zero_copy_only=False)
    return found


def ids(table: pa.Table, letter: str) -> Words:
    """The 128-bit ids of rows."""
    return _joined(table, letter, len(table))


def carried(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A key column in a type that Spark has, bit for bit."""
    array = _whole(column)
    kind = _carried(array.type)
    return array if kind.equals(array.type) else array.view(kind)


def _carried(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind) or pa.types.is_uint64(kind):
        return {32: pa.int32(), 64: pa.int64()}[kind.bit_width]
    return kind


def _own(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type.equals(kind):
        return array
    return array.view(kind) if _carried(kind).equals(array.type) else array.cast(kind)


def _split(letter: str, words: Words) -> dict[str, Any]:
    signed = np.ascontiguousarray(words).view(np.int64)
    return {f"{letter}0": signed[:, 0], f"{letter}1": signed[:, 1]}


def _joined(table: pa.Table, letter: str, size: int) -> Words:
    if f"{letter}0" not in table.column_names:
        return np.zeros((size, 2), np.uint64)
    pair = [numbers(table, f"{letter}{number}").view(np.uint64) for number in (0, 1)]
    return np.stack(pair, axis=1)


def _or_zero(table: pa.Table, name: str, size: int) -> Integers:
    return numbers(table, name) if name in table.column_names else np.zeros(size, np.int64)


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
