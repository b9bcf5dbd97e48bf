"""The buffered linear Toeplitz encoder in integers, with a few numbers of state per bin.

C x = x_t + sum_j v_j u_j(t - 1), u_j(t) = g_j u_j(t - 1) + x_t. The u_j are kept as integers, in
units of 2^-64, and rounded down once a step. Two streams that differ by one event see roundings
that differ by less than one unit each, so their u_j differ from the linear answer by less than
2^-64 / (1 - g_j), and what is measured, rounded down once more, by less than one grid step and a
bit: `slack` adds that up over all steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.mechanisms.parts.counting import blt_parameters
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.coders import refuse_overflow
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

_FINE = 64
_FACTOR = 53  # factors and weights are multiples of 2^-53
_LIMIT = 1 << 61


@storable("buffer code")
@dataclass(frozen=True, kw_only=True)
class BufferCode:
    """`encoder[j][bin]` in units of 2^-64; `decoder` as the noise process keeps it."""

    encoder: list[list[int]]
    decoder: Reals


@dataclass(frozen=True, kw_only=True)
class BufferedCoder:
    """C x on a grid of 2^-`bits`, for `process.steps` steps."""

    process: BufferedLinearToeplitz
    bits: int

    @cached_property
    def _factors(self) -> list[tuple[int, int]]:
        """Decay and weight of each buffer, in units of 2^-53."""
        decays = np.array(self.process.decays)
        pairs = zip(decays[0::2], blt_parameters.encoder_weights(decays), strict=True)
        return [(int(decay * 2**_FACTOR), int(weight * 2**_FACTOR)) for decay, weight in pairs]

    def begin(self, bins: int) -> BufferCode:
        """Empty buffers."""
        return BufferCode(
            encoder=[[0] * bins for _ in self._factors],
            decoder=np.zeros((bins, self.process.width)),
        )

    def encode(self, state: BufferCode, step: int, x: Integers) -> tuple[BufferCode, Integers]:
        """X and the weighted buffers; then the buffers decay and take x in."""
        new = [int(value) for value in x]
        total = [value << (_FINE + _FACTOR) for value in new]
        buffers = []
        for (decay, weight), buffer in zip(self._factors, state.encoder, strict=True):
            total = [sum_ + weight * u for sum_, u in zip(total, buffer, strict=True)]
            buffers.append(
                [
                    (value << _FINE) + u + (-decay * u >> _FACTOR)
                    for value, u in zip(new, buffer, strict=True)
                ]
            )
        drop = _FINE + _FACTOR - self.bits
        values = np.array([min(max(sum_ >> drop, -_LIMIT), _LIMIT) for sum_ in total], np.int64)
        return BufferCode(encoder=buffers, decoder=state.decoder), refuse_overflow(values, _LIMIT)

    def decode(self, state: BufferCode, step: int, noisy: Integers) -> tuple[BufferCode, Reals]:
        """B is linear: what makes noise of normals makes running sums of measurements."""
        decoder = state.decoder.copy()
        sums = self.process.advance(decoder, step, noisy.astype(np.float64))
        return BufferCode(encoder=state.encoder, decoder=decoder), sums / 2**self.bits

    def norm(self) -> Fraction:
        """The closed form, with fifty times its float error added."""
        return Fraction(self.process.column_norm()) * (1 + Fraction(1, 10**12))

    def slack(self) -> Fraction:
        """Per step less than 1 and what the buffers' roundings add; over all steps its norm."""
        lost = sum(Fraction(weight, decay) for decay, weight in self._factors)
        each = 1 + lost * Fraction(2) ** (self.bits - _FINE)
        return (math.isqrt(self.process.steps) + 1) * each
