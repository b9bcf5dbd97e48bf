"""Batches whose values are told apart by tests of deviations, or not at all.

A group of n values with deviation dev = sum |c - mean|, published by its mean, costs an absolute
error of about dev and one noise; n values published alone cost n noises. But a test of dev has tens
of times the noise of a value (its share of epsilon is smaller, its sensitivity larger), so where it
could tell groups apart, the values alone would already be good, and where they are not, it tells
nothing: no threshold makes tests worth their share. They are made if a threshold is given.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.delayed import BatchMechanism, Held
from dpstream.mechanisms.parts.group_release import Payment, publish_groups
from dpstream.privacy.amounts import Amount, positive
from dpstream.records import Integers, Reals

_SHARP = 8
"""Epsilon from which a value alone has noise of less than an eighth of the range."""


@dataclass(frozen=True, kw_only=True)
class GroupedMechanism(BatchMechanism, identity=None, keys="threshold"):
    """With a `threshold`, tests; without, a batch is one group, or none if epsilon is large."""

    threshold: Amount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            object.__setattr__(self, "threshold", positive(self.threshold, "threshold"))

    @property
    def tests(self) -> bool:
        """Are tests made?"""
        return self.threshold is not None

    @cached_property
    def theta(self) -> Fraction:
        """The threshold of a deviation, in grid steps."""
        return Fraction(self.threshold or 0) / self.range[2]

    @cached_property
    def for_values(self) -> Fraction:
        """eps_p: all of epsilon where no tests are made."""
        return self.budget - self.for_groups if self.tests else self.budget

    @property
    def together(self) -> int:
        """How many values usually share one noise, as far as that is public."""
        one_sum = not self.tests and self.publish == "reduce" and self.budget < _SHARP
        return self.delay if one_sum else 1

    def take(self, held: Held, x: Integers, spend: Spender) -> Held:
        """One value more, in the group that its tests say."""
        label, groups = np.full_like(x, held.count if self.budget >= _SHARP else 0), held.groups
        if self.tests:
            label, groups = self.join(held, x, spend)
        return Held(
            values=held.values.append(x),
            labels=held.labels.append(label),
            count=held.count + 1,
            groups=groups,
        )

    @abstractmethod
    def join(self, held: Held, x: Integers, spend: Spender) -> tuple[Integers, Any]:
        """A label for every bin's value, and what the groups need from now on."""

    def answer(
        self,
        block: Integers,
        labels: Integers,
        groups: Any,
        payment: Payment,
        spend: Spender,
    ) -> Reals:
        """Each group's mean with the noise of one sum, or its smoothed noisy values."""
        values, scale = publish_groups(
            block,
            labels,
            spend,
            publish=self.publish,
            smoother=self.smoother,
            sensitivity=self.change,
            payment=payment,
        )
        return self.settled(values, scale)
