"""The public grid of models that a bank weighs, and how likely each is before it is tried.

Guarantee: public values and released values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpstream.compiled import njit
from dpstream.mechanisms.parts.vector_math import exp, log
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
