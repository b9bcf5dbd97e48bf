"""What privacy events amount to: the (epsilon, delta) of everything that was composed.

Events are first added up, exactly. The sum is then converted by every bound that applies to it and
the least delta is taken; all of them are sound, also for adaptively chosen mechanisms:

    add        pure epsilons come off epsilon, the rest is converted alone; GDP and zCDP parts meet
               with epsilon and delta split between them
    zCDP       pure and GDP parts become zCDP: rho = epsilon tanh(epsilon/2), mu^2 / 2
    mixture    pure and GDP parts by their joint privacy loss (`mixtures`); not with zCDP parts,
               which have no dominating pair

Proofs: `docs/soundness/accounting.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln

from dpstream.privacy.accounting import curves, privacy_events
from dpstream.privacy.accounting.curves import (
    ROUND,
    Number,
    gdp_deltas,
    number,
    probability,
    pure_rho,
)
from dpstream.privacy.accounting.privacy_events import Total, total

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The joint privacy loss of pure and GDP parts.
#
# An epsilon-DP release is at most as revealing as randomised response, whose privacy loss is
# epsilon or -epsilon, and a GDP release as a pair of normals. Few parts: the exact expectation over
# the losses of the responses. Many parts: the privacy loss distribution of `dp-accounting`.

MOST_STATES = 100_000
"""Number of joint losses up to which the expectation is computed exactly."""

_NEGLIGIBLE = -200.0
_GRID_POINTS = 200_000
_FFT_ROUND = 1e-11
_FFT_ROUND_PER_COPY = 1e-15
"""Room for the absolute error of the transforms: against exact expectations they fell short by
up to 6e-12 for 10^5 copies, 6e-17 per copy."""

Floats: TypeAlias = NDArray[np.float64]


def curve(
    pure: Sequence[tuple[Fraction, int]], mu: float, *, most_states: int = MOST_STATES
) -> Callable[[float], float]:
    """Upper bounds on delta, as a function of epsilon.

    >>> f"{curve([(Fraction(1), 2)], 0.0)(0.0):.6f}"  # equals tanh(1/2)
    '0.462117'
    """
    groups = [_responses(float(epsilon), count) for epsilon, count in pure]
    states = math.prod(len(losses) for losses, _, _ in groups)
    return _expectation(groups, mu) if states <= most_states else _distribution(pure, mu)


def _expectation(
    groups: Sequence[tuple[Floats, Floats, float]], mu: float
) -> Callable[[float], float]:
    """E[delta_mu(epsilon - L)], L the summed loss of the responses."""
    losses, logs, dropped = np.zeros(1), np.zeros(1), 0.0
    for more_losses, more_logs, more_dropped in groups:
        losses = np.add.outer(losses, more_losses).ravel()
        logs = np.add.outer(logs, more_logs).ravel()
        dropped += more_dropped
    weights = np.exp(logs)
    shift = ROUND * float(np.abs(losses).max())

    def delta(epsilon: float) -> float:
        lowered = epsilon * (1 - ROUND) - shift
        return min(1.0, float(weights @ gdp_deltas(mu, lowered - losses)) * (1 + ROUND) + dropped)

    return delta


def _responses(epsilon: float, count: int) -> tuple[Floats, Floats, float]:
    """Losses of `count` randomised responses, bounds on their log-probabilities, mass left out.

    Losses of negligible probability are left out; their mass counts as failure.
    """
    truths = np.arange(count + 1.0)
    log_truth = -math.log1p(math.exp(-epsilon))
    ways = gammaln(count + 1) - gammaln(truths + 1) - gammaln(count - truths + 1)
    room = ROUND * (1 + 3 * gammaln(count + 1) + count * (1 + epsilon))
    logs = ways + count * log_truth - (count - truths) * epsilon + room
    kept = logs > _NEGLIGIBLE
    dropped = float(np.exp(logs[~kept]).sum()) * (1 + count * ROUND)
    return ((2 * truths - count) * epsilon)[kept], logs[kept], dropped


def _distribution(pure: Sequence[tuple[Fraction, int]], mu: float) -> Callable[[float], float]:
    """The pessimistic distribution on a grid as fine as the width of the loss allows."""
    from dp_accounting.pld import common, privacy_loss_distribution

    rho = sum(pure_rho(epsilon) * count for epsilon, count in pure) + mu * mu / 2
    grid = (rho + 10 * math.sqrt(2 * rho)) / _GRID_POINTS
    parts = [
        privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(float(epsilon) * (1 + ROUND), 0),
            value_discretization_interval=grid,
        ).self_compose(count)
        for epsilon, count in pure
    ]
    if mu:
        parts.append(
            privacy_loss_distribution.from_gaussian_mechanism(
                1 / mu, value_discretization_interval=grid
            )
        )
    joint = parts[0]
    for part in parts[1:]:
        joint = joint.compose(part)
    room = _FFT_ROUND + _FFT_ROUND_PER_COPY * sum(count for _, count in pure)
    return lambda epsilon: min(1.0, max(0.0, joint.get_delta_for_epsilon(epsilon)) + room)


Curve: TypeAlias = Callable[[float], float]

_LARGE = 700.0
_NEVER = 1e12


def _gaussian_parts(rho: float, mu: float, epsilon: float) -> float:
    """A bound on the delta of a zCDP part and a GDP part, each with its share of epsilon."""
    if epsilon < 0:
        return 1.0
    if rho == 0 or mu == 0:
        return curves.zcdp_delta(rho=rho, epsilon=epsilon) + (
            curves.gdp_delta(mu=mu, epsilon=epsilon) if mu else 0.0
        )

    def split(share: float) -> float:
        left, right = share * epsilon * (1 - ROUND), (1 - share) * epsilon * (1 - ROUND)
        delta = curves.gdp_delta(mu=mu, epsilon=left) + curves.zcdp_delta(rho=rho, epsilon=right)
        return math.log(delta)

    best = minimize_scalar(split, bounds=(0, 1), method="bounded")
    return math.exp(float(best.fun)) * (1 + 2**10 * ROUND)


def _ideal_curve(parts: Total) -> Curve:
    """The least of all bounds on delta, for pure, zCDP and GDP parts."""
    up, down = 1 + ROUND, 1 - ROUND
    added, rho = float(parts.epsilon) * up, float(parts.rho) * up
    mu = math.sqrt(parts.mu_squared) * up
    pure_rho = sum(curves.pure_rho(epsilon) * count for epsilon, count in parts.pure)
    concentrated = (rho + mu * mu / 2 + pure_rho * up) * up
    bounds: list[Curve] = [lambda epsilon: _gaussian_parts(rho, mu, epsilon - added)]
    if parts.pure or (rho and mu):
        bounds.append(lambda epsilon: curves.zcdp_delta(rho=concentrated, epsilon=epsilon * down))
    if parts.pure and not rho:
        bounds.append(curve(parts.pure, mu))
    if not (rho or mu):
        bounds.append(lambda epsilon: float(epsilon < parts.epsilon))
    return lambda epsilon: min(bound(epsilon) for bound in bounds)


def _curve(event: privacy_events.Event) -> Curve:
    """Delta as a function of epsilon, tails and float error included."""
    parts = total(event)
    ideal = _ideal_curve(parts)
    up = 1 + ROUND
    extra, xi, tau = float(parts.delta) * up, float(parts.xi) * up, float(parts.tau) * up

    def delta(epsilon: float) -> float:
        if epsilon < 2 * xi:
            return 1.0
        inner = (epsilon - 2 * xi) * (1 - ROUND) if xi else epsilon
        outer = with_float_error(epsilon=inner, delta=ideal(inner) + extra, xi=xi, tau=tau)[1]
        return min(1.0, outer)

    return delta


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


def delta_of(event: privacy_events.Event, *, epsilon: Number) -> float:
    """An upper bound on the delta of everything in an event, at epsilon.

    >>> from dpstream.privacy.accounting.privacy_events import Composed, DeltaSlack, Gaussian
    >>> both = Composed(events=(Gaussian(mu_squared=1), DeltaSlack(delta=0)))
    >>> f"{delta_of(both, epsilon=1):.9f}"
    '0.126936738'
    """
    return _curve(event)(number("epsilon", epsilon))


def epsilon_of(event: privacy_events.Event, *, delta: Number) -> float:
    """An upper bound on the epsilon of everything in an event, at delta (which may be 0).

    Infinite where no epsilon will do, such as a Gaussian at delta 0.

    >>> epsilon_of(privacy_events.Repeated(event=privacy_events.Pure(epsilon=1), count=2), delta=0)
    2.0
    """
    bound = number("delta", delta) and probability("delta", delta)
    curve = _curve(event)
    if curve(0.0) <= bound:
        return 0.0
    enough = max(1.0, float(total(event).epsilon))
    while curve(enough) > bound:
        enough *= 2
        if enough > _NEVER:
            return math.inf
    return curves.last_safe(lambda epsilon: curve(epsilon) <= bound, enough, 0.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Upper bounds on delta over a grid of epsilons."""

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]


