"""From beliefs about counts to the numbers that are published, and to the pace of publications.

Guarantee: post-processing; only released values and public parameters are read.

The number o minimises the expected |o - x| / max(x, 1)^gamma: gamma = 0 is the absolute error,
gamma = 1 the relative one. Bins well above their uncertainty have a Gaussian belief, which gamma
tilts a little downward. The others are many, often mostly empty, and share a prior over counts
from zero up that is estimated from all of them (empirical Bayes, a few EM steps).

A pace is k publications per window, one every ceil(w / k) steps, each with a k-th of the budget:
more of them follow the stream more closely and are noisier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.w_event.pacer_math import exp
from dpstream.mechanisms.w_event.pacer_models import Bank, Models
from dpstream.records import Integers, Reals

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
    new, out = prior.copy(), np.empty(len(mean))
    weak = _estimate(mean, variance, gamma, _FLAT, new, out)
    return out, new if weak else prior


@njit(cache=True, nogil=True, error_model="numpy")
def _weak(mean: Reals, sd: Reals, typical: float, gamma: float, flat: Reals, prior: Reals) -> Reals:
    """Weighted posterior medians; `prior` is updated in place."""
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
    counts_for, out = np.empty(CELLS), np.zeros(bins)
    for i in range(CELLS):
        counts_for[i] = prior[i] / max(i * step, 1.0) ** gamma
    middle = np.zeros(bins)
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
            out[j] = (i - 0.5 + inside) * step
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
) -> bool:
    """The numbers to publish, and whether any bin is weak; then `prior` is updated in place.

    Plain loops: what stands for a whole array in a few words takes seconds to compile.
    """
    bins, weak = len(mean), np.int64(0)
    sd, which = np.empty(bins), np.empty(bins, np.int64)
    weak_mean, weak_sd = np.empty(bins), np.empty(bins)
    for j in range(bins):
        least, above = _LEAST_SD**2, mean[j] if mean[j] >= 1.0 else 1.0
        sd[j] = math.sqrt(variance[j] if variance[j] >= least else least)
        found = mean[j] - gamma * variance[j] / above
        out[j] = found if found >= 0.0 else 0.0
        if mean[j] < _STRONG * sd[j]:
            weak_sd[weak] = sd[j]
            weak += 1
    if weak > 0:
        typical, within = np.median(weak_sd[:weak]), 0
        for j in range(bins):
            if mean[j] < _STRONG * sd[j] and mean[j] < _STRONG * typical:  # within the cells
                which[within], weak_mean[within], weak_sd[within] = j, mean[j], sd[j]
                within += 1
        found_weak = _weak(weak_mean[:within], weak_sd[:within], typical, gamma, flat, prior)
        for i in range(within):
            out[which[i]] = found_weak[i]
    for j in range(bins):
        out[j] = np.rint(out[j])
    return bool(weak > 0)


SHARES = 1 << 40
"""A window's budget is this many equal shares; budgets are whole numbers of them."""

_STEPS = 200  # points at which the error between two publications is looked at
_SHORT = 5  # an interval of so few steps is never too long
_PATIENCE = 2.0  # an error counts little more once it passes this many times the level


@dataclass(frozen=True, kw_only=True, eq=False)
class Paces:
    """The public choices: publications per window, and each model's log mean error at each."""

    counts: Integers  # ascending, the last is w
    log_error: Reals  # models x paces


@lru_cache(maxsize=64)
def counts(window: int) -> tuple[int, ...]:
    """About 30% apart; equal intervals give equal counts, so only one of them is kept.

    A pace that spends most of a window's budget at once could not react to what it sees, so an
    interval is at most a third of the window (or _SHORT steps).

    >>> counts(8), counts(40), counts(1)
    ((2, 3, 4, 8), (3, 4, 5, 7, 8, 10, 14, 20, 40), (1,))
    """
    count = float(-(-window // max(_SHORT, -(-window // 3))))
    chosen = {window}
    while count < window:
        chosen.add(-(-window // interval(window, round(count))))
        count = max(1.3 * count, count + 1)
    return tuple(sorted(chosen))


def interval(window: int, count: int) -> int:
    """Steps from one publication to the next."""
    return -(-window // count)


@lru_cache(maxsize=64)
def paces(epsilon: float, window: int, grid: Models) -> Paces:
    """Mean standard deviation over one interval once each model's filter has settled."""
    columns = []
    for count in counts(window):
        steps = interval(window, count)
        noise = 2.0 * (count / epsilon) ** 2
        seen, moved = noise + grid.white, grid.drift * steps
        before = 0.5 * (moved + np.sqrt(moved**2 + 4.0 * moved * seen))
        after = before * seen / (before + seen)
        total = before + grid.white
        error = np.sqrt(total * noise / (total + noise))
        if steps > 1:
            ages = np.unique(np.linspace(1, steps - 1, min(steps - 1, _STEPS)))
            held = np.sqrt((after + grid.white)[:, None] + np.outer(grid.drift, ages))
            error += (steps - 1) * held.mean(axis=1)
        columns.append(np.log(error / steps))
    return Paces(counts=np.array(counts(window)), log_error=np.stack(columns, axis=1))


def best(bank: Bank, choices: Paces) -> int:
    """The position in `choices` with the least error, bins weighted by 1 / sqrt(level).

    Per bin the log error is averaged over models: while unsure, a ratio too slow is as bad as the
    same ratio too fast.
    """
    return int(_best(bank.weight, bank.level, choices.log_error))


@njit(cache=True, nogil=True, error_model="numpy")
def _best(weight: Reals, level: Reals, log_error: Reals) -> int:
    bins, size = weight.shape
    options = log_error.shape[1]
    score, mean = np.zeros(options), np.empty(options)
    for j in range(bins):
        for c in range(options):
            mean[c] = 0.0
        for g in range(size):
            if weight[j, g] > 1e-8:
                for c in range(options):
                    mean[c] += weight[j, g] * log_error[g, c]
        scale = max(level[j], 1.0)
        enough, root = _PATIENCE * scale, math.sqrt(scale)
        for c in range(options):
            error = exp(mean[c])
            score[c] += error * enough / ((error + enough) * root)
    least = 0
    for c in range(1, options):
        if score[c] < score[least]:
            least = c
    return least


def remember(
    steps: Integers, shares: Integers, now: int, spent: int, window: int
) -> tuple[Integers, Integers]:
    """What was spent, and at which steps, with `spent` now; what left the window is forgotten."""
    kept = steps > now - window + 1
    return np.append(steps[kept], now), np.append(shares[kept], spent)


@njit(cache=True, nogil=True)
def sustainable(
    steps: Integers, shares: Integers, now: int, window: int, count: int, every: int
) -> int:
    """The most shares, up to a count-th, that `now` and each `every` steps after it can spend.

    `steps`, `shares`: what was spent, oldest first. The publication n intervals from now shares
    its window with n others like it and with what is left there of the past.
    """
    most = SHARES // count
    spent, newest = 0, len(steps) - 1
    for n in range(count - 1, -1, -1):
        while newest >= 0 and steps[newest] > now + n * every - window:
            spent += shares[newest]
            newest -= 1
        most = min(most, (SHARES - spent) // (n + 1))
    return most
