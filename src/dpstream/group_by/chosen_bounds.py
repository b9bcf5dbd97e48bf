"""Bounds that choose themselves: how many groups and rows of a unit count, and clamps of values.

    rows of a period --count_reached--> histograms of its units --noise--> what later periods get

Each unit of a period is in one bin of each of the period's histograms, by all of its rows, kept or
not: by the number of groups that it has rows in, by its rows in one group, by one of its values.
Which group and which value follows from keyed hashes. At the period's last trigger the histograms
get noise, once, paid by a share of the query's budget. A period's bounds are fixed before its first
rows are bounded, by histograms and tables of steps before, and hold in all of its windows.

Proof: `docs/soundness/chosen_bounds.md`. How bounds are compared: Amin, Kulesza, Munoz,
Vassilvitskii, "Bounding User Contributions: A Bias-Variance Trade-off in Differential Privacy",
2019.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from dpstream.group_by.bounding import UnitBucket
from dpstream.group_by.hash_tables import HashTable
from dpstream.query.aggregates import Sum
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.period_bounds import FINEST, Candidates, PeriodBounds
from dpstream.query.query import Query
from dpstream.query.windows import iso
from dpstream.records import Integers, Reals, Words
from dpstream.rows.row_batch import Rows

PERIODS = 14
"""Periods whose histograms are averaged: the last ones that were published."""
_SEEN = 2.0  # standard deviations above which a layer has units that are believed to be there
_ANYBODY = 4.0  # the same of all units together
_CHANGED = 5.0  # the same of a change in the units beyond a candidate
_GAIN = 0.9  # of the error as it is: what a new bound must have at most


# Exact counts, seen by nobody.


def unit_facts(query: Query) -> HashTable:
    """What is known of each unit of a period: its groups; of each further histogram two numbers.

    The smallest hash of its groups or rows, and how many rows that group has, or the value's bin.
    """
    return HashTable(1 + 2 * sum(each.kind != "groups" for each in query.candidates))


def count_reached(
    query: Query, bucket: UnitBucket, window: int, period: int, rows: Rows, places: Integers
) -> Integers:
    """What the rows at `places` of a bucket of units change in the histograms of their period."""
    units = bucket.reached.setdefault(period, unit_facts(query))
    at = units.rows(rows.units, places)  # before `numbers` is looked at: the table may grow
    changes, column = [], 1
    for each in query.candidates:
        if each.kind == "groups":
            changes.append(_count_groups(each, bucket, units, window, rows, places, at))
            continue
        if each.kind == "rows":
            hashes = _places_of_groups(rows, window, places)
            changes.append(_count_rows(each, units, column, hashes, at))
        else:
            values = values_of(query, each, rows.values[places])
            changes.append(_count_values(each, units, column, rows, places, at, values))
        column += 2
    return np.concatenate(changes)


def _count_groups(
    candidates: Candidates,
    bucket: UnitBucket,
    units: HashTable,
    window: int,
    rows: Rows,
    places: Integers,
    at: Integers,
) -> Integers:
    """By the groups that units have rows in.

    Units beyond the last bound take no more memory: they stay in the last bin.
    """
    edges = np.array(candidates.edges, np.int64)
    pairs = bucket.reached_pairs.setdefault(window, HashTable(1))
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


def _places_of_groups(rows: Rows, window: int, places: Integers) -> Integers:
    """A number for each row by its unit, group and window; the least one says which group counts.

    Positive, so that 0 is nobody's: a unit of which nothing is known has 0.
    """
    salt = hashlib.blake2b(b"window %d" % window, digest_size=8).digest()
    mixed = rows.units[places, 1] ^ rows.groups[places, 0] ^ np.uint64(int.from_bytes(salt))
    return _positive(mixed)


def _positive(words: Words) -> Integers:
    return (words >> np.uint64(1)).astype(np.int64) | 1


def _count_rows(
    candidates: Candidates, units: HashTable, column: int, hashes: Integers, at: Integers
) -> Integers:
    """By the rows that units have in one group each: that with the least hash of all.

    A group that has it when its first row comes is the one until a lesser one comes, so its rows
    are all counted.
    """
    edges = np.array(candidates.edges, np.int64)
    changes = np.zeros(len(edges) + 1, np.int64)
    moved, inverse = np.unique(at, return_inverse=True)
    least = np.full(len(moved), np.iinfo(np.int64).max)
    np.minimum.at(least, inverse, hashes)
    more = np.bincount(inverse[hashes == least[inverse]], minlength=len(moved))
    known, counts = units.numbers[moved, column], units.numbers[moved, column + 1]
    lower, same = (known == 0) | (least < known), least == known
    np.subtract.at(changes, np.searchsorted(edges, counts[(lower | same) & (known > 0)]), 1)
    counts = np.where(lower, more, counts + np.where(same, more, 0))
    counts = np.minimum(counts, edges[-1] + 1)
    units.numbers[moved, column] = np.where(lower, least, known)
    units.numbers[moved, column + 1] = counts
    units.touched[moved] = 1
    np.add.at(changes, np.searchsorted(edges, counts[lower | same]), 1)
    return changes


def _count_values(
    candidates: Candidates,
    units: HashTable,
    column: int,
    rows: Rows,
    places: Integers,
    at: Integers,
    values: Integers,
) -> Integers:
    """By the value of one row of each unit: that with the least hash of all."""
    changes = np.zeros(len(candidates.edges) + 1, np.int64)
    hashes = _positive(rows.digests[places, 0])
    order = np.lexsort((values, hashes, at))
    first = order[np.flatnonzero(np.diff(at[order], prepend=-1))]
    moved, known = at[first], units.numbers[at[first], column]
    lower = (known == 0) | (hashes[first] < known)
    np.subtract.at(changes, units.numbers[moved[lower & (known > 0)], column + 1], 1)
    first, moved = first[lower], moved[lower]
    edges = np.array([edge / FINEST for edge in candidates.edges], np.int64)
    bins = np.searchsorted(edges, values[first])
    units.numbers[moved, column] = hashes[first]
    units.numbers[moved, column + 1] = bins
    units.touched[moved] = 1
    np.add.at(changes, bins, 1)
    return changes


def values_of(query: Query, candidates: Candidates, values: Integers) -> Integers:
    """The distance of rows' values from 0, on the grid on which they wait."""
    for measure, column in query.value_columns.items():
        if query.clamp_of(measure) == candidates.clamp:
            return np.abs(values[:, column] + int(measure.middle / FINEST))
    raise AssertionError("a clamp is that of a sum")


