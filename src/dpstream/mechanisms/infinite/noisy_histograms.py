"""What noisy histograms of some slots say of the distribution: a level that drifts, seen in noise.

Shares of a slot are the level's shares, plus what this slot has for itself, plus noise whose scale
is public. How much of either there is, and how fast the level drifts, is taken from the noisy
histograms, by maximum likelihood over a small grid: the answer is an average of all where the
stream is steady, and the newest where it moves. Nothing here reads data: it is a function of noisy
answers, and costs nothing.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np
from scipy.special import log_ndtr

from dpstream.mechanisms.infinite.synopsis_pool import even
from dpstream.records import Integers, Reals

KEPT: Final = 8
"""How many histograms are looked at, the newest ones."""

_DRIFTS: Final = (0.0, 0.3, 3.0, 30.0, 1000.0)
_OWN: Final = (0.0, 0.3, 3.0, 30.0)
_LEVELS: Final = tuple(10.0**power for power in range(7))
_GRID: Final = np.array(list(itertools.product(_DRIFTS, _OWN, _LEVELS))).T
"""Variances of a step of the level, of what a slot has for itself, and of the level at first.

Each as a multiple of that of the newest histogram's noise.
"""

_EVIDENCE: Final = 6.0  # nats, from which on something speaks against the uniform distribution
_LEAST_TOTAL: Final = 4.0  # standard deviations of a histogram's total, below which it says nothing


def distribution(histograms: Integers, scales: Reals) -> Reals:
    """The distribution after these histograms (one a row, oldest first) with noise of `scales`.

    The uniform one, where noise and the scatter of a sample explain all there is.

    >>> noisy = np.array([[900, 60, 40], [880, 70, 50]])
    >>> distribution(noisy, np.array([2.0, 2.0])).round(2).tolist()
    [0.89, 0.07, 0.05]
    >>> distribution(noisy, np.array([2000.0, 2000.0])).round(2).tolist()
    [0.33, 0.33, 0.33]
    """
    bins = histograms.shape[1]
    totals = histograms.sum(axis=1)
    heard = totals > _LEAST_TOTAL * math.sqrt(2 * bins) * scales
    if not heard.any():
        return even(bins)
    shares = histograms[heard] / totals[heard, None] - 1 / bins
    noise = 2 * (scales[heard] / totals[heard]) ** 2 + 1 / (bins * totals[heard])
    drift, own, spread = _GRID * noise[-1]
    if len(shares) == 1:  # one histogram does not tell its own part from the level's
        drift, own, spread = drift[: len(_LEVELS)], own[: len(_LEVELS)], spread[: len(_LEVELS)]
    likelihood, mean, variance = follow(shares, noise[:, None] + own, drift, spread)
    best = int(likelihood.argmax())
    if likelihood[best] <= _EVIDENCE + _log_likelihood(shares, noise):
        return even(bins)
    positive = _positive_mean(mean[best] + 1 / bins, float(variance[best]))
    normal: Reals = positive / positive.sum()
    return normal


def _log_likelihood(shares: Reals, noise: Reals) -> float:
    """Of the uniform distribution, but for a constant."""
    squares = (shares**2).sum(axis=1) / noise
    return float(-0.5 * (squares + shares.shape[1] * np.log(noise)).sum())


def follow(shares: Reals, noise: Reals, drift: Reals, spread: Reals) -> tuple[Reals, Reals, Reals]:
    """Kalman filters of a level, one for each column of `noise` and entry of `drift` and `spread`.

    Their log likelihoods but for a constant, the level's means (filters x bins) and variances.
    """
    filters, bins = len(drift), shares.shape[1]
    mean, variance, likelihood = np.zeros((filters, bins)), spread, np.zeros(filters)
    for number, (seen, own) in enumerate(zip(shares, noise, strict=True)):
        variance = variance + drift * (number > 0)
        total = variance + own
        error = seen - mean
        likelihood -= 0.5 * ((error**2).sum(axis=1) / total + bins * np.log(total))
        mean += (variance / total)[:, None] * error
        variance = variance * own / total
    return likelihood, mean, variance


def _positive_mean(mean: Reals, variance: float) -> Reals:
    """Of normals of this mean and variance, of which only positive values are possible."""
    deviation = math.sqrt(variance)
    z = mean / deviation
    tail: Reals = np.exp(-0.5 * z * z - log_ndtr(z)) / math.sqrt(2 * math.pi)
    return np.maximum(mean + deviation * tail, 0.0)
