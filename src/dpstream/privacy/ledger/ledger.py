"""The budget book: durable, append-only, shared by every query on a dataset; it refuses overspend.

A ledger file holds one book per dataset. Each charge is checked against the book under the file's
lock and fsynced before the caller may draw noise. Several processes may charge at once; a kill
leaves either the whole charge or none. Without a path the book lives in memory, until a run that
is kept is charged to it: then it moves to a file, for all that share it (`Ledger.persist`).

What is in memory is always in step with the file: whoever holds the lock sees every charge of every
process. A change that is cut short never stays half made: memory is dropped and the file read
again. Old steps are settled, so that memory stays small, and read back if a charge asks for them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from dpstream.errors import (
    BudgetExceeded,
    InvalidParameter,
    LedgerError,
    NewBook,
    NoiseReuse,
    StateError,
)
from dpstream.privacy.amounts import GRID
from dpstream.privacy.ledger.balance import Book, DigestAt, report
from dpstream.privacy.ledger.charges import (
    Charge,
    KnownRun,
    Terms,
    digests_by_step,
    is_about_run,
)
from dpstream.privacy.ledger.compaction import fold
from dpstream.privacy.ledger.refusals import (
    in_words,
    protection,
    refuse_ended,
    refuse_overspend,
)
from dpstream.privacy.state.journal import Journal, Record, this_process
from dpstream.privacy.state.secret import mint_run_id

BACKUPS = timedelta(days=35)
"""For how long a backup of a state directory may be put back, unless a ledger says otherwise."""
_KEEP = 1 << 14  # steps held in memory beyond the window; older ones are read back if asked for
_VERBATIM = timedelta(days=1)  # records that a compaction leaves as they are
_WORTHWHILE = 1024  # records that it folds at least
_REFUSALS = (BudgetExceeded, NoiseReuse, LedgerError, StateError)


class Ledger:
    """Books by dataset, and the runs charged to them, in a file or (path None) in memory."""

    def __init__(self, path: str | Path | None = None, *, backups: timedelta = BACKUPS) -> None:
        """`backups`: for how long a backup of a state directory may be put back.

        The digests of so many days' steps are kept.
        """
        self.path = None if path is None else Path(path)
        if backups < timedelta():
            raise InvalidParameter(f"backups must be a length of time; got {backups}")
        self._backups, self._look_again = backups, ""
        self._journal = (
            None
            if self.path is None
            else Journal(self.path, kind="ledger", error=LedgerError, head=True)
        )
        self._books: dict[str, Book] = {}
        self._runs: dict[str, KnownRun] = {}
        self._lock, self._process = threading.RLock(), this_process.id
        self._broken = False  # a change in memory was cut short: nobody is let in

    # Books

    def open(self, dataset: str, terms: Terms) -> None:
        """Create the dataset's book, or check that it has these very terms."""
        with self._locked():
            book = self._books.get(dataset)
            if book is None:
                self._append({"book": dataset, "terms": terms.to_json()})
                self._books[dataset] = Book(terms, in_memory=self._journal is None)
            elif book.terms != terms:
                raise LedgerError(
                    f"the book of dataset {dataset!r} promises {book.terms.describe()} "
                    f"(clock {book.terms.clock!r}, time zone {book.terms.time_zone}); this query "
                    f"asks for {terms.describe()} (clock {terms.clock!r}, time zone "
                    f"{terms.time_zone}); use the book's terms or another dataset name"
                )

    def admit(self, dataset: str, asked: Terms, who: str) -> None:
        """Open a book with a mechanism's own terms, or see that the book counts what it spends.

        Window and total may differ: every charge is checked against the book's. Where users are
        protected the unit, its period and its time zone are the book's too: a charge counts once
        for each unit, so a mechanism of single events, or of other periods, would be counted for
        too little.
        """
        book = self.terms(dataset)
        if book is None:
            self.open(dataset, asked)
        elif "user" in (book.unit, asked.unit) and protection(book) != protection(asked):
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
        with self._locked():
            book = self._books.get(dataset)
            return book.terms if book else None

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
        with self._locked():
            self._refuse_ended(charge.run)
            oldest = charge.step if charge.kind == "close" else charge.cells.first
            book = self._book(dataset, oldest=oldest)
            loss = book.newest_loss_with(charge)
            if loss is not None and loss <= book.account.total:
                if self._journal is not None:
                    self._append({"dataset": dataset} | charge.to_json())
                book.add_newest(charge, loss)
                self._settle(book, charge.step)
                return True
            parts = book.missing(charge, digest_at, verified=verified)
            for part in parts:
                loss = refuse_overspend(dataset, book, part, self.path)
                if self._journal is not None:
                    self._append({"dataset": dataset} | part.to_json())
                book.add(part, loss)
            self._settle(book, charge.cells.first)
            return bool(parts)

    def interval_end(
        self, dataset: str, run: str, query: str, purpose: str, first: int
    ) -> int | None:
        """The last step that an interval or cover pays for; -1 if there is none."""
        with self._locked():
            key = (run, query, purpose, first)
            span = self._book(dataset).account.interval(key)
            if span is None:  # it may be among those that were settled
                span = self._book(dataset, oldest=first).account.interval(key)
            return -1 if span is None else span[1]

    def left(self, dataset: str, step: int | None = None) -> Fraction:
        """What the window ending at `step` (default: the newest) may still spend."""
        with self._locked():
            account = self._book(dataset, oldest=step).account
            return account.left(account.newest if step is None else step)

    def peak(self, dataset: str) -> Fraction:
        """The most that any protected unit has lost so far."""
        with self._locked():
            return Fraction(self._book(dataset).account.most, GRID)

    def first_room(self, dataset: str, charge: Charge) -> int | None:
        """The first period from which on a charge that names periods fits; None: there is none."""
        with self._locked():
            return self._book(dataset).account.first_room(charge)

    def rehearsal(self) -> Ledger:
        """A copy in memory, to see what charges would lead to."""
        copy = Ledger()
        with self._locked():
            for record in self._all_records():
                copy._apply(record)
        return copy

    def report(self) -> list[dict[str, Any]]:
        """What was spent, on what, what is left: one entry per dataset, ready for JSON."""
        with self._locked():
            return [report(name, book) for name, book in sorted(self._books.items())]

    def history(self, dataset: str | None = None) -> Iterator[Record]:
        """Every record of the file, oldest first."""
        with self._locked():
            records = self._read_all()
        for record in records:
            about = record.get("dataset"), record.get("book")
            if dataset is None or dataset in about or about == (None, None):
                yield record

    # Runs

    def register(self, dataset: str, run: str, fingerprint: str) -> None:
        """Tie a run id to everything that fixes its releases; another fingerprint is refused."""
        with self._locked():
            self._book(dataset)
            known = self._known(run)
            if not known.fingerprint:
                self._note(dataset, run, fingerprint=fingerprint)
            elif (known.dataset, known.fingerprint) != (dataset, fingerprint):
                raise NoiseReuse(
                    f"run {run[:8]} was started with other parameters or data; the same noise "
                    "must not serve both; start a new run"
                )

    def known(self, run: str) -> KnownRun:
        """What is known of a run besides its charges."""
        with self._locked():
            return self._known(run).snapshot()

    def begin(self, dataset: str, run: str, epoch: str, *, after: str) -> None:
        """Note that a process starts, or goes on with, a run; another one must stop.

        `after`: the epoch that was the newest when the process looked. If another has come since,
        it is the process that must not go on.
        """
        with self._locked():
            self._refuse_overtaken(run, after)
            self._note(dataset, run, epoch=epoch)

    def reach(
        self,
        dataset: str,
        run: str,
        last: int,
        digests: list[str],
        *,
        epoch: str,
        types: str,
        positions: Any = None,
    ) -> None:
        """Note the input of the steps up to `last`, before noise is drawn for them.

        `positions`: how far a live source was read by `last`; a backup that is put back reads to
        there again. Refused if another process has begun an epoch of the run since `epoch`.
        """
        with self._locked():
            self._refuse_overtaken(run, epoch)
            where = {} if positions is None else {"positions": {str(last): positions}}
            self._note(dataset, run, reached=last, types=types, digests=digests, **where)

    def steps_of(self, run: str) -> tuple[dict[int, str], dict[int, Any]]:
        """The digest of every step of a run that the file still has, and positions by step."""
        with self._locked():
            if self._journal is None:
                return dict(self._known(run).digests), {}
            digests: dict[int, str] = {}
            positions: dict[int, Any] = {}
            for record in self._read_all():
                if record.get("run") == run and "reached" in record:
                    digests |= digests_by_step(record)
                    told = record.get("positions", {})
                    positions |= {int(step): moved for step, moved in told.items()}
            return digests, positions

    def note_begun(self, dataset: str, run: str, period: int) -> None:
        """Note the last period of units that the windows about to be drawn reach into.

        Written before the first draw of such a window. It goes by windows, not by the clock: rows
        may be dated ahead.
        """
        with self._locked():
            self._refuse_ended(run)
            begun = self._known(run).begun
            if begun is None or period > begun:
                self._note(dataset, run, begun=period)

    def end(self, dataset: str, run: str, *, because: str, who: str) -> None:
        """End a run for good: whatever state of it turns up is refused at its next step.

        Nothing takes this back. An epoch that no state directory has goes with it, so that versions
        which do not know of ends refuse the run too. Ended again, it stays as it was.
        """
        if not because.strip():
            raise InvalidParameter("the end of a run is recorded with its reason (because=...)")
        with self._locked():
            charged = {line[0] for line in self._book(dataset).spent_on}
            known = self._runs.get(run)
            if run not in charged and (known is None or known.dataset != dataset):
                raise LedgerError(f"the book of {dataset!r} knows of no run {run!r}")
            if known is None or known.ended is None:
                epoch = mint_run_id().hex()
                self._note(dataset, run, ended=because, who=who, epoch=epoch)

    def note_windows(
        self, dataset: str, run: str, *, minted: int, final: int, epoch: str | None
    ) -> None:
        """Note how many windows have had a key, and how many of these are erased.

        A new key is not used before this returns: refused if another process has begun an epoch
        since `epoch` (None: keys are only erased, which anybody may do).
        """
        with self._locked():
            if epoch is not None:
                self._refuse_overtaken(run, epoch)
            known = self._known(run)
            if minted > known.minted or final > known.final:
                self._note(dataset, run, minted=minted, final=final)

    def note_erasure(self, dataset: str, run: str, step: int, digest: str) -> None:
        """Note that a unit was erased before `step`: a state that still has it is an older one."""
        with self._locked():
            self._note(dataset, run, erasure=step, digest=digest)

    def note_finish(self, dataset: str, run: str, steps: int, *, epoch: str) -> None:
        """Note how many steps a finished series has, before what it held back is drawn."""
        with self._locked():
            self._refuse_overtaken(run, epoch)
            if self._known(run).finished != steps:
                self._note(dataset, run, finished=steps)

    def note_adoption(self, dataset: str, run: str, *, because: str, who: str) -> None:
        """Note that somebody vouches for a directory, or ledger, that was moved."""
        with self._locked():
            self._note(dataset, run, adopted=because, who=who)

    def note_restore(self, dataset: str, run: str, *, because: str, who: str, **facts: Any) -> None:
        """Note that a run goes on from a backup, and what of it is lost."""
        with self._locked():
            self._note(dataset, run, restored=because, who=who, **facts)

    # The file

    @property
    def place(self) -> Path | None:
        """Where the file is, from the root; None in memory."""
        journal = self._journal
        return None if journal is None else Path(os.path.realpath(journal.place))

    def identity(self) -> str:
        """Which file this is on this machine ("" in memory): a copy has another identity."""
        with self._lock:
            return "" if self._journal is None else self._journal.identity()

    def replaces(self, identity: str) -> bool:
        """Is this the file with that identity, or what compactions have put in its place?"""
        if self._journal is None:
            return not identity
        with self._locked():
            return self._journal.replaces(identity)

    def head(self) -> tuple[int, str]:
        """Where the file ends now, to recognise it later; (0, "") in memory."""
        with self._locked():
            return (0, "") if self._journal is None else self._journal.head()

    def has(self, head: tuple[int, str]) -> bool:
        """Is this the file that once ended at `head`, with all it held then?"""
        with self._locked():
            return self._journal is None or self._journal.has(head)

    def persist(self, path: str | Path) -> None:
        """Keep a book that is in memory in a file from now on; one that has a file stays there.

        The book moves: everybody who holds this ledger charges the file. A file that exists is
        taken up if nothing was charged in memory, and refused otherwise: two budgets are not one.
        """
        with self._lock:
            with self._locked():
                if self.path is not None:
                    return
            path = Path(path)
            if not path.exists():
                Journal.write_new(path, self._all_records(), kind="ledger", error=LedgerError)
            elif any(book.charges() for book in self._books.values()):
                raise LedgerError(
                    f"this book in memory was charged already, and {path} is a book of its own: "
                    "two cannot become one; open that one in the first place, Ledger(path), and "
                    "give it to all runs"
                )
            file = Ledger(path)
            try:
                with file._locked():
                    for name, book in self._books.items():
                        file.open(name, book.terms)
                    for run in self._runs.keys() - file._runs.keys():  # known, not charged
                        for record in self._runs[run].records(run):
                            file._note(**record)
            except BaseException:
                file.close()
                raise
            self.path, self._journal = path, file._journal
            self._start_over()

    def repair(self, *, because: str) -> None:
        """Take the file as it is although its head is lost, or says that it held more.

        What it lacks is not counted any more, so this is written down, with the reason. A record
        that does not match its checksum is refused all the same: restore the file.
        """
        if not because.strip():
            raise InvalidParameter("a repair is recorded with its reason; say why (because=...)")
        if self._journal is None:
            raise LedgerError("a book in memory has no file to repair")
        with self._lock, self._journal.locked():
            self._start_over()
            self._journal.accept(
                lambda end: {
                    "repaired": because,
                    "had": None if end is None else end.offset,
                    "at": _now(),
                }
            )

    def compact(self) -> None:
        """Fold the oldest records of a file that has grown long; no answer changes by that.

        What is younger than a day stays as it is, and digests of steps as long as `backups` says.
        """
        journal, now = self._journal, _now()
        if journal is None or now < self._look_again:
            return
        with self._locked():
            if journal.is_long:
                self._look_again = _before(now, -_VERBATIM)
                journal.compact(partial(self._fold, now))

    def _fold(self, now: str, records: list[Record], folded: int) -> tuple[list[Record], int]:
        recent = _before(now, _VERBATIM)
        count = next((n for n, r in enumerate(records) if r["at"] >= recent), len(records))
        if count - folded < _WORTHWHILE:
            return [], folded
        books: dict[str, Record] = {}
        for name, book in self._books.items():
            behind = max(_KEEP, book.reach) + (book.terms.width or 0)
            books[name] = {
                "peak": book.account.peak,
                "settled": max(0, book.account.newest - behind) if book.terms.width else 0,
            }
        old = [*records[:count], {"compacted": records[count - 1]["at"], "at": now}]
        return fold(old, digests_since=_before(now, self._backups), books=books), count

    def close(self) -> None:
        """Release the file."""
        if self._journal is not None:
            self._journal.close()

    # What is in memory, in step with the file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, with every charge of every process applied.

        If anything but a refusal cuts a change short (an interrupt, a full disk), what is in
        memory is dropped and read again from the file; without a file, nothing more is admitted.
        """
        if self._journal is None and this_process.id != self._process:
            raise LedgerError(
                "this book is in memory and was made before a fork: a copy would be a second "
                "budget; use a ledger file, and open it in each process"
            )
        with self._lock, self._journal.locked() if self._journal else nullcontext():
            if self._broken:
                raise LedgerError("a charge to this book was cut short; start a new one")
            try:
                if self._journal is not None and not self._journal.head()[0]:  # nothing is read yet
                    self._books.clear()
                    self._runs.clear()
                for record in self._journal.read_new() if self._journal else ():
                    self._apply(record)
                yield
            except _REFUSALS:
                raise
            except BaseException:
                if self._journal is None:
                    self._broken = True
                else:
                    self._start_over()
                raise

    def _start_over(self) -> None:
        """Drop what is in memory, to read the file from its first record."""
        assert self._journal is not None
        self._books.clear()
        self._runs.clear()
        self._journal.rewind()

    def _apply(self, record: Record) -> None:
        """Make in memory the change that a record of the file stands for."""
        if "book" in record:
            book = Book(Terms.from_json(record["terms"]), since=record.get("settled", 0))
            book.account.peak = record.get("peak", 0)
            self._books.setdefault(record["book"], book)
        elif is_about_run(record):
            run = record["run"]
            self._runs.setdefault(run, KnownRun()).apply(record)
            if "begun" in record:
                self._books[record["dataset"]].account.periods.begin(run, record["begun"])
            elif "ended" in record:
                self._books[record["dataset"]].account.periods.end(run)
        elif "peak" in record:
            account = self._books[record["dataset"]].account
            account.peak = max(account.peak, record["peak"])
        elif "amount" in record:  # others are for people
            self._books[record["dataset"]].add(Charge.from_json(record))

    def _append(self, record: Record) -> None:
        """Make a record durable, in a ledger with a file."""
        if self._journal is not None:
            self._journal.append([record | {"at": _now()}])

    def _read_all(self) -> list[Record]:
        """Every record of the file, oldest first, under its lock; none in memory."""
        return [] if self._journal is None else self._journal.read_all()

    def _all_records(self) -> list[Record]:
        """All that is in memory, as a file would have it."""
        records: list[Record] = []
        for name, book in self._books.items():
            records.append({"book": name, "terms": book.terms.to_json()})
            runs = [(run, known) for run, known in self._runs.items() if known.dataset == name]
            records += [record for run, known in runs for record in known.records(run)]
            records += [{"dataset": name} | charge.to_json() for charge in book.charges()]
            records.append({"dataset": name, "peak": book.account.peak})
        now = _now()
        return [record | {"at": now} for record in records]

    def _book(self, dataset: str, *, oldest: int | None = None) -> Book:
        """The dataset's book, which must be there, with all that a charge to `oldest` may meet."""
        book = self._books.get(dataset)
        if book is None:
            raise LedgerError(f"there is no book for dataset {dataset!r}; open it with its terms")
        if oldest is not None and oldest < book.account.since:
            if self._journal is None:
                charges = book.charges()
            else:
                records = [r for r in self._read_all() if r.get("dataset") == dataset]
                charges = [Charge.from_json(r) for r in records if "amount" in r]
            book = self._books[dataset] = book.reread(oldest, charges)
        return book

    def _settle(self, book: Book, charged: int) -> None:
        """Settle what is far behind both the newest step and the one being charged (a replay).

        Far: more than charges have read behind their own step, as they do after a delay.
        """
        if charged <= book.account.since + _KEEP:
            return
        width = book.terms.width
        if width is None:
            return
        horizon = min(book.account.newest, charged) - width - max(_KEEP, book.reach)
        if horizon > book.account.since + _KEEP:
            book.settle_before(horizon)

    def _known(self, run: str) -> KnownRun:
        return self._runs.get(run) or KnownRun()

    def _note(self, dataset: str, run: str, **facts: Any) -> None:
        """Write down something about a run."""
        record = {"dataset": dataset, "run": run, **facts}
        self._append(record)
        self._apply(record)

    def _refuse_ended(self, run: str) -> None:
        known = self._runs.get(run)
        if known is not None and known.ended is not None:
            refuse_ended(run, known)

    def _refuse_overtaken(self, run: str, epoch: str) -> None:
        self._refuse_ended(run)
        if self._known(run).epoch != epoch:
            raise StateError(
                f"run {run[:8]} was started again by another process, from a copy of its state "
                "directory; two would put the same noise on different data, so this one stops"
            )


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _before(now: str, length: timedelta) -> str:
    """The moment that was so long before."""
    try:
        return (datetime.fromisoformat(now) - length).isoformat(timespec="milliseconds")
    except OverflowError:
        return ""  # before everything
