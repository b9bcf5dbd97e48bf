"""What all counters share: y = C x + z in integers, then B y, A = B C a factorisation.

What is measured, C x, is an integer vector on a public grid of 2^-bits and gets discrete Gaussian
noise; what is published is computed from the noisy vector alone. A `Coder` is the encoder C and the
decoder B of one family of schemes. One cover pays for all steps of the stream.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpstream.counting.buffered import BufferedLinearToeplitz, encoder_weights
from dpstream.counting.noise_process import check_whole
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms.base import (
    MechanismBase,
    Spender,
    check_counts,
    clamp_to_grid,
    refuse_nan,
    release_or_hold,
    whole,
)
from dpstream.privacy.accounting.calibration import rho_for
from dpstream.privacy.amounts import Amount, exact, gaussian_stddev, on_grid, positive
from dpstream.privacy.ledger.charges import Cover, Terms
from dpstream.privacy.sensitivity import encoded_change, range_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Release


def refuse_overflow(values: Integers, limit: int) -> Integers:
    """Running sums must stay within the integers that noise can be added to."""
    if values.size and int(np.abs(values).max()) >= limit:
        raise InvalidInput(
            "the running sum left the integers that this counter can hold; use a coarser quantum"
        )
    return values


class Coder(ABC):
    """Encoder and decoder of one scheme. Steps count from 1; states are values."""

    bits: int = 0
    """C x is measured in units of 2^-bits; 0 where it consists of integers already."""

    @abstractmethod
    def begin(self, bins: int) -> Any:
        """The state before step 1."""

    @abstractmethod
    def encode(self, state: Any, step: int, x: Integers) -> tuple[Any, Integers]:
        """The values measured at `step`: rows of C x, times 2^bits."""

    @abstractmethod
    def decode(self, state: Any, step: int, noisy: Integers) -> tuple[Any, Reals]:
        """The running sums in grid steps of the input, from noisy values alone."""

    @abstractmethod
    def norm(self) -> Fraction:
        """Not below the norm of any column of C."""

    def slack(self) -> Fraction:
        """What rounding C x to integers can add to the norm of its change, in grid steps."""
        return Fraction(0)


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
class BufferedCoder(Coder):
    """The buffered linear Toeplitz encoder, with a few integers of state per bin.

    C x = x_t + sum_j v_j u_j(t - 1), u_j(t) = g_j u_j(t - 1) + x_t. The u_j are kept in units of
    2^-64, and rounded down once a step. Two streams that differ by one event see roundings that
    differ by less than one unit each, so their u_j differ from the linear answer by less than
    2^-64 / (1 - g_j), and what is measured, rounded down once more, by less than one grid step and
    a bit: `slack` adds that up over all steps.
    """

    process: BufferedLinearToeplitz
    bits: int

    @cached_property
    def _factors(self) -> list[tuple[int, int]]:
        """Decay and weight of each buffer, in units of 2^-53."""
        decays = np.array(self.process.decays)
        pairs = zip(decays[0::2], encoder_weights(decays), strict=True)
        return [(int(decay * 2**_FACTOR), int(weight * 2**_FACTOR)) for decay, weight in pairs]

    def begin(self, bins: int) -> BufferCode:
        """Empty buffers."""
        return BufferCode(
            encoder=[[0] * bins for _ in self._factors],
            decoder=np.zeros((bins, self.process.width)),
        )

    def encode(self, state: BufferCode, step: int, x: Integers) -> tuple[BufferCode, Integers]:
        """X and the weighted buffers; then the buffers decay and take x in."""
        new = x.tolist()  # Python's integers have any number of bits; bins are few
        total, buffers = [value << (_FINE + _FACTOR) for value in new], []
        for (decay, weight), buffer in zip(self._factors, state.encoder, strict=True):
            total = [before + weight * u for before, u in zip(total, buffer, strict=True)]
            taken = zip(new, buffer, strict=True)
            buffers.append([(value << _FINE) + u + (-decay * u >> _FACTOR) for value, u in taken])
        drop = _FINE + _FACTOR - self.bits
        values = np.array([min(max(sum_ >> drop, -_LIMIT), _LIMIT) for sum_ in total], np.int64)
        return replace(state, encoder=buffers), refuse_overflow(values, _LIMIT)

    def decode(self, state: BufferCode, step: int, noisy: Integers) -> tuple[BufferCode, Reals]:
        """B is linear: what makes noise of normals makes running sums of measurements."""
        decoder = state.decoder.copy()
        sums = self.process.advance(decoder, step, noisy.astype(np.float64))
        return replace(state, decoder=decoder), sums / 2**self.bits

    def norm(self) -> Fraction:
        """The closed form, with fifty times its float error added."""
        return Fraction(self.process.column_norm()) * (1 + Fraction(1, 10**12))

    def slack(self) -> Fraction:
        """Per step less than 1 and what the buffers' roundings add; over all steps its norm."""
        lost = sum(Fraction(weight, decay) for decay, weight in self._factors)
        each = 1 + lost * Fraction(2) ** (self.bits - _FINE)
        return (math.isqrt(self.process.steps) + 1) * each


