"""The state directory of a query that publishes through a time-series mechanism.

It is its Runner's (`mechanisms/runner.py`): run.dps also holds the query's facts and how it
began, and the log also how far a live source was read by each step and the types of unit and keys.

rows-N.dps    open windows and positions as of step N; the newest two are kept

Rows are saved first and the mechanism after them, so whatever step the mechanism's snapshot is at,
the rows of that step are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpstream.errors import LedgerError, StateError
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.run_directory import (
    ANEW,
    GivenLedger,
    GivenSecret,
    drop_unbegun,
    find_run,
    open_ledger,
)
from dpstream.privacy.state import InputLog, Secret, mint_run_id, read_packed, write_packed
from dpstream.stages.series_query import SeriesQuery

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
        self.runner.save(self.folder)
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
        runner = _runner(query, kept, book, dataset, run_id)
        return SeriesState(runner=runner, secret=kept, notes=notes, shared_ledger=shared)
    drop_unbegun(folder)
    about, kept = find_run(
        folder, kind=KIND, facts=query.facts(), dataset=dataset, given_secret=secret
    )
    book = open_ledger(folder, about, ledger)
    try:
        agree(book, dataset, query.terms())
        if about is None:
            runner = _runner(query, kept, book, dataset, run_id)
            runner.attach(folder, kind=KIND, more={"facts": query.facts(), "notes": notes})
            try:
                runner.save(folder)
            except BaseException:
                runner.close()
                raise
        else:
            runner = Runner.load(folder, secret=kept, ledger=book, clock=query.clock)
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
    query: SeriesQuery, secret: Secret, ledger: Ledger, dataset: str, run_id: bytes | None
) -> Runner:
    return Runner(
        query.mechanism,
        secret=secret,
        run_id=mint_run_id() if run_id is None else run_id,
        ledger=ledger,
        dataset=dataset,
        query=query.name,
        clock=query.clock,
    )


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])
