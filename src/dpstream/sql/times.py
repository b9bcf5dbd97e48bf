"""Parts and beginnings of times, in the query's time zone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.sql.values import (
    MOMENT,
    Value,
    as_moment,
    as_real,
    as_whole,
    kind,
    only_where,
)

_FAR = float(2**62)  # microseconds, far beyond the calendar

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


UNITS = ("SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "ISOWEEK", "MONTH", "QUARTER", "YEAR")
"""Units that DATE_TRUNC cuts at; weeks begin on Sunday, ISO weeks on Monday."""


def part_of(zone: str, value: Value, part: str) -> Value:
    """EXTRACT, in the query's time zone."""
    local = pc.cast(as_moment(value, zone), pa.timestamp("us", tz=zone))
    found = PARTS[part](local)
    return found if part == "DATE" else pc.cast(found, pa.int64())


def truncated(zone: str, value: Value, unit: str) -> Value:
    """The beginning of the second, day, month, ... in the query's time zone."""
    options: dict[str, Any] = {"unit": unit.lower().removeprefix("iso")}
    if unit in ("WEEK", "ISOWEEK"):
        options["week_starts_monday"] = unit == "ISOWEEK"
    if kind(value) == "date":
        days = pc.floor_temporal(pc.cast(value, pa.timestamp("us")), **options)
        return pc.cast(pc.floor_temporal(days, unit="day"), pa.date32())
    local = pc.cast(as_moment(value, zone), pa.timestamp("us", tz=zone))
    return pc.cast(pc.floor_temporal(local, **options), pa.timestamp("us", tz="UTC"))


def from_epoch(factor: int) -> Callable[[str, Value], Value]:
    """An instant from a whole number of units since 1970; NULL beyond the calendar."""

    def compute(zone: str, value: Value) -> Value:
        whole = as_whole(value)
        near = only_where(pc.less(pc.abs(as_real(whole)), _FAR / factor), whole)
        return as_moment(pc.cast(pc.multiply(near, factor), MOMENT), zone)

    return compute


TRUNCATIONS = ("DATE_TRUNC", "TIMESTAMP_TRUNC", "DATETIME_TRUNC")
