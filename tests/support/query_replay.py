"""Run a query with and without one unit and compare everything it computes before noise.

The promise of a query rests on facts that hold for each pair of neighbours, not on average: a unit
moves no other unit's rows, no other group, no table and no draw, and its own groups by no more than
the plan's sensitivities. A run is the whole path of the engine, from a source to releases; all that
it computes before noise is recorded, and every draw that it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.query_samplers import run_plan
from dpstream.group_by.bounding import KeepMask
from dpstream.group_by.chosen_bounds import ChosenBounds
from dpstream.group_by.flow import BoundedRows, Flow
from dpstream.group_by.key_selection import Mask, Passes
from dpstream.group_by.perturb import NoisySums
from dpstream.group_by.remembered_keys import Known, RememberedKeys
from dpstream.privacy.query_spend import NoiseStream, NoiseStreams, QuerySpend
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.schedule import DueRelease
from dpstream.records import Integers, Reals, Words
from dpstream.rows.row_batch import Rows

Group = tuple[int, bytes]
"""(window, group id)."""
Ends = dict[tuple[int, int], set[bytes]]
"""By (window, release): the groups whose round ended."""
_ALL_ROUNDS = -1


@dataclass(kw_only=True, eq=False)
class Recording:
    """What one run computed."""

    rows: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """(unit, step, window, digest) of every row that reached the bounds."""
    kept: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """(unit, step, window, group, digest, verdict) of every row that was kept."""
    sums: dict[tuple[int, bytes, int], dict[int, Integers]] = field(default_factory=dict)
    """What each step added to each (window, group, round), by measure, in grid steps.

    Only counts that find keys in rounds belong to one; all others are those of round -1.
    """
    totals: dict[int, dict[int, Integers]] = field(default_factory=dict)
    """What each step added to each window's totals."""
    ends: Ends = field(default_factory=dict)
    begins: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """What each window remembers when it begins, where keys are remembered."""
    bounds: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The bound of each period, where they are chosen, and since which period it holds."""
    histograms: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The exact histogram of each period's units, by its last window."""
    tables: list[tuple[Any, ...]] = field(default_factory=list)
    """(step, window, release, releases, columns) of every table, in order."""
    draws: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """(window, group, column, release, purpose, normals) of every draw."""
    published: dict[tuple[int, int], dict[bytes, tuple[Any, ...]]] = field(default_factory=dict)
    """By (window, release): each group shown, since when, and its noisy sums."""

    sets: dict[bytes, int] = field(default_factory=dict)
    """Of each group which of several sets of keys it is of."""
    keys: dict[Group, set[str]] = field(default_factory=dict)
    """What the key columns of each group shown read."""

    def units(self) -> set[bytes]:
        """Every unit that has rows."""
        return {unit for unit, *_ in self.rows}

    def groups_of(self, units: set[bytes]) -> set[Group]:
        """The groups that these units' kept rows are in."""
        return {(window, group) for unit, _, window, group, *_ in self.kept if unit in units}


def record_query(
    plan: NoisePlan, table: pa.Table, *, frozen: Recording | None = None, **options: Any
) -> Recording:
    """Run a query over a table, as `run_plan` does, and record what it computes.

    `frozen`: rounds end where they did in another run, and windows remember what they did there and
    have the bounds that they had there, as if the same had been published.
    """
    recording = Recording()
    flow = partial(_RecordingFlow, recording=recording, frozen=frozen)
    wrap_spend = partial(_RecordingSpend, recording=recording)
    for step, publication in run_plan(plan, table, flow=flow, wrap_spend=wrap_spend, **options):
        columns = tuple(publication.table.column_names)
        recording.tables.append((step, *publication.due, columns))
    return recording


