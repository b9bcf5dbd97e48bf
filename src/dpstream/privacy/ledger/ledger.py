"""The budget book: durable, append-only, shared by every query on a dataset; it refuses overspend.

A ledger file holds one book per dataset. Each charge is checked against the book under the file's
lock and fsynced before the caller may draw noise. Several processes may charge at once; a kill
leaves either the whole charge or none. In PostgreSQL (`store.py`) the same holds for several hosts,
and what is said of the file here is said of its tables. Without a path the book lives in memory,
until a run that is kept is charged to it: then it moves to a file, for all that share it
(`Ledger.persist`).

What is in memory is always in step with the file: whoever holds the lock sees every charge of every
process. A change that is cut short never stays half made: memory is dropped and the file read
again. Old steps are settled, so that memory stays small, and read back if a charge asks for them.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from dpstream.errors import (
    BudgetExceeded,
    InvalidParameter,
    LedgerError,
    NewBook,
    NoiseReuse,
    StateError,
)
from dpstream.html_table import html_table
from dpstream.privacy.amounts import GRID, Amount, exact
from dpstream.privacy.ledger.balance import Book, DigestAt, report
from dpstream.privacy.ledger.charges import (
    Allowance,
    Charge,
    KnownRun,
    Terms,
    digests_by_step,
    is_about_run,
    registration,
)
from dpstream.privacy.ledger.compaction import fold
from dpstream.privacy.ledger.principals import Shares, refuse_stranger
from dpstream.privacy.ledger.refusals import (
    LastPeriodOver,
    book_in_words,
    in_words,
    promise_in_words,
    protection,
    refuse_ended,
    refuse_overspend,
    refuse_too_small,
    refuse_void,
)
from dpstream.privacy.ledger.store import (
    LedgerAddress,
    LedgerPlace,
    LedgerStore,
    Overtaken,
    as_ledger_place,
    open_store,
)
from dpstream.privacy.state.journal import Journal, Record, this_process
from dpstream.privacy.state.secret import mint_run_id

BACKUPS = timedelta(days=35)
"""For how long a backup of a state directory may be put back, unless a ledger says otherwise."""
_KEEP = 1 << 14  # steps held in memory beyond the window; older ones are read back if asked for
_VERBATIM = timedelta(days=1)  # records that a compaction leaves as they are
_WORTHWHILE = 1024  # records that it folds at least
_LOG = logging.getLogger("dpstream.ledger")
_REFUSALS = (BudgetExceeded, NoiseReuse, LedgerError, StateError)
P = ParamSpec("P")
T = TypeVar("T")


def _done_anew(
    method: Callable[Concatenate[Ledger, P], T],
) -> Callable[Concatenate[Ledger, P], T]:
    """Do it once more if others wrote while its server was away: it is checked against theirs."""

    @wraps(method)
    def call(ledger: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return method(ledger, *args, **kwargs)
            except Overtaken:
                with ledger._lock:
                    if ledger._depth:  # the outermost one is what was overtaken
                        raise

    return call


class Ledger:
    """Books by dataset, and the runs charged to them, in a file or (path None) in memory.

    >>> import dpstream as dps
    >>> book, sample = Ledger(), dps.mechanisms.Sample(epsilon=1, window=12)
    >>> book.open("visits", sample.terms())
    >>> series = dps.release(sample, [5, 7], ledger=book, dataset="visits")
    >>> book.report()[0]["dataset"]
    'visits'
    """

    def __init__(
        self, path: str | LedgerPlace | None = None, *, backups: timedelta = BACKUPS
    ) -> None:
        """`path`: a file, or the address of a server, such as "postgresql://ana@db/books".

        `backups`: for how long a backup of a state directory may be put back. The digests of so
        many days' steps are kept.
        """
        self.path = None if path is None else as_ledger_place(path)
        if backups < timedelta():
            raise InvalidParameter(f"backups must be a length of time; got {backups}")
        self._backups, self._look_again = backups, ""
        self._journal: LedgerStore | None = None if self.path is None else open_store(self.path)
        self._books: dict[str, Book] = {}
        self._shares: dict[str, Shares] = {}  # of books that name analysts; made when asked for
        self._runs: dict[str, KnownRun] = {}
        self._lock, self._process = threading.RLock(), this_process.id
        self._broken = False  # a change in memory was cut short: nobody is let in
        self._moved: Record | None = None  # to where: nothing is charged here any more
        self._moved_from: list[str] = []  # identities of the ledger that was moved here
        self._depth = 0  # sections of `_locked` that are open

    # Books

    @_done_anew
    def open(
        self, dataset: str, terms: Terms, *, provisional: bool = False, say: bool = True
    ) -> None:
        """Create the dataset's book, or check that it has these very terms.

        `provisional`: its budget is that of something small which comes before the queries (a
        proposal of bounds); whoever opens it next sets the budget. A new book is told to the log
        "dpstream.ledger", unless whoever opens it says so (`say` False).

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> [each["dataset"] for each in book.report()]
        ['clicks']
        """
        with self._locked():
            book = self._books.get(dataset)
            if book is None:
                more = {"provisional": True} if provisional else {}
                record = {"book": dataset, "terms": terms.to_json()} | more
                self._append(record)
                self._books[dataset] = Book(terms, in_memory=self._journal is None)
                self._books[dataset].provisional = provisional
                if say and self.path is not None:
                    until = "; whoever opens it next sets its budget" if provisional else ""
                    _LOG.info(
                        "opened %s with %s%s",
                        book_in_words(dataset, self.path),
                        promise_in_words(terms),
                        until,
                    )
            elif book.provisional and book.terms.with_budget_of(terms) == terms:
                self.grow(dataset, terms, because="its first budget was provisional", who="")
            elif book.terms != terms:
                budget_alone = book.terms.with_budget_of(terms) == terms
                grow = "; dpstream ledger grow changes a book's budget" if budget_alone else ""
                raise LedgerError(
                    f"the book of dataset {dataset!r} promises {book.terms.describe()} "
                    f"(clock {book.terms.clock!r}, time zone {book.terms.time_zone}); this query "
                    f"asks for {terms.describe()} (clock {terms.clock!r}, time zone "
                    f"{terms.time_zone}); use the book's terms or another dataset name{grow}"
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

    @_done_anew
    def grow(self, dataset: str, terms: Terms, *, because: str, who: str) -> bool:
        """Give a book another budget, larger or smaller, for all that share it; False: it has it.

        Whom it protects stays; less than what is spent already is refused. Recorded with who and
        why.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.grow("clicks", promise(epsilon=3, delta=1e-6), because="agreed", who="ann")
        True
        """
        _refuse_no_reason("a change of budget", because)
        with self._locked():
            book = self._book(dataset)
            if book.terms.with_budget_of(terms) != terms:
                raise LedgerError(
                    f"the book of {dataset!r} protects {in_words(book.terms)}, and a change of its "
                    f"budget leaves that as it is; got {in_words(terms)}"
                )
            if book.terms == terms:
                return False
            refuse_too_small(dataset, book.with_budget(terms), self.path, had=book.terms)
            self._change({"dataset": dataset, "grown": terms.to_json()}, because, who)
            return True

    @_done_anew
    def allow(
        self,
        dataset: str,
        analyst: str,
        *,
        share: Amount = 1,
        largest: Amount | None = None,
        because: str,
        who: str,
    ) -> None:
        """Name an analyst who may charge a book, with a share of it and a largest query (epsilon).

        From the first one on the book takes new runs only from those it names.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.allow("clicks", "ana", share=0.5, because="the web team", who="kim")
        >>> list(book.report()[0]["principals"])
        ['ana']
        """
        _refuse_no_reason("an allowance", because)
        most = None if largest is None else exact(largest, "largest")
        allowed = Allowance(share=exact(share, "share"), largest=most)
        if not analyst.strip():
            raise InvalidParameter("an analyst needs a name")
        with self._locked():
            self._book(dataset)
            named = {"dataset": dataset, "analyst": analyst}
            self._change(named | {"allowed": allowed.to_json()}, because, who)

    def terms(self, dataset: str) -> Terms | None:
        """The terms of a dataset's book, if there is one.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.terms("clicks").unit, book.terms("orders")
        ('user', None)
        """
        with self._locked():
            book = self._books.get(dataset)
            return book.terms if book else None

    @_done_anew
    def charge(
        self,
        dataset: str,
        charge: Charge,
        digest_at: DigestAt = lambda step: "",
        *,
        verified: bool = False,
        instead_of: str = "",
    ) -> bool:
        """Write the charge down, or raise BudgetExceeded; False if it was there already.

        A charge made before must have read the same input. `verified` says that the caller's own
        log has just shown that, for a replay whose digests do not reach the recorded ones.
        `instead_of`: a run that has held the place of this one, and was to begin no step. Its
        charge is given back by the record that makes this one.
        """
        with self._locked():
            self._refuse_ended(charge.run)
            if instead_of:
                return self._charge_instead(dataset, charge, digest_at, instead_of)
            oldest = charge.step if charge.kind == "close" else charge.cells.first
            book = self._book(dataset, oldest=oldest)
            charge = book.priced(charge)
            loss = None if book.principals else book.newest_loss_with(charge)
            if loss is not None and loss <= book.account.total:
                if self._journal is not None:
                    self._append({"dataset": dataset} | charge.to_json())
                book.add_newest(charge, loss)
                self._settle(book, charge.step)
                return True
            parts = book.missing(charge, digest_at, verified=verified)
            if not parts and charge.lost_mass and book.learn(charge) is not None:
                self._append({"dataset": dataset, "learned": charge.to_json()})
                self._apply({"dataset": dataset, "learned": charge.to_json()})
            shares = self._shares_of(dataset) if book.principals else None
            for part in parts:
                loss = refuse_overspend(dataset, book, part, self.path)
                if shares is not None:
                    shares.refuse(dataset, part, self.path)
                if self._journal is not None:
                    self._append({"dataset": dataset} | part.to_json())
                book.add(part, loss)
                if shares is not None:
                    shares.add(part)
            self._settle(self._book(dataset), charge.cells.first)
            return bool(parts)

    def _charge_instead(self, dataset: str, charge: Charge, digest_at: DigestAt, held: str) -> bool:
        """Charge a run whose place another one has held, if that one has not begun or ended."""
        book, known = self._book(dataset), self._known(held)
        if known.ended is not None or all(line[0] != held for line in book.spent_on):
            return self.charge(dataset, charge, digest_at)
        refuse_void(dataset, book, held, known)
        charge = book.priced(charge)
        if not book.missing(charge, digest_at):
            return False
        free = book.with_charges(book.terms, [c for c in book.charges() if c.run != held])
        refuse_overspend(dataset, free, charge, self.path)
        if free.principals:
            shares = Shares(free, lambda run: self._known(run).analyst)
            shares.refuse(dataset, charge, self.path)
        epoch = mint_run_id().hex()
        record = {"dataset": dataset, "instead_of": held, "epoch": epoch} | charge.to_json()
        self._append(record)
        self._apply(record)
        return True

    @_done_anew
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

    @_done_anew
    def left(self, dataset: str, step: int | None = None) -> Fraction:
        """What the window ending at `step` (default: the newest) may still spend.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.left("clicks") == book.terms("clicks").total
        True
        """
        with self._locked():
            account = self._book(dataset, oldest=step).account
            return account.left(account.newest if step is None else step)

    def peak(self, dataset: str) -> Fraction:
        """The most that any protected unit has lost so far.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> int(book.peak("clicks"))
        0
        """
        with self._locked():
            return Fraction(self._book(dataset).account.most, GRID)

    @_done_anew
    def first_room(self, dataset: str, charge: Charge) -> int | None:
        """The first period from which on a charge that names periods fits; None: there is none."""
        with self._locked():
            book = self._book(dataset)
            return book.account.first_room(book.priced(charge))

    def rehearsal(self) -> Ledger:
        """A copy in memory, to see what charges would lead to."""
        copy = Ledger()
        with self._locked():
            for record in self._all_records():
                copy._apply(record)
        return copy

    def report(self) -> list[dict[str, Any]]:
        """What was spent, on what, what is left: one entry per dataset, ready for JSON.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> [(each["dataset"], each["spent_on"]) for each in book.report()]
        [('clicks', [])]
        """
        with self._locked():
            reports = [report(name, book) for name, book in sorted(self._books.items())]
            for each in reports:
                self._tell_analysts(each)
            return reports

    def _repr_html_(self) -> str:
        """The books, as notebooks show them."""
        books = [
            {
                "dataset": book["dataset"],
                "promise": book["promise"],
                "runs": book["runs"],
                "spent": float(Fraction(book["spent"]) / Fraction(book["terms"]["total"])),
            }
            for book in self.report()
        ]
        return html_table(books, "Books; spent: as a share of the whole")

    def _tell_analysts(self, book: dict[str, Any]) -> None:
        """Add who asked for each run, and what each analyst of the book may spend and has spent."""
        for line in book["spent_on"]:
            if analyst := self._known(line["run"]).analyst:
                line["analyst"] = analyst
        named = self._books[book["dataset"]].principals
        if named:
            shares = self._shares_of(book["dataset"])
            book["principals"] = {
                analyst: allowed.to_json() | {"spent": str(shares.spent(analyst))}
                for analyst, allowed in sorted(named.items())
            }

    def history(self, dataset: str | None = None) -> Iterator[Record]:
        """Every record of the file, oldest first.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> book = Ledger(Path(mkdtemp()) / "book")
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> len([*book.history()])
        1
        >>> book.close()
        """
        with self._locked():
            records = self._read_all()
        for record in records:
            about = record.get("dataset"), record.get("book")
            if dataset is None or dataset in about or about == (None, None):
                yield record

    # Runs

    @_done_anew
    def register(
        self, dataset: str, run: str, fingerprint: str, *, analyst: str = "", kept: bool = False
    ) -> None:
        """Tie a run id to everything that fixes its releases; another fingerprint is refused.

        `analyst`: who asks for it; a book that names analysts takes new runs from them alone.
        `kept`: it has a state directory, and so tells of every step before it draws.
        """
        with self._locked():
            book = self._book(dataset)
            known = self._known(run)
            if not known.fingerprint:
                refuse_stranger(dataset, book, analyst, self.path)
                self._note(dataset, run, **registration(fingerprint, analyst, kept=kept))
            elif (known.dataset, known.fingerprint) != (dataset, fingerprint):
                raise NoiseReuse(
                    f"run {run[:8]} was started with other parameters or data; the same noise "
                    "must not serve both; start a new run"
                )

    def known(self, run: str) -> KnownRun:
        """What is known of a run besides its charges."""
        with self._locked():
            return self._known(run).snapshot()

    @_done_anew
    def begin(self, dataset: str, run: str, epoch: str, *, after: str) -> None:
        """Note that a process starts, or goes on with, a run; another one must stop.

        `after`: the epoch that was the newest when the process looked. If another has come since,
        it is the process that must not go on.
        """
        with self._locked():
            self._refuse_overtaken(run, after)
            self._note(dataset, run, epoch=epoch)

    @_done_anew
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

    @_done_anew
    def note_begun(self, dataset: str, run: str, period: int) -> None:
        """Note the last period of units that the windows about to be drawn reach into.

        Written before the first draw of such a window. It goes by windows, not by the clock: rows
        may be dated ahead.
        """
        with self._locked():
            self._refuse_ended(run)
            begun, until = self._known(run).begun, self._known(run).until
            if until is not None and period > until:
                raise LastPeriodOver(
                    f"run {run[:8]} was to end with the last period before this one (dpstream "
                    "apply), and nothing more of it is paid for; have the change taken up: start "
                    "the pipeline again, or send SIGHUP (dpstream serve: POST /reload); if an "
                    "apply was broken off, call it once more"
                )
            if begun is None or period > begun:
                self._note(dataset, run, begun=period)

    @_done_anew
    def limit(self, dataset: str, run: str, until: int | None, *, because: str, who: str) -> None:
        """Let a run begin no period after `until`, and pay for none; None: take that back.

        Later periods are free for others from now on. Taken back, they must be free still, in the
        book and in the share of the analyst who asked for the run.
        """
        _refuse_no_reason("the last period of a run", because)
        with self._locked():
            self._refuse_ended(run)
            book, known = self._book(dataset), self._known(run)
            if known.until == until:
                return
            if not book.account.periods.of_run(run):
                raise LedgerError(f"run {run[:8]} has no charge to {dataset!r} that names periods")
            if until is not None and known.begun is not None and until < known.begun:
                raise LedgerError(f"run {run[:8]} has begun a later period already")
            record = {"dataset": dataset, "run": run, "until": until}
            wider = book.with_charges(book.terms, book.charges())
            wider.account.periods.limit(run, until)
            try:
                refuse_too_small(dataset, wider, self.path, had=book.terms)
            except BudgetExceeded:
                raise BudgetExceeded(
                    f"{book_in_words(dataset, self.path)}: the later periods of run {run[:8]} were "
                    "given to others since, and cannot be given back to it"
                ) from None
            if book.principals:
                shares = Shares(wider, lambda run: self._known(run).analyst)
                shares.refuse_more(dataset, run, self.path)
            self._change(record, because, who)

    @_done_anew
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

    @_done_anew
    def void(self, dataset: str, run: str, *, because: str, who: str) -> None:
        """Give back the charge of a run that has begun no step, and never will.

        The run is ended first: from then on whatever state of it turns up is refused before it
        draws. A kill between the two leaves it ended and charged; voided again it is given back.
        """
        _refuse_no_reason("a charge that is given back", because)
        with self._locked():
            refuse_void(dataset, self._book(dataset), run, self._known(run))
            self.end(dataset, run, because=because, who=who)
            self._note(dataset, run, voided=because, who=who)

    @_done_anew
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

    @_done_anew
    def note_erasure(self, dataset: str, run: str, step: int, digest: str) -> None:
        """Note that a unit was erased before `step`: a state that still has it is an older one."""
        with self._locked():
            self._note(dataset, run, erasure=step, digest=digest)

    @_done_anew
    def note_finish(self, dataset: str, run: str, steps: int, *, epoch: str) -> None:
        """Note how many steps a finished series has, before what it held back is drawn."""
        with self._locked():
            self._refuse_overtaken(run, epoch)
            if self._known(run).finished != steps:
                self._note(dataset, run, finished=steps)

    @_done_anew
    def note_adoption(self, dataset: str, run: str, *, because: str, who: str) -> None:
        """Note that somebody vouches for a directory, or ledger, that was moved."""
        with self._locked():
            self._note(dataset, run, adopted=because, who=who)

    @_done_anew
    def note_restore(
        self, dataset: str, run: str, *, because: str, who: str, told: int, lost: list[int]
    ) -> None:
        """Note that a run goes on from a backup: the last step told, and windows that are lost."""
        with self._locked():
            self._note(dataset, run, restored=because, who=who, told=told, lost=lost)

    # The file

    @property
    def place(self) -> LedgerPlace | None:
        """Where the file is, from the root, or the server; None in memory."""
        place = None if self._journal is None else self._journal.place
        return Path(os.path.realpath(place)) if isinstance(place, Path) else place

    def identity(self) -> str:
        """Which file this is on this machine ("" in memory): a copy has another identity."""
        with self._lock:
            return "" if self._journal is None else self._journal.identity()

    def replaces(self, identity: str) -> bool:
        """Is this the file with that identity, or what compactions or a move have made of it?"""
        if self._journal is None:
            return not identity
        with self._locked():
            return self._journal.replaces(identity) or identity in self._moved_from

    @property
    def moved_to(self) -> LedgerPlace | None:
        """Where it is since it was moved, and fenced here; None: it is charged here."""
        if self._journal is None:
            return None
        with self._lock, self._journal.locked():
            for record in self._journal.read_all():
                if "moved" in record:
                    return as_ledger_place(record["moved"])
        return None

    def head(self) -> tuple[int, str]:
        """Where the file ends now, to recognise it later; (0, "") in memory."""
        with self._locked():
            return (0, "") if self._journal is None else self._journal.head()

    def has(self, head: tuple[int, str]) -> bool:
        """Is this the file that once ended at `head`, with all it held then?"""
        with self._locked():
            return self._journal is None or self._journal.has(head)

    def persist(self, path: str | LedgerPlace) -> None:
        """Keep a book that is in memory in a file from now on; one that has a file stays there.

        The book moves: everybody who holds this ledger charges the file. A file that exists is
        taken up if nothing was charged in memory, and refused otherwise: two budgets are not one.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> place = Path(mkdtemp()) / "book"
        >>> book.persist(place)
        >>> book.close()
        >>> Ledger(place).terms("clicks").unit
        'user'
        """
        with self._lock:
            with self._locked():
                if self.path is not None:
                    return
            path = as_ledger_place(path)
            if isinstance(path, Path) and not path.exists():
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
                        file.open(name, book.terms, say=False)
                    for run in self._runs.keys() - file._runs.keys():  # known, not charged
                        for record in self._runs[run].records(run):
                            file._note(**record)
            except BaseException:
                file.close()
                raise
            self.path, self._journal = path, file._journal
            self._start_over()

    def move_to(self, place: LedgerPlace, *, because: str, who: str) -> None:
        """Move a ledger file, as it is, to a server that has none there, or back to a new file.

        The old one is fenced first: whatever still runs with it is refused at its next step. A kill
        between the two leaves nothing that can be charged; the same call goes on from there.

        >>> book = Ledger()  # in memory: `persist` gives it a file first
        >>> book.move_to("postgresql://ana@db/books", because="a second host", who="kim")
        Traceback (most recent call last):
        dpstream.errors.LedgerError: a ledger is moved from a file to a server, or back; got ...
        """
        _refuse_no_reason("a move", because)
        old, to_server = self._journal, isinstance(place, LedgerAddress)
        if old is None or to_server == isinstance(self.path, LedgerAddress):
            raise LedgerError(
                f"a ledger is moved from a file to a server, or back; got {self.path} and {place}"
            )
        said = {"because": because, "who": who}
        with self._lock:
            try:
                if isinstance(place, LedgerAddress):
                    self._move_to_server(old, place, said)
                else:
                    self._move_to_file(old, Path(os.path.abspath(str(place))), said)
            finally:
                self._start_over()

    def _move_to_server(self, old: LedgerStore, place: LedgerAddress, said: Record) -> None:
        with closing(place.open()) as store, old.locked(), store.locked():
            lines, known = self._fence(old, place, store.read_new(), said)
            if lines:
                store.fill(lines, known)

    def _move_to_file(self, old: LedgerStore, file: Path, said: Record) -> None:
        there: list[Record] = []
        if file.exists():
            with closing(open_store(file)) as other, other.locked():
                there = other.read_new() or [{}]
        with old.locked():  # a server's fence is durable when its section is over
            self._fence(old, file, there, said)
        with old.locked():
            lines, known = self._fence(old, file, there, said)
            if lines:
                Journal.write_copy(file, lines, known, error=LedgerError)

    def _fence(
        self, old: LedgerStore, place: LedgerPlace, there: list[Record], said: Record
    ) -> tuple[list[tuple[int, str]], Record]:
        """Fence a ledger that is moved, once; its lines, none if the new one has them already.

        `there`: what the new one holds. A record for it to end with says where they come from.
        """
        self._start_over()
        records = old.read_new()
        fence = next((record for record in records if "moved" in record), None)
        if fence is not None and fence["moved"] != str(place):
            raise LedgerError(f"{self.path} was moved to {fence['moved']} before")
        came = any(old.identity() in record.get("identities", []) for record in there)
        if there and not (fence and came):
            raise LedgerError(
                f"{place} is a ledger with records of its own, and two budgets are not one; name "
                "another (on a server: ?schema=...)"
            )
        lines = [] if came else old.read_lines()
        if fence is None:
            self._append({"moved": str(place), **said})
        else:
            lines = lines[: records.index(fence) - len(records)]
        before = [each for r in records for each in r.get("identities", [])]
        identities = [*before, *(old.identities if isinstance(old, Journal) else [old.identity()])]
        return lines, {"moved_from": str(old.place), "identities": identities, **said, "at": _now()}

    def repair(self, *, because: str) -> None:
        """Take the file as it is although its head is lost, or says that it held more.

        What it lacks is not counted any more, so this is written down, with the reason. A record
        that does not match its checksum is refused all the same: restore the file.

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from dpstream.privacy.accounting.promises import promise
        >>> with TemporaryDirectory() as folder:
        ...     book = Ledger(Path(folder) / "book")
        ...     book.open("clicks", promise(epsilon=2, delta=1e-6))
        ...     book.repair(because="the disk of the head was lost")
        ...     book.close()
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

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.compact()  # of a book in memory nothing is folded
        >>> [each["dataset"] for each in book.report()]
        ['clicks']
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
        """Release the file.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> book = Ledger()
        >>> book.open("clicks", promise(epsilon=2, delta=1e-6))
        >>> book.close()
        """
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
            self._depth += 1
            try:
                if self._journal is not None and not self._journal.head()[0]:  # nothing is read yet
                    self._forget()
                for record in self._journal.read_new() if self._journal else ():
                    self._apply(record)
                if self._moved is not None:
                    raise LedgerError(
                        f"{self.path} was moved to {self._moved['moved']} ({self._moved['at']}, by "
                        f"{self._moved['who']}: {self._moved['because']}); name that one: nothing "
                        "is charged here any more"
                    )
                yield
            except _REFUSALS:
                raise
            except BaseException:
                if self._journal is None:
                    self._broken = True
                else:
                    self._start_over()
                raise
            finally:
                self._depth -= 1

    def _start_over(self) -> None:
        """Drop what is in memory, to read the file from its first record."""
        assert self._journal is not None
        self._forget()
        self._journal.rewind()

    def _forget(self) -> None:
        self._books.clear()
        self._shares.clear()
        self._runs.clear()
        self._moved, self._moved_from = None, []

    def _apply(self, record: Record) -> None:
        """Make in memory the change that a record of the file stands for."""
        if "book" in record:
            book = Book(Terms.from_json(record["terms"]), since=record.get("settled", 0))
            book.account.peak = record.get("peak", 0)
            book.provisional = record.get("provisional", False)
            self._books.setdefault(record["book"], book)
        elif "grown" in record or "allowed" in record or "learned" in record:
            self._apply_change(record)
        elif "moved" in record:
            self._moved = record
        elif "moved_from" in record:
            self._moved_from = record["identities"]
        elif is_about_run(record):
            run = record["run"]
            self._runs.setdefault(run, KnownRun()).apply(record)
            if "begun" in record:
                self._books[record["dataset"]].account.periods.begin(run, record["begun"])
            elif "ended" in record:
                self._books[record["dataset"]].account.periods.end(run)
            elif "until" in record:
                self._books[record["dataset"]].account.periods.limit(run, record["until"])
            elif "voided" in record:
                self._apply_change(record)
            if not record.keys().isdisjoint(("begun", "ended", "until")):
                self._shares.pop(record["dataset"], None)
        elif "peak" in record:
            account = self._books[record["dataset"]].account
            account.peak = max(account.peak, record["peak"])
        elif "amount" in record:  # others are for people
            charge = Charge.from_json(record)
            if held := record.get("instead_of"):
                note = {"dataset": record["dataset"], "run": held, "who": ""}
                because = f"run {charge.run[:8]} has begun, whose place it held"
                self._apply(note | {"ended": because, "epoch": record["epoch"]})
                self._apply(note | {"voided": because})
            self._books[record["dataset"]].add(charge)
            if record["dataset"] in self._shares:
                self._shares[record["dataset"]].add(charge)

    def _apply_change(self, record: Record) -> None:
        """Make a change of a book's budget or analysts, or give a charge back."""
        dataset = record["dataset"]
        book = self._books[dataset]
        if "grown" in record:
            book = book.with_budget(Terms.from_json(record["grown"]))
        elif "allowed" in record:
            named = {record["analyst"]: Allowance(**record["allowed"])}
            book.principals = book.principals | named
        elif "voided" in record:
            others = [charge for charge in book.charges() if charge.run != record["run"]]
            book = book.with_charges(book.terms, others)
        else:
            book = book.learn(Charge.from_json(record["learned"])) or book
        self._books[dataset] = book
        self._shares.pop(dataset, None)

    def _change(self, record: Record, because: str, who: str) -> None:
        """Write down a change of a book, with who and why, and make it."""
        record = record | {"because": because, "who": who}
        self._append(record)
        self._apply(record)

    def _shares_of(self, dataset: str) -> Shares:
        """What each analyst of a book has spent."""
        if dataset not in self._shares:
            book = self._books[dataset]
            self._shares[dataset] = Shares(book, lambda run: self._known(run).analyst)
        return self._shares[dataset]

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
            more = {"provisional": True} if book.provisional else {}
            records.append({"book": name, "terms": book.terms.to_json()} | more)
            runs = [(run, known) for run, known in self._runs.items() if known.dataset == name]
            records += [record for run, known in runs for record in known.records(run)]
            records += [{"dataset": name} | charge.to_json() for charge in book.charges()]
            records.append({"dataset": name, "peak": book.account.peak})
            records += [
                {"dataset": name, "analyst": analyst, "allowed": allowed.to_json()}
                for analyst, allowed in book.principals.items()
            ]
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
            self._shares.pop(dataset, None)
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
            for shares in self._shares.values():
                if shares.book is book:
                    shares.settle_before(horizon)

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


def follow_moves(place: LedgerPlace) -> LedgerPlace:
    """Where the ledger of a place is since it was moved (`dpstream ledger move`)."""
    seen = [str(place)]
    while True:
        with closing(Ledger(place)) as ledger:
            moved = ledger.moved_to
        if moved is None:
            return place
        if str(moved) in seen or not moved.exists():
            raise LedgerError(
                f"{place} was moved to {moved}, and there is no ledger there; finish the move (the "
                "same dpstream ledger move again), or restore it"
            )
        place = moved
        seen.append(str(place))


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


def _refuse_no_reason(what: str, because: str) -> None:
    if not because.strip():
        raise InvalidParameter(f"{what} is recorded with its reason; say why (because=...)")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _before(now: str, length: timedelta) -> str:
    """The moment that was so long before."""
    try:
        return (datetime.fromisoformat(now) - length).isoformat(timespec="milliseconds")
    except OverflowError:
        return ""  # before everything
