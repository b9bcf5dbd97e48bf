"""One step of a continual GROUP BY, from rows to releases: the whole path on one page.

    rows -> bound -> aggregate -> select keys -> perturb -> publish

`Flow.step` and `Flow.publish` are this path, in this order; everything below them is one of its
stages, or the state that the stages share. Each stage works on hash buckets: units are divided by
their ids for bounding, groups by theirs for everything after. The result depends neither on the
number of buckets nor on their order, so an engine may run each bucket wherever it likes.

Paper: Zhang, Doroshenko, Kairouz, Steinke, Thakurta, Ma, Apte, Spacek, "Differentially Private
Stream Processing at Scale", 2023, Figure 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from dpstream.group_by.bias import Totals, count_totals
from dpstream.group_by.bounding import KeepMask, UnitBucket
from dpstream.group_by.cell_sums import CellSums, read_cells
from dpstream.group_by.chosen_bounds import (
    ChosenBounds,
    clamp_rows,
    count_reached,
    digest_of,
    last_window_of,
    period_of,
)
from dpstream.group_by.contributions import add_contributions, weigh_keys
from dpstream.group_by.grouping_sets import (
    groups_in_sets,
    mark_first,
    rows_in_sets,
    sets_of_bucket,
)
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import in_buckets
from dpstream.group_by.key_selection import Passes, end_rounds, passes, select_keys
from dpstream.group_by.perturb import NoisySums, TableOrder, perturb, thin_out
from dpstream.group_by.release_table import ReleaseTables
from dpstream.group_by.remembered_keys import NONE, RememberedKeys, is_taken_in
from dpstream.privacy.query_spend import NoiseStream, NoiseStreams, QuerySpend
from dpstream.query.aggregates import Measure
from dpstream.query.noise_plan import NoisePlan, WindowPlan
from dpstream.query.query import Query
from dpstream.query.schedule import DueRelease
from dpstream.records import Integers, Words
from dpstream.rows.row_batch import RejectedRows, Rows, RowSlice, rows_at, rows_by_window
from dpstream.rows.row_reader import RowReader

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundedRows:
    """A step's rows of one window and period, and which of them are kept."""

    window: int
    rows: Rows
    keep_mask: KeepMask
    """By row: 0 (dropped), KEPT, or KEPT | FIRST (the first of its unit in its group); or INSIDE
    beside or without them, where rows beyond the bounds count of a unit that is in the group."""
    totals: Integers | None
    """What they add to the totals of the window, where it has any."""
    reached: Integers | None
    """What they change in the histogram of their period's units, where bounds are chosen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Publication:
    """A release: what is published of a window at one of its triggers."""

    due: DueRelease
    table: pa.Table


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

        `share`: (number, count) where `count` flows share a query's groups, and this one has those
        of hash bucket `number`.
        """
        self.plan, self.query, self.reader = plan, plan.query, reader
        self.tables = ReleaseTables(plan=plan, types=reader.types, run_tag=run_tag)
        self.run_tag, self.buckets, self._share = run_tag, buckets, share
        self.workers = Workers(threads)
        self._streams: dict[int, list[list[NoiseStream]]] = {}  # window: buckets x measures
        self._total_streams: dict[int, list[NoiseStream]] = {}
        self.abandoned: tuple[range, ...] = ()
        """Windows that are not published any more."""
        self.note_unused: Callable[[str, RejectedRows], None] = lambda where, unused: None
        """Tells the operator of inner rows that are not used."""
        self.reset()

    def reset(self) -> None:
        """Begin with an empty state."""
        units = [UnitBucket(bounds=self.query.bounds) for _ in range(self.buckets)]
        self.state = QueryState(units=units)
        most = self.query.remembered_keys
        self.remembered = RememberedKeys(most=most) if most else None
        """None in a share of a flow: whoever has all of them hands over what windows begin with."""
        self.chosen = ChosenBounds.of(self.query)
        self.tables.restore_earlier([])
        self._orders: dict[int, TableOrder] = {}

    # The path of a step.

    def step(self, step: int, slices: Iterable[RowSlice], spend: QuerySpend) -> list[Publication]:
        """Take one step's rows in; return the table of every window that is due."""
        self.begin_windows(step)
        # slices: [(rows of a batch, first, end)], each of this step, one window, one period
        bounded = self.bound_rows(step, slices)
        # bounded: [BoundedRows], one for each window and period, with a flag for every row
        self.aggregate_rows(bounded)
        # state.windows: {window: [GroupBucket]}, in each bucket groups x measures, exact integers
        return self.publish(step, spend)

    def begin_windows(self, step: int) -> dict[int, bytes]:
        """Windows whose first release comes at a step begin with the keys that are remembered.

        Only once the steps before are published. Returns a digest for each window, which is noted.
        """
        if self.remembered is None and self.chosen is None:
            return {}
        new = [due.window for due in self.due(step) if due.release == 1]
        digests = dict[int, bytes]()
        if self.remembered is not None:
            windows, digests = self.remembered.begin(new)
            for window, known in windows.items():
                self.begin_window(window, *known)
        if self.chosen is not None:
            told = self.chosen.begin(self.plan, new)
            digests = {w: digest_of(digests.get(w, b""), told[w]) for w in told}
        return digests

    def begin_window(self, window: int, ids: Words, keys: pa.Table | None) -> None:
        """A window shows these keys without a threshold."""
        number, count = self._share
        mine = in_buckets(ids, count)[number]
        if keys is None or not len(mine):
            return
        places = in_buckets(ids[mine], self.buckets)
        for bucket, part in zip(self.groups(window), places, strict=True):
            if len(part):
                bucket.remember(ids[mine[part]], keys.take(pa.array(mine[part])))

    def bound_rows(self, step: int, slices: Iterable[RowSlice]) -> list[BoundedRows]:
        """Bound a step's rows. This looks at units alone: meanwhile, groups may be published."""
        bounded = []
        for window, period, rows in self.rows_of_step(step, slices):
            reached = self.count_reached(window, period, rows)
            rows = self.clamp(window, rows)
            keep_mask = self.bound(window, period, rows)
            totals = self.count_totals(window, period, rows, keep_mask)
            rows = self.contributions(window, rows, keep_mask)
            if self.query.grouping_sets:
                rows, keep_mask = self.in_every_set(window, rows, keep_mask)
            counts = {"totals": totals, "reached": reached}
            bounded.append(BoundedRows(window=window, rows=rows, keep_mask=keep_mask, **counts))
        return bounded

    def _join(self, columns: list[list[Any]]) -> list[Any]:
        """Columns of a step that has come in several parts: a copy of all its rows."""
        size = sum(map(len, columns[0]))
        return self.workers.each(
            lambda _, parts: np.concatenate(parts), columns, columns, size=size
        )

    def aggregate_rows(self, bounded: Iterable[BoundedRows]) -> None:
        """Add the rows that are kept to the exact sums of groups, and to the totals of windows."""
        for part in bounded:
            if part.totals is not None:
                self.totals(part.window).add(part.totals)
            if part.reached is not None:
                self.histogram(part.window).add(part.reached)
            self.aggregate(part.window, part.rows, part.keep_mask)

    def publish(self, step: int, spend: QuerySpend) -> list[Publication]:
        """The table of every window that is due: noise is drawn here, and only here."""
        releases = []
        for due in self.due(step):
            noisy = self.perturb(due, spend)  # select keys, then add noise to their sums
            # noisy: [NoisySums], per bucket the groups shown x measures, integers with noise
            totals = self.noisy_totals(due, spend)
            # totals: what bounding has kept and dropped of the window as a whole, with noise
            self._remember(step, due, noisy)
            releases.append(Publication(due=due, table=self._table(step, due, noisy, totals)))
            # table: groups shown x (window, keys, each aggregate with its error bar, trigger)
            self._choose(due, noisy, spend)
        return releases

    def _remember(self, step: int, due: DueRelease, noisy: Sequence[NoisySums]) -> None:
        """Remember what a table shows, if a window may begin with it."""
        if self.remembered is None or not is_taken_in(self.query, step, due):
            return
        ids = np.concatenate([part.ids for part in noisy])
        sums = np.concatenate([part.sums[:, self.query.sized_by] for part in noisy])
        keys = [
            bucket.key_columns(part.groups)
            for bucket, part in zip(self.groups(due.window), noisy, strict=True)
            if len(part.ids)
        ]
        table = pa.concat_tables(keys) if keys else None
        final = due.release == due.releases
        self.remembered.take_in(due.window, ids, table, sums, final=final)

    def _choose(self, due: DueRelease, noisy: Sequence[NoisySums], spend: QuerySpend) -> None:
        """Take in what a window's last table says of bounds, and the histogram of its period."""
        if self.chosen is None or due.release < due.releases:
            return
        sums = np.concatenate([part.sums for part in noisy])
        self.chosen.take_in_table(self.plan, due.window, sums)
        histogram = self.noisy_histogram(due, spend)
        if histogram:
            self.chosen.take_in_histogram(self.query, period_of(self.query, due.window), histogram)

    def noisy_histogram(self, due: DueRelease, spend: NoiseStreams) -> tuple[int, ...]:
        """The histograms of a period's units with noise, at the last table of its last window."""
        last = due.release == due.releases
        if self.chosen is None or not last or not self.ends_period(due.window):
            return ()
        streams = [
            spend.noise_stream(window=due.window, column=name, part=0)
            for each in self.query.candidates
            for name in each.bins
        ]
        return self.histogram(due.window).noisy(self.plan.histogram, 1, streams)

    def ends_period(self, window: int) -> bool:
        """Is this the last window of its period?"""
        return last_window_of(self.query, period_of(self.query, window)) == window

    def plan_of(self, window: int) -> NoisePlan | None:
        """The plan with the bounds that a window has; None: its period has not begun."""
        if self.chosen is None:
            return self.plan
        bounds = self.chosen.bounds_of(self.query, window)
        return None if bounds is None else self.plan.of_bounds(bounds)

    def _bounded_as(self, window: int) -> NoisePlan:
        plan = self.plan_of(window)
        assert plan is not None
        return plan

    def due(self, step: int) -> list[DueRelease]:
        """What is published at a step: nothing of a window that was abandoned."""
        due = self.query.schedule.due(step)
        return [one for one in due if not any(one.window in some for some in self.abandoned)]

    # Rows that wait: for the end of their window, where units' are grouped, or for bounds.

    def rows_of_step(
        self, step: int, slices: Iterable[RowSlice]
    ) -> Iterable[tuple[int, int, Rows]]:
        """Window, period and rows that count at a step: inner ones, where units' are grouped."""
        if self.chosen is not None:
            yield from self._rows_of_begun(step, slices, self.chosen)
            return
        if self.query.per_unit is None:
            yield from rows_by_window(slices, self._join)
            return
        held, schedule = self.state.held, self.query.schedule
        due = set[int]()
        for window, _, rows in rows_by_window(slices, self._join):
            if schedule.last_step(window) > step:  # not the whole chunk that they came in
                rows = rows_at(rows, np.arange(len(rows)))
            held.setdefault(window, []).append(rows)
            if self.query.per_unit.grows:
                due.add(window)
        due |= {window for window in held if schedule.last_step(window) <= step}
        while due:
            window = min(due)
            due.remove(window)
            over = schedule.last_step(window) <= step
            waiting = held.pop(window) if over else held[window]
            pieces = [(rows, 0, len(rows)) for rows in waiting]
            for _, period, rows in rows_by_window(pieces, self._join):
                where = f"{self.query.name}, window {window}, period {period}"
                inner, unused = self.reader.inner_rows(rows, where, step)
                self.note_unused(where, unused)
                if over and self._carry(step, window, rows) <= step:
                    due.add(window + 1)
                if len(inner):
                    yield window, period, inner

    def _rows_of_begun(
        self, step: int, slices: Iterable[RowSlice], chosen: ChosenBounds
    ) -> Iterable[tuple[int, int, Rows]]:
        """Rows of periods that have begun; others, dated ahead, wait until theirs has bounds."""
        held = self.state.held
        for window in sorted(w for w in held if chosen.bounds_of(self.query, w) is not None):
            pieces = [(rows, 0, len(rows)) for rows in held.pop(window)]
            for _, period, rows in rows_by_window(pieces, self._join):
                yield window, period, replace(rows, steps=np.full(len(rows), step, np.int64))
        for window, period, rows in rows_by_window(slices, self._join):
            if chosen.bounds_of(self.query, window) is not None:
                yield window, period, rows
            else:
                held.setdefault(window, []).append(rows_at(rows, np.arange(len(rows))))

    def _carry(self, step: int, window: int, rows: Rows) -> int:
        """Let what is known of units go on to the next window; the last step of that."""
        per_unit, schedule = self.query.per_unit, self.query.schedule
        last = schedule.windows is not None and window + 1 >= schedule.windows
        if per_unit is None or not per_unit.across_windows or last:
            return step + 1
        places, keys = per_unit.carried(rows)
        if not len(places):
            return step + 1
        columns: dict[str, Any] = {"windows": window + 1, "periods": rows.periods[0], "steps": step}
        columns = {
            name: np.broadcast_to(np.int64(number), len(places)) for name, number in columns.items()
        }
        names = ("units", "groups", "digests", "values")
        columns |= {name: getattr(rows, name)[places] for name in names}
        going = Rows(**columns, keys=keys)
        self.state.held.setdefault(window + 1, []).append(going)
        return schedule.last_step(window + 1)

    # Bound: what each unit contributes.

    def bound(self, window: int, period: int, rows: Rows) -> KeepMask:
        """Which rows of a step are kept, and which are the first of their unit in their group."""
        keep_mask: KeepMask = np.zeros(len(rows), np.uint8)
        batch = (rows.units, rows.groups, rows.digests)
        known = {} if self.remembered is None else self.remembered.of_windows
        how: dict[str, Any] = {
            "by_value": self.query.rows_differ,
            "preferred": known.get(window, NONE),
            "bounds": None if self.chosen is None else self._bounded_as(window).query.bounds,
        }

        def bound_bucket(bucket: UnitBucket, places: Integers) -> None:
            bucket.keep(window, period, batch, places, keep_mask, **how)

        places = in_buckets(rows.units, self.buckets)  # bucket of units: its row numbers
        self.workers.each(bound_bucket, self.state.units, places, size=len(rows))
        return keep_mask

    def count_totals(
        self, window: int, period: int, rows: Rows, keep_mask: KeepMask
    ) -> Integers | None:
        """What rows add to the totals of their window; None if it has none."""
        if not self.query.totals:
            return None

        query = self._bounded_as(window).query

        def count_bucket(bucket: UnitBucket, places: Integers) -> Integers:
            return count_totals(query, bucket, window, period, rows, places, keep_mask)

        places = in_buckets(rows.units, self.buckets)
        counts = self.workers.each(count_bucket, self.state.units, places, size=len(rows))
        totals: Integers = np.sum(counts, axis=0)
        return totals

    def count_reached(self, window: int, period: int, rows: Rows) -> Integers | None:
        """What rows change in the histogram of their period; None if bounds are not chosen."""
        if self.chosen is None:
            return None

        def count_bucket(bucket: UnitBucket, places: Integers) -> Integers:
            return count_reached(self.query, bucket, window, period, rows, places)

        places = in_buckets(rows.units, self.buckets)
        counts = self.workers.each(count_bucket, self.state.units, places, size=len(rows))
        changes: Integers = np.sum(counts, axis=0)
        return changes

    def clamp(self, window: int, rows: Rows) -> Rows:
        """The rows with the clamps of their period, where these are chosen."""
        if not self.query.choose_clamps:
            return rows
        bounded = self._bounded_as(window).query
        return replace(rows, values=clamp_rows(self.query, bounded, rows.values))

    def contributions(self, window: int, rows: Rows, keep_mask: KeepMask) -> Rows:
        """The rows with what they add to what is bounded for each unit and group, if anything is.

        Rows that count there alone are marked in `keep_mask`.
        """
        weighted = self.query.key_weights is not None
        if not self.query.unit_measures and not weighted:
            return rows
        values, period = rows.values.copy(), int(rows.periods[0])

        def add_bucket(bucket: UnitBucket, places: Integers) -> None:
            of_rows = (rows.units, rows.groups, places, keep_mask, values)
            if weighted:
                weigh_keys(self.query, bucket, period, *of_rows)
            else:
                add_contributions(self.query, bucket, window, *of_rows)

        places = in_buckets(rows.units, self.buckets)
        self.workers.each(add_bucket, self.state.units, places, size=len(rows))
        return replace(rows, values=values)

    def in_every_set(self, window: int, rows: Rows, keep_mask: KeepMask) -> tuple[Rows, KeepMask]:
        """The rows that are kept, once in each set of keys, and whose first they are there."""
        rows, keep_mask, again = rows_in_sets(self.query, self.reader.ids, rows, keep_mask)
        if again is None:
            return rows, keep_mask

        def mark_bucket(bucket: UnitBucket, places: Integers) -> None:
            mark_first(bucket, window, rows, again[places], keep_mask)

        places = in_buckets(rows.units[again], self.buckets)
        self.workers.each(mark_bucket, self.state.units, places, size=len(again))
        return rows, keep_mask

    # Aggregate: exact integers, seen by nobody.

    def aggregate(self, window: int, rows: Rows, keep_mask: KeepMask) -> None:
        """Add the rows that are kept to their groups' exact sums."""
        if not keep_mask.any():
            return  # no state for a window that nobody has got into
        units, step = (rows.units if self.query.rounds_of_units else None), int(rows.steps[0])
        activation = self._window_plan(window).activation

        def add_bucket(bucket: GroupBucket, places: Integers) -> None:
            batch = (rows.groups, keep_mask, rows.values, rows.keys)
            bucket.add(*batch, places, pre_threshold=activation, units=units, step=step)

        places = in_buckets(rows.groups, self.buckets, keep_mask)  # bucket of groups: rows kept
        self.workers.each(add_bucket, self.groups(window), places, size=len(rows))

    def add_sums(self, window: int, groups: Words, sums: Integers, keys: pa.Table) -> None:
        """The same for sums that `sum_groups` made of such rows in another process."""
        activation = self._window_plan(window).activation
        for bucket, places in zip(
            self.groups(window), in_buckets(groups, self.buckets), strict=True
        ):
            mine = (groups[places], sums[places], keys.take(pa.array(places)))
            bucket.add_sums(*mine, pre_threshold=activation)

    # Select keys and perturb: the only draws.

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        """Select keys and add noise: what each bucket publishes of a window."""
        plan, release, query = self._window_plan(due.window), due.release, self.query
        step = query.schedule.first_step(due.window) + release - 1
        measures = len(query.measures)

        def perturb_bucket(bucket: GroupBucket, streams: list[NoiseStream]) -> NoisySums:
            if query.in_rounds:
                return end_rounds(bucket, plan, release, step, streams, self._passes(due))
            sets = sets_of_bucket(query, bucket)
            noise, appearing = select_keys(bucket, plan, release, streams[0], sets)
            # noise: of every active group's units; appearing: groups that pass the threshold now
            noisy = perturb(bucket, plan, release, streams[:measures], noise, appearing, sets)
            # noisy: all groups shown so far x measures, in grid steps
            if query.cells:
                noisy = read_cells(bucket.cells, query, plan, release, streams[measures:], noisy)
                # noisy: the same x (measures, and what is read off noisy cells)
            if query.min_change is None or release == due.releases:
                return noisy
            return thin_out(bucket, noisy, query.min_change * plan.stddevs[:, release - 1])

        groups = self.groups(due.window)
        active = sum(len(bucket.active) for bucket in groups)
        return self.workers.each(
            perturb_bucket, groups, self._noise_streams(due.window, spend), size=active
        )

    def _noise_streams(self, window: int, spend: NoiseStreams) -> list[list[NoiseStream]]:
        """Where the noise of a window comes from: buckets x measures and levels of cells."""
        if window not in self._streams:
            columns = [column.name for column in self.query.measures + self.query.levels]
            self._streams[window] = [
                [spend.noise_stream(window=window, column=column, part=part) for column in columns]
                for part in range(self.buckets)
            ]
        return self._streams[window]

    def _passes(self, due: DueRelease) -> Passes:
        """Whose round ends; an audit holds this fixed."""
        return passes

    def noisy_totals(self, due: DueRelease, spend: NoiseStreams) -> tuple[int, ...]:
        """The totals of a window with noise, where it has any."""
        if not self.query.totals:
            return ()
        if due.window not in self._total_streams:
            self._total_streams[due.window] = [
                spend.noise_stream(window=due.window, column=total.name, part=0)
                for total in self.query.totals
            ]
        plan = self._bounded_as(due.window).totals(due.releases)
        return self.totals(due.window).noisy(plan, due.release, self._total_streams[due.window])

    # Publish: post-processing of noisy sums.

    def _table(
        self, step: int, due: DueRelease, noisy: Sequence[NoisySums], totals: tuple[int, ...]
    ) -> pa.Table:
        """All buckets' groups in one table: oldest appearance first, then by id."""
        buckets = self.groups(due.window)
        complete = all(
            len(part.groups) == len(bucket.shown.active)
            for bucket, part in zip(buckets, noisy, strict=True)
        )
        order = TableOrder()  # of some of the groups shown, made for this table alone
        if complete:
            order = self._orders.setdefault(due.window, order)
        sums, keys = order.arrange(buckets, noisy)
        chosen = None if self.chosen is None else self.chosen.describe(self.query, due.window)
        bounded = self.plan_of(due.window)
        return self.tables.table(step, due, sums, keys, totals, chosen=chosen, bounded=bounded)

    # State.

    def groups(self, window: int) -> list[GroupBucket]:
        """The group buckets of a window; public groups are in them from the beginning."""
        if window not in self.state.windows:
            buckets = [self.new_groups() for _ in range(self.buckets)]
            if self.query.public_groups is not None:
                ids, keys = self._public_groups()
                for bucket, places in zip(buckets, in_buckets(ids, self.buckets), strict=True):
                    bucket.open(ids[places], keys.take(pa.array(places)))
            self.state.windows[window] = buckets
        return self.state.windows[window]

    def new_groups(self) -> GroupBucket:
        """A bucket without groups."""
        return GroupBucket(self.query.measures, [CellSums(cells) for cells in self.query.cells])

    def _public_groups(self) -> tuple[Words, pa.Table]:
        """The public groups of this share."""
        ids, keys = self.reader.public_ids(), self.reader.public_table()
        if self.query.grouping_sets:
            ids, keys = groups_in_sets(self.query, self.reader.ids, ids, keys)
        number, count = self._share
        mine = in_buckets(ids, count)[number]
        return ids[mine], keys.take(pa.array(mine))

    def totals(self, window: int) -> Totals:
        """The totals of a window, where they are counted."""
        if window not in self.state.totals:
            self.state.totals[window] = Totals(self.query.totals)
        return self.state.totals[window]

    def histogram(self, window: int) -> Totals:
        """The histograms of the units of a window's period, one after another."""
        last = last_window_of(self.query, period_of(self.query, window))
        bins = [Measure(kind="rows") for each in self.query.candidates for _ in each.bins]
        return self.state.histograms.setdefault(last, Totals(bins))

    def _window_plan(self, window: int) -> WindowPlan:
        return self._bounded_as(window).window(self.query.schedule.releases(window))

    def evict(self, window: int) -> None:
        """Drop the state and the noise of a window that is final."""
        self.state.evict_window(window)
        begun = {} if self.remembered is None else self.remembered.of_windows
        for known in (self._orders, self._streams, self._total_streams, begun):
            known.pop(window, None)
        if window + 1 == self.query.schedule.windows and self.remembered is not None:
            self.remembered = RememberedKeys(most=self.remembered.most)  # nothing comes after it

    def evict_periods(self, step: int) -> None:
        """Drop the units of every period whose windows are all final by `step`."""
        for period in self.state.periods:
            if _last_step(self.query, period, step) < step:
                self.state.evict_period(period)

    def close(self) -> None:
        """Stop the threads."""
        self.workers.close()


