"""The square root of the prefix-sum matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from dpstream.counting.noise_process import check_whole
from dpstream.mechanisms.counters.factorised_counter import Coder, CounterMechanism, refuse_overflow
from dpstream.privacy.sensitivity import root_above
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

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


@storable("history code")
@dataclass(frozen=True, kw_only=True)
class HistoryCode:
    """Inputs and decoded increments, both steps x bins, and the decoded running sums."""

    inputs: Integers
    increments: Reals
    sums: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryCoder(Coder):
    """Toeplitz C with coefficients rounded down to multiples of 2^-`bits`, the first of them 1.

    All past values are kept.
    """

    coefficients: Reals
    bits: int

    @cached_property
    def _rounded(self) -> Integers:
        return np.floor(self.coefficients * 2.0**self.bits).astype(np.int64)

    def begin(self, bins: int) -> HistoryCode:
        """Room for every step, so that the state does not grow."""
        shape = (len(self.coefficients), bins)
        return HistoryCode(
            inputs=np.zeros(shape, np.int64), increments=np.zeros(shape), sums=np.zeros(bins)
        )

    def encode(self, state: HistoryCode, step: int, x: Integers) -> tuple[HistoryCode, Integers]:
        """The newest input has coefficient 1."""
        inputs = state.inputs.copy()
        inputs[step - 1] = x
        limit = 1 << (61 - self.bits)  # no coefficient is above 2^bits, so nothing can overflow
        refuse_overflow(np.minimum(np.abs(inputs[:step]).astype(float).sum(axis=0), 2.0**62), limit)
        values = self._rounded[:step][::-1] @ inputs[:step]
        return replace(state, inputs=inputs), values

    def decode(self, state: HistoryCode, step: int, noisy: Integers) -> tuple[HistoryCode, Reals]:
        """Solve for the newest increment, by the very coefficients that encoded; add it up."""
        increments = state.increments.copy()
        known = self._rounded[1:step][::-1].astype(np.float64) @ increments[: step - 1]
        increments[step - 1] = (noisy - known) / float(self._rounded[0])
        sums = state.sums + increments[step - 1]
        return replace(state, increments=increments, sums=sums), sums

    def norm(self) -> Fraction:
        """Of the rounded coefficients, exactly."""
        square = sum(int(c) ** 2 for c in self._rounded)
        return root_above(Fraction(square, 4**self.bits))


@dataclass(frozen=True, kw_only=True)
class ToeplitzCounter(CounterMechanism, identity="toeplitz"):
    """Running sums through the square root of the prefix-sum matrix: the least error known.

    B = C = A^(1/2), the Toeplitz matrix of (1 - x)^(-1/2). Every past value stays in the state: for
    `steps` up to some thousands. `blt` is as good and small.

    Guarantee: event-level rho-zCDP: one event moves what is measured by `sensitivity` times the
        norm of the coefficients, rounded down to a dyadic grid.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Henzinger, Upadhyay, Upadhyay, "Almost Tight Error Bounds on Differentially Private
        Continual Counting", 2023; Fichtenberger, Henzinger, Upadhyay, "Constant Matters:
        Fine-grained Complexity of Differentially Private Continual Observation", 2023.

    >>> from dpstream import release
    >>> counter = ToeplitzCounter(rho=1, steps=128)
    >>> series = release(counter, [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, round(counter.stddev(128), 3)
    ((3, 1), 1.846)
    """

    most_steps: ClassVar[int] = 2**26

    def row_norm(self, step: int) -> float:
        """Norm of the first `step` coefficients."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(math.fsum(root_coefficients(self.steps)[:step] ** 2))

    def coder(self, bits: int) -> HistoryCoder:
        """All coefficients at once."""
        return HistoryCoder(coefficients=root_coefficients(self.steps), bits=bits)
