"""What does not fit into its dataset's book is refused before a row is read.

A run of a query with periods that finds the first of them spent begins behind them.
"""

from __future__ import annotations

import getpass
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.engines.embedded.series_run import refuse_other_steps
from dpstream.engines.query_run import AnyQuery, Beginning
from dpstream.engines.run_storage import KIND
from dpstream.errors import BudgetExceeded, InvalidParameter, StateError
from dpstream.privacy.amounts import show
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import amount_in_words, book_in_words
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, mint_run_id
from dpstream.privacy.state.run_directory import is_charged, read_about
from dpstream.query.book_periods import book_ticks
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import iso

__all__ = ["AnyQuery", "refuse_early", "was_charged"]


def refuse_early(
    ledger: Ledger,
    dataset: str,
    queries: Sequence[tuple[AnyQuery, Path | None]],
    *,
    now: int,
    terms: Terms | None = None,
    take_over: bool = False,
    analysts: Mapping[str, str] | None = None,
    held: Mapping[str, str] | None = None,
) -> dict[str, Beginning]:
    """Refuse queries that do not fit into the book together; where others begin, by their name.

    `queries` come with their state directories: a run that was charged is not charged again. They
    are charged to a copy of the book; the book itself still decides when they begin. A book that is
    not open yet would be opened with `terms`, or by the first of them, for it alone; one whose
    budget is provisional decides when they begin. `take_over`: earlier runs of the same queries are
    to be ended.
    `analysts`: who asks for each query, by its name. `held`: runs that hold their places, likewise.
    """
    book = next((each for each in ledger.report() if each["dataset"] == dataset), None)
    path, known = ledger.path, ledger.known
    if (book is None and terms is None and len(queries) < 2) or (book and "provisional" in book):
        return {}
    if book is None:
        ledger, first = Ledger(), queries[0][0].starting(now)
        own = first.terms() if isinstance(first, SeriesQuery) else plan_query(first).terms()
        ledger.open(dataset, terms or own)
        (book,) = ledger.report()
    paid = {line["run"] for line in book["spent_on"]}
    new = [pair for pair in queries if not is_charged(pair[1], paid, known)]
    series = [query for query, _ in new if isinstance(query, SeriesQuery)]
    which, begun = book_in_words(dataset, path), {}
    if book["terms"]["measure"] == "mu_squared" or book["terms"]["unit"] == "user":
        rehearsal = _Rehearsal(
            copy=ledger.rehearsal(),
            which=which,
            book=book,
            now=now,
            analysts=analysts or {},
            held=held or {},
        )
        for query, folder in new:
            if isinstance(query, Query):
                begun[query.name] = rehearsal.begin(query, folder, take_over=take_over)
    if series and book["terms"]["unit"] != "user":
        _refuse_series(ledger, dataset, series, which)
    return begun


def free_place(ledger: Ledger, dataset: str, held: str, *, because: str = "it is free") -> None:
    """Free a place that a run holds for another one, if it does still; after a kill it may not."""
    known = ledger.known(held)
    if known.dataset == dataset and known.ended is None and held in _paid(ledger, dataset):
        ledger.void(dataset, held, because=because, who="")


def was_charged(ledger: Ledger, dataset: str, folder: Path | None) -> bool:
    """Is the run of a state directory charged to the book? Then it begins no more."""
    return is_charged(folder, _paid(ledger, dataset), ledger.known)


def _paid(ledger: Ledger, dataset: str) -> set[str]:
    """The runs that are charged to a book."""
    books = [book for book in ledger.report() if book["dataset"] == dataset]
    return {line["run"] for book in books for line in book["spent_on"]}


