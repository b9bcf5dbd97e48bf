"""Sort the values of a batch into buckets by randomised response; publish each bucket's mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.batches import (
    BatchMechanism,
    LabelledBatch,
    posterior_median,
    publish_groups,
)
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.ledger.charges import Cells
from dpstream.privacy.sensitivity import bucket_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

_MEMORY = 0.998  # of the answers so far, per batch: old ones fade
_ROUNDS = 2


@storable("bucket prior")
@dataclass(frozen=True, kw_only=True, eq=False)
class BucketPrior:
    """Where values usually are: answers so far, and the weights they lead to, bins x buckets.

    A number said is right with odds `odds` = e^eps_g to 1 against each other bucket. With prior
    weights pi, bucket k is the true one behind the answer a with probability pi_k / d (k != a), or
    odds pi_a / d (k = a), where d = 1 + (odds - 1) pi_a.
    Guarantee: post-processing; it reads bucket numbers that randomised response has made public.
    """

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
        answers = _MEMORY * self.answers
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

    def settle(self, labels: Integers, values: Reals, edges: Integers, odds: float) -> Reals:
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


_MOST = 1 << 14  # buckets among which randomised response may draw


@dataclass(frozen=True, kw_only=True)
class BucOrder(BatchMechanism, identity="buc_order", keys="bucket"):
    """Each value names its bucket, by randomised response; each named bucket publishes its mean.

    `bucket`: the width of a bucket, in the units of the data; by default as many buckets as
    epsilon can tell apart. Values are clipped to the bucket that they named, so the noise of a
    bucket's sum is as wide as the bucket, and not as the range. With `shrink`, an answer counts for
    as much as it can be believed, given where answers have usually been. When to use it: values
    that jump about, short delays, epsilon of 2 and more.

    Guarantee: event-level epsilon-DP: the bucket number costs eps_g, and given the numbers a value
        enters one sum, clipped to a bucket, with noise bucket / eps_p.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: a batch of `delay` steps is published with its last one.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025; values are clipped to their buckets, which cuts its noise Delta / eps_p.

    >>> from dpstream import release
    >>> jumps = BucOrder(epsilon=20, delay=4, lo=0, hi=100, bucket=25)
    >>> series = release(jumps, [10, 90, 10, 90], secret=bytes(32), run_id=bytes(16))
    >>> series.values[:, 0].round(-1).tolist()
    [10.0, 90.0, 10.0, 90.0]
    """

    group_share: Amount = Fraction(1, 2)
    bucket: Amount | None = None
    labels_read_range: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket is not None:
            object.__setattr__(self, "bucket", positive(self.bucket, "bucket"))
        if self.buckets > _MOST:
            raise InvalidParameter(
                f"bucket={self.bucket} makes {self.buckets} buckets of the range [{self.lo}, "
                f"{self.hi}]; at most {_MOST} are possible; take wider ones"
            )

    @cached_property
    def odds(self) -> float:
        """e^eps_g, within what floats can hold."""
        return math.exp(min(float(self.for_groups), 300.0))

    @cached_property
    def width(self) -> int:
        """Of a bucket, in grid steps; the last may be narrower."""
        change = self.change
        if self.bucket is not None:
            return min(max(int(Fraction(self.bucket) / self.range[2]), 1), int(change))
        told_apart = min(round(self.odds**0.5), 64, int(change))
        return int(-(-change // max(told_apart, 1)))

    @cached_property
    def buckets(self) -> int:
        """How many there are."""
        return int(-(-self.change // self.width))

    @cached_property
    def edges(self) -> Integers:
        """In grid steps, from lo to hi: one more than there are buckets."""
        lo, hi = self.grid_range
        return np.minimum(lo + self.width * np.arange(self.buckets + 1), hi)

    @cached_property
    def for_values(self) -> Fraction:
        """eps_p: all of epsilon where there is one bucket only."""
        return self.budget if self.buckets == 1 else self.budget - self.for_groups

    def no_groups(self, bins: int) -> BucketPrior:
        """Nothing is known of where values are."""
        return BucketPrior.flat(bins, self.buckets)

    def next_groups(self, groups: BucketPrior, labels: Integers) -> BucketPrior:
        """What the answers of this batch add to that."""
        return groups.learn(labels, self.odds) if self.buckets > 1 else groups

    def label(self, block: Integers, labels: Integers, cells: Cells, spend: Spender) -> Integers:
        """The bucket that each value says it is in."""
        if self.buckets == 1:
            return labels
        true = np.minimum((block - self.edges[0]) // self.width, self.buckets - 1)
        return spend.respond(
            true, buckets=self.buckets, epsilon=self.for_groups, purpose="bucket", cells=cells
        )

    def answer(self, batch: LabelledBatch, spend: Spender) -> Reals:
        """Means of clipped values, within the edges of their buckets."""
        low, high = self.edges[batch.labels], self.edges[batch.labels + 1]
        values, scale = publish_groups(
            replace(batch, block=np.clip(batch.block, low, high)),
            spend,
            sensitivity=bucket_change(self.change, width=self.width),
            publish=self.publish,
            smoother=self.smoother,
        )
        quantum = float(self.range[2])
        if not self.shrink:
            return np.clip(values, low, high) * quantum
        inside = low + posterior_median(values - low, scale, 0.0, high - low)
        if self.buckets == 1:
            return inside * quantum
        prior: BucketPrior = batch.groups
        return prior.settle(batch.labels, inside, self.edges, self.odds) * quantum
