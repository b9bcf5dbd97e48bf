"""What a book refuses, and in which words: what was asked, what is left, what to do.

Amounts are shown in epsilon, which people know, whatever the book counts (`as_epsilon`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dpstream.errors import BudgetExceeded, LedgerError, StateError
from dpstream.privacy.amounts import GRID, show
from dpstream.privacy.ledger.balance import Book
from dpstream.privacy.ledger.charges import Charge, KnownRun, Terms
from dpstream.privacy.ledger.store import LedgerPlace


def as_epsilon(terms: Terms, amount: Fraction) -> float | None:
    """The epsilon of a part of a book by itself; None for a book that names no epsilon.

    A book of users counts mu^2, which adds up; epsilons do not. The epsilon of a part is what that
    much Gaussian noise keeps at the delta that the complete book has at its own epsilon: nothing is
    0, all of it is the book's epsilon; in between, what is spent and what is left add up to more.

    >>> from dpstream.privacy.accounting.promises import promise
    >>> book = promise(epsilon=4, delta=1e-8)
    >>> [round(as_epsilon(book, book.total * part), 2) for part in (0, Fraction(1, 2), 1)]
    [0.0, 2.75, 4.0]
    """
    if terms.measure == "epsilon":
        return float(max(amount, Fraction(0)))
    if terms.measure != "mu_squared" or terms.epsilon is None:
        return None
    if amount <= 0 or amount >= terms.total:
        return 0.0 if amount <= 0 else float(terms.epsilon)
    # what it imports is slow to import, and every ledger imports this
    from dpstream.privacy.accounting.curves import gdp_delta, gdp_epsilon

    slack = 2 * terms.rounding_slack
    delta = gdp_delta(mu=math.sqrt(terms.total), epsilon=terms.epsilon - slack)
    if not 0 < delta < 1:
        return None
    epsilon = gdp_epsilon(mu=math.sqrt(amount), delta=delta) + float(slack * amount / terms.total)
    return min(epsilon, float(terms.epsilon))


def promise_in_words(terms: Terms) -> str:
    """The promise in epsilon and delta where the book has them."""
    if terms.measure != "mu_squared" or terms.epsilon is None:
        return terms.describe()
    # what it imports is slow to import, and every ledger imports this
    from dpstream.privacy.accounting.promises import delta_of_terms

    whom = terms.describe().partition(" for ")[2]
    return f"epsilon = {show(terms.epsilon)}, delta = {delta_of_terms(terms):.3g} for {whom}"


def amount_in_words(terms: Terms, amount: Fraction) -> str:
    """An amount of a book for people: "epsilon = 0.25", or what else the book counts."""
    epsilon = as_epsilon(terms, amount)
    if epsilon is None:
        return f"{terms.measure} = {show(amount)}"
    return f"epsilon = {_short(epsilon)}"


def spent_and_left(report: Mapping[str, Any]) -> str:
    """One line on a book as `Ledger.report` has it.

    >>> from dpstream.privacy.accounting.promises import promise
    >>> def told(left):
    ...     terms = promise(epsilon=2, delta=1e-9)
    ...     return spent_and_left({"terms": terms.to_json(), "left": str(terms.total * left),
    ...                            "left_next_step": "0"})
    >>> told(1), told(0)
    ('epsilon: 0 of 2 spent, 2 left', 'epsilon: 2 of 2 spent, 0 left')
    >>> told(Fraction(1, 2))
    'epsilon: 1.39 of 2 spent, 1.39 left for further queries (epsilons do not simply add up)'
    """
    terms, left = Terms.from_json(dict(report["terms"])), Fraction(report["left"])
    spent, rest = as_epsilon(terms, terms.total - left), as_epsilon(terms, left)
    where, then, at_next = "", "", left  # where users are protected, steps do not matter
    if terms.unit != "user":
        newest = terms.unit == "event"
        where = " on the newest step" if newest else f" in the last {terms.window} steps"
        then, at_next = " at the next step", Fraction(report["left_next_step"])
    if spent is None or rest is None:
        known = f"{terms.measure}: {show(terms.total - left)} of {show(terms.total)} spent"
        return f"{known}{where}, {show(at_next)} left{then}"
    budget = terms.epsilon if terms.measure == "mu_squared" else terms.total
    assert budget is not None
    line = f"epsilon: {_short(spent)} of {_short(float(budget))} spent{where}"
    if terms.unit != "user":
        return f"{line}, {_short(float(at_next))} left{then}"
    line += f", {_short(rest)} left"
    to_come = as_epsilon(terms, Fraction(report.get("left_to_come", left)))
    if to_come is not None and to_come > rest:
        return f"{line}; {_short(to_come)} left in periods that have not begun"
    if terms.measure == "epsilon" or not 0 < left < terms.total:
        return line
    return f"{line} for further queries (epsilons do not simply add up)"


def _short(amount: float) -> str:
    """Three digits; what is spent and what is left are estimates where they are not whole."""
    return f"{amount:.6g}" if amount == round(amount, 2) else f"{amount:.3g}"


def book_in_words(dataset: str, path: LedgerPlace | None) -> str:
    """Which book is meant: its dataset, and where it is kept.

    >>> from pathlib import Path
    >>> book_in_words("clicks", Path("clicks.ledger")), book_in_words("clicks", None)
    ("the book 'clicks' (in clicks.ledger)", "the book 'clicks'")
    """
    return f"the book {dataset!r}" + ("" if path is None else f" (in {path})")


_NOT_AGREED = (
    "its budget is still that of the measurement of bounds that opened it: set the one that all "
    "queries of the dataset may spend together (dpstream ledger grow BOOK --epsilon TOTAL --delta "
    "TOTAL --because TEXT)"
)


def refuse_overspend(
    dataset: str, book: Book, charge: Charge, path: LedgerPlace | None = None
) -> int:
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
        if charge.delta_slack or charge.rounding_slack:
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
        "user": "lower epsilon, or agree on a larger book (dpstream ledger grow)",
    }[terms.unit]
    remedy = _NOT_AGREED if book.provisional else remedy
    also = as_epsilon(terms, left)
    if terms.measure != "epsilon" and also is not None and terms.epsilon is not None:
        where += f" (about epsilon={also:.3g} of {show(terms.epsilon)})"
    raise BudgetExceeded(
        f"{book_in_words(dataset, path)}: {charge.purpose!r} asks for {terms.measure}={show(asked)}"
        f" but only {show(left)} of {show(terms.total)} is left {where}; {remedy}"
    )


def _with_epsilon(terms: Terms, amount: Fraction) -> str:
    """An amount as the book counts it, and as epsilon where that is something else."""
    counted, epsilon = f"{terms.measure} = {show(amount)}", as_epsilon(terms, amount)
    if terms.measure == "epsilon" or epsilon is None:
        return counted
    return f"epsilon = {_short(epsilon)} ({counted})"


def refuse_too_small(
    dataset: str, book: Book, path: LedgerPlace | None = None, *, had: Terms
) -> None:
    """Refuse a budget that is smaller than what was spent; the book has it, and `had` another."""
    terms, account, which = book.terms, book.account, book_in_words(dataset, path)
    if account.most > account.total:
        raise BudgetExceeded(
            f"{which}: {_with_epsilon(had, Fraction(account.most, GRID))} is spent already, and "
            f"the new budget is {_with_epsilon(terms, terms.total)}; a book cannot be made smaller "
            "than what is spent"
        )
    dated = account.periods.worst()
    tail = account.delta_slack + dated.delta_slack
    drift = account.rounding_slack + dated.rounding_slack
    if tail > terms.delta_slack or drift > terms.rounding_slack:
        raise BudgetExceeded(
            f"{which}: {show(tail)} of delta to find keys and "
            f"{show(drift)} to round noise are spent, as the new epsilon counts "
            f"them, and the new budget has {show(terms.delta_slack)} and "
            f"{show(terms.rounding_slack)}; name a larger --delta (a run that an older version has "
            "charged counts for less once it was started by this one)"
        )


def _refuse_allowance(which: str, book: Book, charge: Charge) -> None:
    """Slacks add up over all charges, or all of a period, exactly."""
    if name := book.account.slack_missing(charge):
        what, remedy = {
            "delta_slack": ("of delta to find keys", "delta"),
            "rounding_slack": ("to round noise", "the number of triggers"),
        }[name]
        allowed, asked = getattr(book.terms, name), getattr(charge, name)
        left = allowed - book.account.spent_slack(name, charge)
        remedy = f"lower {remedy}, or agree on a larger book (dpstream ledger grow)"
        raise BudgetExceeded(
            f"{which}: {charge.purpose!r} asks for {show(asked)} {what} but only "
            f"{show(left)} of {show(allowed)} is left for this dataset; "
            f"{_NOT_AGREED if book.provisional else remedy}"
        )


class LastPeriodOver(LedgerError):
    """A run that was to end with a period would go on behind it: it is over, nothing is wrong."""


def refuse_ended(run: str, known: KnownRun) -> None:
    """A run that was ended draws nothing more, whatever state of it turns up."""
    if known.ended is not None:
        because, who = known.ended
        raise StateError(
            f"run {run[:8]} was ended for good by {who} ({because}); its state must not go on; use "
            "a new state directory"
        )


def refuse_void(dataset: str, book: Book, run: str, known: KnownRun) -> None:
    """A charge is given back only if the ledger itself shows that no step of its run was begun."""
    what = f"the charge of run {run[:8]} to the book {dataset!r} stays"
    if known.voided:
        raise LedgerError(f"the charge of run {run[:8]} was given back already")
    if all(charged != run for charged, _, _ in book.spent_on):
        raise LedgerError(f"the book of {dataset!r} has no charge of a run {run!r}")
    if book.terms.unit != "user":
        raise LedgerError(f"{what}: this book is charged step by step, for steps that were begun")
    if known.reached >= 0 or known.minted or known.begun is not None or known.finished is not None:
        raise LedgerError(
            f"{what}: the run has begun {max(known.reached + 1, 1)} steps, and what it has "
            "published cannot be taken back"
        )
    if not known.kept:
        raise LedgerError(
            f"{what}: the run has no state directory (or an older version has charged it), so the "
            "ledger does not show that nothing was drawn"
        )


def protection(terms: Terms) -> tuple[str, ...]:
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
    steps = [charge.at(step, repeat=1) for step in range(charge.step, charge.last_step + 1)]
    return next((s for s in steps if book.account.loss_with(s) > book.account.total), charge)
