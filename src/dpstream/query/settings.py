"""Settings that a query chooses where nobody gives them: from public facts alone.

A query that gives no `max_groups_contributed` leaves the rest to be chosen, too. What is chosen
follows from the number of releases and from what is asked, never from rows, so that it is a
parameter as any other: every proof holds for whatever value it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dpstream.query.query import Query

USUAL_GROUPS: Final = 16
"""Groups of a unit for ever that count, where nobody says how many (`docs/benchmarks.md`)."""
_GRID = 20  # parts of the budget that `last_budget` is a number of
_MANY = 100_000  # releases beyond which the part does not change any more


def part_of_last(releases: int) -> Fraction | None:
    """The part of the budget that measures a window's last release once more; None: nothing.

    A running counter's last release has R times the variance of one release alone, R being that of
    the square root of the matrix of ones. With a part b the variance of the releases before grows
    by 1 / (1 - b), and that of the last one falls to 1 / ((1 - b) / R + b): their product is least
    at b = (R - 2) / (2 R - 2).

    >>> [str(part_of_last(releases)) for releases in (1, 3, 8, 24, 100, 1000)]
    ['None', 'None', '1/4', '7/20', '2/5', '9/20']
    """
    factor, squares = 1.0, 1.0
    for release in range(1, min(releases, _MANY)):
        factor *= 1 - 0.5 / release
        squares += factor * factor
    times = squares**2
    parts = round(_GRID * (times - 2) / (2 * times - 2)) if times > 2 else 0
    return Fraction(parts, _GRID) if parts else None


def settings_as_begun(query: Query, facts: Mapping[str, str]) -> Query:
    """The query with what its run has begun with, where nobody gives it; `facts`: of that run.

    So a run goes on as it is, whatever a later version would choose.
    """
    begun: dict[str, Any] = {}
    for name in {"last_budget", "debias"} & {*query.planned} & facts.keys():
        told = json.loads(facts[name])
        begun[name] = Fraction(told["is"]) if isinstance(told, dict) else told
    if "debias" in begun and begun["debias"] is None and "report_bias" not in facts:
        begun["report_bias"] = False  # it was left out with what is made up for
    changed = any(getattr(query, name) != value for name, value in begun.items())
    return replace(query, **begun) if changed else query
