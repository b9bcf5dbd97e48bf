"""The paper's two baselines, simulated: one-shot queries repeated over a growing log.

1: every trigger asks the whole question again over all rows so far, each time under an equal share
of the budget by the optimal composition theorem. 2: every trigger asks it over its own rows alone,
and the answers are added up; users are bounded over the day, so their rows' shifts add up and every
trigger may use the whole budget.

The paper runs both through Plume without saying how it splits the budget. Here a query takes half
of epsilon for choosing keys (analytic Gaussian, users counted once per key) and half for sums
(sensitivity C, as the paper has it), and delta in thirds: noise, threshold, sums.
Papers: Zhang et al., "Differentially Private Stream Processing at Scale", 2023; Kairouz, Oh,
Viswanath, "The Composition Theorem for Differential Privacy", 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln
from scipy.stats import norm

from dpstream.bench.sqlp_published import Events
from dpstream.privacy.curves import gdp_mu
from dpstream.records import Reals


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """Noise and threshold of one (epsilon, delta) query for users with at most `rows` rows."""

    epsilon: float
    delta: float
    rows: int

    @property
    def units_sigma(self) -> float:
        """A user counts once in each of up to C keys: L2 sensitivity sqrt(C)."""
        mu = gdp_mu(epsilon=self.epsilon / 2, delta=self.delta / 3)
        return math.sqrt(self.rows) / mu

    @property
    def threshold(self) -> float:
        """Noisy users that no key of one user alone passes."""
        quantile = float(norm.isf(self.delta / 3 / self.rows))
        return 1 + quantile * self.units_sigma

    @property
    def sum_sigma(self) -> float:
        """All C rows may be of one key."""
        return self.rows / gdp_mu(epsilon=self.epsilon / 2, delta=self.delta / 3)

    def answer(self, units: Reals, sums: Reals, rng: np.random.Generator) -> Reals:
        """Noisy sums of the keys that pass; NaN for the others."""
        noisy = units + self.units_sigma * rng.standard_normal(len(units))
        values = sums + self.sum_sigma * rng.standard_normal(len(sums))
        return np.where((units > 0) & (noisy >= self.threshold), values, np.nan)


def share(*, epsilon: float, delta: float, times: int) -> tuple[float, float]:
    """The largest (epsilon, delta) that a query may have if `times` of them keep the promise.

    Half of delta is for the queries' own deltas.

    >>> each, _ = share(epsilon=6, delta=1e-9, times=1)
    >>> round(each, 3)
    6.0
    """
    own = -math.expm1(math.log1p(-delta / 2) / times)
    low, high = 0.0, epsilon
    for _ in range(60):
        middle = (low + high) / 2
        if composed_delta(middle, times, epsilon) <= delta / 2:
            low = middle
        else:
            high = middle
    return low, own


def composed_delta(each: float, times: int, epsilon: float) -> float:
    """The delta of `times` pure queries of `each` (Kairouz, Oh and Viswanath, Theorem 3.3).

    >>> round(composed_delta(1.0, 1, 0.5), 4) == round((math.e - math.e**0.5) / (1 + math.e), 4)
    True
    """
    lower = np.arange(times + 1)
    losses = (times - 2 * lower) * each
    chances = gammaln(times + 1) - gammaln(lower + 1) - gammaln(times - lower + 1)
    chances += (times - lower) * each - times * np.logaddexp(0, each)
    over = losses > epsilon
    return float((np.exp(chances[over]) * -np.expm1(epsilon - losses[over])).sum())


def repeated(
    events: Events, *, keys: int, triggers: int, one: OneShot, rng: np.random.Generator
) -> Reals:
    """Baseline 1: the last of `triggers` queries over all rows so far."""
    epsilon, delta = share(epsilon=one.epsilon, delta=one.delta, times=triggers)
    kept, before = events.bounded(one.rows)
    units = np.bincount(events.keys[kept & (before < 0)], minlength=keys).astype(np.float64)
    sums = np.bincount(events.keys[kept], minlength=keys).astype(np.float64)
    return OneShot(epsilon=epsilon, delta=delta, rows=one.rows).answer(units, sums, rng)


def incremental(
    events: Events, *, keys: int, triggers: int, one: OneShot, rng: np.random.Generator
) -> Reals:
    """Baseline 2: the sum of every trigger's own answer; what did not pass there is lost."""
    kept, before = events.bounded(one.rows)
    begins = events.begins(triggers)
    total = np.full(keys, np.nan)
    for trigger in range(triggers):
        rows = slice(begins[trigger], begins[trigger + 1])
        of, first = events.keys[rows][kept[rows]], before[rows][kept[rows]] < trigger
        present = np.unique(of)
        units = np.bincount(of[first], minlength=keys)[present].astype(np.float64)
        sums = np.bincount(of, minlength=keys)[present].astype(np.float64)
        found = one.answer(units, sums, rng)
        out = ~np.isnan(found)
        total[present[out]] = np.nan_to_num(total[present[out]]) + found[out]
    return total
