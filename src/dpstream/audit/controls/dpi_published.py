"""DPI as printed: weights from the sum of all past scores, charged as if a user moved one of them.

What is wrong: Theorem 5.1 bounds the change of one slot's score by 2 Delta_Q / mu and charges each
slot for that. Algorithm 1 weighs exp(-alpha_t sum_j score_j): a user who is in every slot moves
every summand, so slot t costs t times what was charged, and the whole stream the sum of t eps_t,
which no series of the order 1 / t^2 keeps finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.parts.synopses.memory import Memory
from dpstream.records import Reals


@dataclass(frozen=True, kw_only=True)
class DpiPublished(Dpi, identity="control/dpi"):
    """The sum of scores, drawn and charged as if it were one score.

    The ledger cannot see it, for the charges are those of the paper. The replay does: the sums
    move by more than was declared.
    """

    def _choose(
        self, scores: Memory, purpose: str, change: Fraction, epsilon: Fraction, spend: Spender
    ) -> int:
        return spend.choose(scores.sums, sensitivity=change, epsilon=epsilon, purpose=purpose)


def bounded_loss(budgets: Sequence[Fraction]) -> Fraction:
    """What the printed form can cost a user who is in every slot: the sum of t eps_t.

    >>> sum(float(Fraction(1, t * (t + 1))) for t in range(1, 1001)) < 1
    True
    >>> round(float(bounded_loss([Fraction(1, t * (t + 1)) for t in range(1, 1001)])), 2)
    6.49
    """
    return sum((t * budget for t, budget in enumerate(budgets, start=1)), Fraction(0))


def path_loss(budgets: Sequence[float], *, printed: bool, candidates: int = 10_000) -> float:
    """Log ratio of the probabilities of one path of draws, exactly, for one user in every slot.

    The user decides every slot: with them one synopsis scores 1 and all others -1, without them
    the other way round (score change 2). The path draws that synopsis in every slot. Budgets are
    those of the synopsis draw: exp(budget score / 4), on sums (`printed`) or on means.
    """
    total = 0.0
    for t, budget in enumerate(budgets, start=1):
        reach = budget / 4 * (t if printed else 1)
        fits = np.full(candidates, -reach)
        fits[0] = reach
        total += _log_share(fits) - _log_share(-fits)
    return total


def _log_share(exponents: Reals) -> float:
    """Log of the first one's probability."""
    return float(exponents[0] - np.logaddexp.reduce(exponents))
