"""Run several queries and mechanisms on one ledger many times, killed and resumed.

Nothing is replaced. The ledger is a file; the runs that share it have one secret and a state
directory each. A run is broken off after some tables, closed, and begun again by a new object that
finds the ledger and the directory as they were left. What is seen is all that all runs have
published, start by start: a table that is shown again after a restart is seen again, so that noise
drawn anew would be averaged, and noise that meets other data would be subtracted.

One ledger is as many samples as it has groups, as in `QueryRuns` and `SeriesRuns`, which say why
that is enough: a restart is public, and what a run shows of a group depends on that group's rows
alone. A unit is in the groups of one sample, and all its rows are protected together.

`LiveQueryRuns` runs queries over a directory that grows while they run: the file of each step is
moved into it when its time has come, by a clock that the audit moves. Queries, ledger, secret and
states are those of `dpstream.run_all`, which begins them all again after a kill; by then some steps
are known and read again, and the others are read by the clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.audit.query_samplers import (
    HOUR,
    STEPS,
    WINDOWS,
    Scenario,
    sample_in_parts,
    scenario_table,
    values_by_run,
)
from dpstream.connectors.memory import TableSource
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.engines.query_run import AnyQuery, EngineOptions
from dpstream.errors import LedgerError
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.release import bounded_counts
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Reals
from dpstream.session.change_plan import hold_place
from dpstream.session.start import run, run_all

DATASET = "audit"
_STEP = 24 * HOUR // STEPS
_MICROS = 1_000_000
_MOST_RUNS = 4_000  # on one ledger: a statement has an upper limit

Tables: TypeAlias = Generator[Reals, None, None]
"""What is published, table by table: runs x outputs."""
Rows: TypeAlias = Callable[[pa.Table, int], pa.Table]
"""What a source holds at each start, from all rows and the number of the start."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where one of the runs that share a ledger works, and on which rows."""

    rows: pa.Table
    runs: int
    groups: int
    folder: Path
    ledger: Path
    secret: bytes
    clock: str
    """What one step is, in the words of the ledger's terms."""
    run_id: bytes
    """Fixed, so that an audit can be made again."""


@dataclass(frozen=True, kw_only=True)
class RestartedQuery:
    """A GROUP BY, or SQL through a mechanism, with a state directory."""

    query: Callable[[int], AnyQuery]
    """From the number of runs."""
    columns: tuple[str, ...] = ("n",)
    kills: tuple[int, ...] = ()
    """How many tables are seen before each kill; after the last one it runs to its end."""
    snapshot_every: int = 10
    """More than there are steps: what was shown before a kill is shown again."""
    engine: Callable[..., LocalRun | SeriesRun] = LocalRun
    rows: Rows = lambda table, start: table

    def terms(self) -> Terms:
        """Those of a ledger that this query fills."""
        query = self.query(1)
        return query.terms() if isinstance(query, SeriesQuery) else plan_query(query).terms()

    def begin(self, at: RunContext, start: int) -> Tables:
        """Begin, or go on where a directory was left: each table, as runs x outputs."""
        options = EngineOptions(
            run_id=at.run_id, buckets=1, threads=1, snapshot_every=self.snapshot_every
        )
        running = self.engine(
            query=self.query(at.runs),
            source=TableSource(self.rows(at.rows, start)),
            folder=at.folder,
            secret=at.secret,
            ledger=at.ledger,
            dataset=DATASET,
            options=options,
        )
        with closing(running):
            for table in running:
                yield values_by_run(table, self.columns, runs=at.runs, groups=at.groups)


@dataclass(frozen=True, kw_only=True)
class SucceedingQuery(RestartedQuery):
    """A GROUP BY whose state is lost after its first table; the next one takes over from it."""

    def begin(self, at: RunContext, start: int) -> Tables:
        """As `dpstream run --take-over`: behind the periods that others have begun."""
        running = run(
            self.query(at.runs),
            source=self.rows(at.rows, start),
            state=at.folder,
            secret=at.secret,
            ledger=at.ledger,
            dataset=DATASET,
            options=EngineOptions(run_id=at.run_id, buckets=1, threads=1),
            take_over=True,
        )
        with closing(running):
            for table in islice(running, 1):
                yield values_by_run(table, self.columns, runs=at.runs, groups=at.groups)


