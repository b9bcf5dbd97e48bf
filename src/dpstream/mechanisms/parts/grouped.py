"""Batches whose values are told apart by tests of deviations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.delayed import BatchMechanism, Held
from dpstream.mechanisms.parts.group_release import publish_groups
from dpstream.mechanisms.parts.merging import worth_joining
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.charges import Cells
from dpstream.privacy.tokens import Paid
from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class GroupedMechanism(BatchMechanism):
    """Tests with the share eps_g, unless no answer of theirs could matter."""

    threshold: Amount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            object.__setattr__(self, "threshold", positive(self.threshold, "threshold"))

    @cached_property
    def thresholds(self) -> Reals:
        """Of the deviation of n values together, in grid steps, n = 0 ... `delay`."""
        if self.threshold is not None:
            theta = Fraction(self.threshold) / self.range[2]
            return np.full(self.delay + 1, float(theta))
        noise = float(self.change / (self.budget - self.for_groups))
        return worth_joining(self.delay, change=self.change, noise=noise, scale=self.test_scale)

    def test_scale(self, n: int) -> float:
        """Of the noise in a test's deviation of n values, in grid steps."""
        raise NotImplementedError

    @cached_property
    def tests(self) -> bool:
        """Are tests made? Not where all values join, or none does, whatever the answers are."""
        pairs_and_more = self.thresholds[2:]
        always = bool((pairs_and_more == math.inf).all())
        return len(pairs_and_more) > 0 and not always and pairs_and_more[0] > -math.inf

    @cached_property
    def for_values(self) -> Fraction:
        """eps_p: all of epsilon where no tests are made."""
        return self.budget - self.for_groups if self.tests else self.budget

    def take(self, held: Held, x: Integers, spend: Spender) -> Held:
        """One value more, in the group that its tests say."""
        labels, groups = held.labels, held.groups
        if self.tests:
            label, groups = self.join(held, x, spend)
        else:
            alone = len(self.thresholds) > 2 and self.thresholds[2] == -math.inf
            label = np.full_like(x, held.count if alone else 0)
        return Held(
            values=held.values.append(x),
            labels=labels.append(label),
            count=held.count + 1,
            groups=groups,
        )

    def join(self, held: Held, x: Integers, spend: Spender) -> tuple[Integers, object]:
        """A label for every bin's value, and what the groups need from now on."""
        raise NotImplementedError

    def answer(
        self,
        block: Integers,
        labels: Integers,
        groups: Any,
        epsilon: Fraction,
        cells: Cells,
        spend: Spender,
        *,
        keep: Integers | None = None,
        paid: Paid | None = None,
    ) -> Reals:
        """Each group's mean with the noise of one sum, or its smoothed noisy values."""
        values, scale = publish_groups(
            block,
            labels,
            spend,
            publish=self.publish,
            smoother=self.smoother,
            sensitivity=self.change,
            epsilon=epsilon,
            cells=cells,
            keep=keep,
            paid=paid,
        )
        return self.settled(values, scale)
