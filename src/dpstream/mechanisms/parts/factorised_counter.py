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
from typing import Any, ClassVar

import numpy as np

from dpstream.counting.binary_tree import Tree
from dpstream.counting.coders import Coder, NodeCoder
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


FINEST = 24
"""Bits after the point of what is measured; fewer where the noise is so wide that they are lost."""

_WIDEST = 40  # the noise scale stays below 2^40 grid steps


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


@dataclass(frozen=True, kw_only=True)
class TreeMechanism(CounterMechanism, identity=None):
    """A counter that measures the nodes of a tree, which are integers."""

    tree_type: ClassVar[type[Tree]] = Tree

    @cached_property
    def tree(self) -> Tree:
        """Which nodes make up a running sum."""
        return self.tree_type(steps=self.steps)

    def row_norm(self, step: int) -> float:
        """The root of the summed variances of the nodes."""
        return self.tree.row_norm(step)

    def coder(self, bits: int) -> NodeCoder:
        """Nodes need no finer grid."""
        return NodeCoder(tree=self.tree)
