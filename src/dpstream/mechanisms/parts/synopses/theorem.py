"""Theorem 5.4 of DPI: the dilogarithm inverted, and what the series costs that it states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from scipy.optimize import brentq
from scipy.special import spence

from dpstream.errors import InvalidParameter


@dataclass(frozen=True, kw_only=True)
class Theorem54:
    """The series as the paper states it, for a claimed epsilon; `true_cost` is what it spends.

    C (Li2(1) - Li2(m^2)) = epsilon with C = change_of_pdf / (mu zeta).

    >>> printed = Theorem54(epsilon=2, mu=0.5)
    >>> round(printed.m_squared, 4), [round(printed.eta(t), 4) for t in (1, 2, 3)]
    (0.8337, [0.0415, 0.019, 0.0117])
    >>> round(Theorem54(epsilon=1, mu=2).true_cost / 1, 3)
    4.0
    """

    epsilon: float
    mu: float
    zeta: float = 1.0
    change_of_pdf: float = 2.0

    @property
    def constant(self) -> float:
        """The paper's C."""
        return self.change_of_pdf / (self.mu * self.zeta)

    @cached_property
    def m_squared(self) -> float:
        """Li2^-1(pi^2 / 6 - epsilon / C)."""
        return 1 - gap_for(
            self.epsilon / self.constant,
            lambda most: (
                f"Theorem 5.4 needs epsilon < C pi^2 / 6 = {self.constant * most:g} (C = "
                f"{self.constant:g}); got epsilon={self.epsilon:g}; lower epsilon, mu or zeta"
            ),
        )

    def x(self, t: int) -> float:
        """X_t."""
        return one_minus_power(1 - self.m_squared, t) / (t * t * self.zeta)

    def eta(self, t: int) -> float:
        """The learning rate of slot t: tanh(X_t / 2) / 2."""
        return math.tanh(self.x(t) / 2) / 2

    @property
    def true_cost(self) -> float:
        """What all draws cost a user: 2 score_change * sum of X_t."""
        change = min(2.0, 2 * self.change_of_pdf / self.mu)
        return 2 * change * self.epsilon / self.constant / self.zeta


def dilogarithm(x: float) -> float:
    """Li2(x) = sum of x^t / t^2, for x up to 1.

    >>> round(dilogarithm(1) - math.pi**2 / 6, 15)
    0.0
    """
    return float(spence(1 - x))


def _missing(gap: float) -> float:
    """Li2(1) - Li2(1 - gap) = Li2(gap) + ln(gap) ln(1 - gap), without loss for small gaps."""
    return dilogarithm(gap) + math.log(gap) * math.log1p(-gap)


def gap_for(missing: float, complaint: Callable[[float], str]) -> float:
    """The gap in (0, 1) with `_missing(gap)` = missing."""
    most = math.pi**2 / 6
    if missing <= 0:
        return 0.0
    if missing >= most:
        raise InvalidParameter(complaint(most))
    low, high = 1e-300, 1 - 2.0**-53
    if _missing(high) <= missing:
        return high
    logarithm = brentq(
        lambda x: _missing(math.exp(x)) - missing, math.log(low), math.log(high), xtol=1e-14
    )
    return math.exp(logarithm)


def one_minus_power(gap: float, t: int) -> float:
    """1 - (1 - gap)^t, without loss for small gaps."""
    return -math.expm1(t * math.log1p(-gap))
