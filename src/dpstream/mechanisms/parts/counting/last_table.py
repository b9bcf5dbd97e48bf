"""A buffered Toeplitz counter whose last sum is measured once more, with budget of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.strategy import Array, check_whole

_UP = 1 + 2.0**-45  # noise is rounded up


@dataclass(frozen=True, kw_only=True)
class LastTable(BufferedLinearToeplitz):
    """B and C as before, and one more row of C: w (1, ..., 1), read at the last step.

    The last sum is then known twice, with noise of variance r^2 (r the last row norm of B) and
    1/w^2; their mean with weights a = 1/(1 + w^2 r^2) and 1 - a has variance r^2/(1 + w^2 r^2).
    Only its law matters, so one normal serves at the last step as at every other: what the counter
    would have added there, and the second measurement, are independent of everything before.

    `share`: the part of a unit's budget that the extra row takes, w^2 = column_norm^2 share/(1 -
    share) by the norm of C alone. Earlier steps get 1/sqrt(1 - share) times the noise.

    Guarantee: an impulse has L2 sensitivity at most `column_norm()`; noise at step t is sigma *
    row_norm(t).

    >>> plain, last = BufferedLinearToeplitz(steps=100), LastTable(steps=100, share=0.1)
    >>> def stddev(counter, step):
    ...     return counter.column_norm() * counter.row_norm(step)
    >>> [round(stddev(last, t) / stddev(plain, t), 3) for t in (50, 99, 100)]
    [1.054, 1.054, 0.806]
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must be between 0 and 1; got {self.share}")

    @cached_property
    def extra(self) -> float:
        """w^2."""
        return super().column_norm() ** 2 * self.share / (1 - self.share)

    @cached_property
    def counted(self) -> float:
        """a: the weight of the counter's own last sum."""
        return 1 / (1 + self.extra * super().row_norm(self.steps) ** 2)

    @cached_property
    def fresh(self) -> float:
        """Spread of what is new at the last step, rounded up: more noise is no less private."""
        own = self.counted * float(self.weights.sum())
        return math.hypot(own, (1 - self.counted) / math.sqrt(self.extra)) * _UP

    def column_norm(self) -> float:
        """Every column of C gets w."""
        return math.sqrt(super().column_norm() ** 2 + self.extra)

    def row_norm(self, step: int) -> float:
        """Those of B, but for the last."""
        norm = super().row_norm(step)
        return norm * math.sqrt(self.counted) * _UP if step == self.steps else norm

    def error(self) -> Array:
        """All row norms."""
        norms = super().error()
        norms[-1] *= math.sqrt(self.counted) * _UP
        return norms

    def advance(self, state: Array, step: int, z: Array) -> Array:
        """At the last step: a times what the counter carries on, and fresh noise for both."""
        noise = super().advance(state, step, z)
        if step == self.steps:
            noise -= float(self.weights.sum()) * z
            noise *= self.counted
            noise += self.fresh * z
        return noise

    def readout(self, step: int) -> Array:
        """For streams that join at `step`; whoever joins at the last one has its law alone."""
        check_whole("step", step, 0, self.steps)
        joined = math.sqrt(self.counted) * _UP if step == self.steps else 1.0
        return self.weights * joined

    def encode(self, changes: Array) -> Array:
        """The counter's measurements, then the extra one."""
        total = math.sqrt(self.extra) * float(np.sum(changes))
        return np.append(super().encode(changes), total)

    def dense(self) -> tuple[Array, Array]:
        """B has a column more, C a row more."""
        decoder, encoder = super().dense()
        decoder[-1] *= self.counted
        more = np.zeros((self.steps, 1))
        more[-1] = (1 - self.counted) / math.sqrt(self.extra)
        total = np.full((1, self.steps), math.sqrt(self.extra))
        return np.hstack([decoder, more]), np.vstack([encoder, total])
