"""What the synopses that were drawn so far say of the distribution: Bayes' rule over the pool.

A drawn synopsis is a noisy answer of which the law is public: a distribution near synopsis m draws
a with weight exp(scale score(m, a)). So each draw says of every member of the pool how likely it is
to be what the data look like, and their mean is closer than the draw itself, most of all where
budgets are small and the draw is nearly blind. Nothing here reads data: it is a function of what
was drawn, and costs nothing.

The evidence begins with even odds for "nothing is known" (the uniform distribution) against the
pool, and fades a little with every draw, for the stream may have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.infinite.synopsis_pool import GRID, Naturals, Pool, even
from dpstream.records import Integers, Reals

FADES: Final = 0.15
"""The part of the evidence that is given up between two draws."""

_UNKNOWN: Final = 0.5
"""What is said for the uniform distribution before the first draw."""

_NEAR: Final = 0.2  # L1: closer to the uniform distribution than that counts as uniform
_DRAWS: Final = 1_024  # synopses over which the weights of a draw are added up
_ROWS: Final = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Posterior:
    """Weights of all members of a pool and, last, of the uniform distribution; they add up to 1.

    `score`: of L1 distances in grid steps, 1 at best.
    """

    pool: Pool
    score: Callable[[Integers], Reals]

    def start(self) -> Reals:
        """Before the first draw."""
        members = np.full(len(self.pool), (1 - _UNKNOWN) / len(self.pool))
        return np.append(members, _UNKNOWN)

    def update(self, weights: Reals, drawn: int, scale: float) -> Reals:
        """The weights after synopsis `drawn` came with weight exp(scale score)."""
        faded = (1 - FADES) * weights + FADES * self.start()
        fits = scale * self.score(self._distances(self.pool.member(drawn)))
        logs = np.log(faded) + fits - _normalisers(self, scale)
        likely = np.exp(logs - logs.max())
        updated: Reals = likely / likely.sum()
        return updated

    def mean(self, weights: Reals) -> Reals:
        """The distribution to publish: the uniform one, where as much speaks for it as against it.

        Otherwise the mean of those that are not nearly uniform.
        """
        bins = self.pool.units.shape[1]
        apart = weights * ~self._nearly_even
        mass = float(apart.sum())
        if mass <= _UNKNOWN:
            return even(bins)
        members = apart[:-1] / mass
        total = np.full(bins, float((members * self.pool.floor).sum()))
        for first in range(0, len(members), _ROWS):
            part = slice(first, first + _ROWS)
            units = (members[part] * self.pool.unit[part])[:, None] * self.pool.units[part]
            total += units.sum(axis=0)
        normal: Reals = total / total.sum()
        return normal

    @cached_property
    def _nearly_even(self) -> npt.NDArray[np.bool_]:
        return self._distances(self._even) <= _NEAR * GRID

    @cached_property
    def _even(self) -> Naturals:
        bins = self.pool.units.shape[1]
        return np.full(bins, GRID // bins, dtype=np.uint32)

    def _distances(self, probabilities: Naturals) -> Integers:
        """Of all members and of the uniform distribution, in grid steps."""
        last = np.abs(probabilities.astype(np.int64) - self._even).sum()
        return np.append(self.pool.distances(probabilities), last)

    @cached_property
    def scores(self) -> tuple[Integers, npt.NDArray[np.float32]]:
        """The synopses that are looked at, evenly chosen, and what each scores for each weight."""
        chosen = np.unique(np.linspace(0, len(self.pool) - 1, _DRAWS).astype(np.int64))
        columns = [self.score(self._distances(self.pool.member(int(j)))) for j in chosen]
        return chosen, np.array(columns, dtype=np.float32).T


@lru_cache(maxsize=8)
def _normalisers(posterior: Posterior, scale: float) -> Reals:
    """The log of what all weights of a draw add up to, for each member.

    Its own is exp(scale); the others are added up over those that are looked at.
    """
    members = len(posterior.pool)
    chosen, scores = posterior.scores
    exponents = scale * scores.astype(np.float64)
    exponents[chosen, np.arange(len(chosen))] = -np.inf
    itself = np.arange(members + 1) < members
    others = (members - itself) / (len(chosen) - np.isin(np.arange(members + 1), chosen))
    logs: Reals = np.logaddexp(
        np.where(itself, scale, -np.inf), np.logaddexp.reduce(exponents, axis=1) + np.log(others)
    )
    return logs
