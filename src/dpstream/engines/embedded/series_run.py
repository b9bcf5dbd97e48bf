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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from dpstream.engines.embedded.step_rows import RunInput
from dpstream.engines.query_run import Run
from dpstream.engines.release_sender import explain_sink_error
from dpstream.engines.run_storage import keep_types, known_types, run_tag
from dpstream.errors import LedgerError, StateError
from dpstream.group_by.release_table import series_schema, series_table
from dpstream.group_by.series_counts import StepCounts
from dpstream.mechanisms.runner import Runner, as_begun, mechanism_of
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, read_packed, write_packed
from dpstream.privacy.state.durable_files import wrap_write_errors
from dpstream.privacy.state.run_directory import ANEW, drop_unbegun, read_about
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Release, check_schema, fence

KIND = "series query"


@dataclass(kw_only=True, repr=False, eq=False)
class SeriesRun(Run):
    """A running query through a mechanism: a table per window."""

    query: SeriesQuery
    counts_class: ClassVar[type[StepCounts]] = StepCounts
    _input: RunInput = field(init=False)
    _runner: Runner = field(init=False)
    _saved: dict[str, Any] | None = field(init=False, default=None)
    _settled: dict[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder, kind=KIND)
        if kept is not None:
            mechanism = as_begun(self.query.mechanism, mechanism_of(kept))
            self.query = replace(self.query, mechanism=mechanism)
        self._begin(kept)
        self._input = RunInput(self)

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""
        return series_schema(
            self.query, known_types(self.query, self.folder, self._input.schemas())
        )

    def erase_unit(self, unit: Any) -> int:
        """Erase its dead letters: else only a keyed hash is kept, in windows not published yet.

        It is what lets no second row of the unit in, and goes with the window.
        """
        types = known_types(self.query, self.folder, self._input.schemas())
        self._erase_letters(unit, types[self.query.privacy_unit_column])
        return 0

    def _releases(self) -> Generator[pa.Table, None, None]:
        with ExitStack() as undo:
            undo.callback(self._close_ends)
            secret = self._open_runner(undo)
            undo.enter_context(wrap_write_errors(self.folder or Path()))
            counts = self.counts_class(self.query, secret, self._runner.run_id)
            if self._log is not None:
                keep_types(counts.reader, self._log)
            undo.callback(self._input.close)
            self._input.open(counts.reader)
            yield None
            yield from self._publish_steps(counts)

    def _open_runner(self, undo: ExitStack) -> Secret:
        """Begin a run, or go on with the one of a directory; another query or secret is refused."""
        query, folder = self.query, self.folder
        if folder is not None:
            drop_unbegun(folder)
        about, secret, ledger = self._find_run(KIND, query.facts())
        if not isinstance(self.ledger, Ledger):
            undo.callback(ledger.close)
        refuse_other_steps(ledger, self.dataset, query.terms())
        self._runner = Runner(
            query.mechanism,
            state=None if about is None else folder,
            secret=secret,
            ledger=ledger,
            dataset=self.dataset,
            name=query.name,
            clock=query.clock,
            analyst=self.options.analyst,
            run_id=self.options.run_id,
        )
        undo.callback(self._runner.close)
        if about is not None:
            self._input.refuse_others(about["notes"]["partitions"])
        elif folder is not None:
            notes = {"now": self._now, "partitions": self._input.partitions()}
            self._runner.attach(folder, kind=KIND, more={"facts": query.facts(), "notes": notes})
            self._runner.save()
        return secret

    @property
    def _log(self) -> InputLog | None:
        """What each step has read; None without a folder."""
        return None if self._runner.directory is None else self._runner.directory.log

    def _publish_steps(self, counts: StepCounts) -> Iterator[pa.Table]:
        """Every step from where the run stands: rows, log, noise, sink, snapshot."""
        runner, live = self._runner, self._input.live
        self._load(counts)
        steps, self.steps_done = self.query.schedule.steps, runner.steps_done
        checked, tag = False, run_tag(runner.run_id)
        fence(self.sink, self.query.name, tag)
        while steps is None or self.steps_done < steps:
            step = self.steps_done
            slices = self._input.read(step, self._log)
            if slices is None:
                break
            counts.take(slices)
            if not checked:
                counts.reader.settle_types()
                schema = series_schema(self.query, counts.reader.types)  # what cannot be published
                if not step:
                    check_schema(self.sink, self.query.name, schema)
                checked = True
            releases = runner.step(counts.counts(step), positions=self._input.moved())
            if runner.steps_done == steps:
                releases = [*releases, *runner.finish()]
            tables = [self._send(release, step, tag, counts) for release in releases]
            if live is not None:
                live.note_release(step)
            yield from tables
            counts.evict(step)
            self.steps_done = runner.steps_done
            if self.steps_done % self.options.snapshot_every == 0 or self.steps_done == steps:
                self._save(counts)
                self._settle()
        if self.steps_done == steps:
            self._finish_reading()
        elif self.steps_done:
            self._save(counts)

    def _settle(self) -> None:
        """No recovery needs anything from before the last but one snapshot: it may go."""
        directory, settled = self._runner.directory, self._settled
        if settled is not None:
            if self.live and directory is not None:
                directory.settle(settled["step"], endless=True)
            self._input.settle(settled)
        if self._saved is not None:
            self._settled = self._saved | {"step": self.steps_done}

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

    def _load(self, counts: StepCounts) -> None:
        """Restore open windows and positions as of the runner's step."""
        step = self._runner.steps_done
        if self.folder is None:
            return
        if not step:
            self._input.go_on_from({}, self.folder, self._runner.run_id)
            return
        path = self.folder / f"rows-{step}.dps"
        if not path.exists():
            raise StateError(
                f"{self.folder} has no {path.name}, which belongs to its mechanism's snapshot; "
                f"restore it, or {ANEW}"
            )
        saved: dict[str, Any] = read_packed(path, kind="open windows")
        if (saved["run"], saved["step"]) != (self._runner.run_id, step):
            raise StateError(f"{path} is another run's or step's; restore this one's, or {ANEW}")
        counts.load(saved["counts"])
        known = ("step", "positions", "finished", "tables")
        self._settled = {key: saved[key] for key in known if key in saved}
        self._input.go_on_from(saved, self.folder, self._runner.run_id)

    def _save(self, counts: StepCounts) -> None:
        """Rows first, then the mechanism; older rows go."""
        if self.folder is None:
            return
        run, step = self._runner.run_id, self._runner.steps_done
        self._saved = self._input.save()
        rows = {"counts": counts.save(), **self._saved}
        path = self.folder / f"rows-{step}.dps"
        write_packed(path, rows | {"run": run, "step": step}, kind="open windows")
        self._runner.save()
        for path in sorted(self.folder.glob("rows-*.dps"), key=_step_of)[:-2]:
            path.unlink()


def _step_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


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
