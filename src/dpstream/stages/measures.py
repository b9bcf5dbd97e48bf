"""Measures: the exact integer columns behind the aggregates, one running sum per group each.

Noise is added to measures and to nothing else. A value lies on a public grid, `quantum`, after
clamping to [lo, hi]; what one row adds is bounded by `largest`, of which sensitivities are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One exact column: units, rows, or the sum of a value on its grid less `middle`.

    "round": units since their group was last published. "offered" and "kept": rows of a window
    before and after bounding. With `power` 2 the squared distance from `middle` is summed, less
    the middle of its own range.
    """

    kind: Literal["units", "rows", "value", "round", "offered", "kept"]
    column: str = ""
    lo: Fraction = Fraction(0)
    hi: Fraction = Fraction(1)
    middle: Fraction = Fraction(0)
    quantum: Fraction = Fraction(1)
    power: Literal[1, 2] = 1

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        if self.kind != "value":
            return self.kind
        squared = "" if self.power == 1 else "^2|"
        return f"{squared}{self.lo}|{self.hi}|{self.middle}|{self.quantum}|{self.column}"

    @property
    def reach(self) -> Fraction:
        """The largest distance of a clamped value from the middle."""
        return max(self.hi - self.middle, self.middle - self.lo)

    @property
    def offset(self) -> Fraction:
        """What is taken off a squared distance: a grid point halfway to the largest one."""
        return math.floor(self.reach**2 / 2 / self.quantum) * self.quantum

    @property
    def largest(self) -> Fraction:
        """The most that one row adds, in grid steps."""
        if self.kind != "value":
            return Fraction(1)
        if self.power == 1:
            return self.reach / self.quantum
        return max(self.reach**2 - self.offset, self.offset) / self.quantum

    def on_grid(self, values: Reals) -> Integers:
        """Clamp, take the middle off, round to the grid; NULL (NaN here) counts as the middle."""
        lo, hi, middle = float(self.lo), float(self.hi), float(self.middle)
        distances = np.clip(values, lo, hi) - middle
        if self.power == 2:
            distances = np.where(np.isnan(distances), 0, distances) ** 2 - float(self.offset)
        steps = np.rint(distances / float(self.quantum))
        most = float(self.largest)  # the division may round beyond the edge
        return np.where(np.isnan(steps), 0, np.clip(steps, -most, most)).astype(np.int64)
