"""Functions that never fall, such as the step of a time, over many times that are in order.

Logs are mostly written in the order of time. Then such a function is a staircase with few steps:
it is worked out at the two ends of each block, and within a block only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpstream.compiled import compiled
from dpstream.records import Integers

_BLOCK = 1 << 12
_FEW = 4 * _BLOCK


def stepwise(function: Callable[[Integers], Integers], times: Integers) -> Integers:
    """function(times), for a function that never falls where it is not negative.

    If it has one value only, that is not written out: the array has one item, many times.
    """
    if len(times) < _FEW or not rising(times):
        return function(times)
    starts = np.arange(0, len(times), _BLOCK)
    stops = np.append(starts[1:], len(times))
    ends = function(np.concatenate([times[starts], times[stops - 1]]))
    first, last = ends[: len(starts)], ends[len(starts) :]
    flat = (first == last) & (first >= 0)
    if flat.all() and (first == first[0]).all():
        return np.broadcast_to(np.int64(first[0]), times.shape)
    found = np.repeat(first, stops - starts)
    for block in np.flatnonzero(~flat):
        part = slice(starts[block], stops[block])
        found[part] = function(times[part])
    return found


def is_constant(column: Integers) -> bool:
    """Is it one item, many times?"""
    return column.strides[0] == 0


@compiled
def rising(times: Integers) -> bool:
    """Is no time earlier than the one before it?"""
    falls = 0
    for i in range(1, len(times)):
        falls += times[i] < times[i - 1]
    return falls == 0