class _RecordingFlow(Flow):
    """A Flow that records what its stages return."""

    def __init__(
        self, *args: Any, recording: Recording, frozen: Recording | None, **facts: Any
    ) -> None:
        super().__init__(*args, **facts)
        self._recording, self._frozen = recording, frozen
        if self.remembered is not None:
            self.remembered = _RecordedKeys(most=self.remembered.most)
            self.remembered.recording, self.remembered.frozen = recording, frozen
        if self.chosen is not None:
            self.chosen = _RecordedBounds(
                candidates=self.chosen.candidates, current=self.chosen.current
            )
            self.chosen.recording, self.chosen.frozen = recording, frozen
        self._before: dict[Group, Integers] = {}

    def bound(self, window: int, period: int, rows: Rows) -> KeepMask:
        keep_mask = super().bound(window, period, rows)
        for i, verdict in enumerate(keep_mask.tolist()):
            unit, digest = rows.units[i].tobytes(), rows.digests[i].tobytes()
            step, group = int(rows.steps[i]), rows.groups[i].tobytes()
            self._recording.rows[unit, step, window, digest] += 1
            if verdict:
                self._recording.kept[unit, step, window, group, digest, verdict] += 1
        return keep_mask

    def in_every_set(self, window: int, rows: Rows, keep_mask: KeepMask) -> tuple[Rows, KeepMask]:
        rows, marks = super().in_every_set(window, rows, keep_mask)
        sets = self.query.sets_of(rows.keys)
        for i, verdict in enumerate(marks.tolist()):
            group, digest = rows.groups[i].tobytes(), rows.digests[i].tobytes()
            place = (rows.units[i].tobytes(), int(rows.steps[i]), window)
            self._recording.kept[*place, group, digest, ("in a set", verdict)] += 1
            self._recording.sets[group] = int(sets[i])
        return rows, marks

    def aggregate(self, window: int, rows: Rows, keep_mask: KeepMask) -> None:
        super().aggregate(window, rows, keep_mask)
        step = int(rows.steps[0])
        for bucket in self.groups(window):
            used = bucket.table.used
            for group, sums in zip(
                bucket.table.ids[:used], bucket.table.numbers[:used], strict=True
            ):
                self._note((window, group.tobytes()), step, sums, bucket.in_rounds)

    def _note(self, group: Group, step: int, sums: Integers, in_rounds: bool) -> None:
        """What a step has added; where there are rounds, the last number tells them apart."""
        before = self._before.get(group, np.zeros_like(sums))
        if in_rounds and _round(before) != _round(sums):
            before = before.copy()
            before[0] = 0
        self._before[group], added = sums.copy(), sums - before
        parts = [(_ALL_ROUNDS, added)]
        if in_rounds:
            added = added[:-1]
            first = np.zeros_like(added)
            first[0], added[0] = added[0], 0
            parts = [(_ALL_ROUNDS, added), (_round(sums), first)]
        for number, part in parts:
            if part.any():
                by_step = self._recording.sums.setdefault((*group, number), {})
                by_step[step] = by_step.get(step, np.zeros_like(part)) + part

    def aggregate_rows(self, bounded: Iterable[BoundedRows]) -> None:
        for part in bounded:
            before = self._totals_now(part.window)
            super().aggregate_rows([part])
            step, added = int(part.rows.steps[0]), self._totals_now(part.window) - before
            by_step = self._recording.totals.setdefault(part.window, {})
            by_step[step] = by_step.get(step, np.zeros_like(added)) + added

    def noisy_histogram(self, due: DueRelease, spend: NoiseStreams) -> tuple[int, ...]:
        noisy = super().noisy_histogram(due, spend)
        if noisy:
            exact = self.histogram(due.window).bucket.table.numbers[0]
            self._recording.histograms[due.window] = tuple(exact.tolist())
        return noisy

    def _totals_now(self, window: int) -> Integers:
        """The exact totals that noise will be added to; a query may have none."""
        if not self.query.totals:
            return np.zeros(0, np.int64)
        return self.totals(window).bucket.table.numbers[0].copy()

    def _passes(self, due: DueRelease) -> Passes:
        usual, place = super()._passes(due), (due.window, due.release)
        ends = self._recording.ends.setdefault(place, set())

        def choose(ids: Words, noisy: Integers, threshold: int) -> Mask:
            passing = usual(ids, noisy, threshold)
            if self._frozen is not None:
                known = self._frozen.ends.get(place, set())
                passing = np.array([one.tobytes() in known for one in ids], bool)
            ends.update(one.tobytes() for one in ids[passing])
            return passing

        return choose

    def perturb(self, due: DueRelease, spend: NoiseStreams) -> list[NoisySums]:
        noisy = super().perturb(due, spend)
        self._recording.published[due.window, due.release] = {
            part.ids[i].tobytes(): (int(part.since[i]), *part.sums[i].tolist())
            for part in noisy
            for i in range(len(part.ids))
        }
        for bucket, part in zip(self.groups(due.window), noisy, strict=True):
            columns = bucket.key_columns(part.groups).to_pylist() if len(part.ids) else []
            for one, keys in zip(part.ids, columns, strict=True):
                read = self._recording.keys.setdefault((due.window, one.tobytes()), set())
                read.add(repr(keys))
        return noisy


