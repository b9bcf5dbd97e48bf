"""What each SQL operator and function computes, as `pyarrow.compute` calls.

Every one looks at one row at a time and is NULL where it cannot be computed, never an error. Each
takes the query's time zone first. `FUNCTIONS` is the table of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.sql_compiler.sql_values import (
    MOMENT,
    WIDEST_FLOAT,
    Value,
    as_bool,
    as_date,
    as_float,
    as_integer,
    as_moment,
    as_number,
    as_text,
    in_calendar,
    kind,
    only_where,
    unify_kinds,
)

_FAR = float(2**62)  # microseconds, far beyond the calendar


def arithmetic(name: str, zone: str, left: Value, right: Value) -> Value:
    """+, -, *: NULL where an int64 would overflow."""
    left, right = as_number(left), as_number(right)
    compute = getattr(pc, name)
    if kind(left) == kind(right) == "int64":
        size = pc.abs(compute(as_float(left), as_float(right)))
        return only_where(pc.less(size, WIDEST_FLOAT), compute(left, right))
    return finite(compute(as_float(left), as_float(right)))


def finite(value: Value) -> Value:
    """NULL where a float is NaN or infinite."""
    return only_where(pc.is_finite(value), value)


def compare(name: str, zone: str, left: Value, right: Value) -> Value:
    """=, <>, <, <=, >, >=: NULL where one side is NULL."""
    left, right = unify_kinds([left, right], zone)
    if kind(left) == "null":
        return pc.cast(left, pa.bool_())
    return getattr(pc, name)(left, right)


def divide(zone: str, left: Value, right: Value) -> Value:
    """Division of floats; NULL by zero."""
    return finite(pc.divide(as_float(left), _nonzero(as_float(right))))


def remainder(zone: str, left: Value, right: Value) -> Value:
    """What whole division leaves, with the sign of the dividend; NULL by zero."""
    left, right = as_number(left), _nonzero(as_number(right))
    if kind(left) == kind(right) == "int64":
        return pc.subtract(left, pc.multiply(right, _quotient(left, right)))
    left, right = as_float(left), as_float(right)
    return finite(pc.subtract(left, pc.multiply(right, pc.trunc(pc.divide(left, right)))))


def whole_division(zone: str, left: Value, right: Value) -> Value:
    """The whole part of a quotient."""
    return _quotient(as_integer(left), _nonzero(as_integer(right)))


def _quotient(left: Value, right: Value) -> Value:
    """Whole division by what is not 0; a NULL must not hide a 0 that is divided by."""
    return only_where(pc.is_valid(right), pc.divide(left, pc.fill_null(right, 1)))


def _nonzero(value: Value) -> Value:
    return only_where(pc.not_equal(value, 0), value)


def absolute(zone: str, value: Value) -> Value:
    """ABS; NULL where an int64 would overflow."""
    number = as_number(value)
    if kind(number) == "float64":
        return pc.abs(number)
    return only_where(pc.less(pc.abs(as_float(number)), WIDEST_FLOAT), pc.abs(number))


def round_number(zone: str, value: Value, digits: int = 0) -> Value:
    """ROUND, half away from zero."""
    return finite(pc.round(as_float(value), ndigits=digits, round_mode="half_towards_infinity"))


PARTS = {
    "MICROSECOND": lambda t: pc.add(pc.multiply(pc.millisecond(t), 1000), pc.microsecond(t)),
    "MILLISECOND": pc.millisecond,
    "SECOND": pc.second,
    "MINUTE": pc.minute,
    "HOUR": pc.hour,
    "DAY": pc.day,
    "DAYOFWEEK": lambda t: pc.day_of_week(t, count_from_zero=False, week_start=7),
    "DAYOFYEAR": pc.day_of_year,
    "ISOWEEK": pc.iso_week,
    "MONTH": pc.month,
    "QUARTER": pc.quarter,
    "YEAR": pc.year,
    "ISOYEAR": pc.iso_year,
    "DATE": lambda t: pc.cast(pc.floor_temporal(pc.local_timestamp(t), unit="day"), pa.date32()),
}
"""Parts of an instant, as EXTRACT knows them."""

TRUNCATIONS = ("DATE_TRUNC", "TIMESTAMP_TRUNC", "DATETIME_TRUNC")
UNITS = ("SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "ISOWEEK", "MONTH", "QUARTER", "YEAR")
"""Units that DATE_TRUNC cuts at; weeks begin on Sunday, ISO weeks on Monday."""


def extract_part(zone: str, value: Value, part: str) -> Value:
    """EXTRACT, in the query's time zone."""
    extracted = PARTS[part](_local(zone, value))
    return in_calendar(extracted) if part == "DATE" else pc.cast(extracted, pa.int64())


