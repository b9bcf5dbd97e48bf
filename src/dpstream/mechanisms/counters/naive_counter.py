"""Fresh noise on every increment, never more state than the running sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.counting.factorisation import check_advance, check_whole
from dpstream.mechanisms.parts.factorised_counter import CounterMechanism
from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class NaiveStrategy:
    """C = I, B = A: one noisy increment per step, added up.

    The other plain choice, C = A and B = I (fresh noise on every prefix sum), has column norm
    sqrt(T) and row norm 1: the same largest error sqrt(T), but at every step, and T must be known.
    This one has error sqrt(t) at step t, so it is never worse; it is what the name means here.

    Guarantee: an impulse at one step has L2 sensitivity 1; noise at step t is sigma sqrt(t).
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010
    (the straw man of its introduction).

    >>> NaiveStrategy(steps=9).column_norm(), NaiveStrategy(steps=9).row_norm(9)
    (1.0, 3.0)
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, 2**40)

    @property
    def width(self) -> int:
        """One float per key: the noise itself."""
        return 1

    def column_norm(self) -> float:
        """Columns of the identity."""
        return 1.0

    def row_norm(self, step: int) -> float:
        """sqrt(t)."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(step)

    def error(self) -> Reals:
        """sqrt(1), ..., sqrt(T)."""
        return np.sqrt(np.arange(1, self.steps + 1, dtype=np.float64))

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Add the new normal."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, 1, z)
        state[:, 0] += z
        return state[:, 0].copy()

    def readout(self, step: int) -> Reals:
        """The state is the noise."""
        check_whole("step", step, 0, self.steps)
        return np.ones(1)

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """A sum of stop - start fresh normals."""
        check_whole("stop", stop, 0, self.steps)
        check_whole("start", start, 0, stop)
        return np.ones((1, 1)), np.full((1, 1), math.sqrt(stop - start))

    def covariance(self, step: int) -> Reals:
        """[[t]]."""
        check_whole("step", step, 0, self.steps)
        return np.full((1, 1), float(step))

    def encode(self, changes: Reals) -> Reals:
        """C is the identity."""
        return np.array(changes, dtype=np.float64)

    def dense(self) -> tuple[Reals, Reals]:
        """(A, I)."""
        return np.tri(self.steps), np.eye(self.steps)


class IncrementCoder:
    """C is the identity: increments are measured as they are, and added up."""

    bits = 0

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

    def slack(self) -> Fraction:
        """Increments are integers already."""
        return Fraction(0)


@dataclass(frozen=True, kw_only=True)
class NaiveCounter(CounterMechanism, identity="naive_counter"):
    """Running sums of noisy increments: the error grows with the root of the number of steps.

    Guarantee: event-level rho-zCDP: one event moves one increment by `sensitivity`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010.

    >>> from dpstream import release
    >>> counter = NaiveCounter(rho=0.5, steps=9)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(9), 3)
    ((3, 1), 3.0)
    """

    @cached_property
    def process(self) -> NaiveStrategy:
        """The scheme's matrices."""
        return NaiveStrategy(steps=self.steps)

    def coder(self, bits: int) -> IncrementCoder:
        """Increments are integers; they need no finer grid."""
        return IncrementCoder()
