"""Group successive values of a batch that stay close together; publish each group as one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.batches import GroupedMechanism, OpenBatch
from dpstream.mechanisms.parts.grouping import GRID, Grouping, TimeGroups
from dpstream.records import Integers


@dataclass(frozen=True, kw_only=True)
class ContinGroup(GroupedMechanism, identity="contin_group"):
    """Successive values of a batch form a group while their deviation stays below a threshold.

    `threshold`: in the units of the data. Without one no tests are made, for they cost more than
    they tell (see `GroupedMechanism`): a batch is one group, or, from epsilon = 8 on, every value
    is published alone. When to use it: for plain means of batches; or with a threshold, to compare.

    Guarantee: event-level epsilon-DP: a value takes part in one run of tests, which costs eps_g
        (threshold noise 4 Delta / eps_g, test noise 8 Delta / eps_g), and is published once with
        eps_p, in the sum of its group or by itself.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: a batch of `delay` steps is published with its last one.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025; the noise of its tests is doubled, because a deviation moves by 2 Delta.

    >>> from dpstream import release
    >>> series = release(ContinGroup(epsilon=1, delay=3, lo=0, hi=100), [10] * 7, secret=bytes(32))
    >>> [len(set(series.values[a : a + 3, 0].tolist())) for a in (0, 3)], len(series)
    ([1, 1], 7)
    """

    constant_charges: ClassVar[bool] = True

    @cached_property
    def grouping(self) -> Grouping:
        """How groups grow, with eps_g per value."""
        return Grouping(epsilon=self.for_groups, change=self.change, longest=self.delay)

    def no_groups(self, bins: int) -> TimeGroups | None:
        """No group is open."""
        return self.grouping.start(bins) if self.tests else None

    def join(self, batch: OpenBatch, x: Integers, spend: Spender) -> tuple[Integers, TimeGroups]:
        """Into the open group of its bin, or a new one."""
        theta = np.array([math.ceil(GRID * self.theta)])
        groups, size = self.grouping.grow(batch.groups, x, theta, spend)
        last = batch.labels.last(1)[:, 0] if batch.count else np.zeros_like(x)
        return last + (size == 1), groups
