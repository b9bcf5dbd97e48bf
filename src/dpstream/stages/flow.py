"""One step of a continual GROUP BY, from rows to releases: the whole path in one function.

    rows of the step -> bound contributions -> aggregate -> latch keys -> perturb -> tables

Each stage works on hash buckets: units are split by their ids for bounding, groups by theirs for
everything after. The result does not depend on how many buckets there are, nor on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from dpstream.privacy.query_spend import Door, Doors, QuerySpend
from dpstream.records import Integers, Words
from dpstream.stages.bounding import UnitBucket, Verdicts
from dpstream.stages.groups import GroupBucket
from dpstream.stages.layout import Layout
from dpstream.stages.perturb import Noisy, perturb, thinned
from dpstream.stages.plan import Plan, WindowPlan
from dpstream.stages.release_table import ReleaseTables
from dpstream.stages.rounds import Passes, in_rounds, passes
from dpstream.stages.row_reader import RowReader
from dpstream.stages.rows import Rows
from dpstream.stages.schedule import Due
from dpstream.stages.select_keys import select_keys
from dpstream.stages.tables import Table, in_buckets
from dpstream.stages.totals import Totals, count_offered

T = TypeVar("T")
U = TypeVar("U")

_FEW = 1 << 14  # rows or groups that are sooner done than handed to a thread

Piece = tuple[Rows, int, int]
"""Rows `first` to `end` of a batch."""


@dataclass(kw_only=True)
class State:
    """What a query remembers: units and their groups, and every group's sums and noise."""

    units: list[UnitBucket]
    windows: dict[int, list[GroupBucket]] = field(default_factory=dict)
    totals: dict[int, Totals] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory held."""
        tables = [
            table
            for bucket in self.units
            for kind in (bucket.periods, bucket.windows, bucket.offered)
            for table in kind.values()
        ]
        groups = [bucket for buckets in self.windows.values() for bucket in buckets]
        return sum(t.bytes for t in tables) + sum(g.bytes for g in groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class Publication:
    """A release: what is published of a window at one of its triggers."""

    due: Due
    table: pa.Table


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A step's rows of one window and period, and what becomes of each: dropped, kept, first."""

    window: int
    rows: Rows
    verdicts: Verdicts
    offered: int
    """Rows that count as offered by their units, where that is counted."""


