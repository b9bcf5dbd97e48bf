"""SPAS as printed: one threshold noise for the whole stream, and test budget moved to publications.

What is wrong: the noise rho is drawn once, so the outcomes of ever more tests reveal it. A
neighbour's tests are then protected by their own noise alone, test by test, and the shift of rho
that the proof makes has to be paid by every positive of the stream, not of one window. The first
window spends epsilon on publications alone, more than epsilon if the interval does not divide w,
and direct publications take test budget that is still in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.above_threshold import AboveThreshold
from dpstream.mechanisms.w_event.spas import Spas, SpasState
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class SpasPublished(Spas, identity="control/spas"):
    """Algorithm 2 of the paper, charged for what it draws.

    The run that holds rho is never closed; each positive is charged to every window, because rho
    is shared. A ledger refuses that sooner or later, at the latest after a few positives.
    """

    @cached_property
    def _warm_up_share(self) -> Fraction:
        return on_grid(self.budget * self._warm_up_interval / self.window)

    def _decide(self, state: SpasState, x: Integers, spend: Spender) -> tuple[SpasState, bool]:
        costs, now = self._by_count(state.count), spend.step
        spent = state.published.units_before(now)
        half = on_grid(self.testing / 2)
        if state.run is None:
            run = AboveThreshold.open(spend, epsilon=half, sensitivity=histogram_change())
            state = replace(state, run=run)
        assert state.run is not None
        assert state.values is not None
        if spent > costs.before_publication:
            return state, False
        if self._covers_the_rest(state, spent, costs, now):
            return state, True
        noisy = spend.laplace(
            np.array([np.abs(state.values - x).sum()]),
            sensitivity=histogram_change(),
            epsilon=on_grid(half / (2 * state.count * len(x))),
            purpose="test",
            interval=state.run.interval,
        )
        threshold = len(x) * costs.error
        positive = int(noisy[0]) - state.run.rho > threshold
        if positive:
            spend.open_interval(on_grid(half / state.count), purpose="positive")
        return state, positive


def svt_loss(
    distances: Sequence[float],
    neighbour: Sequence[float],
    outcomes: Sequence[bool],
    *,
    threshold: float,
    rho_scale: float,
    nu_scale: float,
) -> float:
    """Log ratio of the probabilities of these outcomes, when one rho serves all the tests.

    Summed over rho on the integers; nu has the continuous law, whose distribution function is
    closed.
    """
    farthest = max(abs(threshold - distance) for distance in (*distances, *neighbour))
    reach = math.ceil(40 * (rho_scale + nu_scale) + farthest)
    rho = np.arange(-reach, reach + 1, dtype=np.float64)
    prior = -np.abs(rho) / rho_scale
    log_likelihoods = []
    for stream in (distances, neighbour):
        total = prior.copy()
        for distance, above in zip(stream, outcomes, strict=True):
            total += _log_tail((threshold + rho - distance) / nu_scale, above=above)
        log_likelihoods.append(float(np.logaddexp.reduce(total)))
    return log_likelihoods[0] - log_likelihoods[1]


def _log_tail(at: Reals, *, above: bool) -> Reals:
    """Log P[Lap(1) > at], or log P[Lap(1) <= at]."""
    side = at if above else -at
    tail: Reals = np.where(
        side >= 0, math.log(0.5) - side, np.log1p(-0.5 * np.exp(np.minimum(side, 0.0)))
    )
    return tail
