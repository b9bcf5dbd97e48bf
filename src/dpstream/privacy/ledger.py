"""The budget book: durable, append-only, shared by every query on a dataset; it refuses overspend.

A ledger file holds one book per dataset. Each charge is checked against the book under the file's
lock and fsynced before the caller may draw noise. Several processes may charge at once; a kill
leaves either the whole charge or none. Without a path the book lives in memory, for a release that
nothing else shares.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.errors import BudgetExceeded, LedgerError, NoiseReuse
from dpstream.privacy.amounts import GRID
from dpstream.privacy.book import Book, DigestAt, report
from dpstream.privacy.charges import Charge, Terms
from dpstream.privacy.refusals import in_words, protected, refuse_overspend
from dpstream.privacy.state.journal import Journal, Record

_KEEP = 1 << 14  # steps held in memory beyond the window; older ones are read back if asked for


_REFUSALS = (BudgetExceeded, NoiseReuse, LedgerError)


class _InMemory(AbstractContextManager[None]):
    """The lock of a book without a file; once a change was cut short it lets nobody in."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._broken = lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._broken:
            self._lock.release()
            raise LedgerError("a charge to this book was cut short; start a new one")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._broken = self._broken or not (kind is None or issubclass(kind, _REFUSALS))
        self._lock.release()


