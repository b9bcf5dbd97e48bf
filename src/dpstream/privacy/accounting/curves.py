"""Closed forms between mu (GDP), rho (zCDP) and (epsilon, delta).

Every answer is an upper bound on the true epsilon or delta: the float error of each formula is
estimated term by term, with room to spare, and added. Formulas and proofs:
`docs/soundness/accounting.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import scipy  # which loads `scipy.optimize` when it is used: a start takes less
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr, ndtri_exp

from dpstream.errors import InvalidParameter

Number: TypeAlias = float | Fraction

ROUND = 2.0**-48
"""Relative room for a term's float error: sixteen times the rounding of one operation, or more."""

_LOG_ORDER = (-40.0, 60.0)
_TINY = math.ulp(0.0)


def number(name: str, value: Number) -> float:
    """Check that a parameter is finite and zero or more."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not (0 <= result < math.inf):
        raise InvalidParameter(f"{name} must be a finite number, zero or more; got {value!r}")
    return result


def probability(name: str, value: Number) -> float:
    """Check that a parameter lies strictly between 0 and 1."""
    result = number(name, value)
    if not 0 < result < 1:
        raise InvalidParameter(f"{name} must lie strictly between 0 and 1; got {value!r}")
    return result


def last_safe(safe: Callable[[float], bool], good: float, bad: float) -> float:
    """Bisect to the border of a monotone predicate; the answer is on the safe side."""
    for _ in range(200):
        middle = (good + bad) / 2
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if safe(middle) else (good, middle)
    return good


def _mills(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Phi(-x) / phi(x)."""
    result: NDArray[np.float64] = math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))
    return result


