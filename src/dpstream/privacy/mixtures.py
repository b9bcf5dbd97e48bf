"""The joint privacy loss of pure and GDP parts.

An epsilon-DP release is at most as revealing as randomised response, whose privacy loss is epsilon
or -epsilon, and a GDP release as a pair of normals. Few parts: the exact expectation over the
losses of the responses. Many parts: the privacy loss distribution of `dp-accounting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from dpstream.privacy.curves import ROUND, gdp_deltas, pure_rho

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
