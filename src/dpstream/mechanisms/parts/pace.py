"""How often to publish, and what each publication may cost so that the pace can be kept.

Guarantee: post-processing; paces follow from released values and public parameters.

A pace is k publications per window, one every ceil(w / k) steps, each with a k-th of the budget:
more of them follow the stream more closely and are noisier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.model_bank import Bank
from dpstream.mechanisms.parts.model_grid import Models
from dpstream.mechanisms.parts.vector_math import exp
from dpstream.records import Integers, Reals

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


@njit(cache=True, nogil=True)
def remember(
    steps: Integers, shares: Integers, now: int, spent: int, window: int
) -> tuple[Integers, Integers]:
    """What was spent, and at which steps, with `spent` now; what left the window is forgotten."""
    first = 0
    while first < len(steps) and steps[first] <= now - window + 1:
        first += 1
    size = len(steps) - first + 1
    new_steps, new_shares = np.empty(size, np.int64), np.empty(size, np.int64)
    for i in range(size - 1):
        new_steps[i], new_shares[i] = steps[first + i], shares[first + i]
    new_steps[size - 1], new_shares[size - 1] = now, spent
    return new_steps, new_shares


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
