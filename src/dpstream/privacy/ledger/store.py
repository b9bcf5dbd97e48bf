"""The books of one ledger in memory, always in step with its file, if it has one.

Whoever holds the lock sees every charge of every process. A change that is cut short never stays
half made: memory is dropped and the file read again. Old steps are settled, so that memory stays
small, and read back if a charge asks for them. A book in memory that is persisted moves: it is the
file from then on, for everybody who holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from dpstream.errors import BudgetExceeded, LedgerError, NoiseReuse
from dpstream.privacy.ledger.book import Book
from dpstream.privacy.ledger.charges import Charge, Terms
from dpstream.privacy.state.journal import Journal, Record, this_process

# What a ledger knows of each run besides its charges: enough to recognise its state directory.
#
# A state directory can lose files, or be put back from an older copy. The ledger is the witness: it
# is told of every start (epoch) and of every step's input before noise is drawn for it, and how
# many windows have had a key. What does not agree with it is refused (`run_directory.py`).

RECENT = 256
"""Newest steps whose digests are held in memory, or the newest batch of them; the file has all."""


@dataclass(kw_only=True)
class KnownRun:
    """One run."""

    dataset: str = ""
    fingerprint: str = ""
    """Of everything that fixes its releases besides the data; "" until it is registered."""
    epoch: str = ""
    """Of its newest start; "" if none was kept in a state directory."""
    reached: int = -1
    """The newest step whose input is known."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the newest steps, in order."""
    types: str = ""
    """Digest of the types of its columns at that step."""
    minted: int = 0
    final: int = 0
    """Windows that have had a key, and those whose keys were erased: from 0 to here, exclusive."""
    finished: int | None = None
    """After how many steps a series was finished: none may follow."""
    erasure: tuple[int, str] | None = None
    """Before which step a unit was last erased from the state, and the digest chain from there."""

    def apply(self, record: Record) -> None:
        """Take in a record about this run."""
        self.dataset = record["dataset"]
        if "fingerprint" in record:
            self.fingerprint = record["fingerprint"]
        elif "epoch" in record:
            self.epoch = record["epoch"]
        elif "reached" in record:
            self._reach(record["reached"], record["digests"])
            self.types = record["types"]
        elif "minted" in record:
            self.minted = max(self.minted, record["minted"])
            self.final = max(self.final, record["final"])
        elif "finished" in record:
            self.finished = record["finished"]
        elif "erasure" in record:
            self.erasure = (record["erasure"], record["digest"])

    def as_of_now(self) -> KnownRun:
        """A copy that does not change."""
        found = copy(self)
        found.digests = dict(self.digests)
        return found

    def _reach(self, last: int, digests: list[str]) -> None:
        first = last + 1 - len(digests)
        self.digests.update(enumerate(digests, start=first))
        self.reached = max(self.reached, last)
        while len(self.digests) > max(RECENT, len(digests)):
            del self.digests[next(iter(self.digests))]

    def records(self, run: str) -> list[Record]:
        """Records that, applied to a new one, make this one again."""
        about = {"dataset": self.dataset, "run": run}
        found: list[Record] = []
        if self.fingerprint:
            found.append(about | {"fingerprint": self.fingerprint})
        if self.epoch:
            found.append(about | {"epoch": self.epoch})
        if self.digests:
            digests = [self.digests[step] for step in sorted(self.digests)]
            found.append(about | {"reached": self.reached, "digests": digests, "types": self.types})
        if self.minted or self.final:
            found.append(about | {"minted": self.minted, "final": self.final})
        if self.finished is not None:
            found.append(about | {"finished": self.finished})
        if self.erasure is not None:
            found.append(about | {"erasure": self.erasure[0], "digest": self.erasure[1]})
        return found


def is_about_run(record: Record) -> bool:
    """Is this a record about a run, not a book, a charge or a settlement?"""
    return "run" in record and "amount" not in record


_KEEP = 1 << 14  # steps held in memory beyond the window; older ones are read back if asked for
_REFUSALS = (BudgetExceeded, NoiseReuse, LedgerError)


