"""Running queries as values: iterate for releases, stop, close, see how far they are."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.engines.arrivals import Arrivals, LiveView
from dpstream.engines.query_run import QueryRun
from dpstream.engines.series import SeriesRun
from dpstream.records import Rejected
from dpstream.session.budget import AnyQuery
from dpstream.session.collected import Releases
from dpstream.stages.schedule import Schedule
from dpstream.stages.ticks import instant

_LOG = logging.getLogger("dpstream.session")
_PATIENCE = 1_000_000  # microseconds after its trigger before a query without rows is told of


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
    lag_seconds: float = 0.0
    """How long after its trigger the last step of a live run was out."""
    worst_lag_seconds: float = 0.0

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

    def lagged(self, seconds: float) -> None:
        """How long after its trigger a step of a live run was out."""
        self.lag_seconds = seconds
        self.worst_lag_seconds = max(self.worst_lag_seconds, seconds)

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

    def erase_unit(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state directory of a run that has stopped.

        Nothing more of this unit is kept (within the periods that are still open): a unit that
        began anew could contribute twice what the promise allows. What was published stays.
        Returns in how many groups the unit was: an exact number, for the operator alone.
        """
        return self._engine.erase_unit(unit)

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

    @property
    def live(self) -> bool:
        """Does it go by the clock?"""
        return self._engine.live

    @property
    def in_real_time(self) -> bool:
        """Does its clock go on while nobody waits for it?"""
        return self._engine.clock.real_time

    def now(self) -> int:
        """The time by its clock."""
        return self._engine.clock.now()

    @property
    def arrivals(self) -> Arrivals | None:
        """What its live source has; queries over one source have the same."""
        source = self._engine.source
        return source.shared if isinstance(source, LiveView) else None

    def leave(self) -> None:
        """It reads no more: what it has not read is not held for it."""
        source = self._engine.source
        if isinstance(source, LiveView):
            source.close()

    def operator_facts(self) -> dict[str, Any]:
        """What became of the rows, and how far behind it is: for the operator alone."""
        seen, due = self.operator, self.next_trigger
        facts: dict[str, Any] = dict(seen.counts())
        if self.live:
            late = 0.0 if due is None else max(0, self.now() - due) / 1e6
            source = self._engine.source
            facts |= {
                "rows_waiting": source.waiting if isinstance(source, LiveView) else 0,
                "lag_seconds": round(late, 6),
                "release_delay_seconds": seen.lag_seconds,
                "worst_release_delay_seconds": seen.worst_lag_seconds,
            }
        return facts

    def __repr__(self) -> str:
        steps = self.query.schedule.steps
        total = "no end" if steps is None else str(steps)
        return f"<Run {self.query.name!r}: {self.steps_done} of {total} triggers published>"


class Held(Protocol):
    """What queries share, and nobody closes before all of them are over."""

    def release(self) -> None:
        """They are."""


