"""Whole queries with one piece broken: plan, bounds, rows, release tables, state, ledger.

Forms of the engine have one line changed and claim the (epsilon, delta) of the query's plan.

Engines that have lost something (window keys, the log of inputs, column types) make the same claim.
Their state directory stays whole, however strictly it is guarded: one piece remembers nothing
across a restart, which is what the loss of a file comes to where nobody notices.

Ledgers that are forked, or forget a charge, claim their total for everything that is published of
the dataset. So do those that give a period, or a place that is held in it, to more than one run.
True: the losses of all runs add up, whoever has written them down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.ledger_samplers import DATASET
from dpstream.audit.query_samplers import OneRunKnown, unit_spellings
from dpstream.connectors.memory import TableSource
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.errors import LedgerError
from dpstream.group_by.bounding import FIRST, KEPT, KeepMask, StepRows, UnitBucket
from dpstream.group_by.chosen_bounds import clamp_rows
from dpstream.group_by.flow import Flow
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.perturb import NoisySums
from dpstream.group_by.series_counts import StepCounts
from dpstream.privacy.accounting.calibration import round_down
from dpstream.privacy.accounting.curves import choice_epsilon
from dpstream.privacy.ledger.charges import Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import NoiseStreams
from dpstream.privacy.sensitivity import CorrelatedNoise, root_above, units_change
from dpstream.privacy.state import WindowKeySource
from dpstream.privacy.state.journal import Journal
from dpstream.privacy.state.secret import derive
from dpstream.query.aggregates import Measure, SumPerGroup
from dpstream.query.noise_plan import NoisePlan, WindowPlan
from dpstream.query.query import Bounds
from dpstream.query.row_spec import RowSpec
from dpstream.query.schedule import DueRelease
from dpstream.records import Integers, Reals, Words
from dpstream.rows.row_batch import (
    RejectedRows,
    RowKeys,
    Rows,
    RowSlice,
    among,
    id_order,
    rows_at,
)
from dpstream.rows.row_ids import RowIds, column_ids
from dpstream.rows.row_reader import RowReader


class ThresholdWithoutPlusOne(NoisePlan):
    """A threshold without the + 1.

    True: a key with one unit more than the pre-threshold, which its neighbour never looks at, shows
    with more than the probability that the tail allows for.
    """

    @lru_cache(maxsize=8)  # noqa: B019
    def window(self, releases: int) -> WindowPlan:
        """One lower."""
        plan: WindowPlan = super().window(releases)
        return replace(plan, thresholds=plan.thresholds - 1)


class SharedByAllGroups(NoisePlan):
    """Noise that groups share, made for a unit that is in all of them.

    True: what such a unit adds looks like the shared part; one in half of the groups is not hidden
    by it, and loses several times mu^2.
    """

    def correlated(self, releases: int) -> tuple[CorrelatedNoise | None, ...]:
        """(d - g d^2) I and what goes with it, for g = 0.96/d."""
        known = len(self.query.public_groups or ())
        a = Fraction(known, 25)
        b = a * 24 / known
        noise = CorrelatedNoise(own=root_above(a), shared=root_above(b))
        return (noise,) * len(self.columns)


class SharedInEveryRelease(Flow):
    """Noise that groups share at every release, made for groups that are reached in one step.

    True: what a unit adds to all groups at once looks like the shared part; if half of them come at
    the next trigger, it does not, and the cross terms between both steps are missing.
    """

    _ALIKE = math.sqrt(24)  # of the shared noise's variance over a group's own, times the groups

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._shared: dict[int, Reals] = {}

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        """A path of noise for all groups, over the smaller ones of each."""
        noisy, plan = super().perturb(due, spend), self._window_plan(due.window)
        stream = self._noise_streams(due.window, spend)[0][0]
        normals = stream.normals(np.zeros((1, 2), np.uint64), release=due.release, purpose="shared")
        state = self._shared.setdefault(due.window, np.zeros((1, plan.process.width)))
        path = plan.process.advance(state, due.release, normals[:, 0])
        known = len(self.query.public_groups or ())
        alike = round(plan.sigmas[0] * self._ALIKE / math.sqrt(known) * path[0])
        return [replace(part, sums=part.sums + alike) for part in noisy]


class OwnNoiseOfShared(NoisePlan):
    """A group's own part, for a unit in all of them at one step: (d - g d^2) I for g = 0.96/d."""

    def _of_columns(self, releases: int, columns: slice) -> WindowPlan:
        plan = super()._of_columns(releases, columns)
        return replace(plan, sigmas=tuple(sigma / 5 for sigma in plan.sigmas))


