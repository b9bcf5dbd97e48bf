"""Compiled loops of `block_filter`: one block forward, and back over all that are kept.

Guarantee: post-processing; they read noisy sums and public numbers.

Models are the inner loop, so that a processor takes several of them at a time; sums over models
are made in their order, whatever it does.
"""

from __future__ import annotations

import math

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.block_models import SPREAD, kept
from dpstream.mechanisms.parts.laplace_filter import laplace_update
from dpstream.records import Reals

_TINY = 1e-4  # weights below this are left out
_RETURN = 0.01  # weight that goes back to the prior with every block: a series may change


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    now: int,
    seen: Reals,
    scale: float,
    steps: float,
    phi: Reals,
    weight: Reals,
    prior: Reals,
    white: Reals,
    new: Reals,
    before: Reals,
    after: Reals,
) -> None:
    """New weights (bins x models), and beliefs before and after block `now`, from the one before.

    `scale` is that of the noise in the mean of a block of `steps`; `phi` is empty for the first.
    """
    bins, size = weight.shape
    log = np.empty(size)
    for j in range(bins):
        best = -math.inf
        for g in range(size):
            mean, variance = 0.5, SPREAD
            if len(phi):
                mean = 0.5 + phi[g] * (after[now - 1, j, g, 0] - 0.5)
                variance = (
                    phi[g] * phi[g] * after[now - 1, j, g, 1] + (1.0 - phi[g] * phi[g]) * SPREAD
                )
            total = variance + white[g] / steps
            log[g], x, x_variance = laplace_update(mean, total, seen[now, j], scale)
            gain = variance / total
            before[now, j, g, 0], before[now, j, g, 1] = mean, variance
            after[now, j, g, 0] = mean + gain * (x - mean)
            after[now, j, g, 1] = variance * (1.0 - gain) + gain * gain * x_variance
            best = max(best, log[g])
        total = 0.0
        for g in range(size):
            u = (1.0 - _RETURN) * weight[j, g] + _RETURN * prior[g]
            new[j, g] = u * math.exp(log[g] - best)
            total += new[j, g]
        for g in range(size):
            new[j, g] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def look_back(
    count: int,
    middle: Reals,
    length: Reals,
    seen: Reals,
    before: Reals,
    after: Reals,
    weight: Reals,
    drift: Reals,
    white: Reals,
    epsilon: float,
    first: int,
    out: Reals,
    deviation: Reals,
) -> None:
    """From step `first` on, steps x bins: values in [0, 1], and of the first ones their deviation.

    The last `count` blocks are in use.
    """
    last = len(middle) - 1
    oldest = last + 1 - count
    while oldest < last and middle[oldest] + length[oldest] / 2 < first:
        oldest += 1
    until = oldest  # of the blocks before it deviations are asked for
    if len(deviation):
        while until < last and middle[until] + length[until] / 2 < first + len(deviation) - 1:
            until += 1
        until += 1
    oldest = max(oldest - 1, last + 1 - count)  # levels are interpolated from the one before on
    told = np.empty((3, last + 1 - oldest))
    for j in range(out.shape[1]):
        _backward(
            j, oldest, until, middle, length, seen, before, after, weight, drift, white, epsilon,
            told,
        )  # fmt: skip
        _values(j, first, middle[oldest:], length[oldest:], told, out, deviation)


@njit(cache=True, nogil=True, error_model="numpy")
def _backward(
    j: int,
    oldest: int,
    until: int,
    middle: Reals,
    length: Reals,
    seen: Reals,
    before: Reals,
    after: Reals,
    weight: Reals,
    drift: Reals,
    white: Reals,
    epsilon: float,
    told: Reals,
) -> None:
    """Of bin j: the level in the middle of each block, what is added in it, the variance.

    The variance of one value: that of the level, of its wandering within the block, of the white
    noise that the block's mean does not show, and of what the models disagree about. It is told of
    the blocks before `until`.
    """
    last, size = len(middle) - 1, weight.shape[1]
    mean, spread, phi, share = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    u = np.empty(size)
    for g in range(size):
        u[g] = weight[j, g] if weight[j, g] >= _TINY else 0.0
    gap = of_length = -1.0
    for k in range(last, oldest - 1, -1):
        if k == last:
            for g in range(size):
                mean[g], spread[g] = after[k, j, g, 0], after[k, j, g, 1]
        else:
            if middle[k + 1] - middle[k] != gap:
                gap = middle[k + 1] - middle[k]
                for g in range(size):
                    phi[g] = kept(drift[g], gap)
            for g in range(size):
                gain = phi[g] * after[k, j, g, 1] / before[k + 1, j, g, 1]
                mean[g] = after[k, j, g, 0] + gain * (mean[g] - before[k + 1, j, g, 0])
                spread[g] = after[k, j, g, 1] + gain * gain * (spread[g] - before[k + 1, j, g, 1])
        if length[k] != of_length:
            of_length = length[k]
            noise = 2.0 / (epsilon * of_length) ** 2
            for g in range(size):
                share[g] = white[g] / of_length / (white[g] / of_length + noise)
        y, level, own = seen[k, j], 0.0, 0.0
        for g in range(size):
            level += u[g] * mean[g]
            own += u[g] * (share[g] * (y - mean[g]))
        told[0, k - oldest], told[1, k - oldest] = level, own
        if k >= until:
            continue
        variance = square = 0.0
        for g in range(size):
            square += u[g] * (mean[g] + share[g] * (y - mean[g])) ** 2
            inside = min(drift[g] * (length[k] - 1.0) / 6.0, SPREAD)
            hidden = white[g] - white[g] / length[k] * share[g]
            variance += u[g] * ((1.0 - share[g]) ** 2 * spread[g] + inside + hidden)
        told[2, k - oldest] = variance + max(square - (level + own) ** 2, 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _values(
    j: int, first: int, middle: Reals, length: Reals, told: Reals, out: Reals, deviation: Reals
) -> None:
    """Of bin j: what blocks say of each step.

    Levels are interpolated between the middles of blocks. By how much their mean over a block then
    differs from its own is taken off what is added in it: the distance of a block's steps before
    its middle, summed over them and divided by its length, is length/8, less 1/(8 length) if one
    step is the middle; the same after it.
    """
    blocks = len(middle)
    level, own, variance = told[0], told[1], told[2]
    for k in range(blocks):
        away, bent = length[k] / 8 - (length[k] % 2) / (8 * length[k]), 0.0
        if away == 0.0:  # one step
            continue
        if k > 0:
            bent -= (level[k] - level[k - 1]) / (middle[k] - middle[k - 1]) * away
        if k < blocks - 1:
            bent += (level[k + 1] - level[k]) / (middle[k + 1] - middle[k]) * away
        own[k] -= bent
    inside, below = 0, -1  # the step's block; the newest block whose middle is not after it
    for i in range(len(out)):
        step = float(first + i)
        while inside < blocks - 1 and middle[inside] + length[inside] / 2 < step:
            inside += 1
        while below < blocks - 1 and middle[below + 1] <= step:
            below += 1
        there = level[max(below, 0)]
        if 0 <= below < blocks - 1 and middle[below] != step:
            slope = (level[below + 1] - level[below]) / (middle[below + 1] - middle[below])
            there = slope * (step - middle[below]) + level[below]
        out[i, j] = min(max(own[inside] + there, 0.0), 1.0)
        if i < len(deviation):
            deviation[i, j] = math.sqrt(variance[inside])