class _RecordedKeys(RememberedKeys):
    """Remembers what another run did, where there is one."""

    recording: Recording
    frozen: Recording | None

    def begin(self, windows: Iterable[int]) -> tuple[dict[int, Known], dict[int, bytes]]:
        windows = [*windows]
        for window in windows:  # those that begin together remember the same
            if self.frozen is not None:
                self.ids, self.keys, self.sizes, self.missed = self.frozen.begins[window]
            self.recording.begins[window] = (self.ids, self.keys, self.sizes, self.missed)
        return super().begin(windows)


class _RecordedBounds(ChosenBounds):
    """Chooses what another run did, where there is one."""

    recording: Recording
    frozen: Recording | None

    def begin(self, plan: NoisePlan, windows: Iterable[int]) -> dict[int, bytes]:
        windows = [*windows]
        told = super().begin(plan, windows)
        if self.frozen is not None:
            self.of_periods |= {p: self.frozen.bounds[p] for p in self.of_periods}
        self.recording.bounds |= self.of_periods
        return told


def _round(sums: Integers) -> int:
    """The same number all through a round: when its group was last published."""
    return max(int(sums[-1]), 1)


class _RecordingSpend(QuerySpend):
    """Passes every call on to the real spend, and records the draws."""

    def __init__(self, real: QuerySpend, recording: Recording) -> None:
        self._real, self._recording = real, recording

    def begin(self, step: int) -> None:
        self._real.begin(step)

    def noise_stream(self, *, window: int, column: str, part: int) -> NoiseStream:
        stream = self._real.noise_stream(window=window, column=column, part=part)
        return _RecordingStream(stream, self._recording, window, column)


class _RecordingStream(NoiseStream):
    def __init__(self, real: NoiseStream, recording: Recording, window: int, column: str) -> None:
        self._real, self._recording = real, recording
        self._place = (window, column)

    def normals(self, ids: Words, *, release: int, purpose: str, each: int = 1) -> Reals:
        window, column = self._place
        for one in ids:
            self._recording.draws[window, one.tobytes(), column, release, purpose, each] += 1
        return self._real.normals(ids, release=release, purpose=purpose, each=each)


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryReplay:
    """What one unit changed.

    `violations`: what no unit may change. `used`: the part of each measure's sensitivity that this
    unit took.
    """

    violations: list[str]
    used: tuple[float, ...]


def replay_query(
    plan: NoisePlan, table: pa.Table, unit: Sequence[bool], **options: Any
) -> QueryReplay:
    """Compare a run over `table` with one without the rows marked in `unit`.

    Those must be all rows of one unit: of one user, within one period if the query has periods.
    The same pair of runs shows what adding the unit does. `options`: those of `run_plan`.
    """
    return replay_units(plan, table, [unit], **options)[0]


def replay_units(
    plan: NoisePlan, table: pa.Table, units: Sequence[Sequence[bool]], **options: Any
) -> list[QueryReplay]:
    """`replay_query` for each of these units; what all of them share is run once."""
    whole = None if plan.query.in_rounds else record_query(plan, table, **options)
    replays = []
    for unit in units:
        without = table.filter(pa.array([not gone for gone in unit], pa.bool_()))
        less = record_query(plan, without, **options, frozen=whole)
        more = whole or record_query(plan, table, **options, frozen=less)
        replays.append(compare(plan, more, less))
    return replays


