"""Which of two values is larger? What many noisy answers, and a noisy value, say together.

Guarantee: post-processing; it reads noisy values, noisy answers and public scales.

A value x in [0, 1] is known to be about z, with a Laplace density of some scale, and is compared
with others that are known to be about y_1, y_2, ...: the answer to "is x > y?" is right more often
the further they are apart. The range is cut into `CELLS` cells; within a cell the answers do not
tell values apart, the density around z does. Published is the median of what is possible.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit
from dpstream.records import Integers, Reals

CELLS = 48


def log_chances(scale: float) -> Reals:
    """[a, b]: log of the chance that a value in cell a, with noise, beats one in cell b."""
    cell = np.arange(CELLS) / CELLS
    d = cell[:, None] - cell[None, :]
    tail = np.log(0.5) - np.abs(d) / scale  # of the wrong answer
    chances: Reals = np.where(d >= 0, np.log1p(-np.exp(tail)), tail)
    return chances


@njit(cache=True, nogil=True)
def aligned(z: float, scale: float, above: Integers, below: Integers, chances: Reals) -> float:
    """The median of x: `above[b]` values of cell b were said to be smaller, `below[b]` larger."""
    weight, top = np.empty(CELLS), -math.inf
    mass, at = np.empty(CELLS), min(max(z, 0.0), 1.0)
    for a in range(CELLS):
        log = 0.0
        for b in range(CELLS):
            log += above[b] * chances[a, b] + below[b] * chances[b, a]
        weight[a] = log
        top = max(top, log)
    total = 0.0
    for a in range(CELLS):
        weight[a] = math.exp(weight[a] - top)
        mass[a] = weight[a] * _between(a / CELLS, (a + 1) / CELLS, at, scale)
        total += mass[a]
    if total <= 0.0:
        return at
    left, a = 0.5 * total, 0
    while a < CELLS - 1 and left > mass[a]:
        left -= mass[a]
        a += 1
    low, high = a / CELLS, (a + 1) / CELLS
    for _ in range(40):
        middle = 0.5 * (low + high)
        if weight[a] * _between(a / CELLS, middle, at, scale) < left:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@njit(cache=True, nogil=True)
def _between(low: float, high: float, z: float, scale: float) -> float:
    """Of the density exp(-|x - z| / scale) / scale between two numbers."""
    if high <= z:
        return math.exp((high - z) / scale) - math.exp((low - z) / scale)
    if low >= z:
        return math.exp((z - low) / scale) - math.exp((z - high) / scale)
    return 2.0 - math.exp((low - z) / scale) - math.exp((z - high) / scale)


@njit(cache=True, nogil=True)
def align(
    value: Reals,
    scale: Reals,
    after: Reals,
    before: Reals,
    answers: Integers,
    chances: Reals,
    weighed: bool,
) -> Reals:
    """Where to put a value of each bin, known to be about `value`, in shares of the range.

    `after` and `before` (bins x steps): what is known of its neighbours, in time order. `answers`:
    its own column, then those of the values after it; rows are bins x "k + 1 steps before".
    """
    bins = len(value)
    asked = answers.shape[0] // bins
    out, above, below = np.empty(bins), np.empty(CELLS, np.int64), np.empty(CELLS, np.int64)
    for j in range(bins):
        above[:], below[:] = 0, 0
        largest_below, smallest_above = -math.inf, math.inf
        for k in range(min(before.shape[1], asked)):
            y, told = before[j, before.shape[1] - 1 - k], answers[j * asked + k, 0]
            if told == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if told > 0:
                above[cell] += 1
                largest_below = max(largest_below, y)
            else:
                below[cell] += 1
                smallest_above = min(smallest_above, y)
        for k in range(after.shape[1]):
            y, told = after[j, k], answers[j * asked + k, k + 1]
            if told == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if told < 0:
                above[cell] += 1
            else:
                below[cell] += 1
        if weighed:
            out[j] = aligned(value[j], max(scale[j], 1e-9), above, below, chances)
        elif largest_below <= value[j] <= smallest_above:
            out[j] = value[j]
        elif largest_below == -math.inf:
            out[j] = smallest_above
        elif smallest_above == math.inf:
            out[j] = largest_below
        else:
            out[j] = 0.5 * (largest_below + smallest_above)
    return out
