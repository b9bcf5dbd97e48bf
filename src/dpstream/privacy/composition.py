"""Adding events up, exactly; and the same events as a group of units sees them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, singledispatch
from typing import Any

from dpstream.errors import UnknownPrivacyEvent
from dpstream.privacy import events


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

    >>> total(events.Repeated(event=events.Pure(epsilon=1), count=3)).epsilon
    Fraction(3, 1)
    """
    raise UnknownPrivacyEvent(
        f"no accounting rule for {event!r}; use an event of dpstream.privacy.events, "
        f"or register a rule with total.register"
    )


@total.register
def _(event: events.Pure) -> Total:
    return Total(pure=((event.epsilon, 1),) if event.epsilon else ())


@total.register
def _(event: events.Concentrated) -> Total:
    return Total(rho=event.rho)


@total.register
def _(event: events.Gaussian) -> Total:
    return Total(mu_squared=event.mu_squared)


@total.register
def _(event: events.Tail) -> Total:
    return Total(delta=event.delta)


@total.register
def _(event: events.FloatError) -> Total:
    return Total(xi=event.xi, tau=event.tau)


@total.register
def _(event: events.Repeated) -> Total:
    return total(event.event).times(event.count)


@total.register
def _(event: events.Composed) -> Total:
    return sum(map(total, event.events), Total())


def group(event: events.Event, *, size: int) -> events.Event:
    """The event seen by `size` units together: epsilon grows by size, rho and mu^2 by size^2.

    A tail has no such rule of its own: convert to (epsilon, delta) and use `group_privacy`.

    >>> group(events.Concentrated(rho=Fraction(1, 2)), size=3)
    Concentrated(rho=Fraction(9, 2))
    """
    grown = partial(group, size=events.whole("size", size, least=1))
    match event:
        case events.Pure():
            return events.Pure(epsilon=event.epsilon * size)
        case events.Concentrated():
            return events.Concentrated(rho=event.rho * size**2)
        case events.Gaussian():
            return events.Gaussian(mu_squared=event.mu_squared * size**2)
        case events.FloatError():
            return event
        case events.Repeated():
            return events.Repeated(event=grown(event.event), count=event.count)
        case events.Composed():
            return events.Composed(events=tuple(map(grown, event.events)))
        case _:
            raise UnknownPrivacyEvent(
                f"no rule for a group of {size} units under {event!r}; "
                f"convert to (epsilon, delta) and use group_privacy"
            )
