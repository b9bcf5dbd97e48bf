"""Windows, steps and triggers, against their definition."""

from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dpstream.errors import InvalidParameter
from dpstream.query.schedule import Schedule
from dpstream.query.windows import DAY, MONTH, SECOND, Ticks, instant

HOUR = 3600 * SECOND


class Slow:
    """The definition, over a short stretch of whole numbers."""

    def __init__(self, start, end, size, triggers, lateness, kind="tumble", cells=1):
        edges = [start] if size is None else list(range(start, end, size))
        ends = [*edges[1:], end]
        self.spans, self.opens = list(zip(edges, ends, strict=True)), edges
        if kind == "hop":  # all that begin where `cells` cells still follow, if the last is cut
            self.spans = list(zip(edges, ends[cells - 1 :], strict=False))
        elif kind == "cumulate":
            self.spans = [(edges[n - n % cells], end) for n, end in enumerate(ends)]
        self.lateness = lateness
        closing = [end + lateness for _, end in self.spans]
        if triggers is None:
            self.triggers = closing
        elif isinstance(triggers, int):
            self.triggers = list(range(start + triggers, closing[-1] + triggers, triggers))
        else:
            self.triggers = list(triggers)
        self.on_close = triggers is None

    def step_of(self, arrival):
        """The first trigger later than the arrival, or None."""
        return next((n for n, time in enumerate(self.triggers) if time > arrival), None)

    def published(self, window):
        """The steps at which a window is published."""
        start, end = self.opens[window], self.spans[window][1]
        if self.on_close:
            return [window]
        last = next(n for n, time in enumerate(self.triggers) if time >= end + self.lateness)
        return [n for n, time in enumerate(self.triggers) if time > start and n <= last]


