"""Many simple models of a count, side by side, weighted by how well each predicted the releases.

Guarantee: post-processing; only released values are read.

Model g says: level_t = level_{t-1} + N(0, drift_g), x_t = level_t + N(0, white_g). Each bin keeps,
per model, a Gaussian belief about its level and a weight. After a publication a small share of the
weight returns to a prior that is relative to the bin's level and half pooled over the bins, so
that a stream may change its nature.

The state is three float64 per bin and model: at w = 120, 3.2 kB per bin with the full grid of 135
models, 1.3 kB with the thin one of 54.

What is published for a bin is the number o that minimises the expected |o - x| / max(x, 1)^gamma:
gamma = 0 is the absolute error, gamma = 1 the relative one. Bins well above their uncertainty have
a Gaussian belief, which gamma tilts a little downward. The others are many, often mostly empty, and
share a prior over counts from zero up that is estimated from all of them (empirical Bayes, a few EM
steps).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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
def priors(level: Reals, drift: Reals, white: Reals, pool: Reals, pooled: float) -> Reals:
    """Weights that models have before they are tried: near the usual ratios to the bin's level."""
    n_drift, n_white = len(drift), len(white)
    out, near = np.empty((len(level), n_drift * n_white)), np.empty(n_drift + n_white)
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
    return out


_SHARE = 0.02  # weight that returns to the prior at a publication
_TINY = 1e-8  # weights below this are left out of averages
_HEAVY = 1e-3  # and below this out of the mixture's variance
_TOGETHER = 8  # bins whose models are worked on at once
_HALF_LOG = 0.5 * math.log(2.0 * math.pi)
_LOUD = 10.0  # noise scales that surprise no model: noise is larger once in 22,000 times
_SURPRISE = 25.0  # squared deviations beyond them from which a release surprises a model


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
) -> tuple[Reals, Reals, Reals, Reals]:
    """Means, variances, pool, and what `_weigh` says of each bin; `weight` becomes the posterior.

    Eight bins at a time, all their models in one array. Loops over models hold no branch and no
    call, so that they run in SIMD lanes; the few models that need the exact update are gathered for
    it. Models that weigh less than `light` learn as from Gaussian noise.
    """
    bins, size = weight.shape
    mean, variance = np.empty((bins, size)), np.empty((bins, size))
    pool, by_bin = np.zeros(size), np.empty((6, bins))
    lanes = min(_TOGETHER, bins) * size
    moved, jitter = np.empty(lanes), np.empty(lanes)
    for i in range(lanes):
        moved[i], jitter[i] = drift[i % size] * gap, white[i % size]
    work, which = np.empty((13, lanes)), np.empty(lanes, np.int64)
    for first in range(0, bins, _TOGETHER):
        here = slice(first, min(first + _TOGETHER, bins))
        mine, mu, var = weight[here].ravel(), old_mean[here].ravel(), old_variance[here].ravel()
        old, new_mu, new_var = old_weight[here].ravel(), mean[here].ravel(), variance[here].ravel()
        for i in range(len(mine)):
            mine[i] = (1.0 - _SHARE) * old[i] + _SHARE * mine[i]
        _see(z[here], scale, mine, mu, var, moved, jitter, light, work, which)
        _weigh(size, mine, mu, new_mu, new_var, jitter, pool, work, by_bin[:, here])
    pool /= bins
    return mean, variance, pool, by_bin


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
    """Each model's update by what was published: the first six rows of `work`, and surprise."""
    before, total, away = work[0], work[1], work[2]
    log_density, seen, seen_variance = work[3], work[4], work[5]
    surprised, exact = work[7], work[8:]
    size, noise, widest = len(weight) // len(z), 2.0 * scale * scale, (NEGLIGIBLE * scale) ** 2
    loud = _LOUD * scale
    for j in range(len(z)):
        away[j * size : (j + 1) * size] = z[j]
    for i in range(len(weight)):
        before[i] = variance[i] + moved[i]
        total[i] = before[i] + jitter[i]
        away[i] -= mean[i]
        wide = total[i] + noise
        narrow = 1.0 / wide
        beyond = max(abs(away[i]) - loud, 0.0)
        surprised[i] = weight[i] if beyond * beyond > _SURPRISE * total[i] else 0.0
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
    by_bin: Reals,
) -> None:
    """The levels behind the counts, the models' weights, and what follows for each bin.

    Rows of `by_bin`: count, its typical variance, the mixture's variance of it, log density of the
    release, weight of the models that it surprised, typical level.
    """
    before, total, log_density, seen, seen_variance = work[0], work[1], work[3], work[4], work[5]
    x_part, y_part, seen_part = work[6], work[2], work[7]
    bins, lanes = len(weight) // size, len(weight)
    for j in range(bins):
        best = -math.inf
        for i in range(j * size, (j + 1) * size):
            best = max(best, log_density[i])
        for i in range(j * size, (j + 1) * size):
            log_density[i] -= best
        by_bin[3, j], by_bin[4, j] = best, sum_of(seen_part, j * size, size)
    for i in range(lanes):
        gain = before[i] / total[i]
        new_variance[i] = before[i] * (1.0 - gain) + gain * gain * seen_variance[i]
        new_mean[i] = mean[i] + gain * (seen[i] - mean[i])
        weight[i] *= exp(log_density[i])
        before[i] = log(seen_variance[i] + 1e-12)
        total[i] = log(new_variance[i] + jitter[i] + 1e-12)
    for j in range(bins):
        mass = sum_of(weight, j * size, size)
        by_bin[3, j] += log(mass)
        x_part[j * size : (j + 1) * size] = 1.0 / mass
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
        by_bin[0, j], by_bin[5, j] = sum_of(x_part, start, size), sum_of(y_part, start, size)
        x_part[start : start + size] = by_bin[0, j]
        y_part[start : start + size] = by_bin[5, j]
    for i in range(lanes):
        seen_part[i] = weight[i] * seen_variance[i]
        x_part[i] = weight[i] * (seen[i] - x_part[i]) ** 2
        y_part[i] = weight[i] * (new_mean[i] - y_part[i]) ** 2
    for j in range(bins):
        start, level = j * size, by_bin[5, j]
        spread = sum_of(x_part, start, size)
        by_bin[1, j] = exp(sum_of(before, start, size)) + spread
        by_bin[2, j] = sum_of(seen_part, start, size) + spread
        sd = math.sqrt(exp(sum_of(total, start, size)) + sum_of(y_part, start, size))
        by_bin[5, j] = level if level >= sd else max(level, 0.0) + 0.5 * sd


