"""Windows and triggers: when what is published. All of it is public and fixed in advance.

A step is one trigger of the schedule. A row belongs to the windows of its event time and to the
first step after its arrival; neither depends on any other row. A window is published at its own
triggers, from the first one after it opens to the first one at or after its end and the allowed
lateness; a row that arrives after the last of them is late.

Windows are made of cells, the spans between two edges. Tumbling windows are one cell each, hopping
ones `cells` in a row, and cumulating ones grow cell by cell and begin anew after `cells`. So the
windows of a row are always a range of numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.query.windows import DAY, Ticks, iso, keeps_its_offset, longest, shortest
from dpstream.records import Integers

_ENDLESS = 36525 * DAY  # a stream without end is taken to last a hundred years
_PROBE = 3660  # windows that are looked at one by one
_REMEMBERED = 4096  # windows whose steps are kept in memory
_WIDE = 4096  # windows in a batch that are looked up one after another


class DueRelease(NamedTuple):
    """A window that is published at a step: its `release`-th table of `releases`."""

    window: int
    release: int
    releases: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Windows over the cells between `edges` from `start` to `end`, published at `triggers`.

    `edges` None: one window for all. `triggers`: ticks, listed times, or None (each window once,
    when it closes). `start` None: no times at all, one window that is published once. A cumulating
    window opens where the one before it ends: until then that one says the same.
    """

    start: int | None = None
    end: int | None = None
    edges: Ticks | None = None
    kind: Literal["tumble", "hop", "cumulate"] = "tumble"
    cells: int = 1
    triggers: Ticks | tuple[int, ...] | None = None
    lateness: int = 0

    def __post_init__(self) -> None:
        if self.start is not None and self.end is not None and self.end <= self.start:
            raise InvalidParameter(
                f"end must be later than start; got {iso(self.start)} to {iso(self.end)}"
            )
        if self.end is None and self.start is not None and isinstance(self.triggers, tuple):
            raise InvalidParameter("a list of triggers needs an end")
        if self.start is not None and self.end is None and self.edges is None:
            raise InvalidParameter("one window for all rows needs an end")
        if self.windows is not None and self.windows < 1:
            raise InvalidParameter(
                f"the range from {iso(self.start)} to {iso(self.end)} has no room for a hopping "
                "window; give it a later end"
            )
        if isinstance(self.triggers, tuple):
            self._check_listed(self.triggers)

    def _check_listed(self, times: tuple[int, ...]) -> None:
        if list(times) != sorted(set(times)) or not times:
            raise InvalidParameter("triggers must be times in increasing order")
        assert self.windows is not None
        assert self.start is not None
        if times[0] <= self.start:
            raise InvalidParameter(
                f"triggers must be later than start ({iso(self.start)}); the first one listed is "
                f"{iso(times[0])}"
            )
        for window in range(self.windows):
            start, end = self.span(window)
            assert start is not None
            assert end is not None
            if times[-1] < end + self.lateness:
                raise InvalidParameter(
                    f"the window from {iso(start)} to {iso(end)} has no trigger at or after its "
                    f"end and the allowed lateness; the last one listed is {iso(times[-1])}"
                )

    @cached_property
    def windows(self) -> int | None:
        """How many windows there are; None if the stream has no end."""
        if self.edges is None:
            return 1
        if self.end is None:
            return None
        cells = self.edges.next_from(self.end)
        return cells if self.kind == "cumulate" else cells - self.cells + 1

    @cached_property
    def steps(self) -> int | None:
        """How many triggers there are; None if the stream has no end."""
        return None if self.windows is None else self.last_step(self.windows - 1) + 1

    def span(self, window: int) -> tuple[int | None, int | None]:
        """From when to when a window reaches."""
        if self.edges is None:
            return self.start, self.end
        first, last = window, self._last_cell(window)
        if self.kind == "cumulate":
            first -= window % self.cells
        end = self.edges.at(last + 1)
        return self.edges.at(first), end if self.end is None else min(end, self.end)

    def _last_cell(self, window: int) -> int:
        return window + self.cells - 1 if self.kind == "hop" else window

    def opens(self, window: int) -> int | None:
        """From when on a window is published."""
        return self.start if self.edges is None else self.edges.at(window)

    def time_of(self, step: int) -> int | None:
        """When a step happens."""
        if self.start is None:
            return None
        if self.triggers is None:
            end = self.span(step)[1]
            return None if end is None else end + self.lateness
        if isinstance(self.triggers, tuple):
            return self.triggers[step]
        return self.triggers.at(step + 1)  # the tick at the start itself publishes nothing

    @cached_property
    def _known_steps(self) -> dict[int, tuple[int, int]]:
        """The first and the last step of windows that were asked for last."""
        return {}

    def _steps_of(self, window: int) -> tuple[int, int]:
        known = self._known_steps
        steps = known.get(window)
        if steps is None:
            if len(known) >= _REMEMBERED:
                known.clear()
            steps = known[window] = self._first_step(window), self._last_step(window)
        return steps

    def first_step(self, window: int) -> int:
        """The first step at which a window is published."""
        return self._steps_of(window)[0]

    def last_step(self, window: int) -> int:
        """The last step at which a window is published."""
        return self._steps_of(window)[1]

    def _first_step(self, window: int) -> int:
        opens = self.opens(window)
        if self.triggers is None or opens is None:
            return window
        if isinstance(self.triggers, tuple):
            return bisect_right(self.triggers, opens)
        return max(self.triggers.next_from(opens + 1) - 1, 0)

    def _last_step(self, window: int) -> int:
        end = self.span(window)[1]
        if self.triggers is None or end is None:
            return window
        if isinstance(self.triggers, tuple):
            return bisect_left(self.triggers, end + self.lateness)
        return self.triggers.next_from(end + self.lateness) - 1

    def releases(self, window: int) -> int:
        """How often a window is published."""
        first, last = self._steps_of(window)
        return last - first + 1

    @cached_property
    def lengths(self) -> list[int]:
        """How often windows may be published: every number that occurs, the largest first.

        A change of the clock makes a day longer or shorter, and a grid of triggers that does not
        fit the windows meets one of them once more or less; a year shows all that occur in a
        stream without end, and its neighbours are added to be safe.
        """
        if self.windows is not None and self.windows <= _PROBE:
            lengths = {self.releases(w) for w in range(self.windows)}
        else:
            assert self.edges is not None
            most = _ENDLESS // self.edges.size if self.edges.months else _PROBE
            seen = {self.releases(w) for w in range(min(most, _PROBE))}
            lengths = {number + more for number in seen for more in (-1, 0, 1)}
        return sorted((number for number in lengths if number > 0), reverse=True)

    def due(self, step: int) -> list[DueRelease]:
        """The windows that are published at a step, oldest first."""
        if self.triggers is None or self.edges is None:
            window = step if self.triggers is None else 0
            return [DueRelease(window, step - self.first_step(window) + 1, self.releases(window))]
        time = self.time_of(step)
        assert time is not None
        newest = self.edges.last_before(time - 1)
        if self.windows is not None:
            newest = min(newest, self.windows - 1)
        due = []
        for window in range(newest, -1, -1):
            first, last = self._steps_of(window)
            if last < step:
                break
            if last >= first:  # else a zone leaves out a day
                due.append(DueRelease(window, step - first + 1, last - first + 1))
        return due[::-1]

    def opens_windows(self, step: int) -> bool:
        """Is the first release of a window at this step?"""
        over = self.steps is not None and step >= self.steps
        return not over and any(due.release == 1 for due in self.due(step))

    def window_of(self, times: Integers) -> Integers:
        """The first window of each event time, -1 where there is none."""
        if self.start is None:
            return np.zeros(len(times), np.int64)
        end = self.start + _ENDLESS if self.end is None else self.end
        outside = (times < self.start) | (times >= end)
        if self.edges is None:
            return np.where(outside, -1, 0)
        first = self.edges.before(np.clip(times, self.start, end - 1))
        if self.kind == "hop":
            first = np.maximum(first - (self.cells - 1), 0)
        return np.where(outside, -1, first)

    @property
    def overlapping(self) -> bool:
        """May a row be in several windows?"""
        return self.cells > 1

    def last_window_of(self, times: Integers) -> Integers:
        """The last window of each event time that has a window."""
        if self.edges is None or self.start is None:
            return np.zeros(len(times), np.int64)
        last = self.edges.before(times)
        if self.kind == "cumulate":
            last += self.cells - 1 - last % self.cells
        return last if self.windows is None else np.minimum(last, self.windows - 1)

    def step_of(self, arrivals: Integers) -> Integers:
        """The first step after each arrival."""
        if self.start is None:
            return np.zeros(len(arrivals), np.int64)
        if isinstance(self.triggers, tuple):
            listed = np.array(self.triggers, np.int64)
            return np.searchsorted(listed, arrivals, side="right").astype(np.int64)
        steps = self.steps
        last = self.start + _ENDLESS if steps is None else self.time_of(steps - 1)
        assert last is not None
        within = np.clip(arrivals, self.start, last)
        if self.triggers is not None:
            return self.triggers.before(within)
        if self.edges is None:
            first = np.zeros(len(arrivals), np.int64)
        else:
            closing = self.edges.before(within - self.lateness) - self._last_cell(0)
            first = np.maximum(closing, 0)
        over = arrivals >= last  # the last window may be cut short
        return first if steps is None else np.where(over, steps, np.minimum(first, steps - 1))

    @lru_cache(maxsize=256)  # noqa: B019
    def windows_of_a_period(self, periods: Ticks | None) -> int | None:
        """In how many windows the rows of one period may be, at most; None: there is no end.

        `periods` None: all rows are of one period. Where periods and windows lie alike again and
        again, one round of that is looked at; where clocks change, ten years of it.
        """
        if self.start is None or self.edges is None:
            return 1
        if periods is None:
            return self.windows
        first, cycle = periods.last_before(self.start), self._cycle(periods)
        if self.kind == "hop":  # the first rows are in fewer windows than all that follow
            full = -(-(self.cells - 1) * longest(self.edges.size) // shortest(periods.size)) + 1
            cycle += full if cycle < _PROBE or full > _PROBE // 2 else 0
        if self.end is not None:
            cycle = min(cycle, periods.last_before(self.end - 1) - first)
        if cycle > _PROBE:
            most = -(-longest(periods.size) // shortest(self.edges.size)) + self.cells
            return most if self.windows is None else min(most, self.windows)
        begins = np.array([periods.at(first + n) for n in range(cycle + 3)], np.int64)
        lasts = begins[1:] - 1
        begins = np.maximum(begins[:-1], self.start)
        if self.end is not None:
            lasts = np.minimum(lasts, self.end - 1)
        some = begins <= lasts  # a zone may leave out a day
        windows = self.last_window_of(lasts[some]) - self.window_of(begins[some]) + 1
        return int(windows.max())

    def _cycle(self, periods: Ticks) -> int:
        """After how many periods they and the windows lie alike again; too many: nobody knows."""
        assert self.edges is not None
        if bool(self.edges.months) != bool(periods.months):
            other = self.edges.size if periods.months else periods.size
            moves = periods.size < DAY and not keeps_its_offset(self.edges.zone)
            return _PROBE + 1 if DAY % other or moves else _probe(periods)
        whole = self.edges.size * (self.cells if self.kind == "cumulate" else 1)
        cycle = whole // gcd(whole, periods.size)
        if not (self.edges.calendar or periods.calendar):
            return cycle
        aligned = periods.at(periods.last_before(self.edges.origin)) == self.edges.origin
        if aligned and self.edges.calendar and periods.calendar:
            return cycle
        return _probe(periods) if periods.size >= DAY else _PROBE + 1

    def last_steps(self, windows: Integers) -> Integers:
        """The last step of each window."""
        if not len(windows):
            return windows
        first, last = int(windows.min()), int(windows.max())
        if last - first > _WIDE:
            known, where = np.unique(windows, return_inverse=True)
            return np.array([self.last_step(int(w)) for w in known], np.int64)[where]
        last_steps = np.array([self.last_step(w) for w in range(first, last + 1)], np.int64)
        return last_steps[windows - first]


def _probe(ticks: Ticks) -> int:
    """How many periods are looked at one by one, within a hundred years; too many: none."""
    within = _ENDLESS // ticks.size - 3
    return min(_PROBE, within) if within > 3 else _PROBE + 1
