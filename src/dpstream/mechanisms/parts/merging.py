"""When may a value join a group? Thresholds of deviations, from public numbers.

Guarantee: public parameters only.

A group of n values with deviation dev = sum |c - mean|, published by its mean, costs an absolute
error of about dev and one noise; n values published alone cost n times the error s of one, which
is at most a quarter of the range (the middle of the range is free). So joining is worth it while
dev < (n - 1) s. What is seen is dev with noise; dev is at most about a sixth of the range for
each value. The threshold is where the median of what is possible passes (n - 1) s; where the noise
is far wider than that, it is infinite (always join) or minus infinity (never), and a test would
tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from dpstream.mechanisms.parts.flat_prior import decisive
from dpstream.records import Integers, Reals

_QUARTER, _SIXTH = 1 / 4, 1 / 6
_FAR = 1 << 60  # stands for infinity among grid steps


def worth_joining(
    longest: int, *, change: Fraction, noise: float, scale: Callable[[int], float]
) -> Reals:
    """For n = 0 to `longest` values together: the deviation, noise included, to stay below.

    `noise` is the scale of a published number's noise, `scale(n)` that of a test's.
    """
    width = float(change)
    alone = min(noise, _QUARTER * width)
    out = np.full(longest + 1, math.inf)
    for n in range(2, longest + 1):
        out[n] = decisive(scale(n), n * _SIXTH * width, (n - 1) * alone)
    return out


def on_deviation_grid(thresholds: Reals, factor: Reals | float) -> Integers:
    """Thresholds in grid steps, rounded up: "below" then means what it does for exact ones."""
    return np.clip(np.ceil(thresholds * factor), -_FAR, _FAR).astype(np.int64)
