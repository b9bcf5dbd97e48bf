"""Buffered linear Toeplitz counters: near-optimal error with a handful of floats per key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import toeplitz as toeplitz_matrix

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.counting import blt_parameters, modes
from dpstream.mechanisms.parts.counting.convolution import convolved
from dpstream.mechanisms.parts.counting.kernels import advance_modes
from dpstream.mechanisms.parts.counting.strategy import check_advance, check_whole
from dpstream.records import Reals

UNIT = 2.0**-53  # largest relative error of one rounded operation


@dataclass(frozen=True, kw_only=True)
class BufferedLinearToeplitz:
    """Toeplitz B and C whose coefficients are sums of few geometric sequences.

    C has the generating function prod (1 - f_j x) / (1 - g_j x) and B, its quotient from 1/(1 - x),
    prod (1 - g_j x) / (1 - f_j x) / (1 - x), with 1 > g_1 > f_1 > g_2 > ... > f_d >= 0. In partial
    fractions b_i = w_0 + sum_j w_j f_j^i with positive weights: the noise is a weighted sum of d
    decaying buffers x_j <- f_j x_j + z and of the plain sum of z, d + 1 floats per key. (The
    paper's form keeps d buffers and the running noise sum: the same space, another basis.)

    `decays` are 1 - g_1, 1 - f_1, 1 - g_2, ...; left out, they are those that minimise the largest
    standard deviation over `steps`. Store them with a run: they fix the strategy.

    Guarantee: an impulse has L2 sensitivity at most `column_norm()`, attained at step 1, with
    relative float error below 2e-14; noise at step t is sigma * row_norm(t), increasing in t.
    Paper: Dvijotham, McMahan, Pillutla, Steinke, Thakurta, "Efficient and Near-Optimal Noise
    Generation for Streaming Differential Privacy", 2024.

    >>> blt = BufferedLinearToeplitz(steps=1024, buffers=4)
    >>> blt.width, round(blt.column_norm() * blt.row_norm(1024) / 2**0.5, 3)
    (5, 2.314)
    """

    steps: int
    buffers: int = 4
    decays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1, blt_parameters.MOST_STEPS)
        check_whole("buffers", self.buffers, 1, blt_parameters.MOST_BUFFERS)
        given = self.decays or blt_parameters.parameters(int(self.steps), int(self.buffers))
        decays = tuple(float(decay) for decay in blt_parameters.exact(np.array(given)))
        object.__setattr__(self, "decays", decays)
        rising = all(low < high for low, high in zip((0.0, *decays), decays, strict=False))
        if len(decays) != 2 * self.buffers or not rising or decays[-1] > 1:
            raise InvalidParameter(
                f"decays must be {2 * self.buffers} increasing numbers in (0, 1]; got {given}"
            )

    @property
    def width(self) -> int:
        """The buffers, then the plain sum."""
        return self.buffers + 1

    @cached_property
    def mode_decays(self) -> Reals:
        """Decays of the state's columns; the last is 0."""
        return np.append(np.array(self.decays[1::2]), 0.0)

    @cached_property
    def weights(self) -> Reals:
        """Weights of the state's columns in the noise."""
        return blt_parameters.decoder_weights(np.array(self.decays))

    def encoder_coefficients(self, count: int) -> Reals:
        """First `count` entries of C's first column."""
        decays = np.array(self.decays)
        weights = blt_parameters.encoder_weights(decays)
        rest = np.log1p(-decays[0::2])[None, :] * np.arange(count - 1)[:, None]
        return np.append(1.0, np.exp(rest) @ weights)

    def decoder_coefficients(self, count: int) -> Reals:
        """First `count` entries of B's first column."""
        with np.errstate(invalid="ignore", divide="ignore"):
            rest = np.log1p(-self.mode_decays)[None, :] * np.arange(count)[:, None]
        return np.exp(np.where(np.isnan(rest), 0.0, rest)) @ self.weights

    def column_norm(self) -> float:
        """Norm of C's first column over all steps, in closed form."""
        return math.sqrt(blt_parameters.squared_norms(np.array(self.decays), self.steps)[0])

    def row_norm(self, step: int) -> float:
        """Norm of the first `step` coefficients of B, in closed form."""
        check_whole("step", step, 1, self.steps)
        return math.sqrt(self.weights @ modes.gram(self.mode_decays, step) @ self.weights)

    def error(self) -> Reals:
        """All row norms."""
        counts = np.arange(1, self.steps + 1, dtype=np.float64)
        return modes.weighted_norms(self.mode_decays, self.weights, counts)

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Decay the buffers, add the new normals, weigh."""
        check_whole("step", step, 1, self.steps)
        check_advance(state, self.width, z)
        noise = np.empty(len(z))
        advance_modes(state, 1 - self.mode_decays, self.weights, z, np.zeros(len(z)), noise)
        return noise

    def readout(self, step: int) -> Reals:
        """The same weights at every step."""
        check_whole("step", step, 0, self.steps)
        return self.weights

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """Powers of the factors, and a square root of the modes' covariance."""
        check_whole("stop", stop, 0, self.steps)
        check_whole("start", start, 0, stop)
        count = int(stop - start)
        kept = np.diag(modes.powers(self.mode_decays, count))
        return kept, modes.root(self.mode_decays, count)

    def covariance(self, step: int) -> Reals:
        """Joint covariance of buffers and plain sum: (1 - (f_j f_k)^t) / (1 - f_j f_k)."""
        check_whole("step", step, 0, self.steps)
        return modes.gram(self.mode_decays, int(step))

    def rounding(self, largest: float) -> float:
        """Bound on |streamed noise - exact noise| at any step while every |z| <= `largest`.

        A mode is at most S = sum of its powers times `largest`; each step rounds a product and a
        sum, and earlier errors decay with the mode, so the error is at most 2 u S^2 `largest`.
        Weights and their sum add (8 d + 8) u S `largest`.
        """
        spans = modes.spans(self.mode_decays, self.steps)
        each = 2 * spans**2 + (8 * self.buffers + 8) * spans
        return float(1.01 * UNIT * largest * (self.weights @ each))

    def encode(self, changes: Reals) -> Reals:
        """Convolution with C's coefficients."""
        changes = np.asarray(changes, dtype=np.float64)
        return convolved(changes, self.encoder_coefficients(self.steps), self.steps)

    def dense(self) -> tuple[Reals, Reals]:
        """Both Toeplitz matrices."""
        decoder = np.tril(toeplitz_matrix(self.decoder_coefficients(self.steps)))
        return decoder, np.tril(toeplitz_matrix(self.encoder_coefficients(self.steps)))
