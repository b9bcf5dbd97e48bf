"""Sensitivity compression: a step's rows as a distribution, which one user moves by a bounded part.

Whatever a user did in a step, the distribution moves by at most 2 in L1. If at most b rows of a
user enter a step and n0 public dummy rows are spread evenly over the bins, it moves by at most
2 b / (n0 + b): `privacy.sensitivity.distribution_change`.
"""

from __future__ import annotations

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.mechanisms.parts.synopses.pool import GRID, Naturals
from dpstream.records import Integers


def compressed(counts: Integers, *, dummy_rows: int) -> Naturals:
    """Counts as whole multiples of 1 / GRID, rounded down; nothing counted is evenly spread.

    Each is within 1 + 2^-20 of the exact one: the quotient has a relative error below 2^-50.

    >>> (4 * compressed(np.array([1, 3]), dummy_rows=0) / GRID).tolist()
    [1.0, 3.0]
    """
    total = int(counts.sum()) + dummy_rows
    if total == 0:
        return np.full(len(counts), GRID // len(counts), dtype=np.uint32)
    if total >= 1 << 53:
        raise InvalidInput(f"a step has {total} rows; float64 has exact counts below 2^53 only")
    shares = (counts + dummy_rows / len(counts)) / total
    return np.floor(shares * GRID).astype(np.uint32)
