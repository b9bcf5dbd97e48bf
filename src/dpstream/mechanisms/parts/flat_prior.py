"""What noise leaves possible of a number in a public range.

Guarantee: post-processing; it reads a noisy number and public bounds.

If m is anywhere in [lo, hi] alike and z = m + Laplace(scale) is seen, the density of m is cut out
of a Laplace density around z. Its median is near z where the noise is small against the range, near
the middle of the range where it is large, and never outside: no number has a smaller expected
absolute error.
"""

from __future__ import annotations

import math

import numpy.typing as npt

from dpstream.compiled import vectorize
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


@vectorize(cache=True)
def _median(z: float, scale: float, lo: float, hi: float) -> float:
    inside = min(max(z, lo), hi)  # beyond an edge the density no longer depends on z
    below, above = -math.expm1((lo - inside) / scale), -math.expm1((inside - hi) / scale)
    half = 0.5 * (below + above)
    if half <= below:
        found = inside + scale * math.log1p(half - below)
    else:
        found = inside - scale * math.log1p(below - half)
    return min(max(found, lo), hi)
