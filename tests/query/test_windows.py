"""Durations, instants and regular points in time, through changes of the clock."""

from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dpstream.errors import InvalidParameter
from dpstream.query.windows import (
    DAY,
    MONTH,
    SECOND,
    Cumulate,
    Hop,
    Micros,
    Ticks,
    Tumble,
    duration,
    in_words,
    instant,
    iso,
    longest,
    shortest,
    within_calendar,
)

HOUR = 3600 * SECOND
ZONES = ("Europe/Rome", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")


@pytest.mark.parametrize(
    ("given_", "micros"),
    [
        ("15 minutes", 15 * 60 * SECOND),
        ("1 Day", DAY),
        (" 2weeks ", 14 * DAY),
        ("7 microseconds", 7),
        ("250 milliseconds", 250_000),
        (timedelta(hours=1, microseconds=1), HOUR + 1),
        (Micros(5), 5),
    ],
)
def test_durations_are_words_or_timedeltas(given_, micros):
    """One number and one unit, in singular or plural."""
    assert duration(given_, "every") == micros


@pytest.mark.parametrize("bad", ["1.5 hours", "hour", "-1 day", "3 months", "", 3600, 1.5, None])
def test_other_durations_are_refused(bad):
    """A bare number has no unit, and a month no length."""
    with pytest.raises(InvalidParameter, match="every"):
        duration(bad, "every")


def test_a_duration_has_a_least_value():
    """Zero is a lateness, and no interval."""
    assert duration("0", "lateness", least=0) == duration(0, "lateness", least=0) == 0
    with pytest.raises(InvalidParameter, match="at least"):
        duration("0 seconds", "every")


@given(st.integers(1, 10**15))
def test_durations_survive_their_words(micros):
    """What is shown to people means the same."""
    assert duration(in_words(micros), "it", calendar=True) == micros


def test_months_are_counted_by_the_calendar_alone():
    """Nobody gets a month who asked for as many seconds, nor one where lengths are fixed."""
    for bad in (timedelta(seconds=2_629_746), "2629746 seconds", "1201 months"):
        with pytest.raises(InvalidParameter, match="months where the calendar counts"):
            duration(bad, "the window's size", calendar=True)
    for kind, part in ((Hop, "slide"), (Cumulate, "step")):
        with pytest.raises(InvalidParameter, match=f"the window's {part} must be in months"):
            kind("1 month", **{part: "1 day"})
    assert Hop("1 year", slide="1 quarter").cells == 4
    assert in_words(Tumble("24 months").size) == "2 years"


def test_months_stray_from_their_mean_by_less_than_is_allowed_for():
    """All months of 400 years, from the 28th to the 31st day on, up to 100 years far."""
    months = np.arange(-120, 4800 + 1300).astype("M8[M]")
    first = months.astype("M8[D]").astype(np.int64)
    long = np.diff(np.append(first, (months[-1] + 1).astype("M8[D]").astype(np.int64)))
    worst = 0.0
    for day in (28, 29, 30, 31):
        at = first + np.minimum(day, long) - 1
        for number in range(1, 1201):
            lengths = at[number : number + 4800] - at[:4800]
            stray = np.abs(lengths - number * MONTH / DAY).max()
            worst = max(worst, float(stray))

    assert 3 < worst < 4 - 1 / 24  # and a clock may change by a day
    assert shortest(3 * MONTH) == 3 * MONTH - 5 * DAY
    assert longest(3 * MONTH) == 3 * MONTH + 5 * DAY


def test_instants_are_in_the_zone_unless_they_say_otherwise():
    """Local midnight of Rome in summer is 22:00 UTC the day before."""
    rome = instant("2024-07-01", "start", "Europe/Rome")
    assert iso(rome) == "2024-06-30T22:00:00+00:00"
    assert instant(date(2024, 7, 1), "start", "Europe/Rome") == rome
    assert instant(datetime(2024, 6, 30, 22, tzinfo=UTC), "start", "Europe/Rome") == rome
    assert instant("2024-07-01T00:00-04:00", "start", "Europe/Rome") == rome + 6 * HOUR
    assert iso(None) is None
    for bad in ("yesterday", 17, None):
        with pytest.raises(InvalidParameter, match="start"):
            instant(bad, "start")
    with pytest.raises(InvalidParameter, match="Europe/Rome"):
        instant("2024-07-01", "start", "Rome")


@pytest.mark.parametrize(
    ("zone", "first", "hours"),
    [
        ("Europe/Rome", "2024-03-30", [24, 23, 24]),
        ("Europe/Rome", "2024-10-26", [24, 25, 24]),
        ("America/New_York", "2024-03-09", [24, 23, 24]),
        ("America/New_York", "2024-11-02", [24, 25, 24]),
        ("America/Sao_Paulo", "2017-10-14", [24, 23, 24]),  # a day without a midnight
    ],
)
def test_days_of_a_calendar_have_their_own_lengths(zone, first, hours):
    """23 hours when the clock goes forward, 25 when it goes back."""
    ticks = Ticks(origin=instant(first, "start", zone), size=DAY, zone=zone)
    assert [(ticks.at(n + 1) - ticks.at(n)) // HOUR for n in range(3)] == hours
    utc = Ticks(origin=ticks.origin, size=DAY)
    assert [(utc.at(n + 1) - utc.at(n)) // HOUR for n in range(3)] == [24, 24, 24]
    short = Ticks(origin=ticks.origin, size=HOUR, zone=zone)  # hours are hours everywhere
    assert all(short.at(n + 1) - short.at(n) == HOUR for n in range(80))


@given(
    zone=st.sampled_from(ZONES),
    origin=st.dates(date(1980, 1, 1), date(2030, 1, 1)),
    size=st.sampled_from([DAY, 7 * DAY, 3 * DAY, HOUR, 7 * HOUR, MONTH, 3 * MONTH, 12 * MONTH]),
    offsets=st.lists(st.integers(-400 * DAY, 400 * DAY), min_size=1, max_size=20),
)
@examples(max_examples=60)
def test_the_tick_before_a_time_is_the_last_one_not_after_it(zone, origin, size, offsets):
    """For every time, also before the origin; for arrays as for single times."""
    ticks = Ticks(origin=instant(origin, "start", zone), size=size, zone=zone)
    times = np.array([ticks.origin + offset for offset in offsets])
    times = np.concatenate([times, [ticks.at(3), ticks.at(3) - 1, ticks.at(-2)]])
    numbers = ticks.before(times)

    for time, number in zip(times.tolist(), numbers.tolist(), strict=True):
        assert ticks.at(number) <= time < ticks.at(number + 1)
        assert ticks.last_before(time) == number
        following = ticks.next_from(time)
        assert ticks.at(following - 1) < time <= ticks.at(following)


def test_no_times_have_no_ticks():
    """An empty batch is an empty answer."""
    for zone in ("UTC", "Europe/Rome"):
        assert len(Ticks(origin=0, size=DAY, zone=zone).before(np.zeros(0, np.int64))) == 0


def test_only_years_that_have_a_date_are_within_the_calendar():
    """Years 1 to 9999."""
    first, last = instant("0001-01-01", "t"), instant("9999-12-31T23:59:59.999999", "t")
    inside = within_calendar(np.array([first - 1, first, last, last + 1]))
    assert inside.tolist() == [False, True, True, False]
