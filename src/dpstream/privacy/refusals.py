"""What a book refuses, and in which words: what was asked, what is left, what to do."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from dpstream.errors import BudgetExceeded, LedgerError
from dpstream.privacy.amounts import GRID, show
from dpstream.privacy.book import Book
from dpstream.privacy.charges import Charge, Terms


def refuse_overspend(dataset: str, book: Book, charge: Charge) -> int:
    """What a charge leads to, in grid units, if the book can pay it; else why it cannot."""
    several = charge.kind == "cells" and charge.cells.last > charge.cells.first
    if (several or charge.kind == "cover") and not book.terms.joins(charge.kind):
        raise LedgerError(
            f"{charge.purpose!r} charges steps {charge.cells.first} to {charge.cells.last} at "
            f"once, but this book promises {book.terms.describe()}: a unit that changes k of "
            f"them would cost up to k^2 times as much; charge step by step, or use a book of "
            "single events (unit='event')"
        )
    if charge.tail or charge.drift:
        _refuse_allowance(dataset, book, charge)
    loss = book.account.loss_with(charge)
    if loss <= book.account.total:
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
        "user": f"lower {terms.measure}, or agree on a larger book",
    }[terms.unit]
    raise BudgetExceeded(
        f"{dataset}: {charge.purpose!r} asks for {terms.measure}={show(asked)} but only "
        f"{show(left)} of {show(terms.total)} is left {where}; {remedy}"
    )


def _refuse_allowance(dataset: str, book: Book, charge: Charge) -> None:
    """Tails and drifts add up over all charges, exactly."""
    terms, account = book.terms, book.account
    for name, allowed, spent, asked in (
        ("tail", terms.tail, account.tail, charge.tail),
        ("drift", terms.drift, account.drift, charge.drift),
    ):
        if asked and spent + asked > allowed:
            raise BudgetExceeded(
                f"{dataset}: {charge.purpose!r} asks for {name}={show(asked)} but only "
                f"{show(allowed - spent)} of {show(allowed)} is left for this dataset; lower "
                f"{'delta' if name == 'tail' else 'the number of triggers'}, or agree on a larger "
                "book"
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
