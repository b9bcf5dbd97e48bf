"""Values of SQL expressions: seven kinds, and how one becomes another; what cannot is NULL.

A value is an Arrow array, or a scalar for a constant. Which kind comes out depends on the kinds
that go in, never on the rows: an empty table has the same types as a full one.

    bool, int64, float64, text, date, moment (an instant, microseconds UTC), null
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.query.column_types import is_text
from dpstream.query.windows import within_calendar
from dpstream.rows import parse

Value: TypeAlias = Any
"""An Arrow array or scalar of one of the kinds."""

MOMENT = pa.timestamp("us", tz="UTC")
KINDS = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "text": pa.string(),
    "date": pa.date32(),
    "moment": MOMENT,
    "null": pa.null(),
}
WIDEST_FLOAT = float(2**63 - 2048)  # floats beyond may lie outside of int64
_WHOLE = r"^\s*[+-]?\d{1,18}\s*$"
_TRUE, _FALSE = ["true", "t", "yes", "1"], ["false", "f", "no", "0"]


def kind(value: Value) -> str:
    """Which of the kinds a value is."""
    return next(name for name, type_ in KINDS.items() if value.type.equals(type_))


def source_column(column: Any, name: str, zone: str) -> pa.Array:
    """A column of a source as one of the kinds; text that is not UTF-8 is NULL."""
    array = parse.whole_column(column)
    type_ = array.type
    if is_text(type_):
        return _readable(pc.cast(array, pa.string()))
    if pa.types.is_boolean(type_) or pa.types.is_null(type_):
        return array
    if pa.types.is_date32(type_):
        return in_calendar(array)
    if pa.types.is_integer(type_) and not pa.types.is_uint64(type_):
        return pc.cast(array, pa.int64())
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return pc.cast(array, pa.float64(), safe=False)
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return as_moment(array, zone)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        array = pc.cast(array, pa.list_(type_.value_type))
        items = source_column(array.flatten(), name, zone)
        sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int32)
        none = np.append(np.asarray(pc.is_null(array), bool), False)
        offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32(), mask=none), items)
    raise InvalidInput(
        f"column {name!r} holds {type_}, which SQL expressions cannot use; convert it first"
    )


def _readable(array: pa.Array) -> pa.Array:
    """Text with NULL where it is not UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.cast(pa.binary()).to_pylist()
        return pa.array([_decode(item) for item in raw], pa.string())
    return array


def _decode(raw: bytes | None) -> str | None:
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        return None


def also_for_scalars(convert: Callable[..., pa.Array]) -> Callable[..., Value]:
    """A conversion of arrays, for constants too."""

    def both(value: Value, *rest: Any) -> Value:
        if isinstance(value, pa.Scalar):
            return convert(pa.repeat(value, 1), *rest)[0]
        return convert(value, *rest)

    return both


def wrong_kind(value: Value, wanted: str) -> InvalidInput:
    """An error about a kind: it is the same for every row, so it comes before the first one."""
    return InvalidInput(f"a {kind(value)} was found where {wanted} is needed; use CAST or CASE")


@also_for_scalars
def as_number(value: pa.Array) -> pa.Array:
    """int64 or float64; text is read as float64, true is 1."""
    if kind(value) in ("int64", "float64"):
        return value
    if kind(value) in ("bool", "null"):
        return pc.cast(value, pa.int64())
    if kind(value) != "text":
        raise wrong_kind(value, "a number")
    return as_float(value)


@also_for_scalars
def as_float(value: pa.Array) -> pa.Array:
    """float64; text that is no finite number is NULL."""
    if kind(value) != "text":
        return pc.cast(as_number(value), pa.float64(), safe=False)
    numbers, readable = parse.numbers(value, "an expression")
    return pa.array(numbers, pa.float64(), mask=~readable | ~np.isfinite(numbers))


