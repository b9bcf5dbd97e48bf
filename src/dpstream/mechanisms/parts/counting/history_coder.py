"""Toeplitz encoders with coefficients of their own, in integers; all past values are kept."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.mechanisms.parts.counting.coders import refuse_overflow
from dpstream.privacy.sensitivity import root_above
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals


@storable("history code")
@dataclass(frozen=True, kw_only=True)
class HistoryCode:
    """Inputs and decoded increments, both steps x bins, and the decoded running sums."""

    inputs: Integers
    increments: Reals
    sums: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryCoder:
    """C with the coefficients rounded down to multiples of 2^-`bits`, the first of them 1."""

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
        return HistoryCode(inputs=inputs, increments=state.increments, sums=state.sums), values

    def decode(self, state: HistoryCode, step: int, noisy: Integers) -> tuple[HistoryCode, Reals]:
        """Solve for the newest increment, by the very coefficients that encoded; add it up."""
        increments = state.increments.copy()
        known = self._rounded[1:step][::-1].astype(np.float64) @ increments[: step - 1]
        increments[step - 1] = (noisy - known) / float(self._rounded[0])
        sums = state.sums + increments[step - 1]
        return HistoryCode(inputs=state.inputs, increments=increments, sums=sums), sums

    def norm(self) -> Fraction:
        """Of the rounded coefficients, exactly."""
        square = sum(int(c) ** 2 for c in self._rounded)
        return root_above(Fraction(square, 4**self.bits))

    def slack(self) -> Fraction:
        """C x is an integer combination of integers."""
        return Fraction(0)
