"""Many simple models of a count, side by side, weighted by how well each predicted the releases.

Guarantee: post-processing; only released values are read.

Model g says: level_t = level_{t-1} + N(0, drift_g), x_t = level_t + N(0, white_g). Each bin keeps,
per model, a Gaussian belief about its level and a weight. After a publication a small share of the
weight returns to a prior that is relative to the bin's level and half pooled over the bins, so
that a stream may change its nature.

The state is three float64 per bin and model: at w = 120, 3.2 kB per bin with the full grid of 135
models, 1.3 kB with the thin one of 54.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.w_event.pacer_math import NEGLIGIBLE, exp, log, sum_of, updates
from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

FULL_BINS = 300
"""Up to here every bin has the full grid; beyond it a thin one, three times smaller."""

_STILL = 0.2  # prior weight of the stillest model
_NO_WHITE = 0.5  # prior weight of no white noise
_DRIFT = (math.log(0.03), 1.8)  # log(drift sd / level): centre, spread
_WHITE = (math.log(0.05), 1.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Models:
    """The public grid: every drift variance with every white variance, row by row."""

    drift: Reals
    white: Reals
    log_drift_sd: Reals  # one per row of the grid
    log_white_sd: Reals  # one per column; minus infinity first

    @property
    def size(self) -> int:
        """Number of models."""
        return len(self.drift)


@lru_cache(maxsize=64)
def models(epsilon: float, window: int, *, thin: bool) -> Models:
    """Standard deviations from a fraction of 1/epsilon to far beyond the noise of w releases.

    The few huge ones let a filter follow jumps at once.
    """
    unit = 1.0 / epsilon
    drift_ratio, white_ratio = (9.0, 16.0) if thin else (3.0, 4.0)
    drift = [*_geometric(unit / 729.0, 4.0 * window * unit, drift_ratio)]
    drift += [unit * window * jump for jump in (32.0, 256.0, 4096.0)]
    white = [0.0, *_geometric(unit / 4.0, 4.0 * window * unit, white_ratio)]
    white += [unit * window * jump for jump in (32.0, 512.0)]
    with np.errstate(divide="ignore"):
        return Models(
            drift=np.repeat(np.square(drift), len(white)),
            white=np.tile(np.square(white), len(drift)),
            log_drift_sd=np.log(drift),
            log_white_sd=np.log(white),
        )


def _geometric(first: float, last: float, ratio: float) -> list[float]:
    count = math.floor(math.log(last / first) / math.log(ratio) + 1e-9) + 1
    return [first * ratio**i for i in range(count)]


@njit(cache=True, nogil=True, error_model="numpy")
def priors(
    level: Reals, drift: Reals, white: Reals, pool: Reals, pooled: float, out: Reals
) -> None:
    """Weights that models have before they are tried: near the usual ratios to the bin's level."""
    n_drift, n_white = len(drift), len(white)
    near = np.empty(n_drift + n_white)
    centre, spread = np.empty(n_drift + n_white), np.empty(n_drift + n_white)
    for i in range(n_drift):
        centre[i], spread[i] = drift[i] - _DRIFT[0], _DRIFT[1]
    for i in range(n_white):
        centre[n_drift + i], spread[n_drift + i] = white[i] - _WHITE[0], _WHITE[1]
    spacing = white[2] - white[1]  # the point mass at no white noise, against a density
    no_white = _NO_WHITE * math.sqrt(2.0 * math.pi) * _WHITE[1] / spacing
    for j in range(len(level)):
        log_level = log(max(level[j], 1.0))
        for i in range(n_drift + n_white):
            near[i] = exp(-0.5 * ((centre[i] - log_level) / spread[i]) ** 2)
        near[n_drift] = no_white
        for i in range(n_drift + 1, n_drift + n_white):
            near[i] *= 1.0 - _NO_WHITE
        by_drift = by_white = 0.0
        for i in range(n_drift):
            by_drift += near[i]
        for i in range(n_drift, n_drift + n_white):
            by_white += near[i]
        own = (1.0 - pooled) * (1.0 - _STILL) / (by_drift * by_white)
        row = out[j]
        for a in range(n_drift):
            common = own * near[a]
            for b in range(n_white):
                row[a * n_white + b] = common * near[n_drift + b]
        row[0] += (1.0 - pooled) * _STILL
        for g in range(n_drift * n_white):
            row[g] += pooled * pool[g]


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

    Eight bins at a time, all their models in one array. Loops over models hold no branch and no
    call, so that they run in SIMD lanes; the few models that need the exact update are gathered for
    it. Models that weigh less than `light` learn as from Gaussian noise.
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
    before, total, away = work[0], work[1], work[2]
    log_density, seen, seen_variance = work[3], work[4], work[5]
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


_POOLED = 0.5  # part of the prior that comes from the other bins
_LIGHT = 1e-3  # with many bins, weights below it learn as from Gaussian noise, which is faster


@storable("model bank")
@dataclass(frozen=True, kw_only=True, eq=False)
class Bank:
    """Per bin and model: weight, mean and variance of the level; per bin: a typical level."""

    weight: Reals  # bins x models
    mean: Reals
    variance: Reals
    level: Reals  # bins; what "relative" refers to, kept above the uncertainty
    pool: Reals  # models; mean weight over bins


@dataclass(frozen=True, kw_only=True, eq=False)
class Belief:
    """What the bank thinks of each bin: the count just published, and the level behind it."""

    count: Reals
    count_variance: Reals
    level: Reals
    disagreement: Reals  # variance of the models' means of the level


def first_belief(z: Reals, scale: float, grid: Models) -> tuple[Bank, Belief]:
    """After the first publication: every model believes what was published."""
    bins, size = len(z), grid.size
    level = np.maximum(z, 0.5 * scale)
    weight, none = np.empty((bins, size)), np.zeros(size)
    priors(level, grid.log_drift_sd, grid.log_white_sd, none, 0.0, weight)
    noise = np.full(bins, 2.0 * scale * scale)
    bank = Bank(
        weight=weight,
        mean=np.repeat(z[:, None], size, axis=1),
        variance=np.full((bins, size), 2.0 * scale * scale),
        level=level,
        pool=weight.mean(axis=0),
    )
    return bank, Belief(count=z, count_variance=noise, level=z, disagreement=np.zeros(bins))


def learn(bank: Bank, z: Reals, scale: float, gap: int, grid: Models) -> tuple[Bank, Belief]:
    """After another publication, `gap` steps later."""
    pooled = _POOLED if len(z) > 1 else 0.0
    weight = np.empty_like(bank.weight)
    priors(bank.level, grid.log_drift_sd, grid.log_white_sd, bank.pool, pooled, weight)
    mean, variance, level, pool, count, count_variance, level_mean, disagreement = learn_all(
        z,
        scale,
        float(gap),
        grid.drift,
        grid.white,
        bank.weight,
        bank.mean,
        bank.variance,
        weight,
        _LIGHT if len(z) > FULL_BINS else 0.0,
    )
    return Bank(weight=weight, mean=mean, variance=variance, level=level, pool=pool), Belief(
        count=count, count_variance=count_variance, level=level_mean, disagreement=disagreement
    )


def later_variance(bank: Bank, belief: Belief, after: float, grid: Models) -> Reals:
    """Variance of a bin's count `after` steps from now: typical over the models, plus their spread.

    The geometric mean over models: the arithmetic one would be ruled by the few huge ones.
    """
    out = np.empty(len(bank.level))
    later(bank.weight, bank.variance, grid.drift, grid.white, after, out)
    return out + belief.disagreement
