"""From a promise to noise: how much budget an (epsilon, delta) buys, and how columns share it.

Budgets are rounded down and noise is rounded up, to rationals of few bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.curves import Number, gdp_mu, number, zcdp_rho

BITS = 32


def _grid(value: Number, bits: int) -> tuple[Fraction, Fraction]:
    """A value as a multiple of the grid that gives it `bits` significant bits, and that grid."""
    number("value", value)
    exact = Fraction(value)
    digits = exact.numerator.bit_length() - exact.denominator.bit_length()
    unit = Fraction(2) ** (digits - bits)
    return exact / unit, unit


def round_down(value: Number, *, bits: int = BITS) -> Fraction:
    """A dyadic rational of about `bits` significant bits, not above value.

    >>> round_down(Fraction(1, 3), bits=4)
    Fraction(5, 16)
    """
    multiple, unit = _grid(value, bits)
    return math.floor(multiple) * unit


def round_up(value: Number, *, bits: int = BITS) -> Fraction:
    """A dyadic rational of about `bits` significant bits, not below value.

    >>> round_up(Fraction(1, 3), bits=4)
    Fraction(11, 32)
    """
    multiple, unit = _grid(value, bits)
    return math.ceil(multiple) * unit


def rho_for(*, epsilon: Number, delta: Number) -> Fraction:
    """The zCDP budget of an (epsilon, delta) promise, for discrete Gaussians.

    >>> f"{float(rho_for(epsilon=3, delta=1e-9 / 3)):.6f}"
    '0.114180'
    """
    return round_down(zcdp_rho(epsilon=epsilon, delta=delta))


def mu_squared_for(*, epsilon: Number, delta: Number) -> Fraction:
    """The GDP budget (the sum of mu^2) of an (epsilon, delta) promise, for continuous Gaussians.

    >>> f"{float(mu_squared_for(epsilon=3, delta=1e-9 / 3)):.6f}"
    '0.249742'
    """
    mu = Fraction(gdp_mu(epsilon=epsilon, delta=delta))
    return round_down(mu * mu)


def split_budget(total: Fraction, *, weights: Sequence[Number]) -> tuple[Fraction, ...]:
    """Share a budget that adds up (mu^2, rho or epsilon) in proportion to `weights`.

    The sum is never above it. Each column's Gaussian has mu_j^2 equal to its share, so that the
    squares add up to the total.

    >>> split_budget(Fraction(2), weights=[1, 3])
    (Fraction(1, 2), Fraction(3, 2))
    """
    parts = [_weight(weight) for weight in weights]
    if not parts:
        raise InvalidParameter("a split needs at least one column; got no weights")
    return tuple(round_down(Fraction(total) * part / sum(parts)) for part in parts)


def _weight(value: Number) -> Fraction:
    if number("weight", value) == 0:
        raise InvalidParameter(
            "a weight must be above 0, a column without budget cannot be released; got 0"
        )
    return Fraction(value)
