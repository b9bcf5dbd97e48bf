"""Spend half of what the window has left on each publication; hold while little changes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from dpstream.mechanisms.base import Remembers, Spender
from dpstream.mechanisms.parts.publish_or_hold import (
    BudgetWindow,
    LastReleases,
    PublishOrHold,
    compare,
    publish_all,
    publish_groups,
)
from dpstream.privacy.amounts import GRID, floor_units
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


@storable("budget distribution state")
@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetDistributionState:
    """The last release and the publication budgets of the window."""

    spent: BudgetWindow
    published: LastReleases | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetDistribution(PublishOrHold[int], identity="budget_distribution"):
    """Publish with half of the remaining budget where the counts moved more than the noise would.

    `groups` > 1 lets groups of columns that change alike publish at different steps; they are
    formed anew every window, from releases.

    Guarantee: w-event epsilon-DP, w = `window`: comparisons cost a fixed share per step, and each
        publication takes half of what the window's publications have left.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event Sequences over
        Infinite Streams", 2014.

    >>> from dpstream import release
    >>> series = release(BudgetDistribution(epsilon=1, window=3), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid[0], series.values.shape
    (True, (4, 2))
    """

    remembers: ClassVar[Remembers] = "releases"

    def start(self) -> BudgetDistributionState:
        """Nothing published, nothing spent."""
        return BudgetDistributionState(spent=BudgetWindow(width=self.window))

    def step(
        self, state: BudgetDistributionState, x: Integers, spend: Spender
    ) -> tuple[BudgetDistributionState, list[Release]]:
        """Compare, then publish with half of what is left or hold."""
        test, pool = self.split(len(x))
        half = (pool - state.spent.units_before(spend.step)) // 2
        amount, last, paid = Fraction(half, GRID), state.published, True
        if last is None:
            last = publish_all(x, spend, amount, self.first_groups(len(x)))
        else:
            last = self.regroup(last, spend.step)
            distances = compare(last, x, spend, test)
            last, paid = publish_groups(last, x, distances, spend, amount)
        spent = state.spent.pay(spend.step, amount) if paid else state.spent
        new = BudgetDistributionState(spent=spent, published=last)
        return new, [last.release(spend.step, paid=paid)]

    def publication_share(self, test: Fraction) -> int:
        """All publications of a window, in grid units."""
        return floor_units(self.budget - test * self.window)
