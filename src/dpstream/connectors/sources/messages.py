"""Messages of a broker as rows: JSON, CSV or Arrow payloads, all columns as strings or null.

What becomes of a message depends on that message alone, never on those it was fetched with: a
replay may fetch others beside it. A message that cannot be read is rejected whole, with its place.
"""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.sources.csv import CsvParser
from dpstream.connectors.sources.jsonl import JsonlParser
from dpstream.connectors.sources.text import SHOWN, Bad, Parser, rejected
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Rejected

Where = Callable[[int], str]
"""The place of the n-th message, in words."""
Decoded = tuple[pa.Table, list[Rejected]]
FORMATS = ("json", "csv", "arrow")


class Payloads(Protocol):
    """A format of messages."""

    def decode(
        self, messages: Sequence[bytes | None], where: Where, columns: Sequence[str] | None
    ) -> Decoded:
        """The rows of some messages, in their order, and what could not be read."""
        ...


def payloads(kind: str, *, name: str, fields: Sequence[str] | None = None) -> Payloads:
    """The format `kind`: json, csv (with its `fields`, for messages have no header) or arrow."""
    if kind not in FORMATS:
        raise InvalidParameter(f"a format must be one of {', '.join(FORMATS)}; got {kind!r}")
    if (kind == "csv") != bool(fields):
        raise InvalidParameter(
            f"{name}: fields (the names of the columns, with commas between) go with csv, and csv "
            f"needs them; got format {kind!r} and fields {fields!r}"
        )
    if kind == "arrow":
        return ArrowPayloads()
    return JsonPayloads(name) if kind == "json" else CsvPayloads(name, fields or ())


class JsonPayloads:
    """An object a message, or several with line ends between them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def decode(
        self, messages: Sequence[bytes | None], where: Where, columns: Sequence[str] | None
    ) -> Decoded:
        """Line ends inside one object are blanks."""
        lines = [None if one is None else _one_line(one) for one in messages]
        return _joined(JsonlParser(self._name), lines, where, columns)


class CsvPayloads:
    """A line a message, or several."""

    def __init__(self, name: str, fields: Sequence[str]) -> None:
        self._name, self._fields = name, list(fields)
        header = io.StringIO(newline="")
        csv.writer(header).writerow(self._fields)
        self._parser = CsvParser(name)
        self._parser.head(header.getvalue().encode(), final=True)

    def decode(
        self, messages: Sequence[bytes | None], where: Where, columns: Sequence[str] | None
    ) -> Decoded:
        """Quotes that do not close would reach into the next message: such batches go one by one"""
        if any(b'"' in one for one in messages if one is not None):
            return self._one_by_one(messages, where, columns)
        return _joined(self._parser, messages, where, columns)

    def _one_by_one(
        self, messages: Sequence[bytes | None], where: Where, columns: Sequence[str] | None
    ) -> Decoded:
        rows: list[list[str]] = []
        bad: list[Rejected] = []
        for number, message in enumerate(messages):
            try:
                if message is None or not message.strip():
                    raise ValueError("it is empty")
                found = [*csv.reader(io.StringIO(message.decode(), newline=""), strict=True)]
            except UnicodeDecodeError:
                bad.append(_refused(where(number), message or b"", "it is not UTF-8 text"))
            except (csv.Error, ValueError) as problem:
                bad.append(_refused(where(number), message or b"", str(problem)))
            else:
                rows += [row for row in found if len(row) == len(self._fields)]
                bad += [
                    _refused(where(number), ",".join(row).encode(), self._wrong(row))
                    for row in found
                    if row and len(row) != len(self._fields)
                ]
        self._parser.parse(b"", final=True, columns=columns)  # refuses columns that are not there
        wanted = [n for n in self._fields if columns is None or n in columns]
        cells = {name: [row[self._fields.index(name)] for row in rows] for name in wanted}
        return pa.table({n: pa.array(found, pa.string()) for n, found in cells.items()}), bad

    def _wrong(self, row: list[str]) -> str:
        return f"it has {len(row)} fields but the header has {len(self._fields)}"


class ArrowPayloads:
    """An Arrow IPC stream a message; a column that a message lacks is null."""

    def decode(
        self, messages: Sequence[bytes | None], where: Where, columns: Sequence[str] | None
    ) -> Decoded:
        """Values as text, so that messages of different types go together."""
        tables = [pa.table({name: pa.array([], pa.string()) for name in columns or ()})]
        bad: list[Rejected] = []
        for number, message in enumerate(messages):
            try:
                tables.append(_from_stream(message, columns))
            except (pa.ArrowException, InvalidInput, OSError, ValueError) as problem:
                reason = str(problem).partition("\n")[0]
                bad.append(_refused(where(number), message or b"", f"it is no rows: {reason}"))
        return pa.concat_tables(tables, promote_options="default"), bad


def _joined(
    parser: Parser,
    messages: Sequence[bytes | None],
    where: Where,
    columns: Sequence[str] | None,
) -> Decoded:
    """All messages in one block; a rejected line is known by where it lies."""
    bad = [
        _refused(where(number), b"", "it is empty")
        for number, one in enumerate(messages)
        if one is None or not one.strip()
    ]
    block = b"\n".join(one or b"" for one in messages)
    parsed = parser.parse(block, final=True, columns=columns)
    if parsed.bad:
        starts = [0, *accumulate(len(one or b"") + 1 for one in messages)]
        bad += [_located(one, block, starts, where) for one in parsed.bad]
    return parsed.table, bad


def _located(bad: Bad, block: bytes, starts: Sequence[int], where: Where) -> Rejected:
    return rejected(where(bisect_right(starts, bad.start) - 1), bad, block)


def _refused(where: str, message: bytes, reason: str) -> Rejected:
    return Rejected(where=where, reason=reason, row=message.decode(errors="replace")[:SHOWN])


def _one_line(message: bytes) -> bytes:
    """One object that is written over several lines, on one; other messages as they are."""
    if b"\n" not in message.strip():
        return message.strip(b"\n")
    flat = message.replace(b"\n", b" ")  # a line end within a JSON string is not allowed
    try:
        json.loads(flat)
    except (ValueError, RecursionError):
        return message.strip(b"\n")
    return flat


def _from_stream(message: bytes | None, columns: Iterable[str] | None) -> pa.Table:
    if not message:
        raise InvalidInput("it is empty")
    table = pa.ipc.open_stream(message).read_all()
    if len(set(table.column_names)) < len(table.column_names):
        raise InvalidInput("two columns have one name")
    wanted = table.column_names if columns is None else list(columns)
    table = table.select([name for name in wanted if name in table.column_names])
    table.validate(full=True)  # bytes from elsewhere: lengths and offsets may lie
    found = {one: _as_text(one, table[one]) for one in table.column_names}
    absent = pa.nulls(table.num_rows, pa.string())
    return pa.table({name: found.get(name, absent) for name in wanted})


def _as_text(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_nested(column.type):
        raise InvalidInput(f"the column {name!r} holds {column.type}, not numbers or strings")
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    text = pc.cast(column, pa.string())
    text.validate(full=True)
    return text