def clamp_rows(query: Query, bounded: Query, values: Integers) -> Integers:
    """Rows' values with the clamps of their period, on its grid, about its middle."""
    values = values.copy()
    for measure, of_period in zip(query.value_columns, bounded.value_columns, strict=True):
        if query.clamp_of(measure) is None:
            continue
        column = query.value_columns[measure]
        waiting = values[:, column] + int(measure.middle / FINEST)
        lo, hi = (int(edge / FINEST) for edge in (of_period.lo, of_period.hi))
        steps = np.rint(np.clip(waiting, lo, hi) / float(of_period.quantum / FINEST))
        values[:, column] = steps.astype(np.int64) - int(of_period.middle / of_period.quantum)
    return values


def erase_reached(query: Query, units: HashTable, rows: Integers) -> None:
    """Mark a unit as beyond every bound: it stays in its bins, and nothing moves it any more."""
    column = 1
    for each in query.candidates:
        if each.kind == "groups":
            units.numbers[rows, 0] = int(each.edges[-1]) + 1
        else:
            units.numbers[rows, column], units.numbers[rows, column + 1] = -1, 0  # below all hashes
            column += 2


# What is published decides: post-processing.


@dataclass(frozen=True, kw_only=True)
class PublishedPeriod:
    """What was published of a period."""

    histograms: tuple[tuple[int, ...], ...]
    """Noisy units by what each bound is chosen by."""
    shown: int
    """Groups in the last tables of its windows."""
    squares: float
    """The squares of the noisy numbers in their first column, added up, less the noise; made up for
    what was left out."""


