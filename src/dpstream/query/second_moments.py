"""Covariance, correlation and the slope of a line: what two clamped columns say of each other.

Each is made of sums over the pairs of a group: of both distances from the middles of their bounds,
of their product, of their squares, and the number of pairs. A pair with a NULL in it counts
nowhere. A row adds at most a known number to each sum, so they are measures like any other.
Proof: `docs/soundness/latched.md`, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import Amount
from dpstream.query.aggregates import Measure, OfPairs, Pair, Sum
from dpstream.query.fieller import quotient_interval
from dpstream.records import Integers, Reals

Powers: TypeAlias = tuple[int, int]
_PAIRS, _Y, _X, _YX, _YY, _XX = (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)


@dataclass(frozen=True, kw_only=True)
class Moment(Measure):
    """The sum over pairs of (y - middle)^i (x - middle)^j, where `powers` are (i, j).

    `column`, `lo`, `hi` and `middle` are those of y, `other` has those of x. Of squares the middle
    of their own range is taken off, as in `Measure`.
    """

    kind: Literal["value"] = "value"
    other: Measure
    powers: Powers

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        bounds = [f"{m.lo}|{m.hi}|{m.middle}" for m in (self, self.other)]
        columns = f"{len(self.column)}|{self.column}|{self.other.column}"
        return f"moment {self.powers}|{self.quantum}|{'|'.join(bounds)}|{columns}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Both columns, y first."""
        return self.column, self.other.column

    @property
    def in_words(self) -> str:
        """What is summed."""
        y, x = self.columns
        what = {_PAIRS: "number of", _Y: f"{y} in", _X: f"{x} in", _YX: "products of"}
        squares = {_YY: f"squares of {y} in", _XX: f"squares of {x} in"}
        about = "" if self.powers == _PAIRS else ", from the middles of their bounds"
        return f"{(what | squares)[self.powers]} pairs of {y} and {x}{about}"

    @property
    def farthest(self) -> Fraction:
        """The largest product of both distances, each to its power."""
        return self.reach ** self.powers[0] * self.other.reach ** self.powers[1]

    @property
    def offset(self) -> Fraction:
        """What is taken off a square: a grid point halfway to the largest one."""
        if max(self.powers) < 2:
            return Fraction(0)
        return math.floor(self.farthest / 2 / self.quantum) * self.quantum

    @property
    def largest(self) -> Fraction:
        """The most that one row adds, in grid steps."""
        return max(self.farthest - self.offset, self.offset) / self.quantum

    @property
    def signed(self) -> bool:
        """May a row take something away?"""
        return self.powers != _PAIRS

    def on_grid(self, *values: Reals) -> Integers:
        """Clamp both, multiply, round to the grid; a pair with a NULL (NaN) adds nothing."""
        y, x = values
        product = np.ones(len(y))
        for column, measure, power in ((y, self, self.powers[0]), (x, self.other, self.powers[1])):
            lo, hi, middle = float(measure.lo), float(measure.hi), float(measure.middle)
            product = product * (np.clip(column, lo, hi) - middle) ** power
        steps = np.rint((product - float(self.offset)) / float(self.quantum))
        most = float(self.largest)  # the division may round beyond the edge
        counted = ~(np.isnan(y) | np.isnan(x))
        return np.where(counted, np.clip(steps, -most, most), 0).astype(np.int64)


