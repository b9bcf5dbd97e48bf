"""The square root of the prefix-sum matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.linalg import toeplitz as toeplitz_matrix

from dpstream.mechanisms.parts.counting.convolution import convolved
from dpstream.mechanisms.parts.counting.history_coder import HistoryCoder
from dpstream.mechanisms.parts.counting.kernels import weigh_history
from dpstream.mechanisms.parts.counting.mechanism import CounterMechanism
from dpstream.mechanisms.parts.counting.strategy import check_advance, check_whole
from dpstream.records import Reals

# Gamma(i + 1/2) / Gamma(i + 1) * sqrt(i) in powers of 1/i; below 1e-17 from i = 128 on
SERIES = (1, -1 / 8, 1 / 128, 5 / 1024, -21 / 32768, -399 / 262144, 869 / 4194304)
EXACT = 128


@lru_cache(maxsize=8)
def root_coefficients(steps: int) -> Reals:
    """binomial(2i, i) / 4^i for i < steps, each within a few units in the last place."""
    head = np.arange(1, min(steps, EXACT), dtype=np.float64)
    coefficients = np.concatenate([[1.0], np.cumprod((2 * head - 1) / (2 * head))])
    if steps > EXACT:
        tail = np.arange(EXACT, steps, dtype=np.float64)
        series = np.polynomial.polynomial.polyval(1 / tail, SERIES)
        coefficients = np.concatenate([coefficients, series / np.sqrt(math.pi * tail)])
    coefficients.flags.writeable = False
    return coefficients


@dataclass(frozen=True, kw_only=True)
class Toeplitz:
    """B = C = A^(1/2), the Toeplitz matrix of (1 - x)^(-1/2).

    The best known explicit factorisation, at the price of all past normals as state (`width` = T).

    Guarantee: an impulse has L2 sensitivity at most sqrt(sum of c_i^2, i < T), attained at step 1;
    noise at step t is sigma sqrt(sum of c_i^2, i < t), increasing in t.
    Paper: Henzinger, Upadhyay, Upadhyay, "Almost Tight Error Bounds on Differentially Private
    Continual Counting", 2023; Fichtenberger, Henzinger, Upadhyay, "Constant Matters: Fine-grained
    Complexity of Differentially Private Continual Observation", 2023.

    >>> root = Toeplitz(steps=3)
    >>> root.coefficients()
    array([1.   , 0.5  , 0.375])
    >>> round(Toeplitz(steps=1024).column_norm() ** 2 / 2**0.5, 3)
    2.314
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, 2**26)

    @property
    def width(self) -> int:
        """All normals so far."""
        return self.steps

    def coefficients(self) -> Reals:
        """First column of B and of C."""
        return root_coefficients(self.steps)

    def column_norm(self) -> float:
        """Norm of the first column; later ones are shorter."""
        return math.sqrt(math.fsum(self.coefficients() ** 2))

    def row_norm(self, step: int) -> float:
        """Norm of the first `step` coefficients."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(math.fsum(self.coefficients()[:step] ** 2))

    def error(self) -> Reals:
        """Running norms of the coefficients."""
        return np.sqrt(np.cumsum(self.coefficients() ** 2))

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Remember the new normals and weigh all of them."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, self.steps, z)
        state[:, step - 1] = z
        noise = np.empty(len(z))
        weigh_history(state, self.coefficients()[step - 1 :: -1].copy(), noise)
        return noise

    def readout(self, step: int) -> Reals:
        """The coefficients, latest normal first."""
        check_whole("step", step, 0, self.steps)
        weights = np.zeros(self.steps)
        weights[:step] = self.coefficients()[:step][::-1]
        return weights

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """Past normals stay; the steps between draw theirs."""
        check_whole("stop", stop, 0, self.steps)
        check_whole("start", start, 0, stop)
        identity = np.eye(self.steps)
        return identity, identity[start:stop]

    def covariance(self, step: int) -> Reals:
        """Independent normals up to `step`, zeros after."""
        check_whole("step", step, 0, self.steps)
        return np.diag((np.arange(self.steps) < step).astype(np.float64))

    def encode(self, changes: Reals) -> Reals:
        """Convolution with the coefficients."""
        changes = np.asarray(changes, dtype=np.float64)
        return convolved(changes, self.coefficients(), self.steps)

    def dense(self) -> tuple[Reals, Reals]:
        """The same lower-triangular Toeplitz matrix twice."""
        root = np.tril(toeplitz_matrix(self.coefficients()))
        return root, root.copy()


@dataclass(frozen=True, kw_only=True)
class ToeplitzCounter(CounterMechanism, identity="toeplitz"):
    """Running sums through the square root of the prefix-sum matrix: the least error known.

    Every past value stays in the state: for `steps` up to some thousands. `blt` is as good and
    small.

    Guarantee: event-level rho-zCDP: one event moves what is measured by `sensitivity` times the
        norm of the coefficients, rounded down to a dyadic grid.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Henzinger, Upadhyay, Upadhyay, "Almost Tight Error Bounds on Differentially Private
        Continual Counting", 2023.

    >>> from dpstream import release
    >>> counter = ToeplitzCounter(rho=1, steps=128)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(128), 3)
    ((3, 1), 1.846)
    """

    @cached_property
    def process(self) -> Toeplitz:
        """The scheme's matrices."""
        return Toeplitz(steps=self.steps)

    def coder(self, bits: int) -> HistoryCoder:
        """All coefficients at once."""
        return HistoryCoder(coefficients=self.process.coefficients(), bits=bits)
