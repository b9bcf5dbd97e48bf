"""Spend half of what the window has left on each publication; hold while little changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from dpstream.mechanisms.base import HistogramMechanism, Spender, whole
from dpstream.mechanisms.parts.budget_window import BudgetWindow
from dpstream.mechanisms.parts.publish_or_hold import (
    Published,
    compare,
    comparison_share,
    publish_all,
    publish_groups,
)
from dpstream.privacy.amounts import GRID, floor_units, on_grid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


@storable("budget distribution state")
@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetDistributionState:
    """The last release and the publication budgets of the window."""

    spent: BudgetWindow
    published: Published | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetDistribution(HistogramMechanism, identity="budget_distribution", keys="groups"):
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

    groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", whole(self.groups, "groups", at_least=1))

    def start(self) -> BudgetDistributionState:
        """Nothing published, nothing spent."""
        return BudgetDistributionState(spent=BudgetWindow(width=self.window))

    def step(
        self, state: BudgetDistributionState, x: Integers, spend: Spender
    ) -> tuple[BudgetDistributionState, list[Release]]:
        """Compare, then publish with half of what is left or hold."""
        test, pool = self._split(len(x))
        half = (pool - state.spent.units_before(spend.step)) // 2
        amount, last, paid = Fraction(half, GRID), state.published, True
        if last is None:
            last = publish_all(x, spend, amount, groups=self.groups)
        else:
            if self.groups > 1 and spend.step % self.window == 0:
                last = replace(last, groups=last.groups.regrouped())
            distances = compare(last, x, spend, test)
            last, paid = publish_groups(last, x, distances, spend, amount)
        spent = state.spent.paid(spend.step, amount) if paid else state.spent
        new = BudgetDistributionState(spent=spent, published=last)
        return new, [last.release(spend.step, paid=paid)]

    def _split(self, columns: int) -> tuple[Fraction, int]:
        """What a comparison costs, and what that leaves a window's publications, in grid units."""
        known = self._splits.get(columns)
        if known is None:
            test = on_grid(comparison_share(self.budget, self.window, columns=columns))
            known = self._splits[columns] = (test, floor_units(self.budget - test * self.window))
        return known

    @cached_property
    def _splits(self) -> dict[int, tuple[Fraction, int]]:
        return {}
