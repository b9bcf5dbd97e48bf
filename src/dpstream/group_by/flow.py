"""One step of a continual GROUP BY, from rows to releases: the whole path in one function.

    rows of the step -> bound contributions -> aggregate -> latch keys -> perturb -> tables

Each stage works on hash buckets: units are split by their ids for bounding, groups by theirs for
everything after. The result does not depend on how many buckets there are, nor on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from dpstream.group_by.bounding import UnitBucket, Verdicts
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import HashTable, in_buckets
from dpstream.group_by.kept_share import Totals, count_offered
from dpstream.group_by.key_selection import Passes, in_rounds, passes, select_keys
from dpstream.group_by.perturb import Layout, NoisySums, perturb, thinned
from dpstream.group_by.query_state import QueryState, is_over
from dpstream.group_by.release_table import ReleaseTables
from dpstream.privacy.query_spend import NoiseStream, NoiseStreams, QuerySpend
from dpstream.query.noise_plan import NoisePlan, WindowPlan
from dpstream.query.schedule import DueRelease
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import Rows, RowSlice, slices_by_window
from dpstream.rows.row_reader import RowReader

# Threads that work on hash buckets; compiled loops run without the GIL.

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")

FEW = 1 << 14
"""Rows or groups that are sooner done than handed to a thread."""


class Workers:
    """Does one thing to every bucket, on as many threads as there are."""

    def __init__(self, threads: int) -> None:
        # Twice as many: units of one step and groups of the step before are worked on at once.
        self._pool = ThreadPoolExecutor(2 * threads) if threads > 1 else None

    @property
    def several(self) -> bool:
        """Are there threads besides the caller's?"""
        return self._pool is not None

    def each(
        self, work: Callable[[T, U], R], one: Iterable[T], two: Iterable[U], *, size: int = FEW
    ) -> list[R]:
        """work(a, b) for each bucket and what belongs to it; a little (`size`) of it right here."""
        pairs = list(zip(one, two, strict=True))
        if self._pool is None or size < FEW:
            return [work(a, b) for a, b in pairs]
        return list(self._pool.map(lambda pair: work(*pair), pairs))

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Publication:
    """A release: what is published of a window at one of its triggers."""

    due: DueRelease
    table: pa.Table


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundedRows:
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
        plan: NoisePlan,
        reader: RowReader,
        *,
        buckets: int,
        threads: int,
        run_tag: str = "",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`run_tag` names the run in its tables, so that a sink can tell runs apart.

        `share`: this is bucket so and so of so many, and sees the rows of that bucket alone.
        """
        self._share = share
        self.run_tag = run_tag
        self.plan, self.query, self.reader = plan, plan.query, reader
        self.tables = ReleaseTables(plan=plan, types=reader.types, run_tag=run_tag)
        self.buckets = buckets
        self.reset()
        self._by_value = any(m.kind == "value" for m in plan.query.measures)
        self._doors: dict[int, list[list[NoiseStream]]] = {}
        self._total_doors: dict[int, list[NoiseStream]] = {}
        self.workers = Workers(threads)

    def reset(self) -> None:
        """Forget everything."""
        units = [UnitBucket(bounds=self.query.bounds) for _ in range(self.buckets)]
        self.state = QueryState(units=units)
        self._layouts: dict[int, Layout] = {}

    def fix_schema(self) -> None:
        """Fix the columns of every release and their types: before anything is paid."""
        self.reader.settle_types()
        _ = self.tables.schema  # post-processing that cannot be done is refused here

    def step(self, step: int, pieces: Iterable[RowSlice], spend: QuerySpend) -> list[Publication]:
        """Take one step's rows in; return the table of every window that is due."""
        self.take(pieces)
        return self.publish(step, spend)

    def take(self, pieces: Iterable[RowSlice]) -> None:
        """Add a step's rows to the exact sums."""
        self.add(self.judged(pieces))

    def judged(self, pieces: Iterable[RowSlice]) -> list[BoundedRows]:
        """Bound a step's rows. This looks at units alone: meanwhile, groups may be published."""
        found = []
        for window, period, rows in slices_by_window(pieces):
            verdicts = self.bound(window, period, rows)
            offered = self.offered(period, rows) if self.query.totals else 0
            judged = BoundedRows(window=window, rows=rows, verdicts=verdicts, offered=offered)
            found.append(judged)
        return found

    def bound(self, window: int, period: int, rows: Rows) -> Verdicts:
        """Which rows of a step are kept, and which are the first of their unit in their group."""
        verdicts: Verdicts = np.zeros(len(rows), np.uint8)
        batch = (rows.units, rows.groups, rows.digests)

        def one(bucket: UnitBucket, places: Integers) -> None:
            bucket.keep(window, period, batch, places, verdicts, by_value=self._by_value)

        self.workers.each(one, self.state.units, self._split(rows.units), size=len(rows))
        return verdicts

    def offered(self, period: int, rows: Rows) -> int:
        """How many of the rows count as offered by their units."""
        most = self.query.debias_rows
        assert most is not None

        def one(bucket: UnitBucket, places: Integers) -> int:
            table = bucket.offered.setdefault(period, HashTable(1))
            return count_offered(table, rows.units, places, most)

        return sum(self.workers.each(one, self.state.units, self._split(rows.units)))

    def add(self, judged: Iterable[BoundedRows]) -> None:
        """Add what is kept to the exact sums."""
        for one in judged:
            self.count(one)
            self.aggregate(one.window, one.rows, one.verdicts)

    def count(self, judged: BoundedRows) -> None:
        """Count the rows that came and those that were kept, if somebody wants to know."""
        if self.query.totals:
            kept = int(np.count_nonzero(judged.verdicts))
            self.totals(judged.window).add(offered=judged.offered, kept=kept)

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
        self.workers.each(one, self.groups(window), places, size=len(rows))

    def add_sums(self, window: int, groups: Words, sums: Integers, keys: pa.Table) -> None:
        """The same for sums that were made of such rows elsewhere (`summed`)."""
        plan = self._window_plan(window)
        early = -1 if plan.public else plan.pre_threshold
        for bucket, places in zip(self.groups(window), self._split(groups), strict=True):
            mine = (groups[places], sums[places], keys.take(pa.array(places)))
            bucket.add_sums(*mine, pre_threshold=early)

    def publish(self, step: int, spend: QuerySpend) -> list[Publication]:
        """The table of every window that is due: noise is drawn here, and only here."""
        releases = []
        for due in self.query.schedule.due(step):
            noisy = self.perturb(due, spend)  # per bucket: groups x measures, in grid steps
            kept = self.kept_share(due, spend)
            releases.append(Publication(due=due, table=self._table(step, due, noisy, kept)))
        return releases

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        """Latch keys and add noise: what each bucket publishes of a window."""
        plan = self._window_plan(due.window)
        step = self.query.schedule.first_step(due.window) + due.release - 1
        columns = [measure.name for measure in self.query.measures]
        doors = self._doors.get(due.window)
        if doors is None:
            doors = self._doors[due.window] = [
                [
                    spend.noise_stream(window=due.window, column=column, part=part)
                    for column in columns
                ]
                for part in range(self.buckets)
            ]

        def one(bucket: GroupBucket, mine: list[NoiseStream]) -> NoisySums:
            if self.query.in_rounds:
                return in_rounds(bucket, plan, due.release, step, mine, self._passes(due))
            noise, appearing = select_keys(bucket, plan, due.release, mine[0])
            noisy = perturb(bucket, plan, due.release, mine, noise, appearing)
            if self.query.min_change is None or due.release == due.releases:
                return noisy
            return thinned(bucket, noisy, self.query.min_change * plan.stddevs[:, due.release - 1])

        groups = self.groups(due.window)
        active = sum(len(bucket.active) for bucket in groups)
        return self.workers.each(one, groups, doors, size=active)

    def _passes(self, due: DueRelease) -> Passes:
        """Whose round ends; an audit holds this fixed."""
        return passes

    def kept_share(self, due: DueRelease, spend: NoiseStreams) -> tuple[float, float]:
        """The noisy share of rows that bounding kept, and its standard deviation."""
        if not self.query.totals:
            return 1.0, 0.0
        names = [total.name for total in self.query.totals]
        if due.window not in self._total_doors:
            self._total_doors[due.window] = [
                spend.noise_stream(window=due.window, column=name, part=0) for name in names
            ]
        plan = self.plan.totals(due.releases)
        return self.totals(due.window).share(plan, due.release, self._total_doors[due.window])

    def _table(
        self, step: int, due: DueRelease, noisy: Sequence[NoisySums], kept: tuple[float, float]
    ) -> pa.Table:
        """All buckets' groups: oldest appearance first, then by id."""
        sums, keys = self._arranged(due.window, noisy)
        return self.tables.made(step, due, sums, keys, kept)

    def _arranged(
        self, window: int, noisy: Sequence[NoisySums]
    ) -> tuple[Integers, pa.Table | None]:
        """All buckets' sums and keys, in the order of a table; where it was thinned, made anew."""
        buckets = self.groups(window)
        whole = all(
            len(part.groups) == len(bucket.shown.active)
            for bucket, part in zip(buckets, noisy, strict=True)
        )
        layout = self._layouts.setdefault(window, Layout()) if whole else Layout()
        return layout.arranged(buckets, noisy)

    def groups(self, window: int) -> list[GroupBucket]:
        """The group buckets of a window; public groups are in them from the beginning."""
        if window not in self.state.windows:
            measures = self.query.measures
            buckets = [GroupBucket(measures) for _ in range(self.buckets)]
            if self.query.public_groups is not None:
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

    def totals(self, window: int) -> Totals:
        """The totals of a window, where they are counted."""
        return self.state.totals.setdefault(window, Totals(self.query.totals))

    def evict(self, window: int) -> None:
        """A window is final: its state and its doors go."""
        self.state.evict_window(window)
        for known in (self._layouts, self._doors, self._total_doors):
            known.pop(window, None)

    def evict_periods(self, step: int) -> list[int]:
        """Units go with their period, once its every window is final by `step`: which periods."""
        over = is_over(self.query, step)
        gone = sorted(period for period in self.state.periods if over(period))
        for period in gone:
            self.state.evict_period(period)
        return gone

    def close(self) -> None:
        """Stop the threads."""
        self.workers.close()

    def _window_plan(self, window: int) -> WindowPlan:
        return self.plan.window(self.query.schedule.releases(window))

    def _split(self, ids: Words, taken: Verdicts | None = None) -> list[Integers]:
        return in_buckets(ids, self.buckets, taken)
