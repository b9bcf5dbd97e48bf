"""Dates and times in SQL: differences, shifts, and their formats, each of one row alone.

Formats are read and written without the locale of the process, so every machine gives the same.
What has no date (30 February, a year beyond the calendar) is NULL.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.query.windows import within_calendar
from dpstream.rows import parse
from dpstream.sql_compiler.functions import Function, extract_part
from dpstream.sql_compiler.sql_values import (
    MOMENT,
    Value,
    also_for_scalars,
    as_date,
    as_float,
    as_integer,
    as_moment,
    as_text,
    in_calendar,
    kind,
    only_where,
)

FIXED_UNITS = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": 1_000_000,
    "MINUTE": 60_000_000,
    "HOUR": 3_600_000_000,
    "DAY": 86_400_000_000,
    "WEEK": 604_800_000_000,
}
"""Units of one length, in microseconds."""
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
SHIFT_UNITS = (*FIXED_UNITS, *_MONTHS)
_DAYS = {"DAY": 1, "WEEK": 7}
BOUNDARIES = (*FIXED_UNITS, "ISOWEEK", *_MONTHS, "ISOYEAR")
"""Units whose beginnings DATE_DIFF and DATETIME_DIFF count."""
DIFFERENCES = ("DATE_DIFF", "DATETIME_DIFF", "TIMESTAMP_DIFF")
"""DATE_DIFF(end, start, DAY): the unit comes last."""
UNIT_FIRST = {
    "DATEDIFF": "DATETIME_DIFF",
    "TIMESTAMPDIFF": "TIMESTAMP_DIFF",
    "DATEADD": "DATE_ADD",
    "TIMESTAMPADD": "TIMESTAMP_ADD",
}
"""DATEDIFF(DAY, start, end) and DATEADD(DAY, n, time): the unit comes first."""
SHIFTS = {
    f"{what}_{way}": (what, sign)
    for what in ("DATE", "DATETIME", "TIMESTAMP")
    for way, sign in (("ADD", 1), ("SUB", -1))
}
"""DATE_ADD(day, INTERVAL 1 DAY) and its relatives: what is shifted, and in which direction."""
_FAR = 10_000_000  # a shift by more days or months leaves every calendar


def difference(name: str, zone: str, end: Value, start: Value, unit: str) -> Value:
    """From start to end: whole units for TIMESTAMP_DIFF, beginnings of units for the others."""
    if name == "TIMESTAMP_DIFF":
        micros = pc.subtract(*(pc.cast(as_moment(each, zone), pa.int64()) for each in (end, start)))
        return pc.divide(micros, FIXED_UNITS[unit])
    if name == "DATE_DIFF":
        end, start = as_date(end, zone), as_date(start, zone)
    return pc.subtract(_unit_number(zone, end, unit), _unit_number(zone, start, unit))


def _unit_number(zone: str, value: Value, unit: str) -> Value:
    """How many beginnings of units lie before a time, as clocks in the query's zone show it."""
    if kind(value) == "date":
        local = pc.cast(value, pa.timestamp("us"))
    else:
        local = pc.local_timestamp(pc.cast(as_moment(value, zone), pa.timestamp("us", tz=zone)))
    if unit in _MONTHS:
        months = pc.add(pc.multiply(pc.year(local), 12), pc.subtract(pc.month(local), 1))
        return _floor_divide(months, _MONTHS[unit])
    if unit == "ISOYEAR":
        return pc.iso_year(local)
    micros = pc.cast(local, pa.int64())
    if unit in ("WEEK", "ISOWEEK"):  # 1970 began on a Thursday
        past = 4 if unit == "WEEK" else 3
        return _floor_divide(pc.add(micros, past * FIXED_UNITS["DAY"]), FIXED_UNITS["WEEK"])
    return _floor_divide(micros, FIXED_UNITS[unit])


def _floor_divide(value: Value, by: int) -> Value:
    quotient = pc.divide(value, by)
    below = pc.less(pc.subtract(value, pc.multiply(quotient, by)), 0)
    return pc.subtract(quotient, pc.cast(below, pa.int64()))


