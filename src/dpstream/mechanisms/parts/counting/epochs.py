"""A counter for streams without a known end: epochs that grow, each with the full budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.linalg import block_diag

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.counting import modes
from dpstream.mechanisms.parts.counting.blt_parameters import MOST_STEPS, parameters
from dpstream.mechanisms.parts.counting.buffered import BufferedLinearToeplitz
from dpstream.mechanisms.parts.counting.kernels import advance_modes
from dpstream.mechanisms.parts.counting.strategy import check_advance, check_whole
from dpstream.records import Reals


@lru_cache(maxsize=256)
def inside_counter(length: int, buffers: int) -> BufferedLinearToeplitz:
    """Counter of an epoch's steps but the last, tuned for the whole epoch."""
    tuned = parameters(length, buffers)
    return BufferedLinearToeplitz(steps=length - 1, buffers=buffers, decays=tuned)


@dataclass(frozen=True, kw_only=True)
class Unbounded:
    """Epochs of `first`, `first * growth`, ... steps; totals of closed epochs are added.

    An impulse lies in one epoch, so every epoch spends the whole budget. Within an epoch of n steps
    the steps before the last use a buffered linear Toeplitz counter and the last step publishes
    the epoch's total with noise of its own; the total takes the part `share` of the squared
    sensitivity. Without that measurement each closed epoch would leave noise of variance
    O(log^2 n), log^3 t in all (with doubling epochs 2.8 times the best fixed counter at 2^20);
    with it a closed epoch leaves a constant. C is scaled so that its column norm is 1.

    Guarantee: an impulse has L2 sensitivity at most 1, at every step, for ever; noise at step t is
    sigma * row_norm(t), within a factor 2 of the best counter for exactly t steps.
    Paper: Chan, Shi, Song, "Private and Continual Release of Statistics", 2011 (its hybrid
    mechanism, with Gaussian noise and Toeplitz epochs).

    >>> counter = Unbounded()
    >>> counter.width, [counter.epoch(t) for t in (1, 8, 9, 73)]
    (6, [(0, 1, 8), (0, 8, 8), (1, 1, 64), (2, 1, 512)])
    """

    buffers: int = 4
    first: int = 8
    growth: int = 8
    share: float = 0.3

    def __post_init__(self) -> None:
        check_whole("buffers", self.buffers, 1, 5)
        check_whole("first", self.first, 2, 2**20)
        check_whole("growth", self.growth, 2, 64)
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must lie between 0 and 1; got {self.share}")

    @property
    def width(self) -> int:
        """Buffers and plain sum of the open epoch, then the noise of all closed epochs."""
        return self.buffers + 2

    def epoch(self, step: int) -> tuple[int, int, int]:
        """(number of closed epochs before, step within the epoch, length of the epoch)."""
        check_whole("step", step, 1, MOST_STEPS)
        closed, offset, length = 0, int(step), self.first
        while offset > length:
            closed, offset, length = closed + 1, offset - length, length * self.growth
        return closed, offset, length

    def column_norm(self) -> float:
        """1, attained at the first step of every epoch."""
        return 1.0

    def _scale(self, length: int) -> float:
        return inside_counter(length, self.buffers).column_norm() / math.sqrt(1 - self.share)

    def row_norm(self, step: int) -> float:
        """Closed epochs leave 1 / share each; the open one has its own counter's error."""
        closed, offset, length = self.epoch(step)
        if offset == length:
            return math.sqrt((closed + 1) / self.share)
        inside = self._scale(length) * inside_counter(length, self.buffers).row_norm(offset)
        return math.hypot(math.sqrt(closed / self.share), inside)

    def error(self, steps: int) -> Reals:
        """Row norms of the first `steps` steps."""
        squares = np.empty(steps)
        start = 0
        while start < steps:
            closed, _, length = self.epoch(start + 1)
            inside = inside_counter(length, self.buffers)
            counts = np.arange(1, min(length, steps - start) + 1, dtype=np.float64)
            norms = modes.weighted_norms(inside.mode_decays, inside.weights, counts)
            block = squares[start : start + length]
            block[:] = closed / self.share + (self._scale(length) * norms) ** 2
            if len(block) == length:
                block[-1] = (closed + 1) / self.share
            start += length
        return np.sqrt(squares)

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Advance the open epoch, or close it with a total of its own."""
        check_advance(state, self.width, z)
        _, offset, length = self.epoch(step)
        if offset == length:
            state[:, :-1] = 0.0
            state[:, -1] += z / math.sqrt(self.share)
            return state[:, -1].copy()
        inside = inside_counter(length, self.buffers)
        noise = np.empty(len(z))
        weights = self._scale(length) * inside.weights
        advance_modes(state, 1 - inside.mode_decays, weights, z, state[:, -1].copy(), noise)
        return noise

    def readout(self, step: int) -> Reals:
        """Scaled weights of the open epoch, and 1 for the closed ones."""
        if step == 0:
            return np.append(np.zeros(self.width - 1), 1.0)
        length = self.epoch(step)[2]
        return np.append(self._scale(length) * inside_counter(length, self.buffers).weights, 1.0)

    def jump(self, start: int, stop: int) -> tuple[Reals, Reals]:
        """Within an epoch as its counter; across epochs the old buffers die, totals are drawn."""
        check_whole("start", start, 0, stop)
        before, after = self._position(start), self._position(stop)
        kept, fresh = np.zeros((self.width - 1,) * 2), np.zeros((0, self.width - 1))
        if after[1]:
            inside = inside_counter(after[2], self.buffers)
            if before[0] == after[0]:
                kept, fresh = inside.jump(before[1], after[1])
            else:
                _, fresh = inside.jump(0, after[1])
        closed = after[0] - before[0]
        totals = np.full((1 if closed else 0, 1), math.sqrt(closed / self.share))
        return block_diag(kept, np.ones((1, 1))), block_diag(fresh, totals)

    def covariance(self, step: int) -> Reals:
        """The open epoch's covariance, and 1 / share per closed epoch."""
        closed, offset, length = self._position(step)
        inside = modes.gram(inside_counter(length, self.buffers).mode_decays, offset)
        return np.asarray(block_diag(inside, [[closed / self.share]]))

    def _position(self, step: int) -> tuple[int, int, int]:
        """(closed epochs, steps taken in the open one, its length) once `step` is over."""
        if step == 0:
            return 0, 0, self.first
        closed, offset, length = self.epoch(step)
        if offset == length:
            return closed + 1, 0, length * self.growth
        return closed, offset, length

    def dense(self, steps: int) -> tuple[Reals, Reals]:
        """(B, C) of the first `steps` steps."""
        decoder, encoder = np.zeros((steps, steps)), np.zeros((steps, steps))
        start = 0
        while start < steps:
            length = self.epoch(start + 1)[2]
            decode, encode = inside_counter(length, self.buffers).dense()
            last = start + length - 1
            count = min(length - 1, steps - start)
            block = slice(start, start + count)
            decoder[block, block] = self._scale(length) * decode[:count, :count]
            encoder[block, block] = encode[:count, :count] / self._scale(length)
            if last < steps:
                encoder[last, start : last + 1] = math.sqrt(self.share)
                decoder[last:, last] = 1 / math.sqrt(self.share)
            start += length
        return decoder, encoder
