"""Truncate values at a bound that is chosen privately, so that less noise is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpstream.mechanisms.base import SeriesMechanism, Spender
from dpstream.mechanisms.parts.delayed import checked_delay
from dpstream.privacy.amounts import Amount
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


@storable("sensitivity_truncation")
@dataclass(frozen=True, kw_only=True)
class SensitivityTruncation(SeriesMechanism):
    """Any event-level mechanism, on values truncated at a bound that is renewed now and then.

    `inside`: the mechanism's name; `options`: its other parameters, as (name, value) pairs.
    `every`: delays between renewals; `share` of epsilon that a renewal takes from its batch;
    `candidates`: how many bounds are tried. `sampled`: 0, or k: every k-th value of each group
    chooses the bound with its own share of epsilon and is not read again.
    """

    delay: int
    inside: str = "contin_group"
    options: tuple[tuple[str, Any], ...] = ()
    every: int = 5
    share: Amount = "1/2"
    candidates: int = 20
    sampled: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delay", checked_delay(self.delay, 1, "a batch has a step"))

    @classmethod
    def of(cls, mechanism: SeriesMechanism, **parameters: Any) -> SensitivityTruncation:
        """Around a mechanism, with its epsilon, range and delay."""
        raise NotImplementedError

    def start(self) -> Any:
        """Nothing is known."""

    def step(self, state: Any, x: Integers, spend: Spender) -> tuple[Any, list[Release]]:
        """."""
        raise NotImplementedError
