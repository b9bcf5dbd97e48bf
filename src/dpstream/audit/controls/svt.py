"""Six versions of the sparse vector technique, as papers have printed them; four are broken.

Lyu, Su, Li, "Understanding the Sparse Vector Technique for Differential Privacy", 2017, compare
them. All claim epsilon-DP for queries that each move by at most 1 between neighbours, and for at
most c answers above the threshold.

| version | threshold noise | query noise | what is true |
|---|---|---|---|
| 1 (theirs) | Lap(2/e), once | Lap(4c/e) | e-DP |
| 2 (Dwork, Roth 2014) | Lap(2c/e), anew after each | Lap(4c/e) | e-DP |
| 3 (Roth 2011) | Lap(2/e), once | Lap(2c/e), and the noisy answer is published | no e at all |
| 4 (Lee, Clifton 2014) | Lap(4/e), once | Lap(4/(3e)) | (1 + 6c)/4 e |
| 5 (Stoddard et al. 2014) | Lap(2/e), once | none | no e at all |
| 6 (Chen et al. 2015) | Lap(2/e), once | Lap(2/e), and no bound on the answers | no e at all |
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpstream.audit.dealer import Dealer
from dpstream.records import Integers, Reals

ABOVE, BELOW, STOPPED = 1.0, 0.0, np.nan


@dataclass(frozen=True, kw_only=True)
class SparseVector:
    """One version, over a whole array of runs at once; the threshold is 0.

    `grid`: a change of 1 is so many steps of the integers on which noise is drawn.
    """

    version: int
    epsilon: Fraction = Fraction(1)
    count: int = 1
    """How many answers above the threshold there may be (c)."""
    grid: int = 4

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x queries: 1 above (version 3: the noisy answer), 0 below, NaN once stopped."""
        dealer, size = Dealer(secret), len(data)
        threshold = self._noise(dealer, self._threshold_scale(), runs)
        left = np.full(runs, self.count if self.version != 6 else size + 1)
        found = np.full((runs, size), STOPPED)
        for number in range(size):
            noisy = int(data[number, 0]) * self.grid + self._noise(dealer, self._scale(), runs)
            above, open_ = noisy >= threshold, left > 0
            shown = noisy / self.grid if self.version == 3 else np.full(runs, ABOVE)
            found[:, number] = np.where(open_, np.where(above, shown, BELOW), STOPPED)
            if self.version == 3:  # "below" must not look like the answer 0
                found[open_ & ~above, number] = -1e6
            left = left - (above & open_)
            if self.version == 2:
                again = self._noise(dealer, self._threshold_scale(), runs)
                threshold = np.where(above, again, threshold)
        return found

    def _threshold_scale(self) -> Fraction:
        one = 1 / self.epsilon
        return {2: 2 * self.count * one, 4: 4 * one}.get(self.version, 2 * one)

    def _scale(self) -> Fraction | None:
        one = 1 / self.epsilon
        return {
            1: 4 * self.count * one,
            2: 4 * self.count * one,
            3: 2 * self.count * one,
            4: Fraction(4, 3) * one,
            5: None,
            6: 2 * one,
        }[self.version]

    def _noise(self, dealer: Dealer, scale: Fraction | None, runs: int) -> Integers:
        if scale is None:
            return np.zeros(runs, np.int64)
        sensitivity = Fraction(self.grid)
        return dealer.laplace(np.zeros(runs, np.int64), sensitivity=sensitivity, epsilon=1 / scale)
