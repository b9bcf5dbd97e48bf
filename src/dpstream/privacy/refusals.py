"""What a book refuses, and in which words: what was asked, what is left, what to do."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

from dpstream.errors import BudgetExceeded, LedgerError
from dpstream.privacy.amounts import GRID, show
from dpstream.privacy.book import Book
from dpstream.privacy.charges import Charge, Terms
from dpstream.privacy.remaining import as_epsilon


def book_in_words(dataset: str, path: Path | None) -> str:
    """Which book is meant: its dataset, and the file it is in.

    >>> book_in_words("clicks", Path("clicks.ledger")), book_in_words("clicks", None)
    ("the book 'clicks' (in clicks.ledger)", "the book 'clicks'")
    """
    return f"the book {dataset!r}" + ("" if path is None else f" (in {path})")


def refuse_overspend(dataset: str, book: Book, charge: Charge, path: Path | None = None) -> int:
    """What a charge leads to, in grid units, if the book can pay it; else why it cannot.

    `path` is the file of the ledger, if it has one.
    """
    several = charge.kind == "cells" and charge.cells.last > charge.cells.first
    if (several or charge.kind == "cover") and not book.terms.joins(charge.kind):
        raise LedgerError(
            f"{charge.purpose!r} charges steps {charge.cells.first} to {charge.cells.last} at "
            f"once, but this book promises {book.terms.describe()}: a unit that changes k of "
            f"them would cost up to k^2 times as much; charge step by step, or use a book of "
            "single events (unit='event')"
        )
    loss = book.account.loss_with(charge)
    if loss <= book.account.total:
        if charge.tail or charge.drift:
            _refuse_allowance(book_in_words(dataset, path), book, charge)
        return loss
    if charge.repeat > 1:  # name the first step that does not fit by itself
        charge = _first_refused(book, charge)
        loss = book.account.loss_with(charge)
    terms, asked = book.terms, charge.amount
    left = max(Fraction(0), asked - Fraction(loss - book.account.total, GRID))
    where = {
        "event": f"at step {charge.step}",
        "w_event": f"in the {terms.window} steps around step {charge.step}",
        "user": "for this dataset",
    }[terms.unit]
    remedy = {
        "event": f"lower {terms.measure}; to repeat a release, use its state directory",
        "w_event": f"lower {terms.measure} or wait for an older step to leave the window; "
        "to repeat a release, use its state directory",
        "user": "lower epsilon, or agree on a larger book",
    }[terms.unit]
    also = as_epsilon(terms, left)
    if terms.measure != "epsilon" and also is not None and terms.epsilon is not None:
        where += f" (about epsilon={also:.3g} of {show(terms.epsilon)})"
    raise BudgetExceeded(
        f"{book_in_words(dataset, path)}: {charge.purpose!r} asks for {terms.measure}={show(asked)}"
        f" but only {show(left)} of {show(terms.total)} is left {where}; {remedy}"
    )


def _refuse_allowance(which: str, book: Book, charge: Charge) -> None:
    """Tails and drifts add up over all charges, exactly."""
    terms, account = book.terms, book.account
    for what, allowed, spent, asked, remedy in (
        ("of delta to find keys", terms.tail, account.tail, charge.tail, "delta"),
        (
            "to round noise",
            terms.drift,
            account.drift,
            charge.drift,
            "the number of triggers",
        ),
    ):
        if asked and spent + asked > allowed:
            raise BudgetExceeded(
                f"{which}: {charge.purpose!r} asks for {show(asked)} {what} but only "
                f"{show(allowed - spent)} of {show(allowed)} is left for this dataset; lower "
                f"{remedy}, or agree on a larger book"
            )


def protected(terms: Terms) -> tuple[str, ...]:
    """What a book and a charge must agree on where users are protected."""
    return terms.unit, terms.period, terms.time_zone, terms.measure, terms.change


def in_words(terms: Terms) -> str:
    """Who is protected, for people."""
    unit = {"user": "users", "event": "single events", "w_event": "events in windows of steps"}
    return (
        f"{unit[terms.unit]} (period {terms.period!r}, time zone {terms.time_zone}, changing "
        f"{terms.change}) in {terms.measure}"
    )


def _first_refused(book: Book, charge: Charge) -> Charge:
    """The step of a repeated charge to blame: the first that does not fit, or the first of all."""
    steps = [
        dataclasses.replace(
            charge,
            step=charge.step + offset,
            repeat=1,
            cells=dataclasses.replace(
                charge.cells, first=charge.cells.first + offset, last=charge.cells.last + offset
            ),
        )
        for offset in range(charge.repeat)
    ]
    return next((s for s in steps if book.account.loss_with(s) > book.account.total), charge)
