"""What noise leaves possible of a number in a public range.

Guarantee: post-processing; it reads a noisy number and public bounds.

If m is anywhere in [lo, hi] alike and z = m + Laplace(scale) is seen, the density of m is cut out
of a Laplace density around z. Its median is near z where the noise is small against the range, near
the middle of the range where it is large, and never outside: no number has a smaller expected
absolute error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpstream.records import Reals


def posterior_median(
    z: npt.ArrayLike, scale: npt.ArrayLike, lo: npt.ArrayLike, hi: npt.ArrayLike
) -> Reals:
    """The median of m given z, element by element.

    >>> posterior_median([5.0, 12.0, 5e9], [0.1, 0.1, 1e9], 0.0, 10.0).round(2).tolist()
    [5.0, 9.93, 5.0]
    """
    seen, width = np.asarray(z, np.float64), np.asarray(scale, np.float64)
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    inside = np.clip(seen, lo, hi)  # beyond an edge the density no longer depends on z
    below, above = -np.expm1((lo - inside) / width), -np.expm1((inside - hi) / width)
    half = (below + above) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = inside + width * np.log(np.maximum(1.0 - (below - half), 0.0))
        right = inside - width * np.log(np.maximum(1.0 - (half - below), 0.0))
    found: Reals = np.clip(np.where(half <= below, left, right), lo, hi)
    return found


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
