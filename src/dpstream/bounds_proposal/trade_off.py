"""Bias against noise: what each bound leaves out, and what keeping more costs.

All of it reads histograms and public numbers: post-processing. A share of a group's rows is left
out by the bounds (bias), and noise grows with them. For a group of a given size the error of its
count, relative to that size, is

    sqrt(left out^2 + (noise / size)^2)

and the bounds with the least error are proposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dpstream.bounds_proposal.histograms import COUNTS, SIZES
from dpstream.records import Integers, Reals

_SURE: Final = 3.0  # standard deviations above which a bin is taken to have units in it


@dataclass(frozen=True, kw_only=True)
class SizeDistribution:
    """A distribution over sizes, in increasing order, from a histogram."""

    sizes: Reals
    units: Reals

    @property
    def total(self) -> float:
        """All units."""
        return float(self.units.sum())

    def kept(self, most: float) -> float:
        """The share of all sizes together that a bound of `most` each leaves."""
        whole = float(self.units @ self.sizes)
        return float(self.units @ np.minimum(self.sizes, most)) / whole if whole else 1.0

    def quantile(self, share: float) -> float:
        """The least size that holds so large a share of the units."""
        if not self.total:
            return float(self.sizes[0])
        place = int(np.searchsorted(np.cumsum(self.units), share * self.total * (1 - 1e-12)))
        return float(self.sizes[min(place, len(self.sizes) - 1)])


def size_distribution(bins: Reals, sizes: Reals | Integers, stddev: float) -> SizeDistribution:
    """A histogram without the noise of its empty bins.

    From the largest size down, bins are pooled until a pool has more than three standard
    deviations of its noise: noise of a few units in bins of thousands would drown everything else.
    A pool counts at the size where it ends.

    >>> noisy, sizes = np.array([90.0, -2.0, 30.0, 3.0]), np.array([1, 2, 3, 4])
    >>> size_distribution(noisy, sizes, 3.0).units.tolist()
    [88.0, 0.0, 33.0, 0.0]
    """
    units, pool, pooled = np.zeros(len(bins)), 0.0, 0
    for place in range(len(bins) - 1, -1, -1):
        pool += float(bins[place])
        pooled += 1
        if pool > _SURE * stddev * math.sqrt(pooled) and pool > 0:
            units[place], pool, pooled = pool, 0.0, 0
    return SizeDistribution(sizes=np.asarray(sizes, np.float64), units=units)


def counts(bins: Reals, stddev: float) -> SizeDistribution:
    """Of a histogram of counts; a bin stands for the middle of what it holds."""
    below = np.concatenate([[0], COUNTS[:-1]])
    return size_distribution(bins, (below + 1 + COUNTS) / 2, stddev)


@dataclass(frozen=True, kw_only=True)
class ValueSigns:
    """Sizes of values, and whether enough units have negative and positive ones."""

    sizes: SizeDistribution
    negative: bool
    positive: bool


def values(bins: Reals, stddev: float) -> ValueSigns:
    """Of a histogram of values: sizes of both signs together, zeros left out."""
    zero = len(SIZES)
    below, above = bins[:zero][::-1], bins[zero + 1 :]
    sure = _SURE * stddev * math.sqrt(zero)
    middles = np.concatenate([[SIZES[0]], np.sqrt(SIZES[1:] * SIZES[:-1])])
    return ValueSigns(
        sizes=size_distribution(below + above, middles, stddev * math.sqrt(2)),
        negative=bool(below.sum() > sure),
        positive=bool(above.sum() > sure),
    )


def error(left_out: float, noise: float, size: float) -> float:
    """Of a group's count, relative to its size."""
    return math.hypot(left_out, noise / size)


def candidates(found: SizeDistribution, most: int = 4096) -> list[int]:
    """Counts of the grid worth comparing: up to the largest that units have."""
    largest = float(found.sizes[found.units > 0].max(initial=1.0))
    enough = [int(count) for count in COUNTS if count <= most]
    return [count for count in enough if count <= 1.2 * largest] or enough[:1]


def best(choices: Sequence[tuple[int, ...]], errors: Sequence[float]) -> tuple[int, ...]:
    """The choice of least error; the smaller one where they are equal."""
    return min(zip(errors, choices, strict=True))[1]
