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
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from typing import Any

from dpstream.audit.controls.broken_engine import (
    LedgerOfFreePlaces,
    LedgerWithoutLastPeriods,
    LostColumnTypes,
    LostInputLog,
    LostWindowKeys,
    forked_ledger,
    ledger_without_begun_periods,
    ledger_without_last_charge,
    rows_of_another_type,
    rows_without_target,
)
from dpstream.audit.ledger_samplers import (
    LiveQueryRuns,
    ReplacedQuery,
    RestartedMechanism,
    RestartedQuery,
    SharedLedgerRuns,
    SucceedingQuery,
)
from dpstream.audit.lower_bounds import MANY_OUTPUTS
from dpstream.audit.query_samplers import STEPS, WINDOWS, series_query, unit_pair
from dpstream.audit.query_targets import (
    ALL_WINDOWS,
    DELTA,
    EPSILON,
    W,
    crowded_pair,
    day_query,
    query_target,
)
from dpstream.audit.targets import Catalogue, Maker, Pair, by_name
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter
from dpstream.mechanisms.w_event.sample import Sample
from dpstream.privacy.accounting.curves import zcdp_epsilon
from dpstream.privacy.ledger.charges import Terms
from dpstream.query.aggregates import Count, Sum
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import Tumble

EVENT_DELTA = 0.01
RUNS_TOO_MANY = 8
"""On a ledger that has room for one of them."""


def _query(
    name: str, *, groups: int = 2, public: bool = False, **facts: Any
) -> Callable[[int], Query]:
    """From the number of runs; `public`: are its keys known?"""
    common: dict[str, Any] = {"aggregates": (Count("n"),)}

    def query(runs: int) -> Query:
        listed = {"public_groups": list(range(groups * runs))} if public else {}
        return day_query(name=name, max_groups_contributed=groups, **common | listed | facts)

    return query


def _series(name: str, options: str, **facts: Any) -> RestartedQuery:
    """SQL through a mechanism, with these options in its privacy clause."""

    def query(runs: int) -> SeriesQuery:
        return replace(series_query(options, runs), name=name)

    return RestartedQuery(query=query, columns=("n", "held"), engine=SeriesRun, **facts)


def _w_event(epsilon: Any, mechanism: str) -> str:
    return f"epsilon = {epsilon}, privacy_unit = 'w_event', w = {W}, mechanism = '{mechanism}'"


def _target(about: str, sample: Any, *pairs: Pair, **facts: Any) -> Maker:
    usual: dict[str, Any] = {"runs": (4_000, 40_000), "learners": MANY_OUTPUTS}
    return query_target(about, sample, *pairs, **usual | facts)


def pair_at_all_bounds(others: int, *, groups: int = 2) -> Pair:
    """All rows of a unit that has one in every group and step."""
    return unit_pair(
        f"a unit in all steps of {groups} group(s), beside {others} others in each",
        others=tuple((group, 0, others) for group in range(groups)),
        unit=tuple((group, step) for group in range(groups) for step in range(STEPS)),
    )


def _of_users() -> Maker:
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
        "A book of users: three GROUP BY queries, killed and begun again, seen jointly.",
        SharedLedgerRuns(terms=_user_terms(), sharing=sharing, groups=2),
        pair_at_all_bounds(30),
        pair_at_all_bounds(20),
    )


def _user_terms() -> Terms:
    return day_query().promise(epsilon=EPSILON, delta=DELTA)


def _of_windows() -> Maker:
    """Two SQL queries and a mechanism: epsilon 1, 1/2 and 1/2 in any three windows."""
    first = _series("every", _w_event(1, "uniform"), kills=(2, 3))
    sharing = (
        first,
        _series("sampled", _w_event(0.5, "sample"), kills=(4,), snapshot_every=1),
        RestartedMechanism(mechanism=Sample(epsilon=Fraction(1, 2), window=W), kills=(2, 4)),
    )
    terms = replace(first.terms(), total=Fraction(EPSILON))
    return _target(
        f"A w-event book, w = {W}: SQL twice and a mechanism, killed and begun again.",
        SharedLedgerRuns(terms=terms, sharing=sharing),
        crowded_pair(range(W), others=(1,)),
        ALL_WINDOWS,
        delta=0.0,
        simple=True,
        runs=(4_000, 24_000),
    )


def _of_events() -> Maker:
    """A tree by SQL and a counter of its own share rho."""
    options = f"epsilon = 1, delta = {EVENT_DELTA}, privacy_unit = 'event', mechanism = 'tree'"
    tree = _series("tree", options, kills=(3,))
    counter = ToeplitzCounter(rho=Fraction(1, 4), steps=WINDOWS)
    terms = tree.terms()
    rho = terms.total + Fraction(1, 4)
    sharing = (tree, RestartedMechanism(mechanism=counter, kills=(1, 5)))
    return _target(
        "A book of single events in rho: SQL and a counter, killed and begun again.",
        SharedLedgerRuns(terms=replace(terms, total=rho), sharing=sharing),
        crowded_pair(range(1), others=(1,)),
        crowded_pair(range(1, 2)),
        epsilon=zcdp_epsilon(rho=float(rho), delta=EVENT_DELTA),
        delta=EVENT_DELTA,
        runs=(4_000, 24_000),
    )


def _live() -> Maker:
    """Both are due at the same times, and fill the ledger to 96%."""
    queries = [_query(name, epsilon=1.4, delta=0.0098) for name in ("first", "second")]
    return _target(
        "Two GROUP BY queries over one live directory, killed and begun again.",
        LiveQueryRuns(
            terms=_user_terms(),
            queries=lambda runs: [query(runs) for query in queries],
            groups=2,
            kills=(2, 4),
        ),
        pair_at_all_bounds(30),
    )


