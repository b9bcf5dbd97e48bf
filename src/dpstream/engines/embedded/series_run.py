"""Run a query through a time-series mechanism: rows to histograms, one window a step.

Rows are read as the embedded engine reads them, by event time from files and by the clock from a
live source. Each window is handed to the mechanism's Runner when it closes; the Runner logs,
charges and draws. So a kill loses nothing here either: rows and mechanism go on from one snapshot,
the steps after it are taken again, and the Runner publishes for them what it has published before.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.engines.chunks import RejectHandler
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.embedded.arrivals import finish_reading
from dpstream.engines.embedded.step_rows import FileInput, LiveInput, RunSources, check_columns
from dpstream.engines.query_directory import read_types, write_types
from dpstream.engines.query_run import (
    EngineOptions,
    IteratedRun,
    known_types,
    refuse_endless_files,
    refuse_shared_noise,
    run_tag,
)
from dpstream.errors import LedgerError, ServerUnreachable, StateError
from dpstream.group_by.release_table import series_schema, series_table
from dpstream.group_by.step_counts import StepCounts
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, read_packed, write_packed
from dpstream.privacy.state.durable_files import writing
from dpstream.privacy.state.run_directory import (
    ANEW,
    GivenLedger,
    GivenSecret,
    drop_unbegun,
    find_run,
    open_ledger,
    read_about,
)
from dpstream.query.series_query import SeriesQuery
from dpstream.records import CommittingSource, Release, Sink, Source, fence
from dpstream.rows.row_batch import RowSlice

# The state directory of a query that publishes through a time-series mechanism.
#
# It is its Runner's (`mechanisms/runner.py`): run.dps also holds the query's facts and how it
# began, and the log also how far a live source was read by each step and the types of unit and
# keys.
#
# rows-N.dps    open windows and positions as of step N; the newest two are kept
#
# Rows are saved first and the mechanism after them, so whatever step the mechanism's snapshot is
# at, the rows of that step are there.

KIND = "series query"


@dataclass(kw_only=True)
class SeriesState:
    """A runner, its secret, and (with a folder) what lets a run go on."""

    runner: Runner
    secret: Secret
    folder: Path | None = None
    notes: dict[str, Any]
    shared_ledger: bool = False

    @property
    def log(self) -> InputLog | None:
        """What each step has read; None without a folder."""
        return None if self.runner.directory is None else self.runner.directory.log

    def saved_rows(self) -> dict[str, Any] | None:
        """Open windows and positions as of the runner's step; None at the beginning."""
        step = self.runner.steps_done
        if self.folder is None or not step:
            return None
        path = self.folder / f"rows-{step}.dps"
        if not path.exists():
            raise StateError(
                f"{self.folder} has no {path.name}, which belongs to its mechanism's snapshot; "
                f"restore it, or {ANEW}"
            )
        saved: dict[str, Any] = read_packed(path, kind="open windows")
        if (saved["run"], saved["step"]) != (self.runner.run_id, step):
            raise StateError(f"{path} is another run's or step's; restore this one's, or {ANEW}")
        return saved

    def save(self, rows: dict[str, Any]) -> None:
        """Rows first, then the mechanism; older rows go."""
        if self.folder is None:
            return
        step = self.runner.steps_done
        rows = rows | {"run": self.runner.run_id, "step": step}
        write_packed(self.folder / f"rows-{step}.dps", rows, kind="open windows")
        self.runner.save()
        for path in sorted(self.folder.glob("rows-*.dps"), key=_number)[:-2]:
            path.unlink()

    def close(self) -> None:
        """Release the locks."""
        self.runner.close()
        if not self.shared_ledger:
            self.runner.ledger.close()


