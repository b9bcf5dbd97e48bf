"""Budgets as exact rationals on one fine grid, and the error bars that they buy.

The ledger adds integers: multiples of 1/GRID. GRID is highly composite, so every decimal epsilon
and every share such as eps/120 or eps/(2 * 17) lies on it exactly; what does not (an endlessly
halved remainder) is rounded down to it, before it is charged and before noise is scaled to it.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from dpstream.errors import InvalidParameter

Amount = int | float | str | Decimal | Fraction

GRID = 2**64 * 3**8 * 5**12 * 7**4 * 11**2 * 13**2 * math.prod((17, 19, 23, 29, 31, 37, 41, 43, 47))


def exact(value: Any, name: str = "value") -> Fraction:
    """The rational a number stands for; a float means the decimal that it prints as.

    >>> exact(0.1), exact("1/3"), exact(2)
    (Fraction(1, 10), Fraction(1, 3), Fraction(2, 1))
    """
    if not isinstance(value, int | float | str | Decimal | Fraction):
        value = getattr(value, "item", lambda: None)()  # a NumPy scalar
    if value is None or isinstance(value, bool):
        raise InvalidParameter(f"{name} must be a number; got {value!r}")
    try:
        return Fraction(repr(float(value)) if isinstance(value, float) else value)
    except (ValueError, InvalidOperation, OverflowError, ZeroDivisionError, TypeError):
        raise InvalidParameter(f"{name} must be a finite number; got {value!r}") from None


def positive(value: Any, name: str) -> Fraction:
    """`exact`, and above zero."""
    number = exact(value, name)
    if number <= 0:
        raise InvalidParameter(f"{name} must be greater than 0; got {value}")
    return number


def on_grid(amount: Fraction) -> Fraction:
    """The largest grid value not above `amount`."""
    return amount if GRID % amount.denominator == 0 else Fraction(floor_units(amount), GRID)


def floor_units(amount: Fraction) -> int:
    """How many whole grid steps fit into `amount`."""
    return amount.numerator * GRID // amount.denominator


def units(amount: Fraction) -> int:
    """`amount` in grid steps, rounded up: a charge never counts for less than it is."""
    return -(-amount.numerator * GRID // amount.denominator)


def show(amount: Fraction) -> str:
    """A budget for people: short decimals as they are, others to six digits.

    >>> show(Fraction(1, 4)), show(Fraction(1, 3))
    ('0.25', '0.333333')
    """
    return f"{float(amount):.6g}"


def as_text(amount: Fraction) -> str:
    """A budget as `exact` reads it back: a decimal if it is a short one, else a fraction.

    >>> as_text(Fraction(4)), as_text(Fraction(1, 10**8)), as_text(Fraction(1, 3))
    ('4', '1e-08', '1/3')
    """
    text = repr(float(amount)).removesuffix(".0")
    return text if Fraction(text) == amount else str(amount)


def laplace_stddev(sensitivity: Fraction, epsilon: Fraction) -> float:
    """Standard deviation of discrete Laplace noise, in grid steps.

    >>> round(laplace_stddev(Fraction(1), Fraction(1, 100)), 2)
    141.42
    """
    charged = on_grid(epsilon)  # hashing it, or a division of fractions, would take longer
    over = charged.numerator * sensitivity.denominator
    rate = over / (charged.denominator * sensitivity.numerator)
    return 0.0 if rate > 1400 else math.sqrt(0.5) / math.sinh(rate / 2)


@lru_cache(maxsize=1024)
def gaussian_stddev(sensitivity: Fraction, rho: Fraction) -> float:
    """Standard deviation of discrete Gaussian noise, in grid steps.

    >>> round(gaussian_stddev(Fraction(10), Fraction(1, 2)), 6)
    10.0
    >>> round(gaussian_stddev(Fraction(1), Fraction(2)), 6)  # narrower than the continuous one
    0.463695
    """
    sigma = float(sensitivity) / math.sqrt(2 * float(on_grid(rho)))
    if sigma > 4:  # sums and integrals agree to all digits
        return sigma
    x = np.arange(-60.0, 61.0)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return math.sqrt(float(weights @ x**2) / float(weights.sum()))
