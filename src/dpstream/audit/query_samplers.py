"""Run a whole query once, and take from it as many independent runs as it has groups or windows.

Why a group is as good as a run: nothing is shared between groups but public numbers. A unit's rows
are bounded by its own rows; a group's sums, its noise (addressed by its id) and its threshold see
no other group. `audit/query_replay.py` checks exactly that for any query and data: a unit changes
no draw, no sum and no answer of a group that it is not in. Each run here has groups and units of
its own, so its outputs are independent of the others' and have the law of a query over them alone.
Where totals of windows are published (debias), all groups of a window share them; a run then is a
window, with units that renew every window, and what it shows begins with the share of rows kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from weakref import finalize

import numpy as np
import pyarrow as pa

from dpstream.audit.query_runs import run_plan
from dpstream.connectors.sources import open_source
from dpstream.records import Integers, Reals, Source
from dpstream.stages.flow import Flow
from dpstream.stages.plan import Plan, planned
from dpstream.stages.query import Query
from dpstream.stages.row_reader import RowReader

HOUR = 3600
STEPS = 3
"""Steps of a run: parts of a day, or of a window."""

Place = tuple[int, ...]
"""(group, step) of a row, and if it is later than the scenario's rows are, by how many steps."""
_WINDOWS = 250
"""Windows side by side in one query: more of them take longer than two queries."""
_MEMORY = 1 << 28
SPELLINGS = ("{}", "{}.0", "{}e0", '" {}"')
"""Of one number, in JSON."""
MakeFlow = Callable[[Plan, RowReader], Flow]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The rows of one run. `others`: so many units with one row each; `unit`: the target's rows."""

    others: tuple[tuple[int, int, int], ...] = ()  # (group, step, how many)
    unit: tuple[Place, ...] = ()
    late: int = 0
    """Steps between the event of the target's rows and their arrival."""
    again: int = 0
    """So many of the first `others` have a second row in the same place, beyond their bound."""

    def facts(self) -> dict[str, Any]:
        """For a report."""
        found = {"others": [list(o) for o in self.others], "unit": [list(p) for p in self.unit]}
        return found | ({"again": self.again} if self.again else {})


def usual_flow(plan: Plan, reader: RowReader) -> Flow:
    """The engine's own."""
    return Flow(plan, reader, buckets=1, threads=1)


