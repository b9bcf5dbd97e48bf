"""Run a query through a time-series mechanism: rows to histograms, one window a step.

Rows are read as for a GROUP BY, by event time from files and by the clock from a live source. Each
window is handed to the mechanism's Runner when it closes; the Runner logs, charges and draws. So a
kill loses nothing here either: rows and mechanism go on from one snapshot, the steps after it are
taken again, and the Runner publishes for them what it has published before.

The state directory is the Runner's (`mechanisms/runner.py`): run.dps also holds the query's facts
and how it began, and the log also how far a live source was read by each step and the types of unit
and keys. `rows-N.dps` has the open windows and positions as of step N; the newest two are kept.
Rows are saved first and the mechanism after them, so whatever step the mechanism's snapshot is at,
the rows of that step are there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.engines.embedded.arrivals import finish_reading
from dpstream.engines.embedded.step_rows import LiveInput, RunSources, read_step
from dpstream.engines.query_run import Run
from dpstream.engines.run_storage import keep_types, known_types, run_tag
from dpstream.engines.sender import explain_sink_error
from dpstream.errors import LedgerError, StateError
from dpstream.group_by.release_table import series_schema, series_table
from dpstream.group_by.series_counts import StepCounts
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
from dpstream.records import CommittingSource, Release, fence

KIND = "series query"


@dataclass(kw_only=True, repr=False, eq=False)
class SeriesRun(Run):
    """A running query through a mechanism: a table per window."""

    query: SeriesQuery
    _settled: dict[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._begin(None if self.folder is None else read_about(self.folder, kind=KIND))
        self._sources = RunSources(source=self.source, history=self.history)
        self._sources.check_columns(self.query)

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""
        types = known_types(self.query, self.folder, self._sources.schemas())
        return series_schema(self.query, types)

    def erase_unit(self, unit: Any) -> int:
        """Nothing: of a unit only a keyed hash is kept, in windows that are not published yet.

        It is what lets no second row of the unit in, and goes with the window.
        """
        return 0

    def _releases(self) -> Generator[pa.Table, None, None]:
        with ExitStack() as undo:
            undo.callback(self._close_ends)
            state = open_series(
                self.query,
                folder=self.folder,
                dataset=self.dataset,
                secret=self.secret,
                ledger=self.ledger,
                notes={"now": self._now, "partitions": self._sources.partitions()},
                run_id=self.options.run_id,
            )
            undo.callback(state.close)
            self._sources.refuse_others(state.notes["partitions"])
            undo.enter_context(writing(self.folder or Path()))
            yield from self._publish_steps(state, undo)

    def _publish_steps(self, state: SeriesState, undo: ExitStack) -> Iterator[pa.Table]:
        """Every step from where the run stands: rows, log, noise, sink, snapshot."""
        counts, run = self._counts(state), state.runner
        files, live = self._sources.inputs(
            counts.reader, self.operator, self.clock, self._stop, memory=self.options.memory
        )
        for rows in (files, live):
            if rows is not None:
                undo.callback(rows.close)
        saved = state.saved_rows()
        if saved is not None:
            counts.load(saved["counts"])
            if live is not None:
                live.positions = dict(saved["positions"])
        steps, self.steps_done = self.query.schedule.steps, run.steps_done
        checked, tag = False, run_tag(run.run_id)
        fence(self.sink, self.query.name, tag)
        while steps is None or self.steps_done < steps:
            step = self.steps_done
            slices = read_step(step, files, live, state.log, self._stop)
            if slices is None:
                break
            counts.take(slices)
            if not checked:
                counts.reader.settle_types()
                series_schema(self.query, counts.reader.types)  # what cannot be published
                checked = True
            positions = None if live is None else live.moved()
            releases = run.step(counts.counts(step), positions=positions)
            if run.steps_done == steps:
                releases = [*releases, *run.finish()]
            tables = [self._send(release, step, tag, counts) for release in releases]
            if live is not None:
                live.note_release(step)
            yield from tables
            counts.evict(step)
            self.steps_done = run.steps_done
            if self.steps_done % self.options.snapshot_every == 0 or self.steps_done == steps:
                state.save(_snapshot(counts, live))
                self._settle(live)
        if self.steps_done == steps:
            finish_reading(self.source)
        elif self.steps_done:
            state.save(_snapshot(counts, live))

    def _counts(self, state: SeriesState) -> StepCounts:
        """What counts rows, with the column types that the run has met."""
        counts = StepCounts(self.query, state.secret, state.runner.run_id)
        if state.log is not None:
            keep_types(counts.reader, state.log)
        return counts

    def _settle(self, live: LiveInput | None) -> None:
        """No recovery needs rows from before the last but one snapshot: they may go."""
        if live is None or self.folder is None or not isinstance(self.source, CommittingSource):
            return
        if self._settled is not None:
            self.source.commit(self._settled)
        self._settled = dict(live.positions)

    def _send(self, release: Release, step: int, tag: str, counts: StepCounts) -> pa.Table:
        """A release as a table, which the sink has."""
        table = series_table(self.query, release, step, tag, counts.reader)
        if self.sink is not None:
            try:
                self.sink.write(self.query.name, release.step, 1, table)
            except OSError as error:
                problem = explain_sink_error(error)
                raise problem from problem.__cause__
        return table


def _snapshot(counts: StepCounts, live: LiveInput | None) -> dict[str, Any]:
    positions = {} if live is None else dict(live.positions)
    return {"counts": counts.save(), "positions": positions}


@dataclass(kw_only=True)
class SeriesState:
    """A runner, its secret, and (with a folder) what lets a run go on."""

    runner: Runner
    secret: Secret
    folder: Path | None
    notes: dict[str, Any]
    shared_ledger: bool

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
        for path in sorted(self.folder.glob("rows-*.dps"), key=_step_of)[:-2]:
            path.unlink()

    def close(self) -> None:
        """Release the locks."""
        self.runner.close()
        if not self.shared_ledger:
            self.runner.ledger.close()


def _step_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


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
    about, shared = None, isinstance(ledger, Ledger)
    if folder is None:
        kept = Secret.of(secret)
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    else:
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
    with ExitStack() as undo:
        if not shared:
            undo.callback(book.close)
        refuse_other_steps(book, dataset, query.terms())
        runner = Runner(
            query.mechanism,
            state=None if about is None else folder,
            secret=kept,
            ledger=book,
            dataset=dataset,
            name=query.name,
            clock=query.clock,
            run_id=run_id,
        )
        if about is not None:
            notes = about["notes"]
        elif folder is not None:
            undo.callback(runner.close)
            runner.attach(folder, kind=KIND, more={"facts": query.facts(), "notes": notes})
            runner.save()
        undo.pop_all()
    return SeriesState(runner=runner, secret=kept, folder=folder, notes=notes, shared_ledger=shared)


def refuse_other_steps(ledger: Ledger, dataset: str, terms: Terms) -> None:
    """Open the book, or see that its steps are this query's: charges are added step by step."""
    book = ledger.terms(dataset)
    if book is None:
        ledger.open(dataset, terms)
    elif book.unit != "user" and book.clock != terms.clock:
        raise LedgerError(
            f"the book of {dataset!r} counts steps that are {book.clock}; this query's are "
            f"{terms.clock}; use the same windows, time and unit, or another dataset name"
        )
