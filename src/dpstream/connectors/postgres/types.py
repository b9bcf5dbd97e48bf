"""Columns of PostgreSQL as Arrow: what the server sends as CSV, and what becomes of it.

Whole numbers, floats, booleans, dates and times keep their types, numeric(p, s) is a decimal; all
else is text as PostgreSQL spells it (numeric without bounds, uuid, json, arrays, composites, ...).
A value that Arrow cannot hold, such as a time at infinity, makes its row unusable and no other.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpstream.connectors.database import identifier
from dpstream.errors import InvalidInput
from dpstream.records import Rejected

_LARGEST = 2**31 - 1  # bytes of a block of CSV
_EXACT: dict[str, pa.DataType] = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "bytea": pa.binary(),
}
_DAY = r"\d{4}-\d\d-\d\d"
_PLAIN = {
    "date": rf"^{_DAY}$",
    "timestamp": rf"^{_DAY} \d\d:\d\d:\d\d(\.\d{{1,6}})?$",
    "timestamptz": rf"^{_DAY} \d\d:\d\d:\d\d(\.\d{{1,6}})?\+00$",
    "numeric": r"^-?\d+(\.\d+)?$",
}
"""How values look that Arrow holds; others are infinite, NaN, or before our era."""
_MOST_DIGITS = 38

_COLUMNS = """
WITH RECURSIVE kinds (name, number, type, modifier) AS (
    SELECT attname, attnum, atttypid, atttypmod FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
  UNION ALL  -- a domain is what it is made of
    SELECT name, number, t.typbasetype, t.typtypmod FROM kinds JOIN pg_type t ON t.oid = kinds.type
    WHERE t.typtype = 'd')
SELECT name, t.typname, modifier FROM kinds JOIN pg_type t ON t.oid = kinds.type
WHERE t.typtype <> 'd' ORDER BY number
"""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, its type there and here."""

    name: str
    sort: str
    kind: pa.DataType

    @property
    def asked(self) -> str:
        """The expression whose text is sent."""
        name = identifier(self.name)
        if self.sort == "bytea":
            return f"encode({name}, 'hex')"
        if self.sort == "bool":
            return f"{name}::int"
        if self.sort == "numeric" and self.kind == pa.string():
            return f"trim_scale({name})"  # 1.5 and 1.50 are one number
        return name if self.kind != pa.string() else f"{name}::text"

    def taken(self, text: pa.Array) -> tuple[pa.Array, pa.Array]:
        """(values, which of them cannot be held)."""
        bad = pa.array(np.zeros(len(text), bool))
        if self.kind == pa.string():
            return text, bad
        if self.sort == "bytea":
            values = [None if one is None else bytes.fromhex(one) for one in text.to_pylist()]
            return pa.array(values, pa.binary()), bad
        if self.sort == "bool":
            return text.cast(pa.int8()).cast(pa.bool_()), bad
        if self.sort in _PLAIN:
            fits = pc.match_substring_regex(text, _PLAIN[self.sort])
            bad = pc.invert(pc.fill_null(fits, True))
            text = pc.if_else(bad, pa.scalar(None, pa.string()), text)
        return text.cast(self.kind), bad


def columns_of(connection: Any, table: int) -> dict[str, Column]:
    """The columns of a table, by its oid."""
    found = connection.execute(_COLUMNS, (table,)).fetchall()
    return {
        name: Column(name=name, sort=sort, kind=_kind(sort, modifier))
        for name, sort, modifier in found
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class FetchedRows:
    """Rows as they came: those that can be used, the rest, how many in all, and the last key."""

    table: pa.Table
    rejected: list[Rejected]
    rows: int
    last: int | None


def decode(content: bytes, columns: Sequence[Column], *, place: str) -> FetchedRows:
    """The rows of a COPY in CSV; the first column is the key, which names a row."""
    names = [f"{number}" for number in range(len(columns))]
    if not content:
        empty = pa.table({one.name: pa.array([], one.kind) for one in columns})
        return FetchedRows(table=empty, rejected=[], rows=0, last=None)
    try:
        texts = pyarrow.csv.read_csv(
            io.BytesIO(content),
            read_options=pyarrow.csv.ReadOptions(
                column_names=names,
                use_threads=False,
                block_size=min(len(content) + 1, _LARGEST),  # a row must fit into a block
            ),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
                quoted_strings_can_be_null=False,  # NULL comes bare, an empty text in quotes
            ),
        ).combine_chunks()
        arrays = [text.chunk(0) if text.num_chunks else pa.array([], pa.string()) for text in texts]
        taken = [one.taken(text) for one, text in zip(columns, arrays, strict=True)]
    except pa.ArrowInvalid as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidInput(f"{place} sent what cannot be read: {reason}") from problem
    table = pa.table([values for values, _ in taken], names=[one.name for one in columns])
    bad: Any = np.zeros(table.num_rows, bool)
    for _, mask in taken:
        bad |= mask.to_numpy(zero_copy_only=False)
    wrong = [_rejected(int(row), columns, arrays, taken, place) for row in np.flatnonzero(bad)]
    return FetchedRows(
        table=table.filter(pa.array(~bad)) if wrong else table,
        rejected=wrong,
        rows=table.num_rows,
        last=int(arrays[0][-1].as_py()),
    )


def _rejected(
    row: int, columns: Sequence[Column], texts: Sequence[pa.Array], taken: Any, place: str
) -> Rejected:
    at = next(n for n, (_, mask) in enumerate(taken) if mask[row].as_py())
    cells = {one.name: text[row].as_py() for one, text in zip(columns, texts, strict=True)}
    return Rejected(
        where=f"{place}, {columns[0].name} = {cells[columns[0].name]}",
        reason=f"{columns[at].name} is {cells[columns[at].name]}, which {columns[at].kind} lacks",
        row=", ".join(f"{name}: {value}" for name, value in cells.items())[:4096],
    )


def _kind(sort: str, modifier: int) -> pa.DataType:
    if sort == "numeric" and modifier >= 4:
        digits, scale = (modifier - 4) >> 16 & 0xFFFF, modifier - 4 & 0x7FF
        if digits <= _MOST_DIGITS and scale <= digits:  # a negative scale is a large one here
            return pa.decimal128(digits, scale)
    return _EXACT.get(sort, pa.string())
