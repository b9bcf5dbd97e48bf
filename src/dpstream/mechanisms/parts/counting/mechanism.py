"""A factorisation as a mechanism, in the exact form: y = C x + z in integers, then B y.

What is measured, C x, is an integer vector on a public grid and gets discrete Gaussian noise; what
is published is computed from the noisy vector alone. One cover pays for all steps of the stream.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.mechanisms.base import Spender, whole
from dpstream.mechanisms.parts.counting.budget import CountingParameters
from dpstream.mechanisms.parts.counting.strategy import NoiseProcess
from dpstream.privacy.sensitivity import encoded_change
from dpstream.privacy.state.serial import storable
from dpstream.privacy.stddev import gaussian_stddev
from dpstream.privacy.tokens import Cover
from dpstream.records import Integers, Reals, Release

FINEST = 24
"""Bits after the point of what is measured; fewer where the noise is so wide that they are lost."""

_WIDEST = 40  # the noise scale stays below 2^40 grid steps


class Coder(Protocol):
    """Encoder and decoder of one scheme, in integers. Steps count from 1; states are values."""

    @property
    def bits(self) -> int:
        """C x is measured in units of 2^-bits."""

    def begin(self, bins: int) -> Any:
        """The state before step 1."""

    def encode(self, state: Any, step: int, x: Integers) -> tuple[Any, Integers]:
        """The values measured at `step`: rows of C x, times 2^bits."""

    def decode(self, state: Any, step: int, noisy: Integers) -> tuple[Any, Reals]:
        """The running sums in grid steps of the input, from noisy values alone."""

    def norm(self) -> Fraction:
        """Not below the norm of any column of C."""

    def slack(self) -> Fraction:
        """What rounding C x to integers can add to the norm of its change, in grid steps."""


@storable("counter state")
@dataclass(frozen=True, kw_only=True)
class CounterState:
    """The charge that pays for the stream, and the state of encoder and decoder."""

    cover: Cover | None = None
    code: Any = field(default=None)


def grid_bits(norm: Fraction, change: Fraction, rho: Fraction, finest: int = FINEST) -> int:
    """How fine C x may be measured: as fine as the sampler's range allows, at most `finest`."""
    scale = float(norm * change) / math.sqrt(2 * float(rho))
    return max(0, min(finest, _WIDEST - math.ceil(math.log2(scale))))


@dataclass(frozen=True, kw_only=True)
class CounterMechanism(CountingParameters, ABC, identity=None, keys="steps"):
    """A counter for a known number of `steps`: running sums of every bin, each with its noise."""

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole(self.steps, "steps", at_least=1))
        super().__post_init__()
        _ = self.process  # refuses what the scheme cannot do

    def check(self, block: Reals) -> Integers:
        """As many steps as the counter was made for, at most; then as every counter."""
        if len(block) > self.steps:
            raise InvalidInput(
                f"there are {len(block)} steps but the counter was made for steps={self.steps}; "
                "give it more steps, or use unbounded_counter; nothing was spent"
            )
        return super().check(block)

    @property
    @abstractmethod
    def process(self) -> NoiseProcess:
        """The scheme's matrices."""

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
        return self.process.row_norm(step) * noise * scale

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
        release = Release(
            step=spend.step,
            values=sums * float(Fraction(self.quantum)),
            paid=True,
            stddev=np.full(len(x), self.stddev(step)),
        )
        return replace(state, cover=cover, code=code), [release]
