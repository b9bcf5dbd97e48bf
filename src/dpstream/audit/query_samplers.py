"""Run a whole query once, and take from it as many independent runs as it has groups or windows.

Why a group is as good as a run: nothing is shared between groups but public numbers. A unit's rows
are bounded by its own rows; a group's sums, its noise (addressed by its id) and its threshold see
no other group. `tests/audit/test_query_replay.py` checks exactly that for many queries and data: a
unit changes no draw, no sum and no answer of a group that it is not in. Each run here has groups
and units of its own, so its outputs are independent of the others' and have the law of a query over
them alone.
Where totals of windows are published (debias), all groups of a window share them; a run then is a
window, with units that renew every window, and what it shows begins with the share of rows kept
and the totals themselves.

`SeriesRuns` runs SQL through a time-series mechanism, from the text to the tables. Nothing is
replaced: the text is compiled, rows are read, one of each unit enters a window, and the mechanism's
runner charges a ledger and draws its noise at its own addresses. Where a mechanism treats every bin
by itself (`RunsAsBins` says why that is enough), a query over thousands of public groups is as many
runs, for a unit's rows are in the groups of one run; otherwise every run is a query of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from weakref import finalize

import numpy as np
import pyarrow as pa

from dpstream.audit.targets import Pair
from dpstream.connectors.memory import ROWS, TableSource
from dpstream.connectors.registry import open_source
from dpstream.engines.chunks import ChunkReader, OperatorCounts
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.engines.embedded.step_rows import FileInput
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidParameter
from dpstream.group_by.cell_sums import CellSums
from dpstream.group_by.flow import Flow, Publication
from dpstream.group_by.groups import GroupBucket
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret
from dpstream.query.aggregates import Measure
from dpstream.query.grouping_sets import GROUPING_ID, NOT_SHOWN
from dpstream.query.noise_plan import NoisePlan, WindowPlan, plan_query
from dpstream.query.public_tables import NeedsTables
from dpstream.query.query import Query
from dpstream.query.schedule import DueRelease
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Integers, Reals, Source, Words
from dpstream.rows.row_reader import RowReader
from dpstream.sql_compiler import sql

HOUR = 3600
UNITS = 1_000_000
"""The units of run r have the numbers from r * `UNITS` on; the first is the target."""
STEPS = 3
"""Steps of a run: parts of a day, or of a window."""

Place = tuple[int, ...]
"""(group, step) of a row; a third number: it arrives that many steps late."""
WINDOWS = 6
"""Of a series query: 8 hours each, the length of a scenario's steps."""
_WINDOWS_AT_ONCE = 250  # in one query: more of them take longer than two queries
_GROUPS_AT_ONCE = 4_000  # in one series query: the text has an upper limit
_MEMORY = 1 << 28
SPELLINGS = ("{}", "{}.0", "{}e0", '" {}"')
"""Of one number, in JSON."""


def run_plan(
    plan: NoisePlan,
    table: pa.Table,
    *,
    secret: bytes = bytes(32),
    run: bytes = bytes(16),
    flow: Callable[..., Flow] = Flow,
    buckets: int = 1,
    reader: type[RowReader] = RowReader,
    chunk: int = ROWS,
    source: Callable[[pa.Table], Source] | None = None,
    memory: int = 1 << 20,
    wrap_spend: Callable[[QuerySpend], QuerySpend] = lambda spend: spend,
) -> Iterator[tuple[int, Publication]]:
    """Run a planned query on a ledger of its own, without a disk: (step, what is published).

    `chunk`: rows per read of the source. `source`: what is read in place of the table itself, made
    of it. `wrap_spend`: what the flow draws noise through, made of the real spend.
    """
    steps = plan.query.schedule.steps
    if steps is None:
        raise InvalidParameter("an audit runs over a table; give the query start= and end=")
    ledger, key = Ledger(), Secret(secret)
    ledger.admit("audit", plan.terms(), "an audit")
    keys = MemoryWindowKeys(derived_for_tests=key)
    real = QuerySpend(run=run, query=plan.query.name, ledger=ledger, dataset="audit", keys=keys)
    plan.pay(real, "audit")
    spend, rows = wrap_spend(real), reader(plan.query, key, run)
    running = flow(plan, rows, buckets=buckets, threads=1)
    read = TableSource(table, rows=chunk) if source is None else source(table)
    files = FileInput(ChunkReader(read, rows, OperatorCounts()), memory=memory)
    try:
        for step in range(steps):
            pieces = files.take(step)
            spend.begin(step)
            for publication in running.step(step, pieces, spend):
                yield step, publication
                if publication.due.release == publication.due.releases:
                    running.evict(publication.due.window)
            running.evict_periods(step + 1)
    finally:
        files.close()
        running.close()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The rows of one run: those of the target unit, and of others who have one row each."""

    others: tuple[tuple[int, int, int], ...] = ()
    """(group, step, how many units have a row there)."""
    unit: tuple[Place, ...] = ()
    """Where the target's rows are."""
    again: int = 0
    """How many of the first `others` have a second row in the same place, beyond their bound."""

    def facts(self) -> dict[str, Any]:
        """For a report."""
        rows = {"others": [list(o) for o in self.others], "unit": [list(p) for p in self.unit]}
        return rows | ({"again": self.again} if self.again else {})


