"""One dataset's book: its account, and which charges were made already."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

from dpstream.errors import LedgerError, NoiseReuse
from dpstream.privacy.amounts import GRID, show
from dpstream.privacy.ledger.balance import Account
from dpstream.privacy.ledger.charges import Cells, Charge, Terms

DigestAt = Callable[[int], str]
"""The digest of a run's input up to a step, or "" where it is not at hand."""


class Book:
    """One dataset's terms, its account, and which charges are known."""

    def __init__(self, terms: Terms, *, since: int = 0, in_memory: bool = False) -> None:
        self.terms = terms
        self.account = Account(terms, since=since)
        self.reach = 0  # how far behind their own step charges have read
        self._settled = SettledCharges() if in_memory else None
        self.spent_on: dict[tuple[str, str, str], list[Any]] = {}
        self._known: dict[tuple[str, str, str, str], list[Charge]] = {}

    def missing(
        self, charge: Charge, digest_at: DigestAt, *, verified: bool = False
    ) -> list[Charge]:
        """The parts of a charge that were not made yet; a contradiction raises."""
        known = self._known.get(charge.source)
        if not known or known[-1].step + known[-1].repeat <= charge.step:
            return [_part(charge, charge.step, charge.last_step, digest_at)]
        parts, step = [], charge.step
        index = max(bisect_right(known, charge.step, key=lambda c: c.step) - 1, 0)
        for old in known[index:]:
            if old.last_step < step or old.step > charge.last_step:
                continue
            _agree(old, charge, digest_at, verified)
            if old.step > step:
                parts.append(_part(charge, step, old.step - 1, digest_at))
            step = old.last_step + 1
        if step <= charge.last_step:
            parts.append(_part(charge, step, charge.last_step, digest_at))
        return parts

    def newest_loss_with(self, charge: Charge) -> int | None:
        """What a charge that is plain and new leads to; None: it takes the long way."""
        if not (charge.plain and charge.digest):
            return None
        known = self._known.get(charge.source)
        if known and known[-1].step + known[-1].repeat > charge.step:
            return None
        return self.account.newest_loss_with(charge)

    def add_newest(self, charge: Charge, loss: int) -> None:
        """`add` of a charge that `newest_loss_with` has judged."""
        self.account.add_newest(charge, loss)
        known = self._known.get(charge.source)
        if known is None:
            known = self._known[charge.source] = []
        known.append(charge)
        line = self.spent_on.get(charge.source[:3])
        if line is None:
            line = self._line(charge)
        line[0] += 1
        line[1] += charge.units
        if line[2] < 0 or charge.step < line[2]:
            line[2] = charge.step
        if line[3] < charge.step:
            line[3] = charge.step

    def _line(self, charge: Charge) -> list[Any]:
        new = [0, 0, -1, -1, Fraction(0), Fraction(0)]
        return self.spent_on.setdefault((charge.run, charge.query, charge.purpose), new)

    def add(self, charge: Charge, loss: int | None = None) -> None:
        """Apply a charge that is durable; `loss` is what the account said it leads to."""
        if charge.kind == "cells" and charge.step - charge.cells.first > self.reach:
            self.reach = charge.step - charge.cells.first
        reaches = charge.cells.last + charge.repeat > self.account.kept
        if reaches or charge.kind in ("open", "close"):
            self.account.add(charge, loss)
            known = self._known.setdefault(charge.source, [])
            if not known or known[-1].step <= charge.step:
                known.append(charge)
            else:
                known.insert(bisect_right(known, charge.step, key=lambda c: c.step), charge)
        elif self._settled is not None:
            self._settled.add(charge)
        line = self._line(charge)
        if charge.kind != "close":
            line[0] += charge.repeat
            line[1] += charge.units * charge.repeat
            line[2] = charge.step if line[2] < 0 else min(line[2], charge.step)
            line[3] = max(line[3], charge.last_step)
            if charge.tail or charge.drift:
                line[4], line[5] = line[4] + charge.tail, line[5] + charge.drift

    def charges(self) -> list[Charge]:
        """The charges still held, oldest first; of a book in memory, all of them."""
        held = [charge for known in self._known.values() for charge in known]
        if self._settled is not None:
            held += self._settled.charges()
        return sorted(held, key=lambda c: (c.step, c.kind == "close"))

    def forget_before(self, step: int) -> None:
        """Keep memory bounded on a stream that never ends: settle what no window meets any more.

        An interval is held for as long as it is open, or its end meets a window.
        """
        self.account.forget_before(step)
        kept = self.account.kept
        for source, charges in self._known.items():
            held, old = list[Charge](), list[Charge]()
            for charge in charges:
                alive = max(charge.last_step, charge.cells.last) >= kept or (
                    charge.kind == "open"
                    and self.account.interval((*source[:3], charge.cells.first)) is not None
                )
                (held if alive else old).append(charge)
            self._known[source] = held
            if self._settled is not None:
                for charge in old:
                    self._settled.add(charge)

    def reading_back(self, oldest: int, charges: Iterable[Charge]) -> Book:
        """The same book with all of `charges`, its own, that a charge to step `oldest` may meet."""
        since = max(0, oldest - (self.terms.width or oldest))
        book = Book(self.terms, since=since, in_memory=self._settled is not None)
        for charge in charges:
            book.add(charge)
        book.account.peak = max(book.account.peak, self.account.peak)
        return book


