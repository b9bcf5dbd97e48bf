"""Rows that cannot be used: found one by one, marked with a reason, spelled out for the operator.

No row may stop the feed or touch another row: whatever is in it, it is read, or set aside.
"""

from __future__ import annotations

import json
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.records import Rejected
from dpstream.stages import parse, texts

Codes = npt.NDArray[np.uint8]
"""Why a row cannot be used; 0: it can."""


class Reason(IntEnum):
    """Why a row cannot be used."""

    MISSING_UNIT = 1
    TIME = 2
    ARRIVAL = 3
    NUMBER = 4
    NOT_FINITE = 5
    OVERSIZE_KEY = 6
    AHEAD = 7
    NOT_UTF8 = 8
    TYPE = 9


_WORDS = {
    Reason.MISSING_UNIT: "missing unit",
    Reason.TIME: "unparsable time",
    Reason.ARRIVAL: "unparsable arrival time",
    Reason.NUMBER: "not a number",
    Reason.NOT_FINITE: "NaN or infinite number",
    Reason.OVERSIZE_KEY: "oversize key",
    Reason.AHEAD: "time too far ahead of the clock",
    Reason.NOT_UTF8: "invalid UTF-8",
    Reason.TYPE: "not of its column's type",
}
_CUT = 4096


def flag(reasons: Codes, code: int, bad: parse.Mask) -> None:
    """Note a reason; the first one of a row counts."""
    if bad.any():
        reasons[bad & (reasons == 0)] = code


def readable_text(table: pa.Table, name: str) -> tuple[pa.Array, parse.Mask]:
    """A column, with "" where it is text that is not UTF-8, and where that is."""
    array = parse.whole_column(table[name])
    bad = np.zeros(len(table), bool)
    if parse.is_text(array.type) and not texts.plain(array):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            raw = array.cast(pa.binary()).to_pylist()
            bad[:] = [item is not None and not _is_utf8(item) for item in raw]
            whole = [b"" if wrong else item for item, wrong in zip(raw, bad, strict=True)]
            array = pa.array(whole, pa.binary()).cast(pa.string())
    return array, bad


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def missing(units: pa.Array) -> parse.Mask:
    """Where no unit is named."""
    if not units.null_count and (not parse.is_text(units.type) or texts.lengths(units)[0] > 0):
        return np.zeros(len(units), bool)
    none = units.is_null().to_numpy(zero_copy_only=False)
    if parse.is_text(units.type):
        empty = pc.fill_null(pc.equal(units, ""), True)
        none = none | empty.to_numpy(zero_copy_only=False)
    return np.asarray(none, bool)


def oversize(column: pa.ChunkedArray, most: int) -> parse.Mask:
    """Where a key is longer than it may be."""
    if not (parse.is_text(column.type) or pa.types.is_binary(column.type)):
        return np.zeros(len(column), bool)
    if all(texts.lengths(chunk)[1] <= most for chunk in column.chunks):
        return np.zeros(len(column), bool)
    sizes = pc.fill_null(pc.binary_length(column), 0)
    return np.asarray(sizes.to_numpy() > most, bool)


def reject(table: pa.Table, reasons: Codes, where: str) -> list[Rejected]:
    """The rows that were marked, with their reasons."""
    bad = np.flatnonzero(reasons)
    raw = table.take(pa.array(bad)) if len(bad) else table.slice(0, 0)
    raw = pa.table({name: parse.whole_column(raw[name]) for name in raw.column_names})
    try:
        found = raw.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):  # a date or text that Python lacks
        found = [
            {name: _spelled(raw[name][i]) for name in raw.column_names} for i in range(len(raw))
        ]
    return [
        Rejected(
            where=f"{where}, row {number}",
            reason=_WORDS[Reason(reasons[number])],
            row=json.dumps(row, default=str, ensure_ascii=False)[:_CUT],
        )
        for number, row in zip(bad.tolist(), found, strict=True)
    ]


def _spelled(value: pa.Scalar) -> object:
    """A value as Python has it, or else as near as can be."""
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        if parse.is_text(value.type):
            return value.as_buffer().to_pybytes().decode(errors="replace")
        return f"a {value.type} that cannot be shown"