def profile(
    event: privacy_events.Event, *, epsilons: Sequence[float] | NDArray[np.float64]
) -> Profile:
    """The (epsilon, delta) profile of an event.

    >>> profile(privacy_events.Pure(epsilon=1), epsilons=[1.0, 2.0]).deltas
    array([0., 0.])
    """
    grid = np.array([number("epsilon", epsilon) for epsilon in epsilons])
    curve = _curve(event)
    return Profile(epsilons=grid, deltas=np.array([curve(float(epsilon)) for epsilon in grid]))


def plot_profile(known: Profile, *, label: str | None = None) -> Axes:
    """Draw a profile on the current axes; needs matplotlib."""
    from matplotlib import pyplot

    axes = pyplot.gca()
    axes.semilogy(known.epsilons, known.deltas, label=label)
    axes.set(xlabel="epsilon", ylabel="delta")
    return axes


def group_privacy(*, epsilon: Number, delta: Number, size: int) -> tuple[float, float]:
    """The promise to `size` units together, from an (epsilon, delta) promise to one.

    (size epsilon, delta (1 + e^epsilon + ... + e^((size - 1) epsilon))).

    >>> group_privacy(epsilon=1, delta=0, size=3)
    (3.0, 0.0)
    """
    budget, failure = number("epsilon", epsilon), number("delta", delta)
    privacy_events.whole("size", size, least=1)
    if failure == 0:
        return size * budget, 0.0
    growth = sum(_exp(step * budget) for step in range(size))
    return size * budget * (1 + ROUND), min(1.0, failure * growth * (1 + ROUND * size))
