"""Publish sums of whole blocks, and smooth them over the delay: a mechanism of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpstream.mechanisms.base import SeriesMechanism, Spender
from dpstream.mechanisms.parts.delayed import checked_delay
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


@storable("block_smoother")
@dataclass(frozen=True, kw_only=True)
class BlockSmoother(SeriesMechanism):
    """Noisy sums of blocks of steps, whose length is learnt from them, smoothed over the delay.

    Guarantee: event-level epsilon-DP: a value enters one sum, with noise Delta / epsilon; how long
        blocks are, and how they are smoothed, is decided from earlier sums alone.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: less than `delay` steps.
    Paper: none of it; the filter is that of Kalman, "A New Approach to Linear Filtering and
        Prediction Problems", 1960.
    """

    delay: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", checked_delay(self.delay, 1, "a block has a step"))

    def start(self) -> Any:
        """Nothing is known."""

    def step(self, state: Any, x: Integers, spend: Spender) -> tuple[Any, list[Release]]:
        """."""
        raise NotImplementedError
