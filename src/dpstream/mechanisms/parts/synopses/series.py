"""Budgets for ever: series of exact rationals whose infinite sum stays within epsilon.

`term(i)` is the i-th budget, i = 1, 2, ...; `tail(n)` bounds the sum of all terms after the n-th,
in closed form. Terms never grow. Drawn in any order, each at most once, they cost at most the
total.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final, Protocol

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.synopses.theorem import gap_for, one_minus_power

_ROUND: Final = Fraction(1) - Fraction(1, 2**30)
"""Terms made of floats are taken this much smaller, a million times what floats can be off."""


class Series(Protocol):
    """A convergent series of budgets."""

    @property
    def total(self) -> Fraction:
        """At least the sum of all terms."""

    def term(self, i: int) -> Fraction:
        """The i-th budget, i >= 1."""

    def tail(self, n: int) -> Fraction:
        """At least the sum of the terms after the n-th."""

    def about(self, i: int) -> float:
        """The i-th budget as a float; it falls with i as terms do."""


@dataclass(frozen=True, kw_only=True)
class Telescoping:
    """epsilon / (i (i + 1)): the sum up to n is epsilon (1 - 1 / (n + 1)), exactly.

    >>> half = Telescoping(total=Fraction(1))
    >>> sum(half.term(i) for i in range(1, 10)) + half.tail(9)
    Fraction(1, 1)
    """

    total: Fraction

    def term(self, i: int) -> Fraction:
        """Falls like 1 / i^2."""
        return self.total / (i * (i + 1))

    def tail(self, n: int) -> Fraction:
        """It is epsilon / (n + 1), exactly."""
        return self.total / (n + 1)

    def about(self, i: int) -> float:
        """Without a Fraction."""
        return self._scale / (i * (i + 1))

    @cached_property
    def _scale(self) -> float:
        return float(self.total)


@dataclass(frozen=True, kw_only=True)
class Level:
    """Half of epsilon in `count` equal terms, the other half telescoping after them.

    A slot that can tell synopses apart needs a budget of some size; a series that falls from the
    start has it once.

    >>> level = Level(total=Fraction(1), count=4)
    >>> level.term(1), level.term(4), level.term(5), level.tail(4), level.tail(3)
    (Fraction(1, 8), Fraction(1, 8), Fraction(1, 10), Fraction(1, 2), Fraction(5, 8))
    """

    total: Fraction
    count: int = 6

    def term(self, i: int) -> Fraction:
        """Equal, then falling like 1 / i^2."""
        if i <= self.count:
            return self.total / (2 * self.count)
        return self.total * self.count / (2 * i * (i - 1))

    def tail(self, n: int) -> Fraction:
        """What is left of the equal terms, and the telescoped rest."""
        if n <= self.count:
            return self.total / 2 + self.total * (self.count - n) / (2 * self.count)
        return self.total * self.count / (2 * n)

    def about(self, i: int) -> float:
        """Without a Fraction."""
        return self._scale / (i * (i - 1) if i > self.count else self.count**2)

    @cached_property
    def _scale(self) -> float:
        return float(self.total * self.count / 2)


@dataclass(frozen=True, kw_only=True)
class Dilogarithm:
    """Theorem 5.4's series, for its true cost: X_t = (1 - m^(2t)) / (zeta t^2), alpha_t = X_t / 2.

    Two draws of weights exp(alpha_t score), with scores that one user moves by at most `change`,
    cost 4 alpha_t change = 2 change X_t. All of them together: 2 change (Li2(1) - Li2(m^2)) / zeta,
    which is `total`: m follows from it. There is no such m unless total < change pi^2 / (3 zeta).
    """

    total: Fraction
    change: Fraction
    decay: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.decay <= 0 or self.change <= 0 or self.total <= 0:
            raise InvalidParameter(
                f"total, change and decay must be positive; got {self.total}, {self.change}, "
                f"{self.decay}"
            )
        _ = self.gap  # raises where there is none

    @cached_property
    def gap(self) -> float:
        """1 - m^2."""
        return gap_for(
            float(self.total * self.decay / (2 * self.change)),
            lambda most: (
                f"the dilogarithm's series needs epsilon < {most * 2 * self.change / self.decay:g} "
                f"at decay_rate={float(self.decay):g} and scores that move by "
                f"{float(self.change):g}; got epsilon={float(self.total):g}; lower epsilon or "
                "decay_rate, or use series='telescoping'"
            ),
        )

    def term(self, i: int) -> Fraction:
        """2 change X_i, rounded down."""
        x = Fraction(one_minus_power(self.gap, i)) / (self.decay * i * i)
        return 2 * self.change * x * _ROUND

    def tail(self, n: int) -> Fraction:
        """No more than 2 change / (zeta n): 1 / t^2 < 1 / (t - 1) - 1 / t."""
        most = self.total if n == 0 else 2 * self.change / (self.decay * n)
        return min(self.total, most)

    def about(self, i: int) -> float:
        """Without a Fraction."""
        return self._scale * one_minus_power(self.gap, i) / (i * i)

    @cached_property
    def _scale(self) -> float:
        return float(2 * self.change / self.decay)


SERIES: Final = ("level", "telescoping", "dilogarithm")


def series(name: str, *, total: Fraction, change: Fraction, decay: Fraction) -> Series:
    """The series of this name."""
    if name == "level":
        return Level(total=total)
    if name == "telescoping":
        return Telescoping(total=total)
    if name == "dilogarithm":
        return Dilogarithm(total=total, change=change, decay=decay)
    raise InvalidParameter(f"series must be one of {', '.join(SERIES)}; got {name!r}")