@st.composite
def schedules(draw):
    start = draw(st.integers(-20, 20))
    end = start + draw(st.integers(1, 60))
    size = draw(st.none() | st.integers(1, 25))
    lateness = draw(st.integers(0, 12))
    shape, cells = "tumble", 1
    if size is not None:
        most = -(-(end - start) // size)  # hopping windows must fit
        shape, cells = draw(st.sampled_from(["tumble", "hop", "cumulate"])), 1
        if shape != "tumble":
            cells = draw(st.integers(1, min(most, 6)))
    kind = draw(st.sampled_from(["ticks", "listed", "on close"]))
    triggers = None
    if kind == "ticks":
        triggers = draw(st.integers(1, 20))
    elif kind == "listed":
        listed = draw(st.sets(st.integers(start + 1, end + lateness), max_size=8))
        triggers = (*sorted(listed - {end + lateness}), end + lateness + draw(st.integers(0, 3)))
    schedule = Schedule(
        start=start,
        end=end,
        edges=None if size is None else Ticks(origin=start, size=size),
        kind=shape,
        cells=cells,
        triggers=Ticks(origin=start, size=triggers) if kind == "ticks" else triggers,
        lateness=lateness,
    )
    return schedule, Slow(start, end, size, triggers, lateness, shape, cells)


@given(schedules())
@examples(max_examples=300)
def test_a_schedule_is_its_definition(both):
    """Windows, spans, first and last steps, releases, and what is due when."""
    schedule, slow = both
    assert schedule.windows == len(slow.spans)
    due = {}
    for window, span in enumerate(slow.spans):
        steps = slow.published(window)
        assert schedule.span(window) == span
        assert schedule.first_step(window) == steps[0]
        assert schedule.last_step(window) == steps[-1]
        assert schedule.releases(window) == len(steps)
        assert len(steps) in schedule.lengths
        for release, step in enumerate(steps, start=1):
            due.setdefault(step, []).append((window, release, len(steps)))
    assert schedule.steps == max(due) + 1
    assert [schedule.due(step) for step in range(schedule.steps)] == [
        due.get(step, []) for step in range(schedule.steps)
    ]
    assert [schedule.time_of(s) for s in range(schedule.steps)] == slow.triggers[: schedule.steps]


@given(schedules(), st.lists(st.integers(-60, 140), min_size=1, max_size=30))
@examples(max_examples=300)
def test_rows_go_to_the_window_and_step_of_their_own_times(both, times):
    """One by one as all together: no row's place depends on another's."""
    schedule, slow = both
    array = np.array(times)
    windows, steps = schedule.window_of(array), schedule.step_of(array)
    for time, window, step in zip(times, windows.tolist(), steps.tolist(), strict=True):
        inside = [n for n, (a, b) in enumerate(slow.spans) if a <= time < b]
        assert window == (inside[0] if inside else -1)
        assert inside == list(range(inside[0], inside[-1] + 1)) if inside else True
        if inside:
            assert schedule.last_window_of(np.array([time]))[0] == inside[-1]
        expected = slow.step_of(time)
        if expected is None or expected >= schedule.steps:
            assert step >= schedule.steps  # too late for every window
        else:
            assert step == expected
        assert schedule.window_of(np.array([time]))[0] == window
        assert schedule.step_of(np.array([time]))[0] == step
        if inside and not slow.on_close:
            assert step <= schedule.last_step(window)  # a row that arrives at once is never late


LENGTHS = [MONTH, 3 * MONTH, 5 * MONTH, 12 * MONTH, HOUR, 7 * HOUR, DAY, 7 * DAY, 30 * DAY]


@given(
    first=st.dates(date(1999, 1, 1), date(2001, 1, 1)),
    zone=st.sampled_from(["UTC", "Europe/Rome", "Asia/Kolkata"]),
    size=st.sampled_from(LENGTHS),
    period=st.sampled_from(LENGTHS),
    kind=st.sampled_from(["tumble", "hop", "cumulate"]),
)
@examples(max_examples=150, deadline=None)
def test_no_period_is_in_more_windows_than_is_said(first, zone, size, period, kind):
    """Begun on any day, months too: counted one by one over five years."""
    start = instant(first, "start", zone)
    origin = instant("1970-01-01", "the first period", zone)
    schedule = Schedule(
        start=start,
        edges=Ticks(origin=start, size=size, zone=zone),
        kind=kind,
        cells=1 if kind == "tumble" else 3,
    )
    periods = Ticks(origin=origin, size=period, zone=zone)
    first, last = periods.last_before(start), periods.last_before(start + 1830 * DAY)
    begins = np.maximum([periods.at(n) for n in range(first, last + 1)], start)
    met = schedule.last_window_of(begins[1:] - 1) - schedule.window_of(begins[:-1]) + 1

    said = schedule.windows_of_a_period(periods)
    assert met.max(initial=0) <= said
    if kind == "tumble" and size == period:
        assert said == (1 if periods.at(first) == start else 2)


@pytest.mark.parametrize(
    ("zone", "first", "minutes"),
    [
        ("Europe/Berlin", "2024-11-01", 45),
        ("Europe/Berlin", "2024-11-01", 40),
        ("Europe/Berlin", "2025-05-01", 90),
        ("Australia/Lord_Howe", "2024-11-01", 60),
    ],
)
def test_short_periods_meet_two_months_when_clocks_have_changed(zone, first, minutes):
    """However long after the start that is."""
    start = instant(first, "start", zone)
    schedule = Schedule(start=start, edges=Ticks(origin=start, size=MONTH, zone=zone))
    origin = instant("1970-01-01", "the first period", zone)
    periods = Ticks(origin=origin, size=minutes * HOUR // 60, zone=zone)
    later = np.arange(periods.last_before(start) + 1, periods.last_before(start + 370 * DAY))
    begins = origin + later * periods.size
    met = schedule.last_window_of(begins[1:] - 1) - schedule.window_of(begins[:-1]) + 1

    assert met.max() == schedule.windows_of_a_period(periods) == 2


@given(schedules())
def test_last_steps_are_those_of_each_window(both):
    """In any order, with repetitions."""
    schedule, slow = both
    windows = np.array([*range(len(slow.spans)), 0, len(slow.spans) - 1])[::-1].copy()
    expected = [schedule.last_step(window) for window in windows.tolist()]
    assert schedule.last_steps(windows).tolist() == expected


def test_no_times_are_one_window_published_once():
    """Every row is in it."""
    schedule = Schedule()
    assert (schedule.windows, schedule.steps, schedule.time_of(0)) == (1, 1, None)
    assert schedule.due(0) == [(0, 1, 1)]
    assert schedule.window_of(np.array([-5, 7])).tolist() == [0, 0]
    assert schedule.step_of(np.array([-5, 7])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("zone", "first", "releases"),
    [
        ("Europe/Rome", "2024-03-30", [24, 23, 24]),
        ("Europe/Rome", "2024-10-26", [24, 25, 24]),
        ("America/New_York", "2024-03-09", [24, 23, 24]),
        ("America/New_York", "2024-11-02", [24, 25, 24]),
    ],
)
def test_a_day_with_a_change_of_the_clock_has_its_own_number_of_releases(zone, first, releases):
    """Hourly tables of calendar days."""
    start = instant(first, "start", zone)
    edges = Ticks(origin=start, size=DAY, zone=zone)
    hours = Ticks(origin=start, size=HOUR, zone=zone)
    schedule = Schedule(start=start, end=edges.at(3), edges=edges, triggers=hours)

    assert [schedule.releases(window) for window in range(3)] == releases
    assert schedule.steps == sum(releases)
    assert set(schedule.lengths) == set(releases)
    assert [due.window for step in range(schedule.steps) for due in schedule.due(step)] == [
        window for window, count in enumerate(releases) for _ in range(count)
    ]


def test_a_stream_without_end_knows_all_numbers_of_releases():
    """Noise is planned for lengths that the first windows do not have."""
    start = instant("2024-06-01", "start", "Europe/Rome")
    edges = Ticks(origin=start, size=DAY, zone="Europe/Rome")
    schedule = Schedule(start=start, edges=edges, triggers=Ticks(origin=start, size=HOUR))

    assert schedule.steps is schedule.windows is None
    assert {23, 24, 25} <= set(schedule.lengths)
    assert schedule.due(0) == [(0, 1, 24)]
    last = schedule.last_step(148)  # the day in October with 25 hours
    assert schedule.due(last) == [(148, 25, 25)]


@pytest.mark.parametrize("time", ["0001-01-01", "9999-12-31T23:59", "9000-01-01"])
def test_a_row_from_another_age_costs_nothing_and_is_outside(time):
    """One row must not stop or slow the feed."""
    start = instant("2024-03-30", "start", "Europe/Rome")
    days = Ticks(origin=start, size=DAY, zone="Europe/Rome")
    times = np.array([instant(time, "t"), start, 2**61, -(2**61)])
    for triggers in (days, None, Ticks(origin=start, size=HOUR)):
        schedule = Schedule(start=start, end=days.at(4), edges=days, triggers=triggers)
        assert schedule.window_of(times).tolist() == [-1, 0, -1, -1]
        assert schedule.step_of(times)[1] == 0
        endless = Schedule(start=start, edges=days, triggers=triggers)
        assert endless.window_of(times)[1] == 0
        assert endless.window_of(times)[3] == -1


@pytest.mark.parametrize("lateness", [0, 5 * HOUR])
def test_a_day_that_a_zone_left_out_is_never_published(lateness):
    """Samoa had no 30 December 2011; the days around it have all their tables."""
    zone = "Pacific/Apia"
    start = instant("2011-12-28", "start", zone)
    days = Ticks(origin=start, size=DAY, zone=zone)
    hours = Ticks(origin=start, size=HOUR)
    schedule = Schedule(start=start, end=days.at(5), edges=days, triggers=hours, lateness=lateness)
    due = [due for step in range(schedule.steps) for due in schedule.due(step)]
    each = 24 + lateness // HOUR

    assert days.at(2) == days.at(3)
    assert 2 not in schedule.window_of(start + np.arange(96) * HOUR)
    for window in (0, 1, 3, 4):
        releases = [release for number, release, _ in due if number == window]
        assert releases == list(range(1, each + 1))
    if lateness == 0:
        assert {number for number, _, _ in due} == {0, 1, 3, 4}
    assert all(1 <= release <= releases for _, release, releases in due)


@pytest.mark.parametrize(
    "facts",
    [
        {"start": 5, "end": 5},
        {"start": 5},
        {"start": 0, "triggers": (3, 9)},
        {"start": 0, "end": 10, "triggers": (3, 9)},
        {"start": 0, "end": 10, "triggers": (3, 10), "lateness": 1},
        {"start": 0, "end": 10, "triggers": (12, 10)},
        {"start": 0, "end": 10, "triggers": (10, 10)},
        {"start": 0, "end": 10, "triggers": ()},
        {"start": 0, "end": 10, "triggers": (0, 10)},
        {"start": 0, "end": 10, "triggers": (-5, 10)},
    ],
)
def test_schedules_that_cannot_be_kept_are_refused(facts):
    """No end, no trigger after the end, or triggers before anything can be published."""
    with pytest.raises(InvalidParameter):
        Schedule(**facts)