class LevelsChargedOnce(NoisePlan):
    """Each level of a quantile's tree gets all that its levels have together.

    True: a row moves one node of every level, so h levels lose h times what one does.
    """

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """Those of the plan, for levels as many times as there are."""
        first, depth = len(self.query.measures), len(self.query.levels)
        shares = super().shares
        levels = (depth * share for share in shares[first : first + depth])
        return (*shares[:first], *levels, *shares[first + depth :])


class WeightsNotShared(Flow):
    """Each key of a unit counts as if it were the only one.

    True: noise is for weights whose squares sum to 1, and n keys of weight 1 lose n times as much.
    """

    def contributions(self, window: int, rows: Rows, keep_mask: KeepMask) -> Rows:
        """Rows that are the first of their unit in a group, all of the same weight."""
        assert self.query.key_weights is not None
        values = np.full(rows.values.shape, int(self.query.key_weights.steps))
        return replace(rows, values=values)


class ChoiceChargedOnce(NoisePlan):
    """A leaf is chosen in each group and at each release as if there were one choice in all.

    True: a unit moves the choices of all its groups, at every release from its rows on.
    """

    def _choice_epsilon(self, column: int, releases: int) -> Fraction:
        """That of a query with one group and one release."""
        return round_down(choice_epsilon(math.sqrt(self.shares[column])))


class PureNoiseInL2(NoisePlan):
    """Laplace noise for what a unit moves in L2.

    True: its epsilon is what it moves in L1, the square root of its groups times more.
    """

    def _total(self, measure: Measure) -> Fraction:
        return self._sensitivity(measure)


class SetsChargedOnce(NoisePlan):
    """Each of several sets of keys gets all that the sets have together.

    True: a row counts once in every set, so s sets lose s times what one does.
    """

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """Those of the plan, for sets as many times as there are."""
        sets = len(self.query.grouping_sets)
        both = zip(super().shares, self.sets, strict=True)
        return tuple(share * (1 if names is None else sets) for share, names in both)


class TotalsLikeParts(NoisePlan):
    """Noise on the totals of a set of fewer keys as if a unit's rows still lay in several groups.

    True: all of them may be in one, so n groups of one row move a total by n, not by sqrt(n).
    """

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        return super()._sensitivity(measure)


class WindowsOfTheFirstMonth(OneRunKnown):
    """Noise on a total for as many windows as rows of the first period can be in.

    True: windows that hop begin one after the other, and a month that comes later, and is longer,
    is in four of them: its unit moves the totals by twice what the noise is for.
    """

    MONTH = 0

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        query = self.one_run.query
        schedule, periods = query.schedule, query.periods
        if names is None or len(names) == len(query.keys):
            return super()._sensitivity(measure, names)
        assert schedule.start is not None
        assert periods is not None
        month = periods.last_before(schedule.start) + self.MONTH
        begin, end = max(schedule.start, periods.at(month)), periods.at(month + 1)
        times = np.array([begin, end - 1])
        windows = int(schedule.last_window_of(times)[1] - schedule.window_of(times)[0]) + 1
        return units_change(rows=query.bounds.rows, groups=min(query.bounds.groups, windows))


class WindowsOfTheShortestMonth(WindowsOfTheFirstMonth):
    """The same for rows of February: two windows.

    True: March, three days longer, is in twice as many.
    """

    MONTH = 1


