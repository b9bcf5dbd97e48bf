"""A clock that is set: told of once, and nothing is published that cannot be taken back."""

from dataclasses import replace
from threading import Event

import pytest

import dpstream as dps
from dpstream.engines.clock import OverdueTriggers, SystemClock
from dpstream.errors import InvalidParameter
from tests.support.live_runs import HOUR, TIMES, ScriptedClock, arrivals, start_live
from tests.support.runs import options, published

SECOND = 1_000_000
HOURS = 7200 * SECOND
AHEAD = (
    "the clock went ahead by 7200 s: triggers come as before for 60 s, until it is set back or "
    "believed"
)


class SetClock(SystemClock):
    """The machine's clock with both of its hands held by the test."""

    real_time = False

    def __init__(self, events=()):
        self.steady, self.set_by, self.events = 0, 0, list(events)
        super().__init__(
            wall=lambda: 1000 * (self.steady + self.set_by), steady=lambda: 1000 * self.steady
        )

    def wait(self, until, stop):
        """Time moves here alone; the clock is set, or something is done, when its time comes."""
        next_event = self.events[0][0] - self.steady if self.events else HOUR
        self.steady += max(1, min(until - self.now(), next_event))
        while self.events and self.events[0][0] <= self.steady:
            _, event = self.events.pop(0)
            if callable(event):
                event()
            else:
                self.set_by = event

    def times(self, seconds):
        """What it says, second by second."""
        said = []
        for _ in range(seconds):
            self.wait(self.now() + SECOND, Event())
            said.append(self.now() // SECOND)
        return said


def test_a_jump_ahead_that_is_undone_has_never_been(caplog):
    """Time goes on as before, and the operator is told twice: of the jump, and of its end."""
    clock = SetClock([(10 * SECOND, HOURS), (50 * SECOND, 0)])

    assert clock.times(80) == list(range(1, 81))
    assert [record.getMessage() for record in caplog.records] == [
        AHEAD,
        "the clock was set back to where it was: nothing came early",
    ]


def test_a_jump_ahead_that_stays_is_believed_and_one_back_at_once(caplog):
    """After a minute; each is told once."""
    clock = SetClock([(10 * SECOND, HOURS), (100 * SECOND, 0)])

    said = clock.times(120)
    assert said[:69] == list(range(1, 70))
    assert said[69:99] == [7200 + second for second in range(70, 100)]
    assert said[99:] == list(range(100, 121))
    assert [record.getMessage()[:26] for record in caplog.records] == [
        "the clock went ahead by 72",
        "the clock went back by 720",
    ]


def test_a_clock_that_is_set_right_by_little_is_followed(caplog):
    """As clocks are, all the time; and what the machine sleeps is no jump."""
    clock = SetClock([(5 * SECOND, 4 * SECOND), (8 * SECOND, -4 * SECOND)])

    assert clock.times(9) == [1, 2, 3, 4, 9, 10, 11, 4, 5]
    assert caplog.records == []


def test_a_run_publishes_the_same_though_the_clock_jumps_ahead_and_back(tmp_path, caplog):
    """Rows that come meanwhile are counted where they belong."""
    start_live(tmp_path / "a", ScriptedClock(0, arrivals(tmp_path / "a" / "in"))).finish()

    jumps = [
        (time - before * SECOND, by) for time in TIMES for before, by in ((40, HOURS), (20, 0))
    ]
    events = sorted([*arrivals(tmp_path / "b" / "in"), *jumps], key=lambda event: event[0])
    start_live(tmp_path / "b", SetClock(events)).finish()

    assert len(caplog.records) == 2 * len(TIMES)
    assert published(tmp_path / "a") == published(tmp_path / "b")


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_only_so_many_overdue_triggers_are_taken_at_once(caplog, most):
    """Then there is a pause of a second, and the operator is told once."""
    clock = ScriptedClock(100 * SECOND)
    overdue, pauses = OverdueTriggers(clock, Event(), most), []
    for step in range(10):
        before = clock.time
        overdue.pace(step * SECOND)
        pauses.append((clock.time - before) // SECOND)

    assert pauses == [int(step > 0 and step % most == 0) for step in range(10)]
    assert len(caplog.records) == (most < 10)


def test_one_trigger_in_time_begins_the_count_anew():
    """A run that keeps up is never paused."""
    clock = ScriptedClock(100 * SECOND)
    overdue = OverdueTriggers(clock, Event(), 2)
    for due in (1, 2, 101, 1, 2, 101):
        overdue.pace(due * SECOND)
    assert clock.time == 100 * SECOND


def test_the_bound_of_overdue_triggers_is_an_option(tmp_path):
    """What is published is the same; it is checked before anything begins."""
    for name, more in (("a", {}), ("b", {"overdue_at_once": 1})):
        asleep = ScriptedClock(0, arrivals(tmp_path / name / "in"))
        running = iter(start_live(tmp_path / name, asleep))
        next(running)
        running.close()
        asleep.time = 3 * HOUR
        start_live(tmp_path / name, asleep, options=replace(options(), **more)).finish()
    assert published(tmp_path / "a").keys() == published(tmp_path / "b").keys()
    with pytest.raises(InvalidParameter, match="overdue_at_once must be at least 1"):
        dps.EngineOptions(overdue_at_once=0)
