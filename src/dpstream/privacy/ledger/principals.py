"""What each analyst of a book has spent: an account for each, and one for each of their runs.

A book that names analysts takes new runs from them alone. Each may spend a share of all that it
counts, and on one query no more than the largest; what they have spent is counted as the book
counts it, so all shares together may be more than the book. Who an analyst is, the ledger is told:
a name that anybody may give is bookkeeping, and no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from dpstream.errors import BudgetExceeded
from dpstream.privacy.amounts import GRID, floor_units
from dpstream.privacy.ledger.balance import Account, Book
from dpstream.privacy.ledger.charges import Allowance, Charge, Terms
from dpstream.privacy.ledger.refusals import amount_in_words, book_in_words
from dpstream.privacy.ledger.store import LedgerPlace

SLACKS = ("delta_slack", "rounding_slack")
AnalystOf = Callable[[str], str]
"""Who asked for a run."""


class Shares:
    """The accounts of a book's analysts, made from the charges that the book holds."""

    def __init__(self, book: Book, analyst_of: AnalystOf) -> None:
        self.book, self._analyst_of = book, analyst_of
        self._accounts: dict[tuple[str, str], Account] = {}
        for charge in book.charges():
            self.add(charge)
        for account in self._accounts.values():
            account.periods.keep_runs(book.account.periods)

    def add(self, charge: Charge) -> None:
        """Count a charge that the book has taken."""
        analyst = self._analyst_of(charge.run)
        if analyst in self.book.principals:
            for run in ("", charge.run):
                self._account(analyst, run).add(charge)

    def spent(self, analyst: str) -> Fraction:
        """The most that any protected unit has lost to one analyst."""
        return Fraction(self._account(analyst, "").most, GRID)

    def refuse(self, dataset: str, charge: Charge, path: LedgerPlace | None) -> None:
        """Refuse a charge that its analyst may not make, and say whose share is used up.

        A run that began before the book named anybody goes on.
        """
        analyst = self._analyst_of(charge.run)
        allowed = self.book.principals.get(analyst)
        if allowed is None or charge.kind == "close":
            return
        terms, which = self.book.terms, book_in_words(dataset, path)
        query = charge.query or charge.purpose
        if allowed.largest is not None:
            most = amount_of(terms, allowed.largest)
            if self._account(analyst, charge.run).loss_with(charge) > floor_units(most):
                raise BudgetExceeded(
                    f"{which}: one query of {analyst!r} may cost epsilon = "
                    f"{float(allowed.largest):g} at most, and {query!r} asks for "
                    f"{amount_in_words(terms, charge.amount)}; lower its epsilon, or "
                    f"{_allow(dataset, path, analyst)} --largest ..."
                )
        account, share = self._account(analyst, ""), allowed.share
        over = account.loss_with(charge) > floor_units(terms.total * share)
        if over or any(
            account.spent_slack(name, charge) + getattr(charge, name) > getattr(terms, name) * share
            for name in SLACKS
        ):
            left = max(terms.total * share - self.spent(analyst), Fraction(0))
            why = "" if over else ", and its part of delta is used up"
            raise BudgetExceeded(
                f"{which}: the share of {analyst!r}, {float(share):g} of the book, is used up: "
                f"{query!r} asks for {amount_in_words(terms, charge.amount)}, and "
                f"{amount_in_words(terms, left)} is left of it{why}; lower its epsilon, or "
                f"{_allow(dataset, path, analyst)} --share ..."
            )

    def refuse_more(self, dataset: str, run: str, path: LedgerPlace | None) -> None:
        """Refuse to give a run the periods back that it was to leave, if its analyst's share has
        no room for them."""
        analyst, terms = self._analyst_of(run), self.book.terms
        allowed = self.book.principals.get(analyst)
        if allowed is None:
            return
        account = self._account(analyst, "")
        dated = account.periods.worst()
        slacks = [(name, getattr(account, name) + getattr(dated, name)) for name in SLACKS]
        if account.most > floor_units(terms.total * allowed.share) or any(
            spent > getattr(terms, name) * allowed.share for name, spent in slacks
        ):
            raise BudgetExceeded(
                f"{book_in_words(dataset, path)}: the later periods of run {run[:8]} cannot be "
                f"given back to it: the share of {analyst!r}, {float(allowed.share):g} of the "
                f"book, was spent on others since; take one of those back, or "
                f"{_allow(dataset, path, analyst)} --share ..."
            )

    def settle_before(self, step: int) -> None:
        """Drop old steps, as the book does."""
        for account in self._accounts.values():
            account.settle_before(step)

    def _account(self, analyst: str, run: str) -> Account:
        key = (analyst, run)
        if key not in self._accounts:
            self._accounts[key] = Account(self.book.terms, since=self.book.account.since)
        return self._accounts[key]


def refuse_stranger(dataset: str, book: Book, analyst: str, path: LedgerPlace | None) -> None:
    """A book that names analysts takes new runs from them alone."""
    if book.principals and analyst not in book.principals:
        who = f"{analyst!r} is none of them" if analyst else "nobody is said to ask for this run"
        raise BudgetExceeded(
            f"{book_in_words(dataset, path)}: it may be charged by {_listed(book.principals)}, and "
            f"{who}; say who asks (--who NAME, or analyst = 'NAME' with the query in the pipeline "
            f"file), or {_allow(dataset, path, analyst or 'NAME')} --share ..."
        )


def amount_of(terms: Terms, epsilon: Fraction) -> Fraction:
    """The most that a single query of this epsilon may cost, in what the book counts.

    A book of users reads epsilon at its own delta; one that names no epsilon counts `epsilon` in
    its own measure, as `dpstream ledger open` does.
    """
    if terms.measure != "mu_squared" or terms.epsilon is None:
        return epsilon
    from dpstream.privacy.accounting.calibration import mu_squared_for  # slow to import
    from dpstream.privacy.accounting.promises import delta_of_terms

    return mu_squared_for(epsilon=epsilon, delta=Fraction(delta_of_terms(terms)))


def _listed(principals: dict[str, Allowance]) -> str:
    return " and ".join(repr(name) for name in sorted(principals))


def _allow(dataset: str, path: LedgerPlace | None, analyst: str) -> str:
    place = "FILE" if path is None else path
    return f"dpstream ledger allow {place} --dataset {dataset} --analyst {analyst} --because ..."