@dataclass(frozen=True, kw_only=True)
class ReplacedQuery(RestartedQuery):
    """A GROUP BY that is to end with the period of its first table, as `dpstream apply` has it.

    The place of the next one is held from there on, and taken by it. Started again it goes on for
    as long as it is let, and shows all that it draws.
    """

    number: int
    """Which one it is, from 0; its first period, too."""
    kills: tuple[int, ...] = (1,)
    ledger_class: type[Ledger] = Ledger

    def begin(self, at: RunContext, start: int) -> Tables:
        """One table, and then the next one's place is held; or all, until the ledger refuses."""
        with closing(self.ledger_class(at.ledger)) as ledger:
            holder = _holder(at, self.number) if self.number else ""
            running = run(
                self.query(at.runs),
                source=self.rows(at.rows, start),
                state=at.folder,
                secret=at.secret,
                ledger=ledger,
                dataset=DATASET,
                options=EngineOptions(run_id=at.run_id, buckets=1, threads=1, instead_of=holder),
                anyway=True,
            )
            with closing(running), suppress(LedgerError):
                for number, table in enumerate(running):
                    if start == number == 0:
                        self._make_way(at, ledger)
                    yield values_by_run(table, self.columns, runs=at.runs, groups=at.groups)

    def _make_way(self, at: RunContext, ledger: Ledger) -> None:
        """End with the period that is begun, and hold the place of a run behind it."""
        said = {"because": "it is changed", "who": "audit"}
        ledger.limit(DATASET, at.run_id.hex(), self.number, **said)
        query = self.query(at.runs)
        assert isinstance(query, Query)
        behind = query.schedule.edges
        assert behind is not None
        later = query.not_before(behind.at(1))
        hold_place(ledger, DATASET, later, _holder(at, self.number + 1))


def _holder(at: RunContext, number: int) -> str:
    """The run that holds the place of another one."""
    return sha256(at.secret + b"holds the place of %d" % number).digest()[:16].hex()


@dataclass(frozen=True, kw_only=True)
class RestartedMechanism:
    """A mechanism that is fed counts, a bin for each group, in a run that can be repeated."""

    mechanism: Mechanism
    kills: tuple[int, ...] = ()

    def begin(self, at: RunContext, start: int) -> Tables:
        """From the first step, whatever was shown before; at most one row of a unit enters one."""
        counts = bounded_counts(
            steps=at.rows["ts"].to_numpy() // _STEP,
            users=at.rows["user"].to_numpy(),
            bins=at.rows["key"].to_numpy(),
            slots=WINDOWS,
            domain=at.runs * at.groups,
            rows_per_user=1,
        )
        with Runner(
            self.mechanism,
            state=at.folder,
            secret=at.secret,
            ledger=at.ledger,
            dataset=DATASET,
            clock=at.clock,
            run_id=at.run_id,
        ) as runner:
            for releases in runner.feed(counts):
                for release in releases:
                    yield release.values.reshape(at.runs, at.groups)
            for release in runner.finish():
                yield release.values.reshape(at.runs, at.groups)


