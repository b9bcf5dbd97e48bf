"""From a belief about each count to the number that is published.

Guarantee: post-processing; only released values are read.

The number o minimises the expected |o - x| / max(x, 1)^gamma: gamma = 0 is the absolute error,
gamma = 1 the relative one. Bins well above their uncertainty have a Gaussian belief, which gamma
tilts a little downward. The others are many, often mostly empty, and share a prior over counts
from zero up that is estimated from all of them (empirical Bayes, a few EM steps).
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit
from dpstream.records import Reals

CELLS = 41
"""Cells of the shared prior: the point 0, then multiples of a quarter of the typical deviation."""

_WIDTH = 0.25
_STRONG = 8.0  # deviations above zero from which a bin stands for itself
_EMPTY = 0.03  # prior mass of an empty bin before any is seen
_PRIOR_BINS = 4.0  # how many bins the flat prior counts for
_ROUNDS = 5
_LEAST_SD = 0.1


def flat_prior() -> Reals:
    """Where the shared prior starts: even, with a little mass on zero."""
    flat = np.full(CELLS, (1.0 - _EMPTY) / (CELLS - 0.5))
    flat[0] = _EMPTY + 0.5 * flat[1]
    return flat


_FLAT = flat_prior()


def estimate(mean: Reals, variance: Reals, prior: Reals, *, gamma: float) -> tuple[Reals, Reals]:
    """Whole, non-negative counts to publish, and the shared prior for the next time.

    >>> estimate(np.array([900.0]), np.array([100.0]), flat_prior(), gamma=0.5)[0]
    array([900.])
    """
    new = prior.copy()
    out, weak = _estimate(mean, variance, gamma, _FLAT, new)
    return out, new if weak else prior


@njit(cache=True, nogil=True)
def _weak(mean: Reals, sd: Reals, typical: float, gamma: float, flat: Reals, prior: Reals) -> Reals:
    """Weighted posterior medians; `prior` is updated in place."""
    bins = len(mean)
    likelihood, out = np.empty((bins, CELLS)), np.zeros(bins)
    step = _WIDTH * typical
    for j in range(bins):
        s = min(max(sd[j], 0.25 * typical), 4.0 * typical)
        m = max(mean[j], -3.0 * s)
        nearest = math.inf
        for i in range(CELLS):
            likelihood[j, i] = 0.5 * ((m - i * step) / s) ** 2
            nearest = min(nearest, likelihood[j, i])
        for i in range(CELLS):
            likelihood[j, i] = math.exp(nearest - likelihood[j, i])
    if bins == 1:
        prior[:] = flat
    else:
        for _ in range(_ROUNDS):
            new = _PRIOR_BINS * flat
            for j in range(bins):
                posterior = prior * likelihood[j]
                new += posterior / posterior.sum()
            prior[:] = new / (_PRIOR_BINS + bins)
    counts_for = np.empty(CELLS)
    for i in range(CELLS):
        counts_for[i] = prior[i] / max(i * step, 1.0) ** gamma
    for j in range(bins):
        for i in range(CELLS):
            likelihood[j, i] *= counts_for[i]
        middle, below, i = 0.5 * likelihood[j].sum(), 0.0, 0
        while i < CELLS - 1 and below + likelihood[j, i] < middle:
            below += likelihood[j, i]
            i += 1
        if i > 0:
            inside = (middle - below) / max(likelihood[j, i], 1e-300)
            out[j] = (i - 0.5 + inside) * step
    return out


@njit(cache=True, nogil=True)
def _estimate(
    mean: Reals, variance: Reals, gamma: float, flat: Reals, prior: Reals
) -> tuple[Reals, bool]:
    """The numbers to publish, and whether any bin is weak; then `prior` is updated in place."""
    sd = np.sqrt(np.maximum(variance, _LEAST_SD**2))
    out = np.maximum(mean - gamma * variance / np.maximum(mean, 1.0), 0.0)
    weak = mean < _STRONG * sd
    some = bool(weak.any())
    if some:
        typical = np.median(sd[weak])
        weak &= mean < _STRONG * typical  # within the cells
        out[weak] = _weak(mean[weak], sd[weak], typical, gamma, flat, prior)
    return np.rint(out), some