@dataclass(kw_only=True)
class _Rehearsal:
    """Queries over users that begin, one after another, in a copy of their book."""

    copy: Ledger
    which: str
    book: dict[str, Any]
    now: int
    analysts: Mapping[str, str]
    held: Mapping[str, str]

    @property
    def terms(self) -> Terms:
        """The terms of the book."""
        return Terms.from_json(dict(self.book["terms"]))

    def begin(self, query: Query, folder: Path | None, *, take_over: bool) -> Beginning:
        """Where the query begins; it is refused if it does not fit there.

        Whose rows are protected is looked at before how much of the budget is left for them.
        """
        kept = None if folder is None else read_about(folder, kind=KIND)
        if kept is not None:  # it was begun, and not charged
            chosen = Beginning(**kept["notes"].get("beginning", {}))
            query = query.starting(kept["notes"]["now"])
            if take_over and not chosen.takes_over and self._earlier_runs(query):
                raise StateError(
                    f"{folder} was begun without a take-over, and never charged: nothing was "
                    "published from it; remove it, and take over again"
                )
        else:
            query = query.starting(self.now)
            chosen = self._take_over(query) if take_over else Beginning()
        for run in chosen.takes_over:
            self.copy.end(self.book["dataset"], run, because="taken over", who="")
        free_place(self.copy, self.book["dataset"], self.held.get(query.name, ""))
        try:
            self._pay(_from(query, chosen))
        except BudgetExceeded as problem:
            later = None if chosen != Beginning() else self._later(query, str(problem))
            if later is None:
                raise self._refused(query, problem) from None
            return later
        return chosen

    def _pay(self, query: Query) -> None:
        plan = plan_query(query).for_book(self.terms)
        self.copy.admit(self.book["dataset"], plan.terms(self.terms), f"query {query.name!r}")
        run, analyst = mint_run_id(), self.analysts.get(query.name, "")
        self.copy.register(self.book["dataset"], run.hex(), "copy", analyst=analyst)
        plan.pay(self._spend(query, run), "copy")

    def _spend(self, query: Query, run: bytes | None = None) -> QuerySpend:
        return QuerySpend(
            run=run or mint_run_id(),
            query=query.name,
            ledger=self.copy,
            dataset=self.book["dataset"],
            keys=MemoryWindowKeys(),
        )

    def _take_over(self, query: Query) -> Beginning:
        """Behind the last period that earlier runs of the query have begun, which are ended."""
        before, ticks = self._earlier_runs(query), book_ticks(self.terms)
        if not before or ticks is None:
            return Beginning()
        # a name that nobody gave may be that of any query
        if query.name == Query.name and sum(not line["ended"] for line in before) > 1:
            raise InvalidParameter(
                f"several runs of queries without a name live in {self.which}, and a take-over "
                "ends them for good; give queries names (name=..., --name)"
            )
        runs = tuple(line["run"] for line in before if not line["ended"])
        begun = [line["begun"] for line in before if line["begun"] is not None]
        first = ticks.at(max(begun) + 1) if begun else None
        whom = ", ".join(line["run"][:8] for line in before)
        notice = f"{query.name!r} takes over from run {whom}, which is ended for good"
        if first is not None:
            notice += _begins(_from(query, Beginning(not_before=first)))
        return Beginning(not_before=first, takes_over=runs, who=_login_name(), notice=notice)

    def _earlier_runs(self, query: Query) -> list[dict[str, Any]]:
        """Runs of the query, for the same analyst, whose charges end with them."""
        asks = self.analysts.get(query.name, "")
        return [
            line
            for line in self.book["spent_on"]
            if line["query"] == query.name
            and "periods" in line
            and self.copy.known(line["run"]).analyst == asks
        ]

    def _later(self, query: Query, problem: str) -> Beginning | None:
        """From the first period on that has room for it; only a query without end is moved."""
        room, ticks = plan_query(query).first_room(self._spend(query)), book_ticks(self.terms)
        if room is None or query.end is not None or ticks is None:
            return None
        chosen = Beginning(not_before=ticks.at(room))
        query = _from(query, chosen)
        self._pay(query)
        notice = f"{self.which} has no room for {query.name!r} in periods that have begun"
        return replace(chosen, notice=notice + _begins(query))

    def _refused(self, query: Query, problem: BudgetExceeded) -> BudgetExceeded:
        (now,) = (b for b in self.copy.report() if b["dataset"] == self.book["dataset"])
        asked = plan_query(query).cost(self.terms)["amount"]
        return BudgetExceeded(
            f"the query {query.name!r} does not fit into {self.which}: "
            f"{_short_of(query, asked, now, str(problem))}"
            f"{self._room_later(query)}"
            f"{_seen_before(query, self.book, self._earlier_runs(query))}; nothing was read"
        )

    def _room_later(self, query: Query) -> str:
        """The way out of a query with an end, of which only the first periods are spent."""
        room, ticks = plan_query(query).first_room(self._spend(query)), book_ticks(self.terms)
        if room is None or ticks is None:
            return ""
        return f"; from {iso(ticks.at(room))} on there is room for it: give it that start"