@dataclass(frozen=True)
class OfTwoColumns(OfPairs, identity=None, keys="columns bounds"):
    """An aggregate of pairs of values; pairs with a NULL in them are left out.

    `columns`: y, then x. `contribution_bounds_per_row`: of each column (lo, hi), to which its
    values are clamped first.
    """

    columns: tuple[str, str] = field(kw_only=True)
    contribution_bounds_per_row: Any = field(kw_only=True, default=None, repr=False)
    bounds: tuple[tuple[Fraction, Fraction], ...] = field(init=False)
    needs: ClassVar[tuple[Powers, ...]]
    """The sums that it is made of."""

    def __post_init__(self) -> None:
        names: Any = self.columns
        if isinstance(names, str) or len(names) != 2 or not all(isinstance(n, str) for n in names):
            raise InvalidParameter(f"{self.name!r} needs columns=(y, x), two names; got {names!r}")
        given: Any = self.contribution_bounds_per_row
        pair = isinstance(given, tuple | list) and len(given) == 2
        if not pair or not all(isinstance(each, tuple | list) for each in given):
            raise InvalidParameter(
                f"{self.name!r} needs contribution_bounds_per_row=((lo, hi), (lo, hi)), those of "
                f"{names[0]!r} and of {names[1]!r}; got {given!r}"
            )
        object.__setattr__(self, "columns", tuple(names))
        bounds = tuple((each.lo, each.hi) for each in self._sums(given))
        object.__setattr__(self, "bounds", bounds)
        object.__setattr__(self, "contribution_bounds_per_row", bounds)

    def _sums(self, bounds: Sequence[tuple[Amount, Amount]]) -> list[Sum]:
        """A SUM of each column, which has its grid."""
        return [
            Sum(f"{self.name} ({column})", column=column, contribution_bounds_per_row=each)
            for column, each in zip(self.columns, bounds, strict=True)
        ]

    @cached_property
    def _moments(self) -> dict[Powers, Moment]:
        """All sums that may be needed, by their powers."""
        sums = self._sums(self.bounds)
        y, x = (
            Measure(
                kind="value", column=s.column, lo=s.lo, hi=s.hi, middle=s.middle, quantum=s.quantum
            )
            for s in sums
        )
        made = {}
        for powers in (_PAIRS, _Y, _X, _YX, _YY, _XX):
            farthest = y.reach ** powers[0] * x.reach ** powers[1]
            used = [m for m, power in zip((y, x), powers, strict=True) if power]
            steps = max((math.ceil(m.reach / m.quantum) for m in used), default=1)
            alone = sum(powers) == 1
            made[powers] = Moment(
                column=y.column,
                lo=y.lo,
                hi=y.hi,
                middle=y.middle,
                other=x,
                powers=powers,
                quantum=used[0].quantum if alone else farthest / steps,
            )
        return made

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The sums."""
        return tuple(self._moments[powers] for powers in self.needs)

    def _means(self, noisy: Sequence[Pair]) -> Means:
        """Of each sum its noisy mean; and what noise may do to it."""
        known = dict(zip(self.needs, noisy, strict=True))
        pairs = np.maximum(known[_PAIRS][0], 1.0)
        means = {powers: values / pairs for powers, (values, _) in known.items()}
        spreads = {powers: spread / pairs for powers, (_, spread) in known.items()}
        for powers in {_YY, _XX} & means.keys():
            means[powers] = means[powers] + float(self._moments[powers].offset)
        return Means(pairs=pairs, means=means, spreads=spreads, offsets=self._offsets)

    @property
    def _offsets(self) -> dict[Powers, float]:
        return {powers: float(each.offset) for powers, each in self._moments.items()}

    def _box(self, noisy: Sequence[Pair], reach: Sequence[float]) -> dict[Powers, Ends]:
        """The least and the largest mean of each sum, and variances, where sums are so far off."""
        known = dict(zip(self.needs, noisy, strict=True))
        far = dict(zip(self.needs, reach, strict=True))
        pairs = known[_PAIRS][0]
        most, least = (np.maximum(pairs + sign * far[_PAIRS], 1.0) for sign in (1, -1))
        box: dict[Powers, Ends] = {}
        for powers, (values, _) in known.items():
            ends = [
                (values + sign * far[powers]) / count for sign in (-1, 1) for count in (least, most)
            ]
            offset = self._offsets[powers]
            box[powers] = np.min(ends, axis=0) + offset, np.max(ends, axis=0) + offset
        return box


Ends: TypeAlias = tuple[Reals, Reals]


@dataclass(frozen=True, kw_only=True)
class Means:
    """Noisy means of a group's pairs, and what moves with their noise, to first order.

    `spreads`: standard deviations of the sums, over `pairs`. A figure is a value and its slopes: by
    how much it moves with each sum, times `pairs`.
    """

    pairs: Reals
    means: Mapping[Powers, Reals]
    spreads: Mapping[Powers, Reals]
    offsets: Mapping[Powers, float]

    def about_means(self, powers: Powers) -> tuple[Reals, dict[Powers, Reals]]:
        """A covariance (_YX) or a variance (_YY, _XX), and its slopes."""
        first, second = {_YX: (_Y, _X), _YY: (_Y, _Y), _XX: (_X, _X)}[powers]
        product, a, b = self.means[powers], self.means[first], self.means[second]
        slopes = {powers: np.ones(len(a)), _PAIRS: 2 * a * b - (product - self.offsets[powers])}
        for mine, theirs in ((first, b), (second, a)):
            slopes[mine] = slopes.get(mine, 0.0) - theirs
        return product - a * b, slopes

    def covariance(self, one: Mapping[Powers, Reals], two: Mapping[Powers, Reals]) -> Reals:
        """Of two figures, by their slopes: the noises of sums are independent."""
        total: Reals = np.zeros(len(self.pairs))
        for powers in one.keys() & two.keys():
            total = total + one[powers] * two[powers] * self.spreads[powers] ** 2
        return total


@dataclass(frozen=True)
class Covariance(OfTwoColumns, identity="covariance", keys="sample"):
    """COVAR_POP of two columns; with `sample` COVAR_SAMP.

    >>> made = Covariance("c", columns=("y", "x"), contribution_bounds_per_row=((0, 9), (0, 1)))
    >>> len(made.measures(one_row=True))
    4
    """

    sample: bool = field(kw_only=True, default=False)
    needs: ClassVar[tuple[Powers, ...]] = (_YX, _Y, _X, _PAIRS)

    @property
    def most(self) -> float:
        """No covariance of clamped values is further from 0."""
        (a, b), (c, d) = self.bounds
        return float((b - a) * (d - c)) / 4

    def _factor(self, pairs: Reals) -> Reals:
        """What makes the covariance of a sample of that of all: at most 2."""
        return pairs / np.maximum(pairs - 1, pairs / 2) if self.sample else np.ones(len(pairs))

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The mean product less the product of the means, within what clamped values can have."""
        means = self._means(noisy)
        value, slopes = means.about_means(_YX)
        spread = np.minimum(np.sqrt(means.covariance(slopes, slopes)), 2 * self.most)
        factor = self._factor(means.pairs)
        return factor * np.clip(value, -self.most, self.most), factor * spread

    def ends(self, noisy: Sequence[Pair], deviations: float) -> tuple[Reals, Reals]:
        """So many of its standard deviations to both sides."""
        means = self._means(noisy)
        value, slopes = means.about_means(_YX)
        spread, factor = np.sqrt(means.covariance(slopes, slopes)), self._factor(means.pairs)
        return factor * (value - deviations * spread), factor * (value + deviations * spread)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """Any mean product less any product of means within reach."""
        low, high = _covariance_in(self._box(noisy, reach))
        if not self.sample:
            return low, high
        pairs, far = noisy[-1][0], reach[-1]
        factors = [self._factor(np.maximum(pairs + sign * far, 1.0)) for sign in (-1, 1)]
        found = [end * factor for end in (low, high) for factor in factors]
        return np.min(found, axis=0), np.max(found, axis=0)

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """Nor is it further from 0 than that of values at the clamps."""
        most = self.most * (2 if self.sample else 1)
        return np.clip(low, -most, most), np.clip(high, -most, most)


