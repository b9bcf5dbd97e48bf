"""What each SQL function computes, as `pyarrow.compute` calls: one table of names.

Every function looks at one row at a time and is NULL where it cannot be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.sql.numbers import absolute, finite, remainder, rounded, whole_division
from dpstream.sql.times import from_epoch
from dpstream.sql.values import (
    Value,
    as_bool,
    as_date,
    as_moment,
    as_number,
    as_real,
    as_text,
    kind,
    only_where,
    together,
)


@dataclass(frozen=True)
class Function:
    """How many arguments, which of them must be constants, and what is computed.

    `compute(zone, *arguments)`: constants arrive as Python values.
    """

    compute: Callable[..., Value]
    least: int = 1
    most: int = 1
    constants: Mapping[int, type] = field(default_factory=dict)


def joined(*values: Value) -> Value:
    """Text after text; NULL if one of them is."""
    return pc.binary_join_element_wise(*map(as_text, values), "", null_handling="emit_null")


def choose(zone: str, condition: Value, yes: Value, no: Value) -> Value:
    """IF; a condition that is NULL does not hold."""
    yes, no = together([yes, no], zone)
    return pc.if_else(pc.fill_null(as_bool(condition), False), yes, no)


def first_known(zone: str, *values: Value) -> Value:
    """COALESCE."""
    return pc.coalesce(*together(values, zone))


def null_if(zone: str, value: Value, other: Value) -> Value:
    """NULL where both are equal."""
    left, right = together([value, other], zone)
    same = pc.fill_null(pc.equal(left, right), False)
    return pc.if_else(same, pa.scalar(None, value.type), value)


def _extreme(pick: Callable[..., Value]) -> Callable[..., Value]:
    def compute(zone: str, *values: Value) -> Value:
        alike = together(values, zone)
        known = reduce(pc.and_, (pc.is_valid(value) for value in alike))
        return only_where(known, pick(*alike, skip_nulls=True))

    return compute


def _text(compute: Callable[[Value], Value]) -> Function:
    return Function(lambda zone, value: compute(as_text(value)))


def _real(compute: Callable[[Value], Value]) -> Function:
    return Function(lambda zone, value: finite(compute(as_real(value))))


def _numeric(compute: Callable[[Value], Value]) -> Function:
    """A function that keeps whole numbers whole."""

    def both(zone: str, value: Value) -> Value:
        number = as_number(value)
        return number if kind(number) == "int64" else compute(number)

    return Function(both)


def _substring(zone: str, value: Value, start: int, length: int | None = None) -> Value:
    first = start - 1 if start > 0 else start  # 0 reads as 1, negative counts from the end
    if length is not None and length <= 0:
        return pc.utf8_slice_codeunits(as_text(value), 0, 0)
    if length is None:
        return pc.utf8_slice_codeunits(as_text(value), first)
    stop = first + length
    if first < 0 <= stop:
        return pc.utf8_slice_codeunits(pc.utf8_slice_codeunits(as_text(value), first), 0, length)
    return pc.utf8_slice_codeunits(as_text(value), first, stop)


def _right(zone: str, value: Value, count: int) -> Value:
    return _substring(zone, value, -count) if count > 0 else _substring(zone, value, 1, 0)


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


def _extracted(text: Value, pattern: str) -> Value:
    return pc.struct_field(pc.extract_regex(text, one_group(pattern)), "part")


def one_group(pattern: str) -> str:
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


def element(zone: str, lists: Value, at: int) -> Value:
    """An item of a list, counted from 0; NULL beyond its end."""
    one = pc.list_slice(lists, at, at + 1, return_fixed_size_list=True)
    return pc.list_element(one, 0)


def split(zone: str, value: Value, separator: str = ",") -> Value:
    """Text to a list of its parts."""
    return pc.split_pattern(as_text(value), separator)


FUNCTIONS: dict[str, Function] = {
    "ABS": Function(absolute),
    "CEIL": _numeric(pc.ceil),
    "COALESCE": Function(first_known, 1, 64),
    "CONCAT": Function(lambda zone, *values: joined(*values), 1, 64),
    "DATE": Function(lambda zone, value: as_date(value, zone)),
    "DIV": Function(whole_division, 2, 2),
    "ENDS_WITH": _with_pattern(lambda text, end: pc.ends_with(text, pattern=end)),
    "EXP": _real(pc.exp),
    "FLOOR": _numeric(pc.floor),
    "GREATEST": Function(_extreme(pc.max_element_wise), 1, 64),
    "IF": Function(choose, 3, 3),
    "LEAST": Function(_extreme(pc.min_element_wise), 1, 64),
    "LEFT": Function(
        lambda zone, value, count: pc.utf8_slice_codeunits(as_text(value), 0, max(count, 0)),
        2,
        2,
        {1: int},
    ),
    "LENGTH": _text(lambda text: pc.cast(pc.utf8_length(text), pa.int64())),
    "LN": _real(pc.ln),
    "LOG10": _real(pc.log10),
    "LOWER": _text(pc.utf8_lower),
    "LTRIM": _trim(pc.utf8_ltrim_whitespace, pc.utf8_ltrim),
    "MOD": Function(remainder, 2, 2),
    "NULLIF": Function(null_if, 2, 2),
    "POW": Function(lambda zone, x, y: finite(pc.power(as_real(x), as_real(y))), 2, 2),
    "REGEXP_CONTAINS": _with_pattern(lambda text, p: pc.match_substring_regex(text, pattern=p)),
    "REGEXP_EXTRACT": _with_pattern(_extracted),
    "REGEXP_REPLACE": _with_pattern(
        lambda text, p, new: pc.replace_substring_regex(text, pattern=p, replacement=new), 2
    ),
    "REPLACE": _with_pattern(
        lambda text, old, new: pc.replace_substring(text, pattern=old, replacement=new), 2
    ),
    "REVERSE": _text(pc.utf8_reverse),
    "RIGHT": Function(_right, 2, 2, {1: int}),
    "ROUND": Function(rounded, 1, 2, {1: int}),
    "RTRIM": _trim(pc.utf8_rtrim_whitespace, pc.utf8_rtrim),
    "SIGN": Function(lambda zone, value: pc.cast(pc.sign(as_number(value)), pa.int64())),
    "SPLIT": Function(split, 1, 2, {1: str}),
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
}


_ALIASES = {
    "CEILING": "CEIL",
    "CHAR_LENGTH": "LENGTH",
    "CHARACTER_LENGTH": "LENGTH",
    "IFNULL": "COALESCE",
    "NVL": "COALESCE",
    "POWER": "POW",
    "SUBSTRING": "SUBSTR",
    "TO_DATE": "DATE",
}


FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in _ALIASES.items()}