def gdp_log_deltas(mu: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper bounds on log delta of mu-GDP, mu > 0, at epsilons zero or more.

    With u, v = epsilon/mu -+ mu/2, e^epsilon phi(v) = phi(u) turns Phi(-u) - e^epsilon Phi(-v) into
    phi(u) (R(u) - R(v)), R the Mills ratio: no small difference of logarithms, and no underflow.
    """
    middle = epsilons / mu
    u, v = middle - mu / 2, middle + mu / 2
    log_density = -u * u / 2 - math.log(2 * math.pi) / 2
    right = np.maximum(u, 0)
    gap = _mills(right) - _mills(v) + ROUND * (_mills(right) + v / (1 + right * right))
    upper_tail = log_density + np.log(gap) + ROUND * (1 + right * v)
    density = np.exp(log_density)
    lower = ndtr(-u) - density * _mills(v) + ROUND * (1 + v * density * (1 + np.abs(u)))
    logs = np.where(u >= 0, upper_tail, np.log(np.maximum(lower, _TINY)))
    result: NDArray[np.float64] = np.minimum(logs, 0.0)
    return result


def _probabilities(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponentiate upper bounds; what underflows becomes the smallest float, never 0."""
    result: NDArray[np.float64] = np.clip(np.exp(logs) * (1 + ROUND), _TINY, 1.0)
    return result


def gdp_delta(*, mu: Number, epsilon: Number) -> float:
    """The delta of mu-GDP at epsilon: Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2).

    >>> f"{gdp_delta(mu=1, epsilon=1):.9f}"
    '0.126936738'
    """
    mean, budget = number("mu", mu), number("epsilon", epsilon)
    return float(_probabilities(gdp_log_deltas(mean, np.array(budget)))) if mean else 0.0


def _gdp_fits(mu: float, epsilon: float, delta: float) -> bool:
    return mu == 0 or float(gdp_log_deltas(mu, np.array(epsilon))) <= math.log(delta) * (1 + ROUND)


def gdp_epsilon(*, mu: Number, delta: Number) -> float:
    """The epsilon of mu-GDP at delta.

    >>> f"{gdp_epsilon(mu=0.5, delta=1e-9):.6f}"
    '2.909732'
    """
    mean, bound = number("mu", mu), probability("delta", delta)
    # delta <= Phi(-u) <= exp(-u^2/2) gives an epsilon that is certainly large enough.
    enough = 1.001 * mean * (mean / 2 + math.sqrt(-2 * math.log(bound))) + _TINY
    if _gdp_fits(mean, 0.0, bound):
        return 0.0
    return last_safe(lambda epsilon: _gdp_fits(mean, epsilon, bound), enough, 0.0)


def gdp_mu(*, epsilon: Number, delta: Number) -> float:
    """The largest mu that is (epsilon, delta)-DP, rounded down."""
    budget, bound = number("epsilon", epsilon), probability("delta", delta)
    bad = 1.0
    while _gdp_fits(bad, budget, bound):
        bad *= 2
    return last_safe(lambda mu: _gdp_fits(mu, budget, bound), 0.0, bad)


def _order(log_less_one: float) -> tuple[float, float, float]:
    """Renyi order a = 1 + b from log b: b, a and -b log(1 - 1/a)."""
    less_one = math.exp(log_less_one)
    return less_one, 1 + less_one, less_one * math.log1p(math.exp(-log_less_one))


def zcdp_delta(*, rho: Number, epsilon: Number) -> float:
    """The delta of rho-zCDP at epsilon.

    The least e^(b (a rho - epsilon)) (1 - 1/a)^a / b over the orders a = 1 + b > 1. Every order
    gives a true bound, so the search for the best one cannot hurt. The logarithm is convex in a;
    its slope is (2a - 1) rho - epsilon + log(1 - 1/a).
    Paper: Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020.

    >>> f"{zcdp_delta(rho=0.1, epsilon=3):.3e}"
    '1.794e-11'
    """
    loss, budget = number("rho", rho), number("epsilon", epsilon)
    if loss == 0:
        return 0.0

    def slope(log_less_one: float) -> float:
        less_one = math.exp(log_less_one)
        return (2 * less_one + 1) * loss - budget - math.log1p(math.exp(-log_less_one))

    low, high = _LOG_ORDER
    if slope(high) <= 0:
        best = high
    else:
        best = low if slope(low) >= 0 else scipy.optimize.brentq(slope, low, high)
    less_one, order, power = _order(best)
    terms = (less_one * order * loss, -less_one * budget, -math.log(order), -power)
    log_delta = sum(terms) + ROUND * (1 + sum(map(abs, terms)))
    return float(_probabilities(np.array(min(log_delta, 0.0))))


def _best(objective: Callable[[float], float]) -> float:
    """The least value found over all orders; each objective here has a single valley."""
    best = scipy.optimize.minimize_scalar(
        objective, bounds=_LOG_ORDER, method="bounded", options={"xatol": 1e-9}
    )
    return float(best.fun)


def zcdp_epsilon(*, rho: Number, delta: Number) -> float:
    """The epsilon of rho-zCDP at delta, by the same bound as `zcdp_delta`.

    >>> f"{zcdp_epsilon(rho=0.1, delta=1e-9):.6f}"
    '2.715482'
    """
    loss, bound = number("rho", rho), probability("delta", delta)
    if loss == 0:
        return 0.0

    def epsilon(log_less_one: float) -> float:
        less_one, order, power = _order(log_less_one)
        terms = (-math.log(bound), -math.log(order), -power)
        total = sum(terms) + ROUND * (1 + sum(map(abs, terms)))
        return (order * loss) * (1 + ROUND) + total / less_one

    return max(0.0, _best(epsilon))


def zcdp_rho(*, epsilon: Number, delta: Number) -> float:
    """The largest rho that `zcdp_delta` shows to be (epsilon, delta)-DP, rounded down.

    >>> f"{zcdp_rho(epsilon=3, delta=1e-9 / 3):.9f}"
    '0.114179926'
    """
    budget, bound = number("epsilon", epsilon), probability("delta", delta)

    def minus_rho(log_less_one: float) -> float:
        less_one, order, power = _order(log_less_one)
        terms = (less_one * budget, math.log(bound), math.log(order), power)
        return -(sum(terms) - ROUND * (1 + sum(map(abs, terms)))) / (order * less_one)

    return max(0.0, -_best(minus_rho))


def pure_rho_above(epsilon: Fraction) -> Fraction:
    """A rational not below epsilon tanh(epsilon/2), for the ledger.

    The lower of e^2/2 - e^4/24 + e^6/240 (the series of tanh alternates, so its third partial sum
    is above it) and epsilon itself.

    >>> float(pure_rho_above(Fraction(1, 10))) < 0.005, pure_rho_above(Fraction(9))
    (True, Fraction(9, 1))
    """
    square = epsilon * epsilon
    return min(square / 2 - square**2 / 24 + square**3 / 240, epsilon)


def pure_mu_above(epsilon: Number) -> Fraction:
    """A rational not below 2 Phi^-1(e^epsilon / (1 + e^epsilon)): epsilon-DP is mu-GDP.

    >>> f"{float(pure_mu_above(1)):.6f}"
    '1.232035'
    """
    budget = number("epsilon", epsilon)
    mu = -2 * float(ndtri_exp(-budget - math.log1p(math.exp(-budget))))
    return Fraction(mu * (1 + ROUND) + ROUND)


def choice_mu_above(epsilon: Number) -> Fraction:
    """The same for the exponential mechanism: the logarithms of its odds span epsilon at most.

    >>> f"{float(choice_mu_above(1)):.6f}"
    '0.623893'
    """
    return pure_mu_above(Fraction(number("epsilon", epsilon)) / 2)


def choice_epsilon(mu: Number) -> Fraction:
    """The largest epsilon of an exponential mechanism that `choice_mu_above` shows to be mu-GDP.

    >>> f"{float(choice_epsilon(1)):.6f}"
    '1.613931'
    """
    mean = number("mu", mu)
    guess = 2 * float(log_ndtr(mean / 2) - log_ndtr(-mean / 2))
    return Fraction(last_safe(lambda epsilon: choice_mu_above(epsilon) <= mean, 0.0, guess * 1.01))
