"""Groups whose values need not follow each other.

Guarantee: none by itself; deviations are exact, and are to be tested with noise.

A group is known by the place of its first value in the batch.
"""

from __future__ import annotations

import numpy as np

from dpstream.compiled import njit
from dpstream.records import Integers


@njit(cache=True, nogil=True)
def deviations(
    block: Integers, labels: Integers, first: int, x: Integers, grid: int
) -> tuple[Integers, Integers, Integers]:
    """Each bin's newest value against every group of its bin that began at `first` or later.

    floor(grid n dev / (n - 1)) of the n values together, n, and the group (bin x steps + place);
    bin by bin, the groups in the order of their first values. Steps x bins come in.
    """
    steps, bins = block.shape
    tested, size = np.empty(bins * steps, np.int64), np.empty(bins * steps, np.int64)
    which = np.empty(bins * steps, np.int64)
    count, total = np.empty(steps, np.int64), np.empty(steps, np.int64)
    spread = np.empty(steps, np.int64)
    found = 0
    for j in range(bins):
        count[:], total[:] = 1, 0  # values relative to the newest: it is 0 itself
        for i in range(first, steps):
            if labels[i, j] >= first:
                count[labels[i, j]] += 1
                total[labels[i, j]] += block[i, j] - x[j]
        for i in range(first, steps):
            spread[i] = abs(total[i])
        for i in range(first, steps):
            g = labels[i, j]
            if g >= first:
                spread[g] += abs(count[g] * (block[i, j] - x[j]) - total[g])
        for g in range(first, steps):
            if labels[g, j] == g:
                n = count[g]
                whole, part = spread[g] // (n - 1), spread[g] % (n - 1)
                tested[found] = grid * whole + grid * part // (n - 1)
                size[found], which[found] = n, j * steps + g
                found += 1
    return tested[:found], size[:found], which[:found]


@njit(cache=True, nogil=True)
def places(joins: Integers, size: Integers, which: Integers, steps: int, bins: int) -> Integers:
    """The group of each bin's newest value: the largest that it joins, or a new one."""
    group, best = np.full(bins, steps), np.zeros(bins, np.int64)
    for k in range(len(joins)):
        j = which[k] // steps
        if joins[k] and size[k] > best[j]:
            best[j], group[j] = size[k], which[k] % steps
    return group
