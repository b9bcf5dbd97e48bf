"""SMOOTH and SHRINK: what a model says of published figures, beside what was measured.

Both look at published values and their error bars alone, so they cost nothing. Their estimates are
biased and their error bars hold as far as the model does; what was measured stays beside them.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.records import Reals

_DRIFTS = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4, 1e6])
"""Tried variances of a level's change from one window to the next, in those of the noise."""
_JUMP = 4.0
"""Deviations from what was expected, beyond which a level jumps."""
_SAMPLED, _ROUNDS = 500, 20


def smooth(values: Reals, stddevs: Reals) -> tuple[Reals, Reals]:
    """Level of each key in the newest window, and its deviation; rows are windows, oldest first.

    Model: a level that takes a normal step from one window to the next, measured with the noise
    that was published. The variance of the step is averaged over, by how well each explains the
    windows of the key. NaN: not shown in that window; a key without a newest value has no level.

    >>> level, stddev = smooth(np.array([[10.0], [12.0], [11.0], [9.0]]), np.full((4, 1), 2.0))
    >>> level.round(1).tolist(), stddev.round(1).tolist()
    ([10.2], [1.3])
    """
    known = ~np.isnan(values)
    noise = np.where(known, stddevs, 1.0) ** 2
    with np.errstate(all="ignore"):
        drift = _DRIFTS[:, None] * (noise * known).sum(axis=0) / known.sum(axis=0)
    level = np.zeros_like(drift)
    variance = np.full_like(drift, np.inf)  # nothing is known before the first value
    fit = np.zeros_like(drift)
    for value, spread, seen in zip(values, noise, known, strict=True):
        variance = variance + drift
        off, total = value - level, variance + spread
        with np.errstate(all="ignore"):
            jump = off**2 > _JUMP**2 * total  # the level begins anew
            anew = jump | np.isinf(variance)
            gain = np.where(anew, 1.0, variance / total)
            fits = np.log(total) + np.minimum(off**2 / total, _JUMP**2)
            better = np.where(np.isinf(variance), 0.0, -fits / 2)
            left = np.where(anew, spread, variance * (1 - gain))
        level = np.where(seen, level + gain * off, level)
        fit = np.where(seen, fit + better, fit)
        variance = np.where(seen, left, variance)
    weight = np.exp(fit - fit.max(axis=0))
    weight /= weight.sum(axis=0)
    with np.errstate(all="ignore"):
        mean = (weight * level).sum(axis=0)
        spread = (weight * (variance + (level - mean) ** 2)).sum(axis=0)
    shown = known[-1] if len(known) else np.zeros(values.shape[1], bool)
    return np.where(shown, mean, np.nan), np.where(shown, np.sqrt(spread), np.nan)


def shrink(values: Reals, stddevs: Reals) -> tuple[Reals, Reals]:
    """The mean and the deviation of what each true value may be, given all of them.

    Model: true values are drawn from a mixture of normals around the values themselves, each as
    wide as the sqrt(n)-th value is far away (or the median deviation by sqrt(n), if that is more),
    with the likeliest weights (found by EM over at most 500 of the n values). What stands among
    many moves towards them; what stands alone stays.

    >>> made, _ = shrink(np.array([1.0, -2.0, 0.5, 90.0]), np.full(4, 2.0))
    >>> made.round(1).tolist()
    [0.8, -1.1, 0.5, 90.0]
    """
    mean, spread = np.full(len(values), np.nan), np.full(len(values), np.nan)
    known = np.flatnonzero(np.isfinite(values) & (stddevs > 0))
    mean[known], spread[known] = values[known], stddevs[known]
    if len(known) < 2:
        return mean, spread
    known = known[np.argsort(values[known], kind="stable")]
    few = known[np.unique(np.linspace(0, len(known) - 1, _SAMPLED).round().astype(np.int64))]
    points = values[few]
    far = np.sort(np.abs(points[:, None] - points), axis=1)
    least = np.median(stddevs[few]) / math.sqrt(len(points))  # of ties: counts are whole numbers
    widths = np.maximum(far[:, math.isqrt(len(points))], least)
    shares = np.full(len(points), 1 / len(points))
    close = _closeness(values[few], stddevs[few], points, widths)
    for _ in range(_ROUNDS):
        belongs = close * shares
        shares = (belongs / belongs.sum(axis=1, keepdims=True)).mean(axis=0)
    for rows in np.array_split(known, len(known) // _SAMPLED + 1):
        value, noise = values[rows, None], stddevs[rows, None]
        weight = _closeness(values[rows], stddevs[rows], points, widths) * shares
        weight /= weight.sum(axis=1, keepdims=True)
        pull = noise**2 / (noise**2 + widths**2)
        each = value + pull * (points - value)
        mean[rows] = (weight * each).sum(axis=1)
        square = (weight * (each**2 + (1 - pull) * noise**2)).sum(axis=1)
        spread[rows] = np.sqrt(np.maximum(square - mean[rows] ** 2, 0))
    return mean, spread


def _closeness(values: Reals, stddevs: Reals, points: Reals, widths: Reals) -> Reals:
    """The density of each value, up to a factor of its own, in each part of the mixture."""
    variance = stddevs[:, None] ** 2 + widths**2
    logs = -((values[:, None] - points) ** 2) / (2 * variance) - np.log(variance) / 2
    return np.asarray(np.exp(logs - logs.max(axis=1, keepdims=True)))