class TailPerTrigger(NoisePlan):
    """Key selection with the tail of all releases given to each, as DP-SQLP prints it.

    True: T releases may each show a key that nobody should see, so up to T times the tail.
    """

    def _quantiles(self, releases: int, names: tuple[str, ...] | None = None) -> Reals:
        one: Reals = super()._quantiles(1)
        return np.full(releases, one[0])


class BoundsOffByOne(Flow):
    """Keeps one row and one group more of a unit than the plan was made for."""

    def reset(self) -> None:
        """Wider bounds."""
        super().reset()
        b = self.query.bounds
        wider = Bounds(rows=b.rows + 1, groups=b.groups + 1, rows_per_group=b.rows_per_group)
        self.state.units = [UnitBucket(bounds=wider) for _ in range(self.buckets)]


class UnitCountedTwice(Flow):
    """Counts a unit once per row of a group, where it should count once per group.

    True: with K rows per group the distinct units move by K, and a key with one unit looks like a
    key with K.
    """

    def bound(self, window: int, period: int, rows: Rows) -> KeepMask:
        """Every row that is kept is a first one."""
        keep_mask = super().bound(window, period, rows)
        return np.where(keep_mask > 0, np.uint8(KEPT | FIRST), np.uint8(0))


class UncappedDroppedRows(Flow):
    """Counts every row that is dropped, where a public number of them counts of each unit.

    True: dropped rows move by all rows of a unit, and their noise is for `max_dropped_rows`.
    """

    def count_totals(
        self, window: int, period: int, rows: Rows, keep_mask: KeepMask
    ) -> Integers | None:
        """All of them."""
        totals = super().count_totals(window, period, rows, keep_mask)
        if totals is not None:
            totals[0] = np.count_nonzero(keep_mask == 0)
        return totals


class UncappedElsewhere(Flow):
    """Counts every dropped row of a group that its unit is not in, however many a unit has.

    True: they move by all rows of a unit, and their noise is for `max_dropped_rows`.
    """

    def count_totals(
        self, window: int, period: int, rows: Rows, keep_mask: KeepMask
    ) -> Integers | None:
        """All of them, where the rows of a window come in one step."""
        totals = super().count_totals(window, period, rows, keep_mask)
        if totals is not None:
            pairs = rows.units ^ rows.groups[:, ::-1]
            inside = among(pairs, pairs[keep_mask > 0])
            totals[-1] = np.count_nonzero(~inside & (keep_mask == 0))
        return totals