@dataclass(frozen=True, kw_only=True)
class SharedLedgerRuns:
    """A sampler over a ledger; the runs that share it take turns."""

    sharing: tuple[RestartedQuery | RestartedMechanism, ...]
    terms: Terms | None = None
    """Of the ledger; None: those that the first query fills by itself."""
    groups: int = 1
    ledger: Callable[[Path, int], Path] = lambda path, number: path
    """The ledger file that a run charges, from the shared file and the number of the run."""

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """All that is published of each run, NaN where a group is not shown."""
        return sample_in_parts(self._sample, data, runs, secret, most=_MOST_RUNS)

    def _sample(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        rows, seen = scenario_table(data, runs, self.groups, windows=False), list[Reals]()
        terms, first = self.terms, self.sharing[0]
        if terms is None:
            assert isinstance(first, RestartedQuery)
            terms = first.terms()
        turns = sorted(  # the first starts of all runs, then the second ones, and so on
            (start, number)
            for number, one in enumerate(self.sharing)
            for start in range(1 + len(one.kills))
        )
        with TemporaryDirectory() as place:
            shared = _open_ledger(Path(place), terms)
            ledgers: dict[int, Path] = {}
            for start, number in turns:
                if number not in ledgers:
                    ledgers[number] = self.ledger(shared, number)
                at = RunContext(
                    rows=rows,
                    runs=runs,
                    groups=self.groups,
                    folder=Path(place) / f"run-{number}",
                    ledger=ledgers[number],
                    secret=secret,
                    clock=terms.clock,
                    run_id=sha256(secret + bytes([number])).digest()[:16],
                )
                one = self.sharing[number]
                with closing(one.begin(at, start)) as tables:
                    seen += islice(tables, *one.kills[start : start + 1] or (None,))
        return np.concatenate(seen, axis=1)


class ManualClock:
    """Time that moves only while somebody waits, from one event to the next."""

    real_time = False

    def __init__(self, events: list[tuple[int, Callable[[], object]]]) -> None:
        self._time, self._events = 0, sorted(events, key=lambda event: event[0])

    def now(self) -> int:
        """Microseconds since 1970."""
        return self._time

    def wait(self, until: int, stop: Event) -> None:
        """Move on to the next event, or to the time that is waited for."""
        if self._events and self._events[0][0] <= until:
            time, action = self._events.pop(0)
            self._time = max(self._time, time)
            action()
        else:
            self._time = max(self._time, until)


@dataclass(frozen=True, kw_only=True)
class LiveQueryRuns:
    """A sampler over queries that share a live source, a ledger and their triggers.

    A table of a query that a kill came before is NaN.
    """

    terms: Terms
    queries: Callable[[int], list[Query]]
    """From the number of runs; all publish the column "n" after each of the day's steps."""
    groups: int = 1
    kills: tuple[int, ...] = ()
    """How many tables of any query are seen before each kill."""

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """All that is published of each run."""
        queries, rows = self.queries(runs), scenario_table(data, runs, self.groups, windows=False)
        seen: dict[tuple[int, str, int], Reals] = {}
        with TemporaryDirectory() as place:
            source, folder = Path(place) / "in", Path(place) / "state"
            source.mkdir()
            ledger = _open_ledger(Path(place), self.terms)
            clock = ManualClock([_arrival(source, rows, step) for step in range(STEPS)])
            for start, most in enumerate((*self.kills, None)):
                running = run_all(
                    queries,
                    source=source,
                    live=True,
                    state=folder,
                    secret=secret,
                    ledger=ledger,
                    dataset=DATASET,
                    options=EngineOptions(
                        run_id=sha256(secret).digest()[:16], buckets=1, threads=1
                    ),
                    clock=clock,
                )
                with running:
                    for number, (name, table) in enumerate(running, start=1):
                        release = json.loads(table.schema.metadata[b"dpstream"])["release_index"]
                        shown = values_by_run(table, ["n"], runs=runs, groups=self.groups)
                        seen[start, name, release] = shown
                        if number == most:
                            break
        nothing = np.full((runs, self.groups), np.nan)
        return np.concatenate(
            [
                seen.get((start, query.name, release), nothing)
                for start in range(1 + len(self.kills))
                for query in queries
                for release in range(1, 1 + STEPS)
            ],
            axis=1,
        )


def _arrival(folder: Path, rows: pa.Table, step: int) -> tuple[int, Callable[[], object]]:
    """When the rows of a step come, before its trigger, and the file that then appears, whole."""
    inside = rows["ts"].to_numpy() // _STEP == step

    def arrive() -> None:
        hidden = folder / f".{step}.parquet"
        pq.write_table(rows.filter(pa.array(inside)), hidden)
        hidden.rename(folder / f"{step}.parquet")

    return (step * _STEP + 120) * _MICROS, arrive


def _open_ledger(folder: Path, terms: Terms) -> Path:
    """A new ledger file that holds the terms of the audit's dataset."""
    path = folder / "ledger"
    with closing(Ledger(path)) as ledger:
        ledger.open(DATASET, terms, say=False)
    return path
