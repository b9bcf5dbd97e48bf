"""Aggregates, the exact integer columns behind them, and how noisy columns become answers.

Each aggregate is a function of one or two *measures*: running sums of integers per group, to which
noise is added. A value lies on a public grid, `quantum`, after clamping to [lo, hi].

    COUNT(*)              rows (with one row per unit and group: units)
    COUNT(DISTINCT unit)  units
    SUM(x)                sum of clamp(x)
    AVG(x)                middle + sum of (clamp(x) - middle) / rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import exact, positive
from dpstream.records import Integers, Reals

Pair: TypeAlias = tuple[Any, Reals]
"""Answers and their standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One exact column: units, rows, or the sum of a value on its grid less `middle`."""

    kind: Literal["units", "rows", "value"]
    column: str = ""
    lo: Fraction = Fraction(0)
    hi: Fraction = Fraction(1)
    middle: Fraction = Fraction(0)
    quantum: Fraction = Fraction(1)

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        if self.kind != "value":
            return self.kind
        return f"{self.lo}|{self.hi}|{self.middle}|{self.quantum}|{self.column}"

    @property
    def largest(self) -> Fraction:
        """The most that one row adds, in grid steps."""
        if self.kind != "value":
            return Fraction(1)
        return max(self.hi - self.middle, self.middle - self.lo) / self.quantum

    def on_grid(self, values: Reals) -> Integers:
        """Clamp, take the middle off and round to the grid; NULL (NaN here) adds nothing."""
        lo, hi, middle = float(self.lo), float(self.hi), float(self.middle)
        steps = np.rint((np.clip(values, lo, hi) - middle) / float(self.quantum))
        most = float(self.largest)  # the division may round beyond the edge
        return np.where(np.isnan(steps), 0, np.clip(steps, -most, most)).astype(np.int64)


@dataclass(frozen=True)
class Count:
    """COUNT(*): rows per group."""

    name: str = "count"

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Rows; they are the units where a unit has one row per group."""
        return (Measure(kind="units" if one_row else "rows"),)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The noisy count."""
        values, stddev = noisy[0]
        return np.maximum(values, 0) if nonnegative else values, stddev


@dataclass(frozen=True)
class CountUnits(Count):
    """COUNT(DISTINCT unit): units per group."""

    name: str = "units"

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Distinct units."""
        return (Measure(kind="units"),)


@dataclass(frozen=True)
class Sum:
    """SUM of a column, each value clamped to [lo, hi] first."""

    name: str
    column: str = field(kw_only=True)
    lo: Any = field(kw_only=True)
    hi: Any = field(kw_only=True)
    quantum: Any = field(kw_only=True, default=None)
    chosen: bool = field(kw_only=True, default=True, repr=False)
    """Did the user choose the quantum?"""

    def __post_init__(self) -> None:
        lo, hi = exact(self.lo, "lo"), exact(self.hi, "hi")
        if lo >= hi:
            raise InvalidParameter(f"{self.name!r} needs lo < hi; got lo={self.lo}, hi={self.hi}")
        if self.quantum is None:
            object.__setattr__(self, "chosen", False)
        quantum = _quantum(lo, hi) if self.quantum is None else positive(self.quantum, "quantum")
        if (lo / quantum).denominator > 1 or (hi / quantum).denominator > 1:
            raise InvalidParameter(
                f"lo and hi of {self.name!r} must be multiples of its quantum; got lo={self.lo}, "
                f"hi={self.hi}, quantum={quantum}"
            )
        if max(abs(lo), abs(hi)) / quantum > 1 << 31:
            raise InvalidParameter(
                f"{self.name!r} has more than 2^31 grid steps; use a coarser quantum"
            )
        for name, value in (("lo", lo), ("hi", hi), ("quantum", quantum)):
            object.__setattr__(self, name, value)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The clamped values."""
        return (self._value(Fraction(0)),)

    def _value(self, middle: Fraction) -> Measure:
        return Measure(
            kind="value",
            column=self.column,
            lo=self.lo,
            hi=self.hi,
            middle=middle,
            quantum=self.quantum,
        )

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The noisy sum; below zero only if a value may be."""
        values, stddev = noisy[0]
        return np.maximum(values, 0.0) if nonnegative and self.lo >= 0 else values, stddev


@dataclass(frozen=True)
class Avg(Sum):
    """AVG of a column, each value clamped to [lo, hi] first; NULL counts as the middle."""

    @property
    def middle(self) -> Fraction:
        """A grid point halfway between lo and hi."""
        steps = math.floor((self.lo + self.hi) / 2 / self.quantum)
        return Fraction(steps * self.quantum)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Sums about the middle, and rows."""
        return self._value(self.middle), *Count().measures(one_row)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """Middle plus noisy sum over noisy rows, within [lo, hi]."""
        (sums, spread), (rows, of_rows) = noisy
        count = np.maximum(rows, 1.0)
        shift = sums / count
        stddev = np.sqrt(spread**2 + (shift * of_rows) ** 2) / count
        middle, lo, hi = float(self.middle), float(self.lo), float(self.hi)
        return np.clip(middle + shift, lo, hi), np.minimum(stddev, hi - lo)


Aggregate: TypeAlias = Count | Sum


def _quantum(lo: Fraction, hi: Fraction) -> Fraction:
    """A grid of about a thousand steps or more: a power of ten where lo and hi lie on it."""
    largest, power = max(abs(lo), abs(hi)), Fraction(1)
    while largest / power < 1000:
        power /= 10
    while largest / power >= 10000:
        power *= 10
    if (lo / power).denominator == 1 and (hi / power).denominator == 1:
        return power
    shared = Fraction(
        math.gcd(lo.numerator * hi.denominator, hi.numerator * lo.denominator),
        lo.denominator * hi.denominator,
    )
    return shared / math.ceil(1000 * shared / largest)


def all_measures(
    aggregates: Sequence[Aggregate], *, one_row: bool, unknown_keys: bool
) -> tuple[Measure, ...]:
    """Every column that needs noise, once; unknown keys are found by their units, column 0."""
    found = [Measure(kind="units")] if unknown_keys else []
    for aggregate in aggregates:
        for measure in aggregate.measures(one_row):
            if measure not in found:
                found.append(measure)
    return tuple(found)


def answers(
    aggregates: Sequence[Aggregate],
    noisy: Mapping[Measure, tuple[Integers, float]],
    *,
    one_row: bool,
    nonnegative: bool,
) -> dict[str, Any]:
    """Named columns of a release: each aggregate, and `<name>_stddev`."""
    table: dict[str, Any] = {}
    for aggregate in aggregates:
        pairs = []
        for measure in aggregate.measures(one_row):
            steps, stddev = noisy[measure]
            quantum = float(measure.quantum)
            values = steps if measure.kind != "value" else steps * quantum
            pairs.append((values, np.full(len(steps), stddev * quantum)))
        values, spread = aggregate.answer(pairs, nonnegative)
        table[aggregate.name], table[f"{aggregate.name}_stddev"] = values, spread
    return table
