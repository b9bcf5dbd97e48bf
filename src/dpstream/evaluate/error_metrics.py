"""How far a released stream is from the true one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.records import Reals

Numbers = npt.NDArray[Any]

_QUERIES = 1_000
_QUERY_SEED = 1


def absolute_errors(released: Numbers, truth: Numbers) -> Reals:
    """Mean absolute error over the bins, by step; its mean over the steps is the MAE.

    >>> absolute_errors(np.array([[3, 0], [5, 5]]), np.array([[1, 0], [4, 8]])).tolist()
    [1.0, 2.0]
    """
    errors: Reals = np.abs(released - truth).mean(axis=1, dtype=np.float64)
    return errors


def relative_errors(released: Numbers, truth: Numbers) -> Reals:
    """Mean of |o - x| / max(x, 1) over the bins, by step; its mean over the steps is the MRE.

    >>> relative_errors(np.array([[3, 1], [5, 5]]), np.array([[1, 0], [4, 10]])).tolist()
    [1.5, 0.375]
    """
    errors: Reals = (np.abs(released - truth) / np.maximum(truth, 1)).mean(axis=1)
    return errors


def range_error(released: Numbers, truth: Numbers) -> float:
    """Mean relative error of range queries: how many steps have a value in [a, b)?

    1,000 ranges with a < b up to the largest true value, the same for every mechanism; an answer
    of 0 counts as 1 in the denominator.

    >>> range_error(np.array([[0], [0], [-9], [99]]), np.zeros((4, 1)))
    0.5
    """
    domain = int(truth.max()) + 1
    ends = np.random.default_rng(_QUERY_SEED).integers(0, domain, (_QUERIES, 2))
    low, high = ends.min(axis=1), ends.max(axis=1) + 1
    right, given = (_counts(values, low, high) for values in (truth, released))
    return float((np.abs(given - right) / np.maximum(right, 1)).mean())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; NaN where there are too few values.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        return math.nan, math.nan
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread / math.sqrt(len(values))


def _counts(values: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """How many values lie in each [low, high)."""
    ordered = np.sort(values.ravel())
    return np.searchsorted(ordered, high) - np.searchsorted(ordered, low)
