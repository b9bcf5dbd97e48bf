"""Publish every step with an equal share of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from dpstream.mechanisms.base import HistogramMechanism, Remembers, Spender, release_or_hold
from dpstream.privacy.amounts import laplace_stddev
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers, Release


@dataclass(frozen=True, kw_only=True)
class Uniform(HistogramMechanism, identity="uniform"):
    """Spend epsilon / window on every step.

    Guarantee: w-event epsilon-DP, w = `window`: any `window` successive steps cost epsilon in all.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event Sequences over
        Infinite Streams", 2014.

    >>> from dpstream import release
    >>> series = release(Uniform(epsilon=1, window=4), [[10], [12], [11]], secret=bytes(32))
    >>> series.paid, series.values.shape
    ([True, True, True], (3, 1))
    """

    remembers: ClassVar[Remembers] = "releases"
    constant_charges: ClassVar[bool] = True

    @cached_property
    def share(self) -> Fraction:
        """What one step may spend."""
        return self.budget / self.window

    def step(self, state: None, x: Integers, spend: Spender) -> tuple[None, list[Release]]:
        """Noise on every count, at once."""
        noisy = self.perturb(x, self.share, spend)
        stddev = laplace_stddev(histogram_change(), self.share)
        return None, [release_or_hold(spend.step, noisy, paid=True, stddev=stddev)]
