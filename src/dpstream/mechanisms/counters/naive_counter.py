"""Fresh noise on every increment, never more state than the running sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from dpstream.counting.noise_process import check_whole
from dpstream.mechanisms.base import Remembers
from dpstream.mechanisms.counters.factorised_counter import Coder, CounterMechanism
from dpstream.records import Integers, Reals


class IncrementCoder(Coder):
    """C is the identity: increments are measured as they are, and added up."""

    def begin(self, bins: int) -> Reals:
        """The running sums."""
        return np.zeros(bins)

    def encode(self, state: Reals, step: int, x: Integers) -> tuple[Reals, Integers]:
        """The increment itself."""
        return state, x

    def decode(self, state: Reals, step: int, noisy: Integers) -> tuple[Reals, Reals]:
        """Add it up."""
        sums = state + noisy
        return sums, sums

    def norm(self) -> Fraction:
        """One entry per column."""
        return Fraction(1)


@dataclass(frozen=True, kw_only=True)
class NaiveCounter(CounterMechanism, identity="naive_counter"):
    """Running sums of noisy increments: the error grows with the root of the number of steps.

    The other plain choice, fresh noise on every running sum, has the largest error sqrt(T) at every
    step, and T must be known; this one has error sqrt(t) at step t, so it is never worse.

    Guarantee: event-level rho-zCDP: one event moves one increment by `sensitivity`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010
        (the straw man of its introduction).

    >>> from dpstream import release
    >>> counter = NaiveCounter(rho=0.5, steps=9)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(9), 3)
    ((3, 1), 3.0)
    """

    remembers: ClassVar[Remembers] = "answers"

    def row_norm(self, step: int) -> float:
        """As many increments as steps."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(step)

    def coder(self, bits: int) -> IncrementCoder:
        """Increments are integers; they need no finer grid."""
        return IncrementCoder()
