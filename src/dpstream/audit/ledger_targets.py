"""Whole ledgers, as the audit attacks them: what is shipped, what is broken.

Every kind of ledger is spent to its end by several runs that share a dataset, each of them killed
and begun again: one of users (mu squared) by queries of both strategies, one of windows (epsilon)
and one of single events (rho) by SQL and by mechanisms that are fed counts.

The hard pair: a unit at all its bounds in every run, in groups so large that all are shown. On a
ledger of users most of the budget is in one query: over many small shares the same loss takes more
runs to show. The score that serves best adds up all releases, each weighted by its noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from dpstream.audit.controls.broken_engine import (
    LostColumnTypes,
    LostInputLog,
    LostWindowKeys,
    forked_ledger,
    ledger_without_last_charge,
    rows_of_another_type,
    rows_without_target,
)
from dpstream.audit.ledger_samplers import (
    LiveQueryRuns,
    RestartedMechanism,
    RestartedQuery,
    SharedLedgerRuns,
)
from dpstream.audit.lower_bounds import MANY_OUTPUTS
from dpstream.audit.neighbours import Pair
from dpstream.audit.query_samplers import STEPS, WINDOWS, series_query, unit_pair
from dpstream.audit.query_targets import ALL_WINDOWS, DELTA, EPSILON, W, crowded_pair, day_query
from dpstream.audit.targets import Catalogue, Maker, Target, by_name
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.privacy.accounting.curves import zcdp_epsilon
from dpstream.query.aggregates import Count, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery

EVENT_DELTA = 0.01
HALF = Fraction(1, 2)
RUNS_TOO_MANY = 8
"""On a ledger that has room for one of them."""
_CONTROL: dict[str, Any] = {"control": True, "runs": (2_000, 10_000)}


def _query(
    name: str, *, groups: int = 2, public: bool = False, **facts: Any
) -> Callable[[int], Query]:
    """From the number of runs; `public`: are its keys known?"""
    common: dict[str, Any] = {"aggregates": (Count("n"),)}

    def query(runs: int) -> Query:
        listed = {"public_groups": list(range(groups * runs))} if public else {}
        return day_query(name=name, max_groups_contributed=groups, **common | listed | facts)

    return query


def _series(name: str, options: str) -> Callable[[int], SeriesQuery]:
    def query(runs: int) -> SeriesQuery:
        return replace(series_query(options, runs), name=name)

    return query


def _w_event(name: str, epsilon: Any, mechanism: str) -> Callable[[int], SeriesQuery]:
    options = f"epsilon = {epsilon}, privacy_unit = 'w_event', w = {W}, mechanism = '{mechanism}'"
    return _series(name, options)


def _restarted_series(query: Callable[[int], SeriesQuery], **facts: Any) -> RestartedQuery:
    return RestartedQuery(query=query, columns=("n", "held"), engine=SeriesRun, **facts)


def _target(**facts: Any) -> Target:
    usual: dict[str, Any] = {"epsilon": float(EPSILON), "delta": DELTA, "runs": (4_000, 40_000)}
    return Target(**usual | {"learners": MANY_OUTPUTS} | facts)


def pair_at_all_bounds(others: int, *, groups: int = 2) -> Pair:
    """All rows of a unit that has one in every group and step."""
    return unit_pair(
        f"a unit in all steps of {groups} group(s), beside {others} others in each",
        others=tuple((group, 0, others) for group in range(groups)),
        unit=tuple((group, step) for group in range(groups) for step in range(STEPS)),
    )


def _of_users(name: str) -> Target:
    """Three queries; their mu squared and tails fill the ledger to 98%."""
    small: dict[str, Any] = {"delta": 0.0098}
    total = Sum("s", column="x", contribution_bounds_per_row=(0, 4), quantum=1)
    sharing = (
        RestartedQuery(query=_query("kept", epsilon=0.7, **small), kills=(1, 2)),
        RestartedQuery(
            query=_query("rounds", epsilon=0.5, strategy="sqlp", **small),
            kills=(2,),
            snapshot_every=1,
        ),
        RestartedQuery(
            query=_query("sums", epsilon=1.6, delta=0.01, public=True, aggregates=(total,)),
            columns=("s",),
            kills=(3,),
        ),
    )
    return _target(
        name=name,
        about="A book of users: three GROUP BY queries, killed and begun again, seen jointly.",
        sample=SharedLedgerRuns(
            terms=day_query().promise(epsilon=EPSILON, delta=DELTA), sharing=sharing, groups=2
        ),
        pairs=(pair_at_all_bounds(30), pair_at_all_bounds(20)),
    )


def _of_windows(name: str) -> Target:
    """Two SQL queries and a mechanism: epsilon 1, 1/2 and 1/2 in any three windows."""
    first = _w_event("every", 1, "uniform")
    terms = first(1).terms()
    sharing = (
        _restarted_series(first, kills=(2, 3)),
        _restarted_series(_w_event("sampled", 0.5, "sample"), kills=(4,), snapshot_every=1),
        RestartedMechanism(
            mechanism=Sample(epsilon=HALF, window=W), clock=terms.clock, steps=WINDOWS, kills=(2, 4)
        ),
    )
    return _target(
        name=name,
        about=f"A w-event book, w = {W}: SQL twice and a mechanism, killed and begun again.",
        sample=SharedLedgerRuns(terms=replace(terms, total=Fraction(EPSILON)), sharing=sharing),
        pairs=(crowded_pair(range(W), others=(1,)), ALL_WINDOWS),
        delta=0.0,
        simple=True,
        runs=(4_000, 24_000),
    )


def _of_events(name: str) -> Target:
    """A tree by SQL and a counter of its own share rho."""
    options = f"epsilon = 1, delta = {EVENT_DELTA}, privacy_unit = 'event', mechanism = 'tree'"
    tree = _series("tree", options)
    terms, counter = tree(1).terms(), ToeplitzCounter(rho=Fraction(1, 4), steps=WINDOWS)
    rho = terms.total + Fraction(1, 4)
    sharing = (
        _restarted_series(tree, kills=(3,)),
        RestartedMechanism(mechanism=counter, clock=terms.clock, steps=WINDOWS, kills=(1, 5)),
    )
    return _target(
        name=name,
        about="A book of single events in rho: SQL and a counter, killed and begun again.",
        sample=SharedLedgerRuns(terms=replace(terms, total=rho), sharing=sharing),
        pairs=(crowded_pair(range(1), others=(1,)), crowded_pair(range(1, 2))),
        epsilon=zcdp_epsilon(rho=float(rho), delta=EVENT_DELTA),
        delta=EVENT_DELTA,
        runs=(4_000, 24_000),
    )


def _live(name: str) -> Target:
    """Both are due at the same times, and fill the ledger to 96%."""
    made = [_query(one, epsilon=1.4, delta=0.0098) for one in ("first", "second")]
    return _target(
        name=name,
        about="Two GROUP BY queries over one live directory, killed and begun again.",
        sample=LiveQueryRuns(
            terms=day_query().promise(epsilon=EPSILON, delta=DELTA),
            queries=lambda runs: [query(runs) for query in made],
            groups=2,
            kills=(2, 4),
        ),
        pairs=(pair_at_all_bounds(30),),
    )


def _one_query(
    about: str, pair: Pair, run: RestartedQuery, *, groups: int = 1, **facts: Any
) -> Maker:
    """A query with a state directory, on a ledger that it fills."""

    def make(name: str) -> Target:
        query = run.query(1)
        assert isinstance(query, Query)
        terms = plan_query(query).terms()
        sample = SharedLedgerRuns(terms=terms, sharing=(run,), groups=groups)
        return _target(name=name, about=about, sample=sample, pairs=(pair,), **facts)

    return make


def ledger_targets() -> Catalogue:
    """Ledgers of each kind, a query on disk, and two live queries."""
    return by_name(
        {
            "latched_restarts": _one_query(
                "A continual GROUP BY on disk, killed after each release and begun again.",
                pair_at_all_bounds(30),
                RestartedQuery(query=_query("restarts"), kills=(1, 2)),
                groups=2,
                simple=True,
            ),
            "book_of_users": _of_users,
            "book_of_windows": _of_windows,
            "book_of_events": _of_events,
            "live_queries": _live,
        }
    )


def _overdrawn(about: str, ledger: Any) -> Maker:
    """Queries of which each by itself fills the ledger."""
    queries = [_query(f"q{number}", groups=1, public=True) for number in range(RUNS_TOO_MANY)]
    return lambda name: _target(
        name=name,
        about=about,
        sample=SharedLedgerRuns(
            terms=plan_query(queries[0](1)).terms(),
            sharing=tuple(RestartedQuery(query=query) for query in queries),
            ledger=ledger,
        ),
        pairs=(pair_at_all_bounds(5, groups=1),),
        **_CONTROL,
    )


def _forked_windows(name: str) -> Target:
    """Charges come with every step here, and the claim is pure."""
    queries = [_w_event(f"q{number}", EPSILON, "sample") for number in range(RUNS_TOO_MANY)]
    return _target(
        name=name,
        about=f"A w-event book of which each of {RUNS_TOO_MANY} SQL queries has a copy.",
        sample=SharedLedgerRuns(
            terms=queries[0](1).terms(),
            sharing=tuple(_restarted_series(query) for query in queries),
            ledger=forked_ledger,
        ),
        pairs=(crowded_pair(range(1)),),
        delta=0.0,
        **_CONTROL,
    )


def _lost(about: str, **run: Any) -> Maker:
    """A query with public keys whose state has lost something."""
    restarted = RestartedQuery(query=_query("lost", groups=1, public=True), **run)
    return _one_query(about, pair_at_all_bounds(5, groups=1), restarted, **_CONTROL)


def ledger_controls() -> Catalogue:
    """Ledgers and states that have lost something."""
    return by_name(
        {
            "book_forked": _overdrawn(
                f"Each of {RUNS_TOO_MANY} queries is charged to a copy of the book.",
                forked_ledger,
            ),
            "book_forked_windows": _forked_windows,
            "book_forgets_a_charge": _overdrawn(
                "A ledger loses its last charge whenever it is opened for another query.",
                ledger_without_last_charge,
            ),
            "state_lost_keys": _lost(
                "Window keys are lost: fifteen restarts draw the noise of a release anew.",
                engine=LostWindowKeys,
                kills=(1,) * 15,
            ),
            "state_lost_log": _lost(
                "The log of inputs is lost: after a restart the same noise is on other data.",
                engine=LostInputLog,
                rows=rows_without_target,
                kills=(1,),
            ),
            "state_lost_types": _lost(
                "Column types are lost: a unit whose type changes begins its bounds anew.",
                engine=LostColumnTypes,
                rows=rows_of_another_type,
                kills=(1, 1),
                snapshot_every=1,
            ),
        }
    )
