"""Privacy events: frozen facts about what a mechanism may have revealed.

A mechanism says what it did with one of these values; `dpstream.privacy.accounting` says what the
facts amount to. Budgets are exact rationals, so that composing is exact.

    Pure           epsilon-DP
    Concentrated   rho-zCDP: discrete Gaussians, and nothing better is true of them
    Gaussian       mu-GDP: continuous Gaussians (also rounded afterwards)
    Tail           the other facts may fail, with probability at most delta
    FloatError     the law that was sampled is only close to the ideal one
    Repeated       one event, count times
    Composed       several events
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dpstream.errors import InvalidParameter


def _exact(name: str, value: object) -> Fraction:
    """Check that a budget is an exact number, zero or more."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise InvalidParameter(
            f"{name} must be a Fraction (or int), so that sums stay exact; got {value!r}; "
            f"did you forget Fraction(...)?"
        )
    if value < 0:
        raise InvalidParameter(f"{name} must be zero or more; got {value}")
    return Fraction(value)


def _probability(name: str, value: object) -> Fraction:
    exact = _exact(name, value)
    if exact > 1:
        raise InvalidParameter(f"{name} is a probability and must be at most 1; got {exact}")
    return exact


def whole(name: str, value: object, *, least: int) -> int:
    """Check that a number of things is an integer, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidParameter(f"{name} must be an integer, {least} or more; got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Pure:
    """An epsilon-DP release.

    >>> Pure(epsilon=Fraction(1, 2))
    Pure(epsilon=Fraction(1, 2))
    """

    epsilon: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _exact("epsilon", self.epsilon))


@dataclass(frozen=True, kw_only=True)
class Concentrated:
    """A rho-zCDP release: Renyi divergence of order a at most rho a, for every a > 1.

    The discrete Gaussian with L2 sensitivity s and parameter sigma has rho = s^2 / (2 sigma^2).
    It is not GDP, so there is no way from this event to the GDP formulas.
    """

    rho: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", _exact("rho", self.rho))


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """A mu-GDP release: at most as revealing as N(0, 1) against N(mu, 1).

    A continuous Gaussian of standard deviation sigma on a query of L2 sensitivity s has
    mu = s / sigma; what is computed from the noisy value, rounding included, keeps it.
    """

    mu_squared: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu_squared", _exact("mu_squared", self.mu_squared))


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The events it is composed with hold outside an event of probability at most delta.

    The probability is meant under both neighbours. An (epsilon, delta)-DP release is
    `Composed(events=(Pure(epsilon=...), Tail(delta=...)))`.
    """

    delta: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _probability("delta", self.delta))


@dataclass(frozen=True, kw_only=True)
class FloatError:
    """The law sampled in floating point, against the ideal law that the other events describe.

    On every dataset their log-ratio is at most xi outside an event of mass at most tau (under both
    laws). It belongs to a release as a whole: compose it once with the release's other events.
    """

    xi: Fraction
    tau: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "xi", _exact("xi", self.xi))
        object.__setattr__(self, "tau", _probability("tau", self.tau))


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One event, `count` times, each with fresh noise; later ones may depend on earlier results."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        whole("count", self.count, least=0)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """Several events, each with fresh noise; later ones may depend on earlier results.

    >>> Composed(events=[Pure(epsilon=1), Tail(delta=0)]).events
    (Pure(epsilon=Fraction(1, 1)), Tail(delta=Fraction(0, 1)))
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))


Event: TypeAlias = Pure | Concentrated | Gaussian | Tail | FloatError | Repeated | Composed
