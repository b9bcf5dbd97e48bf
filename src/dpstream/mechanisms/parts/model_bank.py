"""Many simple models of a count, side by side, weighted by how well each predicted the releases.

Guarantee: post-processing; only released values are read.

Model g says: level_t = level_{t-1} + N(0, drift_g), x_t = level_t + N(0, white_g). Each bin keeps,
per model, a Gaussian belief about its level and a weight. After a publication a small share of the
weight returns to a prior that is relative to the bin's level and half pooled over the bins, so
that a stream may change its nature. The state is three numbers per bin and model, in float64:
3.2 kB per bin at w = 120 (135 models), 1.1 kB beyond FULL_BINS bins (a thinner grid).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit

from dpstream.mechanisms.parts.laplace_filter import laplace_update
from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

FULL_BINS = 300  # up to here every bin has the full grid of models
_SHARE = 0.02  # weight that returns to the prior at a publication
_STILL = 0.2  # prior weight of the stillest model
_POOLED = 0.5  # part of the prior that comes from the other bins
_NO_WHITE = 0.5  # prior weight of no white noise
_DRIFT = (math.log(0.03), 1.8)  # log(drift sd / level): centre, spread
_WHITE = (math.log(0.05), 1.5)
_TINY = 1e-8  # weights below this are left out of averages


@dataclass(frozen=True, kw_only=True, eq=False)
class Models:
    """The public grid: all pairs of a drift and a white variance (`drift[i // n]`, `white[i % n]`)."""

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
    _priors(level, grid.log_drift_sd, grid.log_white_sd, none, 0.0, weight)
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
    bins = len(z)
    new = Bank(
        weight=np.empty_like(bank.weight),
        mean=bank.mean.copy(),
        variance=bank.variance.copy(),
        level=np.empty(bins),
        pool=np.zeros(grid.size),
    )
    belief = Belief(
        count=np.empty(bins),
        count_variance=np.empty(bins),
        level=np.empty(bins),
        disagreement=np.empty(bins),
    )
    pooled = _POOLED if bins > 1 else 0.0
    _priors(bank.level, grid.log_drift_sd, grid.log_white_sd, bank.pool, pooled, new.weight)
    _learn(
        *(z, scale, float(gap), grid.drift, grid.white, bank.weight),
        *(new.weight, new.mean, new.variance, new.level, new.pool),
        *(belief.count, belief.count_variance, belief.level, belief.disagreement),
    )
    return new, belief


def later_variance(bank: Bank, belief: Belief, after: float, grid: Models) -> Reals:
    """Variance of a bin's count `after` steps from now: typical over the models, plus their spread.

    The geometric mean over models: the arithmetic one would be ruled by the few huge ones.
    """
    out = np.empty(len(bank.level))
    _later(bank.weight, bank.variance, grid.drift, grid.white, after, out)
    return out + belief.disagreement


@njit(cache=True, nogil=True)
def _priors(
    level: Reals, drift: Reals, white: Reals, pool: Reals, pooled: float, out: Reals
) -> None:
    """Weights that models have before they are tried: near the usual ratios to the bin's level."""
    n_drift, n_white = len(drift), len(white)
    by_drift, by_white = np.empty(n_drift), np.empty(n_white)
    spacing = white[2] - white[1]  # the point mass at no white noise, against a density
    for j in range(len(level)):
        log_level = math.log(max(level[j], 1.0))
        for i in range(n_drift):
            by_drift[i] = math.exp(-0.5 * ((drift[i] - log_level - _DRIFT[0]) / _DRIFT[1]) ** 2)
        by_white[0] = _NO_WHITE * math.sqrt(2.0 * math.pi) * _WHITE[1] / spacing
        for i in range(1, n_white):
            near = math.exp(-0.5 * ((white[i] - log_level - _WHITE[0]) / _WHITE[1]) ** 2)
            by_white[i] = (1.0 - _NO_WHITE) * near
        total = by_drift.sum() * by_white.sum()
        for a in range(n_drift):
            for b in range(n_white):
                g = a * n_white + b
                own = (1.0 - _STILL) * by_drift[a] * by_white[b] / total
                if g == 0:
                    own += _STILL
                out[j, g] = (1.0 - pooled) * own + pooled * pool[g]


@njit(cache=True, nogil=True)
def _learn(
    z, scale, gap, drift, white, old_weight,  # fmt: skip
    weight, mean, variance, level, pool, count, count_variance, level_mean, disagreement,  # fmt: skip
):  # type: ignore[no-untyped-def]
    """`weight` comes as the prior and leaves as the posterior; the others are filled in."""
    bins, size = weight.shape
    seen, seen_variance, log_density = np.empty(size), np.empty(size), np.empty(size)
    for j in range(bins):
        best = -math.inf
        for g in range(size):
            before = variance[j, g] + drift[g] * gap
            total = before + white[g]
            density, seen[g], seen_variance[g] = laplace_update(mean[j, g], total, z[j], scale)
            gain = before / total
            variance[j, g] = before * (1.0 - gain) + gain * gain * seen_variance[g]
            mean[j, g] += gain * (seen[g] - mean[j, g])
            log_density[g] = density
            best = max(best, density)
        total = 0.0
        for g in range(size):
            kept = (1.0 - _SHARE) * old_weight[j, g] + _SHARE * weight[j, g]
            weight[j, g] = kept * math.exp(log_density[g] - best)
            total += weight[j, g]
        x = y = log_x = log_y = 0.0
        for g in range(size):
            u = weight[j, g] / total
            weight[j, g] = u
            pool[g] += u / bins
            x += u * seen[g]
            y += u * mean[j, g]
            if u > _TINY:
                log_x += u * math.log(seen_variance[g] + 1e-12)
                log_y += u * math.log(variance[j, g] + white[g] + 1e-12)
        spread_x = spread_y = 0.0
        for g in range(size):
            spread_x += weight[j, g] * (seen[g] - x) ** 2
            spread_y += weight[j, g] * (mean[j, g] - y) ** 2
        count[j], count_variance[j] = x, math.exp(log_x) + spread_x
        level_mean[j], disagreement[j] = y, spread_y
        sd = math.sqrt(math.exp(log_y) + spread_y)
        level[j] = y if y >= sd else max(y, 0.0) + 0.5 * sd


@njit(cache=True, nogil=True)
def _later(
    weight: Reals, variance: Reals, drift: Reals, white: Reals, after: float, out: Reals
) -> None:
    for j in range(weight.shape[0]):
        log = 0.0
        for g in range(weight.shape[1]):
            if weight[j, g] > _TINY:
                total = variance[j, g] + white[g] + drift[g] * after
                log += weight[j, g] * math.log(total + 1e-12)
        out[j] = math.exp(log)