@dataclass(frozen=True)
class Correlation(OfTwoColumns, identity="correlation"):
    """CORR of two columns: their covariance over the product of their standard deviations.

    Where noise may have made all of a variance it is 0, and its interval from -1 to 1.

    >>> made = Correlation("r", columns=("y", "x"), contribution_bounds_per_row=((0, 9), (0, 1)))
    >>> len(made.measures(one_row=True))
    6
    """

    needs: ClassVar[tuple[Powers, ...]] = (_YX, _YY, _XX, _Y, _X, _PAIRS)

    def _parts(self, noisy: Sequence[Pair], clear: float) -> Quotient:
        """The covariance, and the product of both standard deviations where both are `clear`."""
        means = self._means(noisy)
        above, of_above = means.about_means(_YX)
        (y, of_y), (x, of_x) = (means.about_means(powers) for powers in (_YY, _XX))
        known = np.ones(len(y), bool)
        for value, slopes in ((y, of_y), (x, of_x)):
            known &= value > clear * np.sqrt(means.covariance(slopes, slopes))
        y, x = np.where(known, y, 1.0), np.where(known, x, 1.0)
        below = np.sqrt(y * x)
        of_below = {
            powers: (of_y.get(powers, 0.0) * x + of_x.get(powers, 0.0) * y) / (2 * below)
            for powers in of_y.keys() | of_x.keys()
        }
        return Quotient.of(means, (above, of_above), (below, of_below), known)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The quotient, within -1 and 1."""
        parts = self._parts(noisy, 0.0)
        value, spread = parts.value
        known = parts.known
        return (
            np.where(known, np.clip(value, -1.0, 1.0), 0.0),
            np.where(known, np.minimum(spread, 1.0), 1.0),
        )

    def ends(self, noisy: Sequence[Pair], deviations: float) -> tuple[Reals, Reals]:
        """Fieller's interval."""
        return self._parts(noisy, deviations).ends(deviations)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """Any covariance over any product of standard deviations within reach."""
        box = self._box(noisy, reach)
        (y_low, y_high), (x_low, x_high) = (_variance_in(box, powers) for powers in (_YY, _XX))
        below = tuple(np.sqrt(y * x) for y, x in ((y_low, x_low), (y_high, x_high)))
        return _quotient_in(_covariance_in(box), (below[0], below[1]))

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """Nor is it beyond -1 and 1."""
        return np.clip(low, -1.0, 1.0), np.clip(high, -1.0, 1.0)