def _local(zone: str, value: Value) -> Value:
    return pc.cast(as_moment(value, zone), pa.timestamp("us", tz=zone))


def truncate_time(zone: str, value: Value, unit: str) -> Value:
    """The beginning of the second, day, month, ... in the query's time zone."""
    options: dict[str, Any] = {"unit": unit.lower().removeprefix("iso")}
    if unit in ("WEEK", "ISOWEEK"):
        options["week_starts_monday"] = unit == "ISOWEEK"
    if kind(value) == "date":
        days = pc.floor_temporal(pc.cast(value, pa.timestamp("us")), **options)
        return in_calendar(pc.cast(pc.floor_temporal(days, unit="day"), pa.date32()))
    return as_moment(pc.cast(pc.floor_temporal(_local(zone, value), **options), MOMENT), zone)


def from_epoch(factor: int) -> Callable[[str, Value], Value]:
    """An instant from a whole number of units since 1970; NULL beyond the calendar."""

    def compute(zone: str, value: Value) -> Value:
        number = as_integer(value)
        near = only_where(pc.less(pc.abs(as_float(number)), _FAR / factor), number)
        return as_moment(pc.cast(pc.multiply(near, factor), MOMENT), zone)

    return compute


@dataclass(frozen=True)
class Function:
    """How many arguments, which of them must be constants, and what is computed.

    `compute(zone, *arguments)`: constants arrive as Python values.
    """

    compute: Callable[..., Value]
    least: int = 1
    most: int = 1
    constants: Mapping[int, type] = field(default_factory=dict)


def concatenate(zone: str, *values: Value) -> Value:
    """Text after text; NULL if one of them is."""
    return pc.binary_join_element_wise(*map(as_text, values), "", null_handling="emit_null")


def if_else(zone: str, condition: Value, yes: Value, no: Value) -> Value:
    """IF; a condition that is NULL does not hold."""
    yes, no = unify_kinds([yes, no], zone)
    return pc.if_else(pc.fill_null(as_bool(condition), False), yes, no)


def coalesce(zone: str, *values: Value) -> Value:
    """COALESCE."""
    return pc.coalesce(*unify_kinds(values, zone))


def null_if(zone: str, value: Value, other: Value) -> Value:
    """NULL where both are equal."""
    left, right = unify_kinds([value, other], zone)
    same = pc.fill_null(pc.equal(left, right), False)
    return pc.if_else(same, pa.scalar(None, value.type), value)


def _extreme(pick: Callable[..., Value]) -> Callable[..., Value]:
    def compute(zone: str, *values: Value) -> Value:
        alike = unify_kinds(values, zone)
        known = reduce(pc.and_, map(pc.is_valid, alike))
        return only_where(known, pick(*alike, skip_nulls=True))

    return compute


def _text(compute: Callable[[Value], Value]) -> Function:
    return Function(lambda zone, value: compute(as_text(value)))


def _real(compute: Callable[[Value], Value]) -> Function:
    return Function(lambda zone, value: finite(compute(as_float(value))))


