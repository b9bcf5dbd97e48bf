"""Has something passed a threshold yet? Any number of tests for the price of one run.

Guarantee: a run of budget e costs e to every neighbour, however many of its tests read changed
steps, and whatever else is published in between from its own budget. Each test compares

    distance + nu > threshold + rho,    rho ~ Lap(Delta / e1) once,  nu ~ Lap(2 Delta / e2) anew,

with e1 + e2 <= e, and the run ends with the first "yes". If the neighbour's distances differ by at
most Delta, each in any direction, then rho -> rho + Delta turns every "no" into a "no" of the
neighbour (cost e1, once), and nu -> nu + 2 Delta in the last test turns the "yes" into a "yes"
(cost e2). Noise and distances are integers, so the shifts are exact. The threshold may be any
function of releases. Only yes or no leaves a run; rho stays in the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.ledger.charges import Interval
from dpstream.privacy.state.serial import storable

_THRESHOLD_SHARE = Fraction(1000, 2587)
"""e1 : e2 = 1 : 2^(2/3), which minimises Var(rho) + Var(nu); 2^(2/3) = 1.587..."""


@lru_cache(maxsize=64)
def split(budget: Fraction) -> tuple[Fraction, Fraction]:
    """e1 for the threshold and e2 for the tests, together at most `budget`.

    >>> e1, e2 = split(Fraction(1))
    >>> e1 + e2, abs(float(e2 / e1) - 2 ** (2 / 3)) < 1e-3
    (Fraction(1, 1), True)
    """
    threshold = on_grid(budget * _THRESHOLD_SHARE)
    return threshold, budget - threshold


@storable("above threshold")
@dataclass(frozen=True, kw_only=True)
class AboveThreshold:
    """An open run: its interval in the ledger, its noisy shift, the budget of its tests."""

    interval: Interval
    rho: int
    epsilon: Fraction
    sensitivity: Fraction

    @classmethod
    def open(cls, spend: Spender, *, epsilon: Fraction, sensitivity: Fraction) -> AboveThreshold:
        """Charge a run that stays open until its first "yes"."""
        interval = spend.open_interval(epsilon, purpose="above threshold")
        rho = spend.laplace(
            np.zeros(1, np.int64),
            sensitivity=sensitivity,
            epsilon=split(epsilon)[0],
            purpose="threshold",
            interval=interval,
        )
        return cls(interval=interval, rho=int(rho[0]), epsilon=epsilon, sensitivity=sensitivity)

    @cached_property
    def for_test(self) -> Fraction:
        """Half of e2: nu ~ Lap(2 Delta / e2)."""
        return on_grid(split(self.epsilon)[1] / 2)

    def exceeds(self, distance: int, threshold: Fraction, spend: Spender) -> bool:
        """One test; a "yes" ends the run with this step."""
        noisy = spend.laplace(
            np.array([distance]),
            sensitivity=self.sensitivity,
            epsilon=self.for_test,
            purpose="test",
            interval=self.interval,
        )
        above = (int(noisy[0]) - self.rho) * threshold.denominator
        if above <= threshold.numerator:
            return False
        spend.close_interval(self.interval)
        return True


_T = TypeVar("_T")


def with_changes(record: _T, **fields: Any) -> _T:
    """`dataclasses.replace`, in half of the time, for records without cached properties.

    >>> from dpstream.mechanisms.w_event.fast import Pid
    >>> with_changes(Pid(), interval=3.0)
    Pid(interval=3.0, errors=())
    """
    return type(record)(**(record.__dict__ | fields))
