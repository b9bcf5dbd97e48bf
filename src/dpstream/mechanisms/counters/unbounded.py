"""A counter for streams without a known end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dpstream.counting.buffered import MOST_STEPS, BufferedLinearToeplitz, decays_for
from dpstream.counting.noise_process import check_whole
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import Spender, release_or_hold
from dpstream.mechanisms.counters.factorised_counter import (
    BufferedCoder,
    CounterState,
    CountingParameters,
    grid_bits,
)
from dpstream.privacy.amounts import gaussian_stddev
from dpstream.privacy.sensitivity import encoded_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


@lru_cache(maxsize=256)
def _epoch_coder(
    length: int, buffers: int, change: Fraction, rho: Fraction
) -> tuple[BufferedCoder, Fraction]:
    """The coder of an epoch's steps but the last, and how far one event moves what it measures."""
    decays = decays_for(length, buffers)  # tuned for the whole epoch
    process = BufferedLinearToeplitz(steps=length - 1, buffers=buffers, decays=decays)
    norm = BufferedCoder(process=process, bits=0).norm()
    bits = grid_bits(norm, change, rho)
    coder = BufferedCoder(process=process, bits=bits)
    return coder, encoded_change(norm, change * 2**bits, slack=coder.slack())


@storable("epoch code")
@dataclass(frozen=True, kw_only=True)
class EpochCode:
    """The open epoch's exact total and counter, and the noisy total of all closed epochs."""

    total: Integers
    code: Any
    closed: Integers


@dataclass(frozen=True, kw_only=True)
class UnboundedCounter(
    CountingParameters, identity="unbounded_counter", keys="buffers first growth share"
):
    """Running sums of a stream without a known end.

    Epochs of `first`, `first * growth`, ... steps; totals of closed epochs are added. An event lies
    in one epoch, so every epoch spends the whole budget. Within an epoch the steps before the last
    use a buffered linear Toeplitz counter, and the last step publishes the epoch's total with noise
    of its own, for the part `share` of the budget. Without that measurement each closed epoch would
    leave noise of variance O(log^2 n), log^3 t in all (with doubling epochs 2.8 times the best
    fixed counter at 2^20); with it a closed epoch leaves a constant. The error at step t is within
    a factor 2 of the best counter for exactly t steps.

    Guarantee: event-level rho-zCDP, for ever: an event lies in one epoch; what the epoch's counter
        measures costs the part 1 - share of rho, its total the part share.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Chan, Shi, Song, "Private and Continual Release of Statistics", 2011 (its hybrid
        mechanism, with Gaussian noise and Toeplitz epochs).

    >>> from dpstream import release
    >>> series = release(UnboundedCounter(rho=1), [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape
    (3, 1)
    """

    buffers: int = 4
    first: int = 8
    growth: int = 8
    share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("buffers", self.buffers, 1, 5)
        check_whole("first", self.first, 2, 2**20)
        check_whole("growth", self.growth, 2, 64)
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must lie between 0 and 1; got {self.share}")

    def epoch(self, step: int) -> tuple[int, int, int]:
        """(number of closed epochs before, step within the epoch, length of the epoch).

        >>> counter = UnboundedCounter(rho=1)
        >>> [counter.epoch(t) for t in (1, 8, 9, 73)]
        [(0, 1, 8), (0, 8, 8), (1, 1, 64), (2, 1, 512)]
        """
        check_whole("step", step, 1, MOST_STEPS)
        closed, offset, length = 0, int(step), self.first
        while offset > length:
            closed, offset, length = closed + 1, offset - length, length * self.growth
        return closed, offset, length

    @cached_property
    def shares(self) -> tuple[Fraction, Fraction]:
        """Rho of an epoch's steps, and of its total."""
        share = Fraction(self.share)
        return self.budget * (1 - share), self.budget * share

    def inner(self, length: int) -> tuple[BufferedCoder, Fraction]:
        """The coder of the steps of an epoch of `length`, and how far one event moves them."""
        return _epoch_coder(length, self.buffers, self.change, self.shares[0])

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), in units of the values."""
        closed, offset, length = self.epoch(step)
        inside, total = self.shares
        square = (closed + (offset == length)) * gaussian_stddev(self.change, total) ** 2
        if offset < length:
            coder, moved = self.inner(length)
            noise = gaussian_stddev(moved, inside) / 2**coder.bits
            square += (coder.process.row_norm(offset) * noise) ** 2
        return math.sqrt(square) * float(Fraction(self.quantum))

    def start(self) -> CounterState:
        """Nothing measured yet."""
        return CounterState()

    def step(
        self, state: CounterState, x: Integers, spend: Spender
    ) -> tuple[CounterState, list[Release]]:
        """Measure with the open epoch's counter, or close the epoch with its total."""
        _, offset, length = self.epoch(spend.step + 1)
        cover, code = state.cover, state.code
        coder, moved = self.inner(length)
        if code is None or offset == 1:
            closed = np.zeros(len(x), np.int64) if code is None else code.closed
            code = EpochCode(
                total=np.zeros(len(x), np.int64), code=coder.begin(len(x)), closed=closed
            )
            cover = spend.cover(self.budget, last=spend.step + length - 1)
        inside, for_total = self.shares
        code = replace(code, total=code.total + x)
        if offset == length:
            total = spend.gaussian(
                code.total, sensitivity=self.change, rho=for_total, purpose="total", cover=cover
            )
            code = replace(code, closed=code.closed + total)
            sums: Reals = code.closed.astype(np.float64)
        else:
            inner, values = coder.encode(code.code, offset, x)
            noisy = spend.gaussian(
                values, sensitivity=moved, rho=inside, purpose="count", cover=cover
            )
            inner, open_sums = coder.decode(inner, offset, noisy)
            code, sums = replace(code, code=inner), code.closed + open_sums
        sums, stddev = sums * float(Fraction(self.quantum)), self.stddev(spend.step + 1)
        release = release_or_hold(spend.step, sums, paid=True, stddev=stddev)
        return CounterState(cover=cover, code=code), [release]