class Runs:
    """Several queries side by side; iterate for (name, table).

    Over files, and with a clock that only moves when it is waited for, tables come in the order of
    their triggers. Live queries are served each in a thread of its own, so that none waits for
    another: the tables of one query come in order, and of those that are ready the one with the
    earliest trigger comes first. A query goes on when the caller asks for the next table after its.

    A query that fails stops alone. It is in `failures` at once, and its error is raised when all
    others have come to their ends. `retry_delay` may say (error, how many times before) after how
    many seconds it is to be tried again; None: not at all.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        again: Mapping[str, Callable[[], Run]] | None = None,
        held: Sequence[Held] = (),
    ) -> None:
        self.runs = {run.query.name: run for run in runs}
        self.again = dict(again or {})
        self.failures: dict[str, Exception] = {}
        self.retry_delay: Callable[[Exception, int], float | None] = lambda problem, tries: None
        self._starved: set[str] = set()
        self._first_due = {name: run.next_trigger for name, run in self.runs.items()}
        self._changed, self._leaving = Condition(), Event()
        self._threads: dict[str, Thread] = {}
        self._ready: dict[str, pa.Table] = {}
        self._out: str | None = None  # whose table the caller has
        shared = {id(one): one for run in runs if (one := run.arrivals) is not None}
        for one in shared.values():
            one.hold()
        self._held: list[Held] = [*shared.values(), *held]

    @classmethod
    def together(cls, several: Sequence[Runs]) -> Runs:
        """All queries of several."""
        runs = cls(
            [run for each in several for run in each.runs.values()],
            again={name: again for each in several for name, again in each.again.items()},
        )
        for each in several:
            runs._held += each._held
            each._held = []
        return runs

    def __iter__(self) -> Iterator[tuple[str, pa.Table]]:
        """Every table; at the end the error of a query that has failed."""
        if any(run.live and run.in_real_time for run in self.runs.values()):
            yield from self._side_by_side()
        else:
            yield from self._in_turn()
        self._release()
        for name, problem in [*self.failures.items()][1:]:
            _LOG.error("query %r has failed, too: %s", name, problem)
        if self.failures:
            raise next(iter(self.failures.values()))

    def _in_turn(self) -> Iterator[tuple[str, pa.Table]]:
        """The query whose next table is the earliest goes on."""
        left = {name: iter(run) for name, run in self.runs.items()}
        times = {name: run.next_trigger or 0 for name, run in self.runs.items()}
        same = dict.fromkeys(times, 0)  # tables that came at that time already
        while left:
            name = min(left, key=times.__getitem__)
            try:
                table = next(left[name], None)
            except Exception as problem:
                self._note(name, problem)
                table = None
            if table is None:
                del left[name]
                continue
            yield name, table
            same[name] += 1
            times[name], same[name] = _after(self.runs[name].query.schedule, table, same[name])

    def _side_by_side(self) -> Iterator[tuple[str, pa.Table]]:
        """Each query in a thread of its own; of the tables that are ready, the earliest first."""
        if not self._threads:
            for name in self.runs:
                words = f"dpstream-{name}"
                self._threads[name] = Thread(
                    target=self._serve, args=(name,), name=words, daemon=True
                )
            for thread in [*self._threads.values()]:
                thread.start()
        while True:
            with self._changed:
                self._out = None
                self._changed.notify_all()
                while not self._ready and self._threads:
                    self._changed.wait()
                if not self._ready:
                    return
                name = min(self._ready, key=self._rank)
                table, self._out = self._ready.pop(name), name
            self.warn_starved()
            yield name, table

    def _rank(self, name: str) -> tuple[int, int]:
        """By trigger, then as the queries are listed."""
        return _trigger_time(self._ready[name]) or 0, [*self.runs].index(name)

    def _serve(self, name: str) -> None:
        """One query's life, with another try where it has failed and may."""
        tries, wait = 0, None
        try:
            while True:
                try:
                    if wait is not None:
                        self.runs[name] = self.again[name]()
                    for table in self.runs[name]:
                        tries = 0
                        self.failures.pop(name, None)
                        if not self._hand_over(name, table):
                            self.runs[name].close()
                            return
                    return
                except Exception as problem:
                    self._note(name, problem)
                    wait = self.retry_delay(problem, tries) if name in self.again else None
                    tries += 1
                if wait is None or self._leaving.wait(wait):
                    return
        finally:
            with self._changed:
                del self._threads[name]
                self._changed.notify_all()

    def _hand_over(self, name: str, table: pa.Table) -> bool:
        """Give a table to the caller; True when the next one is asked for."""
        with self._changed:
            self._ready[name] = table
            self._changed.notify_all()
            while (name in self._ready or self._out == name) and not self._leaving.is_set():
                self._changed.wait()
        return not self._leaving.is_set()

    def _note(self, name: str, problem: Exception) -> None:
        if len(self.runs) > 1:
            _LOG.error("query %r has failed; the others go on: %s", name, problem)
        self.failures[name] = problem
        self.runs[name].leave()

    def warn_starved(self) -> list[str]:
        """Queries that have read nothing though others over their source have; said once each.

        That is, since this start, and though a trigger of theirs is over. For the operator alone.
        """
        most: dict[int, int] = {}
        for run in self.runs.values():
            if run.arrivals is not None:
                at = id(run.arrivals)
                most[at] = max(most.get(at, 0), run.operator.read)
        found = [
            name
            for name, run in self.runs.items()
            if run.arrivals is not None
            and not run.operator.read
            and most[id(run.arrivals)]
            and run.now() >= (self._first_due[name] or math.inf) + _PATIENCE
        ]
        for name in found:
            if name not in self._starved:
                self._starved.add(name)
                _LOG.warning(
                    "query %r has read nothing since this start, while another query over its "
                    "source has read %d rows (operator only, not private); is its sink slow, or "
                    "has it failed?",
                    name,
                    most[id(self.runs[name].arrivals)],
                )
        return found

    def _release(self) -> None:
        """The sources may be closed."""
        held, self._held = self._held, []
        for one in held:
            one.release()

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

    def erase_unit(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state of all; see `Run.erase_unit`."""
        return sum(run.erase_unit(unit) for run in self.runs.values())

    def close(self) -> None:
        """Leave all where they are."""
        with self._changed:
            self._leaving.set()
            self._changed.notify_all()
            threads = [*self._threads.values()]
        for run in self.runs.values():
            run.close()
        for thread in threads:
            thread.join()
        self._release()

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
    time = _trigger_time(table)
    if time is None:
        return 0, 0
    step = int(schedule.step_of(np.array([time - 1]))[0])
    if same < len(schedule.due(step)):
        return time, same
    if schedule.steps is not None and step + 1 >= schedule.steps:
        return time, 0
    return schedule.time_of(step + 1) or 0, 0


def _trigger_time(table: pa.Table) -> int | None:
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}")).get("trigger_time")
    return None if told is None else int(instant(told, "trigger_time"))