_LARGEST = 1 << 53
_OFF_GRID = 1e-6


@dataclass(frozen=True, kw_only=True)
class CountingParameters(
    MechanismBase, identity=None, keys="rho epsilon delta sensitivity lo hi quantum"
):
    """Budget and bounds of a running count or sum, at event level.

    Budget: `rho` (zCDP), or `epsilon` and `delta`, from which rho follows. What one event changes:
    one bin of one step, by at most `sensitivity` (1: a count); with `lo` and `hi` each step's value
    is clamped to that public range and any one of them may be replaced by any other in it. Values
    are multiples of `quantum`.
    """

    rho: Amount | None = None
    epsilon: Amount | None = None
    delta: Amount | None = None
    sensitivity: Amount = 1
    lo: Amount | None = None
    hi: Amount | None = None
    quantum: Amount = 1
    constant_charges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("rho", "epsilon", "delta", "sensitivity", "quantum"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive(getattr(self, name), name))
        for name in ("lo", "hi"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, exact(getattr(self, name), name))
        given = tuple(getattr(self, name) is not None for name in ("rho", "epsilon", "delta"))
        if given not in ((True, False, False), (False, True, True)):
            raise InvalidParameter(
                "a counter needs rho, or epsilon and delta (not both ways); "
                f"got rho={self.rho}, epsilon={self.epsilon}, delta={self.delta}"
            )
        if (self.lo is None) != (self.hi is None):
            raise InvalidParameter(
                f"a public range needs both lo and hi; got lo={self.lo}, hi={self.hi}"
            )
        if self.lo is not None and self.sensitivity != 1:
            raise InvalidParameter(
                "the range lo to hi fixes the sensitivity; leave one of them out"
            )
        if self.change.denominator != 1:
            raise InvalidParameter(
                f"sensitivity={self.sensitivity} must be a multiple of quantum={self.quantum}"
            )
        if self.budget <= 0:
            raise InvalidParameter(
                f"epsilon={self.epsilon} and delta={self.delta} leave no budget; raise one of them"
            )

    @cached_property
    def budget(self) -> Fraction:
        """rho, exactly."""
        if self.rho is not None:
            return on_grid(Fraction(self.rho))
        assert self.epsilon is not None
        assert self.delta is not None
        return on_grid(rho_for(epsilon=Fraction(self.epsilon), delta=Fraction(self.delta)))

    @cached_property
    def change(self) -> Fraction:
        """Grid steps by which one event moves one step's value."""
        if self.lo is not None and self.hi is not None:
            return range_change(Fraction(self.lo), Fraction(self.hi), Fraction(self.quantum))
        return Fraction(self.sensitivity) / Fraction(self.quantum)

    def terms(self) -> Terms:
        """Event-level zCDP."""
        return Terms(unit="event", total=self.budget, measure="rho", change=self.change_in_words())

    def change_in_words(self) -> str:
        """What one event changes, as a book states it."""
        if self.lo is not None:
            return f"one value within [{self.lo}, {self.hi}]"
        return f"a {'count' if self.sensitivity == 1 else 'sum'} by {self.sensitivity}"

    def check(self, block: Reals) -> Integers:
        """Counts, sums on the grid, or numbers clamped to the public range."""
        quantum = float(Fraction(self.quantum))
        if self.lo is not None and self.hi is not None:
            ends = Fraction(self.lo), Fraction(self.hi)
            return clamp_to_grid(block, *ends, Fraction(self.quantum))
        if self.sensitivity == 1 and self.quantum == 1:
            return check_counts(block)
        refuse_nan(block)
        scaled = block / quantum
        bad = (np.abs(scaled - np.rint(scaled)) > _OFF_GRID) | (np.abs(scaled) >= _LARGEST)
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise InvalidInput(
                f"a sum must be a multiple of quantum={quantum:g} below 2^53 of them; row {row}, "
                f"bin {column} is {block[row, column]:g}; round it, or use a finer quantum"
            )
        return np.rint(scaled).astype(np.int64)


