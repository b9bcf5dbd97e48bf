"""What the counters' mechanisms have in common before any matrix: budget, bounds, checks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms.blocks import check_counts, refuse_nan
from dpstream.privacy.amounts import Amount, exact, on_grid, positive
from dpstream.privacy.calibration import rho_for
from dpstream.privacy.charges import Terms
from dpstream.privacy.sensitivity import range_change
from dpstream.privacy.state.identity import Identified
from dpstream.records import Integers, Reals, Release

_LARGEST = 1 << 53
_OFF_GRID = 1e-6


@dataclass(frozen=True, kw_only=True)
class CountingParameters(
    Identified, identity=None, keys="rho epsilon delta sensitivity lo hi quantum"
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
    steady: ClassVar[bool] = True

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
            refuse_nan(block)
            ends = (
                Fraction(self.lo) / Fraction(self.quantum),
                Fraction(self.hi) / Fraction(self.quantum),
            )
            clipped = np.clip(block, float(Fraction(self.lo)), float(Fraction(self.hi)))
            grid = np.rint(clipped / quantum).astype(np.int64)
            return np.clip(grid, int(ends[0]), int(ends[1]))
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

    def finish(self, state: Any, spend: Any) -> tuple[Any, list[Release]]:
        """Nothing is held back."""
        return state, []
