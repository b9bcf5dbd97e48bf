"""Columns of a source become times and numbers; what cannot be read is flagged, never fatal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.query.column_types import is_number, is_text
from dpstream.records import Integers, Reals

Mask: TypeAlias = npt.NDArray[np.bool_]

_NUMBER = r"^\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?\s*$"
_ODD_NUMBER = r"(?i)^\s*[+-]?(nan|inf|infinity)\s*$"
_TIME = (
    r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    r"([T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,9})?)?)?(Z|[+-]\d\d:?\d\d|[+-]\d\d)?$"
)
_LARGEST = float(2**62)  # microseconds that an int64 holds with room
_MICROS = {"s": 10**6, "ms": 1000, "us": 1, "ns": 1}  # at most so many, for each unit


def whole_column(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One contiguous array, without dictionary."""
    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _without_type_null(array: pa.Array) -> pa.Array:
    """A column without a value may come without a type: it reads as text that is missing."""
    return pc.cast(array, pa.string()) if pa.types.is_null(array.type) else array


def numbers(column: pa.ChunkedArray | pa.Array, name: str) -> tuple[Reals, Mask]:
    """(values, readable): NULL and empty text are NaN and readable; other text that is no number is
    not readable."""
    array = _without_type_null(whole_column(column))
    kind = array.type
    if is_text(kind):
        text = pc.utf8_trim_whitespace(pc.cast(array, pa.string()))
        plain = _mask(pc.match_substring_regex(text, _NUMBER))
        odd = _mask(pc.match_substring_regex(text, _ODD_NUMBER))
        empty = _mask(pc.equal(text, ""), nulls=True)
        values = np.full(len(array), np.nan)
        values[plain] = cast_each(text.filter(pa.array(plain)), pa.float64()).to_numpy()
        values[odd] = [float(word) for word in text.filter(pa.array(odd)).to_pylist()]
        values[odd & np.isnan(values)] = np.inf  # NaN in the data is not NULL
        return values, plain | odd | empty
    if not (is_number(kind) or pa.types.is_boolean(kind)):
        raise InvalidInput(
            f"column {name!r} must hold numbers; it holds {kind}; aggregate another column"
        )
    if pa.types.is_boolean(kind):
        array = pc.cast(array, pa.int8())
    nulls = _mask(array.is_null())
    values = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False).copy()
    values[np.isnan(values) & ~nulls] = np.inf
    return values, np.ones(len(array), bool)


def times(
    column: pa.ChunkedArray, name: str, *, zone: str, unit: int | None, origin: int
) -> tuple[Integers, Mask]:
    """(microseconds, readable). Times without an offset are in `zone`; numbers count `unit`
    microseconds from `origin`."""
    array = _without_type_null(whole_column(column))
    kind = array.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if numeric or unit is not None:
        if unit is None:
            raise InvalidInput(
                f"the time column {name!r} holds numbers ({kind}); say what they count: "
                "time_unit='s' for seconds since 1970 (time_origin= for another beginning)"
            )
        return _counted(array, name, unit, origin)
    if is_text(kind):
        return written_times(pc.cast(array, pa.string()), zone)
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise InvalidInput(
            f"the time column {name!r} must hold times, ISO text or numbers; it holds {kind}"
        )
    return instants(array, zone)


def _counted(array: pa.Array, name: str, unit: int, origin: int) -> tuple[Integers, Mask]:
    if pa.types.is_integer(array.type):  # exact, whatever else is in the batch
        filled = pc.fill_null(array, pa.scalar(0, array.type)) if array.null_count else array
        size = np.abs(filled.to_numpy(zero_copy_only=False).astype(np.float64)) * unit
        readable = size < _LARGEST
        if array.null_count:
            readable &= ~_mask(array.is_null())
        counts = pc.cast(filled, pa.int64(), safe=False).to_numpy(zero_copy_only=False)
        return np.where(readable, counts, 0) * unit + origin, readable
    values, readable = numbers(array, name)
    with np.errstate(invalid="ignore", over="ignore"):
        micros = np.floor(values * unit)
        readable = readable & (np.abs(micros) < _LARGEST)
    return np.where(readable, micros, 0).astype(np.int64) + origin, readable


def fits_micros(array: pa.Array) -> Mask:
    """Where a date, instant or length of time is NULL or has microseconds in 62 bits."""
    kind = array.type
    days = pa.types.is_date32(kind)
    factor = 86_400 * 10**6 if days else _MICROS[getattr(kind, "unit", "ms")]
    if factor == 1:
        return np.ones(len(array), bool)
    counts = array.view(pa.int32() if days else pa.int64()).fill_null(0)
    near: Mask = np.abs(counts.to_numpy(zero_copy_only=False) * float(factor)) < _LARGEST
    return near


def instants(array: pa.Array, zone: str) -> tuple[Integers, Mask]:
    """(microseconds, readable) of dates and timestamps; those without an offset are in `zone`."""
    readable = ~_mask(array.is_null()) & fits_micros(array)  # a cast would turn far times around
    kind = array.type
    aware = pa.types.is_timestamp(kind) and kind.tz is not None
    micros = pc.cast(array, pa.timestamp("us", tz=kind.tz if aware else None), safe=False)
    if not aware and zone != "UTC":
        micros = pc.assume_timezone(micros, zone, ambiguous="earliest", nonexistent="earliest")
    counts = pc.cast(micros, pa.int64(), safe=False)
    return pc.fill_null(counts, 0).to_numpy(zero_copy_only=False), readable


def written_times(text: pa.Array, zone: str) -> tuple[Integers, Mask]:
    """(microseconds, readable) of ISO 8601 text; times without an offset are in `zone`."""
    text = pc.utf8_trim_whitespace(text)
    shaped = _mask(pc.match_substring_regex(text, _TIME))
    offset = _mask(pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d|[T ].*[+-]\d\d)$")) & shaped
    micros, readable = np.zeros(len(text), np.int64), np.zeros(len(text), bool)
    for rows, with_zone in ((shaped & offset, True), (shaped & ~offset, False)):
        if not rows.any():
            continue
        kind = pa.timestamp("us", tz="UTC") if with_zone else pa.timestamp("us")
        cut = pc.replace_substring_regex(text.filter(pa.array(rows)), r"(\.\d{6})\d+", r"\1")
        micros[rows], readable[rows] = instants(cast_each(cut, kind), zone)
    return micros, readable


def cast_each(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast all; where the whole fails (30 February), halves find the rows to blame: NULL."""
    try:
        return pc.cast(text, kind)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return pa.nulls(1, kind)
        middle = len(text) // 2
        return pa.concat_arrays([cast_each(text[:middle], kind), cast_each(text[middle:], kind)])


def invalid(array: pa.Array) -> Mask:
    """Where a value breaks the rules of its own type, as a time of 25 hours does."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return np.ones(1, bool)
        middle = len(array) // 2
        return np.concatenate([invalid(array[:middle]), invalid(array[middle:])])
    return np.zeros(len(array), bool)


def _mask(array: Any, *, nulls: bool = False) -> Mask:
    filled = pc.fill_null(array, nulls)
    mask: Mask = filled.to_numpy(zero_copy_only=False).astype(bool, copy=False)
    return mask


def row_codes(columns: Sequence[pa.Array], size: int) -> Integers:
    """A number for each row, the same for rows that are equal in every column."""
    codes: Integers = np.zeros(size, np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + np.asarray(encoded.indices, np.int64)
        if len(columns) > 1:  # small numbers again, so that the next column has room
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1)
    return codes
