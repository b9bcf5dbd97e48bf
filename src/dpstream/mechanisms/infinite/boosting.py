"""Boosting in both directions: synopses that answer well gain weight, and so do queries that they
answer badly.

Guarantee: a step's score lies in [-1, 1] and one user moves it by at most `change`; the sum of t
such scores, with whatever queries and synopses earlier draws have chosen, by at most t times that.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.infinite.synopsis_pool import (
    GRID,
    BinGroups,
    Grouping,
    Naturals,
    Pool,
    groups_of,
    pool,
)
from dpstream.privacy.sensitivity import score_change
from dpstream.records import Integers

SCORE: Final = 1 << 20
"""Scores are whole multiples of 1 / SCORE."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A pool and the queries that it answers, with the answers of every synopsis."""

    pool: Pool
    queries: tuple[BinGroups, ...]

    @cached_property
    def _answers(self) -> list[Naturals | None]:
        """By query, synopses x groups; None where every bin stands for itself."""
        return [None if one.single else self.pool.grouped(one) for one in self.queries]

    def errors(self, probabilities: Naturals, query: int) -> Integers:
        """How far every synopsis is from the right answer to one query, in grid steps."""
        answers = self._answers[query]
        if answers is None:
            return self.pool.distances(probabilities)
        wanted = self.queries[query].sum(probabilities).astype(np.uint32)
        return self.pool.distances(wanted, answers)

    def errors_of(self, synopsis: int, probabilities: Naturals) -> Integers:
        """How far one synopsis is from the right answer to every query, in grid steps."""
        off = self.pool.member(synopsis).astype(np.int64) - probabilities
        sums = (off if one.single else one.sum(off) for one in self.queries)
        return np.array([np.abs(one).sum() for one in sums])


@lru_cache(maxsize=2)
def workload(
    name: str, queries: tuple[Grouping, ...], *, bins: int, size: int, seed: int
) -> Workload:
    """Made once and kept, for it is large."""
    found = pool(name, bins=bins, size=size, seed=seed)
    return Workload(pool=found, queries=groups_of(queries, bins))


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """1 for an error below lambda, -1 from lambda + mu on, straight in between (Algorithm 1)."""

    error_bound: Fraction
    overfitting_bound: Fraction

    def __post_init__(self) -> None:
        if not (0 <= self.error_bound <= 2 and 0 < self.overfitting_bound <= 2):
            raise InvalidParameter(
                "L1 distances of distributions are at most 2: error_bound must be in [0, 2] and "
                f"overfitting_bound in (0, 2]; got {self.error_bound} and {self.overfitting_bound}"
            )

    @property
    def span(self) -> int:
        """Mu in grid steps."""
        return max(int(self.overfitting_bound * GRID), 1)

    def of(self, errors: Integers) -> Integers:
        """Scores of errors, in whole multiples of 1 / SCORE."""
        free = int(self.error_bound * GRID)
        scores = SCORE * (self.span + 2 * (free - errors)) // self.span
        return np.clip(scores, -SCORE, SCORE)

    def change(self, pdf_change: Fraction, bins: int) -> Fraction:
        """How far one user moves a score, in whole multiples of 1 / SCORE."""
        return score_change(pdf_change, bins=bins, grid=GRID, span=self.span, steps=SCORE)