class Ledger:
    """Books by dataset, in a file or (path None) in memory."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._journal = (
            None if path is None else Journal(Path(path), kind="ledger", error=LedgerError)
        )
        self._books: dict[str, Book] = {}
        self._runs: dict[str, tuple[str, str]] = {}  # run -> dataset and fingerprint
        self._reached: dict[str, tuple[int, str]] = {}
        self._lock = threading.RLock()
        self._in_memory = _InMemory(self._lock)

    def open(self, dataset: str, terms: Terms) -> None:
        """Create the dataset's book, or check that it has these very terms."""
        with self._current():
            book = self._books.get(dataset)
            if book is None:
                self._append([{"book": dataset, "terms": terms.to_json(), "at": _now()}])
                self._books[dataset] = Book(terms)
            elif book.terms != terms:
                raise LedgerError(
                    f"the book of dataset {dataset!r} promises {book.terms.describe()} "
                    f"(clock {book.terms.clock!r}, time zone {book.terms.time_zone}); this query "
                    f"asks for {terms.describe()} (clock {terms.clock!r}, time zone "
                    f"{terms.time_zone}); use the book's terms or another dataset name"
                )

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
        with self._current():
            book = self._books.get(dataset)
            return book.terms if book else None

    def register(self, dataset: str, run: str, fingerprint: str) -> None:
        """Tie a run id to everything that fixes its releases; another fingerprint is refused."""
        with self._current():
            self._book(dataset)
            known = self._runs.get(run)
            if known is None:
                record = {"dataset": dataset, "run": run, "fingerprint": fingerprint}
                self._append([record | {"at": _now()}])
                self._apply(record)
            elif known != (dataset, fingerprint):
                raise NoiseReuse(
                    f"run {run[:8]} was started with other parameters or data; the same noise "
                    "must not serve both; start a new run"
                )

    def reach(self, dataset: str, run: str, step: int, digest: str) -> None:
        """Note how far a run has come, so that a rollback of its state alone is seen."""
        with self._current():
            self._book(dataset)
            record = {"dataset": dataset, "run": run, "reached": step, "digest": digest}
            self._append([record | {"at": _now()}])
            self._apply(record)

    def reached(self, run: str) -> tuple[int, str] | None:
        """The step that a run has come to, and the digest of its input by then."""
        with self._current():
            return self._reached.get(run)

    def knows(self, dataset: str, run: str) -> bool:
        """Was this run started under this dataset's book?"""
        with self._current():
            return self._runs.get(run, ("", ""))[0] == dataset

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
        with self._current(oldest=charge.cells.first, dataset=dataset):
            book = self._book(dataset)
            news = book.newest_loss_with(charge)
            if news is not None and news <= book.account.total:
                if self._journal is not None:
                    self._journal.append([{"dataset": dataset, "at": _now()} | charge.to_json()])
                book.add_newest(charge, news)
                self._trim(book, charge.step)
                return True
            parts = book.missing(charge, digest_at, verified=verified)
            for part in parts:
                loss = refuse_overspend(dataset, book, part, self.path)
                if self._journal is not None:
                    self._journal.append([{"dataset": dataset, "at": _now()} | part.to_json()])
                book.add(part, loss)
            self._trim(book, charge.cells.first)
            return bool(parts)

    def left(self, dataset: str, step: int | None = None) -> Fraction:
        """What the window ending at `step` (default: the newest) may still spend."""
        with self._current():
            account = self._book(dataset).account
            return account.left(account.newest if step is None else step)

    def peak(self, dataset: str) -> Fraction:
        """The most that any protected unit has lost so far."""
        with self._current():
            return Fraction(self._book(dataset).account.peak, GRID)

    def newest_step(self, dataset: str, run: str) -> int:
        """The newest step that a run was charged for, or -1."""
        with self._current():
            lines = self._book(dataset).spent_on.items()
            return max((line[3] for key, line in lines if key[0] == run), default=-1)

    def report(self) -> list[dict[str, Any]]:
        """What was spent, on what, what is left: one entry per dataset, ready for JSON."""
        with self._current():
            return [report(name, book) for name, book in sorted(self._books.items())]

    def history(self, dataset: str | None = None) -> Iterator[Record]:
        """Every record of the file, oldest first."""
        if self._journal is None:
            return
        for record in self._reread():
            if dataset is None or dataset in (record.get("dataset"), record.get("book")):
                yield record

    def persist(self, path: Path) -> Ledger:
        """Write a book kept in memory to a new file, and go on there."""
        if path.exists():
            raise LedgerError(f"{path} exists already; a ledger is never overwritten")
        durable = Ledger(path)
        assert durable._journal is not None
        records: list[Record] = []
        for name, book in self._books.items():
            since = book.account.since
            records.append({"book": name, "terms": book.terms.to_json(), "at": _now()})
            records += [
                {"dataset": name, "run": run, "fingerprint": fingerprint, "at": _now()}
                for run, (dataset, fingerprint) in self._runs.items()
                if dataset == name
            ]
            records += [{"dataset": name, "at": _now()} | c.to_json() for c in book.charges()]
            if since:
                records.append({"dataset": name, "settled_before": since, "at": _now()})
        with durable._journal.locked():
            durable._journal.append(records)
            for record in records:
                durable._apply(record)
        return durable

    def identity(self) -> str:
        """Which file this is on this machine ("" in memory): a copy has another identity."""
        return "" if self._journal is None else self._journal.identity()

    def close(self) -> None:
        """Release the file."""
        if self._journal is not None:
            self._journal.close()

    def interval_end(
        self, dataset: str, run: str, query: str, purpose: str, first: int
    ) -> int | None:
        """The last step that an interval or cover pays for; -1 if there is none."""
        with self._current():
            found = self._book(dataset).account.interval((run, query, purpose, first))
            return -1 if found is None else found[1]

    def head(self) -> tuple[int, str]:
        """Where the file ends now, to recognise it later; (0, "") in memory."""
        with self._current():
            return (0, "") if self._journal is None else self._journal.head()

    def has(self, head: tuple[int, str]) -> bool:
        """Is this the file that once ended at `head`, with all it held then?"""
        return self._journal is None or self._journal.has(head)

    def _current(
        self, *, oldest: int | None = None, dataset: str = ""
    ) -> AbstractContextManager[None]:
        """Hold the lock, with every charge of every process applied.

        If anything but a refusal cuts a change short (an interrupt, a full disk), what is in
        memory is dropped and read again from the file; without a file, nothing more is admitted.
        """
        return self._in_memory if self._journal is None else self._of_file(oldest, dataset)

    @contextmanager
    def _of_file(self, oldest: int | None, dataset: str) -> Iterator[None]:
        assert self._journal is not None
        with self._lock, self._journal.locked():
            try:
                self._catch_up(oldest, dataset)
                yield
            except _REFUSALS:
                raise
            except BaseException:
                self._start_over()
                raise

    def _catch_up(self, oldest: int | None, dataset: str) -> None:
        assert self._journal is not None
        try:
            for record in self._journal.read_new():
                self._apply(record)
            book = self._books.get(dataset)
            if book is not None and oldest is not None and oldest < book.account.since:
                self._reload(dataset, oldest)
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        assert self._journal is not None
        self._books.clear()
        self._runs.clear()
        self._reached.clear()
        self._journal.rewind()

    def _reload(self, dataset: str, oldest: int) -> None:
        """Read a book again with more of its past, for a charge to a step long gone."""
        terms = self._books[dataset].terms
        self._books[dataset] = Book(terms, since=max(0, oldest - (terms.width or oldest)))
        for record in self._reread():
            if record.get("dataset") == dataset:
                self._apply(record)

    def _reread(self) -> list[Record]:
        assert self._journal is not None
        fresh = Journal(self._journal.path, kind="ledger", error=LedgerError)
        try:
            return fresh.read_new()
        finally:
            fresh.close()

    def _apply(self, record: Record) -> None:
        if "book" in record:
            self._books.setdefault(record["book"], Book(Terms.from_json(record["terms"])))
        elif "fingerprint" in record:
            self._runs[record["run"]] = (record["dataset"], record["fingerprint"])
        elif "reached" in record:
            self._reached[record["run"]] = (record["reached"], record["digest"])
        elif "settled_before" in record:
            self._books[record["dataset"]].forget_before(record["settled_before"])
        else:
            self._books[record["dataset"]].add(Charge.from_json(record))

    def _append(self, records: list[Record]) -> None:
        if self._journal is not None:
            self._journal.append(records)

    def _book(self, dataset: str) -> Book:
        if dataset not in self._books:
            raise LedgerError(f"there is no book for dataset {dataset!r}; open it with its terms")
        return self._books[dataset]

    def _trim(self, book: Book, charged: int) -> None:
        """Forget what is far behind both the newest step and the one being charged (a replay)."""
        if charged <= book.account.since + _KEEP:
            return
        width = book.terms.width
        if width is None:
            return
        horizon = min(book.account.newest, charged) - width - _KEEP
        if horizon > book.account.since + _KEEP:
            book.forget_before(horizon)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
