"""Fieller's interval for a quotient of two noisy numbers."""

from __future__ import annotations

import numpy as np

from dpstream.records import Reals


def quotient_interval(
    above: Reals,
    below: Reals,
    variances: tuple[Reals, Reals],
    covariance: Reals,
    deviations: float,
) -> tuple[Reals, Reals]:
    """All quotients q for which `above` - q * `below` lies within so many of its own deviations.

    That number is normal where both are, and its mean is 0 at the true quotient, so the interval
    holds it with the probability of the deviations, however noisy `below` is. Where `below` may be
    0 nothing is known: the interval is infinite.
    Paper: Fieller, "Some Problems in Interval Estimation", 1954.

    >>> one, none = np.ones(1), np.zeros(1)
    >>> low, high = quotient_interval(6 * one, 3 * one, (0.25 * one, none), none, 2.0)
    >>> low.tolist(), high.tolist()
    ([1.6666666666666667], [2.3333333333333335])
    """
    square = deviations**2
    of_above, of_below = variances
    with np.errstate(all="ignore"):
        size = below**2 - square * of_below
        half = above * below - square * covariance
        rest = above**2 - square * of_above
        root = np.sqrt(np.maximum(half**2 - size * rest, 0.0))
        low, high = (half - root) / size, (half + root) / size
    known = size > 0
    return np.where(known, low, -np.inf), np.where(known, high, np.inf)
