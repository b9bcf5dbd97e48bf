"""Publish every value at once with noise as wide as the public range."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpstream.mechanisms.base import Remembers, SeriesMechanism, Spender, release_or_hold
from dpstream.privacy.amounts import laplace_stddev
from dpstream.records import Integers, Release


@dataclass(frozen=True, kw_only=True)
class Naive(SeriesMechanism, identity="naive"):
    """Laplace noise of scale (hi - lo) / epsilon on every value.

    Guarantee: event-level epsilon-DP: each value is read once.
    Unit: one value, replaced by any other in [`lo`, `hi`]. Several bins are one value each, so one
        event changes one bin of one step.
    Delay: none.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025 (its baseline).

    >>> from dpstream import release
    >>> series = release(Naive(epsilon=1, lo=0, hi=100), [10, 20, 500], secret=bytes(32))
    >>> series.values.shape, round(float(series.stddev[0, 0]), 1)
    ((3, 1), 141.4)
    """

    remembers: ClassVar[Remembers] = "releases"
    constant_charges: ClassVar[bool] = True

    @cached_property
    def noise(self) -> float:
        """Standard deviation, in grid steps."""
        return laplace_stddev(self.change, self.budget)

    def step(self, state: None, x: Integers, spend: Spender) -> tuple[None, list[Release]]:
        """Noise on every value, at once."""
        noisy = spend.laplace(x, sensitivity=self.change, epsilon=self.budget, purpose="publish")
        quantum = float(self.range[2])
        values, stddev = noisy.astype(np.float64) * quantum, self.noise * quantum
        return None, [release_or_hold(spend.step, values, paid=True, stddev=stddev)]
