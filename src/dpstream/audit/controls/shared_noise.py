"""One noise value for all bins of a step, as public code of this field draws it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.privacy.sensitivity import histogram_change
from dpstream.records import Integers, Release


@dataclass(frozen=True, kw_only=True)
class SharedNoise(HistogramMechanism, identity="control/shared_noise"):
    """Uniform's budget and scale, but every bin gets the same draw.

    What is wrong: the difference of two bins is released exactly, so no epsilon holds. The ledger
    cannot see it, for the charge is that of a sound step.
    """

    def start(self) -> None:
        """No memory is needed."""

    def step(self, state: None, x: Integers, spend: Spender) -> tuple[None, list[Release]]:
        """Add one number to every count."""
        noise = spend.laplace(
            np.zeros(1, np.int64),
            sensitivity=histogram_change(),
            epsilon=self.budget / self.window,
            purpose="publish",
        )
        values = (x + noise[0]).astype(np.float64)
        return None, [Release(step=spend.step, values=values, paid=True)]
