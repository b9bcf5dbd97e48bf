"""Where public groups share a part of their noise, and how much of it.

Of a window that is published once that is all of the noise; of one that is published again and
again it is that of the measurement which the last release has of its own (`last_budget`), since
releases before it would need more noise than they save. Proof: `docs/soundness/correlated.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from dpstream.privacy.sensitivity import CorrelatedNoise, correlated_noise
from dpstream.query.aggregates import Measure
from dpstream.query.public_tables import NeedsTables
from dpstream.query.quantiles import Level

if TYPE_CHECKING:
    from dpstream.query.query import Query

SHARING_RULE = 2
"""Which rule says how much is shared. A run that began by another one is refused: it would draw the
same noise in other parts."""

_BY_ITSELF = 0.85  # of the noise without it: what is shared must have at most, if nobody asks


def why_not_shared(query: Query) -> str:
    """Why the groups of a query cannot share noise; empty: they can."""
    computed: Mapping[str, bool] = {} if query.finish is None else query.finish.computed
    if query.public_groups is None:
        return "needs public_groups: noise is shared by groups that everybody knows"
    if query.windows_reached != 1:
        return (
            "needs one window for all rows of a unit (privacy_unit_period as long as the windows, "
            "or one window): over several it gains nothing"
        )
    if query.pure or query.strategy != "latched" or query.grouping_sets:
        return "takes a delta, strategy = 'latched' and one set of keys"
    if query.last_budget is None and max(query.starting(0).schedule.lengths) > 1:
        return (
            "needs last_budget where windows are published again and again: a unit that comes to "
            "its groups one after another would lose more than by noise of their own, so only what "
            "the last release measures once more is shared"
        )
    if query.choose_rows or query.choose_clamps:
        return "goes with rows and clamps that are given: with others it is not counted"
    if any(computed.values()):
        return (
            "does not go with computed columns that have error bars, which take the noise of "
            "groups for independent; compute them from the releases, or leave it out"
        )
    return ""


def shares_by_itself(query: Query) -> bool:
    """Is much less noise published with it, and nothing asked that would have more?

    What is computed from several groups might; so nothing may be computed. A little less is not
    worth what it costs those who add groups up.
    """
    if query.public_groups is None or isinstance(query.public_groups, NeedsTables):
        return False
    if query.per_unit is not None or (query.finish is not None and query.finish.computed):
        return False
    if why_not_shared(query):
        return False
    longest = max(query.starting(0).schedule.lengths)
    if query.candidates:
        query = query.with_bounds(query.widest_bounds)
    found = (shared_noise(query, measure, longest) for measure in query.measures)
    return any(noise is not None and noise.ratio <= _BY_ITSELF for noise in found)


def noise_as_begun(query: Query, facts: Mapping[str, str]) -> Query:
    """The query as a run has begun with it, where nobody has said how; `facts`: of that run."""
    if query.correlated_noise is not None or query.public_groups is None:
        return query
    return replace(query, correlated_noise="correlated_noise" in facts)


def shared_noise(query: Query, column: Measure, releases: int) -> CorrelatedNoise | None:
    """At mu = 1, of a column of groups in windows with so many releases; None: it has none.

    Signed columns, such as sums about a middle, levels of quantiles and totals gain nothing by it.
    """
    public, bounds = query.public_groups, query.bounds
    if public is None or isinstance(public, NeedsTables):
        return None
    if isinstance(column, Level) or column in query.totals or column.signed:
        return None
    if releases > 1 and query.last_budget is None:
        return None
    once = column.kind == "units" or column.per_unit
    noise = correlated_noise(
        known=len(public),
        rows=min(bounds.rows, bounds.groups) if once else bounds.rows,
        per_group=1 if once else bounds.rows_per_group,
        groups=bounds.groups,
        largest=column.largest,
        beside=Fraction(0) if releases == 1 or query.last_budget is None else 1 - query.last_budget,
    )
    if noise is not None and query.bounds_chosen and noise.ratio > _BY_ITSELF:
        return None  # of a period, whether it was asked for or not
    return noise