@dataclass(frozen=True)
class Slope(OfTwoColumns, identity="slope"):
    """REGR_SLOPE of two columns: how much y grows with x along the line of least squares.

    NULL where noise may have made all of x's variance.

    >>> made = Slope("s", columns=("y", "x"), contribution_bounds_per_row=((0, 9), (0, 1)))
    >>> len(made.measures(one_row=True))
    5
    """

    needs: ClassVar[tuple[Powers, ...]] = (_YX, _XX, _Y, _X, _PAIRS)

    def _parts(self, noisy: Sequence[Pair]) -> Quotient:
        means = self._means(noisy)
        above, below = means.about_means(_YX), means.about_means(_XX)
        return Quotient.of(means, above, below, np.ones(len(means.pairs), bool))

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The covariance over the variance of x."""
        parts = self._parts(noisy)
        value, spread = parts.value
        clear = parts.below > _CLEAR * np.sqrt(parts.variances[1])
        return np.where(clear, value, np.nan), np.where(clear, spread, np.nan)

    def ends(self, noisy: Sequence[Pair], deviations: float) -> tuple[Reals, Reals]:
        """Fieller's interval."""
        return self._parts(noisy).ends(deviations)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """Any covariance over any variance of x within reach."""
        box = self._box(noisy, reach)
        return _quotient_in(_covariance_in(box), _variance_in(box, _XX))


_CLEAR = 2.0
"""A variance that is divided by must be so many standard deviations above 0."""


@dataclass(frozen=True, kw_only=True)
class Quotient:
    """Two figures of noisy means, one over the other."""

    above: Reals
    below: Reals
    variances: tuple[Reals, Reals]
    covariance: Reals
    known: Any
    """Where it can be told at all."""

    @classmethod
    def of(
        cls,
        means: Means,
        above: tuple[Reals, dict[Powers, Reals]],
        below: tuple[Reals, dict[Powers, Reals]],
        known: Any,
    ) -> Quotient:
        """Of two figures with their slopes."""
        return cls(
            above=above[0],
            below=below[0],
            variances=(
                means.covariance(above[1], above[1]),
                means.covariance(below[1], below[1]),
            ),
            covariance=means.covariance(above[1], below[1]),
            known=known,
        )

    @property
    def value(self) -> Pair:
        """The quotient, and its error to first order."""
        with np.errstate(all="ignore"):
            value = self.above / self.below
            square = self.variances[0] - 2 * value * self.covariance + value**2 * self.variances[1]
            return value, np.sqrt(np.maximum(square, 0.0)) / np.abs(self.below)

    def ends(self, deviations: float) -> tuple[Reals, Reals]:
        """Fieller's interval; infinite where nothing is known."""
        low, high = quotient_interval(
            self.above, self.below, self.variances, self.covariance, deviations
        )
        known = self.known & (self.below > 0)
        return np.where(known, low, -np.inf), np.where(known, high, np.inf)


def _products(one: Ends, two: Ends) -> Ends:
    """The least and the largest product of a number of one range and one of another."""
    found = [a * b for a in one for b in two]
    return np.min(found, axis=0), np.max(found, axis=0)


def _covariance_in(box: Mapping[Powers, Ends]) -> Ends:
    low, high = _products(box[_Y], box[_X])
    return box[_YX][0] - high, box[_YX][1] - low


def _variance_in(box: Mapping[Powers, Ends], powers: Powers) -> Ends:
    """At least 0."""
    low, high = box[_Y if powers == _YY else _X]
    least = np.maximum(np.maximum(low, -high), 0.0) ** 2
    most = np.maximum(low**2, high**2)
    return np.maximum(box[powers][0] - most, 0.0), np.maximum(box[powers][1] - least, 0.0)


def _quotient_in(above: Ends, below: Ends) -> Ends:
    """Infinite where `below` may be 0; it is not negative."""
    with np.errstate(all="ignore"):
        found = [a / b for a in above for b in below]
    known = below[0] > 0
    low = np.where(known, np.min(found, axis=0), -np.inf)
    return low, np.where(known, np.max(found, axis=0), np.inf)
