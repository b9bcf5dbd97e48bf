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

_SQRT2 = math.sqrt(2.0)


def log_chances(scale: float) -> Reals:
    """[a, b]: log of the chance that a value in cell a, with noise, beats one in cell b."""
    cell = np.arange(CELLS) / CELLS
    d = cell[:, None] - cell[None, :]
    tail = np.log(0.5) - np.abs(d) / scale  # of the wrong answer
    chances: Reals = np.where(d >= 0, np.log1p(-np.exp(tail)), tail)
    return chances


@njit(cache=True, nogil=True, error_model="numpy")
def aligned(z: float, scale: float, above: Integers, below: Integers, chances: Reals) -> float:
    """The median of x: `above[b]` values of cell b were said to be smaller, `below[b]` larger."""
    weight, mass, at = np.zeros(CELLS), np.empty(CELLS), min(max(z, 0.0), 1.0)
    for b in range(CELLS):
        if above[b] == 0 and below[b] == 0:
            continue
        for a in range(CELLS):
            weight[a] += above[b] * chances[a, b] + below[b] * chances[b, a]
    top = -math.inf
    for a in range(CELLS):
        top = max(top, weight[a])
    total, low_density = 0.0, _density(0.0, at, scale)
    for a in range(CELLS):
        high_density = _density((a + 1) / CELLS, at, scale)
        weight[a] = math.exp(weight[a] - top)
        mass[a] = weight[a] * _between(a / CELLS, (a + 1) / CELLS, at, low_density, high_density)
        low_density = high_density
        total += mass[a]
    if total <= 0.0:
        return at
    left, a = 0.5 * total, 0
    while a < CELLS - 1 and left > mass[a]:
        left -= mass[a]
        a += 1
    first, low, high = a / CELLS, a / CELLS, (a + 1) / CELLS
    low_density = _density(first, at, scale)
    for _ in range(40):
        middle = 0.5 * (low + high)
        between = _between(first, middle, at, low_density, _density(middle, at, scale))
        if weight[a] * between < left:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@njit(cache=True, nogil=True, error_model="numpy")
def _density(x: float, z: float, scale: float) -> float:
    """exp(-|x - z| / scale)."""
    return math.exp((x - z if x <= z else z - x) / scale)


@njit(cache=True, nogil=True)
def _between(low: float, high: float, z: float, low_density: float, high_density: float) -> float:
    """Of exp(-|x - z| / scale) / scale between two numbers, from its `_density` at both."""
    if high <= z:
        return high_density - low_density
    if low >= z:
        return low_density - high_density
    return 2.0 - low_density - high_density


@njit(cache=True, nogil=True)
def differences(x: Integers, block: Integers, end: int, out: Integers) -> None:
    """The newest value less those before it, the newest first, bin by bin."""
    count = len(out) // len(x)
    for j in range(len(x)):
        for k in range(count):
            out[j * count + k] = x[j] - block[j, end - 1 - k]


@njit(cache=True, nogil=True)
def answered(told: Integers, bins: int, out: Integers) -> None:
    """1: larger, -1: smaller; in `out` every bin has room for as many as were ever asked."""
    count, room = len(told) // bins, len(out) // bins
    for j in range(bins):
        for k in range(count):
            out[j * room + k] = 1 if told[j * count + k] > 0 else -1


@njit(cache=True, nogil=True)
def align(
    row: int,
    values: Reals,
    spread: Reals,
    published: Reals,
    published_end: int,
    answers: Integers,
    first: int,
    chances: Reals,
    weighed: bool,
    out: Reals,
) -> None:
    """Where to put the value `row` of each bin, in shares of the range.

    `values` (steps x bins): what is known of it and of those after it; `spread`: the deviation.
    `published` (bins x columns, up to `published_end`): those before it. `answers`: its own are
    column `first`, then those of the values after it; rows are bins x "k + 1 steps before".
    """
    bins = len(out)
    asked = answers.shape[0] // bins
    above, below = np.empty(CELLS, np.int64), np.empty(CELLS, np.int64)
    for j in range(bins):
        for cell in range(CELLS):
            above[cell] = below[cell] = 0
        largest_below, smallest_above = -math.inf, math.inf
        for k in range(min(published_end, asked)):
            y, told = published[j, published_end - 1 - k], answers[j * asked + k, first]
            if told == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if told > 0:
                above[cell] += 1
                largest_below = max(largest_below, y)
            else:
                below[cell] += 1
                smallest_above = min(smallest_above, y)
        for k in range(len(values) - 1 - row):
            y, told = values[row + 1 + k, j], answers[j * asked + k, first + 1 + k]
            if told == 0:
                continue
            cell = min(max(int(y * CELLS), 0), CELLS - 1)
            if told < 0:
                above[cell] += 1
            else:
                below[cell] += 1
        value = values[row, j]
        if weighed:
            out[j] = aligned(value, max(spread[row, j] / _SQRT2, 1e-9), above, below, chances)
        elif largest_below <= value <= smallest_above:
            out[j] = value
        elif largest_below == -math.inf:
            out[j] = smallest_above
        elif smallest_above == math.inf:
            out[j] = largest_below
        else:
            out[j] = 0.5 * (largest_below + smallest_above)
