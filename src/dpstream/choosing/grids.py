"""Public grids: where a unit's count or value may fall. They never depend on the data."""

from __future__ import annotations

from typing import Final

import numpy as np

from dpstream.records import Integers, Reals

_FINE: Final = 16  # counts up to here have a bin each
_PER_OCTAVE: Final = 2
_OCTAVES: Final = 12  # beyond 16; larger counts fall into the last bin
_DECADES: Final = range(-3, 12)


def _counts() -> Integers:
    wide = _FINE * 2 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.concatenate([np.arange(1, _FINE + 1), np.round(wide).astype(np.int64)])


COUNTS: Final[Integers] = _counts()
"""Upper edges of the bins of counts: 1 to 16, then two per octave up to 65,536."""

SIZES: Final[Reals] = np.array([float(f"{m}e{d}") for d in _DECADES for m in (1, 2, 5)])
"""Sizes that clamps may have: 1, 2 and 5 times a power of ten, 0.001 to 5 * 10^11."""


def count_bins(counts: Integers) -> Integers:
    """The bin of each count: that of the least upper edge that holds it.

    >>> COUNTS[count_bins(np.array([1, 16, 17, 20, 10**9]))].tolist()
    [1, 16, 23, 23, 65536]
    """
    found: Integers = np.searchsorted(COUNTS, counts)
    return np.minimum(found, len(COUNTS) - 1)


def value_bins(values: Reals) -> Integers:
    """Bins from the most negative size over 0 (the middle one) to the largest.

    >>> value_bins(np.array([-1.5, 0.0, 2.0, 1e300])).tolist()
    [34, 45, 56, 90]
    """
    size = np.minimum(np.searchsorted(SIZES, np.abs(values)), len(SIZES) - 1)
    zero = len(SIZES)
    found: Integers = np.where(values == 0, zero, zero + np.sign(values) * (size + 1))
    return found.astype(np.int64)