class LedgerStore:
    """Books by dataset, and the runs that are charged to them, in a file or in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.journal = None if path is None else _journal(path)
        self.books: dict[str, Book] = {}
        self.runs: dict[str, KnownRun] = {}
        self.lock = threading.RLock()
        self._in_memory = _InMemory(self)

    def current(self) -> AbstractContextManager[None]:
        """Hold the lock, with every charge of every process applied.

        If anything but a refusal cuts a change short (an interrupt, a full disk), what is in
        memory is dropped and read again from the file; without a file, nothing more is admitted.
        """
        return self._in_memory if self.journal is None else self.in_file()

    def book(self, dataset: str, *, oldest: int | None = None) -> Book:
        """The dataset's book, which must be there, with all that a charge to `oldest` may meet."""
        book = self.books.get(dataset)
        if book is None:
            raise LedgerError(f"there is no book for dataset {dataset!r}; open it with its terms")
        if oldest is not None and oldest < book.account.since:
            charges = book.charges() if self.journal is None else self._charges(dataset)
            book = self.books[dataset] = book.reading_back(oldest, charges)
        return book

    def open_book(self, dataset: str, terms: Terms) -> None:
        """Write down that a dataset has these terms."""
        if self.journal is not None:
            self.journal.append([{"book": dataset, "terms": terms.to_json(), "at": _now()}])
        self.books[dataset] = Book(terms, in_memory=self.journal is None)

    def note(self, record: Record) -> None:
        """Write down a record about a run."""
        if self.journal is not None:
            self.journal.append([record | {"at": _now()}])
        self.apply(record)

    def write_charge(self, dataset: str, charge: Charge) -> None:
        """Make a charge durable; the caller adds it to the book."""
        if self.journal is not None:
            self.journal.append([{"dataset": dataset, "at": _now()} | charge.to_json()])

    def trim(self, book: Book, charged: int) -> None:
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
            book.forget_before(horizon)

    def reread(self) -> list[Record]:
        """Every record of the file, oldest first, under its lock; none in memory."""
        return [] if self.journal is None else self.journal.read_all()

    def repair(self, because: str) -> None:
        """Take the file as it is, and write down that this was done."""
        if self.journal is None:
            raise LedgerError("a book in memory has no file to repair")
        with self.lock, self.journal.locked():
            self._start_over()
            self.journal.accept(
                lambda mark: {
                    "repaired": because,
                    "had": None if mark is None else mark.offset,
                    "at": _now(),
                }
            )

    def persist(self, path: Path) -> None:
        """Go on in a file: what is in memory is written to a new one, which all share from now on.

        A file that is there is taken up, if nothing was charged in memory.
        """
        if not path.exists():
            records = self._all_records()
            Journal.write_new(path, records, kind="ledger", error=LedgerError)
        elif any(book.charges() for book in self.books.values()):
            raise LedgerError(
                f"this book in memory was charged already, and {path} is a book of its own: two "
                "cannot become one; open that one in the first place, Ledger(path), and give it to "
                "all runs"
            )
        known, journal = {name: book.terms for name, book in self.books.items()}, _journal(path)
        file = LedgerStore(None)
        file.journal = journal
        try:
            with file.in_file():
                for name, terms in known.items():
                    file.open_or_agree(name, terms)
                for run in self.runs.keys() - file.runs.keys():  # known, not charged
                    for record in self.runs[run].records(run):
                        file.note(record)
        except BaseException:
            journal.close()
            raise
        self.journal = journal
        self._start_over()

    def open_or_agree(self, dataset: str, terms: Terms) -> None:
        """Open a dataset's book, or see that it has these very terms."""
        book = self.books.get(dataset)
        if book is None:
            self.open_book(dataset, terms)
        elif book.terms != terms:
            raise LedgerError(
                f"the book of dataset {dataset!r} promises {book.terms.describe()} "
                f"(clock {book.terms.clock!r}, time zone {book.terms.time_zone}); this query "
                f"asks for {terms.describe()} (clock {terms.clock!r}, time zone "
                f"{terms.time_zone}); use the book's terms or another dataset name"
            )

    def _all_records(self) -> list[Record]:
        """All that is in memory, as a file would have it."""
        records: list[Record] = []
        for name, book in self.books.items():
            records.append({"book": name, "terms": book.terms.to_json()})
            runs = [(run, known) for run, known in self.runs.items() if known.dataset == name]
            records += [record for run, known in runs for record in known.records(run)]
            records += [{"dataset": name} | charge.to_json() for charge in book.charges()]
            records.append({"dataset": name, "peak": book.account.peak})
        now = _now()
        return [record | {"at": now} for record in records]

    def apply(self, record: Record) -> None:
        """Make in memory the change that a record of the file stands for."""
        if "book" in record:
            self.books.setdefault(record["book"], Book(Terms.from_json(record["terms"])))
        elif is_about_run(record):
            self.runs.setdefault(record["run"], KnownRun()).apply(record)
        elif "peak" in record:
            account = self.books[record["dataset"]].account
            account.peak = max(account.peak, record["peak"])
        elif "repaired" in record:
            pass  # for people
        else:
            self.books[record["dataset"]].add(Charge.from_json(record))

    @contextmanager
    def in_file(self) -> Iterator[None]:
        """Hold the lock of the file, and apply what was appended to it."""
        assert self.journal is not None
        with self.lock, self.journal.locked():
            try:
                for record in self.journal.read_new():
                    self.apply(record)
                yield
            except _REFUSALS:
                raise
            except BaseException:
                self._start_over()
                raise

    def _start_over(self) -> None:
        assert self.journal is not None
        self.books.clear()
        self.runs.clear()
        self.journal.rewind()

    def _charges(self, dataset: str) -> list[Charge]:
        """Every charge that the file has for a dataset."""
        records = (record for record in self.reread() if record.get("dataset") == dataset)
        return [Charge.from_json(record) for record in records if "amount" in record]


class _InMemory(AbstractContextManager[None]):
    """The lock of a book without a file; once a change was cut short it lets nobody in."""

    def __init__(self, shelf: LedgerStore) -> None:
        self._shelf, self._broken, self._process = shelf, False, this_process()
        self._inside: list[AbstractContextManager[None] | None] = []

    def __enter__(self) -> None:
        if this_process() != self._process:
            raise LedgerError(
                "this book is in memory and was made before a fork: a copy would be a second "
                "budget; use a ledger file, and open it in each process"
            )
        self._shelf.lock.acquire()
        try:
            if self._broken:
                raise LedgerError("a charge to this book was cut short; start a new one")
            file = None
            if self._shelf.journal is not None:  # it has moved while this one waited
                file = self._shelf.in_file()
                file.__enter__()
        except BaseException:
            self._shelf.lock.release()
            raise
        self._inside.append(file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            file = self._inside.pop()
            if file is not None:
                file.__exit__(kind, problem, trace)
            elif not (kind is None or issubclass(kind, _REFUSALS)):
                self._broken = True
        finally:
            self._shelf.lock.release()


def _journal(path: Path) -> Journal:
    return Journal(path, kind="ledger", error=LedgerError, head=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
