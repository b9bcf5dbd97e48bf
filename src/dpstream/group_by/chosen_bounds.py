"""Bounds that choose themselves: how many groups of a unit count in each period.

    rows of a period --count_reached--> a histogram of its units --noise--> what later periods get

Each unit of a period is in one bin of the period's histogram: by the number of groups that it has
rows in, kept or not. At the period's last trigger the histogram gets noise, once, paid by a share
of the query's budget. A period's bound is fixed before its first rows are bounded, by histograms
and tables of steps before, and holds in all of its windows.

Proof: `docs/soundness/chosen_bounds.md`. How bounds are compared: Amin, Kulesza, Munoz,
Vassilvitskii, "Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy",
2019.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpstream.group_by.bounding import UnitBucket
from dpstream.group_by.hash_tables import HashTable
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.query import Query
from dpstream.query.windows import iso
from dpstream.records import Integers, Reals
from dpstream.rows.row_batch import Rows

PERIODS = 14
"""Periods whose histograms are averaged: the last ones that were published."""
_SEEN = 2.0  # standard deviations above which a layer has units that are believed to be there
_ANYBODY = 4.0  # the same of all units together
_GAIN = 0.9  # of the error as it is: what a new bound must have at most


# Exact counts, seen by nobody.


def count_reached(
    query: Query, bucket: UnitBucket, window: int, period: int, rows: Rows, places: Integers
) -> Integers:
    """What the rows at `places` of a bucket of units change in the histogram of their period.

    Units beyond the last bound take no more memory: they stay in the last bin.
    """
    edges = np.array(query.choices, np.int64)
    units = bucket.reached.setdefault(period, HashTable(1))
    pairs = bucket.reached_pairs.setdefault(window, HashTable(1))
    at = units.rows(rows.units, places)  # before `numbers` is looked at: the table may grow
    changes = np.zeros(len(edges) + 1, np.int64)
    counted = units.numbers[at, 0] <= edges[-1]
    places, at = places[counted], at[counted]
    before = pairs.used
    ids = np.ascontiguousarray(rows.units[places] ^ rows.groups[places][:, ::-1])
    found, first = np.unique(pairs.rows(ids), return_index=True)
    new = found >= before
    of_new = at[first[new]]
    pairs.numbers[found[new], 0] = of_new + 1  # whose they are, so that a unit can be erased
    moved, more = np.unique(of_new, return_counts=True)
    numbers = units.numbers[moved, 0]
    np.subtract.at(changes, np.searchsorted(edges, numbers[numbers > 0]), 1)
    units.numbers[moved, 0] = numbers + more
    units.touched[moved] = 1
    np.add.at(changes, np.searchsorted(edges, numbers + more), 1)
    return changes


# What is published decides: post-processing.


@dataclass(frozen=True, kw_only=True)
class PublishedPeriod:
    """What was published of a period."""

    histogram: tuple[int, ...]
    """Noisy units by the groups that they have rows in."""
    shown: int
    """Groups in the last tables of its windows."""
    squares: float
    """The squares of their noisy numbers, added up, less the noise; made up for what was left out.
    """


@dataclass(kw_only=True)
class ChosenBounds:
    """The bounds of periods that are open, and what was published of earlier ones."""

    choices: tuple[int, ...]
    current: int
    """The bound that was chosen last."""
    since: int | None = None
    """The first period that has it."""
    of_periods: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By period that has begun and is not over: its bound, and the first period that has that."""
    published: list[PublishedPeriod] = field(default_factory=list)
    open: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By open period: groups in the last tables of its windows, and their squares."""
    version: int = 0
    """Grows with every change."""

    @classmethod
    def of(cls, query: Query) -> ChosenBounds | None:
        """At the beginning of a run; None: its bounds are fixed."""
        return cls(choices=query.choices, current=query.first_choice) if query.choices else None

    def begin(self, plan: NoisePlan, windows: Iterable[int]) -> dict[int, bytes]:
        """Fix the bounds of the periods of windows that begin; for each window what it has.

        That is made durable before a window draws: the same noise must not meet other bounds.
        """
        told = {}
        for window in windows:
            period = period_of(plan.query, window)
            if period not in self.of_periods:
                releases = plan.query.schedule.releases(window)
                chosen = self._choose(plan, releases)
                if chosen != self.current or self.since is None:
                    self.current, self.since = chosen, period
                self.of_periods[period] = chosen, self.since
                self.open[period] = []
            self.version += 1
            told[window] = b"groups %d" % self.of_periods[period][0]
        return told

    def _choose(self, plan: NoisePlan, releases: int) -> int:
        if not self.published:
            return self.current

        def noise(groups: int) -> float:
            return float(plan.of_groups(groups).window(releases).stddevs[0, -1])

        return best_bound(
            self.choices,
            self.published,
            current=self.current,
            noise=noise,
            stddev=float(plan.histogram.stddevs[0, 0]),
        )

    def take_in_table(self, plan: NoisePlan, window: int, sums: Integers) -> None:
        """Note what the last table of a window shows; `sums`: groups x measures, with noise."""
        query = plan.query
        period, releases = period_of(query, window), query.schedule.releases(window)
        if period not in self.open:
            return
        stddev = plan.of_groups(self.of_periods[period][0]).window(releases).stddevs[0, -1]
        values = sums[:, 0].astype(np.float64)
        squares = math.fsum((values * values).tolist())  # in any order the same
        self.open[period].append((len(values), squares - len(values) * float(stddev) ** 2))
        self.version += 1

    def take_in_histogram(self, period: int, noisy: Sequence[int]) -> None:
        """Note the noisy histogram of a period that is over."""
        tables, (groups, _) = self.open.pop(period), self.of_periods.pop(period)
        kept = 1 - _Tail.of(self.choices, np.array(noisy, np.float64), 0.0).lost(groups)
        squares = max(sum(square for _, square in tables), 0.0) / max(kept, 0.1) ** 2
        shown = sum(number for number, _ in tables)
        one = PublishedPeriod(histogram=tuple(noisy), shown=shown, squares=squares)
        self.published = [*self.published, one][-PERIODS:]
        self.version += 1

    def groups_of(self, query: Query, window: int) -> int | None:
        """The bound of a window's period; None: it has not begun (its windows were given up)."""
        known = self.of_periods.get(period_of(query, window))
        return None if known is None else known[0]

    def describe(self, query: Query, window: int) -> dict[str, Any]:
        """Which bound a window has, and since when: for the metadata of a release."""
        groups, since = self.of_periods[period_of(query, window)]
        assert query.periods is not None
        start = max(query.periods.at(since), query.start or 0)
        return {"max_groups_contributed": groups, "since": iso(start)}

    def save(self) -> dict[str, Any]:
        """All of it, for `restore`."""
        return {
            "current": self.current,
            "since": self.since,
            "of_periods": [[period, *known] for period, known in self.of_periods.items()],
            "published": [[list(p.histogram), p.shown, p.squares] for p in self.published],
            "open": [[period, [list(one) for one in some]] for period, some in self.open.items()],
            "version": self.version,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` gave."""
        self.current, self.since = saved["current"], saved["since"]
        self.of_periods = {period: (groups, since) for period, groups, since in saved["of_periods"]}
        self.published = [
            PublishedPeriod(histogram=tuple(histogram), shown=shown, squares=squares)
            for histogram, shown, squares in saved["published"]
        ]
        self.open = {
            period: [(number, square) for number, square in some] for period, some in saved["open"]
        }
        self.version = saved["version"]


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """What bounds leave out, from a histogram: pairs of unit and group, beyond each bound."""

    choices: tuple[int, ...]
    pairs: float
    dropped: Reals
    """By bound."""
    last: int
    """Beyond this one no units are seen."""

    @classmethod
    def of(cls, choices: tuple[int, ...], histogram: Reals, stddev: float) -> _Tail:
        """Of a mean of noisy histograms, each of whose bins has noise of `stddev`.

        Layer by layer, from the lowest: a unit beyond both edges of a layer loses all of it. Above
        the first layer in which no units are seen beside the noise nothing is believed: to add up
        the whole tail is noise times the largest size.
        """
        edges = np.array(choices, np.float64)
        above = histogram.sum() - np.cumsum(histogram)[:-1]  # units with more groups than an edge
        noise = stddev * np.sqrt(np.arange(len(edges), 0, -1))
        widths = np.diff(edges)
        middle = (above[:-1] + above[1:]) / 2
        layers = widths * middle + (above[:-1] - above[1:]) / 2
        seen = middle > _SEEN * noise[:-1]
        last = len(widths) if seen.all() else int(np.argmin(seen))
        layers = np.where(np.arange(len(widths)) < last, np.maximum(layers, 0.0), 0.0)
        dropped = np.append(np.cumsum(layers[::-1])[::-1], 0.0)
        units = float(histogram.sum())
        known = units > _ANYBODY * stddev * math.sqrt(len(histogram))
        pairs = units + float(dropped[0]) if known else 0.0
        return cls(choices=choices, pairs=pairs, dropped=dropped, last=last)

    def lost(self, groups: int) -> float:
        """The share of all pairs that a bound leaves out."""
        at = self.choices.index(groups)
        return float(self.dropped[at]) / self.pairs if self.pairs else 0.0


def best_bound(
    choices: tuple[int, ...],
    published: Sequence[PublishedPeriod],
    *,
    current: int,
    noise: Callable[[int], float],
    stddev: float,
) -> int:
    """The bound with the least error of what is shown, by the last periods.

    `noise`: of a group under each bound, `stddev`: of a bin of one histogram. The error is the l_2
    of all groups shown: each loses the share that all lose, and has noise. A new bound has to be
    better by a tenth.

    >>> period = PublishedPeriod(histogram=(500, 300, 200, 100), shown=10, squares=1e5)
    >>> best_bound((1, 2, 4), [period], current=1, noise=lambda groups: groups**0.5, stddev=5.0)
    4
    """
    if not published:
        return current
    mean = np.mean([one.histogram for one in published], axis=0)
    tail = _Tail.of(choices, mean, stddev / math.sqrt(len(published)))
    shown = float(np.mean([one.shown for one in published]))
    squares = float(np.mean([one.squares for one in published]))
    if not tail.pairs or not shown:
        return current

    def error(groups: int) -> float:
        return math.hypot(tail.lost(groups) * math.sqrt(squares), noise(groups) * math.sqrt(shown))

    best = min(choices[: tail.last + 1], key=error)
    return best if error(best) < _GAIN * error(current) else current


def period_of(query: Query, window: int) -> int:
    """The period that a window lies in."""
    ticks, start = query.periods, query.schedule.span(window)[0]
    assert ticks is not None
    assert start is not None
    return ticks.last_before(start)


def last_window_of(query: Query, period: int) -> int:
    """The last window of a period: with its last table the period is over."""
    ticks, schedule = query.periods, query.schedule
    assert ticks is not None
    end = ticks.at(period + 1)
    end = end if schedule.end is None else min(end, schedule.end)
    return int(schedule.last_window_of(np.array([end - 1]))[0])


def digest_of(known: bytes, told: bytes) -> bytes:
    """A digest of all that a window begins with."""
    return hashlib.sha256(known + told).digest()
