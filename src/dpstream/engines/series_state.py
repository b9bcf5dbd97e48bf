"""The state directory of a query that publishes through a time-series mechanism.

run.dps       dataset, facts, run id, a check of the secret, how it began
types.dps     column types of unit and keys
mechanism/    the Runner's own directory: its snapshots and its log of inputs
arrivals.log  how far a live source was read by each step, durable before the step's noise
rows-N.dps    open windows and positions as of step N; the newest two are kept

Rows are saved first and the mechanism after them, so whatever step the mechanism's snapshot is at,
the rows of that step are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpstream.engines.directory import STATE_FORMAT, keep_book, read_about
from dpstream.errors import LedgerError, StateError
from dpstream.mechanisms.runner import Runner
from dpstream.mechanisms.saved_run import SavedRun
from dpstream.privacy.amounts import plain
from dpstream.privacy.charges import Terms
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, mint_run_id, read_packed, write_packed
from dpstream.privacy.state.files import make_directory
from dpstream.privacy.state.secret import beside
from dpstream.stages.series_query import SeriesQuery

Given = Secret | bytes | str | Path | None


@dataclass(kw_only=True)
class SeriesState:
    """A runner, its secret, and (with a folder) what lets a run go on."""

    runner: Runner
    secret: Secret
    folder: Path | None = None
    notes: dict[str, Any]
    arrivals: InputLog | None = None
    shared_ledger: bool = False

    def saved_rows(self) -> dict[str, Any] | None:
        """Open windows and positions as of the runner's step; None at the beginning."""
        step = self.runner.steps_done
        if self.folder is None or not step:
            return None
        path = self.folder / f"rows-{step}.dps"
        if not path.exists():
            raise StateError(
                f"{self.folder} has no {path.name}, which belongs to its mechanism's snapshot; "
                "restore it, or use a new state directory (a new run, charged anew)"
            )
        saved: dict[str, Any] = read_packed(path, kind="open windows")
        return saved

    def save(self, rows: dict[str, Any]) -> None:
        """Rows first, then the mechanism; older rows go."""
        if self.folder is None:
            return
        step = self.runner.steps_done
        write_packed(self.folder / f"rows-{step}.dps", rows, kind="open windows")
        self.runner.save(self.folder / "mechanism")
        known = sorted(self.folder.glob("rows-*.dps"), key=_number)
        for path in known[:-2]:
            path.unlink()
        if self.arrivals is not None:
            self.arrivals.forget_before(min(_number(path) for path in known[-2:]))

    def close(self) -> None:
        """Release the locks."""
        if self.arrivals is not None:
            self.arrivals.close()
        self.runner.close()
        if not self.shared_ledger:
            self.runner.ledger.close()


def open_series(
    query: SeriesQuery,
    *,
    folder: Path | None,
    dataset: str,
    secret: Given,
    ledger: Ledger | str | Path | None,
    notes: dict[str, Any],
    run_id: bytes | None = None,
) -> SeriesState:
    """Begin a run, or go on with the one of a directory; another query or secret is refused."""
    if folder is None:
        kept = Secret.of(secret)
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        agree(book, dataset, query.terms())
        run = mint_run_id() if run_id is None else run_id
        runner = _runner(query, kept, book, dataset, run)
        shared = isinstance(ledger, Ledger)
        return SeriesState(runner=runner, secret=kept, notes=notes, shared_ledger=shared)
    about = read_about(folder)
    if about is None:
        kept = Secret.of(beside(folder) if secret is None else secret)
    else:
        known = secret if isinstance(secret, Secret | bytes) else secret or beside(folder)
        kept = Secret.load(known) if isinstance(known, str | Path) else Secret.of(known)
        _check(folder, about, query, dataset, kept)
    make_directory(folder, mode=0o700)
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger or folder / "ledger")
    keep_book(book, folder)
    agree(book, dataset, query.terms())
    if about is None:
        run = mint_run_id() if run_id is None else run_id
        about = {
            "format": STATE_FORMAT,
            "kind": "series",
            "run": run,
            "facts": query.facts(),
            "dataset": dataset,
            "secret check": kept.key("check", run),
            "ledger place": str(book.place),
            "notes": notes,
        }
        write_packed(folder / "run.dps", about, kind="query run")
    runner = _resumed(folder / "mechanism", query, kept, book, dataset, about["run"])
    try:
        arrivals = InputLog(folder / "arrivals.log", run=about["run"])
    except StateError:
        runner.close()
        if not isinstance(ledger, Ledger):
            book.close()
        raise
    return SeriesState(
        runner=runner,
        secret=kept,
        folder=folder,
        notes=about["notes"],
        arrivals=arrivals,
        shared_ledger=isinstance(ledger, Ledger),
    )


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


def _runner(query: SeriesQuery, secret: Secret, ledger: Ledger, dataset: str, run: bytes) -> Runner:
    return Runner(
        query.mechanism,
        secret=secret,
        run_id=run,
        ledger=ledger,
        dataset=dataset,
        query=query.name,
        clock=query.clock,
    )


def _resumed(
    place: Path, query: SeriesQuery, secret: Secret, ledger: Ledger, dataset: str, run: bytes
) -> Runner:
    """The run's own runner; one that lost its log would put its noise on other data."""
    begun = ledger.newest_step(dataset, run.hex()) >= 0
    if not (place / "run.dps").exists():
        if begun:
            raise StateError(
                f"{place} is gone, but its run was charged; restore it, or use a new state "
                "directory (a new run, charged anew)"
            )
        runner = _runner(query, secret, ledger, dataset, run)
        runner.save(place)
        return runner
    saved = SavedRun.read(place)
    log = None if saved.mismatch(ledger) else saved.open_log(ledger)
    if log is None:
        raise StateError(
            f"{place.parent} is a copy, was moved or rolled back, or is charged to another ledger "
            f"than {ledger.path}: the same noise could meet other data; use the original, or a new "
            "state directory (a new run, charged anew)"
        )
    log.close()
    return Runner.load(place, secret=secret, ledger=ledger, clock=query.clock)


def _check(
    folder: Path, about: dict[str, Any], query: SeriesQuery, dataset: str, secret: Secret
) -> None:
    if secret.key("check", about["run"]) != about["secret check"]:
        raise StateError(f"{folder} was made with another secret; name the right one")
    asked = query.facts() | {"dataset": repr(dataset)}
    kept = about["facts"] | {"dataset": repr(about["dataset"])}
    for name in sorted({*asked, *kept}):
        if asked.get(name) != kept.get(name):
            raise StateError(
                f"{folder} belongs to another query: {name} was {plain(kept.get(name))} and is "
                f"now {plain(asked.get(name))}; use the same query, or a new state directory (a "
                "new run, charged anew)"
            )


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])