def _numeric(compute: Callable[[Value], Value]) -> Function:
    """A function that keeps whole numbers whole."""

    def both(zone: str, value: Value) -> Value:
        number = as_number(value)
        return number if kind(number) == "int64" else compute(number)

    return Function(both)


def _substring(zone: str, value: Value, start: int, length: int | None = None) -> Value:
    first = start - 1 if start > 0 else start  # 0 reads as 1, negative counts from the end
    text = as_text(value)
    if length is None:
        return pc.utf8_slice_codeunits(text, first)
    if length <= 0:
        return pc.utf8_slice_codeunits(text, 0, 0)
    if first < 0 <= first + length:
        return pc.utf8_slice_codeunits(pc.utf8_slice_codeunits(text, first), 0, length)
    return pc.utf8_slice_codeunits(text, first, first + length)


def _trim(plain: Callable[..., Value], of: Callable[..., Value]) -> Function:
    def compute(zone: str, value: Value, characters: str | None = None) -> Value:
        text = as_text(value)
        return plain(text) if characters is None else of(text, characters=characters)

    return Function(compute, 1, 2, {1: str})


def _with_pattern(compute: Callable[..., Value], constants: int = 1) -> Function:
    """A function of text and constant text."""

    def both(zone: str, value: Value, *words: str) -> Value:
        return compute(as_text(value), *words)

    return Function(both, 1 + constants, 1 + constants, {1 + at: str for at in range(constants)})


def _extract_regex(text: Value, pattern: str) -> Value:
    return pc.struct_field(pc.extract_regex(text, name_group(pattern)), "part")


def name_group(pattern: str) -> str:
    """The pattern with its one group named, or all of it as the group."""
    at, inside = 0, False
    while at < len(pattern):
        here = pattern[at]
        if here == "\\":
            at += 1
        elif here == "[":
            inside = True
        elif here == "]":
            inside = False
        elif here == "(" and not inside and pattern[at + 1 : at + 2] != "?":
            return f"{pattern[: at + 1]}?P<part>{pattern[at + 1 :]}"
        at += 1
    return f"(?P<part>{pattern})"


def list_item(zone: str, lists: Value, at: int) -> Value:
    """An item of a list, counted from 0; NULL beyond its end."""
    return pc.list_element(pc.list_slice(lists, at, at + 1, return_fixed_size_list=True), 0)


def split(zone: str, value: Value, separator: str = ",") -> Value:
    """Text to a list of its parts."""
    return pc.split_pattern(as_text(value), separator)


def range_bucket(zone: str, value: Value, borders: Sequence[float]) -> Value:
    """How many of the borders are at most the value."""
    if not borders or any(a > b for a, b in pairwise(borders)):
        raise ValueError("borders are listed from the least to the largest")
    number = as_float(value)
    reached = (pc.cast(pc.less_equal(border, number), pa.int64()) for border in borders)
    return reduce(pc.add, reached)


def width_bucket(zone: str, value: Value, low: float, high: float, count: int) -> Value:
    """The number of a value's part, of equal ones from low to high; 0 below, count + 1 above."""
    if not (low < high and 1 <= count <= 1_000_000):
        raise ValueError("low must be below high, with 1 to 1000000 parts")
    number = as_float(value)
    inside = pc.min_element_wise(
        pc.max_element_wise(number, low, skip_nulls=False), high, skip_nulls=False
    )
    share = pc.divide(pc.subtract(inside, low), high - low)
    part = pc.add(
        pc.min_element_wise(pc.floor(pc.multiply(share, count)), count - 1.0, skip_nulls=False), 1
    )
    part = pc.if_else(pc.less(number, low), 0.0, part)
    return pc.cast(pc.if_else(pc.greater_equal(number, high), count + 1.0, part), pa.int64())