def open_series(
    query: SeriesQuery,
    *,
    folder: Path | None,
    dataset: str,
    secret: GivenSecret,
    ledger: GivenLedger,
    notes: dict[str, Any],
    run_id: bytes | None = None,
) -> SeriesState:
    """Begin a run, or go on with the one of a directory; another query or secret is refused."""
    shared = isinstance(ledger, Ledger)
    if folder is None:
        kept = Secret.of(secret)
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        agree(book, dataset, query.terms())
        runner = _runner(query, kept, book, dataset, run_id=run_id)
        return SeriesState(runner=runner, secret=kept, notes=notes, shared_ledger=shared)
    drop_unbegun(folder)
    about, kept = find_run(
        folder,
        kind=KIND,
        facts=query.facts(),
        names=query.names_of_keys(),
        dataset=dataset,
        given_secret=secret,
    )
    book = open_ledger(folder, about, ledger)
    try:
        agree(book, dataset, query.terms())
        if about is None:
            runner = _runner(query, kept, book, dataset, run_id=run_id)
            runner.attach(folder, kind=KIND, more={"facts": query.facts(), "notes": notes})
            try:
                runner.save()
            except BaseException:
                runner.close()
                raise
        else:
            runner = _runner(query, kept, book, dataset, state=folder)
            notes = about["notes"]
    except BaseException:
        if not shared:
            book.close()
        raise
    return SeriesState(runner=runner, secret=kept, folder=folder, notes=notes, shared_ledger=shared)


def agree(ledger: Ledger, dataset: str, terms: Terms) -> None:
    """Open the book, or see that its steps are this query's: charges are added step by step."""
    book = ledger.terms(dataset)
    if book is None:
        ledger.open(dataset, terms)
    elif book.unit != "user" and book.clock != terms.clock:
        raise LedgerError(
            f"the book of {dataset!r} counts steps that are {book.clock}; this query's are "
            f"{terms.clock}; use the same windows, time and unit, or another dataset name"
        )


def _runner(
    query: SeriesQuery,
    secret: Secret,
    ledger: Ledger,
    dataset: str,
    *,
    state: Path | None = None,
    run_id: bytes | None = None,
) -> Runner:
    return Runner(
        query.mechanism,
        state=state,
        secret=secret,
        ledger=ledger,
        dataset=dataset,
        name=query.name,
        clock=query.clock,
        run_id=run_id,
    )


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


