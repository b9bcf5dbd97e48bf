"""From rows with users to counts per step, at most so many rows of each user in a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.mechanisms.base import whole
from dpstream.records import Integers


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
    most = whole(rows_per_user, "rows_per_user", at_least=1)
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
    few = rank < most
    counts = np.zeros((slots, domain), dtype=np.int64)
    np.add.at(counts, (step[few], bin_[few]), 1)
    return counts
