"""What noise leaves possible of a number in a public range.

Guarantee: post-processing; it reads a noisy number and public bounds.

If m is anywhere in [lo, hi] alike and z = m + Laplace(scale) is seen, the density of m is cut out
of a Laplace density around z. Its median is near z where the noise is small against the range, near
the middle of the range where it is large, and never outside: no number has a smaller expected
absolute error.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import vectorize

from dpstream.records import Reals


def posterior_median(
    z: npt.ArrayLike, scale: npt.ArrayLike, lo: npt.ArrayLike, hi: npt.ArrayLike
) -> Reals:
    """The median of m given z, element by element.

    >>> posterior_median([5.0, 12.0, 5e9], [0.1, 0.1, 1e9], 0.0, 10.0).round(2).tolist()
    [5.0, 9.93, 5.0]
    """
    found: Reals = _median(z, scale, lo, hi)
    return found


@vectorize(cache=True)  # type: ignore[no-untyped-call]
def _median(z: float, scale: float, lo: float, hi: float) -> float:
    inside = min(max(z, lo), hi)  # beyond an edge the density no longer depends on z
    below, above = -math.expm1((lo - inside) / scale), -math.expm1((inside - hi) / scale)
    half = 0.5 * (below + above)
    if half <= below:
        found = inside + scale * math.log1p(half - below)
    else:
        found = inside - scale * math.log1p(below - half)
    return min(max(found, lo), hi)


def decisive(scale: float, largest: float, bound: float) -> float:
    """The z up to which the median of m in [0, largest] is at most `bound`; infinite if always.

    >>> decisive(0.01, 10.0, 4.0).__round__(2), decisive(1e6, 10.0, 6.0), decisive(1e6, 10.0, 4.0)
    (4.0, inf, -inf)
    """
    lowest, highest = -40.0 * scale, largest + 40.0 * scale

    def median(z: float) -> float:
        return float(posterior_median(z, scale, 0.0, largest))

    if bound >= largest or median(highest) <= bound:
        return np.inf
    if median(lowest) > bound:
        return -np.inf
    for _ in range(80):
        middle = (lowest + highest) / 2
        lowest, highest = (middle, highest) if median(middle) <= bound else (lowest, middle)
    return lowest
