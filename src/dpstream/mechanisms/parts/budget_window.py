"""What was spent in the steps that still matter: a sliding record kept in a mechanism's state.

Guarantee: none of its own. It is a mechanism's private arithmetic; the ledger keeps its own books.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter

from dpstream.privacy.amounts import units
from dpstream.privacy.state.serial import storable

_STEP = itemgetter(0)


@storable("budget window")
@dataclass(frozen=True, kw_only=True)
class BudgetWindow:
    """Publication budgets of the last `width - 1` steps, newest last.

    >>> spent = BudgetWindow(width=3).pay(0, Fraction(1, 4))
    >>> spent.units_before(2) == units(Fraction(1, 4)), spent.units_before(3)
    (True, 0)
    """

    width: int
    entries: tuple[tuple[int, int, int], ...] = ()
    """(step, amount in grid units, all that was ever paid up to it)."""

    def units_before(self, step: int) -> int:
        """Spent in the steps that share a window of `width` with `step`, without it; grid units."""
        entries, first = self.entries, self._since(step - self.width + 1)
        if first == len(entries):
            return 0
        _, amount, total = entries[first]
        return entries[-1][2] - total + amount

    def pay(self, step: int, amount: Fraction) -> BudgetWindow:
        """The record after paying `amount` at `step`."""
        cost, total = units(amount), self.entries[-1][2] if self.entries else 0
        kept = self.entries[self._since(step - self.width + 2) :]  # matters at the next step
        return BudgetWindow(width=self.width, entries=(*kept, (step, cost, total + cost)))

    def steps(self, oldest: int) -> int:
        """How many payments were made from step `oldest` on."""
        return len(self.entries) - self._since(oldest)

    def first_step(self, oldest: int) -> int | None:
        """The first payment from step `oldest` on."""
        first = self._since(oldest)
        return self.entries[first][0] if first < len(self.entries) else None

    def _since(self, oldest: int) -> int:
        if not self.entries or self.entries[0][0] >= oldest:
            return 0
        return bisect_left(self.entries, oldest, key=_STEP)
