"""A counter for streams without a known end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dpstream.counting.coders import BufferedCoder
from dpstream.counting.growing_epochs import Unbounded, inside_counter
from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.factorised_counter import CounterState, CountingParameters, grid_bits
from dpstream.privacy.amounts import gaussian_stddev
from dpstream.privacy.sensitivity import encoded_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


@lru_cache(maxsize=256)
def _epoch_coder(
    length: int, buffers: int, change: Fraction, rho: Fraction
) -> tuple[BufferedCoder, Fraction]:
    """The coder of an epoch's steps, and how far one event moves what it measures."""
    process = inside_counter(length, buffers)
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
        _ = self.process  # refuses what the scheme cannot do

    @cached_property
    def process(self) -> Unbounded:
        """The scheme's matrices."""
        return Unbounded(
            buffers=self.buffers, first=self.first, growth=self.growth, share=self.share
        )

    @cached_property
    def _shares(self) -> tuple[Fraction, Fraction]:
        """Rho of an epoch's steps, and of its total."""
        share = Fraction(self.share)
        return self.budget * (1 - share), self.budget * share

    def _inner(self, length: int) -> tuple[BufferedCoder, Fraction]:
        return _epoch_coder(length, self.buffers, self.change, self._shares[0])

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), in units of the values."""
        closed, offset, length = self.process.epoch(step)
        inside, total = self._shares
        square = (closed + (offset == length)) * gaussian_stddev(self.change, total) ** 2
        if offset < length:
            coder, moved = self._inner(length)
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
        _, offset, length = self.process.epoch(spend.step + 1)
        cover, code = state.cover, state.code
        coder, moved = self._inner(length)
        if code is None or offset == 1:
            closed = np.zeros(len(x), np.int64) if code is None else code.closed
            code = EpochCode(
                total=np.zeros(len(x), np.int64), code=coder.begin(len(x)), closed=closed
            )
            cover = spend.cover(self.budget, last=spend.step + length - 1)
        inside, whole = self._shares
        code = replace(code, total=code.total + x)
        if offset == length:
            total = spend.gaussian(
                code.total, sensitivity=self.change, rho=whole, purpose="total", cover=cover
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
        release = Release(
            step=spend.step,
            values=sums * float(Fraction(self.quantum)),
            paid=True,
            stddev=np.full(len(x), self.stddev(spend.step + 1)),
        )
        return CounterState(cover=cover, code=code), [release]
