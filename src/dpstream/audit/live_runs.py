"""Run several queries over one live source by a clock that the audit turns, killed and resumed.

A directory grows while they run: the file of each step is moved into it when its time has come.
Queries, book, secret and states are those of `dpstream.run_all`, which begins them all again after
a kill; by then some steps are known and read again, and the others are read by the clock. What is
seen is every table of every query, start by start; one that a kill came before is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.audit.book_runs import DATASET
from dpstream.audit.query_samplers import HOUR, STEPS, Scenario, by_run, table_of
from dpstream.engines.query_run import Options
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.records import Reals
from dpstream.session.start import run_all
from dpstream.stages.query import Query

_STEP = 24 * HOUR // STEPS
_MICROS = 1_000_000


class TurnedClock:
    """Time that moves only while somebody waits, from one event to the next."""

    real_time = False

    def __init__(self, events: list[tuple[int, Callable[[], object]]]) -> None:
        self._time, self._events, self._lock = 0, sorted(events, key=lambda one: one[0]), Lock()

    def now(self) -> int:
        """Microseconds since 1970."""
        return self._time

    def wait(self, until: int, stop: Event) -> None:
        """Move on to the next event, or to the time that is waited for."""
        with self._lock:
            if self._events and self._events[0][0] <= until:
                time, action = self._events.pop(0)
                self._time = max(self._time, time)
                action()
            else:
                self._time = max(self._time, until)


@dataclass(frozen=True, kw_only=True)
class LiveRuns:
    """A sampler over queries that share a live source, a book and their triggers."""

    terms: Terms
    queries: Callable[[int], list[Query]]
    """From the number of runs; all publish the column "n" after each of the day's steps."""
    groups: int = 1
    kills: tuple[int, ...] = ()
    """How many tables of any query are seen before each kill."""

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """All that is published of each run."""
        queries, rows = self.queries(runs), table_of(data, runs, self.groups, windows=False)
        seen: dict[tuple[int, str, int], Reals] = {}
        with TemporaryDirectory() as place:
            source, folder = Path(place) / "in", Path(place) / "state"
            source.mkdir()
            with closing(Ledger(Path(place) / "ledger")) as book:
                book.open(DATASET, self.terms)
            clock = TurnedClock([_arrival(source, rows, step) for step in range(STEPS)])
            for start, most in enumerate((*self.kills, None)):
                running = run_all(
                    queries,
                    source=source,
                    live=True,
                    checkpoint_location=folder,
                    secret=secret,
                    ledger=Path(place) / "ledger",
                    dataset=DATASET,
                    options=Options(run_id=sha256(secret).digest()[:16], buckets=1, threads=1),
                    clock=clock,
                )
                with running:
                    for number, (name, table) in enumerate(running, start=1):
                        release = json.loads(table.schema.metadata[b"dpstream"])["release_index"]
                        shown = by_run(table, ["n"], runs=runs, groups=self.groups)
                        seen[start, name, release] = shown
                        if number == most:
                            break
        nothing = np.full((runs, self.groups), np.nan)
        places = [
            (start, query.name, release)
            for start in range(1 + len(self.kills))
            for query in queries
            for release in range(1, 1 + STEPS)
        ]
        return np.concatenate([seen.get(place, nothing) for place in places], axis=1)


def _arrival(folder: Path, rows: pa.Table, step: int) -> tuple[int, Callable[[], object]]:
    """When the rows of a step come, before its trigger, and the file that then appears, whole."""
    inside = rows["ts"].to_numpy() // _STEP == step

    def arrive() -> None:
        hidden = folder / f".{step}.parquet"
        pq.write_table(rows.filter(pa.array(inside)), hidden)
        hidden.rename(folder / f"{step}.parquet")

    return (step * _STEP + 120) * _MICROS, arrive
