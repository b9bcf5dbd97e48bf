"""Windows of event time, by the words that stream users know; edges, triggers, periods as ticks.

Times are whole microseconds since the Unix epoch, UTC. Whole days in a time zone follow its
calendar, so a day may have 23 or 25 hours, and months are those of the calendar in every zone;
every other length is a fixed duration.
"""

from __future__ import annotations

import re
from calendar import monthrange
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from dpstream.errors import InvalidParameter
from dpstream.privacy.state.identity import Identified
from dpstream.records import Integers

SECOND = 1_000_000
DAY = 86_400 * SECOND
MONTH = 146_097 * DAY // 4800
"""Stands for a month of the calendar: 400 years have 146,097 days, and this is their mean month."""
_CALENDAR = {"month": MONTH, "quarter": 3 * MONTH, "year": 12 * MONTH}
_UNITS = {
    "microsecond": 1,
    "millisecond": 1000,
    "second": SECOND,
    "minute": 60 * SECOND,
    "hour": 3600 * SECOND,
    "day": DAY,
    "week": 7 * DAY,
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = -(62_135_596_800 * SECOND), 253_402_300_800 * SECOND  # years 1 to 9999


class Micros(int):
    """A duration or an instant that has been understood before."""


Duration: TypeAlias = timedelta | str | Micros
"""What `duration` takes, such as "15 minutes"."""
Instant: TypeAlias = datetime | date | str | Micros
"""What `instant` takes."""


def duration(value: Any, name: str, *, least: int = 1, calendar: bool = False) -> Micros:
    """Microseconds of a timedelta, or of words such as "15 minutes".

    Months, quarters and years are lengths only where `calendar` says that edges are counted by it.

    >>> duration("15 minutes", "every"), duration(timedelta(days=1), "window")
    (900000000, 86400000000)
    >>> duration("1 quarter", "window", calendar=True) == 3 * MONTH
    True
    """
    units = _UNITS | _CALENDAR if calendar else _UNITS
    by_calendar = calendar and isinstance(value, Micros)
    if isinstance(value, Micros):
        micros = int(value)
    elif isinstance(value, timedelta):
        micros = value // timedelta(microseconds=1)
    elif isinstance(value, str) and (
        match := re.fullmatch(r"\s*(\d+)\s*([a-z]+?)s?\s*", value.lower())
    ):
        if match[2] not in units:
            raise InvalidParameter(
                f"{name} must be in {', '.join(unit + 's' for unit in units)}; got {value!r}"
            )
        micros = int(match[1]) * units[match[2]]
        by_calendar = match[2] in _CALENDAR
    elif value in (0, "0"):
        micros = 0
    else:
        raise InvalidParameter(
            f"{name} must be a timedelta or words such as '15 minutes'; got {value!r}"
        )
    if micros < least:
        raise InvalidParameter(f"{name} must be at least {least} microseconds; got {value!r}")
    if months_in(micros) and not (by_calendar and micros <= _MOST_MONTHS * MONTH):
        raise InvalidParameter(
            f"{name} must be a fixed length of time, or at most {_MOST_MONTHS} months where the "
            f"calendar counts; got {value!r}, which stands for {in_words(micros)} of the calendar"
        )
    return Micros(micros)


_MOST_MONTHS = 1200


def months_in(length: int) -> int:
    """How many months of the calendar a length stands for; 0: it is a fixed one, or of days.

    >>> months_in(duration("1 year", "window", calendar=True)), months_in(30 * DAY)
    (12, 0)
    """
    return 0 if length % MONTH else length // MONTH


_STRAY = 5 * DAY
"""Months from tick to tick are never further from their mean: 3.5 days, and changes of a clock."""


def shortest(length: int) -> int:
    """The least that months may last; other lengths as they are.

    >>> shortest(MONTH) // DAY, shortest(DAY) == DAY
    (25, True)
    """
    return length - _STRAY if months_in(length) else length


def longest(length: int) -> int:
    """The most that months may last; other lengths as they are.

    >>> longest(12 * MONTH) // DAY
    370
    """
    return length + _STRAY if months_in(length) else length


def in_words(length: int) -> str:
    """A duration for people.

    >>> in_words(900_000_000), in_words(86_400_000_000)
    ('15 minutes', '1 day')
    """
    for unit, size in reversed((_UNITS | {"month": MONTH, "year": 12 * MONTH}).items()):
        if length % size == 0 and length:
            count = length // size
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "0 seconds"


def instant(value: Any, name: str, zone: str = "UTC") -> Micros:
    """Microseconds of a datetime, a date, or ISO text; without an offset it is in `zone`.

    >>> instant("2012-07-04", "start"), instant("2012-07-04T02:00+02:00", "start")
    (1341360000000000, 1341360000000000)
    """
    if isinstance(value, Micros):
        return value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidParameter(
                f"{name} must be a time such as '2024-05-01T00:00'; got {value!r}"
            ) from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise InvalidParameter(f"{name} must be a datetime or ISO text; got {value!r}")
    if value.tzinfo is None:
        value = value.replace(tzinfo=time_zone(zone))
    return Micros((value - _EPOCH) // timedelta(microseconds=1))


def iso(time: int | None) -> str | None:
    """An instant as ISO text in UTC.

    >>> iso(1341360000000000)
    '2012-07-04T00:00:00+00:00'
    """
    return None if time is None else (_EPOCH + timedelta(microseconds=time)).isoformat()


def time_zone(name: str) -> ZoneInfo:
    """A zone of the tz database."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidParameter(
            f"time_zone must be a name such as 'Europe/Rome'; got {name!r}"
        ) from None


@lru_cache(maxsize=256)
def keeps_its_offset(name: str) -> bool:
    """Is a zone free of clock changes, from 1970 to 2050?

    >>> keeps_its_offset("Asia/Tokyo"), keeps_its_offset("Europe/Rome")
    (True, False)
    """
    zone = time_zone(name)
    months = (datetime(y, m, 1, tzinfo=zone) for y in range(1970, 2050) for m in range(1, 13))
    return len({month.utcoffset() for month in months}) == 1


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """Times `origin`, `origin + size`, ...; days and months are counted in `zone`'s calendar.

    Months from the 31st on end by the last day of shorter ones.
    """

    origin: int
    size: int
    zone: str = "UTC"

    @property
    def calendar(self) -> bool:
        """Are these months, or days of a calendar with daylight saving?"""
        return bool(self.months) or (self.zone != "UTC" and self.size % DAY == 0)

    @property
    def months(self) -> int:
        """How many months it is from tick to tick; 0: these are no months."""
        return months_in(self.size)

    def at(self, number: int) -> int:
        """The time of a tick; ticks before the origin have negative numbers.

        >>> rome = Ticks(origin=instant("2024-03-30", "start", "Europe/Rome"), size=DAY,
        ...              zone="Europe/Rome")
        >>> [(rome.at(n + 1) - rome.at(n)) // (3600 * SECOND) for n in range(3)]
        [24, 23, 24]
        >>> months = Ticks(origin=instant("2024-01-31", "start"), size=MONTH)
        >>> [iso(months.at(number))[:10] for number in range(-1, 3)]
        ['2023-12-31', '2024-01-31', '2024-02-29', '2024-03-31']
        """
        if not self.calendar:
            return self.origin + number * self.size
        local = _local(self.origin, self.zone).replace(tzinfo=None)
        if self.months:
            year, month = divmod(local.year * 12 + local.month - 1 + number * self.months, 12)
            day = min(local.day, monthrange(year, month + 1)[1])
            moved = local.replace(year=year, month=month + 1, day=day)
        else:
            moved = local + timedelta(days=number * (self.size // DAY))
        return instant(moved, "a tick", self.zone)

    def before(self, times: Integers) -> Integers:
        """The number of the last tick at or before each time."""
        guess: Integers = (times - self.origin) // self.size
        if not self.calendar or not len(times):
            return guess
        first, last = int(guess.min()) - 2, int(guess.max()) + 2
        edges = _edges(self, first, last)
        return first + np.searchsorted(edges, times, side="right") - 1

    def last_before(self, time: int) -> int:
        """The number of the last tick at or before one time."""
        if not self.calendar:
            return (time - self.origin) // self.size
        return int(self.before(np.array([time]))[0])

    def next_from(self, time: int) -> int:
        """The number of the first tick at or after one time."""
        return self.last_before(time - 1) + 1


@lru_cache(maxsize=256)
def _local(time: int, zone: str) -> datetime:
    return (_EPOCH + timedelta(microseconds=time)).astimezone(time_zone(zone))


@lru_cache(maxsize=64)
def _edges(ticks: Ticks, first: int, last: int) -> Integers:
    return np.array([ticks.at(number) for number in range(first, last + 1)], np.int64)


def within_calendar(times: Integers) -> npt.NDArray[np.bool_]:
    """Which times have a date (years 1 to 9999)."""
    return (times >= _FIRST) & (times < _LAST)


@dataclass(frozen=True)
class Tumble(Identified, identity="tumble", keys="size"):
    """Windows of one size, side by side, from the query's start on.

    Whole days, months, quarters and years follow the calendar of the query's time zone.

    >>> Tumble("1 hour").size // 10**6  # microseconds are what windows count in
    3600
    >>> Tumble("1 month").cells
    1
    """

    size: Any
    kind: ClassVar[Literal["tumble", "hop", "cumulate"]] = "tumble"
    part: ClassVar[str] = "size"
    """The field that says how far it is from one edge to the next."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", duration(self.size, "the window's size", calendar=True))
        if self.part == "size":
            return
        length = duration(getattr(self, self.part), f"the window's {self.part}", calendar=True)
        object.__setattr__(self, self.part, length)
        if bool(months_in(self.size)) != bool(months_in(length)):
            raise InvalidParameter(
                f"months have 28 to 31 days, so the window's {self.part} must be in months where "
                f"its size is; got size={in_words(self.size)}, {self.part}={in_words(length)}; "
                "for figures within a month publish it while it is open (EMIT EVERY, every=)"
            )
        if self.size % length or self.size == length:
            raise InvalidParameter(
                f"the window's size must be a multiple of its {self.part}, and more than one; got "
                f"size={in_words(self.size)}, {self.part}={in_words(length)}"
            )

    @property
    def cell(self) -> int:
        """From one edge to the next."""
        return int(getattr(self, self.part))

    @property
    def cells(self) -> int:
        """How many cells a whole window has; at most that many windows share a row."""
        return int(self.size) // self.cell

    def check(self, zone: str) -> None:
        """Refuse what has no meaning in a time zone."""
        if self.size % DAY == 0 and self.cell % DAY and not keeps_its_offset(zone):
            raise InvalidParameter(
                f"a day of {zone} has 23 or 25 hours when clocks change, so windows of "
                f"{in_words(self.size)} cannot be made of parts of {in_words(self.cell)}; use a "
                "zone without clock changes, such as UTC, or parts of whole days"
            )


@dataclass(frozen=True)
class Hop(Tumble, identity="hop", keys="slide"):
    """Windows of one size, one every `slide`; a row is in size/slide of them.

    The first begins at the query's start, the last one holds its end: no window reaches beyond.

    >>> Hop("1 hour", slide="10 minutes").cells
    6
    """

    slide: Any = field(kw_only=True)
    kind, part = "hop", "slide"


@dataclass(frozen=True)
class Cumulate(Tumble, identity="cumulate", keys="step"):
    """Windows that grow by `step` up to `size`, then begin anew; a row is in those that follow it.

    Each is published from the end of the one before it on.

    >>> Cumulate("1 day", step="1 hour").cells
    24
    """

    step: Any = field(kw_only=True)
    kind, part = "cumulate", "step"