class Flow:
    """A query, its plan, its state, and threads to work on buckets."""

    def __init__(
        self,
        plan: Plan,
        reader: RowReader,
        *,
        buckets: int,
        threads: int,
        mark: str = "",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`mark` names the run in its tables, so that a sink can tell runs apart.

        `share`: this is bucket so and so of so many, and sees the rows of that bucket alone.
        """
        self._share = share
        self.mark = mark
        self.plan, self.query, self.reader = plan, plan.query, reader
        self.tables = ReleaseTables(plan=plan, types=reader.types, mark=mark)
        self.buckets = buckets
        self.reset()
        self._by_value = any(m.kind == "value" for m in plan.query.measures)
        self._doors: dict[int, list[list[Door]]] = {}
        self._total_doors: dict[int, list[Door]] = {}
        # Twice as many: units of one step and groups of the step before are worked on at once.
        self._pool = ThreadPoolExecutor(2 * threads) if threads > 1 else None

    def reset(self) -> None:
        """Forget everything."""
        units = [UnitBucket(bounds=self.query.bounds) for _ in range(self.buckets)]
        self.state = State(units=units)
        self._layouts: dict[int, Layout] = {}

    def step(self, step: int, pieces: Iterable[Piece], spend: QuerySpend) -> list[Publication]:
        """Take one step's rows in; return the table of every window that is due."""
        self.take(pieces)
        return self.publish(step, spend)

    def take(self, pieces: Iterable[Piece]) -> None:
        """Add a step's rows to the exact sums."""
        self.add(self.judged(pieces))

    def judged(self, pieces: Iterable[Piece]) -> list[Judged]:
        """Bound a step's rows. This looks at units alone: meanwhile, groups may be published."""
        found = []
        for window, period, rows in by_window(pieces):
            verdicts = self.bound(window, period, rows)
            offered = self.offered(period, rows) if self.query.totals else 0
            judged = Judged(window=window, rows=rows, verdicts=verdicts, offered=offered)
            found.append(judged)
        return found

    def add(self, judged: Iterable[Judged]) -> None:
        """Add what is kept to the exact sums."""
        for one in judged:
            self.count(one)
            self.aggregate(one.window, one.rows, one.verdicts)

    def publish(self, step: int, spend: QuerySpend) -> list[Publication]:
        """The table of every window that is due: noise is drawn here, and only here."""
        releases = []
        for due in self.query.schedule.due(step):
            noisy = self.perturb(due, spend)  # per bucket: groups x measures, in grid steps
            kept = self.kept_share(due, spend)
            releases.append(Publication(due=due, table=self._table(step, due, noisy, kept)))
        return releases

    def forget(self, window: int) -> None:
        """A window is final: its groups, its pairs, its totals and its doors go."""
        self.state.windows.pop(window, None)
        self._layouts.pop(window, None)
        self.state.totals.pop(window, None)
        self._doors.pop(window, None)
        self._total_doors.pop(window, None)
        for bucket in self.state.units:
            bucket.windows.pop(window, None)

    def forget_periods(self, step: int) -> list[int]:
        """Periods whose every window is final by `step`: no row of theirs can be kept any more."""
        ticks, schedule = self.query.periods, self.query.schedule
        # A list of each: the next step's rows may be bounded meanwhile, in periods of their own.
        known = {period for bucket in self.state.units for period in list(bucket.periods)}
        gone = []
        if ticks is None and schedule.steps is not None and step >= schedule.steps:
            gone = list(known)
        for period in known if ticks is not None else ():
            assert ticks is not None
            end = ticks.at(period + 1)
            if schedule.end is not None:  # the period may reach beyond it
                end = min(end, schedule.end)
            last = int(schedule.last_window_of(np.array([end - 1]))[0])
            if schedule.last_step(last) < step:
                gone.append(period)
        for period in gone:
            self.forget_period(period)
        return sorted(gone)

    def forget_period(self, period: int) -> None:
        """Its units go."""
        for bucket in self.state.units:
            bucket.periods.pop(period, None)
            bucket.offered.pop(period, None)

    @property
    def on_threads(self) -> bool:
        """Are there threads, so that a step's units and the groups of another can be worked on?"""
        return self._pool is not None

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def groups(self, window: int) -> list[GroupBucket]:
        """The group buckets of a window; public groups are in them from the beginning."""
        if window not in self.state.windows:
            measures = self.query.measures
            buckets = [GroupBucket(measures) for _ in range(self.buckets)]
            if self.query.public_keys is not None:
                ids, keys = self._public()
                for bucket, places in zip(buckets, self._split(ids), strict=True):
                    bucket.open(ids[places], keys.take(pa.array(places)))
            self.state.windows[window] = buckets
        return self.state.windows[window]

    def _public(self) -> tuple[Words, pa.Table]:
        """The public groups of this share."""
        ids, keys = self.reader.public_ids(), self.reader.public_table()
        number, of = self._share
        mine = in_buckets(ids, of)[number]
        return ids[mine], keys.take(pa.array(mine))

    def bound(self, window: int, period: int, rows: Rows) -> Verdicts:
        """Which rows of a step are kept, and which are the first of their unit in their group."""
        verdicts: Verdicts = np.zeros(len(rows), np.uint8)
        batch = (rows.units, rows.groups, rows.digests)

        def one(bucket: UnitBucket, places: Integers) -> None:
            bucket.keep(window, period, batch, places, verdicts, by_value=self._by_value)

        self.each(one, self.state.units, self._split(rows.units), few=len(rows) < _FEW)
        return verdicts

    def totals(self, window: int) -> Totals:
        """The totals of a window, where they are counted."""
        return self.state.totals.setdefault(window, Totals(self.query.totals))

    def count(self, judged: Judged) -> None:
        """Count the rows that came and those that were kept, if somebody wants to know."""
        if self.query.totals:
            kept = int(np.count_nonzero(judged.verdicts))
            self.totals(judged.window).add(offered=judged.offered, kept=kept)

    def offered(self, period: int, rows: Rows) -> int:
        """How many of the rows count as offered by their units."""
        most = self.query.debias_rows
        assert most is not None

        def one(bucket: UnitBucket, places: Integers) -> int:
            table = bucket.offered.setdefault(period, Table(1))
            return count_offered(table, rows.units, places, most)

        return sum(self.each(one, self.state.units, self._split(rows.units)))

    def aggregate(self, window: int, rows: Rows, verdicts: Verdicts) -> None:
        """Add the rows that are kept to their groups' exact sums."""
        if not verdicts.any():
            return  # no state for a window that nobody has got into
        plan = self._window_plan(window)
        early = -1 if plan.public else plan.pre_threshold
        units, step = (rows.units if self.query.rounds_of_units else None), int(rows.steps[0])

        def one(bucket: GroupBucket, places: Integers) -> None:
            batch = (rows.groups, verdicts, rows.values, rows.keys)
            bucket.add(*batch, places, pre_threshold=early, units=units, step=step)

        places = self._split(rows.groups, verdicts)
        self.each(one, self.groups(window), places, few=len(rows) < _FEW)

    def add_sums(self, window: int, groups: Words, sums: Integers, keys: pa.Table) -> None:
        """The same for sums that were made of such rows elsewhere (`summed`)."""
        plan = self._window_plan(window)
        early = -1 if plan.public else plan.pre_threshold
        for bucket, places in zip(self.groups(window), self._split(groups), strict=True):
            mine = (groups[places], sums[places], keys.take(pa.array(places)))
            bucket.add_sums(*mine, pre_threshold=early)

    def kept_share(self, due: Due, spend: Doors) -> tuple[float, float]:
        """The noisy share of rows that bounding kept, and its standard deviation."""
        if not self.query.totals:
            return 1.0, 0.0
        names = [total.name for total in self.query.totals]
        if due.window not in self._total_doors:
            self._total_doors[due.window] = [
                spend.door(window=due.window, column=name, part=0) for name in names
            ]
        plan = self.plan.totals(due.releases)
        return self.totals(due.window).share(plan, due.release, self._total_doors[due.window])

    def perturb(self, due: Due, spend: Doors) -> list[Noisy]:
        """Latch keys and add noise: what each bucket publishes of a window."""
        plan = self._window_plan(due.window)
        step = self.query.schedule.first_step(due.window) + due.release - 1
        columns = [measure.name for measure in self.query.measures]
        doors = self._doors.get(due.window)
        if doors is None:
            doors = self._doors[due.window] = [
                [spend.door(window=due.window, column=column, part=part) for column in columns]
                for part in range(self.buckets)
            ]

        def one(bucket: GroupBucket, mine: list[Door]) -> Noisy:
            if self.query.in_rounds:
                return in_rounds(bucket, plan, due.release, step, mine, self._passes(due))
            noise, appearing = select_keys(bucket, plan, due.release, mine[0])
            noisy = perturb(bucket, plan, due.release, mine, noise, appearing)
            if self.query.min_change is None or due.release == due.releases:
                return noisy
            return thinned(bucket, noisy, self.query.min_change * plan.stddevs[:, due.release - 1])

        groups = self.groups(due.window)
        few = sum(len(bucket.active) for bucket in groups) < _FEW
        return self.each(one, groups, doors, few=few)

    def _passes(self, due: Due) -> Passes:
        """Whose round ends; an audit holds this fixed."""
        return passes

    def _table(
        self, step: int, due: Due, noisy: Sequence[Noisy], kept: tuple[float, float]
    ) -> pa.Table:
        """All buckets' groups: oldest appearance first, then by id."""
        sums, keys = self._arranged(due.window, noisy)
        return self.tables.made(step, due, sums, keys, kept)

    def _arranged(self, window: int, noisy: Sequence[Noisy]) -> tuple[Integers, pa.Table | None]:
        """All buckets' sums and keys, in the order of a table; where it was thinned, made anew."""
        buckets = self.groups(window)
        whole = all(
            len(part.groups) == len(bucket.shown.active)
            for bucket, part in zip(buckets, noisy, strict=True)
        )
        layout = self._layouts.setdefault(window, Layout()) if whole else Layout()
        return layout.arranged(buckets, noisy)

    def _window_plan(self, window: int) -> WindowPlan:
        return self.plan.window(self.query.schedule.releases(window))

    def _split(self, ids: Words, taken: Verdicts | None = None) -> list[Integers]:
        return in_buckets(ids, self.buckets, taken)

    def each(
        self,
        work: Callable[[T, U], Any],
        one: Iterable[T],
        two: Iterable[U],
        *,
        few: bool = False,
    ) -> list[Any]:
        """Do the work for every bucket, on the threads there are; a little of it right here."""
        pairs = list(zip(one, two, strict=True))
        if self._pool is None or few:
            return [work(a, b) for a, b in pairs]
        return list(self._pool.map(lambda pair: work(*pair), pairs))


def by_window(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, Rows]]:
    """Rows of each window and period together, in their order."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for rows, first, end in pieces:
        place = (int(rows.windows[first]), int(rows.periods[first]))
        found.setdefault(place, []).append((rows, first, end))
    for window, period in sorted(found):
        yield window, period, _joined(found[window, period], window, period)


def _joined(pieces: Sequence[Piece], window: int, period: int) -> Rows:
    parts = [
        {
            name: getattr(rows, name)[first:end]
            for name in ("units", "groups", "digests", "steps", "values")
        }
        for rows, first, end in pieces
    ]
    keys = [rows.keys.slice(first, end - first) for rows, first, end in pieces]
    columns = parts[0]
    if len(parts) > 1:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in columns}
    size = len(columns["steps"])
    windows, periods = (np.broadcast_to(np.int64(one), size) for one in (window, period))
    return Rows(**columns, windows=windows, periods=periods, keys=pa.concat_tables(keys))