FUNCTIONS: dict[str, Function] = {
    "ABS": Function(absolute),
    "CEIL": _numeric(pc.ceil),
    "COALESCE": Function(coalesce, 1, 64),
    "CONCAT": Function(concatenate, 1, 64),
    "DATE": Function(lambda zone, value: as_date(value, zone)),
    "DIV": Function(whole_division, 2, 2),
    "ENDS_WITH": _with_pattern(lambda text, end: pc.ends_with(text, pattern=end)),
    "EXP": _real(pc.exp),
    "FLOOR": _numeric(pc.floor),
    "GREATEST": Function(_extreme(pc.max_element_wise), 1, 64),
    "IF": Function(if_else, 3, 3),
    "LEAST": Function(_extreme(pc.min_element_wise), 1, 64),
    "LEFT": Function(lambda zone, value, n: _substring(zone, value, 1, n), 2, 2, {1: int}),
    "LENGTH": _text(lambda text: pc.cast(pc.utf8_length(text), pa.int64())),
    "LN": _real(pc.ln),
    "LOG10": _real(pc.log10),
    "LOWER": _text(pc.utf8_lower),
    "LTRIM": _trim(pc.utf8_ltrim_whitespace, pc.utf8_ltrim),
    "MOD": Function(remainder, 2, 2),
    "NULLIF": Function(null_if, 2, 2),
    "POW": Function(lambda zone, x, y: finite(pc.power(as_float(x), as_float(y))), 2, 2),
    "RANGE_BUCKET": Function(range_bucket, 2, 2, {1: list}),
    "REGEXP_CONTAINS": _with_pattern(lambda text, p: pc.match_substring_regex(text, pattern=p)),
    "REGEXP_EXTRACT": _with_pattern(_extract_regex),
    "REGEXP_REPLACE": _with_pattern(
        lambda text, p, new: pc.replace_substring_regex(text, pattern=p, replacement=new), 2
    ),
    "REPLACE": _with_pattern(
        lambda text, old, new: pc.replace_substring(text, pattern=old, replacement=new), 2
    ),
    "REVERSE": _text(pc.utf8_reverse),
    "RIGHT": Function(lambda zone, value, n: _substring(zone, value, -n, n), 2, 2, {1: int}),
    "ROUND": Function(round_number, 1, 2, {1: int}),
    "RTRIM": _trim(pc.utf8_rtrim_whitespace, pc.utf8_rtrim),
    "SAFE_DIVIDE": Function(divide, 2, 2),
    "SIGN": Function(lambda zone, value: pc.cast(pc.sign(as_number(value)), pa.int64())),
    "SQRT": _real(pc.sqrt),
    "STARTS_WITH": _with_pattern(lambda text, begin: pc.starts_with(text, pattern=begin)),
    "STRPOS": _with_pattern(
        lambda text, part: pc.add(pc.cast(pc.find_substring(text, pattern=part), pa.int64()), 1)
    ),
    "SUBSTR": Function(_substring, 2, 3, {1: int, 2: int}),
    "TIMESTAMP": Function(lambda zone, value: as_moment(value, zone)),
    "TIMESTAMP_MICROS": Function(from_epoch(1)),
    "TIMESTAMP_MILLIS": Function(from_epoch(1_000)),
    "TIMESTAMP_SECONDS": Function(from_epoch(1_000_000)),
    "TRIM": _trim(pc.utf8_trim_whitespace, pc.utf8_trim),
    "TRUNC": _numeric(pc.trunc),
    "UPPER": _text(pc.utf8_upper),
    "WIDTH_BUCKET": Function(width_bucket, 4, 4, {1: float, 2: float, 3: int}),
}


_ALIASES = {
    "CEILING": "CEIL",
    "CHAR_LENGTH": "LENGTH",
    "CHARACTER_LENGTH": "LENGTH",
    "IFF": "IF",
    "IFNULL": "COALESCE",
    "INSTR": "STRPOS",
    "NVL": "COALESCE",
    "POWER": "POW",
    "REGEXP": "REGEXP_CONTAINS",
    "REGEXP_LIKE": "REGEXP_CONTAINS",
    "SUBSTRING": "SUBSTR",
    "TO_DATE": "DATE",
}


FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in _ALIASES.items()}
