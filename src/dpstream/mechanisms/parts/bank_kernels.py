"""The loops of the model bank: what one publication teaches every model of every bin.

Guarantee: post-processing; only released values are read.

Eight bins at a time, all their models in one array. Loops over models hold no branch and no call,
so that they run in SIMD lanes; the few models that need the exact update are gathered for it.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.laplace_filter import NEGLIGIBLE, updates
from dpstream.mechanisms.parts.vector_math import exp, log, sum_of
from dpstream.records import Reals

_SHARE = 0.02  # weight that returns to the prior at a publication
_TINY = 1e-8  # weights below this are left out of averages
_TOGETHER = 8  # bins whose models are worked on at once
_HALF_LOG = 0.5 * math.log(2.0 * math.pi)


@njit(cache=True, nogil=True, error_model="numpy")
def learn_all(
    z: Reals,
    scale: float,
    gap: float,
    drift: Reals,
    white: Reals,
    old_weight: Reals,
    old_mean: Reals,
    old_variance: Reals,
    weight: Reals,
    light: float,
) -> tuple[Reals, Reals, Reals, Reals, Reals, Reals, Reals, Reals]:
    """`weight` comes as the prior and leaves as the posterior; a bank's rest, a belief's parts.

    Models that weigh less than `light` learn as from Gaussian noise.
    """
    bins, size = weight.shape
    mean, variance = np.empty((bins, size)), np.empty((bins, size))
    pool, found = np.zeros(size), np.empty((5, bins))
    lanes = min(_TOGETHER, bins) * size
    moved, jitter = np.empty(lanes), np.empty(lanes)
    for i in range(lanes):
        moved[i], jitter[i] = drift[i % size] * gap, white[i % size]
    work, which = np.empty((12, lanes)), np.empty(lanes, np.int64)
    for first in range(0, bins, _TOGETHER):
        here = slice(first, min(first + _TOGETHER, bins))
        mine, mu, var = weight[here].ravel(), old_mean[here].ravel(), old_variance[here].ravel()
        old, new_mu, new_var = old_weight[here].ravel(), mean[here].ravel(), variance[here].ravel()
        for i in range(len(mine)):
            mine[i] = (1.0 - _SHARE) * old[i] + _SHARE * mine[i]
        _see(z[here], scale, mine, mu, var, moved, jitter, light, work, which)
        _weigh(size, mine, mu, new_mu, new_var, jitter, pool, work, found[:, here])
    pool /= bins
    return mean, variance, found[4], pool, found[0], found[1], found[2], found[3]


@njit(cache=True, nogil=True, error_model="numpy")
def _see(
    z: Reals,
    scale: float,
    weight: Reals,
    mean: Reals,
    variance: Reals,
    moved: Reals,
    jitter: Reals,
    light: float,
    work: Reals,
    which: Reals,
) -> None:
    """Each model's update by what was published: the first six rows of `work`."""
    before, total, away, log_density, seen, seen_variance = (
        work[0],
        work[1],
        work[2],
        work[3],
        work[4],
        work[5],
    )
    exact = work[7:]
    size, noise, widest = len(weight) // len(z), 2.0 * scale * scale, (NEGLIGIBLE * scale) ** 2
    for j in range(len(z)):
        away[j * size : (j + 1) * size] = z[j]
    for i in range(len(weight)):
        before[i] = variance[i] + moved[i]
        total[i] = before[i] + jitter[i]
        away[i] -= mean[i]
        wide = total[i] + noise
        narrow = 1.0 / wide
        log_density[i] = -0.5 * (away[i] * away[i] * narrow + log(wide)) - _HALF_LOG
        seen[i] = mean[i] + total[i] * narrow * away[i]
        seen_variance[i] = total[i] * narrow * noise
    heavy = np.int64(0)  # the constant 0 would be compiled for by itself
    for i in range(len(weight)):
        which[heavy] = i
        exact[0, heavy], exact[1, heavy] = away[i], total[i]
        heavy += (weight[i] >= light) & (total[i] <= widest)
    updates(exact, heavy, scale)
    for k in range(heavy):
        i = which[k]
        log_density[i], seen_variance[i] = exact[2, k], exact[4, k]
        seen[i] = mean[i] + exact[3, k]


@njit(cache=True, nogil=True, error_model="numpy")
def _weigh(
    size: int,
    weight: Reals,
    mean: Reals,
    new_mean: Reals,
    new_variance: Reals,
    jitter: Reals,
    pool: Reals,
    work: Reals,
    found: Reals,
) -> None:
    """The levels behind the counts, the models' weights, and what follows for each bin.

    Rows of `found`: count, its variance, level, variance of the models' levels, typical level.
    """
    before, total, log_density, seen, seen_variance = work[0], work[1], work[3], work[4], work[5]
    x_part, y_part = work[6], work[2]
    bins, lanes = len(weight) // size, len(weight)
    for j in range(bins):
        best = -math.inf
        for i in range(j * size, (j + 1) * size):
            best = max(best, log_density[i])
        for i in range(j * size, (j + 1) * size):
            log_density[i] -= best
    for i in range(lanes):
        gain = before[i] / total[i]
        new_variance[i] = before[i] * (1.0 - gain) + gain * gain * seen_variance[i]
        new_mean[i] = mean[i] + gain * (seen[i] - mean[i])
        weight[i] *= exp(log_density[i])
        before[i] = log(seen_variance[i] + 1e-12)
        total[i] = log(new_variance[i] + jitter[i] + 1e-12)
    for j in range(bins):
        x_part[j * size : (j + 1) * size] = 1.0 / sum_of(weight, j * size, size)
    for i in range(lanes):
        weight[i] *= x_part[i]
        x_part[i], y_part[i] = weight[i] * seen[i], weight[i] * new_mean[i]
        counted = weight[i] if weight[i] > _TINY else 0.0
        before[i] *= counted
        total[i] *= counted
    for j in range(bins):
        start = j * size
        for g in range(size):
            pool[g] += weight[start + g]
        found[0, j], found[2, j] = sum_of(x_part, start, size), sum_of(y_part, start, size)
        x_part[start : start + size] = found[0, j]
        y_part[start : start + size] = found[2, j]
    for i in range(lanes):
        x_part[i] = weight[i] * (seen[i] - x_part[i]) ** 2
        y_part[i] = weight[i] * (new_mean[i] - y_part[i]) ** 2
    for j in range(bins):
        start, level = j * size, found[2, j]
        found[1, j] = exp(sum_of(before, start, size)) + sum_of(x_part, start, size)
        found[3, j] = sum_of(y_part, start, size)
        sd = math.sqrt(exp(sum_of(total, start, size)) + found[3, j])
        found[4, j] = level if level >= sd else max(level, 0.0) + 0.5 * sd


@njit(cache=True, nogil=True, error_model="numpy")
def later(
    weight: Reals, variance: Reals, drift: Reals, white: Reals, after: float, out: Reals
) -> None:
    """The geometric mean over models of a count's variance, `after` steps from now."""
    terms = np.empty(weight.shape[1])
    for j in range(weight.shape[0]):
        for g in range(len(terms)):
            counted = weight[j, g] if weight[j, g] > _TINY else 0.0
            terms[g] = counted * log(variance[j, g] + white[g] + drift[g] * after + 1e-12)
        out[j] = exp(sum_of(terms, 0, len(terms)))
