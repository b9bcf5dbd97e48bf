"""What boosting remembers: a sum of scores for every candidate, over the slots so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.privacy.sensitivity import score_sum_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers


@storable("dpi memory")
@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sums by candidate; one user moves each by at most `slots` times the change of one score."""

    sums: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: int = 0

    @classmethod
    def of(cls, candidates: int) -> Memory:
        """No slot seen."""
        return cls(sums=np.zeros(candidates, dtype=np.int64))

    def plus(self, scores: Integers) -> Memory:
        """One more slot."""
        return Memory(sums=self.sums + scores, slots=self.slots + 1)

    def halved(self) -> Memory:
        """The past counts half. Rounded down, a half moves by half the change, rounded up."""
        return Memory(sums=self.sums >> 1, slots=(self.slots + 1) // 2)

    def choose(self, spend: Spender, *, change: Fraction, epsilon: Fraction, purpose: str) -> int:
        """A candidate, those with a high mean more likely."""
        sensitivity = score_sum_change(change, slots=self.slots)
        return spend.choose(self.sums, sensitivity=sensitivity, epsilon=epsilon, purpose=purpose)
