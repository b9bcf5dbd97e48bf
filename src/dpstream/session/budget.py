"""What does not fit into its dataset's book is refused before a row is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpstream.engines.embedded.series_run import refuse_other_steps
from dpstream.engines.query_run import AnyQuery
from dpstream.errors import BudgetExceeded
from dpstream.privacy.amounts import show
from dpstream.privacy.ledger.charges import Allowance, Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.refusals import amount_in_words, book_in_words
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys
from dpstream.privacy.state.run_directory import is_charged
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery

__all__ = ["AnyQuery", "refuse_early"]


def refuse_early(
    ledger: Ledger,
    dataset: str,
    queries: Sequence[tuple[AnyQuery, Path | None]],
    analysts: Mapping[str, str] | None = None,
) -> None:
    """Refuse queries that do not fit into the book together.

    `queries` come with their state directories: a run that was charged is not charged again. They
    are charged to a copy of the book; the book itself still decides when they begin. A book that is
    not open yet would be opened by the first of them, for it alone; one whose budget is provisional
    decides when they begin. `analysts`: who asks for each.
    """
    book = next((each for each in ledger.report() if each["dataset"] == dataset), None)
    path, known = ledger.path, ledger.known
    if (book is None and len(queries) < 2) or (book and "provisional" in book):
        return
    if book is None:
        ledger, first = Ledger(), queries[0][0].starting(0)
        own = first.terms() if isinstance(first, SeriesQuery) else plan_query(first).terms()
        ledger.open(dataset, own)
        (book,) = ledger.report()
    paid = {line["run"] for line in book["spent_on"]}
    new = [query for query, folder in queries if not is_charged(folder, paid, known)]
    users = [query for query in new if isinstance(query, Query)]
    series = [query for query in new if isinstance(query, SeriesQuery)]
    which = book_in_words(dataset, path)
    if users and book["terms"]["measure"] == "mu_squared":
        _refuse_users(which, book, users, analysts or {})
    if series and book["terms"]["unit"] != "user":
        _refuse_series(ledger, dataset, series, which)


def _refuse_users(
    which: str, book: dict[str, Any], queries: Sequence[Query], analysts: Mapping[str, str]
) -> None:
    """Whose rows are protected is looked at before how much of the budget is left for them."""
    dataset = book["dataset"]
    copy = copy_of_book(book)
    for number, query in enumerate(queries):
        run, keys = number.to_bytes(16, "big"), MemoryWindowKeys()
        plan = plan_query(query.starting(0))
        copy.admit(dataset, plan.terms(), f"query {query.name!r}")
        copy.register(dataset, run.hex(), "copy", analyst=analysts.get(query.name, ""))
        spend = QuerySpend(run=run, query=query.name, ledger=copy, dataset=dataset, keys=keys)
        try:
            plan.pay(spend, "copy")
        except BudgetExceeded as problem:
            (now,) = copy.report()
            raise BudgetExceeded(
                f"the query {query.name!r} does not fit into {which}: "
                f"{_short_of(query, plan.calibrated.mu_squared, now, str(problem))}"
                f"{_seen_before(query, book)}; nothing was read"
            ) from None


def copy_of_book(book: dict[str, Any]) -> Ledger:
    """A book of users as reported, in memory: what is charged to it costs nothing."""
    copy, dataset = Ledger(), book["dataset"]
    copy.open(dataset, Terms.from_json(book["terms"]))
    for line in book["spent_on"]:
        if "analyst" in line:
            copy.register(dataset, line["run"], "copy", analyst=line["analyst"])
        charge = Charge(
            run=line["run"],
            query=line["query"],
            purpose=line["purpose"],
            step=0,
            amount=Fraction(line["amount"]),
            cells=Cells(first=0, last=0),
            delta_slack=Fraction(line.get("tail", 0)),
            rounding_slack=Fraction(line.get("drift", 0)),
        )
        copy.charge(dataset, charge)
    for analyst, allowed in book.get("principals", {}).items():
        share = Allowance(share=allowed["share"], largest=allowed.get("largest"))
        copy.allow(dataset, analyst, share, because="a copy", who="")
    return copy


def _short_of(query: Query, asked: Fraction, book: dict[str, Any], problem: str) -> str:
    """What is missing, in the numbers of the query and of the promise."""
    terms, left = Terms.from_json(book["terms"]), Fraction(book["left"])
    if asked <= left:  # there is room for its noise: the problem says for what there is none
        return problem.partition(": ")[2]
    return (
        f"it asks for epsilon = {show(query.epsilon)}, delta = {show(query.delta)}, and of the "
        f"book's {amount_in_words(terms, terms.total)} only "
        f"{amount_in_words(terms, left).partition(' = ')[2]} is left; lower its epsilon, or agree "
        "on a larger book (dpstream ledger grow)"
    )


def _seen_before(query: Query, book: dict[str, Any]) -> str:
    """Somebody who repeats a query wants its releases, not another charge."""
    if all(line["query"] != query.name for line in book["spent_on"]):
        return ""
    return (
        f"; a query {query.name!r} was charged before: to see its releases again, use the state "
        "directory of that run"
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