@dataclass(kw_only=True)
class ChosenBounds:
    """The bounds of periods that are open, and what was published of earlier ones."""

    candidates: tuple[Candidates, ...]
    current: PeriodBounds
    """The bounds that were chosen last."""
    since: int | None = None
    """The first period that has them."""
    of_periods: dict[int, tuple[PeriodBounds, int]] = field(default_factory=dict)
    """By period that has begun and is not over: its bounds, and the first period that has them."""
    published: list[PublishedPeriod] = field(default_factory=list)
    open: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By open period: groups in the last tables of its windows, and their squares."""
    version: int = 0
    """Grows with every change."""

    @classmethod
    def of(cls, query: Query) -> ChosenBounds | None:
        """At the beginning of a run; None: its bounds are fixed."""
        if not query.candidates:
            return None
        return cls(candidates=query.candidates, current=query.first_bounds)

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
            bounds = self.of_periods[period][0]
            told[window] = b"groups %d" % bounds.groups
            if any(each.kind != "groups" for each in self.candidates):
                told[window] = json.dumps(bounds.save()).encode()
        return told

    def _choose(self, plan: NoisePlan, releases: int) -> PeriodBounds:
        if not self.published:
            return self.current
        columns = judged(plan.query)

        def noise(bounds: PeriodBounds) -> list[float]:
            bounded = plan.of_bounds(bounds)
            stddevs, measures = bounded.window(releases).stddevs, bounded.query.measures
            return [float(stddevs[n, -1]) * float(measures[n].quantum) for n in columns]

        return best_bounds(
            self.candidates,
            self.published,
            current=self.current,
            columns=list(columns.values()),
            noise=noise,
            stddev=float(plan.histogram.stddevs[0, 0]),
        )

    def take_in_table(self, plan: NoisePlan, window: int, sums: Integers) -> None:
        """Note what the last table of a window shows; `sums`: groups x measures, with noise."""
        query = plan.query
        period, releases = period_of(query, window), query.schedule.releases(window)
        if period not in self.open:
            return
        bounded = plan.of_bounds(self.of_periods[period][0])
        stddev = bounded.window(releases).stddevs[0, -1]
        values = sums[:, 0].astype(np.float64)
        squares = math.fsum((values * values).tolist())  # in any order the same
        squares = (squares - len(values) * float(stddev) ** 2) * float(
            bounded.query.measures[0].quantum
        ) ** 2
        self.open[period].append((len(values), squares))
        self.version += 1

    def take_in_histogram(self, query: Query, period: int, noisy: Sequence[int]) -> None:
        """Note the noisy histograms of a period that is over, one after another."""
        tables, (bounds, _) = self.open.pop(period), self.of_periods.pop(period)
        histograms, first = [], 0
        for each in self.candidates:
            histograms.append(tuple(noisy[first : first + len(each.bins)]))
            first += len(each.bins)
        tails = [
            _Tail.of(each, np.array(some, np.float64), 0.0)
            for each, some in zip(self.candidates, histograms, strict=True)
        ]
        column = of_column(query, 0)
        kept = column.kept(self.candidates, tails, bounds)
        kept = max(kept, 0.1) * column.of_unit(self.candidates, tails)
        squares = max(sum(square for _, square in tables), 0.0) / kept**2
        shown = sum(number for number, _ in tables)
        one = PublishedPeriod(histograms=tuple(histograms), shown=shown, squares=squares)
        self.published = [*self.published, one][-PERIODS:]
        self.version += 1

    def bounds_of(self, query: Query, window: int) -> PeriodBounds | None:
        """The bounds of a window's period; None: it has not begun (its windows were given up)."""
        known = self.of_periods.get(period_of(query, window))
        return None if known is None else known[0]

    def describe(self, query: Query, window: int) -> dict[str, Any]:
        """Which bounds a window has, and since when: for the metadata of a release."""
        bounds, since = self.of_periods[period_of(query, window)]
        assert query.periods is not None
        start = max(query.periods.at(since), query.start or 0)
        return {**told_bounds(query, bounds), "since": iso(start)}

    def newest(self, query: Query) -> dict[str, Any] | None:
        """Which bounds the newest period has, and since when; None: none has begun."""
        if self.since is None or query.periods is None:
            return None
        start = max(query.periods.at(self.since), query.start or 0)
        return {**told_bounds(query, self.current), "since": iso(start)}

    def save(self) -> dict[str, Any]:
        """All of it, for `restore`."""
        return {
            "current": self.current.save(),
            "since": self.since,
            "of_periods": [[period, b.save(), at] for period, (b, at) in self.of_periods.items()],
            "published": [
                [[list(some) for some in p.histograms], p.shown, p.squares] for p in self.published
            ],
            "open": [[period, [list(one) for one in some]] for period, some in self.open.items()],
            "version": self.version,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` gave."""
        self.current, self.since = PeriodBounds.restore(saved["current"]), saved["since"]
        self.of_periods = {
            period: (PeriodBounds.restore(bounds), since)
            for period, bounds, since in saved["of_periods"]
        }
        self.published = [
            PublishedPeriod(histograms=tuple(map(tuple, some)), shown=shown, squares=squares)
            for some, shown, squares in saved["published"]
        ]
        self.open = {
            period: [(number, square) for number, square in some] for period, some in saved["open"]
        }
        self.version = saved["version"]


def told_bounds(query: Query, bounds: PeriodBounds) -> dict[str, Any]:
    """The bounds of a period by the names that a query gives them."""
    told: dict[str, Any] = {"max_groups_contributed": bounds.groups}
    if query.choose_rows:
        told["max_rows_per_group"] = bounds.rows
    bounded = query.with_bounds(bounds)
    for each in bounded.aggregates if query.choose_clamps else ():
        if each.name in query.choose_clamps and isinstance(each, Sum):
            of_rows = told.setdefault("contribution_bounds_per_row", {})
            of_rows[each.name] = [float(each.lo), float(each.hi)]
    return told


@dataclass(frozen=True, kw_only=True)
class JudgedColumn:
    """A column whose error bounds are chosen by: which of them it feels."""

    kind: str
    clamp: int | None
    usual_rows: float
    """Rows of a unit in a group, about, where their bound is given."""

    def feels(self, each: Candidates) -> bool:
        """Does this bound leave something of it out?"""
        if each.kind == "groups":
            return True
        if each.kind == "rows":
            return self.kind != "units"
        return self.clamp == each.clamp

    def kept(
        self, candidates: Sequence[Candidates], tails: Sequence[_Tail], bounds: PeriodBounds
    ) -> float:
        """The share that bounds leave of it."""
        pairs = zip(candidates, tails, strict=True)
        return math.prod(1 - tail.lost(each.of(bounds)) for each, tail in pairs if self.feels(each))

    def of_unit(self, candidates: Sequence[Candidates], tails: Sequence[_Tail]) -> float:
        """What a unit has of it in a group, on average."""
        rows = self.usual_rows if self.kind != "units" else 1.0
        for each, tail in zip(candidates, tails, strict=True):
            if self.feels(each) and each.kind == "rows":
                rows = tail.mean
        for each, tail in zip(candidates, tails, strict=True):
            if self.feels(each) and each.kind not in ("groups", "rows"):
                rows *= tail.mean
        return rows


def of_column(query: Query, number: int) -> JudgedColumn:
    """What bounds leave out of a column."""
    measure = query.measures[number]
    given = math.sqrt(query.bounds.rows_per_group) if query.choose_clamps else 1.0
    return JudgedColumn(kind=measure.kind, clamp=query.clamp_of(measure), usual_rows=given)


def judged(query: Query) -> dict[int, JudgedColumn]:
    """The columns whose errors count: the first, or all that are asked for, if more is chosen.

    Of a sum with given clamps nothing is known that says how large it is.
    """
    if not query.choose_rows and not query.choose_clamps:
        return {0: of_column(query, 0)}
    asked = {m for each in query.aggregates for m in query.measures_of[each.name]}
    return {
        number: of_column(query, number)
        for number, measure in enumerate(query.measures)
        if measure in asked and (measure.kind != "value" or query.clamp_of(measure) is not None)
    }


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """What a bound leaves out, from a histogram: pairs of unit and group, rows, or values."""

    edges: tuple[Fraction | int, ...]
    pairs: float
    units: float
    dropped: Reals
    """By bound."""
    last: int
    """Beyond this one no units are seen."""

    @classmethod
    def of(cls, candidates: Candidates, histogram: Reals, stddev: float) -> _Tail:
        """Of a mean of noisy histograms, each of whose bins has noise of `stddev`.

        Layer by layer, from the lowest: a unit beyond both edges of a layer loses all of it. Above
        the first layer in which no units are seen beside the noise nothing is believed: to add up
        the whole tail is noise times the largest size. (Values may have gaps: there the last layer
        with units ends it.)
        """
        edges = np.array([float(edge) for edge in candidates.edges])
        whole = candidates.kind in ("groups", "rows")
        above = histogram.sum() - np.cumsum(histogram)[:-1]  # units with more groups than an edge
        noise = stddev * np.sqrt(np.arange(len(edges), 0, -1))
        widths = np.diff(edges)
        middle = (above[:-1] + above[1:]) / 2
        layers = widths * middle + (above[:-1] - above[1:]) / 2 * whole
        seen = middle > _SEEN * noise[:-1]
        last = len(widths) if seen.all() else int(np.argmin(seen))
        layers = np.where(np.arange(len(widths)) < last, np.maximum(layers, 0.0), 0.0)
        dropped = np.append(np.cumsum(layers[::-1])[::-1], 0.0)
        units = float(histogram.sum())
        known = units > _ANYBODY * stddev * math.sqrt(len(histogram))
        lowest = units if whole else float(edges[0]) * (units + float(above[0])) / 2
        pairs = lowest + float(dropped[0]) if known else 0.0
        return cls(edges=candidates.edges, pairs=pairs, units=units, dropped=dropped, last=last)

    def lost(self, edge: Fraction | int) -> float:
        """The share of all pairs that a bound leaves out."""
        at = self.edges.index(edge)
        return float(self.dropped[at]) / self.pairs if self.pairs else 0.0

    @property
    def mean(self) -> float:
        """Of a unit."""
        return max(self.pairs / self.units, 1e-9) if self.pairs else 1.0


def _since_change(published: Sequence[PublishedPeriod], stddev: float) -> list[PublishedPeriod]:
    """The last periods whose units are like those of the newest one.

    A period is unlike them where, beyond some candidate, it has more than twice as many units or
    less than half, and that is no noise.
    """
    tails = [
        np.concatenate([np.cumsum(some[::-1])[::-1][1:] for some in one.histograms])
        for one in published
    ]
    bins = [np.arange(len(some) - 1, 0, -1) for some in published[-1].histograms]
    noise = stddev * np.sqrt(np.concatenate(bins))  # of the units beyond each candidate
    alike = 1
    for older in tails[-2::-1]:
        mean = np.mean(tails[-alike:], axis=0)
        sure = np.abs(older - mean) > _CHANGED * noise * math.sqrt(1 + 1 / alike)
        if (sure & (np.maximum(older, mean) > 2 * np.minimum(older, mean))).any():
            break
        alike += 1
    return list(published[-alike:])


def best_bounds(
    candidates: tuple[Candidates, ...],
    published: Sequence[PublishedPeriod],
    *,
    current: PeriodBounds,
    columns: Sequence[JudgedColumn],
    noise: Callable[[PeriodBounds], Sequence[float]],
    stddev: float,
) -> PeriodBounds:
    """The bounds with the least error of what is shown, by the last periods.

    `noise`: of a group under each bounds, by column, `stddev`: of a bin of one histogram. The error
    of a column is the l_2 over all groups shown, in units: each loses the share that all lose, and
    has noise, over what a unit has of the column. One bound after another is moved, twice. New
    bounds have to be better by a tenth.

    >>> period = PublishedPeriod(histograms=((500, 300, 200, 100),), shown=10, squares=1e5)
    >>> groups = Candidates(kind="groups", edges=(1, 2, 4), first=1)
    >>> column = JudgedColumn(kind="units", clamp=None, usual_rows=1.0)
    >>> best_bounds((groups,), [period], current=PeriodBounds(groups=1), columns=[column],
    ...             noise=lambda bounds: [bounds.groups**0.5], stddev=5.0).groups
    4
    """
    if not published:
        return current
    published = _since_change(published, stddev)
    tails = []
    for number, each in enumerate(candidates):
        mean = np.mean([one.histograms[number] for one in published], axis=0)
        tails.append(_Tail.of(each, mean, stddev / math.sqrt(len(published))))
    shown = float(np.mean([one.shown for one in published]))
    squares = float(np.mean([one.squares for one in published]))
    if not shown or not all(tail.pairs for tail in tails):
        return current
    of_units = [column.of_unit(candidates, tails) for column in columns]

    @cache
    def error(bounds: PeriodBounds) -> float:
        parts = []
        for column, of_unit, alone in zip(columns, of_units, noise(bounds), strict=True):
            lost = 1 - column.kept(candidates, tails, bounds)
            parts += [lost * math.sqrt(squares), alone * math.sqrt(shown) / of_unit]
        return math.hypot(*parts)

    best = current
    for _ in range(2 if len(candidates) > 1 else 1):
        for each, tail in zip(candidates, tails, strict=True):
            edges = each.edges[: tail.last + 1]
            best = min((each.put(best, edge) for edge in edges), key=error)
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
