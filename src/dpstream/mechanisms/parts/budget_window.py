"""What was spent in the steps that still matter: a sliding record kept in a mechanism's state.

Guarantee: none of its own. It is a mechanism's private arithmetic; the ledger keeps its own books.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dpstream.privacy.amounts import GRID, units
from dpstream.privacy.state.serial import storable


@storable("budget window")
@dataclass(frozen=True, kw_only=True)
class BudgetWindow:
    """Publication budgets of the last `width - 1` steps, newest last.

    >>> spent = BudgetWindow(width=3).paid(0, Fraction(1, 4))
    >>> spent.before(2), spent.before(3)
    (Fraction(1, 4), Fraction(0, 1))
    """

    width: int
    entries: tuple[tuple[int, int], ...] = ()  # (step, amount in grid units)

    def before(self, step: int) -> Fraction:
        """Spent in the steps that share a window of `width` with `step`, `step` itself excluded."""
        oldest = step - self.width + 1
        return Fraction(sum(amount for at, amount in self.entries if at >= oldest), GRID)

    def paid(self, step: int, amount: Fraction) -> BudgetWindow:
        """The record after paying `amount` at `step`."""
        oldest = step - self.width + 2  # what can still matter at the next step
        kept = tuple(entry for entry in self.entries if entry[0] >= oldest)
        return BudgetWindow(width=self.width, entries=(*kept, (step, units(amount))))