@dataclass(frozen=True)
class NetClamp(SumPerGroup, identity="audit.net_clamp"):
    """Clamps the sum of a unit's rows in a group, in windows that are published again and again.

    True: it may rise and fall by all of its range at every trigger, and noise is for one rise.
    """

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The sum itself, whatever the schedule is."""
        return tuple(replace(measure, of_unit="sum") for measure in super().measures(one_row))


class NoiseForOneDroppedRow(NoisePlan):
    """Noise on the rows dropped as if a unit lost one, where it may lose `max_dropped_rows`.

    True: a factor is missing, so the total's part of mu grows by it.
    """

    KIND = "dropped"

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        true = super()._sensitivity(measure, names)
        return true / self.query.most_dropped if measure.kind == self.KIND else true


class NoiseForOneRowElsewhere(NoiseForOneDroppedRow):
    """The same of dropped rows in groups that their unit is not in."""

    KIND = "elsewhere"


class NoiseBelowReach(NoisePlan):
    """Noise for one group (key and window), whatever a unit can be in.

    True: a unit in four of them moves the counts by twice what the noise is for.
    """

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        if measure.kind != "units":
            return super()._sensitivity(measure, names)
        return units_change(rows=1, groups=1)


class OnlyTouchedKeys(Flow):
    """Publishes a key only at the releases since which it had rows.

    True: that a key is shown at all then says that somebody was there.
    """

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._touched: dict[int, set[bytes]] = {}

    def aggregate(self, window: int, rows: Rows, keep_mask: KeepMask) -> None:
        """Note who had rows."""
        super().aggregate(window, rows, keep_mask)
        touched = self._touched.setdefault(window, set())
        touched.update(group.tobytes() for group in rows.groups[keep_mask > 0])

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        """Only those who had rows."""
        touched = self._touched.pop(due.window, set())
        return [
            noisy.select(np.array([group.tobytes() in touched for group in noisy.ids], bool))
            for noisy in super().perturb(due, spend)
        ]


class RisingBounds(Flow):
    """Each window has a bound of its own, and noise for that, whatever came before in the period.

    True: a unit that fills every bound as it rises loses what each window's noise is for, less what
    it has entered before: with 1, 4 and 16 groups it loses 1 + 3/4 + 12/16 times mu^2.
    """

    BOUNDS = (1, 4, 16)

    def plan_of(self, window: int) -> NoisePlan | None:
        """By window."""
        groups = self.BOUNDS[window % len(self.BOUNDS)]
        return self.plan.of_bounds(replace(self.query.first_bounds, groups=groups))


class ClampsOfAnotherPeriod(Flow):
    """Clamps values at ten times the clamps of their period, whose noise they get.

    True: a unit with a large value moves a sum by ten times its sensitivity.
    """

    def clamp(self, window: int, rows: Rows) -> Rows:
        """Ten times as far out, in grid steps of the period."""
        bounds = self.chosen.bounds_of(self.query, window) if self.chosen else None
        assert bounds is not None
        wider = replace(bounds, clamps=tuple(10 * clamp for clamp in bounds.clamps))
        values = clamp_rows(self.query, self.query.with_bounds(wider), rows.values)
        return replace(rows, values=10 * values)


class RememberedOnceTouched(Flow):
    """Shows a remembered key from the release on at which somebody has a row in it.

    True: no threshold stands between the first unit of a window and its table.
    """

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._waiting: dict[int, tuple[Words, pa.Table]] = {}

    def begin_window(self, window: int, ids: Words, keys: pa.Table | None) -> None:
        """Wait for its rows."""
        if keys is not None:
            self._waiting[window] = ids, keys

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        """Only keys that have rows by now."""
        ids, keys = self._waiting.get(due.window, (np.zeros((0, 2), np.uint64), None))
        for bucket in self.groups(due.window):
            used = bucket.table.used
            touched = among(ids, bucket.table.ids[:used][bucket.table.numbers[:used, 0] > 0])
            if keys is not None:
                super().begin_window(due.window, ids[touched], keys.filter(pa.array(touched)))
        return super().perturb(due, spend)


class ForgottenByExactCounts(Flow):
    """Forgets a remembered key at the end of a window in which nobody had a row in it.

    True: whether the next window shows it says that somebody had.
    """

    def _remember(self, step: int, due: DueRelease, noisy: Sequence[NoisySums]) -> None:
        """Forget at once what had no rows."""
        super()._remember(step, due, noisy)
        known = self.remembered
        if known is None or known.keys is None or due.release < due.releases:
            return
        buckets = self.groups(due.window)
        have = np.concatenate([b.ids(np.flatnonzero(b.sums(_all(b))[:, 0] > 0)) for b in buckets])
        kept = among(known.ids, have)
        known.ids, known.keys = known.ids[kept], known.keys.filter(pa.array(kept))
        known.sizes, known.missed = known.sizes[kept], known.missed[kept]


class RemembersActiveKeys(Flow):
    """Remembers keys that were looked at, and not only those that were shown.

    True: one unit alone makes a key that the next window shows.
    """

    def _remember(self, step: int, due: DueRelease, noisy: Sequence[NoisySums]) -> None:
        """Take all active keys in."""
        every = [
            NoisySums(ids=b.ids(_all(b)), since=_all(b), sums=b.sums(_all(b)), groups=_all(b))
            for b in self.groups(due.window)
        ]
        super()._remember(step, due, every)


def _all(bucket: GroupBucket) -> Integers:
    """The numbers of its active groups."""
    return np.arange(len(bucket.active))


class WatermarkFromData(RowReader):
    """Puts a row into the latest step that any row before it was in: a watermark from the data.

    True: one row dated late moves all rows behind it, whoever they belong to.
    """

    def _columns(self, table: pa.Table, reasons: Any, arrived: Any, once: Any) -> dict[str, Any]:
        columns = super()._columns(table, reasons, arrived, once)
        return columns | {"steps": np.maximum.accumulate(columns["steps"])}


class KeyAsSpelled(RowReader):
    """Shows a key as the row spells it that brought it, where equal keys should look equal.

    True: -0.0 and 0.0 are one group, and its published bytes say whose row came first.
    """

    def _columns(self, table: pa.Table, reasons: Any, arrived: Any, once: Any) -> dict[str, Any]:
        columns = super()._columns(table, reasons, arrived, once)
        return columns | {"spelled": table.select(self.query.keys)}

    def _identified(self, columns: dict[str, Any], aside: RejectedRows) -> Rows:
        """The groups are known by now; what they look like is left as it came."""
        columns["keys"] = columns.pop("spelled")
        return super()._identified(columns, aside)


class _IdsBySpelling(RowIds):
    def names(self, units: pa.Array) -> Words:
        return column_ids(units, self._keys.units)


class UnitBySpelling(RowReader):
    """Takes a unit by how it is written, where one number is one unit.

    True: who is written 5, 5.0, 5e0 and " 5" is four units, and contributes four times.
    """

    def _begin(self, query: RowSpec, keys: RowKeys) -> None:
        super()._begin(query, keys)
        self.ids = _IdsBySpelling(query, keys)


class BoundedBeforeJoin(RowReader):
    """Takes the rows that one row becomes in a join for rows of as many units.

    True: the bounds hold for rows of the stream, and a unit has as many more as a row has matches.
    """

    def read(self, *args: Any, **named: Any) -> tuple[Rows, RejectedRows]:
        """Rows that are alike have units of their own."""
        rows, rejects = super().read(*args, **named)
        order = id_order(rows.digests)
        again = (rows.digests[order[1:]] == rows.digests[order[:-1]]).all(axis=1)
        first = np.maximum.accumulate(np.where([True, *~again], np.arange(len(order)), 0))
        copies = np.empty(len(order), np.uint64)
        copies[order] = np.arange(len(order)) - first
        return replace(rows, units=rows.units ^ copies[:, None]), rejects


class SubqueryOverStream(RowReader):
    """Keeps rows of groups with at most five rows, as a subquery over the stream would count them.

    True: one row more, and five rows of others are gone.
    """

    def read(self, *args: Any, **named: Any) -> tuple[Rows, RejectedRows]:
        """Those that pass."""
        rows, rejects = super().read(*args, **named)
        _, group, sizes = np.unique(rows.groups, axis=0, return_inverse=True, return_counts=True)
        return rows_at(rows, np.flatnonzero(sizes[group.reshape(-1)] <= 5)), rejects


class InnerRowsAmongFew(RowReader):
    """Keeps inner rows only of groups that at most nine units are in: it looks at others.

    True: one unit more, and nine others are gone.
    """

    def inner_rows(
        self, rows: Rows, where: str, step: int | None = None
    ) -> tuple[Rows, RejectedRows]:
        """Those of groups with few rows."""
        inner, unused = super().inner_rows(rows, where, step)
        _, group, sizes = np.unique(inner.groups, axis=0, return_inverse=True, return_counts=True)
        return rows_at(inner, np.flatnonzero(sizes[group.reshape(-1)] <= 9)), unused


class UnitOfEachWindow(Flow):
    """Takes the inner rows of a unit in each window for those of another unit.

    True: a unit for ever is in as many groups as there are windows, and noise is for one.
    """

    def rows_of_step(self, *args: Any) -> Iterator[tuple[int, int, Rows]]:
        """The same rows, their units with the number of the window."""
        for window, period, rows in super().rows_of_step(*args):
            yield window, period, replace(rows, units=rows.units ^ np.uint64(window + 1))


class UnitOfEachStep(Flow):
    """Takes the inner rows of a unit at each step for those of another unit.

    True: what a unit has goes from one group to the next, and the noise is for one of them.
    """

    def rows_of_step(self, step: int, *args: Any) -> Iterator[tuple[int, int, Rows]]:
        """The same rows, their units with the number of the step."""
        for window, period, rows in super().rows_of_step(step, *args):
            yield window, period, replace(rows, units=rows.units ^ np.uint64(step + 1))


class UnitOfEachSession(Flow):
    """Takes each session of a unit for that of another unit, as if each were of its own period.

    True: sessions are not cut where a period ends, so one period holds sessions of others together.
    """

    def rows_of_step(self, *args: Any) -> Iterator[tuple[int, int, Rows]]:
        """The same rows, their units with their number among them."""
        for window, period, rows in super().rows_of_step(*args):
            number = np.arange(1, len(rows) + 1, dtype=np.uint64)
            yield window, period, replace(rows, units=rows.units ^ number[:, None])


def units_as_text(table: pa.Table) -> TableSource:
    """The rows with each user's number as it is written, without the quotes of text."""
    names = [text.strip('"') for text in unit_spellings(table)]
    return TableSource(table.set_column(0, "user", pa.array(names)))