@dataclass(kw_only=True)
class SeriesRun(IteratedRun):
    """A running query through a mechanism: a table per window."""

    query: SeriesQuery
    aside: RejectHandler
    sink: Sink | None = None
    history: Source | None = None
    folder: Path | None = None
    secret: Secret | bytes | str | Path | None = None
    ledger: Ledger | str | Path | None = None
    dataset: str = "stream"
    clock: Clock = field(default_factory=SystemClock)
    options: EngineOptions = field(default_factory=EngineOptions)
    steps_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder, kind=KIND)
        self._now = self.clock.now() if kept is None else kept["notes"]["now"]
        refuse_endless_files(query_is_live=self.query.live, source_is_live=self.live)
        refuse_shared_noise(self.options.run_id, self.folder, self.ledger)
        self.query = self.query.starting(self._now)
        self._sources = RunSources(source=self.source, history=self.history)
        for source in (self.source, self.history):
            if source is not None:
                check_columns(source, self.query)

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""
        types = known_types(self.query, self.folder, self._sources.schemas())
        return series_schema(self.query, types)

    @property
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""
        return self.source is not None and not self.source.bounded

    def erase_unit(self, unit: Any) -> int:
        """Nothing: of a unit only a keyed mark is kept, in windows that are not published yet.

        It is what lets no second row of the unit in, and goes with the window.
        """
        return 0

    def _releases(self) -> Generator[pa.Table, None, None]:
        try:
            state = open_series(
                self.query,
                folder=self.folder,
                dataset=self.dataset,
                secret=self.secret,
                ledger=self.ledger,
                notes={"now": self._now, "partitions": self._sources.partitions()},
                run_id=self.options.run_id,
            )
            try:
                self._sources.refuse_others(state.notes["partitions"])
                with writing(self.folder or Path()):
                    yield from self._steps(state)
            finally:
                state.close()
        finally:
            for part in (self.source, self.history, self.sink):
                if part is not None:
                    part.close()

    def _steps(self, state: SeriesState) -> Iterator[pa.Table]:
        """Every step from where the run stands: rows, log, noise, sink, snapshot."""
        counts, run = self._counts(state), state.runner
        files, live = self._sources.inputs(
            counts.reader, self.aside, self.clock, self._stop, memory=self.options.memory
        )
        saved, tried = state.saved_rows(), False
        if saved is not None:
            counts.load(saved["counts"])
            if live is not None:
                live.positions = dict(saved["positions"])
        steps, self.steps_done = self.query.schedule.steps, run.steps_done
        settled: dict[str, Any] | None = None
        tag = run_tag(run.run_id)
        fence(self.sink, self.query.name, tag)
        try:
            while steps is None or run.steps_done < steps:
                step = run.steps_done
                pieces = self._rows(step, files, live, state)
                if pieces is None:
                    break
                counts.take(pieces)
                if not tried:
                    counts.reader.settle_types()
                    _ = series_schema(self.query, counts.reader.types)
                tried = True
                moved = None if live is None else live.moved()
                found = run.step(counts.counts(step), positions=moved)
                if run.steps_done == steps:
                    found = [*found, *run.finish()]
                tables = self._delivered(found, step, tag, counts)
                if live is not None:
                    live.released(step)
                yield from tables
                counts.evict(step)
                self.steps_done = run.steps_done
                if self.steps_done % self.options.snapshot_every == 0 or self.steps_done == steps:
                    state.save(_snapshot(counts, live))
                    settled = self._settle(settled, live)
            if self.steps_done and self.steps_done != steps:
                state.save(_snapshot(counts, live))
            if self.steps_done == steps:
                finish_reading(self.source)
        finally:
            if files is not None:
                files.close()
            if live is not None:
                live.close()

    def _counts(self, state: SeriesState) -> StepCounts:
        """What counts rows, with the column types that the run has met."""
        counts, log = StepCounts(self.query, state.secret, state.runner.run_id), state.log
        if log is not None:
            counts.reader.types = read_types(log)
            counts.reader.learned = lambda types: write_types(log, types)
        return counts

    def _settle(
        self, before: dict[str, Any] | None, live: LiveInput | None
    ) -> dict[str, Any] | None:
        """No recovery needs rows from before the last but one snapshot: the source may drop them.

        Returns the positions of this snapshot, for the next time.
        """
        if live is None or self.folder is None or not isinstance(self.source, CommittingSource):
            return None
        if before is not None:
            self.source.commit(before)
        return dict(live.positions)

    def _rows(
        self, step: int, files: FileInput | None, live: LiveInput | None, state: SeriesState
    ) -> list[RowSlice] | None:
        """The rows of a step; None if the run was stopped."""
        pieces: list[RowSlice] = []
        if live is not None:
            logged = None if state.log is None else state.log.positions.get(step)
            found = live.take(step) if logged is None else live.replay(step, logged)
            if found is None:
                return None
            pieces += found
        elif self._stop.is_set():
            return None
        return pieces if files is None else pieces + files.take(step)

    def _delivered(
        self, releases: list[Release], step: int, tag: str, counts: StepCounts
    ) -> list[pa.Table]:
        """Each release as a table, once every sink has it."""
        tables = []
        for release in releases:
            table = series_table(self.query, release, step, tag, counts.reader)
            if self.sink is not None:
                try:
                    self.sink.write(self.query.name, release.step, 1, table)
                except ServerUnreachable:
                    raise
                except OSError as error:
                    raise StateError(
                        f"the sink cannot be written: {error}; mend that and run again: nothing is "
                        "lost"
                    ) from error
            tables.append(table)
        return tables


def _snapshot(counts: StepCounts, live: LiveInput | None) -> dict[str, Any]:
    positions = {} if live is None else dict(live.positions)
    return {"counts": counts.save(), "positions": positions}
