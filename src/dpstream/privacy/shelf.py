"""The books of one ledger in memory, always in step with its file, if it has one.

Whoever holds the lock sees every charge of every process. A change that is cut short never stays
half made: memory is dropped and the file read again. Old steps are settled, so that memory stays
bounded, and read back if a charge asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from dpstream.errors import BudgetExceeded, LedgerError, NoiseReuse
from dpstream.privacy.book import Book
from dpstream.privacy.charges import Charge, Terms
from dpstream.privacy.process import this_process
from dpstream.privacy.state.journal import Journal, Record

_KEEP = 1 << 14  # steps held in memory beyond the window; older ones are read back if asked for
_REFUSALS = (BudgetExceeded, NoiseReuse, LedgerError)


class Shelf:
    """Books by dataset, and the runs that are charged to them, in a file or in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.journal = None if path is None else _journal(path)
        self.books: dict[str, Book] = {}
        self.runs: dict[str, tuple[str, str]] = {}  # run -> dataset and fingerprint
        self.reached: dict[str, tuple[int, str]] = {}  # run -> step and digest
        self._lock = threading.RLock()
        self._in_memory = _InMemory(self._lock)

    def current(
        self, *, oldest: int | None = None, dataset: str = ""
    ) -> AbstractContextManager[None]:
        """Hold the lock, with every charge of every process applied.

        If anything but a refusal cuts a change short (an interrupt, a full disk), what is in
        memory is dropped and read again from the file; without a file, nothing more is admitted.
        """
        return self._in_memory if self.journal is None else self._of_file(oldest, dataset)

    def book(self, dataset: str) -> Book:
        """The dataset's book, which must be there."""
        if dataset not in self.books:
            raise LedgerError(f"there is no book for dataset {dataset!r}; open it with its terms")
        return self.books[dataset]

    def open_book(self, dataset: str, terms: Terms) -> None:
        """Write down that a dataset has these terms."""
        if self.journal is not None:
            self.journal.append([{"book": dataset, "terms": terms.to_json(), "at": _now()}])
        self.books[dataset] = Book(terms)

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
        """Forget what is far behind both the newest step and the one being charged (a replay)."""
        if charged <= book.account.since + _KEEP:
            return
        width = book.terms.width
        if width is None:
            return
        horizon = min(book.account.newest, charged) - width - _KEEP
        if horizon > book.account.since + _KEEP:
            book.forget_before(horizon)

    def reread(self) -> list[Record]:
        """Every record of the file, oldest first, under its lock; none in memory."""
        return [] if self.journal is None else self.journal.read_all()

    def repair(self, because: str) -> None:
        """Take the file as it is, and write down that this was done."""
        if self.journal is None:
            raise LedgerError("a book in memory has no file to repair")
        with self._lock, self.journal.locked():
            self._start_over()
            self.journal.accept(
                lambda mark: {
                    "repaired": because,
                    "had": None if mark is None else mark.offset,
                    "at": _now(),
                }
            )

    def all_records(self) -> list[Record]:
        """All that is in memory, as a file would have it."""
        records: list[Record] = []
        for name, book in self.books.items():
            since = book.account.since
            records.append({"book": name, "terms": book.terms.to_json(), "at": _now()})
            records += [
                {"dataset": name, "run": run, "fingerprint": fingerprint, "at": _now()}
                for run, (dataset, fingerprint) in self.runs.items()
                if dataset == name
            ]
            records += [{"dataset": name, "at": _now()} | c.to_json() for c in book.charges()]
            if since:
                records.append({"dataset": name, "settled_before": since, "at": _now()})
        return records

    def apply(self, record: Record) -> None:
        """Make in memory the change that a record of the file stands for."""
        if "book" in record:
            self.books.setdefault(record["book"], Book(Terms.from_json(record["terms"])))
        elif "fingerprint" in record:
            self.runs[record["run"]] = (record["dataset"], record["fingerprint"])
        elif "reached" in record:
            self.reached[record["run"]] = (record["reached"], record["digest"])
        elif "settled_before" in record:
            self.books[record["dataset"]].forget_before(record["settled_before"])
        elif "repaired" in record:
            pass  # for people
        else:
            self.books[record["dataset"]].add(Charge.from_json(record))

    @contextmanager
    def _of_file(self, oldest: int | None, dataset: str) -> Iterator[None]:
        assert self.journal is not None
        with self._lock, self.journal.locked():
            try:
                self._catch_up(oldest, dataset)
                yield
            except _REFUSALS:
                raise
            except BaseException:
                self._start_over()
                raise

    def _catch_up(self, oldest: int | None, dataset: str) -> None:
        assert self.journal is not None
        try:
            for record in self.journal.read_new():
                self.apply(record)
            book = self.books.get(dataset)
            if book is not None and oldest is not None and oldest < book.account.since:
                self._reload(dataset, oldest)
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        assert self.journal is not None
        self.books.clear()
        self.runs.clear()
        self.reached.clear()
        self.journal.rewind()

    def _reload(self, dataset: str, oldest: int) -> None:
        """Read a book again with more of its past, for a charge to a step long gone."""
        terms = self.books[dataset].terms
        self.books[dataset] = Book(terms, since=max(0, oldest - (terms.width or oldest)))
        for record in self.reread():
            if record.get("dataset") == dataset:
                self.apply(record)


class _InMemory(AbstractContextManager[None]):
    """The lock of a book without a file; once a change was cut short it lets nobody in."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._broken, self._process = lock, False, this_process()

    def __enter__(self) -> None:
        if this_process() != self._process:
            raise LedgerError(
                "this book is in memory and was made before a fork: a copy would be a second "
                "budget; use a ledger file, and open it in each process"
            )
        self._lock.acquire()
        if self._broken:
            self._lock.release()
            raise LedgerError("a charge to this book was cut short; start a new one")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._broken = self._broken or not (kind is None or issubclass(kind, _REFUSALS))
        self._lock.release()


def _journal(path: Path) -> Journal:
    return Journal(path, kind="ledger", error=LedgerError, head=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