@also_for_scalars
def as_integer(value: pa.Array) -> pa.Array:
    """int64; a float is rounded, half away from zero; what does not fit is NULL."""
    if kind(value) in ("int64", "bool", "null"):
        return pc.cast(value, pa.int64())
    if kind(value) == "text":
        trimmed = pc.utf8_trim_whitespace(value)
        direct = only_where(pc.match_substring_regex(trimmed, _WHOLE), trimmed)
        exact = pc.cast(pc.utf8_ltrim(direct, "+"), pa.int64())
        return pc.coalesce(exact, as_integer(as_float(value)))
    rounded = pc.round(as_float(value), round_mode="half_towards_infinity")
    return pc.cast(only_where(pc.less(pc.abs(rounded), WIDEST_FLOAT), rounded), pa.int64())


@also_for_scalars
def as_text(value: pa.Array) -> pa.Array:
    """Text as SQL prints it."""
    if kind(value) == "moment":
        return pc.strftime(value, format="%Y-%m-%d %H:%M:%S+00")
    return pc.cast(value, pa.string())


@also_for_scalars
def as_bool(value: pa.Array) -> pa.Array:
    """True or false; text says so in words, a number is true unless it is 0."""
    if kind(value) == "text":
        words = pc.utf8_lower(pc.utf8_trim_whitespace(value))
        yes, no = (pc.is_in(words, value_set=pa.array(each)) for each in (_TRUE, _FALSE))
        return only_where(pc.or_(yes, no), yes)
    if kind(value) in ("bool", "null"):
        return pc.cast(value, pa.bool_())
    return pc.not_equal(as_number(value), 0)


@also_for_scalars
def as_moment(value: pa.Array, zone: str) -> pa.Array:
    """An instant; text and dates without an offset are in the query's time zone."""
    if value.type.equals(MOMENT) or pa.types.is_null(value.type):
        return in_calendar(pc.cast(value, MOMENT))
    if not (is_text(value.type) or pa.types.is_temporal(value.type)):
        raise wrong_kind(value, "a time")
    micros, readable = parse.times(value, "an expression", zone=zone, unit=None, origin=0)
    return in_calendar(pa.array(micros, pa.int64(), mask=~readable).cast(MOMENT))


@also_for_scalars
def in_calendar(days_or_moments: pa.Array) -> pa.Array:
    """Only days and instants that have a date: calendar functions know no others."""
    micros, readable = parse.instants(days_or_moments, "UTC")
    known = readable & within_calendar(micros)
    return days_or_moments if known.all() else only_where(pa.array(known), days_or_moments)


@also_for_scalars
def as_date(value: pa.Array, zone: str) -> pa.Array:
    """The day of an instant in the query's time zone."""
    if kind(value) in ("date", "null"):
        return pc.cast(value, pa.date32())
    local = pc.local_timestamp(pc.cast(as_moment(value, zone), pa.timestamp("us", tz=zone)))
    return in_calendar(pc.cast(pc.floor_temporal(local, unit="day"), pa.date32()))


def only_where(condition: Value, value: Value) -> Value:
    """The value where the condition holds, elsewhere NULL."""
    return pc.if_else(condition, value, pa.scalar(None, value.type))


def convert(value: Value, to: str, zone: str) -> Value:
    """A value as another kind."""
    if to in ("moment", "date"):
        return (as_moment if to == "moment" else as_date)(value, zone)
    table = {"bool": as_bool, "int64": as_integer, "float64": as_float, "text": as_text}
    return value if to == "null" else table[to](value)


_COMMON_KINDS = {
    frozenset(("int64", "float64")): "float64",
    frozenset(("text", "int64")): "float64",
    frozenset(("text", "float64")): "float64",
    frozenset(("text", "bool")): "bool",
    frozenset(("text", "date")): "date",
    frozenset(("text", "moment")): "moment",
    frozenset(("date", "moment")): "moment",
}


def unify_kinds(values: Sequence[Value], zone: str) -> list[Value]:
    """Values of one kind: text gives way to what it meets, numbers to floats, days to instants."""
    common = "null"
    for value in values:
        each = kind(value)
        if common in ("null", each):
            common = each
        elif each != "null":
            pair = frozenset((common, each))
            if pair not in _COMMON_KINDS:
                raise InvalidInput(
                    f"a {common} and a {each} cannot meet in one expression; use CAST"
                )
            common = _COMMON_KINDS[pair]
    if common == "null":
        return list(values)
    return [
        pc.cast(value, KINDS[common]) if kind(value) == "null" else convert(value, common, zone)
        for value in values
    ]
