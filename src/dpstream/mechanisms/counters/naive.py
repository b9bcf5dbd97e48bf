"""Fresh noise on every increment, never more state than the running sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.mechanisms.parts.counting.strategy import Array, check_advance, check_whole


@dataclass(frozen=True, kw_only=True)
class Naive:
    """C = I, B = A: one noisy increment per step, added up.

    The other plain choice, C = A and B = I (fresh noise on every prefix sum), has column norm
    sqrt(T) and row norm 1: the same largest error sqrt(T), but at every step, and T must be known.
    This one has error sqrt(t) at step t, so it is never worse; it is what the name means here.

    Guarantee: an impulse at one step has L2 sensitivity 1; noise at step t is sigma sqrt(t).
    Paper: Dwork, Naor, Pitassi, Rothblum, "Differential Privacy under Continual Observation", 2010
    (the straw man of its introduction).

    >>> Naive(steps=9).column_norm(), Naive(steps=9).row_norm(9)
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

    def error(self) -> Array:
        """sqrt(1), ..., sqrt(T)."""
        return np.sqrt(np.arange(1, self.steps + 1, dtype=np.float64))

    def advance(self, state: Array, step: int, z: Array) -> Array:
        """Add the new normal."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, 1, z)
        state[:, 0] += z
        return state[:, 0].copy()

    def readout(self, step: int) -> Array:
        """The state is the noise."""
        check_whole("step", step, 0, self.steps)
        return np.ones(1)

    def jump(self, start: int, stop: int) -> tuple[Array, Array]:
        """A sum of stop - start fresh normals."""
        check_whole("stop", stop, 0, self.steps)
        check_whole("start", start, 0, stop)
        return np.ones((1, 1)), np.full((1, 1), math.sqrt(stop - start))

    def covariance(self, step: int) -> Array:
        """[[t]]."""
        check_whole("step", step, 0, self.steps)
        return np.full((1, 1), float(step))

    def encode(self, changes: Array) -> Array:
        """C is the identity."""
        return np.array(changes, dtype=np.float64)

    def dense(self) -> tuple[Array, Array]:
        """(A, I)."""
        return np.tri(self.steps), np.eye(self.steps)
