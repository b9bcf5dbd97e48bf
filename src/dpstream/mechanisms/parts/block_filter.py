"""Follow a series through noisy means of blocks, and look back over the delay.

Guarantee: post-processing; it reads noisy sums and public numbers.

Forward, every model updates a Gaussian belief about the level by the exact Laplace noise
(`laplace_filter`), and is weighed by how well it predicted. Backward, over the blocks that are not
yet published, each model's beliefs are smoothed (Rauch, Tung, Striebel, "Maximum Likelihood
Estimates of Linear Dynamic Systems", 1965). Between the middles of blocks levels are interpolated;
to a block's values its own mean is added as far as white noise may have moved it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.block_models import SPREAD, kept, models
from dpstream.mechanisms.parts.laplace_filter import laplace_update
from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

_TINY = 1e-4  # weights below this are left out
_RETURN = 0.01  # weight that goes back to the prior with every block: a series may change


@storable("block beliefs")
@dataclass(frozen=True, kw_only=True, eq=False)
class Beliefs:
    """What is believed after the newest block, and of each block kept, oldest first.

    Arrays have room for `delay` + 2 blocks, of which the last `count` are in use.
    """

    weight: Reals  # bins x models
    count: int
    middle: Reals  # of each block, in steps from the start of the stream
    length: Reals
    seen: Reals  # blocks x bins: noisy means
    before: Reals  # blocks x bins x models x (mean, variance): predicted
    after: Reals  # the same, with the block seen

    @classmethod
    def none(cls, bins: int, delay: int) -> Beliefs:
        """Before the first block."""
        _, _, prior = models()
        slots, shape = delay + 2, (delay + 2, bins, len(prior), 2)
        return cls(
            weight=np.tile(prior, (bins, 1)),
            count=0,
            middle=np.zeros(slots),
            length=np.ones(slots),
            seen=np.zeros((slots, bins)),
            before=np.zeros(shape),
            after=np.zeros(shape),
        )

    def learn(self, mean: Reals, *, first: int, steps: int, scale: float) -> Beliefs:
        """With one block more: noisy means of `steps` steps from `first` on."""
        drift, white, prior = models()
        middle = first + (steps - 1) / 2
        gap = middle - self.middle[-1] if self.count else 0.0
        weight, before, after = _forward(
            (mean, scale, float(steps), gap),
            self.weight,
            prior,
            self.after[-1],
            drift,
            white,
            self.count == 0,
        )
        return Beliefs(
            weight=weight,
            count=min(self.count + 1, len(self.middle)),
            middle=_shifted(self.middle, middle),
            length=_shifted(self.length, steps),
            seen=_shifted(self.seen, mean),
            before=_shifted(self.before, before),
            after=_shifted(self.after, after),
        )

    def look_back(self, first: int, last: int, epsilon: float) -> tuple[Reals, Reals]:
        """Values of steps `first` to `last`, in [0, 1], and their deviation: steps x bins."""
        drift, white, _ = models()
        used = slice(len(self.middle) - self.count, None)
        middle, length = self.middle[used], self.length[used]
        oldest = max(0, int(np.searchsorted(middle + length / 2, first)) - 1)
        level, own, variance = _backward(
            middle[oldest:],
            length[oldest:],
            self.seen[used][oldest:],
            self.before[used][oldest:],
            self.after[used][oldest:],
            self.weight,
            drift,
            white,
            epsilon,
        )
        steps = np.arange(first, last + 1)
        block = np.minimum(
            np.searchsorted(middle[oldest:] + length[oldest:] / 2, steps), len(level) - 1
        )
        own -= _bent(middle[oldest:], length[oldest:], level)
        out = own[block]
        for j in range(out.shape[1]):
            out[:, j] += np.interp(steps, middle[oldest:], level[:, j])
        return np.clip(out, 0.0, 1.0), np.sqrt(variance[block])


def _bent(middle: Reals, length: Reals, level: Reals) -> Reals:
    """By how much the mean over a block of interpolated levels differs from its own: blocks x bins.

    The distance of a block's steps before its middle, summed over them and divided by its length,
    is length/8, less 1/(8 length) if one step is the middle; the same after it.
    """
    slope = np.diff(level, axis=0) / np.diff(middle)[:, None]
    away = (length / 8 - (length % 2) / (8 * length))[:, None]
    bent = np.zeros_like(level)
    bent[1:] -= slope * away[1:]
    bent[:-1] += slope * away[:-1]
    return bent


def _shifted(array: Reals, newest: Reals | float) -> Reals:
    """Without the oldest entry, with a new last one."""
    out = np.empty_like(array)
    out[:-1] = array[1:]
    out[-1] = newest
    return out


@njit(cache=True, nogil=True)
def _forward(
    block: tuple[Reals, float, float, float],
    weight: Reals,
    prior: Reals,
    belief: Reals,
    drift: Reals,
    white: Reals,
    fresh: bool,
) -> tuple[Reals, Reals, Reals]:
    """New weights (bins x models), and beliefs before and after (bins x models x 2)."""
    seen, scale, steps, gap = block
    bins, size = weight.shape
    before, after = np.empty((bins, size, 2)), np.empty((bins, size, 2))
    new, log = np.empty((bins, size)), np.empty(size)
    for j in range(bins):
        best = -math.inf
        for g in range(size):
            mean, variance = 0.5, SPREAD
            if not fresh:
                phi = kept(drift[g], gap)
                mean = 0.5 + phi * (belief[j, g, 0] - 0.5)
                variance = phi * phi * belief[j, g, 1] + (1.0 - phi * phi) * SPREAD
            total = variance + white[g] / steps
            log[g], x, x_variance = laplace_update(mean, total, seen[j], scale)
            gain = variance / total
            before[j, g, 0], before[j, g, 1] = mean, variance
            after[j, g, 0] = mean + gain * (x - mean)
            after[j, g, 1] = variance * (1.0 - gain) + gain * gain * x_variance
            best = max(best, log[g])
        total = 0.0
        for g in range(size):
            u = (1.0 - _RETURN) * weight[j, g] + _RETURN * prior[g]
            new[j, g] = u * math.exp(log[g] - best)
            total += new[j, g]
        new[j] /= total
    return new, before, after


@njit(cache=True, nogil=True)
def _backward(
    middle: Reals,
    length: Reals,
    seen: Reals,
    before: Reals,
    after: Reals,
    weight: Reals,
    drift: Reals,
    white: Reals,
    epsilon: float,
) -> tuple[Reals, Reals, Reals]:
    """Blocks x bins: the level in the middle of each block, what is added in it, the variance.

    The variance of one value: that of the level, of its wandering within the block, of the white
    noise that the block's mean does not show, and of what the models disagree about.
    """
    blocks, bins, size, _ = after.shape
    level, own = np.zeros((blocks, bins)), np.zeros((blocks, bins))
    variance, square = np.zeros((blocks, bins)), np.zeros((blocks, bins))
    for j in range(bins):
        for g in range(size):
            u, mean, spread = weight[j, g], after[blocks - 1, j, g, 0], after[blocks - 1, j, g, 1]
            if u < _TINY:
                continue
            gap, phi = 0.0, 1.0
            for k in range(blocks - 1, -1, -1):
                if k < blocks - 1:
                    if middle[k + 1] - middle[k] != gap:
                        gap = middle[k + 1] - middle[k]
                        phi = kept(drift[g], gap)
                    gain = phi * after[k, j, g, 1] / before[k + 1, j, g, 1]
                    mean = after[k, j, g, 0] + gain * (mean - before[k + 1, j, g, 0])
                    spread = after[k, j, g, 1] + gain * gain * (spread - before[k + 1, j, g, 1])
                noise, moved = 2.0 / (epsilon * length[k]) ** 2, white[g] / length[k]
                share = moved / (moved + noise)
                added = share * (seen[k, j] - mean)
                level[k, j] += u * mean
                own[k, j] += u * added
                square[k, j] += u * (mean + added) ** 2
                inside = min(drift[g] * (length[k] - 1.0) / 6.0, SPREAD)
                hidden = white[g] - moved * share
                variance[k, j] += u * ((1.0 - share) ** 2 * spread + inside + hidden)
    return level, own, variance + np.maximum(square - (level + own) ** 2, 0.0)