def compare(plan: NoisePlan, more: Recording, less: Recording) -> QueryReplay:
    """What the unit that only `more` has changed; every answer but those of its groups is equal."""
    units = more.units() - less.units()
    touched = more.groups_of(units)
    faults = [f"{len(units)} units are gone, not one"] if len(units) > 1 else []
    for name, one, two in (
        ("window or step", more.rows, less.rows),
        ("kept rows", more.kept, less.kept),
    ):
        others = Counter({row: count for row, count in one.items() if row[0] not in units})
        moved = (others - two) + (two - others)
        if moved:
            faults.append(f"{name} of other units: {moved.total()} rows differ")
    if more.tables != less.tables:
        faults.append(
            f"tables differ: {len(more.tables)} with the unit, {len(less.tables)} without"
        )
    moved = (more.draws - less.draws) + (less.draws - more.draws)
    faults += [f"draw of another group: {_words(d)}" for d in moved if (d[0], d[1]) not in touched]
    faults += [f"drawn {n} times: {_words(d)}" for d, n in more.draws.items() if n > 1]
    faults += _published(more, less, touched)
    used, beyond = _changes(plan, more, less, touched)
    return QueryReplay(violations=faults + beyond, used=used)


def _published(more: Recording, less: Recording, touched: set[Group]) -> list[str]:
    """Groups that the unit is not in are published alike, and the keys of all groups."""
    faults = [
        f"window {it[0]}: a group reads {sorted(more.keys[it])} or {sorted(less.keys[it])}"
        for it in more.keys.keys() & less.keys.keys()
        if more.keys[it] != less.keys[it]
    ]
    for place in more.published.keys() | less.published.keys():
        one, two = more.published.get(place, {}), less.published.get(place, {})
        others = {g for g in one.keys() | two.keys() if (place[0], g) not in touched}
        if any(one.get(group) != two.get(group) for group in others):
            faults.append(f"window {place[0]}, release {place[1]}: other groups differ")
    return faults


def _changes(
    plan: NoisePlan, more: Recording, less: Recording, touched: set[Group]
) -> tuple[tuple[float, ...], list[str]]:
    """Per measure: L2 over groups of the sum over steps of what changed, against the plan."""
    faults, squares = [], [0] * len(plan.sensitivities)
    count, sets = len(plan.query.measures), more.sets | less.sets
    totals_from = len(plan.columns) - len(plan.query.totals)
    for group in more.sums.keys() | less.sums.keys():
        moved = _moved(more.sums.get(group, {}), less.sums.get(group, {}), count)
        if moved.any() and group[:2] not in touched:
            faults.append(f"window {group[0]}: the sums of another group move by {moved.tolist()}")
        first = count * sets.get(group[1], 0)
        mine = squares[first : first + count]
        squares[first : first + count] = (
            s + int(by) ** 2 for s, by in zip(mine, moved, strict=False)
        )
    for window in more.totals.keys() | less.totals.keys():
        totals = more.totals.get(window, {}), less.totals.get(window, {})
        moved = _moved(*totals, len(plan.query.totals))
        so_far = zip(squares[totals_from:], moved, strict=True)
        squares[totals_from:] = (s + int(by) ** 2 for s, by in so_far)
    for measure, square, bound in zip(plan.columns, squares, plan.sensitivities, strict=True):
        if square > bound**2:
            faults.append(f"{measure.name!r} moves by {square**0.5}, its sensitivity is {bound}")
    used = (s**0.5 / float(b) for s, b in zip(squares, plan.sensitivities, strict=True))
    return tuple(used), faults


def _moved(one: dict[int, Integers], two: dict[int, Integers], count: int) -> Integers:
    """By measure: the sum over steps of what changed."""
    zero = np.zeros(count, np.int64)
    return sum((abs(one.get(s, zero) - two.get(s, zero)) for s in {*one, *two}), zero)


def _words(draw: tuple[Any, ...]) -> str:
    window, _, column, release, purpose, each = draw
    return f"window {window}, column {column!r}, release {release}, {purpose!r}, {each} normals"
