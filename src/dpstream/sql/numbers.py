"""Arithmetic of SQL: NULL where a number cannot be had, never an error."""

from __future__ import annotations

import pyarrow.compute as pc

from dpstream.sql.values import (
    Value,
    as_number,
    as_real,
    as_whole,
    kind,
    only_where,
)

_WIDE = float(2**63 - 2048)


def arithmetic(name: str, left: Value, right: Value) -> Value:
    """+, -, *: NULL where an int64 would overflow."""
    left, right = as_number(left), as_number(right)
    compute = getattr(pc, name)
    if kind(left) == kind(right) == "int64":
        size = pc.abs(compute(as_real(left), as_real(right)))
        return only_where(pc.less(size, _WIDE), compute(left, right))
    return finite(compute(as_real(left), as_real(right)))


def finite(value: Value) -> Value:
    """NULL where a float is NaN or infinite."""
    return only_where(pc.is_finite(value), value)


def divide(left: Value, right: Value) -> Value:
    """Division of floats; NULL by zero."""
    return finite(pc.divide(as_real(left), _nonzero(as_real(right))))


def remainder(zone: str, left: Value, right: Value) -> Value:
    """What whole division leaves, with the sign of the dividend; NULL by zero."""
    left, right = as_number(left), _nonzero(as_number(right))
    if kind(left) == kind(right) == "int64":
        return pc.subtract(left, pc.multiply(right, _quotient(left, right)))
    left, right = as_real(left), as_real(right)
    return finite(pc.subtract(left, pc.multiply(right, pc.trunc(pc.divide(left, right)))))


def whole_division(zone: str, left: Value, right: Value) -> Value:
    """The whole part of a quotient."""
    return _quotient(as_whole(left), _nonzero(as_whole(right)))


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
    return only_where(pc.less(pc.abs(as_real(number)), _WIDE), pc.abs(number))


def rounded(zone: str, value: Value, digits: int = 0) -> Value:
    """ROUND, half away from zero."""
    found = pc.round(as_real(value), ndigits=digits, round_mode="half_towards_infinity")
    return finite(found)
