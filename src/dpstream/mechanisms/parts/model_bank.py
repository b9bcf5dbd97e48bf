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

from dataclasses import dataclass

import numpy as np

from dpstream.mechanisms.parts.bank_kernels import later, learn_all
from dpstream.mechanisms.parts.model_grid import FULL_BINS, Models, priors
from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

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
