"""Budget distribution with a record of what was spent that is too short.

Claim: w-event epsilon-DP. True: the record forgets each charge one step later, inside its window,
so every step publishes with epsilon / 4: w steps cost w epsilon / 4 and the comparisons'
epsilon / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpstream.mechanisms.parts.budget_window import BudgetWindow
from dpstream.mechanisms.w_event.budget_distribution import (
    BudgetDistribution,
    BudgetDistributionState,
)


@dataclass(frozen=True, kw_only=True)
class Forgetful(BudgetDistribution, identity="control/forgetful"):
    """Remembers nothing of the step before."""

    def start(self) -> BudgetDistributionState:
        """A window of one step instead of w."""
        return BudgetDistributionState(spent=BudgetWindow(width=1))
