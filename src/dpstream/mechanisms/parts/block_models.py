"""Many simple models of a series in [0, 1], and how well each block length would serve them.

Guarantee: public numbers only.

Model g says: level_t wanders around the middle of the range with steps of variance drift_g, pulled
back just so much that it fills the range in the long run (variance 1/12, that of a uniform number);
x_t = level_t + N(0, white_g). Of a block of b steps the mean is seen, with noise of scale
1 / (epsilon b).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpstream.compiled import njit
from dpstream.records import Integers, Reals

SPREAD = 1.0 / 12.0
"""Variance of a uniform number in [0, 1]: what is known before anything is seen."""

_CENTRE, _WIDTH = -1.6, 0.5  # of log10 of the drift's deviation per step, before anything is seen
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # blocks that a delay is cut into
_SETTLED = 60  # rounds after which a filter's variance no longer moves


@lru_cache(maxsize=1)
def models() -> tuple[Reals, Reals, Reals]:
    """Variances of drift and white noise of every model, and its weight before it is tried."""
    drift_sd, white_sd = 10.0 ** np.arange(-4.0, -0.4, 0.5), np.array([0.0, 0.03, 0.1, 0.25])
    prior = np.exp(-0.5 * ((np.log10(drift_sd) - _CENTRE) / _WIDTH) ** 2)
    weight = np.repeat(prior / prior.sum() / len(white_sd), len(white_sd))
    drift, white = np.repeat(drift_sd**2, len(white_sd)), np.tile(white_sd**2, len(drift_sd))
    return drift, white, weight


@lru_cache(maxsize=64)
def kept_of_all(steps: float) -> Reals:
    """How much every model keeps of a level's distance from the middle after some steps."""
    drift, _, _ = models()
    return np.array([kept(float(one), steps) for one in drift])


def lengths(delay: int) -> Integers:
    """Block lengths to choose from, the longest first."""
    found = {max(1, delay // part) for part in _PARTS} | {1}
    return np.array(sorted(found, reverse=True))


@lru_cache(maxsize=64)
def expected_errors(delay: int, epsilon: float) -> Reals:
    """Standard deviation of a published value, lengths x models, once a filter has settled."""
    drift, white, _ = models()
    out: Reals = _errors(lengths(delay), delay, epsilon, drift, white)
    return out


@njit(cache=True, nogil=True)
def kept(drift: float, steps: float) -> float:
    """How much of a level's distance from the middle is left after some steps."""
    return float(max(1.0 - drift / SPREAD, 0.0) ** (0.5 * steps))


@njit(cache=True, nogil=True)
def _errors(length: Integers, delay: int, epsilon: float, drift: Reals, white: Reals) -> Reals:
    out = np.empty((len(length), len(drift)))
    for i in range(len(length)):
        b = length[i]
        ahead = delay // b - 1  # blocks that are seen before the first of them is published
        noise = 2.0 / (epsilon * b) ** 2
        for g in range(len(drift)):
            phi, seen = kept(drift[g], b), noise + white[g] / b
            after = SPREAD
            for _ in range(_SETTLED):
                before = phi * phi * after + (1.0 - phi * phi) * SPREAD
                after = before * seen / (before + seen)
            smooth = after
            for _ in range(min(ahead, _SETTLED)):
                before = phi * phi * after + (1.0 - phi * phi) * SPREAD
                gain = phi * after / before
                smooth = after + gain * gain * (smooth - before)
            inside = min(drift[g] * b / (6.0 if ahead < 1 else 12.0), SPREAD)
            # the block's own share of white noise is partly seen, the rest is not
            hidden = white[g] * (1.0 - white[g] / b / seen / b)
            out[i, g] = math.sqrt(smooth + inside + hidden)
    return out
