"""What queries have taken from their dataset's book, told afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpstream.cli.output import note
from dpstream.privacy.amounts import show
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.remaining import spent_and_left
from dpstream.session.budget import AnyQuery
from dpstream.stages.query import Query

Books = Ledger | Path
"""A ledger, or the file of one that may not be there yet."""


def own_book(state: Path) -> Path:
    """Where the book of a state directory is, unless it shares another."""
    return state / "ledger"


def book_of(books: Books, dataset: str) -> dict[str, Any] | None:
    """A dataset's book as reported; None if it is not open."""
    with _reading(books) as ledger:
        return next((book for book in ledger.report() if book["dataset"] == dataset), None)


def charged_runs(books: Books, dataset: str) -> dict[str, str]:
    """The runs that a dataset's book was charged for, and their queries."""
    book = book_of(books, dataset)
    return {} if book is None else {line["run"]: line["query"] for line in book["spent_on"]}


@contextmanager
def _reading(books: Books) -> Iterator[Ledger]:
    """The ledger; an empty one for a file that is not there: looking makes none."""
    if isinstance(books, Ledger):
        yield books
        return
    ledger = Ledger(books if books.exists() else None)
    try:
        yield ledger
    finally:
        ledger.close()


def tell(queries: Sequence[AnyQuery], before: Mapping[str, str], books: Books, dataset: str) -> int:
    """Say what was charged since `before`; how many runs it were."""
    book, now = book_of(books, dataset), charged_runs(books, dataset)
    names = [query for run, query in now.items() if run not in before]
    if book is None:
        note("nothing was charged")
        return 0
    amounts = ", ".join(
        f"{_promised(query)} for {query.name!r}" for query in queries if query.name in names
    )
    what = f"charged to the book {dataset!r}: {amounts}"
    if not amounts:
        what = f"nothing new was charged to the book {dataset!r}"
    note(f"{what}; {spent_and_left(book)}")
    return len(names)


def _promised(query: AnyQuery) -> str:
    if isinstance(query, Query):
        return f"epsilon = {show(query.epsilon)}, delta = {show(query.delta)}"
    terms = query.mechanism.terms()
    return f"{terms.measure} = {show(terms.total)} within any {terms.window or 1} windows"
