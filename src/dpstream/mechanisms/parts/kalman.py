"""A scalar Kalman filter shared by all bins: random walk, public variances.

Guarantee: post-processing; it reads releases and public constants.
Paper: Fan, Xiong, "An Adaptive Approach to Real-Time Aggregate Monitoring with Differential
    Privacy", 2014 (FAST).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpstream.privacy.state.serial import storable
from dpstream.records import Reals

PROCESS, MEASUREMENT, START = 1e5, 1e6, 100.0  # variances, public


@storable("kalman")
@dataclass(frozen=True, kw_only=True, eq=False)
class Kalman:
    """The posterior: one estimate per bin, one variance for all (they share every update)."""

    estimate: Reals | None = None
    variance: float = START

    def predict(self) -> Kalman:
        """One step passes: the estimate stays, its variance grows."""
        return replace(self, variance=self.variance + PROCESS)

    def correct(self, measured: Reals) -> Kalman:
        """A noisy measurement arrives; the first one is taken as it is."""
        if self.estimate is None:
            return replace(self, estimate=measured)
        gain = self.variance / (self.variance + MEASUREMENT)
        estimate = self.estimate + gain * (measured - self.estimate)
        return Kalman(estimate=estimate, variance=self.variance * (1 - gain))
