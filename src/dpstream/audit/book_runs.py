"""Run a whole book many times: several queries and mechanisms on one dataset, killed and resumed.

Nothing stands in for anything. The book is a ledger file; the parts have one secret and a state
directory each. A part is broken off after some tables, closed, and begun again by a new
object that finds the ledger and the directory as they were left. What is seen is all that all parts
have published, start by start: a table that is shown again after a restart is seen again, so that
noise drawn anew would be averaged, and noise that meets other data would be subtracted.

One book is as many runs as it has groups, as in `QueryRuns` and `SqlRuns`, which say why that will
do: a restart is public, and what a part shows of a group depends on that group's rows alone. A unit
is in the groups of one run, and all its rows are protected together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from dpstream.audit.query_runs import Unseen
from dpstream.audit.query_samplers import HOUR, STEPS, Scenario, by_run, table_of
from dpstream.connectors.sources.table import TableSource
from dpstream.engines.local import LocalRun
from dpstream.engines.query_run import Options
from dpstream.engines.series import SeriesRun
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.from_rows import bounded_counts
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.records import Reals
from dpstream.session.budget import AnyQuery

DATASET = "audit"

Tables: TypeAlias = Generator[Reals, None, None]
"""What is published, table by table: runs x outputs."""
Rows: TypeAlias = Callable[[pa.Table, int], pa.Table]
"""What a source holds at each start, from all rows and the number of the start."""


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """A part of a book at work: which run it is, and where."""

    rows: pa.Table
    runs: int
    groups: int
    folder: Path
    ledger: Path
    secret: bytes
    run_id: bytes
    """Fixed, so that an audit can be made again."""


class Part(Protocol):
    """Something that publishes and charges the book."""

    @property
    def kills(self) -> tuple[int, ...]:
        """How many tables are seen before each kill; after the last one it runs to its end."""

    def begin(self, at: Sitting, start: int) -> Tables:
        """Begin, or go on where a directory was left: each table, as runs x outputs."""


@dataclass(frozen=True, kw_only=True)
class QueryPart:
    """A GROUP BY, or SQL through a mechanism, with a state directory."""

    query: Callable[[int], AnyQuery]
    """From the number of runs."""
    columns: tuple[str, ...] = ("n",)
    kills: tuple[int, ...] = ()
    snapshot_every: int = 10
    """More than there are steps: what was shown before a kill is shown again."""
    engine: Callable[..., LocalRun | SeriesRun] = LocalRun
    rows: Rows = lambda table, start: table

    def begin(self, at: Sitting, start: int) -> Tables:
        """One start of the run."""
        options = Options(
            run_id=at.run_id, buckets=1, threads=1, snapshot_every=self.snapshot_every
        )
        run = self.engine(
            query=self.query(at.runs),
            source=TableSource(self.rows(at.rows, start)),
            aside=Unseen(),
            folder=at.folder,
            secret=at.secret,
            ledger=at.ledger,
            dataset=DATASET,
            options=options,
        )
        try:
            for table in run:
                yield by_run(table, self.columns, runs=at.runs, groups=at.groups)
        finally:
            run.close()


@dataclass(frozen=True, kw_only=True)
class MechanismPart:
    """A mechanism that is fed counts, a bin for each group, in a run that can be repeated."""

    mechanism: Mechanism
    clock: str
    """What one step is, in the words of the book."""
    steps: int
    kills: tuple[int, ...] = ()

    def begin(self, at: Sitting, start: int) -> Tables:
        """From the first step, whatever was shown before; at most one row of a unit enters one."""
        counts = bounded_counts(
            steps=at.rows["ts"].to_numpy() // (24 * HOUR // STEPS),
            users=at.rows["user"].to_numpy(),
            bins=at.rows["key"].to_numpy(),
            slots=self.steps,
            domain=at.runs * at.groups,
            rows_per_user=1,
        )
        with self._runner(at) as runner:
            for releases in runner.feed(counts):
                for release in releases:
                    yield release.values.reshape(at.runs, at.groups)
            for release in runner.finish():
                yield release.values.reshape(at.runs, at.groups)

    def _runner(self, at: Sitting) -> Runner:
        if not (at.folder / "run.dps").exists():
            made = Runner(
                self.mechanism,
                secret=at.secret,
                run_id=at.run_id,
                ledger=Ledger(at.ledger),
                dataset=DATASET,
                clock=self.clock,
            )
            made.save(at.folder)
            return made
        return Runner.load(at.folder, secret=at.secret, ledger=at.ledger, clock=self.clock)


LedgerOf: TypeAlias = Callable[[Path, int], Path]
"""The ledger file of a part, from the book's own file and the number of the part."""


@dataclass(frozen=True, kw_only=True)
class BookRuns:
    """A sampler over a book with these terms; parts take turns, start by start."""

    terms: Terms
    parts: tuple[Part, ...]
    groups: int = 1
    most: int = 4_000
    """Runs in one book: a statement has an upper limit."""
    ledger: LedgerOf = lambda path, number: path

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """All that is published of each run, NaN where a group is not shown."""
        shares = [min(self.most, runs - done) for done in range(0, runs, self.most)]
        return np.concatenate(
            [
                self._once(data, share, number.to_bytes(4, "big") + secret[4:])
                for number, share in enumerate(shares)
            ]
        )

    def _once(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        rows, seen = table_of(data, runs, self.groups, windows=False), list[Reals]()
        with TemporaryDirectory() as place:
            book = Path(place) / "ledger"
            with closing(Ledger(book)) as opened:
                opened.open(DATASET, self.terms)
            ledgers: dict[int, Path] = {}
            for start, number in self._turns():
                if number not in ledgers:
                    ledgers[number] = self.ledger(book, number)
                at = Sitting(
                    rows=rows,
                    runs=runs,
                    groups=self.groups,
                    folder=Path(place) / f"part-{number}",
                    ledger=ledgers[number],
                    secret=secret,
                    run_id=sha256(secret + bytes([number])).digest()[:16],
                )
                part = self.parts[number]
                with closing(part.begin(at, start)) as tables:
                    seen += islice(tables, *part.kills[start : start + 1] or (None,))
        return np.concatenate(seen, axis=1)

    def _turns(self) -> Iterator[tuple[int, int]]:
        """(start, part): the first starts of all parts, then the second ones, and so on."""
        for start in range(1 + max(len(part.kills) for part in self.parts)):
            for number, part in enumerate(self.parts):
                if start <= len(part.kills):
                    yield start, number