class ColumnTypeFromData(Flow):
    """A count is an integer until bounding has dropped a row, and a float from then on.

    True: the type of a column says whether anybody had more rows than the bounds allow.
    """

    _dropped = False

    def bound(self, window: int, period: int, rows: Rows) -> KeepMask:
        """Note whether all were kept."""
        keep_mask = super().bound(window, period, rows)
        self._dropped = self._dropped or not keep_mask.all()
        return keep_mask

    def _table(self, *args: Any) -> pa.Table:
        table, kind = super()._table(*args), pa.float64() if self._dropped else pa.int64()
        for aggregate in self.query.aggregates:
            place = table.column_names.index(aggregate.name)
            table = table.set_column(place, aggregate.name, table[aggregate.name].cast(kind))
        return table


class _CountsWithoutMemory(StepCounts):
    def take(self, pieces: Iterable[RowSlice]) -> None:
        """Count the rows, then forget which units were there."""
        super().take(pieces)
        self._seen.clear()


class UnitEntersAgain(SeriesRun):
    """Lets a unit into a window once per step in which rows of the window arrive.

    True: with rows on time and late ones a unit moves a count by 2, which is charged as 1.
    """

    counts_class = _CountsWithoutMemory


@dataclass(frozen=True, kw_only=True)
class _FreshWindowKeys:
    """Keys of windows that are others at each start, whatever was minted before."""

    real: WindowKeySource
    start: int

    def mint(self, window: int) -> bytes:
        return derive(self.real.mint(window), b"start %d" % self.start)

    def erase(self, window: int) -> None:
        self.real.erase(window)


