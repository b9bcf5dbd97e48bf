"""Privacy events: frozen facts about what a mechanism may have revealed.

A mechanism says what it did with one of these values; `accountant` says what the facts
amount to. Budgets are exact rationals, so that composing is exact.

    Pure           epsilon-DP
    Concentrated   rho-zCDP: discrete Gaussians, and nothing better is true of them
    Gaussian       mu-GDP: continuous Gaussians (also rounded afterwards)
    Tail           the other facts may fail, with probability at most delta
    FloatError     the law that was sampled is only close to the ideal one
    Repeated       one event, count times
    Composed       several events
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, singledispatch
from typing import Any, TypeAlias

from dpstream.errors import InvalidParameter, UnknownPrivacyEvent


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
class DeltaSlack:
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

    >>> Composed(events=[Pure(epsilon=1), DeltaSlack(delta=0)]).events
    (Pure(epsilon=Fraction(1, 1)), DeltaSlack(delta=Fraction(0, 1)))
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))


Event: TypeAlias = Pure | Concentrated | Gaussian | DeltaSlack | FloatError | Repeated | Composed


# Adding events up, exactly; and the same events as a group of units sees them.


@dataclass(frozen=True, kw_only=True)
class Total:
    """Events added up. `pure` holds each epsilon with its count, in order."""

    pure: tuple[tuple[Fraction, int], ...] = ()
    rho: Fraction = Fraction(0)
    mu_squared: Fraction = Fraction(0)
    delta: Fraction = Fraction(0)
    xi: Fraction = Fraction(0)
    tau: Fraction = Fraction(0)

    def __add__(self, other: Total) -> Total:
        pure = Counter(dict(self.pure))
        pure.update(dict(other.pure))
        return Total(
            pure=tuple(sorted(pure.items())),
            rho=self.rho + other.rho,
            mu_squared=self.mu_squared + other.mu_squared,
            delta=self.delta + other.delta,
            xi=self.xi + other.xi,
            tau=self.tau + other.tau,
        )

    def times(self, count: int) -> Total:
        """The sum of `count` copies."""
        return Total(
            pure=tuple((epsilon, copies * count) for epsilon, copies in self.pure if count),
            rho=self.rho * count,
            mu_squared=self.mu_squared * count,
            delta=self.delta * count,
            xi=self.xi * count,
            tau=self.tau * count,
        )

    @property
    def epsilon(self) -> Fraction:
        """The sum of the pure epsilons."""
        return sum((epsilon * count for epsilon, count in self.pure), Fraction(0))


@singledispatch
def total(event: Any) -> Total:
    """Add an event up; a kind of event without a rule is refused.

    >>> total(Repeated(event=Pure(epsilon=1), count=3)).epsilon
    Fraction(3, 1)
    """
    raise UnknownPrivacyEvent(
        f"no accounting rule for {event!r}; use an event of "
        "dpstream.privacy.accounting.privacy_events, or register a rule with total.register"
    )


@total.register
def _(event: Pure) -> Total:
    return Total(pure=((event.epsilon, 1),) if event.epsilon else ())


@total.register
def _(event: Concentrated) -> Total:
    return Total(rho=event.rho)


@total.register
def _(event: Gaussian) -> Total:
    return Total(mu_squared=event.mu_squared)


@total.register
def _(event: DeltaSlack) -> Total:
    return Total(delta=event.delta)


@total.register
def _(event: FloatError) -> Total:
    return Total(xi=event.xi, tau=event.tau)


@total.register
def _(event: Repeated) -> Total:
    return total(event.event).times(event.count)


@total.register
def _(event: Composed) -> Total:
    return sum(map(total, event.events), Total())


def group(event: Event, *, size: int) -> Event:
    """The event seen by `size` units together: epsilon grows by size, rho and mu^2 by size^2.

    A tail has no such rule of its own: convert to (epsilon, delta) and use `group_privacy`.

    >>> group(Concentrated(rho=Fraction(1, 2)), size=3)
    Concentrated(rho=Fraction(9, 2))
    """
    grown = partial(group, size=whole("size", size, least=1))
    match event:
        case Pure():
            return Pure(epsilon=event.epsilon * size)
        case Concentrated():
            return Concentrated(rho=event.rho * size**2)
        case Gaussian():
            return Gaussian(mu_squared=event.mu_squared * size**2)
        case FloatError():
            return event
        case Repeated():
            return Repeated(event=grown(event.event), count=event.count)
        case Composed():
            return Composed(events=tuple(map(grown, event.events)))
        case _:
            raise UnknownPrivacyEvent(
                f"no rule for a group of {size} units under {event!r}; "
                f"convert to (epsilon, delta) and use group_privacy"
            )
