"""One form for equal values: what of an Arrow column is hashed, and under which tag.

A column becomes parts: the first covers every row, a later one replaces the rows it names, for
values that need a tag of their own. Equal values have the same tag and the same bytes, whatever
type they are stored in; different values differ in one of the two. The tags are part of every
stored id: a number that has been used never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpstream.errors import InvalidInput
from dpstream.records import Integers

NULL, BOOLEAN, INTEGER, UNSIGNED, FLOAT, TEXT, BINARY, DECIMAL, DATE = range(9)
LOCAL, ZONED, TIME, DURATION = 16, 20, 24, 28  # plus the unit's number
MICRO, NANO, MILLI, SECOND = range(4)

_MOST_DIGITS = Context(prec=100)  # decimal256 has 76


@dataclass(frozen=True, kw_only=True, eq=False)
class Fixed:
    """Eight bytes a row; `rows` says which rows these are, None that they are all."""

    tag: int
    words: NDArray[np.uint64]
    rows: NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Any number of bytes a row: row i is data[offsets[i] : offsets[i + 1]]."""

    tag: int
    data: NDArray[np.uint8]
    offsets: NDArray[np.int32] | NDArray[np.int64]


Part = Fixed | Slices
Rule = Callable[[pa.Array], Iterator[Part]]


def rule(kind: pa.DataType) -> Rule:
    """How columns of a type are taken apart, if they have rows; a NULL row's part means nothing.

    >>> [part.words.tolist() for part in rule(pa.int8())(pa.array([1, 2], pa.int8()))]
    [[1, 2]]
    """
    for holds, parts in _RULES:
        if holds(kind):
            return parts
    raise InvalidInput(
        f"a column of type {kind} cannot be hashed: ids are made from single values; "
        "use one of its fields, or cast it to a string, a number or a time"
    )


def _values(array: pa.Array, dtype: np.dtype[Any], extra: int = 0) -> NDArray[Any]:
    """The array's own values as they lie in memory, those of NULL rows too."""
    start, count = array.offset * dtype.itemsize, len(array) + extra
    return np.frombuffer(array.buffers()[1], dtype, count, start)


def _words(values: NDArray[Any]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(values).view(np.uint64)


def _booleans(array: pa.Array) -> Iterator[Part]:
    values = _values(pc.cast(array, pa.uint8()), np.dtype(np.uint8))
    yield Fixed(tag=BOOLEAN, words=values.astype(np.uint64))


def _integers(array: pa.Array) -> Iterator[Part]:
    values = _values(array, np.dtype(array.type.to_pandas_dtype()))
    yield Fixed(tag=INTEGER, words=_words(values.astype(np.int64, copy=False)))
    if array.type == pa.uint64() and (large := values >= np.uint64(2**63)).any():
        yield Fixed(tag=UNSIGNED, words=_words(values[large]), rows=large)


def _floats(array: pa.Array) -> Iterator[Part]:
    values = _values(array, np.dtype(array.type.to_pandas_dtype())).astype(np.float64)
    values += 0.0  # -0.0 becomes 0.0
    values[np.isnan(values)] = np.nan  # one sign, one payload
    yield Fixed(tag=FLOAT, words=_words(values))


def _text(array: pa.Array) -> Iterator[Part]:
    yield from _slices(array, TEXT)


def _binary(array: pa.Array) -> Iterator[Part]:
    yield from _slices(array, BINARY)


def _slices(array: pa.Array, tag: int) -> Iterator[Part]:
    kind = array.type
    if kind in (pa.string_view(), pa.binary_view()):
        array = pc.cast(array, pa.large_string() if tag == TEXT else pa.large_binary())
    if pa.types.is_fixed_size_binary(kind):
        # shape: row i is the `width` bytes from i * width on
        offsets = np.arange(array.offset, array.offset + len(array) + 1) * kind.byte_width
    else:
        large = array.type in (pa.large_string(), pa.large_binary())
        offsets = _values(array, np.dtype(np.int64 if large else np.int32), extra=1)
    data = array.buffers()[-1]
    yield Slices(tag=tag, data=np.frombuffer(data or b"", np.uint8), offsets=offsets)


def _decimals(array: pa.Array) -> Iterator[Part]:
    """The shortest plain text: 1.50 and 1.5 are equal, whatever their scale and width."""
    kind = array.type
    if kind.bit_width < 128:  # no dictionaries of these
        array = pc.cast(array, pa.decimal128(kind.precision, kind.scale))
    distinct = array.dictionary_encode()
    texts = pa.array([plain(value) for value in distinct.dictionary.to_pylist()], pa.large_string())
    yield from _slices(texts.take(distinct.indices), DECIMAL)


def plain(value: Decimal) -> str:
    """The shortest text without an exponent.

    >>> plain(Decimal("1.50")), plain(Decimal("1E+2"))
    ('1.5', '100')
    """
    return format(value.normalize(_MOST_DIGITS), "f")


def _dates(array: pa.Array) -> Iterator[Part]:
    if array.type == pa.date32():
        days = _values(array, np.dtype(np.int32)).astype(np.int64)
    else:
        days = _values(array, np.dtype(np.int64)) // np.int64(86_400_000)
    yield Fixed(tag=DATE, words=_words(days))


def _times(array: pa.Array) -> Iterator[Part]:
    """Microseconds; where they do not fit or are too coarse, the one other unit that is exact."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        tag = LOCAL if kind.tz is None else ZONED
    else:
        tag = DURATION if pa.types.is_duration(kind) else TIME
    stored = np.dtype(np.int32 if pa.types.is_time32(kind) else np.int64)
    raw: Integers = _values(array, stored).astype(np.int64, copy=False)
    if kind.unit == "us":
        yield Fixed(tag=tag + MICRO, words=_words(raw))
    elif kind.unit == "ns":
        micros = raw // 1000
        yield Fixed(tag=tag + MICRO, words=_words(micros))
        if (finer := micros * 1000 != raw).any():
            yield Fixed(tag=tag + NANO, words=_words(raw[finer]), rows=finer)
    else:
        yield from _coarse_times(raw, tag, 1000 if kind.unit == "ms" else 1_000_000)


def _coarse_times(raw: Integers, tag: int, micros: int) -> Iterator[Part]:
    yield Fixed(tag=tag + MICRO, words=_words(raw * micros))
    if (far := _overflows(raw, micros)).any():
        millis = micros // 1000
        yield Fixed(tag=tag + MILLI, words=_words(raw[far] * millis), rows=far)
        if millis > 1 and (farther := _overflows(raw, millis)).any():
            yield Fixed(tag=tag + SECOND, words=_words(raw[farther]), rows=farther)


def _overflows(values: Integers, factor: int) -> NDArray[np.bool_]:
    """Is values * factor beyond int64? (One limit serves both signs: 1000 does not divide 2^63.)"""
    limit = (2**63 - 1) // factor
    return (values > limit) | (values < -limit)


_RULES: tuple[tuple[Callable[[pa.DataType], bool], Rule], ...] = (
    (lambda kind: kind in (pa.string(), pa.large_string(), pa.string_view()), _text),
    (pa.types.is_integer, _integers),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_floating, _floats),
    (pa.types.is_date, _dates),
    (pa.types.is_timestamp, _times),
    (pa.types.is_time, _times),
    (pa.types.is_duration, _times),
    (pa.types.is_decimal, _decimals),
    (lambda kind: kind in (pa.binary(), pa.large_binary(), pa.binary_view()), _binary),
    (pa.types.is_fixed_size_binary, _binary),
    (pa.types.is_null, lambda array: iter(())),
)
