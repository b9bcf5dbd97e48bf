"""A counter whose last step is measured once more: what a window ends with is what people keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.counting.factorisation import check_whole
from dpstream.errors import InvalidParameter
from dpstream.records import Reals


@dataclass(frozen=True, kw_only=True)
class LastTwice:
    """`process`, and one more measurement of the total, both weighed by their variances.

    The encoder has one more row, g times all ones, with g^2 = kappa^2 share / (1 - share): of what
    an impulse costs, `share` goes to it, whenever the impulse comes. The last answer is
    a N_T + (1 - a) n/g, n standard normal, a = 1 / (1 + g^2 row_T^2). Given the steps before, N_T
    is known but for its newest normal, so one normal is enough for both.

    Guarantee: an impulse has L2 sensitivity `column_norm()`; the noise of the last step has the
    variance of the two measurements' best average, all other steps that of `process`.

    >>> blt = BufferedLinearToeplitz(steps=100)
    >>> twice = LastTwice(process=blt, share=Fraction(1, 8))
    >>> [round(p.column_norm() * p.row_norm(t), 2) for p in (blt, twice) for t in (99, 100)]
    [2.53, 2.53, 2.7, 1.96]
    """

    process: BufferedLinearToeplitz
    share: Fraction

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must lie between 0 and 1; got {self.share}")

    @property
    def steps(self) -> int:
        """T."""
        return self.process.steps

    @property
    def width(self) -> int:
        """Floats of state per key."""
        return self.process.width

    @property
    def decays(self) -> tuple[float, ...]:
        """Those of the process: with the share they fix the noise."""
        return self.process.decays

    @cached_property
    def gain(self) -> float:
        """g, the entries of the encoder's last row."""
        odds = self.share / (1 - self.share)
        return self.process.column_norm() * math.sqrt(odds)

    @cached_property
    def weights(self) -> tuple[float, float]:
        """(a, b): the last answer is a times the process, plus b times a normal."""
        first = 1 / (1 + (self.gain * self.process.row_norm(self.steps)) ** 2)
        return first, (1 - first) / self.gain

    @cached_property
    def _newest(self) -> float:
        """What the newest normal adds to a N_T, so that it stands for the other one too."""
        first, other = self.weights
        own = first * float(self.process.weights.sum())
        return math.hypot(own, other) - own

    def column_norm(self) -> float:
        """Norm of the process's first column and of the last row's entry."""
        return math.hypot(self.process.column_norm(), self.gain)

    def row_norm(self, step: int) -> float:
        """That of the process, but for the last step."""
        check_whole("step", step, 1, self.steps)
        known = self.process.row_norm(step)
        first, other = self.weights
        return known if step < self.steps else math.hypot(first * known, other)

    def error(self) -> Reals:
        """All row norms."""
        rows = self.process.error()
        rows[-1] = self.row_norm(self.steps)
        return rows

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """The process; at the last step, less of it, and more of the newest normals."""
        noise = self.process.advance(state, step, z)
        if step == self.steps:
            state *= self.weights[0]
            state += z[:, None] * self._other_row
            noise *= self.weights[0]
            noise += self._newest * z
        return noise

    def readout(self, step: int) -> Reals:
        """That of the process; the state at the last step is weighed already."""
        return self.process.readout(step)

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """To the last step: to the one before it, and one step on."""
        if stop < self.steps or start == stop:
            return self.process.jump(start, stop)
        kept, fresh = self.process.jump(start, stop - 1)
        step = self.weights[0] * np.diag(self.process.jump(stop - 1, stop)[0])
        newest = self.weights[0] + self._other_row
        return kept * step, np.vstack([fresh * step, newest])

    @cached_property
    def _other_row(self) -> Reals:
        """How the other measurement enters the state: in its first column."""
        row = np.zeros(self.width)
        row[0] = self._newest / self.process.weights[0]
        return row