class LostWindowKeys(LocalRun):
    """Lost window keys: noise is drawn anew for releases that were shown before.

    True: a run that is begun again k times publishes k noisy copies for one charge.
    """

    def _open_storage(self) -> None:
        super()._open_storage()
        assert self.folder is not None
        keys, start = self._storage.keys, _count_start(self.folder)
        self._storage.keys = _FreshWindowKeys(real=keys, start=start)


class LostInputLog(LocalRun):
    """A lost log of inputs: after a restart the same noise meets whatever is read now.

    True: who has two releases of one address subtracts them, and is left with the difference of
    the data, without noise.
    """

    def _log(self, step: int, taken: Sequence[StepRows], *how: Any) -> list[bytes]:
        """Log that steps were taken, and not what they have read."""
        return super()._log(step, [StepRows(1) for _ in taken], *how)


class LostColumnTypes(LocalRun):
    """Lost column types: they are learned anew, and a unit of another type is another unit.

    True: bounds begin anew with every type in which the unit's column comes.
    """

    def _open_storage(self) -> None:
        super()._open_storage()
        self._reader.types.clear()
        self._reader.learned = lambda types: None


def _count_start(folder: Path) -> int:
    """Count one start more of a directory; how many there were before."""
    count = folder.with_name(f"{folder.name}.starts")
    before = int(count.read_text(encoding="ascii")) if count.exists() else 0
    count.write_text(str(before + 1), encoding="ascii")
    return before


