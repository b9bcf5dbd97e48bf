"""The budget book: durable, append-only, shared by every query on a dataset; it refuses overspend.

A ledger file holds one book per dataset. Each charge is checked against the book under the file's
lock and fsynced before the caller may draw noise. Several processes may charge at once; a kill
leaves either the whole charge or none. Without a path the book lives in memory, until a run that
is kept is charged to it: then it moves to a file, for all that share it (`Ledger.persist`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.errors import InvalidParameter, LedgerError, NewBook, NoiseReuse, StateError
from dpstream.privacy.amounts import GRID
from dpstream.privacy.ledger.book import DigestAt, report
from dpstream.privacy.ledger.charges import Charge, Terms
from dpstream.privacy.ledger.refusals import in_words, protected, refuse_overspend
from dpstream.privacy.ledger.store import KnownRun, LedgerStore
from dpstream.privacy.state.journal import Record


class Ledger:
    """Books by dataset, in a file or (path None) in memory."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._shelf = LedgerStore(self.path)

    def open(self, dataset: str, terms: Terms) -> None:
        """Create the dataset's book, or check that it has these very terms."""
        with self._shelf.current():
            self._shelf.open_or_agree(dataset, terms)

    def admit(self, dataset: str, asked: Terms, who: str) -> None:
        """Open a book with a mechanism's own terms, or see that the book counts what it spends.

        Window and total may differ: every charge is judged by the book's. Where users are protected
        the unit, its period and its time zone are the book's too: a charge counts once for each
        unit, so a mechanism of single events, or of other periods, would be counted for too little.
        """
        book = self.terms(dataset)
        if book is None:
            self.open(dataset, asked)
        elif "user" in (book.unit, asked.unit) and protected(book) != protected(asked):
            raise LedgerError(
                f"the book of {dataset!r} protects {in_words(book)}; {who} protects "
                f"{in_words(asked)}; use the book's, or another dataset name"
            )
        elif book.unit != "user" and book.clock != asked.clock:
            raise LedgerError(
                f"the book of {dataset!r} counts steps that are {book.clock}; those of {who} are "
                f"{asked.clock}; steps of two lengths cannot be added up: use another dataset name"
            )
        elif (book.measure, book.change) != (asked.measure, asked.change):
            raise LedgerError(
                f"the book of {dataset!r} counts {book.measure} for events that change "
                f"{book.change}; {who} spends {asked.measure} for events that change "
                f"{asked.change}; open another book for it"
            )

    def terms(self, dataset: str) -> Terms | None:
        """The terms of a dataset's book, if there is one."""
        with self._shelf.current():
            book = self._shelf.books.get(dataset)
            return book.terms if book else None

    def register(self, dataset: str, run: str, fingerprint: str) -> None:
        """Tie a run id to everything that fixes its releases; another fingerprint is refused."""
        with self._shelf.current():
            self._shelf.book(dataset)
            known = self._shelf.runs.get(run)
            if known is None or not known.fingerprint:
                record = {"dataset": dataset, "run": run, "fingerprint": fingerprint}
                self._shelf.note(record)
            elif (known.dataset, known.fingerprint) != (dataset, fingerprint):
                raise NoiseReuse(
                    f"run {run[:8]} was started with other parameters or data; the same noise "
                    "must not serve both; start a new run"
                )

    def known(self, run: str) -> KnownRun:
        """What is known of a run besides its charges."""
        with self._shelf.current():
            return self._shelf.runs.get(run, KnownRun()).as_of_now()

    def begin(self, dataset: str, run: str, epoch: str, *, after: str) -> None:
        """Note that a process starts, or goes on with, a run; another one must stop.

        `after`: the epoch that was the newest when the process looked. If another has come since,
        it is the process that must not go on.
        """
        with self._shelf.current():
            self._refuse_overtaken(run, after)
            self._shelf.note({"dataset": dataset, "run": run, "epoch": epoch})

    def reach(
        self, dataset: str, run: str, last: int, digests: list[str], *, epoch: str, types: str
    ) -> None:
        """Note the input of the steps up to `last`, before noise is drawn for them.

        Refused if another process has begun an epoch of the run since `epoch`.
        """
        with self._shelf.current():
            self._refuse_overtaken(run, epoch)
            record: Record = {"dataset": dataset, "run": run, "reached": last, "types": types}
            self._shelf.note(record | {"digests": digests})

    def _refuse_overtaken(self, run: str, epoch: str) -> None:
        known = self._shelf.runs.get(run, KnownRun())
        if known.epoch != epoch:
            raise StateError(
                f"run {run[:8]} was started again by another process, from a copy of its state "
                "directory; two would put the same noise on different data, so this one stops"
            )

    def note_windows(
        self, dataset: str, run: str, *, minted: int, final: int, epoch: str | None
    ) -> None:
        """Note how many windows have had a key, and how many of these are erased.

        A new key is not used before this returns: refused if another process has begun an epoch
        since `epoch` (None: keys are only erased, which anybody may do).
        """
        with self._shelf.current():
            if epoch is not None:
                self._refuse_overtaken(run, epoch)
            known = self._shelf.runs.get(run, KnownRun())
            if minted > known.minted or final > known.final:
                record = {"dataset": dataset, "run": run, "minted": minted, "final": final}
                self._shelf.note(record)

    def note_erasure(self, dataset: str, run: str, step: int, digest: str) -> None:
        """Note that a unit was erased before `step`: a state that still has it is an older one."""
        with self._shelf.current():
            record = {"dataset": dataset, "run": run, "erasure": step, "digest": digest}
            self._shelf.note(record)

    def note_finish(self, dataset: str, run: str, steps: int, *, epoch: str) -> None:
        """Note that a series is finished after so many steps, before what it held back is drawn."""
        with self._shelf.current():
            self._refuse_overtaken(run, epoch)
            if self._shelf.runs.get(run, KnownRun()).finished != steps:
                self._shelf.note({"dataset": dataset, "run": run, "finished": steps})

    def note_adoption(self, dataset: str, run: str, *, because: str, who: str) -> None:
        """Note that somebody vouches for a directory, or ledger, that was moved."""
        with self._shelf.current():
            record = {"dataset": dataset, "run": run, "adopted": because, "who": who}
            self._shelf.note(record)

    def knows(self, dataset: str, run: str) -> bool:
        """Was this run started under this dataset's book?"""
        with self._shelf.current():
            known = self._shelf.runs.get(run, KnownRun())
            return known.dataset == dataset and bool(known.fingerprint or known.epoch)

    def charge(
        self,
        dataset: str,
        charge: Charge,
        digest_at: DigestAt = lambda step: "",
        *,
        verified: bool = False,
    ) -> bool:
        """Write the charge down, or raise BudgetExceeded; False if it was there already.

        A charge made before must have read the same input. `verified` says that the caller's own
        log has just shown that, for a replay whose digests do not reach the recorded ones.
        """
        with self._shelf.current():
            oldest = charge.step if charge.kind == "close" else charge.cells.first
            book = self._shelf.book(dataset, oldest=oldest)
            news = book.newest_loss_with(charge)
            if news is not None and news <= book.account.total:
                self._shelf.write_charge(dataset, charge)
                book.add_newest(charge, news)
                self._shelf.trim(book, charge.step)
                return True
            parts = book.missing(charge, digest_at, verified=verified)
            for part in parts:
                loss = refuse_overspend(dataset, book, part, self.path)
                self._shelf.write_charge(dataset, part)
                book.add(part, loss)
            self._shelf.trim(book, charge.cells.first)
            return bool(parts)

    def left(self, dataset: str, step: int | None = None) -> Fraction:
        """What the window ending at `step` (default: the newest) may still spend."""
        with self._shelf.current():
            account = self._shelf.book(dataset, oldest=step).account
            return account.left(account.newest if step is None else step)

    def peak(self, dataset: str) -> Fraction:
        """The most that any protected unit has lost so far."""
        with self._shelf.current():
            return Fraction(self._shelf.book(dataset).account.peak, GRID)

    def newest_step(self, dataset: str, run: str) -> int:
        """The newest step that a run was charged for, or -1."""
        with self._shelf.current():
            lines = self._shelf.book(dataset).spent_on.items()
            return max((line[3] for key, line in lines if key[0] == run), default=-1)

    def report(self) -> list[dict[str, Any]]:
        """What was spent, on what, what is left: one entry per dataset, ready for JSON."""
        with self._shelf.current():
            return [report(name, book) for name, book in sorted(self._shelf.books.items())]

    def history(self, dataset: str | None = None) -> Iterator[Record]:
        """Every record of the file, oldest first."""
        with self._shelf.current():
            records = self._shelf.reread()
        for record in records:
            told = record.get("dataset"), record.get("book")
            if dataset is None or dataset in told or "repaired" in record:
                yield record

    def persist(self, path: str | Path) -> None:
        """Keep a book that is in memory in a file from now on; one that has a file stays there.

        The book moves: everybody who holds this ledger charges the file. A file that exists is
        taken up if nothing was charged in memory, and refused otherwise: two budgets are not one.
        """
        with self._shelf.lock:
            with self._shelf.current():
                if self.path is not None:
                    return
            self._shelf.persist(Path(path))
            self.path = Path(path)

    @property
    def place(self) -> Path | None:
        """Where the file is, from the root; None in memory."""
        journal = self._shelf.journal
        return None if journal is None else Path(os.path.realpath(journal.place))

    def repair(self, *, because: str) -> None:
        """Take the file as it is although its head is lost, or says that it held more.

        What it lacks is not counted any more, so this is written down, with the reason. A record
        that does not match its checksum is refused all the same: restore the file.
        """
        if not because.strip():
            raise InvalidParameter("a repair is recorded with its reason; say why (because=...)")
        self._shelf.repair(because)

    def identity(self) -> str:
        """Which file this is on this machine ("" in memory): a copy has another identity."""
        journal = self._shelf.journal
        return "" if journal is None else journal.identity()

    def close(self) -> None:
        """Release the file."""
        if self._shelf.journal is not None:
            self._shelf.journal.close()

    def interval_end(
        self, dataset: str, run: str, query: str, purpose: str, first: int
    ) -> int | None:
        """The last step that an interval or cover pays for; -1 if there is none."""
        with self._shelf.current():
            found = self._shelf.book(dataset).account.interval((run, query, purpose, first))
            return -1 if found is None else found[1]

    def head(self) -> tuple[int, str]:
        """Where the file ends now, to recognise it later; (0, "") in memory."""
        with self._shelf.current():
            journal = self._shelf.journal
            return (0, "") if journal is None else journal.head()

    def has(self, head: tuple[int, str]) -> bool:
        """Is this the file that once ended at `head`, with all it held then?"""
        with self._shelf.current():
            journal = self._shelf.journal
            return journal is None or journal.has(head)


def warn_of_own_book(what: str, state: str | Path | None, *, stacklevel: int) -> None:
    """Say once in a process that what is published without a ledger is counted nowhere else."""
    global _warned
    if _warned:
        return
    _warned = True
    where = "forgotten afterwards," if state is None else f"kept in {Path(state) / 'ledger'} and"
    warnings.warn(
        f"the budget of this {what} is {where} not shared with others: nothing adds up what all "
        "of them spend on the same data; give ledger= (a path, or one dpstream.Ledger for all)",
        NewBook,
        stacklevel=stacklevel + 1,
    )


_warned = False