def _succeeding(runs: int) -> tuple[SucceedingQuery, ...]:
    """Runs of one query with a period and a window for each step, each of which takes over."""
    query = _query(
        "taken",
        public=True,
        window=Tumble("8 hours"),
        every=None,
        privacy_unit_period="8 hours",
    )
    return tuple(SucceedingQuery(query=query) for _ in range(runs))


def _replaced(runs: int, hours: int, **facts: Any) -> tuple[ReplacedQuery, ...]:
    """Runs of one query with periods of so many hours, each replaced by the next after a table."""

    def query(number: int) -> Callable[[int], Query]:
        return _query(
            "changed",
            public=True,
            window=Tumble(f"{hours} hours"),
            every=None,
            privacy_unit_period=f"{hours} hours",
            start=datetime(1970, 1, 1) + timedelta(hours=hours * number),
            end=datetime(1970, 1, 1) + timedelta(hours=hours * (runs + 1)),
        )

    return tuple(
        ReplacedQuery(query=query(number), number=number, **facts) for number in range(runs)
    )


def _one_period(period: int) -> Pair:
    """A unit of one period, at its bounds: a row in each of two groups."""
    return unit_pair(
        f"a unit of period {period}, beside 5 others",
        others=tuple((group, step, 5) for group in range(2) for step in range(STEPS)),
        unit=tuple((group, period) for group in range(2)),
    )


def ledger_targets() -> Catalogue:
    """Ledgers of each kind, a query on disk that fills its ledger, and two live queries."""
    restarted = RestartedQuery(query=_query("restarts"), kills=(1, 2))
    return by_name(
        latched_restarts=_target(
            "A continual GROUP BY on disk, killed after each release and begun again.",
            SharedLedgerRuns(sharing=(restarted,), groups=2),
            pair_at_all_bounds(30),
            simple=True,
        ),
        book_of_users=_of_users(),
        book_of_windows=_of_windows(),
        book_of_events=_of_events(),
        live_queries=_live(),
        book_of_periods=_target(
            "A book of users within periods: each of three runs takes over from the one before.",
            SharedLedgerRuns(sharing=_succeeding(STEPS), groups=2),
            _one_period(1),
            _one_period(0),
            simple=True,
        ),
        book_of_held_places=_target(
            "A book of users within periods: each run is to end, and holds the next one's place.",
            SharedLedgerRuns(sharing=_replaced(STEPS, 8), groups=2),
            _one_period(2),
            _one_period(0),
            simple=True,
        ),
    )


def _control(about: str, *sharing: RestartedQuery, **facts: Any) -> Maker:
    """Queries of which each by itself fills the ledger."""
    ledger = {"ledger": facts.pop("ledger")} if "ledger" in facts else {}
    usual: dict[str, Any] = {"control": True, "runs": (2_000, 10_000)}
    pair = facts.pop("pair", pair_at_all_bounds(5, groups=1))
    sample = SharedLedgerRuns(sharing=sharing, groups=facts.pop("groups", 1), **ledger)
    return _target(about, sample, pair, **usual | facts)


def ledger_controls() -> Catalogue:
    """Ledgers and states that have lost something."""
    names = [f"q{number}" for number in range(RUNS_TOO_MANY)]
    copies = [RestartedQuery(query=_query(name, groups=1, public=True)) for name in names]
    series = [_series(name, _w_event(EPSILON, "sample")) for name in names]
    lost = partial(RestartedQuery, query=_query("lost", groups=1, public=True))
    return by_name(
        book_forked=_control(
            f"Each of {RUNS_TOO_MANY} queries is charged to a copy of the book.",
            *copies,
            ledger=forked_ledger,
        ),
        book_forked_windows=_control(
            f"A w-event book of which each of {RUNS_TOO_MANY} SQL queries has a copy.",
            *series,
            ledger=forked_ledger,
            pair=crowded_pair(range(1)),
            delta=0.0,
        ),
        book_forgets_a_charge=_control(
            "A ledger loses its last charge whenever it is opened for another query.",
            *copies,
            ledger=ledger_without_last_charge,
        ),
        book_forgets_begun_periods=_control(
            f"{RUNS_TOO_MANY} runs take over from each other, and all draw the first period.",
            *_succeeding(RUNS_TOO_MANY),
            ledger=ledger_without_begun_periods,
            groups=2,
            pair=_one_period(0),
        ),
        book_forgets_last_periods=_control(
            f"{RUNS_TOO_MANY} runs that were to end before a period all go on and draw it.",
            *_replaced(RUNS_TOO_MANY, 1, ledger_class=LedgerWithoutLastPeriods),
            groups=2,
            pair=_one_period(1),
        ),
        book_frees_places_twice=_control(
            f"{RUNS_TOO_MANY} runs take a place that was held, and nothing of them is charged.",
            *_replaced(RUNS_TOO_MANY, 1, ledger_class=LedgerOfFreePlaces, kills=()),
            groups=2,
            pair=_one_period(1),
        ),
        state_lost_keys=_control(
            "Window keys are lost: fifteen restarts draw the noise of a release anew.",
            lost(engine=LostWindowKeys, kills=(1,) * 15),
        ),
        state_lost_log=_control(
            "The log of inputs is lost: after a restart the same noise is on other data.",
            lost(engine=LostInputLog, rows=rows_without_target, kills=(1,)),
        ),
        state_lost_types=_control(
            "Column types are lost: a unit whose type changes begins its bounds anew.",
            lost(engine=LostColumnTypes, rows=rows_of_another_type, kills=(1, 1), snapshot_every=1),
        ),
    )