def rows_without_target(table: pa.Table, start: int) -> pa.Table:
    """Rows of which the target's are gone after the first start: data that were corrected."""
    return table if start == 0 else table.filter(pa.array(table["user"].to_numpy() % 10**6 > 0))


def rows_of_another_type(table: pa.Table, start: int) -> pa.Table:
    """The same rows, their users as numbers, as text, or as floats."""
    kind = (pa.int64(), pa.string(), pa.float64())[start]
    return table.set_column(0, "user", table["user"].cast(kind))


def forked_ledger(path: Path, number: int) -> Path:
    """Every run is charged to a copy of the ledger as it was before all runs.

    True: each copy admits a run as large as the ledger, so k runs lose k times the total.
    """
    return _copy_ledger(path, path.with_name(f"copy-{number}"), forgotten=0)


def ledger_without_last_charge(path: Path, number: int) -> Path:
    """A ledger that forgets its last charge whenever it is opened for another run.

    True: there is always room for one more run.
    """
    before = path if number == 0 else path.with_name(f"copy-{number - 1}")
    return _copy_ledger(before, path.with_name(f"copy-{number}"), forgotten=1)


def ledger_without_begun_periods(path: Path, number: int) -> Path:
    """A ledger that forgets which periods its runs have begun.

    True: who takes over begins with the first period again, and k runs draw it k times.
    """
    before = path if number == 0 else path.with_name(f"copy-{number - 1}")
    copy = path.with_name(f"copy-{number}")
    with closing(Ledger(before)) as old:
        kept = [record for record in old.history(DATASET) if "begun" not in record]
    Journal.write_new(copy, kept, kind="ledger", error=LedgerError)
    return copy


class LedgerWithoutLastPeriods(Ledger):
    """A ledger that lets a run go on beyond the last period that it was to begin.

    True: its later periods were given to another run, so that k such runs draw a period k times.
    """

    def note_begun(self, dataset: str, run: str, period: int) -> None:
        """Note the last period that was agreed on, whatever is drawn."""
        until = self.known(run).until
        super().note_begun(dataset, run, period if until is None else min(period, until))


class LedgerOfFreePlaces(Ledger):
    """A ledger in which whoever takes a place that was held is not charged: the place was paid for.

    True: the run that held it is voided, so that there is room for one more.
    """

    def charge(self, dataset: str, charge: Charge, *rest: Any, **facts: Any) -> bool:
        """Give the place back, and write nothing down."""
        if not (held := facts.pop("instead_of", "")):
            return super().charge(dataset, charge, *rest, **facts)
        if self.known(held).ended is None:
            self.void(dataset, held, because="it is taken", who="audit")
        return True

    def limit(self, dataset: str, run: str, until: int | None, **said: str) -> None:
        """End what has a charge."""
        if any(line["run"] == run for book in self.report() for line in book["spent_on"]):
            super().limit(dataset, run, until, **said)


def _copy_ledger(path: Path, copy: Path, *, forgotten: int) -> Path:
    """A new ledger with the terms of another one, and all its charges but the last ones."""
    with closing(Ledger(path)) as old, closing(Ledger(copy)) as new:
        records = list(old.history(DATASET))
        new.open(DATASET, next(Terms.from_json(r["terms"]) for r in records if "terms" in r))
        charges = [Charge.from_json(record) for record in records if "amount" in record]
        for charge in charges[: len(charges) - forgotten]:
            new.charge(DATASET, charge)
    return copy
