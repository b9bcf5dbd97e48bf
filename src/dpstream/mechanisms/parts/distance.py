"""How far counts are from the last release.

Guarantee: none; one event moves the distance by at most one, so noise on it costs what it says.
"""

from __future__ import annotations

from dpstream.compiled import njit
from dpstream.records import Integers


@njit(cache=True, nogil=True)
def distance(release: Integers, x: Integers) -> int:
    """L1, over all bins.

    >>> import numpy as np
    >>> distance(np.array([3, -1]), np.array([1, 4]))
    7
    """
    total = 0
    for j in range(len(x)):
        total += abs(release[j] - x[j])
    return total
