"""Save the budget of steps that hold; spend it on the next publication; then rest as long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from dpstream.mechanisms.base import Remembers, Spender
from dpstream.mechanisms.parts.publish_or_hold import (
    LastReleases,
    PublishOrHold,
    compare,
    publish_all,
    publish_groups,
)
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


@storable("budget absorption state")
@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetAbsorptionState:
    """The last release, when it was paid, and how many steps' shares it took."""

    published: LastReleases | None = None
    paid_at: int = 0
    shares: int = 0


@dataclass(frozen=True, kw_only=True)
class BudgetAbsorption(PublishOrHold[Fraction], identity="budget_absorption"):
    """Publish with the saved shares of the steps that held before, then pay them back.

    A publication that took the shares of k earlier steps is followed by k steps that must hold.
    `groups` > 1 lets groups of columns that change alike publish at different steps; they are
    formed anew every window, from releases.

    Guarantee: w-event epsilon-DP, w = `window`: comparisons cost a fixed share per step; every
        share that a publication takes belongs to one step near it, and to no other publication.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event Sequences over
        Infinite Streams", 2014.

    >>> from dpstream import release
    >>> series = release(BudgetAbsorption(epsilon=1, window=3), [[5, 80]] * 4, secret=bytes(32))
    >>> series.paid[0], series.values.shape
    (True, (4, 2))
    """

    remembers: ClassVar[Remembers] = "releases"

    def start(self) -> BudgetAbsorptionState:
        """Nothing published, nothing saved."""
        return BudgetAbsorptionState()

    def step(
        self, state: BudgetAbsorptionState, x: Integers, spend: Spender
    ) -> tuple[BudgetAbsorptionState, list[Release]]:
        """Compare; then rest, publish with the saved shares, or hold and save one more."""
        test, share = self.split(len(x))
        now, last = spend.step, state.published
        if last is None:
            last = publish_all(x, spend, share, self.first_groups(len(x)))
            state = BudgetAbsorptionState(published=last, paid_at=now, shares=1)
            return state, [last.release(now, paid=True)]
        last = self.regroup(last, now)
        rests_until, paid = state.paid_at + state.shares - 1, False
        if now > rests_until:
            distances = compare(last, x, spend, test)
            shares = min(now - rests_until, self.window)
            last, paid = publish_groups(last, x, distances, spend, share * shares)
        if paid:
            state = BudgetAbsorptionState(published=last, paid_at=now, shares=shares)
        else:
            state = replace(state, published=last)
        return state, [last.release(now, paid=paid)]

    def publication_share(self, test: Fraction) -> Fraction:
        """The share of each step."""
        return on_grid((self.budget - test * self.window) / self.window)