@dataclass(frozen=True, kw_only=True)
class QueryRuns:
    """A sampler over a query whose steps are 8 hours (`apart` = "groups") or 20 minutes."""

    query: Callable[[int], Query]
    """From the number of runs: only windows side by side need it."""
    groups: int = 1
    apart: Literal["groups", "windows", "nothing"] = "groups"
    plan: Callable[[Query], Plan] = planned
    flow: MakeFlow = usual_flow
    reader: type[RowReader] = RowReader
    source: Callable[[pa.Table], Source] | None = None
    """What is read in place of the table of all rows, made of it."""
    looks: Callable[[pa.Table], dict[str, Reals]] = lambda table: {}
    """What else of a release is looked at, a number for each of its rows, by name."""

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """What is published of each run's groups, NaN where they are not shown."""
        together = {"groups": runs, "windows": _WINDOWS, "nothing": 1}[self.apart]
        if together >= runs > 1:
            return self._once(data, runs, secret)
        parts = [min(together, runs - done) for done in range(0, runs, together)]
        return np.concatenate(
            [
                self._once(data, part, number.to_bytes(4, "big") + secret[4:])
                for number, part in enumerate(parts)
            ]
        )

    def _once(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        plan = _planned(self.plan, self.query(runs))
        windows = self.apart == "windows"
        columns = [aggregate.name for aggregate in plan.query.aggregates]
        table, width = table_of(data, runs, self.groups, windows), self.groups
        found: dict[int, list[Reals]] = {}
        for _, made in run_plan(
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
            place = made.due.window if windows else 0
            shown = found.setdefault(place, [])
            if plan.query.totals:
                about = json.loads(made.table.schema.metadata[b"dpstream"])
                shown.append(np.full((places, 1), about["kept_share"]))
            shown.append(by_run(made.table, columns, runs=places, groups=width))
            for name, numbers in self.looks(made.table).items():
                looked = pa.table({"key": made.table["key"], name: numbers})
                shown.append(by_run(looked, [name], runs=places, groups=width))
        rows = [np.concatenate(found[place], axis=1) for place in sorted(found)]
        return np.concatenate(rows[:runs] if windows else rows)


def key_bytes(table: pa.Table) -> dict[str, Reals]:
    """The bytes of the keys beside "key", as numbers: 0.0 and -0.0 are equal, and do not look it.

    A date may be kept as days or as milliseconds, which may lie within the day.
    """
    found = {}
    for name in ("zero", "day"):
        if name in table.column_names:
            kind = pa.int32() if table[name].type.bit_width == 32 else pa.int64()
            found[name] = table[name].combine_chunks().view(kind).to_numpy().astype(np.float64)
    return found


def column_types(table: pa.Table) -> dict[str, Reals]:
    """Whether the columns are of floats: what kinds of numbers they hold."""
    floats = sum(pa.types.is_floating(one.type) for one in table.schema)
    return {"floats": np.full(len(table), float(floats))}


def spelled(table: pa.Table) -> list[str]:
    """The users of all rows as JSON has them, each row of a unit in another spelling."""
    seen: Counter[int] = Counter()
    found = []
    for user in table["user"].to_pylist():
        found.append(SPELLINGS[seen[user] % len(SPELLINGS)].format(user))
        seen[user] += 1
    return found


def spelled_json(table: pa.Table) -> Source:
    """The rows as JSON lines in which each row of a unit writes its number in another way."""
    folder = TemporaryDirectory()
    path = Path(folder.name) / "rows.jsonl"
    rows = table.drop_columns(["user", "day"]).to_pylist()
    with path.open("w", encoding="utf-8") as file:
        for user, row in zip(spelled(table), rows, strict=True):
            file.write(f'{{"user": {user}, {json.dumps(row)[1:]}\n')
    source = open_source(path)
    finalize(source, folder.cleanup)
    return source


def by_run(table: pa.Table, columns: Sequence[str], *, runs: int, groups: int) -> Reals:
    """What a table shows of each run: runs x (groups x columns), NaN where a group is not there.

    Run so and so has the groups from its number times `groups` on.
    """
    out = np.full((runs, groups, len(columns)), np.nan)
    keys = table["key"].to_numpy().astype(np.int64)
    for number, name in enumerate(columns):
        values = table[name].to_numpy(zero_copy_only=False)
        out[keys // groups, keys % groups, number] = values
    return out.reshape(runs, -1)


@lru_cache(maxsize=64)
def _planned(plan: Callable[[Query], Plan], query: Query) -> Plan:
    """Calibrated once: it takes longer than a small run."""
    return plan(query)


def table_of(data: Scenario, runs: int, groups: int, windows: bool) -> pa.Table:
    """Rows of all runs, the targets' first; every unit but the target has one row."""
    run, group, step, unit, delay = [], [], [], [], []
    place, every = np.arange(runs), 1_000_000
    named = 0
    for which, when, *late in data.unit:
        run.append(place)
        group.append(np.full(runs, which))
        step.append(np.full(runs, when))
        unit.append(place * every)
        delay.append(np.full(runs, late[0] if late else data.late))
    for which, when, many in data.others:
        run.append(np.repeat(place, many))
        group.append(np.full(runs * many, which))
        step.append(np.full(runs * many, when))
        units = named + np.tile(np.arange(many), runs)
        unit.append(np.repeat(place, many) * every + units + 1)
        delay.append(np.zeros(runs * many, np.int64))
        named += many
    if data.again:  # the same rows once more
        which, when, _ = data.others[0]
        size = runs * data.again
        run.append(np.repeat(place, data.again))
        group.append(np.full(size, which))
        step.append(np.full(size, when))
        unit.append(np.repeat(place, data.again) * every + np.tile(np.arange(data.again), runs) + 1)
        delay.append(np.zeros(size, np.int64))
    joined: list[Integers] = [
        np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
        for parts in (run, group, step, unit, delay)
    ]
    where, place_of, steps, who, delays = joined
    length = HOUR // STEPS if windows else 24 * HOUR // STEPS
    times = steps * length + 60 + (where * HOUR if windows else 0)
    return pa.table(
        {
            "user": who,
            "key": place_of if windows else where * groups + place_of,
            "ts": times,
            "seen": times + delays * length,
            "x": np.full(len(times), 4),
            "zero": np.where(who % every == 0, -0.0, 0.0),
            "day": pa.array(np.where(who % every == 0, 45_296_789, 0)).view(pa.date64()),
        }
    )
