"""Where values usually are, learnt from randomised bucket numbers, and what one of them then says.

Guarantee: post-processing; it reads bucket numbers that randomised response has made public.

A number said is right with odds `odds` = e^eps_g to 1 against each other bucket. With prior weights
pi, bucket k is the true one behind the answer a with probability pi_k / d (k != a), or
odds pi_a / d (k = a), where d = 1 + (odds - 1) pi_a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

_KEPT = 0.998  # of the answers so far, per batch: old ones fade
_ROUNDS = 2


@storable("bucket prior")
@dataclass(frozen=True, kw_only=True, eq=False)
class BucketPrior:
    """Answers so far, and the weights they lead to: bins x buckets."""

    answers: Reals
    weight: Reals

    @classmethod
    def flat(cls, bins: int, buckets: int) -> BucketPrior:
        """Before any answer."""
        answers = np.zeros((bins, buckets))
        return cls(answers=answers, weight=np.full_like(answers, 1 / buckets))

    def learn(self, labels: Integers, odds: float) -> BucketPrior:
        """With one batch of answers more (steps x bins): some rounds of EM.

        The flat prior counts for as many answers as it takes to tell a weight from it.
        """
        bins, buckets = self.answers.shape
        answers = _KEPT * self.answers
        for j in range(bins):
            answers[j] += np.bincount(labels[:, j], minlength=buckets)
        flat = buckets * (odds + buckets - 1) / max((odds - 1) ** 2, 1e-12)
        total = answers.sum(axis=1, keepdims=True)
        weight = self.weight
        for _ in range(_ROUNDS):
            told = answers / (1 + (odds - 1) * weight)
            expected = weight * (told.sum(axis=1, keepdims=True) + (odds - 1) * told)
            weight = (expected + flat / buckets) / (total + flat)
        return BucketPrior(answers=answers, weight=weight)

    def settle(self, labels: Integers, values: Reals, edges: Reals, odds: float) -> Reals:
        """The median of what is possible for each value (steps x bins).

        `values` are where they are if their bucket is the true one; elsewhere they may be anywhere
        in a bucket. `edges`: of all buckets, one more than there are.
        """
        out = np.empty_like(values)
        for j, weight in enumerate(self.weight):
            below = np.concatenate(([0.0], np.cumsum(weight)))
            own = weight[labels[:, j]]
            half = (1 + (odds - 1) * own) / 2
            low = np.interp(half, below, edges)
            high = np.interp(half - (odds - 1) * own, below, edges)
            under = below[labels[:, j]]
            inside = (under < half) & (half <= under + odds * own)
            out[:, j] = np.where(inside, values[:, j], np.where(under >= half, low, high))
        return out


def odds_of(epsilon: float) -> float:
    """e^epsilon, within what floats can hold."""
    return math.exp(min(epsilon, 300.0))
