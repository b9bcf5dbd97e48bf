"""Score bounds at which values may be truncated: less noise against more bias.

Guarantee: one value moves every score by at most `truncation_change`; everything else is public.

Truncating at tau saves, for each of m values, `saved` (hi - tau) of error from noise, and costs
max(v - tau, 0) for a value v. Of each value (v - lo)/2 is added to all scores alike, which changes
no difference between them and halves what one value can move: by half of the range, up or down,
instead of by the whole range one way. The exponential mechanism then chooses as well as if it were
told that all scores move one way.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from dpstream.records import Integers


def candidates(lo: int, hi: int, count: int) -> Integers:
    """Equally spaced bounds above `lo` up to `hi`, on the grid, without repetition."""
    return np.unique(lo + np.maximum(1, np.arange(1, count + 1) * (hi - lo) // count))


def scores(values: Integers, bounds: Integers, lo: int, hi: int, saved: Fraction) -> Integers:
    """Twice the score of every bound, in grid steps; the more the better.

    >>> scores(np.array([2, 3, 10]), np.array([5, 10]), 0, 10, Fraction(0)).tolist()
    [5, 15]
    >>> scores(np.array([2, 3, 10]), np.array([5, 10]), 0, 10, Fraction(1)).tolist()
    [35, 15]
    """
    above = np.maximum(values[:, None] - bounds[None, :], 0).sum(axis=0)
    both = int((values - lo).sum()) - 2 * above
    saving = [int(2 * saved * len(values) * (hi - int(b))) for b in bounds]
    total: Integers = both + np.array(saving, np.int64)
    return total


def kept_back(labels: Integers, every: int) -> Integers:
    """0 for every `every`-th value of each group, in the order of the steps; 1 for the others.

    >>> kept_back(np.array([[0], [0], [7], [0], [7], [0]]), 2)[:, 0].tolist()
    [1, 0, 1, 1, 0, 0]
    """
    keep = np.ones_like(labels)
    for j in range(labels.shape[1]):
        for label in np.unique(labels[:, j]):
            keep[np.flatnonzero(labels[:, j] == label)[every - 1 :: every], j] = 0
    return keep


def pairs_of(options: Any) -> tuple[tuple[str, Any], ...]:
    """(name, value) pairs; "name=value" texts are taken too."""
    pairs = []
    for option in (options,) if isinstance(options, str) else options:
        name, value = option.split("=", 1) if isinstance(option, str) else option
        if isinstance(value, str):
            value = int(value) if value.isdigit() else value
            value = {"true": True, "false": False}.get(str(value).lower(), value)
        pairs.append((name, value))
    return tuple(pairs)