class SettledCharges:
    """Charges that no window meets any more, 16 bytes for each run of equal ones.

    A book in memory has no file to read them back from. Their digests are dropped: made again
    without a log that proves the same input, such a charge is refused.
    """

    DIGEST = "settled"

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], array[int]] = {}

    def add(self, charge: Charge) -> None:
        """Keep a charge; it lengthens the run of equal ones that it follows."""
        cells, step = charge.cells, charge.step
        places = (cells.first - step, cells.last - step, cells.bins)
        digest = SettledCharges.DIGEST if charge.digest else ""
        key = (charge.source, charge.amount, places, charge.tail, charge.drift, digest)
        runs = self._runs.setdefault(key, array("q"))
        single = charge.kind != "cells" or charge.tail or charge.drift
        if runs and not single and runs[-2] + runs[-1] == step:
            runs[-1] += charge.repeat
        else:
            runs.extend((step, charge.repeat))

    def charges(self) -> Iterator[Charge]:
        """All of them, run by run."""
        for (source, amount, places, tail, drift, digest), runs in self._runs.items():
            first, last, bins = places
            run, query, purpose, kind = source
            for step, repeat in zip(runs[::2], runs[1::2], strict=True):
                yield Charge(
                    run=run,
                    query=query,
                    purpose=purpose,
                    step=step,
                    amount=amount,
                    cells=Cells(first=step + first, last=step + last, bins=bins),
                    repeat=repeat,
                    digest=digest,
                    kind=kind,
                    tail=tail,
                    drift=drift,
                )


def _agree(old: Charge, new: Charge, digest_at: DigestAt, verified: bool) -> None:
    """A charge made again must be the same charge over the same input."""
    shift = old.step - new.step
    same_cells = (old.cells.first - shift, old.cells.last - shift, old.cells.bins) == (
        new.cells.first,
        new.cells.last,
        new.cells.bins,
    )
    spent, asked = ((c.amount, c.tail, c.drift) for c in (old, new))
    if spent != asked or not same_cells:
        raise LedgerError(
            f"run {new.run[:8]} already charged {_shown(old)} for {new.purpose!r} at step "
            f"{old.step}; a replay now asks for {_shown(new)}; a replay must be identical"
        )
    digest = digest_at(old.last_step)
    if old.digest and digest != old.digest and not (verified and not digest):
        found = "other data" if digest else "data of which this replay brings only a part"
        raise NoiseReuse(
            f"run {new.run[:8]} already published step {old.last_step} from {found}; nothing "
            "was published; feed the same data to replay, or start a new run"
        )


def _shown(charge: Charge) -> str:
    if not (charge.tail or charge.drift):
        return show(charge.amount)
    return f"{show(charge.amount)} (tail {show(charge.tail)}, drift {show(charge.drift)})"


def _part(charge: Charge, first: int, last: int, digest_at: DigestAt) -> Charge:
    """The share of a repeated charge that falls on steps `first` to `last`."""
    digest = digest_at(last) or charge.digest
    if first == charge.step and last == charge.last_step:
        return charge if charge.digest == digest else dataclasses.replace(charge, digest=digest)
    shift = first - charge.step
    cells = dataclasses.replace(
        charge.cells, first=charge.cells.first + shift, last=charge.cells.last + shift
    )
    return dataclasses.replace(
        charge, step=first, repeat=last - first + 1, cells=cells, digest=digest
    )


def report(name: str, book: Book) -> dict[str, Any]:
    """What was spent, on what, and what is left, ready for JSON."""
    account, terms = book.account, book.terms
    also: dict[str, Any] = {}
    if terms.tail or terms.drift:
        also = {
            "tail": {"spent": str(account.tail), "left": str(terms.tail - account.tail)},
            "drift": {"spent": str(account.drift), "left": str(terms.drift - account.drift)},
        }
    return {
        "dataset": name,
        "promise": book.terms.describe(),
        "terms": book.terms.to_json(),
        "newest_step": account.newest,
        "spent": str(Fraction(account.peak, GRID)),
        "left": str(account.left(max(account.newest, 0))),
        "left_next_step": str(account.left(account.newest + 1)),
        **also,
        "runs": len({key[0] for key in book.spent_on}),
        "spent_on": [
            {
                "run": run,
                "query": query,
                "purpose": purpose,
                "charges": line[0],
                "amount": str(Fraction(line[1], GRID)),
                "first_step": line[2],
                "last_step": line[3],
            }
            | ({"tail": str(line[4]), "drift": str(line[5])} if also else {})
            for (run, query, purpose), line in sorted(book.spent_on.items())
        ],
    }
