"""What a release amounts to: the delta of its Gaussian noise, its slack and its float error.

mu^2 of Gaussian noise, delta slack and float error (xi, tau) each add up, exactly, also over
adaptively chosen releases; here a sum is read as (epsilon, delta). Proofs:
`docs/soundness/accounting.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.curves import ROUND, Number, gdp_delta, number

_LARGE = 700.0  # e^700 is still a float


@dataclass(frozen=True, kw_only=True)
class FloatError:
    """The law sampled in floating point, against the ideal law that mu^2 and slack describe.

    On every dataset their log-ratio is at most xi outside an event of mass at most tau (under both
    laws). It belongs to a release as a whole: count it once.
    """

    xi: Fraction
    tau: Fraction

    def __post_init__(self) -> None:
        for name in ("xi", "tau"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | Fraction):
                raise InvalidParameter(
                    f"{name} must be a Fraction (or int), so that sums stay exact; got {value!r}; "
                    f"did you forget Fraction(...)?"
                )
            if value < 0:
                raise InvalidParameter(f"{name} must be zero or more; got {value}")
            object.__setattr__(self, name, Fraction(value))
        if self.tau > 1:
            raise InvalidParameter(f"tau is a probability and must be at most 1; got {self.tau}")


NO_FLOAT_ERROR = FloatError(xi=Fraction(0), tau=Fraction(0))


def delta_of(
    *,
    epsilon: Number,
    mu_squared: Number,
    delta_slack: Number = 0,
    error: FloatError = NO_FLOAT_ERROR,
) -> float:
    """An upper bound on delta, at epsilon, of all Gaussian noise, slack and float error together.

    `delta_slack`: the probability, under both neighbours, that all the rest fails.

    >>> f"{delta_of(epsilon=1, mu_squared=1):.9f}"
    '0.126936738'
    """
    budget, up = number("epsilon", epsilon), 1 + ROUND
    mu = math.sqrt(number("mu_squared", mu_squared)) * up
    slack = number("delta_slack", delta_slack) * up
    xi, tau = float(error.xi) * up, float(error.tau) * up
    if budget < 2 * xi:
        return 1.0
    inner = (budget - 2 * xi) * (1 - ROUND) if xi else budget
    ideal = gdp_delta(mu=mu, epsilon=inner) + slack
    return min(1.0, with_float_error(epsilon=inner, delta=ideal, xi=xi, tau=tau)[1])


def with_float_error(
    *, epsilon: Number, delta: Number, xi: Number, tau: Number
) -> tuple[float, float]:
    """The claim for a law within e^xi of an (epsilon, delta)-DP one outside a mass of tau.

    (epsilon + 2 xi, e^xi delta + (1 + e^(epsilon + xi)) tau).

    >>> with_float_error(epsilon=1, delta=0.25, xi=0, tau=0)
    (1.0, 0.25)
    """
    budget, failure = number("epsilon", epsilon), number("delta", delta)
    ratio, mass = number("xi", xi), number("tau", tau)
    if ratio == 0 and mass == 0:
        return budget, failure
    tail = (1 + _exp(budget + ratio)) * mass if mass else 0.0
    inflated = _exp(ratio) * failure if failure else 0.0
    return (budget + 2 * ratio) * (1 + ROUND), (inflated + tail) * (1 + ROUND)


def _exp(exponent: float) -> float:
    """An upper bound on e^exponent, infinite instead of an overflow."""
    return math.exp(exponent) * (1 + ROUND * (1 + exponent)) if exponent < _LARGE else math.inf
