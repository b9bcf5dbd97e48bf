"""PeGaSuS and AdaPub with the noise that their papers give the tests of groups.

What is wrong: a deviation moves by two when a count moves by one, and PeGaSuS scales its noise for
one. AdaPub divides the budget of its counts by the window, but not that of its tests: w steps of a
window are tested, each with the whole of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.mechanisms.parts.grouping import GRID, Grouping
from dpstream.mechanisms.w_event.adapub import AdaPub
from dpstream.mechanisms.w_event.pegasus import THRESHOLD, PegasusW
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers


@dataclass(frozen=True, kw_only=True)
class PegasusPublished(PegasusW, identity="control/pegasus_w"):
    """Lap(2 / eps_g) and Lap(4 / eps_g) for the tests, charged as the 2 eps_g that they are."""

    @cached_property
    def share(self) -> Fraction:
        """What the paper gives a step's counts."""
        return on_grid(self.budget / self.window - self._claimed)

    @cached_property
    def grouping(self) -> Grouping:
        """Half of the sound noise is the sound noise of twice the budget."""
        return Grouping(epsilon=2 * self._claimed, change=histogram_change(), longest=self.window)

    @cached_property
    def theta(self) -> Integers:
        """The threshold that the claimed eps_g gives."""
        return np.array([math.ceil(GRID * THRESHOLD / self._claimed)])

    @cached_property
    def _claimed(self) -> Fraction:
        return on_grid(self.budget / (5 * self.window))


@dataclass(frozen=True, kw_only=True)
class AdaPubPublished(AdaPub, identity="control/adapub"):
    """A fifth of epsilon for the tests of every single step."""

    @cached_property
    def share(self) -> Fraction:
        """What the paper gives a step's counts."""
        return on_grid(4 * self.budget / (5 * self.window))

    @cached_property
    def grouping(self) -> Grouping:
        """The tests of one step with the budget of a whole window."""
        epsilon = on_grid(self.budget / 5)
        return Grouping(epsilon=epsilon, change=histogram_change(), longest=self.window)
