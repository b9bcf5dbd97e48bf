"""Budgets as exact rationals on one fine grid.

The ledger adds integers: multiples of 1/GRID. GRID is highly composite, so every decimal epsilon
and every share such as eps/120 or eps/(2 * 17) lies on it exactly; what does not (an endlessly
halved remainder) is rounded down to it, before it is charged and before noise is scaled to it.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

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