def unit_pair(name: str, **facts: Any) -> Pair:
    """Neighbours: a scenario with all rows of a unit, and the same one without them."""
    with_unit = Scenario(**facts)
    return Pair(name=name, one=with_unit, two=replace(with_unit, unit=()))


def sample_in_parts(
    sample: Callable[[Scenario, int, bytes], Reals],
    data: Scenario,
    runs: int,
    secret: bytes,
    *,
    most: int,
) -> Reals:
    """Runs of a sampler that takes `most` of them at once; each part has a secret of its own."""
    parts = [min(most, runs - done) for done in range(0, runs, most)]
    return np.concatenate(
        [
            sample(data, part, number.to_bytes(4, "big") + secret[4:])
            for number, part in enumerate(parts)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class QueryRuns:
    """A sampler over a query whose steps are 8 hours (`apart` = "groups") or 20 minutes."""

    query: Callable[[int], Query]
    """From the number of runs: only windows side by side need it."""
    groups: int = 1
    apart: Literal["groups", "windows", "nothing"] = "groups"
    plan: Callable[[Query], NoisePlan] = plan_query
    flow: type[Flow] = Flow
    reader: type[RowReader] = RowReader
    source: Callable[[pa.Table], Source] | None = None
    """What is read in place of the table of all rows, made of it."""
    looks: Callable[[pa.Table], dict[str, Reals]] = lambda table: {}
    """What else of a release is looked at, a number for each of its rows, by name."""
    at: tuple[int, ...] = ()
    """When each step is, in seconds since 1970; empty: every 8 hours."""

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """What is published of each run's groups, NaN where they are not shown."""
        together = {"groups": runs, "windows": _WINDOWS_AT_ONCE, "nothing": 1}[self.apart]
        if together >= runs > 1:
            return self._sample(data, runs, secret)
        return sample_in_parts(self._sample, data, runs, secret, most=together)

    def _sample(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        plan = _planned(self.plan, self.query(runs))
        windows = self.apart == "windows"
        columns = [aggregate.name for aggregate in plan.query.aggregates]
        width = self.groups
        table = scenario_table(data, runs, width, windows, at=self.at)
        by_place: dict[int, list[Reals]] = {}
        for _, publication in run_plan(
            plan,
            table,
            secret=secret,
            run=secret[:16],
            flow=self.flow,
            reader=self.reader,
            source=self.source,
            memory=_MEMORY,
        ):
            places = 1 if windows else runs
            place = publication.due.window if windows else 0
            shown = by_place.setdefault(place, [])
            if plan.query.totals:
                about = json.loads(publication.table.schema.metadata[b"dpstream"])
                seen = [about["bias"][name] for name in ("share", "dropped", "units_beyond")]
                if plan.query.counts_elsewhere:
                    seen += [about["bias"]["groups"][name] for name in ("share", "dropped")]
                shown.append(np.full((places, len(seen)), np.array(seen, np.float64)))
            for keys, rows_of_set in tables_of_sets(plan.query, publication.table):
                many = 1 if keys == "run" else width
                shown.append(values_by_run(rows_of_set, columns, places, many, keys=keys))
            for name, numbers in self.looks(publication.table).items():
                looked = pa.table({"key": publication.table["key"], name: numbers})
                shown.append(values_by_run(looked, [name], places, width))
        rows = [np.concatenate(by_place[place], axis=1) for place in sorted(by_place)]
        return np.concatenate(rows[:runs] if windows else rows)


class HiddenKeysShown(NoisePlan):
    """Shows remembered keys however small they are: the proof lets all of them be shown."""

    def _of_columns(self, releases: int, columns: slice) -> WindowPlan:
        plan = super()._of_columns(releases, columns)
        return replace(plan, visible=np.full_like(plan.visible, -np.inf))


class OneRunKnown(NoisePlan):
    """Makes the noise of a query over the first run's groups: a total of theirs is the only one.

    It counts how many groups of a set a unit reaches, which all runs together would hide.
    """

    @cached_property
    def one_run(self) -> NoisePlan:
        """Of the same query over the groups of the first run."""
        known = self.query.public_groups
        assert known is not None
        assert not isinstance(known, NeedsTables)
        first = next(iter(known))[0]
        one = replace(self.query, public_groups=[keys for keys in known if keys[0] == first])
        assert one.bounds == self.query.bounds, "one run alone would keep less of a unit"
        return plan_query(one)

    def _sensitivity(self, measure: Measure, names: tuple[str, ...] | None = None) -> Fraction:
        return self.one_run._sensitivity(measure, names)

    def _reached(self, measure: Measure, names: tuple[str, ...] | None = None) -> int:
        return self.one_run._reached(measure, names)


class NodesShown(Flow):
    """Publishes, besides a quantile, the noisy sums of all nodes on the way to the leaf of 4.

    The proof lets all of them be shown. A unit whose values are all 4 moves each of them by its
    rows, so their sum, each with the sign of that move, is what tells most of it.
    """

    def new_groups(self) -> GroupBucket:
        """Cells that remember what was drawn."""
        bucket = super().new_groups()
        bucket.cells = [_SeenNodes(cells) for cells in self.query.cells]
        return bucket

    def _table(self, step: int, due: DueRelease, noisy: Any, totals: tuple[int, ...]) -> pa.Table:
        table = super()._table(step, due, noisy, totals)
        (bucket,), (shown,) = self.groups(due.window), noisy
        of_path = np.empty(len(shown.ids))
        (nodes,) = bucket.cells
        assert isinstance(nodes, _SeenNodes)
        of_path[self._orders[due.window].places[0]] = nodes.on_path
        return table.append_column("on_path", pa.array(of_path))


class _SeenNodes(CellSums):
    on_path: Any = 0.0

    def noisy(self, level: int, groups: Words, nodes: Integers, *place: Any) -> Integers:
        """The same, for the nodes of the path too."""
        leaf, depth = int(self.cells.on_grid(np.array([4.0]))[0]), self.cells.depth
        first = np.flatnonzero((groups[1:] != groups[:-1]).any(axis=1)) + 1
        every = groups[np.append(0, first)] if len(groups) else groups
        path = np.full(len(every), (1 << level) + (leaf >> (depth - level)))
        both = np.concatenate([groups, every]), np.concatenate([nodes, path])
        drawn = super().noisy(level, *both, *place)
        sign = 1 - 2 * (leaf >> (depth - level - 1) & 1)
        self.on_path = (self.on_path if level else 0.0) + sign * drawn[len(nodes) :]
        return drawn[: len(nodes)]


def nodes_on_path(table: pa.Table) -> dict[str, Reals]:
    """What `NodesShown` publishes."""
    return {"on_path": table["on_path"].to_numpy()}


def key_bytes(table: pa.Table) -> dict[str, Reals]:
    """The bytes of the keys beside "key", as numbers: 0.0 and -0.0 are equal, and do not look it.

    A date may be kept as days or as milliseconds, which may lie within the day.
    """
    numbers = {}
    for name in ("zero", "day"):
        if name in table.column_names:
            kind = pa.int32() if table[name].type.bit_width == 32 else pa.int64()
            numbers[name] = table[name].combine_chunks().view(kind).to_numpy().astype(np.float64)
    return numbers


def column_types(table: pa.Table) -> dict[str, Reals]:
    """Whether the columns are of floats: what kinds of numbers they hold."""
    floats = sum(pa.types.is_floating(one.type) for one in table.schema)
    return {"floats": np.full(len(table), float(floats))}


def unit_spellings(table: pa.Table) -> list[str]:
    """The users of all rows as JSON has them, each row of a unit in another spelling."""
    seen: Counter[int] = Counter()
    spellings = []
    for user in table["user"].to_pylist():
        spellings.append(SPELLINGS[seen[user] % len(SPELLINGS)].format(user))
        seen[user] += 1
    return spellings


def json_source(table: pa.Table) -> Source:
    """The rows as JSON lines in which each row of a unit writes its number in another way."""
    folder = TemporaryDirectory()
    path = Path(folder.name) / "rows.jsonl"
    rows = table.drop_columns(["user", "day"]).to_pylist()
    with path.open("w", encoding="utf-8") as file:
        for user, row in zip(unit_spellings(table), rows, strict=True):
            file.write(f'{{"user": {user}, {json.dumps(row)[1:]}\n')
    source = open_source(path)
    finalize(source, folder.cleanup)
    return source


def tables_of_sets(query: Query, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The column that names the groups, or runs, and the rows shown; of several sets each."""
    if not query.grouping_sets:
        yield "key", table
    for names, number in zip(query.grouping_sets, query.grouping_ids, strict=True):
        mine = np.asarray(table[GROUPING_ID]) == number
        if NOT_SHOWN in table.column_names:  # made of the others
            mine &= ~np.asarray(table[NOT_SHOWN])
        yield "key" if "key" in names else "run", table.filter(pa.array(mine))


def values_by_run(
    table: pa.Table, columns: Sequence[str], runs: int, groups: int, *, keys: str = "key"
) -> Reals:
    """What a table shows of each run: runs x (groups x columns), NaN where a group is not there.

    The groups of run r have the keys r * `groups` to (r + 1) * `groups` - 1.
    """
    out = np.full((runs, groups, len(columns)), np.nan)
    numbers = table[keys].to_numpy().astype(np.int64)
    for number, name in enumerate(columns):
        values = table[name].to_numpy(zero_copy_only=False)
        out[numbers // groups, numbers % groups, number] = values
    return out.reshape(runs, -1)


@lru_cache(maxsize=64)
def _planned(plan: Callable[[Query], NoisePlan], query: Query) -> NoisePlan:
    """Calibrated once: it takes longer than a small run."""
    return plan(query)


def scenario_table(
    data: Scenario, runs: int, groups: int, windows: bool, *, at: tuple[int, ...] = ()
) -> pa.Table:
    """Rows of all runs, the targets' first; every unit but the target has one row.

    `at`: when each step is, where that is not every 8 hours.
    """
    place, every = np.arange(runs), UNITS
    parts: list[Integers] = [np.zeros((5, 0), np.int64)]

    def add(group: int, step: int, first: int, many: int, late: int = 0) -> None:
        """A row of `many` units in each run, whose numbers begin with `first`."""
        run = np.repeat(place, many)
        units = run * every + np.tile(np.arange(first, first + many), runs)
        same = (np.full(len(run), number) for number in (group, step, late))
        parts.append(np.stack([run, units, *same]))

    for group, step, *late in data.unit:
        add(group, step, 0, 1, *late)
    named = 1
    for group, step, many in data.others:
        add(group, step, named, many)
        named += many
    if data.again:
        add(*data.others[0][:2], 1, data.again)
    runs_of, units, groups_of, steps, delays = np.concatenate(parts, axis=1)
    length = HOUR // STEPS if windows else 24 * HOUR // STEPS
    times = steps * length + 60 + (runs_of * HOUR if windows else 0)
    if at:
        times = np.array(at, np.int64)[steps]
    target = units % every == 0
    return pa.table(
        {
            "user": units,
            "key": groups_of if windows else runs_of * groups + groups_of,
            "run": runs_of,
            "ts": times,
            "seen": times + delays * length,
            "x": np.full(len(times), 4),
            "swing": np.where(steps == 0, 4, np.where(steps % 2, -8, 8)),
            "value": np.where(target, steps, steps - 12),
            "nth": np.where(target, 99, units % every),
            "zero": np.where(target, -0.0, 0.0),
            "day": pa.array(np.where(target, 45_296_789, 0)).view(pa.date64()),
        }
    )


@dataclass(frozen=True, kw_only=True)
class SeriesRuns:
    """A sampler over a statement; `options`: those of its privacy clause, but for the groups."""

    options: str
    groups: int = 1
    apart: bool = True
    """May groups be runs?"""
    run: type[SeriesRun] = SeriesRun

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """What each run publishes in all windows, and which windows repeat an earlier one."""
        together = _GROUPS_AT_ONCE // self.groups if self.apart else 1
        return sample_in_parts(self._sample, data, runs, secret, most=together)

    def _sample(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        query = series_query(self.options, self.groups * runs)
        rows = scenario_table(data, runs, self.groups, windows=False)
        series = self.run(
            query=query,
            source=TableSource(rows),
            secret=secret,
            options=EngineOptions(run_id=secret[:16]),
        )
        tables = sorted(series, key=lambda table: table["window_start"][0].as_py())
        shown = [
            values_by_run(table, [name], runs, self.groups)
            for name in ("n", "held")
            for table in tables
        ]
        return np.concatenate(shown, axis=1)


@lru_cache(maxsize=8)
def series_query(options: str, groups: int) -> SeriesQuery:
    """The statement, with its public groups; rows may come a window late."""
    named = ", ".join(str(group) for group in range(groups))
    query = sql(
        f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (privacy_unit_column = user, {options}, public_groups = ({named}))
               key, window_start, COUNT(*) AS n
        FROM TUMBLE(visits, DESCRIPTOR(ts), INTERVAL '8' HOUR)
        GROUP BY key, window_start
        """,
        time_unit="s",
        start="1970-01-01",
        end="1970-01-03",
        arrival_column="seen",
        allowed_lateness="8 hours",
    )
    assert isinstance(query, SeriesQuery)
    return query
