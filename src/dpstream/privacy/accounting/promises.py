"""The book of an (epsilon, delta) promise to users, and what a query takes from such a book.

What a query over users spends has three parts: mu^2 of its Gaussian noise, delta slack (its
thresholds may fail with a small probability), and float error (xi, tau). All of them add up over
the queries of a dataset, and together they keep, at the book's epsilon,

    delta = e^xi (delta_GDP(mu, epsilon - 2 xi) + delta_slack) + (1 + e^(epsilon - xi)) tau

(`docs/soundness/accounting.md`). A book counts tau inside `delta_slack`, times 1 + e^epsilon for
the *book's* epsilon: that of one query is smaller where several share the book.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import FloatError, delta_of
from dpstream.privacy.accounting.calibration import mu_squared_for, rho_for, round_down, round_up
from dpstream.privacy.amounts import Amount, on_grid, positive
from dpstream.privacy.ledger.charges import Charge, Terms

ALL_ROWS = "all its rows"
"""What a user changes, as books of queries over users state it."""

ROUNDING_SHARE = Fraction(1, 400)
"""The part of epsilon that a promise allows for rounding; as it counts twice, it takes 0.5%."""
_MOST_ROUNDING = Fraction(1, 100)
_MOST_EPSILON = 600  # e^epsilon stays a float


def rows_of(unit: str, *, time: str | None = None) -> str:
    """What one unit changes: all rows that name it, in `unit`; of a period, those whose `time` is
    in it. Queries that share a book must mean the same.

    >>> rows_of("user_id"), rows_of("user_id", time="ts")
    ("all rows with one 'user_id'", "all rows with one 'user_id' and 'ts' in one period")
    """
    rows = f"all rows with one {unit!r}"
    return rows if time is None else f"{rows} and {time!r} in one period"


def promise(
    *,
    epsilon: Amount,
    delta: Amount,
    privacy_unit_period: str = "forever",
    time_zone: str = "UTC",
    change: str = ALL_ROWS,
) -> Terms:
    """The terms of a book that all queries on a dataset share: (epsilon, delta) for each user.

    Half of delta is for Gaussian noise, half is slack, both made smaller by e^-rounding_slack.

    >>> book = promise(epsilon=6, delta=1e-9, privacy_unit_period="1 day")
    >>> book.describe()
    'mu_squared = 0.912113, tail = 4.95e-10, drift = 0.01 for all rows of one user (1 day)'
    >>> delta_of_terms(book) <= 1e-9
    True
    """
    budget, failure = positive(epsilon, "epsilon"), positive(delta, "delta")
    if budget > _MOST_EPSILON or failure >= 1:
        raise InvalidParameter(
            f"a promise needs epsilon <= {_MOST_EPSILON} and delta < 1; got {epsilon=}, {delta=}"
        )
    rounding_slack = on_grid(min(budget * ROUNDING_SHARE, _MOST_ROUNDING))
    half = failure / 2 * (1 - rounding_slack) * (1 - Fraction(1, 2**20))  # e^x (1 - x) <= 1
    total = on_grid(mu_squared_for(epsilon=budget - 2 * rounding_slack, delta=half))
    if total <= 0:
        raise InvalidParameter(f"no finite noise keeps {epsilon=}, {delta=}; raise one of them")
    return Terms(
        unit="user",
        total=total,
        measure="mu_squared",
        period=privacy_unit_period,
        time_zone=time_zone,
        change=change,
        delta_slack=round_down(half),
        rounding_slack=rounding_slack,
        epsilon=budget,
    )


def own_terms(
    *,
    epsilon: Fraction,
    mu_squared: Fraction,
    delta_slack: Fraction,
    error: FloatError,
    period: str,
    time_zone: str,
    change: str = ALL_ROWS,
) -> Terms:
    """The terms of a book that holds one query and no more; `Ledger.admit` opens it."""
    bare = Terms(unit="user", total=mu_squared, measure="mu_squared", epsilon=epsilon)
    return Terms(
        unit="user",
        total=mu_squared,
        measure="mu_squared",
        period=period,
        time_zone=time_zone,
        change=change,
        delta_slack=with_lost_mass(bare, delta_slack=delta_slack, error=error),
        rounding_slack=error.xi,
        epsilon=epsilon,
    )


def with_lost_mass(terms: Terms, *, delta_slack: Fraction, error: FloatError) -> Fraction:
    """What a query takes from the book's `delta_slack`: its own, and the mass that floats may lose.

    A law that is wrong on a mass of tau costs (1 + e^(epsilon + xi)) tau, where epsilon is that of
    everything in the book, less rounding; 1 + e^epsilon is a bound for every share of it.
    """
    if not error.tau:
        return delta_slack
    return delta_slack + round_up(lost_mass_factor(terms) * error.tau)


def lost_mass_factor(terms: Terms) -> Fraction:
    """How often a book counts the mass that floats may lose: 1 + e^epsilon, rounded up."""
    if terms.epsilon is None or terms.epsilon > _MOST_EPSILON:
        raise InvalidParameter(
            f"float noise needs a book that names its epsilon, {_MOST_EPSILON} at most; this one "
            f"promises {terms.describe()}; open it with promise(epsilon=..., delta=...)"
        )
    return round_up(1 + math.exp(float(round_up(terms.epsilon))) * (1 + 2.0**-40))


def price_lost_mass(terms: Terms, charge: Charge) -> Charge:
    """The charge with its lost float mass in its slack, as the book of these terms counts it."""
    lost = round_up(lost_mass_factor(terms) * charge.lost_mass)
    return replace(charge, delta_slack=charge.delta_slack + lost)


def with_budget(charge: Charge, old: Terms, new: Terms) -> Charge:
    """A charge of a book that had one budget, as the book counts it with another.

    Only the lost float mass depends on the budget. Charges that older versions wrote do not say
    how much of their slack it is: then all of it counts as such, unless epsilon is lowered.
    """
    if not charge.delta_slack or old.epsilon is None or new.epsilon is None:
        return charge
    before, after = lost_mass_factor(old), lost_mass_factor(new)
    if charge.lost_mass:
        own = charge.delta_slack - round_up(before * charge.lost_mass)
        slack = own + round_up(after * charge.lost_mass)
    else:
        slack = charge.delta_slack * max(after / before, Fraction(1))
    return replace(charge, delta_slack=slack)


def same_promise(terms: Terms, *, epsilon: Amount, delta: Amount | None) -> Terms:
    """A book's terms with another budget; `delta` None: the one that it has.

    Books of users are read as `promise` does. Others count `epsilon` in their own measure, or, if a
    delta is given and they count rho or mu^2, what that (epsilon, delta) amounts to.

    >>> book = promise(epsilon=2, delta=1e-8)
    >>> same_promise(book, epsilon=4, delta=None) == promise(epsilon=4, delta=1e-8)
    True
    """
    if terms.unit == "user" and terms.measure == "mu_squared" and terms.epsilon is not None:
        budget = promise(epsilon=epsilon, delta=_delta_of(terms) if delta is None else delta)
        return terms.with_budget_of(budget)
    total = positive(epsilon, "epsilon")
    if delta is not None:
        convert = {"rho": rho_for, "mu_squared": mu_squared_for}.get(terms.measure)
        if convert is None:
            raise InvalidParameter("this book counts epsilon alone; leave delta out")
        total = on_grid(convert(epsilon=total, delta=positive(delta, "delta")))
    return replace(terms, total=total)


def _delta_of(terms: Terms) -> Fraction:
    """The delta that a book was opened with: the short decimal whose promise is this one."""
    least, epsilon = delta_of_terms(terms), terms.epsilon
    assert epsilon is not None
    for digits in range(16):
        delta = Fraction(f"{least:.{digits}e}")
        last_digit = Fraction(f"1e{math.floor(math.log10(least)) - digits}")
        for candidate in (delta, delta + last_digit):
            if terms == terms.with_budget_of(promise(epsilon=epsilon, delta=candidate)):
                return candidate
    raise InvalidParameter(
        f"this book was opened by a query, for itself (delta = {least:.3g}); say which delta it is "
        "to have: --delta"
    )


def delta_of_terms(terms: Terms) -> float:
    """An upper bound on delta, at the book's epsilon, when all of a GDP book is spent."""
    if terms.epsilon is None or terms.measure != "mu_squared":
        raise InvalidParameter(
            f"only a book of mu_squared that names its epsilon has a delta; this one promises "
            f"{terms.describe()}"
        )
    return delta_of(
        epsilon=terms.epsilon,
        mu_squared=terms.total,
        delta_slack=terms.delta_slack,
        error=FloatError(xi=terms.rounding_slack, tau=Fraction(0)),
    )
