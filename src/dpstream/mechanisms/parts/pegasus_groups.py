"""Common to both forms of PeGaSuS over a series: how successive values are grouped and smoothed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, get_args

import numpy as np

from dpstream.mechanisms.parts.delayed import SharedMechanism, check_choice
from dpstream.mechanisms.parts.group_release import Smoother
from dpstream.mechanisms.parts.grouping import GRID, Grouping
from dpstream.privacy.amounts import Amount, positive
from dpstream.records import Integers

_THRESHOLD = 5  # theta = 5 Delta / eps_g


@dataclass(frozen=True, kw_only=True)
class PegasusGroups(SharedMechanism, ABC, identity=None, keys="threshold smoother"):
    """Groups that grow while their deviation is below `threshold`, in the units of the data."""

    threshold: Amount | None = None
    smoother: Smoother = "median"
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.smoother, "smoother", get_args(Smoother))
        if self.threshold is not None:
            object.__setattr__(self, "threshold", positive(self.threshold, "threshold"))

    @property
    @abstractmethod
    def largest_group(self) -> int:
        """How many values a group has at most."""

    @cached_property
    def grouping(self) -> Grouping:
        """How groups grow, with eps_g per value."""
        return Grouping(epsilon=self.for_groups, change=self.change, longest=self.largest_group)

    @cached_property
    def theta(self) -> Integers:
        """The threshold of every deviation, on its grid."""
        theta = _THRESHOLD * self.change / self.for_groups
        if self.threshold is not None:
            theta = Fraction(self.threshold) / self.range[2]
        return np.array([math.ceil(GRID * theta)])