@njit(cache=True, nogil=True, error_model="numpy")
def _later(
    weight: Reals, mean: Reals, variance: Reals, drift: Reals, white: Reals, after: float
) -> Reals:
    """The rows of `Later`."""
    bins, size = weight.shape
    terms, out = np.empty((3, size)), np.empty((4, bins))
    for j in range(bins):
        heavy = wide = moved = 0.0
        for g in range(size):
            counted = weight[j, g] if weight[j, g] > _TINY else 0.0
            terms[0, g] = weight[j, g] * mean[j, g]
            terms[1, g] = counted * log(variance[j, g] + white[g] + drift[g] * after + 1e-12)
        level = sum_of(terms[0], 0, size)
        for g in range(size):
            counted = weight[j, g] if weight[j, g] > _HEAVY else 0.0
            terms[2, g] = weight[j, g] * (mean[j, g] - level) ** 2
            heavy += counted
            wide += counted * (variance[j, g] + white[g] + (mean[j, g] - level) ** 2)
            moved += counted * drift[g]
        out[0, j], out[1, j] = level, exp(sum_of(terms[1], 0, size)) + sum_of(terms[2], 0, size)
        out[2, j], out[3, j] = wide / heavy, moved / heavy
    return out


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


@dataclass(frozen=True, eq=False)
class Belief:
    """What the bank thinks of each bin's count, just published, and of the release itself."""

    count: Reals
    typical_variance: Reals  # see `Later`
    variance: Reals
    evidence: Reals  # log density of what was published
    surprised: Reals  # weight of the models that did not expect it