FEW = 1 << 14
"""Rows or groups that are sooner done than handed to a thread."""


class Workers:
    """Threads that work on hash buckets; compiled loops run without the GIL."""

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
        if self._pool is None or size < FEW or len(pairs) == 1:
            return [work(a, b) for a, b in pairs]
        return list(self._pool.map(lambda pair: work(*pair), pairs))

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(kw_only=True)
class QueryState:
    """Units and their groups, and every group's sums and noise, in hash buckets."""

    units: list[UnitBucket]
    windows: dict[int, list[GroupBucket]] = field(default_factory=dict)
    totals: dict[int, Totals] = field(default_factory=dict)
    histograms: dict[int, Totals] = field(default_factory=dict)
    """Units of a period by the groups that they have rows in, by its last window."""
    held: dict[int, list[Rows]] = field(default_factory=dict)
    """Rows that wait for the end of their window, or for the bounds of their period, each piece of
    one window and period."""

    @property
    def bytes(self) -> int:
        """Memory held."""
        tables = [
            table
            for bucket in self.units
            for kind in (bucket.periods, bucket.windows, bucket.dropped, bucket.counted_pairs)
            for table in kind.values()
        ]
        for bucket in self.units:
            tables += [*bucket.reached.values(), *bucket.reached_pairs.values()]
            tables += [*bucket.contributions.values(), *bucket.set_pairs.values()]
            tables += (table for some in bucket.values.values() for table in some)
        groups = [bucket for buckets in self.windows.values() for bucket in buckets]
        held = sum(rows.bytes for pieces in self.held.values() for rows in pieces)
        return held + sum(t.bytes for t in tables) + sum(g.bytes for g in groups)

    @property
    def periods(self) -> set[int]:
        """Periods that have units.

        A list of each bucket's: the next step's rows may be bounded meanwhile, in other periods.
        """
        return {period for bucket in self.units for period in list(bucket.periods)}

    def evict_window(self, window: int) -> None:
        """Drop a final window's groups, the units in them, and its totals."""
        self.windows.pop(window, None)
        self.totals.pop(window, None)
        self.histograms.pop(window, None)
        self.held.pop(window, None)
        for bucket in self.units:
            bucket.windows.pop(window, None)
            by_window = (bucket.counted_pairs, bucket.contributions, bucket.values)
            for tables in (*by_window, bucket.set_pairs, bucket.reached_pairs):
                tables.pop(window, None)

    def evict_period(self, period: int) -> None:
        """Drop a period's units."""
        for bucket in self.units:
            bucket.periods.pop(period, None)
            bucket.dropped.pop(period, None)
            bucket.reached.pop(period, None)


def _last_step(query: Query, period: int, step: int) -> int:
    """The last step that publishes a window of a period; without an end, it is not over yet."""
    ticks, schedule = query.periods, query.schedule
    if ticks is None:
        return step if schedule.steps is None else schedule.steps - 1
    end = ticks.at(period + 1)
    if schedule.end is not None:  # the period may reach beyond it
        end = min(end, schedule.end)
    return schedule.last_step(int(schedule.last_window_of(np.array([end - 1]))[0]))
