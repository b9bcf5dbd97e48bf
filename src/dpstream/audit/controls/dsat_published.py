"""DSAT as one sparse vector for the whole stream: its threshold noise is drawn once.

What is wrong: see `spas_published`; a proof for one positive does not cover the next one, and
positives outside a window reveal the noise that protects the tests inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.mechanisms.parts.above_threshold import AboveThreshold
from dpstream.mechanisms.parts.distance import distance
from dpstream.mechanisms.w_event.dsat import Dsat, DsatState
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers


@dataclass(frozen=True, kw_only=True)
class DsatPublished(Dsat, identity="control/dsat"):
    """`Dsat` without fresh runs, charged for what it draws.

    Half of the test budget for the threshold, the other half for c positives per window; the run
    is never closed, and each positive is charged to every window, because rho is shared.
    """

    def _decide(self, state: DsatState, x: Integers, spend: Spender) -> tuple[DsatState, bool]:
        if state.values is None:
            return state, True
        half = on_grid(self.testing / 2)
        if state.run is None:
            run = AboveThreshold.open(spend, epsilon=half, sensitivity=histogram_change())
            state = replace(state, run=run)
        assert state.run is not None
        assert state.values is not None
        if state.published.units_before(spend.step) > self._limits[0]:
            return state, False
        noisy = spend.laplace(
            np.array([distance(state.values, x)]),
            sensitivity=histogram_change(),
            epsilon=on_grid(half / (2 * self.samples)),
            purpose="test",
            interval=state.run.interval,
        )
        positive = int(noisy[0]) - state.run.rho > self._threshold(state)
        if positive:
            spend.open_interval(on_grid(half / self.samples), purpose="positive")
        return state, positive
