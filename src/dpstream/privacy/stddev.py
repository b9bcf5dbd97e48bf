"""Error bars: standard deviations of the noise that an amount buys, in grid steps."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from dpstream.privacy.amounts import on_grid


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