_FINEST = 24  # bits after the point of what is measured
_WIDEST = 40  # the noise scale stays below 2^40 grid steps


@storable("counter state")
@dataclass(frozen=True, kw_only=True)
class CounterState:
    """The charge that pays for the stream, and the state of encoder and decoder."""

    cover: Cover | None = None
    code: Any = None


def grid_bits(norm: Fraction, change: Fraction, rho: Fraction) -> int:
    """How fine C x may be measured: as fine as the sampler's range allows."""
    scale = float(norm * change) / math.sqrt(2 * float(rho))
    return max(0, min(_FINEST, _WIDEST - math.ceil(math.log2(scale))))


@dataclass(frozen=True, kw_only=True)
class CounterMechanism(CountingParameters, ABC, identity=None, keys="steps"):
    """A counter for a known number of `steps`: running sums of every bin, each with its noise."""

    steps: int
    most_steps: ClassVar[int] = 2**40

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole(self.steps, "steps", at_least=1))
        check_whole("steps", self.steps, 1, self.most_steps)
        super().__post_init__()

    def check(self, block: Reals) -> Integers:
        """As many steps as the counter was made for, at most; then as every counter."""
        if len(block) > self.steps:
            raise InvalidInput(
                f"there are {len(block)} steps but the counter was made for steps={self.steps}; "
                "give it more steps, or use unbounded_counter; nothing was spent"
            )
        return super().check(block)

    @abstractmethod
    def row_norm(self, step: int) -> float:
        """L2 norm of row `step` of B: the noise's standard deviation for sigma = 1."""

    @abstractmethod
    def coder(self, bits: int) -> Coder:
        """The scheme in integers, on a grid of 2^-`bits` where it has use for one."""

    @cached_property
    def _coder(self) -> Coder:
        return self.coder(grid_bits(self.coder(0).norm(), self.change, self.budget))

    @cached_property
    def _measured_change(self) -> Fraction:
        change = self.change * 2**self._coder.bits
        return encoded_change(self._coder.norm(), change, slack=self._coder.slack())

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), in units of the values."""
        scale = float(Fraction(self.quantum) / 2**self._coder.bits)
        noise = gaussian_stddev(self._measured_change, self.budget)
        return self.row_norm(step) * noise * scale

    def start(self) -> CounterState:
        """Nothing measured yet."""
        return CounterState()

    def step(
        self, state: CounterState, x: Integers, spend: Spender
    ) -> tuple[CounterState, list[Release]]:
        """Measure what this step adds, then publish the running sums."""
        cover, code = state.cover, state.code
        if cover is None:
            last = spend.step + self.steps - 1
            cover, code = spend.cover(self.budget, last=last), self._coder.begin(len(x))
        step = spend.step - cover.first + 1
        if step > self.steps:
            raise InvalidInput(
                f"this counter was made for steps={self.steps} and they are over; start a new run "
                "with more steps, or use unbounded_counter"
            )
        code, values = self._coder.encode(code, step, x)
        noisy = spend.gaussian(
            values,
            sensitivity=self._measured_change,
            rho=self.budget,
            purpose="count",
            cover=cover,
        )
        code, sums = self._coder.decode(code, step, noisy)
        sums, stddev = sums * float(Fraction(self.quantum)), self.stddev(step)
        release = release_or_hold(spend.step, sums, paid=True, stddev=stddev)
        return replace(state, cover=cover, code=code), [release]
