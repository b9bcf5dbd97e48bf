"""A smooth histogram from a noisy one: how many units have each size, the rare large ones too.

What bounds leave out is decided by few units with many rows, each bin of which has less than its
noise. To add such bins up as they are is noise times the largest size; to drop them is to say that
nothing is left out. So a density is fitted whose logarithm bends as little as possible over the
logarithm of the size, downwards easily and upwards hardly: power laws, log-normal and geometric
laws are close to that. Where bins have many units, they alone decide.

All of it is post-processing of what was published.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from dpstream.records import Reals

_DOWN, _UP = 0.3, 10.0  # weights of a bend by 1, in standard deviations
_SEEN = 2.0  # standard deviations above which a bin has units for sure, or nearly
_FARTHEST = 40.0  # of a logarithm


@dataclass(frozen=True, kw_only=True)
class SizeDistribution:
    """How many units have each size, in increasing order of sizes."""

    sizes: Reals
    units: Reals

    @property
    def total(self) -> float:
        """The number of units."""
        return float(self.units.sum())

    @property
    def sum(self) -> float:
        """All sizes together."""
        return float(self.units @ self.sizes)

    def kept(self, most: float) -> float:
        """The share of all sizes together that a bound of `most` each leaves.

        >>> SizeDistribution(sizes=np.array([1.0, 4.0]), units=np.array([6.0, 1.0])).kept(2)
        0.8
        """
        return float(self.units @ np.minimum(self.sizes, most)) / self.sum if self.sum else 1.0

    def mean(self, most: float = np.inf) -> float:
        """The mean of sizes, each cut to `most`; 1 where there is nobody."""
        return float(self.units @ np.minimum(self.sizes, most)) / self.total if self.total else 1.0

    def quantile(self, share: float) -> float:
        """The least size that at least this share of the units does not exceed."""
        if not self.total:
            return float(self.sizes[0])
        place = int(np.searchsorted(np.cumsum(self.units), share * self.total * (1 - 1e-12)))
        return float(self.sizes[min(place, len(self.sizes) - 1)])


def smooth_histogram(
    bins: Reals, *, sizes: Reals, widths: Reals, stddev: float, rare: float = 3.0
) -> SizeDistribution:
    """The distribution behind noisy `bins`, whose middles are `sizes`; exact ones stay as they are.

    `rare`: how little sizes that nobody sees may add up to, one in so many of what is seen.

    >>> noisy = np.array([900.0, 230.0, 110.0, 45.0, 50.0, 8.0, -20.0, 11.0])
    >>> sizes = np.arange(1.0, 9.0)
    >>> found = smooth_histogram(noisy, sizes=sizes, widths=np.ones(8), stddev=15.0)
    >>> bool((np.diff(found.units) < 0).all()), 1200 < found.total < 1400
    (True, True)
    """
    if not stddev or not (bins > _SEEN * stddev).any():
        return SizeDistribution(sizes=sizes, units=np.maximum(bins, 0.0) * (stddev == 0))
    bends = _second_differences(np.log(sizes))
    seen = _seen_run(bins, stddev)
    known = float(bins[seen] @ sizes[seen])
    cost = np.sqrt(2 * rare * sizes / known)

    def residuals(logs: Reals) -> Reals:
        units, bend = _units(logs, widths), bends @ logs
        weights = np.where(bend > 0, _UP, _DOWN)
        return np.concatenate([(bins - units) / stddev, weights * bend, cost * np.sqrt(units)])

    def slopes(logs: Reals) -> Reals:
        units, bend = _units(logs, widths), bends @ logs
        weights = np.where(bend > 0, _UP, _DOWN)
        by_bin = np.diag(-units / stddev), weights[:, None] * bends
        return np.vstack([*by_bin, np.diag(cost * np.sqrt(units) / 2)])

    start = np.log(np.maximum(bins, stddev / 3) / widths)
    fit = least_squares(residuals, start, jac=slopes, method="lm", max_nfev=200)
    return SizeDistribution(sizes=sizes, units=_units(fit.x, widths))


def _seen_run(bins: Reals, stddev: float) -> slice:
    """The largest bin, and those beside it that are seen without a gap.

    One in fifty empty bins stands out of its noise; of a large size, it would count for everything.
    """
    top, low = int(np.argmax(bins)), bins <= _SEEN * stddev
    before, after = np.flatnonzero(low[:top]), np.flatnonzero(low[top:])
    end = top + int(after[0]) if len(after) else len(bins)
    return slice(int(before[-1]) + 1 if len(before) else 0, end)


def _units(logs: Reals, widths: Reals) -> Reals:
    return np.exp(np.clip(logs, -_FARTHEST, _FARTHEST)) * widths


def _second_differences(places: Reals) -> Reals:
    """A matrix: by how much the slope of a function changes at each inner place."""
    steps, inner = np.diff(places), np.arange(len(places) - 2)
    matrix = np.zeros((len(inner), len(places)))
    matrix[inner, inner], matrix[inner, inner + 2] = 1 / steps[:-1], 1 / steps[1:]
    matrix[inner, inner + 1] = -1 / steps[:-1] - 1 / steps[1:]
    return matrix