def first_belief(z: Reals, scale: float, grid: Models) -> tuple[Bank, Belief]:
    """After the first publication: every model believes what was published."""
    bins, size = len(z), len(grid.drift)
    level = np.maximum(z, 0.5 * scale)
    weight = priors(level, grid.log_drift_sd, grid.log_white_sd, np.zeros(size), 0.0)
    noise = np.full(bins, 2.0 * scale * scale)
    bank = Bank(
        weight=weight,
        mean=np.repeat(z[:, None], size, axis=1),
        variance=np.full((bins, size), 2.0 * scale * scale),
        level=level,
        pool=weight.mean(axis=0),
    )
    nothing = np.zeros(bins)
    return bank, Belief(z, noise, noise, nothing, nothing)


def learn(
    bank: Bank, z: Reals, scale: float, gap: int, grid: Models, *, bins: int | None = None
) -> tuple[Bank, Belief]:
    """After another publication, `gap` steps later; `bins` is their number where z has but some."""
    bins = bins or len(z)
    pooled = _POOLED if bins > 1 else 0.0
    weight = priors(bank.level, grid.log_drift_sd, grid.log_white_sd, bank.pool, pooled)
    mean, variance, pool, by_bin = learn_all(
        z,
        scale,
        float(gap),
        grid.drift,
        grid.white,
        bank.weight,
        bank.mean,
        bank.variance,
        weight,
        _LIGHT if bins > FULL_BINS else 0.0,
    )
    *belief, typical_level = by_bin
    bank = Bank(weight=weight, mean=mean, variance=variance, level=typical_level, pool=pool)
    return bank, Belief(*belief)


class Later(NamedTuple):
    """What is thought of each bin's count until the next publication.

    What is published rests on the typical variance, the geometric mean over models plus their
    spread: the arithmetic mean would be ruled by the few huge ones. The mixture's variance, which
    the published deviation rests on, is the arithmetic one without models that hardly weigh
    anything: d steps from now it is `variance` + `growth` d.
    """

    level: Reals
    typical: Reals
    variance: Reals
    growth: Reals


def later(bank: Bank, after: float, grid: Models) -> Later:
    """The typical variance is that `after` steps from now."""
    return Later(*_later(bank.weight, bank.mean, bank.variance, grid.drift, grid.white, after))


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


def estimate(
    mean: Reals, variance: Reals, prior: Reals, *, gamma: float
) -> tuple[Reals, Reals, Reals]:
    """Whole, non-negative counts to publish, the shared prior for the next time, and shrinkage.

    Shrinkage is the expected squared error of what is published, over the variance.

    >>> estimate(np.array([900.0]), np.array([100.0]), flat_prior(), gamma=0.5)[0]
    array([900.])
    """
    new, out = prior.copy(), np.empty((2, len(mean)))
    _estimate(mean, variance, gamma, _FLAT, new, out)
    return out[0], new, out[1]


