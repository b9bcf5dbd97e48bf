"""Several queries side by side: one iteration over the releases of all of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.connectors.shared import SharedSink
from dpstream.engines.collected import Releases, release_facts
from dpstream.engines.embedded.live_reader import Arrivals
from dpstream.engines.query_run import Run
from dpstream.operator_log import in_our_words
from dpstream.privacy.ledger.refusals import LastPeriodOver
from dpstream.query.windows import instant

_LOG = logging.getLogger("dpstream.session")
_PATIENCE = 1_000_000  # microseconds after its trigger before a query without rows is told of
_CATCHING_UP = 5_000_000  # the same, after a start at which its trigger was overdue


class Runs:
    """Several queries side by side; iterate for (name, table).

    Over files, and with a clock that only moves when it is waited for, tables come in the order of
    their triggers. Live queries are served each in a thread of its own, so that none waits for
    another: the tables of one query come in order, and of those that are ready the one with the
    earliest trigger comes first. A query goes on when the caller asks for the next table after its.

    A query that fails stops alone. It is in `failures` at once, and its error is raised when all
    others have come to their ends. `retry_delay` may say (error, how many times before) after how
    many seconds it is to be tried again; None: not at all.

    >>> import dpstream as dps
    >>> query = dps.Query(name="pages", privacy_unit_column="user", keys=["page"],
    ...                   max_groups_contributed=1, epsilon=2, delta=1e-6)
    >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
    >>> dps.run_all([query], source=rows).collect()["pages"].table["page"].to_pylist()
    ['/home']
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        again: Mapping[str, Callable[[], Run]] | None = None,
        sinks: Sequence[SharedSink] = (),
    ) -> None:
        self.runs = {run.query.name: run for run in runs}
        self.again = dict(again or {})
        self.failures: dict[str, Exception] = {}
        self.retry_delay: Callable[[Exception, int], float | None] = lambda problem, tries: None
        self._starved: set[str] = set()
        self._told_from = {name: _should_have_rows(run) for name, run in self.runs.items()}
        self._changed, self._leaving = Condition(), Event()
        self._threads: dict[str, Thread] = {}
        self._ready: dict[str, pa.Table] = {}
        self._out: str | None = None  # whose table the caller has
        shared = dict.fromkeys(run.arrivals for run in runs if run.arrivals is not None)
        for arrivals in shared:
            arrivals.hold()
        self._shared: list[Arrivals | SharedSink] = [*shared, *sinks]  # closed when all are over

    @classmethod
    def together(cls, several: Sequence[Runs]) -> Runs:
        """All queries of several."""
        runs = cls(
            [run for each in several for run in each.runs.values()],
            again={name: again for each in several for name, again in each.again.items()},
        )
        for each in several:
            runs._shared += each._shared
            each._shared = []
        return runs

    def open(self) -> None:
        """Open all; the first that cannot run is refused here, before anything is charged.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> running = dps.run_all([query], source=rows)
        >>> running.open()
        >>> running.close()
        """
        for run in self.runs.values():
            run.open()

    def __iter__(self) -> Iterator[tuple[str, pa.Table]]:
        """Every table; at the end the error of a query that has failed."""
        if any(run.live and run.clock.real_time for run in self.runs.values()):
            yield from self._side_by_side()
        else:
            yield from self._in_turn()
        self._release()
        if self.failures:
            raise next(iter(self.failures.values()))

    def _in_turn(self) -> Iterator[tuple[str, pa.Table]]:
        """The query whose next table is the earliest goes on."""
        left = dict(self.runs)
        times = {name: _due_from(run, run.steps_done) for name, run in self.runs.items()}
        same = dict.fromkeys(times, 0)  # tables that came at that time already
        while left:
            name = min(left, key=times.__getitem__)
            try:
                table = next(iter(left[name]), None)
            except Exception as problem:
                self._note_failure(name, problem)
                table = None
            if table is None:
                del left[name]
                continue
            yield name, table
            same[name] += 1
            times[name], same[name] = _next_due(self.runs[name], table, same[name])

    def _side_by_side(self) -> Iterator[tuple[str, pa.Table]]:
        """Each query in a thread of its own; of the tables that are ready, the earliest first."""
        if not self._threads:
            self._threads = {
                name: Thread(target=self._serve, args=(name,), name=f"dpstream-{name}", daemon=True)
                for name in self.runs
            }
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
                ready = [name for name in self.runs if name in self._ready]
                name = min(ready, key=lambda name: _trigger_time(self._ready[name]) or 0)
                table, self._out = self._ready.pop(name), name
            self.warn_starved()
            yield name, table

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
                    self._note_failure(name, problem)
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

    def _note_failure(self, name: str, problem: Exception) -> None:
        if len(self.runs) > 1:
            over = isinstance(problem, LastPeriodOver)
            _LOG.log(
                logging.WARNING if over else logging.ERROR,
                "query %r has %s; the others go on: %s",
                name,
                "come to its end" if over else "failed",
                in_our_words(problem),
                extra={"facts": {"query": name}},
            )
        self.failures[name] = problem
        self.runs[name].leave()

    def warn_starved(self) -> list[str]:
        """Queries that have read nothing though others over their source have; said once each.

        That is, since this start, and though a trigger of theirs is over. For the operator alone.
        """
        most: dict[Arrivals, int] = {}
        for run in self.runs.values():
            if run.arrivals is not None:
                most[run.arrivals] = max(most.get(run.arrivals, 0), run.operator.read)
        starved = [
            name
            for name, run in self.runs.items()
            if run.arrivals is not None
            and not run.operator.read
            and most[run.arrivals]
            and (name in self.failures or run.clock.now() >= self._told_from[name])
        ]
        for name in [name for name in starved if name not in self._starved]:
            self._starved.add(name)
            _LOG.warning(
                "query %r has read nothing since this start, while another query over its source "
                "has (operator only, not private); is its sink slow, or has it failed?",
                name,
                extra={"facts": {"query": name}},
            )
        return starved

    def _release(self) -> None:
        """The sources may be closed."""
        shared, self._shared = self._shared, []
        for each in shared:
            each.release()

    def finish(self) -> Runs:
        """Run all to their ends.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> dps.run_all([query], source=rows).finish().failures
        {}
        """
        for _ in self:
            pass
        return self

    def collect(self) -> dict[str, Releases]:
        """Run all to their ends and keep every release in memory, by query.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> [*dps.run_all([query], source=rows).collect()]
        ['query']
        """
        tables: dict[str, list[pa.Table]] = {name: [] for name in self.runs}
        for name, table in self:
            tables[name].append(table)
        return {name: Releases(listed) for name, listed in tables.items()}

    def stop(self) -> None:
        """End all at the next occasion.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> running = dps.run_all([query], source=rows)
        >>> running.stop()
        >>> [len(found) for found in running.collect().values()]
        [0]
        """
        for run in self.runs.values():
            run.stop()

    def erase_unit(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state of all; see `Run.erase_unit`.

        >>> import dpstream as dps
        >>> from tempfile import TemporaryDirectory
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> with TemporaryDirectory() as state:
        ...     for _ in dps.run_all([query], source=rows, state=state):
        ...         pass
        ...     dps.run_all([query], source=rows, state=state).erase_unit("nobody")
        0
        """
        return sum(run.erase_unit(unit) for run in self.runs.values())

    def close(self) -> None:
        """Leave all where they are.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
        ...                   max_groups_contributed=1)
        >>> rows = [{"user": "ann", "page": "/home"}]
        >>> dps.run_all([query], source=rows).close()  # nothing is read, nothing is charged
        """
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


def _should_have_rows(run: Run) -> float:
    """When a query that has read nothing is told of; what is overdue takes a while to catch up."""
    due, now = run.next_trigger, run.clock.now()
    if due is None:
        return math.inf
    return due + _PATIENCE if due > now else now + _CATCHING_UP


def _next_due(run: Run, table: pa.Table, same: int) -> tuple[int, int]:
    """When the table after this one is due, and how many have come at that time.

    A run works ahead of its tables, so how far it is does not tell.
    """
    time = _trigger_time(table)
    if time is None:
        return 0, 0
    step = int(run.query.schedule.step_of(np.array([time - 1]))[0])
    if same < run.tables_at(step):
        return time, same
    return _due_from(run, step + 1, otherwise=time), 0


def _due_from(run: Run, step: int, *, otherwise: int = 0) -> int:
    """When the first table from a step on is due; a run without one would not come back before."""
    steps = run.steps
    while steps is None or step < steps:
        if run.tables_at(step):
            return run.query.schedule.time_of(step) or 0
        step += 1
    return otherwise


def _trigger_time(table: pa.Table) -> int | None:
    time = release_facts(table).get("trigger_time")
    return None if time is None else int(instant(time, "trigger_time"))
