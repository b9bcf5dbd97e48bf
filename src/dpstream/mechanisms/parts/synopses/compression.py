"""Sensitivity compression: a step's rows as a distribution, which one user moves by a bounded part.

Whatever a user did in a step, the distribution moves by at most 2 in L1. If at most b rows of a
user enter a step and n0 public dummy rows are spread evenly over the bins, it moves by at most
2 b / (n0 + b): `privacy.sensitivity.distribution_change`.
"""

from __future__ import annotations

from typing import Any

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


def bounded_counts(
    *, steps: Any, users: Any, bins: Any, slots: int, domain: int, rows_per_user: int
) -> Integers:
    """Rows to counts (slots x domain), at most `rows_per_user` of each user in each slot.

    `steps`, `users`, `bins`: one entry a row. Which rows are kept depends on a user's own rows
    alone: the first ones of each slot. Rows outside the public slots and domain are dropped.

    >>> bounded_counts(steps=[0, 0, 0, 1], users=["a", "a", "b", "a"], bins=[2, 0, 2, 1],
    ...                slots=2, domain=3, rows_per_user=1).tolist()
    [[0, 0, 2], [0, 1, 0]]
    """
    step, bin_ = np.asarray(steps, dtype=np.int64), np.asarray(bins, dtype=np.int64)
    _, user = np.unique(np.asarray(users), return_inverse=True)
    kept = (step >= 0) & (step < slots) & (bin_ >= 0) & (bin_ < domain)
    step, bin_, user = step[kept], bin_[kept], user[kept].astype(np.int64)
    order = np.lexsort((user, step))  # stable: a user's rows of a slot stay in their order
    step, bin_, user = step[order], bin_[order], user[order]
    fresh = np.ones(len(step), dtype=bool)
    fresh[1:] = (step[1:] != step[:-1]) | (user[1:] != user[:-1])
    starts = np.flatnonzero(fresh)
    rank = np.arange(len(step)) - np.repeat(starts, np.diff(np.append(starts, len(step))))
    few = rank < rows_per_user
    counts = np.zeros((slots, domain), dtype=np.int64)
    np.add.at(counts, (step[few], bin_[few]), 1)
    return counts