def _from(query: Query, beginning: Beginning) -> Query:
    first = beginning.not_before
    return query if first is None else query.not_before(first)


def _begins(query: Query) -> str:
    return (
        f"; it begins with the window of {iso(query.start)}, and rows from before are dropped "
        "(counted as outside the range)"
    )


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # this user has no name
        return "unknown"


def _short_of(query: Query, asked: Fraction, book: dict[str, Any], problem: str) -> str:
    """What is missing, in the numbers of the query and of the promise."""
    terms, left = Terms.from_json(book["terms"]), Fraction(book["left"])
    if asked <= left:  # there is room for its noise: the problem says for what there is none
        return problem.partition(": ")[2]
    takes, fix = "", "lower its epsilon"
    if query.pure and terms.measure == "mu_squared":
        takes = f"which is {float(asked / terms.total):.0%} of what the book counts (mu^2), "
        fix = f"give it a delta (such as 1e-9), {fix}"
    return (
        f"it asks for epsilon = {show(query.epsilon)}, delta = {show(query.delta)}, {takes}and of "
        f"the book's {amount_in_words(terms, terms.total)} only "
        f"{amount_in_words(terms, left).partition(' = ')[2]} is left; {fix}, or agree on a larger "
        "book (dpstream ledger grow)"
    )


def _seen_before(query: Query, book: dict[str, Any], earlier: list[dict[str, Any]]) -> str:
    """Somebody who repeats a query wants its releases, not another charge.

    A run whose state is lost, and that has another name, gives nothing back by itself.
    """
    if all(line["query"] != query.name for line in book["spent_on"]):
        alive = any("periods" in line and not line["ended"] for line in book["spent_on"])
        lost = "; if the state of a run in that book is lost, end it: dpstream ledger end RUN"
        return lost if alive else ""
    before = [line for line in earlier if not line["ended"]]
    over = (
        f"; if the state of run {', '.join(line['run'][:8] for line in before)} is lost, or the "
        "query has changed, take over from it (dpstream run or sql --take-over; take_over=True in "
        "Python): it is ended for good, and this one begins with the next period, at no more cost"
    )
    return (
        f"; a query {query.name!r} was charged before: to see its releases again, use the state "
        f"directory of that run{over if before else ''}"
    )


def _refuse_series(
    ledger: Ledger, dataset: str, queries: Sequence[SeriesQuery], which: str
) -> None:
    """A mechanism may spend all that it promises in any of its windows of steps."""
    book = ledger.terms(dataset)
    assert book is not None
    spent = ledger.peak(dataset)
    for query in queries:
        terms = query.mechanism.terms()
        if query.start is not None:
            refuse_other_steps(ledger, dataset, query.terms())
        if terms.measure != book.measure or terms.width is None or book.width is None:
            continue  # refused in its own words when the run begins
        asked = terms.total * math.ceil(Fraction(book.width, terms.width))
        if spent + asked > book.total:
            raise BudgetExceeded(
                f"the query {query.name!r} does not fit into {which}: it may spend "
                f"{terms.measure}={show(asked)} within {book.width} steps, but only "
                f"{show(max(book.total - spent, Fraction(0)))} of {show(book.total)} is left; "
                f"lower {terms.measure}; nothing was read"
            )
        spent += asked
