"""Decisions in exact arithmetic, on as many random bits as they need.

Used for the few draws that float64 leaves undecided, and by the tests for all of them.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from fractions import Fraction

_LN2 = math.log(2)


class LazyUniform:
    """A uniform real U in [0, 1), of which only the bits that were needed are known.

    >>> half = LazyUniform(1, 1, more=lambda number: 0)
    >>> half.below_exp(Fraction(1, 2)), half.below_exp(Fraction(7, 10))
    (True, False)
    """

    def __init__(self, value: int, bits: int, more: Callable[[int], int]) -> None:
        self.value, self.bits, self._more, self._extensions = value, bits, more, 0

    def extend(self) -> None:
        """Learn 128 more bits."""
        self._extensions += 1
        self.value = self.value << 128 | self._more(self._extensions)
        self.bits += 128

    def below_exp(self, rate: Fraction) -> bool:
        """Is U < exp(-rate)? exp(-rate) is irrational for rational rate > 0, so no tie lasts."""
        if rate == 0:
            return True
        while rate > self.bits:  # exp(-rate) < 2^-bits: any known bit that is set decides
            if self.value:
                return False
            self.extend()
        while True:
            low, high = exp_bounds(rate, digits=int(self.bits * 0.302) + 12)
            if Fraction(self.value + 1, 1 << self.bits) <= low:
                return True
            if Fraction(self.value, 1 << self.bits) >= high:
                return False
            self.extend()

    def floor_minus_log(self, scale: Fraction) -> int:
        """floor(-scale ln U): the k with exp(-(k + 1)/scale) <= U < exp(-k/scale)."""
        while self.value < 1 << 53:  # fewer bits leave the guess far off at a large scale
            self.extend()
        guess = float(scale) * (self.bits * _LN2 - math.log(self.value))
        k = max(0, math.floor(guess))
        while self.below_exp((k + 1) / scale):
            k += 1
        while k > 0 and not self.below_exp(k / scale):
            k -= 1
        return k


def exp_bounds(rate: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Rationals around exp(-rate), about `digits` significant digits apart.

    `Decimal.exp` is correctly rounded, so one unit in the last place either way encloses it.
    """
    down = decimal.Context(prec=digits, rounding=decimal.ROUND_FLOOR, Emin=decimal.MIN_EMIN)
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING, Emin=decimal.MIN_EMIN)
    top, bottom = decimal.Decimal(rate.numerator), decimal.Decimal(rate.denominator)
    low = down.next_minus(down.exp(up.divide(top, bottom).copy_negate()))
    high = up.next_plus(up.exp(down.divide(top, bottom).copy_negate()))
    return Fraction(low), Fraction(high)
