"""Running queries as values: iterate for releases, stop, close, see how far they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.engines.query_run import QueryRun
from dpstream.engines.series import SeriesRun
from dpstream.records import Rejected
from dpstream.session.budget import AnyQuery
from dpstream.session.collected import Releases
from dpstream.stages.schedule import Schedule
from dpstream.stages.ticks import instant


@dataclass(kw_only=True)
class Operator:
    """What only the operator may see: rows read and rows set aside. Not private."""

    dead_letters: DeadLetters | None = None
    read: int = 0
    rejected_rows: int = 0
    outside: int = 0
    late: int = 0
    other_keys: int = 0
    latest: list[Rejected] = field(default_factory=list)

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        """Rows that could not be used go to the dead letters, under their chunk's name."""
        self.rejected_rows += len(rows)
        self.latest = [*self.latest, *rows][-100:]
        if self.dead_letters is not None and rows:
            self.dead_letters.write(chunk, rows)

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        """Add to the counts."""
        self.read += read
        self.outside += outside
        self.late += late
        self.other_keys += other_keys

    def counts(self) -> dict[str, int]:
        """What became of the rows, by name."""
        return {
            "read": self.read,
            "outside": self.outside,
            "late": self.late,
            "other_keys": self.other_keys,
            "rejected": self.rejected_rows,
        }


class Run:
    """A query that runs: iterate over it for its releases, Arrow tables, as they are published.

    It can be iterated over once, and is closed at the end; leave early with `close`, or use `with`.
    `collect` runs it to its end and keeps the releases, for frames and plots. Each table's metadata
    say which window and trigger it belongs to. `operator` holds counts that are not private.
    """

    def __init__(self, engine: QueryRun | SeriesRun, operator: Operator) -> None:
        self._engine, self.operator = engine, operator

    def __iter__(self) -> Iterator[pa.Table]:
        return iter(self._engine)

    def finish(self) -> Run:
        """Run to the end; the releases go to the sink."""
        for _ in self:
            pass
        return self

    def collect(self) -> Releases:
        """Run to the end and keep every release in memory."""
        return Releases(list(self))

    def stop(self) -> None:
        """End at the next occasion; a run with the same state directory goes on from there."""
        self._engine.stop()

    def close(self) -> None:
        """Leave it where it is; a run with the same state directory goes on from there."""
        self._engine.close()

    def forget(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state directory of a run that has stopped.

        Nothing more of this unit is kept (within the periods that are still open): a unit that
        began anew could contribute twice what the promise allows. What was published stays.
        Returns in how many groups the unit was: an exact number, for the operator alone.
        """
        return self._engine.forget(unit)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def query(self) -> AnyQuery:
        """The query as it runs: with its start, and with the grids that were chosen for it."""
        engine = self._engine
        return engine.plan.query if isinstance(engine, QueryRun) else engine.query

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types; fixed before the first one is published.

        Types of keys that are not declared follow from the source's first schema: of a live source
        that has none yet they are text until it has.
        """
        return self._engine.schema

    @property
    def steps_done(self) -> int:
        """How many triggers have been published."""
        return self._engine.steps_done

    @property
    def next_trigger(self) -> int | None:
        """When the next one is, in microseconds since 1970; None if it has no time."""
        schedule, step = self.query.schedule, self.steps_done
        return (
            None
            if schedule.steps is not None and step >= schedule.steps
            else schedule.time_of(step)
        )

    def __repr__(self) -> str:
        steps = self.query.schedule.steps
        total = "no end" if steps is None else str(steps)
        return f"<Run {self.query.name!r}: {self.steps_done} of {total} triggers published>"


class Runs:
    """Several queries side by side; iterate for (name, table) in trigger order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = {run.query.name: run for run in runs}

    def __iter__(self) -> Iterator[tuple[str, pa.Table]]:
        """The query whose next table is the earliest goes on."""
        left = {name: iter(run) for name, run in self.runs.items()}
        times = {name: run.next_trigger or 0 for name, run in self.runs.items()}
        same = dict.fromkeys(times, 0)  # tables that came at that time already
        while left:
            name = min(left, key=times.__getitem__)
            table = next(left[name], None)
            if table is None:
                del left[name]
                continue
            yield name, table
            same[name] += 1
            times[name], same[name] = _after(self.runs[name].query.schedule, table, same[name])

    def finish(self) -> Runs:
        """Run all to their ends."""
        for _ in self:
            pass
        return self

    def collect(self) -> dict[str, Releases]:
        """Run all to their ends and keep every release in memory, by query."""
        found: dict[str, list[pa.Table]] = {name: [] for name in self.runs}
        for name, table in self:
            found[name].append(table)
        return {name: Releases(tables) for name, tables in found.items()}

    def stop(self) -> None:
        """End all at the next occasion."""
        for run in self.runs.values():
            run.stop()

    def forget(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state of all; see `Run.forget`."""
        return sum(run.forget(unit) for run in self.runs.values())

    def close(self) -> None:
        """Leave all where they are."""
        for run in self.runs.values():
            run.close()

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Runs: {', '.join(map(repr, self.runs.values()))}>"


def _after(schedule: Schedule, table: pa.Table, same: int) -> tuple[int, int]:
    """When the table after this one is due, and how many have come at that time.

    A run works ahead of its tables, so how far it is does not tell.
    """
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}")).get("trigger_time")
    if told is None:
        return 0, 0
    time = instant(told, "trigger_time")
    step = int(schedule.step_of(np.array([time - 1]))[0])
    if same < len(schedule.due(step)):
        return time, same
    if schedule.steps is not None and step + 1 >= schedule.steps:
        return time, 0
    return schedule.time_of(step + 1) or 0, 0
