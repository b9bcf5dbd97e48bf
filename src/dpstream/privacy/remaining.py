"""How much of a book is spent and left, in epsilon, which people know, whatever the book counts.

A book of users counts mu^2, which adds up; epsilons do not. What a part of its mu^2 comes to by
itself is the epsilon that this much Gaussian noise keeps at the delta that the whole book has at
its own epsilon. So nothing spent is 0, all of it is the book's epsilon, and in between what is
spent and what is left are together more than the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dpstream.privacy.amounts import show
from dpstream.privacy.charges import Terms


def as_epsilon(terms: Terms, amount: Fraction) -> float | None:
    """The epsilon of a part of a book by itself; None for a book that names no epsilon.

    >>> from dpstream.privacy.promises import promise
    >>> book = promise(epsilon=4, delta=1e-8)
    >>> [round(as_epsilon(book, book.total * part), 2) for part in (0, Fraction(1, 2), 1)]
    [0.0, 2.75, 4.0]
    """
    if terms.measure == "epsilon":
        return float(max(amount, Fraction(0)))
    if terms.measure != "mu_squared" or terms.epsilon is None:
        return None
    if amount <= 0 or amount >= terms.total:
        return 0.0 if amount <= 0 else float(terms.epsilon)
    # what it imports is slow to import, and every ledger imports this
    from dpstream.privacy.curves import gdp_delta, gdp_epsilon

    slack = 2 * terms.drift
    delta = gdp_delta(mu=math.sqrt(terms.total), epsilon=terms.epsilon - slack)
    if not 0 < delta < 1:
        return None
    found = gdp_epsilon(mu=math.sqrt(amount), delta=delta) + float(slack * amount / terms.total)
    return min(found, float(terms.epsilon))


def shown(terms: Terms, amount: Fraction) -> str:
    """An amount of a book for people: "epsilon = 0.25", or what else the book counts."""
    found = as_epsilon(terms, amount)
    if found is None:
        return f"{terms.measure} = {show(amount)}"
    return f"epsilon = {_short(found)}"


def spent_and_left(report: Mapping[str, Any]) -> str:
    """One line on a book as `Ledger.report` has it.

    >>> from dpstream.privacy.promises import promise
    >>> def told(left):
    ...     terms = promise(epsilon=2, delta=1e-9)
    ...     return spent_and_left({"terms": terms.to_json(), "left": str(terms.total * left),
    ...                            "left_next_step": "0"})
    >>> told(1), told(0)
    ('epsilon: 0 of 2 spent, 2 left', 'epsilon: 2 of 2 spent, 0 left')
    >>> told(Fraction(1, 2))
    'epsilon: 1.39 of 2 spent, 1.39 left for further queries (epsilons do not simply add up)'
    """
    terms, left = Terms.from_json(dict(report["terms"])), Fraction(report["left"])
    spent, rest = as_epsilon(terms, terms.total - left), as_epsilon(terms, left)
    if spent is None or rest is None:
        known = f"{terms.measure}: {show(terms.total - left)} of {show(terms.total)} spent"
        return f"{known}{_where(terms)}, {show(_next(terms, left, report))} left{_then(terms)}"
    whole = terms.epsilon if terms.measure == "mu_squared" else terms.total
    assert whole is not None
    line = f"epsilon: {_short(spent)} of {_short(float(whole))} spent{_where(terms)}"
    if terms.unit != "user":
        return f"{line}, {_short(float(_next(terms, left, report)))} left{_then(terms)}"
    line += f", {_short(rest)} left"
    if terms.measure == "epsilon" or not 0 < left < terms.total:
        return line
    return f"{line} for further queries (epsilons do not simply add up)"


def _next(terms: Terms, left: Fraction, report: Mapping[str, Any]) -> Fraction:
    """What the next step may spend; where users are protected, steps do not matter."""
    return left if terms.unit == "user" else Fraction(report["left_next_step"])


def _where(terms: Terms) -> str:
    return {
        "event": " on the newest step",
        "w_event": f" in the last {terms.window} steps",
        "user": "",
    }[terms.unit]


def _then(terms: Terms) -> str:
    return "" if terms.unit == "user" else " at the next step"


def _short(amount: float) -> str:
    """Three digits; what is spent and what is left are estimates where they are not whole."""
    return f"{amount:.6g}" if amount == round(amount, 2) else f"{amount:.3g}"
