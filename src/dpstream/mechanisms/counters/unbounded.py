"""A counter for streams without a known end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dpstream.counting.buffered import MOST_STEPS, BufferedLinearToeplitz
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

# Steps, share of the total, decays: found one after the other, each for the least variance at its
# end while no step has more than 1.3 times the error of the best counter for exactly so many steps.
EPOCHS = (
    (2**8, 0.146, 0.00610723, 0.0201167, 0.0607358, 0.1089, 0.2524, 0.376557, 0.677466,
     0.770748),
    (2**16, 0.111, 2.84149e-05, 0.000112133, 0.000534705, 0.00124183, 0.00575587, 0.0196001,
     0.0521107, 0.144014, 0.368187, 0.755385),
    (2**26, 0.087, 3.63584e-08, 1.97052e-07, 1.35098e-06, 4.33368e-06, 2.78443e-05, 0.000134934,
     0.000567748, 0.0024841, 0.0108207, 0.0465318, 0.188453, 0.60541),
    (2**40, 0.01, 4.8229e-12, 5.34011e-11, 7.74831e-10, 4.47293e-09, 4.90922e-08, 5.00156e-07,
     4.8179e-06, 4.6723e-05, 0.000452826, 0.00438111, 0.0416724, 0.33906),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch: its steps are counted with part of rho, its total is measured with the rest."""

    steps: int
    inside: Fraction
    total: Fraction
    coder: BufferedCoder
    moved: Fraction
    change: Fraction

    def open_variance(self, offset: int) -> float:
        """Of the running sum at step `offset`, from what was counted."""
        noise = gaussian_stddev(self.moved, self.inside) / 2.0**self.coder.bits
        return float((self.coder.process.row_norm(offset) * noise) ** 2)

    @cached_property
    def closing(self) -> tuple[float, float]:
        """Weight of the counted sum in the average that the epoch leaves, and its variance."""
        counted = self.open_variance(self.steps)
        measured = gaussian_stddev(self.change, self.total) ** 2
        return measured / (counted + measured), counted * measured / (counted + measured)


@lru_cache(maxsize=256)
def _epoch(design: tuple[float, ...], change: Fraction, rho: Fraction) -> Epoch:
    """What the design (steps, share, decays) needs at this budget."""
    steps, share, decays = int(design[0]), Fraction(str(design[1])), design[2:]
    process = BufferedLinearToeplitz(steps=steps, buffers=len(decays) // 2, decays=decays)
    inside = rho * (1 - share)
    norm = BufferedCoder(process=process, bits=0).norm()
    coder = BufferedCoder(process=process, bits=grid_bits(norm, change, inside))
    moved = encoded_change(norm, change * 2**coder.bits, slack=coder.slack())
    return Epoch(
        steps=steps,
        inside=inside,
        total=rho * share,
        coder=coder,
        moved=moved,
        change=change,
    )


@storable("epoch code")
@dataclass(frozen=True, kw_only=True)
class EpochCode:
    """The open epoch's exact total and counter, and the noisy total of all closed epochs."""

    total: Integers
    code: Any
    closed: Reals


@dataclass(frozen=True, kw_only=True)
class UnboundedCounter(CountingParameters, identity="unbounded_counter", keys="epochs"):
    """Running sums of a stream without a known end.

    The stream is cut into epochs of 2^8, 2^16, 2^26 and 2^40 steps (the last repeats). An event
    lies in one of them, so every epoch spends the whole budget. Its steps are counted by a buffered
    linear Toeplitz counter whose decays keep the error small at every step, not at the last alone.
    The last step measures the epoch's total once more, for the part `share` of the budget: the
    average of both is what the epoch adds to later sums. The error at step t is at most 1.32 times
    that of the best counter for exactly t steps, with 7 to 9 numbers of state per bin
    (`blt`: 5).

    Guarantee: event-level rho-zCDP, for ever: an event lies in one epoch; what the epoch's counter
        measures costs the part 1 - share of rho, its total the part share.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Chan, Shi, Song, "Private and Continual Release of Statistics", 2011 (its hybrid
        mechanism, with Gaussian noise, longer epochs and counters tuned for all their steps).

    >>> from dpstream import release
    >>> series = release(UnboundedCounter(rho=1), [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape
    (3, 1)
    """

    epochs: tuple[tuple[float, ...], ...] = EPOCHS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epochs:
            raise InvalidParameter("epochs must name at least one: (steps, share, decays...)")
        for index, (steps, share, *_) in enumerate(self.epochs):
            check_whole("the steps of one of the epochs", steps, 2, MOST_STEPS)
            if not 0 < share < 1:
                raise InvalidParameter(f"epochs: a share must lie between 0 and 1; got {share}")
            self.design(index)  # which checks the decays

    def epoch(self, step: int) -> tuple[int, int]:
        """(number of closed epochs before, step within the epoch).

        >>> counter = UnboundedCounter(rho=1)
        >>> [counter.epoch(t) for t in (1, 256, 257, 65_793)]
        [(0, 1), (0, 256), (1, 1), (2, 1)]
        """
        check_whole("step", step, 1, MOST_STEPS)
        closed, offset = 0, int(step)
        while offset > self.design(closed).steps:
            closed, offset = closed + 1, offset - self.design(closed).steps
        return closed, offset

    def design(self, closed: int) -> Epoch:
        """The epoch behind `closed` others."""
        return _epoch(self.epochs[min(closed, len(self.epochs) - 1)], self.change, self.budget)

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), in units of the values."""
        closed, offset = self.epoch(step)
        epoch = self.design(closed)
        variance = sum(self.design(before).closing[1] for before in range(closed))
        variance += epoch.closing[1] if offset == epoch.steps else epoch.open_variance(offset)
        return math.sqrt(variance) * float(Fraction(self.quantum))

    def start(self) -> CounterState:
        """Nothing measured yet."""
        return CounterState()

    def step(
        self, state: CounterState, x: Integers, spend: Spender
    ) -> tuple[CounterState, list[Release]]:
        """Count with the open epoch's counter; its last step measures the total as well."""
        before, offset = self.epoch(spend.step + 1)
        epoch, cover, code = self.design(before), state.cover, state.code
        if offset == 1:
            closed = np.zeros(len(x)) if code is None else code.closed
            total, begun = np.zeros(len(x), np.int64), epoch.coder.begin(len(x))
            code = EpochCode(total=total, code=begun, closed=closed)
            cover = spend.cover(self.budget, last=spend.step + epoch.steps - 1)
        inner, values = epoch.coder.encode(code.code, offset, x)
        noisy = spend.gaussian(
            values, sensitivity=epoch.moved, rho=epoch.inside, purpose="count", cover=cover
        )
        inner, sums = epoch.coder.decode(inner, offset, noisy)
        code = replace(code, total=code.total + x, code=inner)
        if offset == epoch.steps:
            measured = spend.gaussian(
                code.total, sensitivity=self.change, rho=epoch.total, purpose="total", cover=cover
            )
            counted = epoch.closing[0]
            sums = counted * sums + (1 - counted) * measured
            code = replace(code, closed=code.closed + sums)
            sums = code.closed
        else:
            sums = code.closed + sums
        sums, stddev = sums * float(Fraction(self.quantum)), self.stddev(spend.step + 1)
        release = release_or_hold(spend.step, sums, paid=True, stddev=stddev)
        return CounterState(cover=cover, code=code), [release]
