"""Group values of a batch that are close together, wherever they are; publish each group as one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.batches import GroupedMechanism, OpenBatch
from dpstream.privacy.sensitivity import deviation_grid, grouping_change
from dpstream.records import Integers


@njit(cache=True, nogil=True)
def deviations(
    block: Integers, labels: Integers, first: int, x: Integers, grid: int
) -> tuple[Integers, Integers, Integers]:
    """Each bin's newest value against every group of its bin that began at `first` or later.

    floor(grid n dev / (n - 1)) of the n values together, n, and the group (bin x steps + place);
    bin by bin, the groups in the order of their first values, by whose place in the batch they are
    known. Steps x bins come in. Deviations are exact, and are to be tested with noise.
    """
    steps, bins = block.shape
    tested, size = np.empty(bins * steps, np.int64), np.empty(bins * steps, np.int64)
    which = np.empty(bins * steps, np.int64)
    count, total = np.empty(steps, np.int64), np.empty(steps, np.int64)
    spread = np.empty(steps, np.int64)
    tests = 0
    for j in range(bins):
        count[:], total[:] = 1, 0  # values relative to the newest: it is 0 itself
        for i in range(first, steps):
            if labels[i, j] >= first:
                count[labels[i, j]] += 1
                total[labels[i, j]] += block[i, j] - x[j]
        for i in range(first, steps):
            spread[i] = abs(total[i])
        for i in range(first, steps):
            g = labels[i, j]
            if g >= first:
                spread[g] += abs(count[g] * (block[i, j] - x[j]) - total[g])
        for g in range(first, steps):
            if labels[g, j] == g:
                n = count[g]
                whole, part = spread[g] // (n - 1), spread[g] % (n - 1)
                tested[tests] = grid * whole + grid * part // (n - 1)
                size[tests], which[tests] = n, j * steps + g
                tests += 1
    return tested[:tests], size[:tests], which[:tests]


@njit(cache=True, nogil=True)
def largest_joined_group(
    joins: Integers, size: Integers, which: Integers, steps: int, bins: int
) -> Integers:
    """The group of each bin's newest value: the largest that it joins, or a new one."""
    group, best = np.full(bins, steps), np.zeros(bins, np.int64)
    for k in range(len(joins)):
        j = which[k] // steps
        if joins[k] and size[k] > best[j]:
            best[j], group[j] = size[k], which[k] % steps
    return group


@dataclass(frozen=True, kw_only=True)
class DiscontinGroup(GroupedMechanism, identity="discontin_group"):
    """Every value of a batch may join any group before it, the largest whose test says so.

    `threshold`: in the units of the data. Without one no tests are made, for they cost more than
    they tell (see `GroupedMechanism`): a batch is one group, or, from epsilon = 8 on, every value
    is published alone. When to use it: for plain means of batches; or with a threshold, to compare.

    Guarantee: event-level epsilon-DP: a value takes part in at most `delay` - 1 tests, its own and
        one of each later value, with noise 2 (`delay` - 1) Delta / eps_g on each normalised
        deviation (eps_g in all), and is published once with eps_p.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: a batch of `delay` steps is published with its last one.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025; no threshold noise, and less than a quarter of its test noise.

    >>> from dpstream import release
    >>> jumps = DiscontinGroup(epsilon=500, delay=4, lo=0, hi=100, threshold=20)
    >>> series = release(jumps, [10, 90, 10, 90], secret=bytes(32), run_id=bytes(16))
    >>> series.values[:, 0].round().tolist()
    [10.0, 90.0, 10.0, 90.0]
    """

    constant_charges: ClassVar[bool] = True
    least_delay: ClassVar[int] = 2
    why_least: ClassVar[str] = "a single value has no other to be grouped with; use naive"

    @cached_property
    def grid(self) -> int:
        """Parts of a grid step in which deviations are measured."""
        return deviation_grid(self.change)

    @cached_property
    def sensitivity(self) -> Fraction:
        """L1 change of all tests of a batch under one changed value."""
        return grouping_change(self.change, delay=self.delay, grid=self.grid)

    @cached_property
    def limit(self) -> Integers:
        """The threshold for n values together, for n dev / (n - 1) on its grid."""
        exact = [self.grid * self.theta * n / max(n - 1, 1) for n in range(self.delay + 1)]
        return np.array([math.ceil(limit) for limit in exact])

    def no_groups(self, bins: int) -> tuple[str, int]:
        """The run that has paid for values, and the place of the first of them in the batch."""
        return "", 0

    def join(
        self, batch: OpenBatch, x: Integers, spend: Spender
    ) -> tuple[Integers, tuple[str, int]]:
        """Into the largest group whose test says yes, or a new one."""
        paid = spend.pay(x, sensitivity=self.change, epsilon=self.for_groups, purpose="group")
        run, first = batch.groups
        if run != paid.run:  # a copied state: this run has not paid for what the batch holds
            run, first = paid.run, batch.count
        block, labels = batch.contents()
        tested, size, which = deviations(block, labels, first, x, self.grid)
        label = np.full_like(x, batch.count)
        if len(tested):
            noisy = spend.laplace(
                tested,
                sensitivity=self.sensitivity,
                epsilon=self.for_groups,
                purpose="test",
                interval=paid,
            )
            joins = (noisy < self.limit[size]).astype(np.int64)
            label = largest_joined_group(joins, size, which, batch.count, len(x))
        return label, (run, first)
