"""Ledgers that do not add up what a dataset has lost: a book that is forked, and one that forgets.

Each claims the book's total for everything that is published of the dataset. True: the losses of
all runs add up, whoever has written them down.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from dpstream.audit.book_runs import DATASET
from dpstream.privacy.charges import Charge, Terms
from dpstream.privacy.ledger import Ledger


def copy_for_each(book: Path, number: int) -> Path:
    """A forked book: every run is charged to a copy of the book as it was before all runs.

    True: each copy admits a run as large as the book, so k runs lose k times the total.
    """
    return _copied(book, book.with_name(f"copy-{number}"), forgotten=0)


def without_the_last_charge(book: Path, number: int) -> Path:
    """A ledger that forgets its last charge whenever it is opened for another run.

    True: there is always room for one more run.
    """
    before = book if number == 0 else book.with_name(f"copy-{number - 1}")
    return _copied(before, book.with_name(f"copy-{number}"), forgotten=1)


def _copied(path: Path, copy: Path, *, forgotten: int) -> Path:
    """A new ledger with the terms of another one, and all its charges but the last ones."""
    with closing(Ledger(path)) as old, closing(Ledger(copy)) as new:
        records = list(old.history(DATASET))
        new.open(DATASET, next(Terms.from_json(r["terms"]) for r in records if "terms" in r))
        charges = [Charge.from_json(record) for record in records if "amount" in record]
        for charge in charges[: len(charges) - forgotten]:
            new.charge(DATASET, charge)
    return copy
