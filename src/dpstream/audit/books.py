"""Whole books, as the audit attacks them: what is shipped, and what is broken.

Every kind of book is spent to its end by several parts that share a dataset, each of them killed
and begun again: a book of users (mu squared) by queries of both strategies, one of windows
(epsilon) and one of single events (rho) by SQL and by mechanisms that are fed counts.

The hard pair: a unit at all its bounds in every part, in groups so large that all are shown. In a
book of users most of the budget is in one query: over many small shares the same loss takes more
runs to show. The score that serves best adds up all releases, each weighted by its noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from dpstream.audit.book_runs import BookRuns, MechanismPart, QueryPart
from dpstream.audit.controls.books import copy_for_each, without_the_last_charge
from dpstream.audit.controls.state import (
    KeysLost,
    LogLost,
    TypesLost,
    another_type,
    target_gone,
)
from dpstream.audit.live_runs import LiveRuns
from dpstream.audit.neighbours import Pair
from dpstream.audit.queries import DELTA, EPSILON, query_of
from dpstream.audit.query_samplers import STEPS, Scenario
from dpstream.audit.scores import MANY_OUTPUTS
from dpstream.audit.series_queries import ALL, crowding
from dpstream.audit.series_runs import WINDOWS, series_query
from dpstream.audit.targets import Target
from dpstream.engines.series import SeriesRun
from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.privacy.curves import zcdp_epsilon
from dpstream.stages.aggregates import Count, Sum
from dpstream.stages.plan import planned
from dpstream.stages.query import Query
from dpstream.stages.series_query import SeriesQuery

W, EVENT_DELTA = 3, 0.01
HALF = Fraction(1, 2)
RUNS_TOO_MANY = 8
"""On a book that has room for one of them."""


def _query(
    name: str, *, groups: int = 2, public: bool = False, **facts: Any
) -> Callable[[int], Query]:
    """From the number of runs; `public`: are its keys known?"""
    common: dict[str, Any] = {"aggregates": (Count("n"),)}

    def query(runs: int) -> Query:
        listed = {"public_keys": list(range(groups * runs))} if public else {}
        return query_of(name=name, max_groups_contributed=groups, **common | listed | facts)

    return query


def _series(name: str, options: str) -> Callable[[int], SeriesQuery]:
    def query(runs: int) -> SeriesQuery:
        made = series_query(options, runs)
        return replace(made, rows=replace(made.rows, name=name))

    return query


def _w_event(name: str, epsilon: Any, mechanism: str) -> Callable[[int], SeriesQuery]:
    options = f"epsilon = {epsilon}, privacy_unit = 'w_event', w = {W}, mechanism = '{mechanism}'"
    return _series(name, options)


def _series_part(query: Callable[[int], SeriesQuery], **facts: Any) -> QueryPart:
    return QueryPart(query=query, columns=("n", "held"), engine=SeriesRun, **facts)


def _target(**facts: Any) -> Target:
    return Target(**{"learners": MANY_OUTPUTS} | facts)


def at_all_bounds(others: int, *, groups: int = 2) -> Pair:
    """All rows of a unit that has one in every group and step."""
    base = tuple((group, 0, others) for group in range(groups))
    unit = tuple((group, step) for group in range(groups) for step in range(STEPS))
    return Pair(
        name=f"a unit in all steps of {groups} group(s), beside {others} others in each",
        one=Scenario(others=base, unit=unit),
        two=Scenario(others=base),
    )


def _of_users() -> Target:
    """Three queries; their mu squared and tails fill the book to 98%."""
    small: dict[str, Any] = {"delta": 0.0098}
    total = Sum("s", column="x", lo=0, hi=4, quantum=1)
    parts = (
        QueryPart(query=_query("kept", epsilon=0.7, **small), kills=(1, 2)),
        QueryPart(
            query=_query("rounds", epsilon=0.5, strategy="sqlp", **small),
            kills=(2,),
            snapshot_every=1,
        ),
        QueryPart(
            query=_query("sums", epsilon=1.6, delta=0.01, public=True, aggregates=(total,)),
            columns=("s",),
            kills=(3,),
        ),
    )
    return _target(
        name="book_of_users",
        about="A book of users: three GROUP BY queries, killed and begun again, seen jointly.",
        sample=BookRuns(
            terms=query_of().promise(epsilon=EPSILON, delta=DELTA), parts=parts, groups=2
        ),
        pairs=(at_all_bounds(30), at_all_bounds(20)),
        epsilon=float(EPSILON),
        delta=DELTA,
        runs=(4_000, 40_000),
    )


def _of_windows() -> Target:
    """Two SQL queries and a mechanism: epsilon 1, 1/2 and 1/2 in any three windows."""
    first = _w_event("every", 1, "uniform")
    terms = first(1).terms()
    parts = (
        _series_part(first, kills=(2, 3)),
        _series_part(_w_event("sampled", 0.5, "sample"), kills=(4,), snapshot_every=1),
        MechanismPart(
            mechanism=Sample(epsilon=HALF, window=W), clock=terms.clock, steps=WINDOWS, kills=(2, 4)
        ),
    )
    return _target(
        name="book_of_windows",
        about=f"A w-event book, w = {W}: SQL twice and a mechanism, killed and begun again.",
        sample=BookRuns(terms=replace(terms, total=Fraction(EPSILON)), parts=parts),
        pairs=(crowding(range(W), others=(1,)), ALL),
        epsilon=float(EPSILON),
        simple=True,
        runs=(4_000, 24_000),
    )


def _of_events() -> Target:
    """A tree by SQL and a counter of its own share rho."""
    options = f"epsilon = 1, delta = {EVENT_DELTA}, privacy_unit = 'event', mechanism = 'tree'"
    tree = _series("tree", options)
    terms, counter = tree(1).terms(), ToeplitzCounter(rho=Fraction(1, 4), steps=WINDOWS)
    rho = terms.total + Fraction(1, 4)
    parts = (
        _series_part(tree, kills=(3,)),
        MechanismPart(mechanism=counter, clock=terms.clock, steps=WINDOWS, kills=(1, 5)),
    )
    return _target(
        name="book_of_events",
        about="A book of single events in rho: SQL and a counter, killed and begun again.",
        sample=BookRuns(terms=replace(terms, total=rho), parts=parts),
        pairs=(crowding(range(1), others=(1,)), crowding(range(1, 2))),
        epsilon=zcdp_epsilon(rho=float(rho), delta=EVENT_DELTA),
        delta=EVENT_DELTA,
        runs=(4_000, 24_000),
    )


def _one_query(
    name: str, about: str, pair: Pair, part: QueryPart, *, groups: int = 1, **facts: Any
) -> Target:
    """A query with a state directory, on a book that it fills."""
    query = part.query(1)
    assert isinstance(query, Query)
    return _target(
        name=name,
        about=about,
        sample=BookRuns(terms=planned(query).terms(), parts=(part,), groups=groups),
        pairs=(pair,),
        epsilon=float(EPSILON),
        delta=DELTA,
        **{"runs": (4_000, 40_000)} | facts,
    )


def _restarts() -> Target:
    """What was shown before a kill is shown again."""
    return _one_query(
        "latched_restarts",
        "A continual GROUP BY on disk, killed after each release and begun again.",
        at_all_bounds(30),
        QueryPart(query=_query("restarts"), kills=(1, 2)),
        groups=2,
        simple=True,
    )


def _live() -> Target:
    """Both are due at the same times, and fill the book to 96%."""
    made = [_query(name, epsilon=1.4, delta=0.0098) for name in ("first", "second")]
    return _target(
        name="live_queries",
        about="Two GROUP BY queries over one live directory, killed and begun again.",
        sample=LiveRuns(
            terms=query_of().promise(epsilon=EPSILON, delta=DELTA),
            queries=lambda runs: [query(runs) for query in made],
            groups=2,
            kills=(2, 4),
        ),
        pairs=(at_all_bounds(30),),
        epsilon=float(EPSILON),
        delta=DELTA,
        runs=(4_000, 40_000),
    )


def book_targets() -> dict[str, Callable[[], Target]]:
    """By name."""
    return {
        "latched_restarts": _restarts,
        "book_of_users": _of_users,
        "book_of_windows": _of_windows,
        "book_of_events": _of_events,
        "live_queries": _live,
    }


def _overdrawn(name: str, about: str, ledger: Any) -> Callable[[], Target]:
    """Queries of which each by itself fills the book."""
    queries = [_query(f"q{number}", groups=1, public=True) for number in range(RUNS_TOO_MANY)]
    return lambda: _target(
        name=name,
        about=about,
        sample=BookRuns(
            terms=planned(queries[0](1)).terms(),
            parts=tuple(QueryPart(query=query) for query in queries),
            ledger=ledger,
        ),
        pairs=(at_all_bounds(5, groups=1),),
        epsilon=float(EPSILON),
        delta=DELTA,
        control=True,
        runs=(2_000, 10_000),
    )


def _forked_windows() -> Target:
    """Charges come with every step here, and the claim is pure."""
    queries = [_w_event(f"q{number}", EPSILON, "sample") for number in range(RUNS_TOO_MANY)]
    return _target(
        name="book_forked_windows",
        about=f"A w-event book of which each of {RUNS_TOO_MANY} SQL queries has a copy.",
        sample=BookRuns(
            terms=queries[0](1).terms(),
            parts=tuple(_series_part(query) for query in queries),
            ledger=copy_for_each,
        ),
        pairs=(crowding(range(1)),),
        epsilon=float(EPSILON),
        control=True,
        runs=(2_000, 10_000),
    )


def _lost(name: str, about: str, pair: Pair, **part: Any) -> Callable[[], Target]:
    """A query with public keys whose state has lost something."""
    query = _query("lost", groups=1, public=True)
    facts: dict[str, Any] = {"control": True, "runs": (2_000, 10_000)}
    return lambda: _one_query(name, about, pair, QueryPart(query=query, **part), **facts)


def broken_books() -> dict[str, Callable[[], Target]]:
    """By name."""
    unit = at_all_bounds(5, groups=1)
    return {
        "book_forked": _overdrawn(
            "book_forked",
            f"Each of {RUNS_TOO_MANY} queries is charged to a copy of the book.",
            copy_for_each,
        ),
        "book_forked_windows": _forked_windows,
        "book_forgets_a_charge": _overdrawn(
            "book_forgets_a_charge",
            "A ledger loses its last charge whenever it is opened for another query.",
            without_the_last_charge,
        ),
        "state_lost_keys": _lost(
            "state_lost_keys",
            "Window keys are lost: fifteen restarts draw the noise of a release anew.",
            unit,
            engine=KeysLost,
            kills=(1,) * 15,
        ),
        "state_lost_log": _lost(
            "state_lost_log",
            "The log of inputs is lost: after a restart the same noise is on other data.",
            unit,
            engine=LogLost,
            rows=target_gone,
            kills=(1,),
        ),
        "state_lost_types": _lost(
            "state_lost_types",
            "Column types are lost: a unit whose type changes begins its bounds anew.",
            unit,
            engine=TypesLost,
            rows=another_type,
            kills=(1, 1),
            snapshot_every=1,
        ),
    }
