"""While queries run: progress, an orderly stop on SIGINT or SIGTERM, and what they were charged."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from dpstream.cli.output import INTERRUPTED, note, note_counts, note_line, terminal_progress
from dpstream.engines.clock import SystemClock
from dpstream.privacy.amounts import show
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import spent_and_left
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.query.query import Query
from dpstream.session import Run
from dpstream.session.budget import AnyQuery
from dpstream.session.start import first_notices

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OPERATOR_ONLY = "operator only, not private"
Books = Ledger | LedgerPlace
"""A ledger, or the place of one that may not be there yet."""


class Stopper(SystemClock):
    """The machine's clock, which also tells waiting queries that a signal came.

    The handler itself only counts: anything with a lock may be held by what it interrupts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signals = 0
        self.reload = threading.Event()
        """Set by SIGHUP: the pipeline file is to be taken up anew."""

    def wait(self, until: int, stop: Event) -> None:
        """Sleep for a moment, or stop."""
        if self.signals:
            stop.set()
        else:
            super().wait(until, stop)

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Signals ask for a stop while this lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def reload_on_hangup(self) -> Iterator[None]:
        """SIGHUP asks for a reload while this lasts, unless it is ignored (`nohup`)."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            yield
            return
        terminal = os.isatty(2)

        def hung_up(number: int, frame: FrameType | None) -> None:
            if terminal and not os.isatty(2):  # its terminal is gone
                self.signals += 1
            self.reload.set()

        before = signal.signal(signal.SIGHUP, hung_up)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            os._exit(INTERRUPTED)  # a run survives a kill at any moment
        os.write(2, note_line("stopping at the next occasion; once more to leave at once"))


def is_unfinished(runs: Iterable[Run]) -> bool:
    """Is there anything left to publish?"""
    return any(run.steps is None or run.steps_done < run.steps for run in runs)


@contextmanager
def progress(runs: list[Run]) -> Iterator[Callable[[], None]]:
    """A callback that draws how far the runs are, and what they have read."""
    steps = [run.query.schedule.steps for run in runs]
    total = None if None in steps else sum(step or 0 for step in steps)
    columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
    with terminal_progress(*columns) as bar:
        task = bar.add_task("triggers", total=total, seen="")

        def update() -> None:
            if bar.disable:
                return
            done = sum(run.steps_done for run in runs)
            most = _most(runs)
            seen = ", ".join(f"{most[name]:,} {name}" for name in ("read", "late", "rejected"))
            bar.update(task, completed=done, seen=f"{_OPERATOR_ONLY}: {seen}")

        yield update


def tell_beginnings(runs: Iterable[Run]) -> None:
    """Say, at their first start, which runs begin later than asked, or take over from others."""
    for run in runs:
        for words in first_notices(run):
            note(words)


def tell_operator(runs: list[Run], places: dict[str, Path | None]) -> None:
    """What became of the rows, and where those that could not be used are."""
    most = _most(runs)
    note_counts(
        f"{_OPERATOR_ONLY}: {most['read']:,} rows read since this start, {most['outside']:,} "
        "outside the range, "
        f"{most['late']:,} late, {most['rejected']:,} rejected"
    )
    for name, reason in {n: r for run in runs for n, r in run.operator.quarantined.items()}.items():
        note(f"{_OPERATOR_ONLY}: {name} is quarantined, none of its rows is counted: {reason}")
    stale = {name: why for run in runs for name, why in run.operator.stale_tables.items()}
    for name, reason in stale.items():
        note(f"{_OPERATOR_ONLY}: the public table {name} could not be read anew: {reason}")
    for run in runs:
        aside, place = run.operator.rejected_rows, places[run.query.name]
        if aside:
            where = f"in {place}" if place is not None else "lost without --state"
            first = run.operator.latest[0]
            note_counts(
                f"{_OPERATOR_ONLY}: {run.query.name} set aside {aside:,} dead letters ({where}); "
                f"such as {first.where}: {first.reason}"
            )


def tell_lag(runs: list[Run], starved: list[str]) -> None:
    """How far each of several live queries has read, and how long its releases took."""
    for run in runs if len(runs) > 1 else ():
        if not run.live:
            continue
        seen, name = run.operator, run.query.name
        note_counts(
            f"{_OPERATOR_ONLY}: {name} has read {seen.read:,} rows; its slowest release was out "
            f"{seen.worst_lag_seconds:.3g} s after its trigger"
        )
        if name in starved:
            note(f"{_OPERATOR_ONLY}: {name} has read nothing, and others over its source have")


def _most(runs: list[Run]) -> dict[str, int]:
    """The largest count of any run: queries over one source see the same rows."""
    seen = [run.operator.counts() for run in runs]
    return {name: max(one[name] for one in seen) for name in seen[0]}


def book_of(books: Books, dataset: str) -> dict[str, Any] | None:
    """A dataset's book as reported; None if it is not open."""
    if isinstance(books, Ledger):
        reports = books.report()
    else:  # looking makes no file
        with closing(Ledger(books if books.exists() else None)) as ledger:
            reports = ledger.report()
    return next((report for report in reports if report["dataset"] == dataset), None)


def charged_runs(books: Books, dataset: str) -> dict[str, str]:
    """The runs that a dataset's book was charged for, and their queries."""
    book = book_of(books, dataset)
    return {} if book is None else {line["run"]: line["query"] for line in book["spent_on"]}


def tell_charges(
    queries: Sequence[AnyQuery], before: Mapping[str, str], books: Books, dataset: str
) -> int:
    """Say what was charged since `before`; returns how many runs were charged."""
    book, now = book_of(books, dataset), charged_runs(books, dataset)
    names = [query for run, query in now.items() if run not in before]
    if book is None:
        note("nothing was charged")
        return 0
    amounts = ", ".join(
        f"{cost_in_words(query)} for {query.name!r}" for query in queries if query.name in names
    )
    what = f"charged to the book {dataset!r}: {amounts}"
    if not amounts:
        what = f"nothing new was charged to the book {dataset!r}"
    note(f"{what}; {spent_and_left(book)}")
    return len(names)


def cost_in_words(query: AnyQuery) -> str:
    """What a query is charged."""
    if isinstance(query, Query):
        return f"epsilon = {show(query.epsilon)}, delta = {show(query.delta)}"
    terms = query.mechanism.terms()
    return f"{terms.measure} = {show(terms.total)} within any {terms.window or 1} windows"
