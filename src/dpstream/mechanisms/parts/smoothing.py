"""Noisy values of one group, taken together.

Guarantee: post-processing; only noisy values and group sizes, which the tests have made public,
are read.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.history import History
from dpstream.records import Integers, Reals

Smoother = Literal["median", "average", "james_stein"]

_SHORT = 24  # values that are sorted faster than selected from


def check_smoother(smoother: str) -> None:
    """Refuse an unknown name."""
    if smoother not in get_args(Smoother):
        raise InvalidParameter(
            f"smoother must be one of {', '.join(get_args(Smoother))}; got {smoother!r}"
        )


def smooth(noisy: History, size: Integers, smoother: Smoother) -> Reals:
    """The newest value of every bin, from the last `size` of that bin (its group).

    "james_stein" shrinks the newest value z towards the average: (z - average) / size + average.

    >>> noisy = History.of(bins=1, longest=3, dtype=np.float64)
    >>> for z in (1.0, 2.0, 9.0):
    ...     noisy = noisy.append(np.array([z]))
    >>> three = np.array([3])
    >>> [float(smooth(noisy, three, how)[0]) for how in ("median", "average", "james_stein")]
    [2.0, 4.0, 5.666666666666667]
    """
    kernel = _medians if smoother == "median" else _averages
    smoothed: Reals = kernel(noisy.block, noisy.end, size)
    if smoother == "james_stein":
        smoothed += (noisy.block[:, noisy.end - 1] - smoothed) / size
    return smoothed


@njit(cache=True, nogil=True)
def _medians(block: Reals, end: int, size: Integers) -> Reals:
    out, ordered = np.empty(len(size)), np.empty(_SHORT)
    for j in range(len(size)):
        n = size[j]
        if n > _SHORT:
            out[j] = np.median(block[j, end - n : end])
            continue
        for i in range(n):  # most groups are short, and soon sorted
            value, at = block[j, end - n + i], i
            while at > 0 and ordered[at - 1] > value:
                ordered[at] = ordered[at - 1]
                at -= 1
            ordered[at] = value
        out[j] = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return out


@njit(cache=True, nogil=True)
def _averages(block: Reals, end: int, size: Integers) -> Reals:
    out = np.empty(len(size))
    for j in range(len(size)):
        total = 0.0
        for i in range(end - size[j], end):
            total += block[j, i]
        out[j] = total / size[j]
    return out
