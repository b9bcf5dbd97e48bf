"""A controller that turns the filter's feedback error into the distance to the next sample.

Guarantee: post-processing; it reads releases and public constants.
Paper: Fan, Xiong, "An Adaptive Approach to Real-Time Aggregate Monitoring with Differential
    Privacy", 2014 (FAST).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpstream.privacy.state.serial import storable

PROPORTIONAL, INTEGRAL, MEMORY = 0.9, 0.1, 5
GAIN, SET_POINT = 5.0, 0.1


@storable("pid")
@dataclass(frozen=True, kw_only=True)
class Pid:
    """The sampling interval and the last feedback errors."""

    interval: float = 1.0
    errors: tuple[float, ...] = ()

    def feed(self, error: float) -> Pid:
        """A sample's feedback error: below the set point the interval grows, above it shrinks.

        >>> Pid().feed(0.0).interval > 1, Pid(interval=9.0).feed(0.5).interval
        (True, 1.0)
        """
        errors = (*self.errors, error)[-MEMORY:]
        control = PROPORTIONAL * error + INTEGRAL * sum(errors) / len(errors)
        excess = min((control - SET_POINT) / SET_POINT, 50.0)  # e^50 already means "at once"
        interval = max(1.0, self.interval + GAIN * (1 - math.exp(excess)))
        return Pid(interval=interval, errors=errors)