@njit(cache=True, nogil=True, error_model="numpy")
def _weak(mean: Reals, sd: Reals, typical: float, gamma: float, flat: Reals, prior: Reals) -> Reals:
    """Weighted posterior medians, second moments about them; `prior` is updated in place."""
    bins = len(mean)
    likelihood, by_cell = _likelihood(mean, sd, typical), np.empty((CELLS, bins))
    for i in range(CELLS):
        for j in range(bins):
            by_cell[i, j] = likelihood[j, i]
    if bins == 1:
        for i in range(CELLS):
            prior[i] = flat[i]
    else:
        for _ in range(_ROUNDS):
            _share(prior, likelihood, by_cell, flat)
    step = _WIDTH * typical
    counts_for, out = np.empty(CELLS), np.zeros((2, bins))
    for i in range(CELLS):
        counts_for[i] = prior[i] / max(i * step, 1.0) ** gamma
    middle, inside_cell = np.zeros(bins), step * step / 12.0
    for i in range(CELLS):
        for j in range(bins):
            by_cell[i, j] *= counts_for[i]
            middle[j] += by_cell[i, j]
    for j in range(bins):
        half, below, i = 0.5 * middle[j], 0.0, 0
        while i < CELLS - 1 and below + by_cell[i, j] < half:
            below += by_cell[i, j]
            i += 1
        if i > 0:
            inside = (half - below) / max(by_cell[i, j], 1e-300)
            out[0, j] = (i - 0.5 + inside) * step
        mass = square = 0.0
        for i in range(CELLS):
            here = likelihood[j, i] * prior[i]
            mass += here
            square += here * ((i * step - out[0, j]) ** 2 + (inside_cell if i > 0 else 0.0))
        out[1, j] = square / mass
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _likelihood(mean: Reals, sd: Reals, typical: float) -> Reals:
    """Bins x cells: of each cell given the bin's belief, over that of the likeliest cell."""
    bins, step = len(mean), _WIDTH * typical
    out = np.empty((bins, CELLS))
    for j in range(bins):
        s = min(max(sd[j], 0.25 * typical), 4.0 * typical)
        m = max(mean[j], -3.0 * s)
        nearest = min(max(np.rint(m / step), 0.0), CELLS - 1.0)
        least = 0.5 * ((m - nearest * step) / s) ** 2
        row = out[j]
        for i in range(CELLS):
            row[i] = exp(least - 0.5 * ((m - i * step) / s) ** 2)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _share(prior: Reals, likelihood: Reals, by_cell: Reals, flat: Reals) -> None:
    """One EM step: the mean posterior over the bins, `flat` counting for a few of them."""
    bins = len(likelihood)
    mass, new = np.zeros(bins), np.zeros(CELLS)
    for i in range(CELLS):
        for j in range(bins):
            mass[j] += prior[i] * by_cell[i, j]
    for j in range(bins):
        mass[j] = 1.0 / mass[j]
    for j in range(bins):
        for i in range(CELLS):
            new[i] += likelihood[j, i] * mass[j]
    for i in range(CELLS):
        prior[i] = (_PRIOR_BINS * flat[i] + prior[i] * new[i]) / (_PRIOR_BINS + bins)


@njit(cache=True, nogil=True, error_model="numpy")
def _estimate(
    mean: Reals, variance: Reals, gamma: float, flat: Reals, prior: Reals, out: Reals
) -> None:
    """The numbers to publish, and shrinkage; if any bin is weak, `prior` is updated in place.

    Plain loops: what stands for a whole array in a few words takes seconds to compile.
    """
    bins, weak = len(mean), np.int64(0)
    sd, which = np.empty(bins), np.empty(bins, np.int64)
    weak_mean, weak_sd = np.empty(bins), np.empty(bins)
    for j in range(bins):
        least, above = _LEAST_SD**2, mean[j] if mean[j] >= 1.0 else 1.0
        sd[j] = math.sqrt(variance[j] if variance[j] >= least else least)
        tilted = mean[j] - gamma * variance[j] / above
        out[0, j] = tilted if tilted >= 0.0 else 0.0
        out[1, j] = variance[j] + (out[0, j] - mean[j]) ** 2
        if mean[j] < _STRONG * sd[j]:
            weak_sd[weak] = sd[j]
            weak += 1
    if weak > 0:
        typical, within = np.median(weak_sd[:weak]), 0
        for j in range(bins):
            if mean[j] < _STRONG * sd[j] and mean[j] < _STRONG * typical:  # within the cells
                which[within], weak_mean[within], weak_sd[within] = j, mean[j], sd[j]
                within += 1
        medians = _weak(weak_mean[:within], weak_sd[:within], typical, gamma, flat, prior)
        for i in range(within):
            out[0, which[i]], out[1, which[i]] = medians[0, i], medians[1, i]
    for j in range(bins):
        out[0, j] = np.rint(out[0, j])
        out[1, j] /= max(variance[j], _LEAST_SD**2)