def shift(what: str, sign: int, zone: str, value: Value, count: Value, unit: str) -> Value:
    """A time so many units later. Of an instant a day is 24 hours; a month ends by its last day."""
    count = as_integer(count)
    count = only_where(pc.less(pc.abs(as_float(count)), 2.0**62), count)
    by_days = unit in _DAYS or unit in _MONTHS
    if what == "DATE" and kind(value) in ("text", "null") and by_days:
        value = as_date(value, zone)
    if kind(value) == "date" and what != "TIMESTAMP" and by_days:
        near = only_where(pc.less(pc.abs(count), _FAR), count)
        if unit in _MONTHS:
            return _as_arrays(_add_months, value, pc.multiply(near, sign * _MONTHS[unit]))
        days = pc.add(
            pc.cast(pc.cast(value, pa.int32()), pa.int64()), pc.multiply(near, sign * _DAYS[unit])
        )
        return in_calendar(pc.cast(pc.cast(days, pa.int32()), pa.date32()))
    if unit in _MONTHS:
        raise InvalidInput(
            f"a {unit} has no fixed length, and this moves an instant; use DATE(...) of it, or days"
        )
    size = FIXED_UNITS[unit]
    near = only_where(pc.less(pc.abs(count), 2**60 // size), count)
    micros = pc.cast(as_moment(value, zone), pa.int64())
    return as_moment(pc.cast(pc.add(micros, pc.multiply(near, sign * size)), MOMENT), zone)


def _as_arrays(compute: Callable[..., pa.Array], *values: Value) -> Value:
    """Call with arrays of one length, where some values may be constants."""
    sizes = [len(each) for each in values if not isinstance(each, pa.Scalar)]
    size = sizes[0] if sizes else 1
    arrays = [pa.repeat(v, size) if isinstance(v, pa.Scalar) else v for v in values]
    return compute(*arrays) if sizes else compute(*arrays)[0]


def _add_months(dates: pa.Array, months: pa.Array) -> pa.Array:
    known = pc.and_(pc.is_valid(dates), pc.is_valid(months)).to_numpy(zero_copy_only=False)
    days = _numbers(pc.cast(dates, pa.int32())).astype("M8[D]")
    month = days.astype("M8[M]")
    day = (days - month.astype("M8[D]")).astype(np.int64)
    target = month + _numbers(months).astype("m8[M]")
    first = target.astype("M8[D]")
    last = ((target + np.timedelta64(1, "M")).astype("M8[D]") - first).astype(np.int64) - 1
    moved = first.astype(np.int64) + np.minimum(day, last)
    return in_calendar(pa.array(moved, pa.int32(), mask=~known).cast(pa.date32()))


def _numbers(array: pa.Array) -> Any:
    """Whole numbers as NumPy has them, 0 for NULL."""
    return np.asarray(pc.fill_null(pc.cast(array, pa.int64()), 0), np.int64)


_SHORT = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%D": "%m/%d/%y"}
_WRITTEN = "YmdHMSyjbBaAuwpIVGeU"
"""Parts of a format that are written."""
_MONTH_NAMES = (
    *("january", "february", "march", "april", "may", "june", "july"),
    *("august", "september", "october", "november", "december"),
)
_READ = {
    "Y": r"(?P<Y>\d{4})",
    "m": r"(?P<m>\d{1,2})",
    "d": r"(?P<d>\d{1,2})",
    "e": r" ?(?P<d>\d{1,2})",
    "H": r"(?P<H>\d{1,2})",
    "M": r"(?P<M>\d{1,2})",
    "S": r"(?P<S>\d{1,2})",
    "y": r"(?P<y>\d{2})",
    "b": rf"(?P<b>(?i:{'|'.join(name[:3] for name in _MONTH_NAMES)}))",
    "B": rf"(?P<b>(?i:{'|'.join(_MONTH_NAMES)}))",
    "f": r"(?P<f>\d{1,6})",
    "z": r"(?P<z>Z|[+-]\d{2}:?\d{2})",
    "I": r"(?P<I>\d{1,2})",
    "p": r"(?P<p>(?i:am|pm))",
}
"""Parts of a format that are read, each as a pattern with a group of that name."""
_JAVA = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S"}
_ORACLE = {"YYYY": "%Y", "MM": "%m", "DD": "%d", "HH24": "%H", "MI": "%M", "SS": "%S"}


def _expand(pattern: str, known: str) -> list[str]:
    """A format's parts: letters of `%x`, and text in between as it stands after a quote mark."""
    for short, long in _SHORT.items():
        pattern = pattern.replace(short, long)
    parts = []
    for found in re.finditer(r"%(E\*S|E[0-9]S|.|$)|([^%]+)", pattern, re.DOTALL):
        letter, text = found.groups()
        if text is not None or letter == "%":
            parts.append("'" + (text or "%"))
        elif letter not in known or not letter:
            listed = " ".join(f"%{each}" for each in sorted([*known, *"FTRD"]))
            raise ValueError(f"%{letter} is not among {listed}")
        else:
            parts.append(letter)
    return parts


def write_time(zone: str, pattern: str, value: Value, other_zone: str | None = None) -> Value:
    """FORMAT_TIMESTAMP and FORMAT_DATE, in the query's time zone or another; seconds are whole."""
    parts = _expand(pattern, _WRITTEN)
    shown = "".join(p[1:].replace("%", "%%") if p[0] == "'" else f"%{p}" for p in parts)
    if kind(value) == "date":
        local = pc.cast(value, pa.timestamp("s"))
    else:
        local = pc.cast(as_moment(value, zone), pa.timestamp("us", tz=other_zone or zone))
        local = pc.cast(
            pc.floor_temporal(local, unit="second"), pa.timestamp("s", tz=local.type.tz)
        )
    return pc.strftime(local, format=shown)


def _write_as(words: dict[str, str]) -> Callable[..., Value]:
    """DATE_FORMAT and TO_CHAR: formats of other databases, in their own words."""

    def compute(zone: str, value: Value, pattern: str) -> Value:
        tokens = "|".join(sorted(words, key=len, reverse=True))
        rest = re.sub(tokens, "", pattern)
        if re.search("[A-Za-z]", rest):
            raise ValueError(f"{rest.strip()} is not among {', '.join(words)}")
        pattern = re.sub(tokens, lambda found: words[found.group()], pattern.replace("%", "%%"))
        return write_time(zone, pattern, value)

    return compute


def read_time(zone: str, pattern: str, value: Value, other_zone: str | None = None) -> Value:
    """PARSE_TIMESTAMP: NULL where the text is not of the format, or names no day or time."""
    letters = _expand(pattern, "".join(_READ))
    shown = "".join(re.escape(p[1:]) if p[0] == "'" else _READ[p] for p in letters)
    names = re.findall(r"\?P<(\w)>", shown)
    if len(set(names)) < len(names):
        raise ValueError("a part of the time is there twice")

    @also_for_scalars
    def compute(texts: pa.Array) -> pa.Array:
        parts = pc.extract_regex(texts, rf"^\s*{shown}\s*$")
        if not len(texts):
            return pa.array([], MOMENT)
        return _moments(parts, names, other_zone or zone)

    return compute(as_text(value))


def _moments(parts: pa.Array, names: list[str], zone: str) -> pa.Array:
    """Instants from the parts of a date and a time, by their letters."""
    read = pc.is_valid(parts).to_numpy(zero_copy_only=False)

    def part(name: str, default: int) -> Any:
        if name not in names:
            return np.full(len(parts), default)
        text = pc.struct_field(parts, name)
        text = pc.if_else(pc.equal(text, ""), None, text)
        if name == "b":
            short = pc.utf8_lower(pc.utf8_slice_codeunits(text, 0, 3))
            return _numbers(pc.index_in(short, pa.array([n[:3] for n in _MONTH_NAMES]))) + 1
        if name == "f":
            text = pc.utf8_rpad(text, 6, "0")
        return _numbers(pc.cast(text, pa.int64()))

    year = part("Y", 1970)
    if "y" in names:
        short_year = part("y", 70)
        year = np.where(short_year < 69, 2000, 1900) + short_year
    month, day = part("b" if "b" in names else "m", 1), part("d", 1)
    hour, minute, second = part("H", 0), part("M", 0), part("S", 0)
    if "I" in names:
        half = part("I", 12)
        late = np.zeros(len(parts), bool)
        if "p" in names:
            late = np.asarray(
                pc.fill_null(pc.equal(pc.utf8_lower(pc.struct_field(parts, "p")), "pm"), False)
            )
        read = read & (half >= 1) & (half <= 12)
        hour = half % 12 + 12 * late
    good = read & (month >= 1) & (month <= 12) & (day >= 1)
    good &= (hour < 24) & (minute < 60) & (second < 60)
    months = (np.where(good, (year - 1970) * 12 + month - 1, 0)).astype("M8[M]")
    days = months.astype("M8[D]").astype(np.int64) + np.where(good, day, 1) - 1
    good &= days.astype("M8[D]").astype("M8[M]") == months
    clock = ((hour * 60 + minute) * 60 + second) * 1_000_000 + part("f", 0)
    micros = np.where(good, days * FIXED_UNITS["DAY"] + clock, 0)
    if "z" in names:
        micros = micros - _offsets(pc.struct_field(parts, "z"))
        good &= within_calendar(micros)
        return in_calendar(pa.array(micros, pa.int64(), mask=~good).cast(MOMENT))
    local = pa.array(micros, pa.int64(), mask=~(good & within_calendar(micros)))
    moments, readable = parse.times(
        local.cast(pa.timestamp("us")), "an expression", zone=zone, unit=None, origin=0
    )
    known = readable & np.asarray(pc.is_valid(local))
    return in_calendar(pa.array(moments, pa.int64(), mask=~known).cast(MOMENT))


def _offsets(texts: pa.Array) -> Any:
    """Microseconds that clocks are ahead of UTC: of Z, +hhmm or +hh:mm."""
    digits = pc.replace_substring(pc.replace_substring(texts, "Z", "+0000"), ":", "")
    sign = np.where(np.asarray(pc.fill_null(pc.starts_with(digits, "-"), False)), -1, 1)
    number = _numbers(
        pc.cast(
            pc.if_else(pc.equal(digits, ""), None, pc.utf8_slice_codeunits(digits, 1, 5)),
            pa.int64(),
        )
    )
    return sign * (number // 100 * 60 + number % 100) * FIXED_UNITS["MINUTE"]


def read_date(zone: str, pattern: str, value: Value) -> Value:
    """PARSE_DATE."""
    return as_date(read_time("UTC", pattern, value), "UTC")


def _since_1970(size: int) -> Function:
    def compute(zone: str, value: Value) -> Value:
        return _floor_divide(pc.cast(as_moment(value, zone), pa.int64()), size)

    return Function(compute)


def _part(name: str) -> Function:
    return Function(lambda zone, value: extract_part(zone, value, name))


_WRITE = Function(write_time, 2, 3, {0: str, 2: str})
_READ_TIME = Function(read_time, 2, 3, {0: str, 2: str})
TIME_FUNCTIONS: dict[str, Function] = {
    "DATE_FORMAT": Function(_write_as(_JAVA), 2, 2, {1: str}),
    "FORMAT_DATE": Function(
        lambda zone, pattern, value: write_time(zone, pattern, as_date(value, zone)), 2, 2, {0: str}
    ),
    "FORMAT_DATETIME": _WRITE,
    "FORMAT_TIMESTAMP": _WRITE,
    "PARSE_DATE": Function(read_date, 2, 2, {0: str}),
    "PARSE_DATETIME": _READ_TIME,
    "PARSE_TIMESTAMP": _READ_TIME,
    "TO_CHAR": Function(_write_as(_ORACLE), 2, 2, {1: str}),
    "TO_TIMESTAMP": Function(lambda zone, value: as_moment(value, zone)),
    "UNIX_MICROS": _since_1970(1),
    "UNIX_MILLIS": _since_1970(1_000),
    "UNIX_SECONDS": _since_1970(1_000_000),
    **{
        part: _part(part)
        for part in ("YEAR", "QUARTER", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")
    },
}
