"""Whole queries of every kind, as the audit attacks them: what is shipped, what is broken.

A continual GROUP BY: strategies, windows, lateness, values, noisy totals.

Time-series mechanisms through SQL: the hard pair is a unit with five rows in each window that is
protected, four in time and one that comes a window late, all in one group, so that every row that
is let in too much adds up. Each window's one count moves the same bin the same way, which costs
most where noise is drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.controls.broken_engine import (
    BoundedBeforeJoin,
    BoundsOffByOne,
    ChoiceChargedOnce,
    ClampsOfAnotherPeriod,
    ColumnTypeFromData,
    ForgottenByExactCounts,
    InnerRowsAmongFew,
    KeyAsSpelled,
    LevelsChargedOnce,
    NetClamp,
    NoiseBelowReach,
    NoiseForOneDroppedRow,
    NoiseForOneRowElsewhere,
    OnlyTouchedKeys,
    OwnNoiseOfShared,
    PureNoiseInL2,
    RememberedOnceTouched,
    RemembersActiveKeys,
    RisingBounds,
    SetsChargedOnce,
    SharedByAllGroups,
    SharedInEveryRelease,
    SubqueryOverStream,
    TailPerTrigger,
    ThresholdWithoutPlusOne,
    TotalsLikeParts,
    UncappedDroppedRows,
    UncappedElsewhere,
    UnitBySpelling,
    UnitCountedTwice,
    UnitEntersAgain,
    UnitOfEachSession,
    UnitOfEachStep,
    UnitOfEachWindow,
    WatermarkFromData,
    WeightsNotShared,
    WindowsOfTheFirstMonth,
    WindowsOfTheShortestMonth,
    units_as_text,
)
from dpstream.audit.query_samplers import (
    SPELLINGS,
    STEPS,
    UNITS,
    WINDOWS,
    HiddenKeysShown,
    NodesShown,
    OneRunKnown,
    Place,
    QueryRuns,
    Scenario,
    SeriesRuns,
    column_types,
    json_source,
    key_bytes,
    nodes_on_path,
    unit_pair,
)
from dpstream.audit.targets import Catalogue, Maker, Pair, by_name, target
from dpstream.query.aggregates import Avg, Count, CountDistinct, CountUnits, Sum
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.public_tables import WholeTable
from dpstream.query.quantiles import Quantile
from dpstream.query.query import Query
from dpstream.query.windows import Cumulate, Hop, Tumble
from dpstream.rows.whole_table import whole_table
from dpstream.sql_compiler import compile_sql

EPSILON, DELTA = 2, 0.02
DROPPED = 8
OFFERED = DROPPED + 2  # one is kept, and one is beyond those that count
GROUPS_OFFERED = DROPPED + 9
"""Of so many groups of a unit eight count, of the others as many as dropped rows may."""
MATCHES = 4
"""Rows of a table that one row meets."""
W, SERIES_DELTA = 3, 0.01
_W_EVENT = f"epsilon = {EPSILON}, privacy_unit = 'w_event', w = {W}"
_UNIFORM = f"{_W_EVENT}, mechanism = 'uniform'"
_COUNTER = (
    f"epsilon = {EPSILON}, delta = {SERIES_DELTA}, privacy_unit = 'event', mechanism = 'tree'"
)


def day_query(**facts: Any) -> Query:
    """A day in three steps; one unit is in at most two groups."""
    common: dict[str, Any] = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "every": "8 hours",
        "epsilon": EPSILON,
        "delta": DELTA,
        "max_groups_contributed": 2,
        "pre_threshold": 0,
        "buffers": 2,
        "report_bias": False,
    }
    return Query(**common | facts)


def debias_query(**facts: Any) -> Callable[[int], Query]:
    """From the number of runs: one hour after the other, each a run.

    One row of a unit is kept, and eight dropped ones count; totals have as much budget as counts.
    """
    common: dict[str, Any] = {
        "window": Tumble("1 hour"),
        "every": None,
        "privacy_unit_period": "1 hour",
        "remember_keys": False,  # windows are runs
        "max_groups_contributed": 1,
        "report_bias": True,
        "debias": "global",
        "max_dropped_rows": DROPPED,
        "weights": (("bias", 1),),
    }

    def query(runs: int) -> Query:
        days, hours = divmod(runs, 24)
        end = f"1970-01-{1 + days:02d}T{hours:02d}:00:00"
        return day_query(**common | {"end": end} | facts)

    return query


def offering_pair(rows: int, *, others: int = 2) -> Pair:
    """A unit with `rows` rows of which one is kept, in a small group beside a large one.

    Hard because the share of rows kept is published: totals are just large enough for that
    (ten times their noise), of the others' rows few are dropped, so that the unit's move the share
    by nearly all that they may, and its own group shows the row that is kept.
    """
    return unit_pair(
        f"a unit that offers {rows} rows, {others} others in its group",
        others=((0, 0, 200), (1, 0, others)),
        unit=((1, 0),) * rows,
        again=20,
    )


def elsewhere_pair(rows: int = 1) -> Pair:
    """A unit with so many rows in each of 17 groups, of which eight count.

    What it moves is all that it may: the counts of eight groups, rows kept and dropped, rows in
    groups that it is not in, and units beyond. Counts are divided by a power of the share that the
    last total tells, those of others too: a large group, and one near the threshold.
    """
    return unit_pair(
        f"a unit in {GROUPS_OFFERED} groups, with rows in each: {rows}",
        others=((0, 0, 400), (1, 0, 30)),
        unit=tuple((group, 0) for group in range(GROUPS_OFFERED) for _ in range(rows)),
        again=40,
    )


_GROUPS_FIRST = unit_pair(
    f"a unit in two groups, and a step later with {OFFERED} rows in one that it does not get into",
    others=((0, 0, 400), (1, 0, 2)),
    unit=((0, 0), (1, 0), *((2, 1),) * OFFERED),
    again=20,
)


def unit_pairs(groups: int, *, again: bool = False) -> tuple[Pair, ...]:
    """All rows of a unit come or go: in busy groups, in groups near the threshold, alone.

    `again`: with a row in every step of each group.
    """
    crowds = {"near the threshold": 9, "busy": 60, "few": 2, "nobody else": 0}
    return tuple(
        unit_pair(
            f"{name}, a unit from step {first} on",
            others=tuple((group, 0, others) for group in range(groups) if others),
            unit=tuple(
                (group, step)
                for group in range(groups)
                for step in range(first, STEPS if again else first + 1)
            ),
        )
        for name, others in crowds.items()
        for first in (0, STEPS - 1)
    )


def query_target(about: str, sample: Any, *pairs: Pair, **facts: Any) -> Maker:
    """A target that claims (`EPSILON`, `DELTA`) unless `facts` say something else."""
    return target(about, sample, *pairs, **{"epsilon": float(EPSILON), "delta": DELTA} | facts)


def _day_runs(**facts: Any) -> QueryRuns:
    """Runs of `day_query`; what is no option of the sampler is one of the query.

    `public_groups`: from the number of runs to the keys. `joins`: to what prepares the rows.
    """
    options = {field.name for field in fields(QueryRuns)}
    sampler = {name: facts.pop(name) for name in options & facts.keys()}
    keys, joins = facts.pop("public_groups", None), facts.pop("joins", None)

    def query(runs: int) -> Query:
        more = {"public_groups": list(keys(runs))} if keys else {}
        return day_query(**facts, **more, **({"prepare": joins(runs)} if joins else {}))

    return QueryRuns(query=query, **sampler)


def _join(clause: str, table: WholeTable) -> Any:
    """What prepares the rows of a query that joins a table, as its SQL says."""
    text = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = 1, delta = 0.1, privacy_unit_column = user, time_column = ts,
                        time_unit = 's', start = '1970-01-01', end = '1970-01-02',
                        max_groups_contributed = 1)
               key, COUNT(*) AS n FROM visits {clause} GROUP BY key"""
    return compile_sql(text).query.with_tables({table.name: table}).prepare


def public_join(runs: int) -> Any:
    """Every row meets `MATCHES` rows of a public table."""
    table = pa.table({"x": [4] * MATCHES, "copy": list(range(MATCHES))})
    return _join("JOIN copies USING (x)", whole_table("copies", table))


def table_subqueries(runs: int) -> Any:
    """Rows whose value is in a public table, as all are, and which is no more than its largest."""
    table = pa.table({"x": [3, 4]})
    clause = "WHERE x IN (SELECT x FROM copies) AND x <= (SELECT MAX(x) FROM copies)"
    return _join(clause, whole_table("copies", table))


def registry_join(runs: int) -> Any:
    """Every target has `MATCHES` rows in a registry, and nobody else has one."""
    units = np.repeat(np.arange(runs) * UNITS, MATCHES)
    table = pa.table({"user": units, "plan": np.tile(np.arange(MATCHES), runs)})
    return _join("LEFT JOIN plans USING (user)", whole_table("plans", table, registry=True))


def rows_of_units(window: str) -> Any:
    """What groups the rows of each unit and key in windows of so long: the key is their count more.

    A unit with k rows of a key in a window is in the group k - 1 places behind it.
    """
    text = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = 1, delta = 0.1, privacy_unit_column = user,
                        time_unit = 's', start = '1970-01-01', end = '1970-01-02',
                        max_groups_contributed = 1)
               window_start, place AS key, COUNT(*) AS n
        FROM (SELECT user, window_start, key + COUNT(*) - 1 AS place
              FROM TUMBLE(visits, DESCRIPTOR(ts), INTERVAL '{window}' HOUR)
              GROUP BY user, window_start, key)
        GROUP BY window_start, key"""
    return lambda runs: compile_sql(text).query.prepare


def inner_rows_of(source: str, keys: str) -> Any:
    """What makes inner rows of FUNNEL, RETENTION or sessions; `keys` say the group of each."""
    text = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = 1, delta = 0.1, privacy_unit_column = user,
                        time_unit = 's', start = '1970-01-01', end = '1970-01-02',
                        max_groups_contributed = 1, max_rows_per_group = 1)
               window_start, {keys}, COUNT(*) AS n
        FROM {source} GROUP BY ALL"""
    return lambda runs: compile_sql(text).query.prepare


_INNER: dict[str, Any] = {
    "groups": STEPS,
    "every": None,
    "window": Tumble("24 hours"),
    "joins": rows_of_units("24"),
    "public_groups": lambda runs: range(STEPS * runs),
    "max_groups_contributed": 1,
}
_FUNNEL: dict[str, Any] = {
    "groups": STEPS,
    "window": Tumble("24 hours"),
    "joins": inner_rows_of(
        "FUNNEL(TUMBLE(visits, DESCRIPTOR(ts), INTERVAL '24' HOUR), "
        "steps => (x = 4, x = 4, x = 4), by => (key AS base))",
        "step, base + step - 1 AS key",
    ),
    "public_groups": lambda runs: range(STEPS * runs),
}
"""A unit with k rows of a key by some step is in the group of it and in the k - 1 behind it."""
_COHORTS: dict[str, Any] = {
    "groups": STEPS,
    "every": None,
    "window": Tumble("8 hours"),
    "joins": inner_rows_of(
        "RETENTION(visits, DESCRIPTOR(ts), first => x = 4, again => x = 4, "
        f"period => INTERVAL '8' HOUR, lags => {STEPS - 1}, by => (run * {STEPS} AS base))",
        "lag, base + lag AS key",
    ),
    "public_groups": lambda runs: range(STEPS * runs),
}
"""A unit that is there in all windows is in the first group of its run, then in the next ones."""


def _sessions(window: str) -> Any:
    return inner_rows_of(
        "TUMBLE((SELECT user, session_start, key + COUNT(*) - 1 AS place FROM SESSION(visits, "
        "DESCRIPTOR(ts), INTERVAL '10' HOUR) GROUP BY user, session_start, key), "
        f"DESCRIPTOR(session_start), INTERVAL '{window}' HOUR)",
        "place AS key",
    )


def _period_pair() -> Pair:
    """A user's rows of one period of three: the others stay."""
    unit = tuple((0, step) for step in range(STEPS))
    with_period = Scenario(others=((0, 0, 5),), unit=unit)
    without = replace(with_period, unit=(unit[0], unit[2]))
    return Pair(name="the second of three periods of a user", one=with_period, two=without)


_SESSIONS: dict[str, Any] = _INNER | {"max_groups_contributed": 1}
_SOMETIMES = tuple((0, step) for step in range(STEPS))


def _group_by(about: str, *, groups: int = 2, again: bool = False, **facts: Any) -> Maker:
    pairs: tuple[Pair, ...] = facts.pop("pairs", None) or unit_pairs(groups, again=again)
    about = f"A continual GROUP BY, strategy {facts.get('strategy', 'latched')}{about}"
    return query_target(about, _day_runs(groups=groups, **facts), *pairs, runs=(6_000, 40_000))


def _debias(about: str, others: int, **facts: Any) -> Maker:
    return query_target(
        "A continual GROUP BY, strategy latched, "
        f"dropped rows made up for from noisy totals{about}",
        QueryRuns(query=debias_query(**facts), groups=2, apart="windows"),
        offering_pair(OFFERED, others=others),
        runs=(1_000, 12_000),
    )


_ELSEWHERE: dict[str, Any] = {
    "debias": "groups",
    "max_groups_contributed": GROUPS_OFFERED - DROPPED - 1,
    "weights": (("bias", 9),),
}


def _debias_groups(about: str, groups: int, *pairs: Pair, **facts: Any) -> Maker:
    return query_target(
        "A continual GROUP BY, strategy latched, rows of groups that their unit is not in made up "
        f"for{about}",
        QueryRuns(query=debias_query(**_ELSEWHERE | facts), groups=groups, apart="windows"),
        *pairs,
        runs=(1_000, 8_000),
    )


_VALUES = (
    Count("n"),
    Sum("s", column="x", contribution_bounds_per_row=(0, 4), quantum=1),
    Avg("m", column="x", contribution_bounds_per_row=(0, 4)),
)


_DAYS: dict[str, Any] = {
    "end": "1970-01-09",
    "public_groups": range,
    "max_groups_contributed": 1,
    "report_bias": False,
}
"""Eight days in 24 steps: the sum of `swing` is 4 and -4 in turn."""
SWINGING = unit_pair(
    "a unit with a row in every step, up and down in turn",
    unit=tuple((0, step) for step in range(24)),
)
_NODES: dict[str, Any] = {
    "aggregates": (
        Quantile(
            "q",
            column="x",
            q=0.5,
            contribution_bounds_per_row=(0, 8),
            leaves=16,
            mechanism="tree",
        ),
    ),
    "flow": NodesShown,
    "looks": nodes_on_path,
    "groups": 1,
    "max_groups_contributed": 1,
    "max_rows_per_group": 2,
    "public_groups": range,
}


_CHOICE: dict[str, Any] = {
    "aggregates": (
        Quantile("q", column="nth", q=0.5, edges=[1, 6, 7, 12, 100], mechanism="exponential"),
    ),
    "groups": 1,
    "max_groups_contributed": 1,
    "public_groups": range,
    "end": "1970-01-09",
}
"""Eight days in 24 steps, a choice at each."""
BESIDE_THE_MEDIAN = unit_pair(
    "a unit above all others moves the median from the middle of 11 to the border of the upper 5",
    others=((0, 0, 11),),
    unit=((0, 0),),
)
_KEYS = 8


def _many_keys(*steps: int) -> tuple[Pair, ...]:
    """A unit with eight keys near the threshold; others have one of them each."""
    return tuple(
        unit_pair(
            f"a unit with {_KEYS} keys, from step {first} on",
            others=tuple((group, 0, 3) for group in range(_KEYS)),
            unit=tuple((group, first) for group in range(_KEYS)),
        )
        for first in steps
    )


_WEIGHTED: dict[str, Any] = {
    "aggregates": (),
    "weighted_keys": True,
    "max_groups_contributed": _KEYS,
    "groups": _KEYS,
    "every": None,
    "looks": lambda table: {"shown": np.ones(len(table))},
    "pairs": _many_keys(0),
}
_WITHOUT_DELTA: dict[str, Any] = {
    "delta": 0,
    "every": None,
    "public_groups": lambda runs: range(2 * runs),
    "groups": 2,
}


def _rollup(groups: int, *more: str) -> dict[str, Any]:
    """Counts by all keys, by each fewer, and by runs alone; the keys are public."""

    def keys(runs: int) -> list[tuple[Any, ...]]:
        rest = tuple({"x": 4, "zero": 0.0}[name] for name in more)
        return [(number // groups, number, *rest) for number in range(groups * runs)]

    names = ("run", "key", *more)
    return {
        "keys": names,
        "grouping_sets": tuple(names[:size] for size in range(len(names), 0, -1)),
        "groups": groups,
        "max_groups_contributed": groups,
        "public_groups": keys,
    }


_MONTHS: dict[str, Any] = _rollup(2) | {
    "start": "1970-01-03",
    "end": "1970-05-28",
    "every": None,
    "window": Hop("58 days", slide="29 days"),
    "privacy_unit_period": "1 month",
    "aggregates": (CountUnits("n"),),
    "max_groups_contributed": 8,
    "grouping_set_weights": (1, 9),
    "at": (59 * 24 * 3600, 90 * 24 * 3600 - 1),
}
"""March touches three parts of 29 days, so four windows; February two, what is left of January one.

Rows are in the first and in the last second of March.
"""
_MARCH = tuple((group, step) for group in range(2) for step in range(2))


_REMEMBERED: dict[str, Any] = {
    "window": Tumble("8 hours"),
    "every": None,
    "groups": 2,
    "max_groups_contributed": 2,
    "plan": HiddenKeysShown,
}
REMEMBERED = tuple(
    unit_pair(
        f"a unit in a key that was shown, and in one that was not, {others} others there",
        others=((0, 0, 60), *(((0, 1, others), (1, 1, others)) if others else ())),
        unit=((0, 1), (1, 1)),
    )
    for others in (0, 1, 9)
)


_SHARED: dict[str, Any] = {
    "public_groups": list(range(12)),
    "max_groups_contributed": 12,
    "report_bias": False,
    "debias": None,
    "max_dropped_rows": None,
    "weights": (),
}


def _sharing(plan: Callable[[Query], NoisePlan] = plan_query, **facts: Any) -> QueryRuns:
    """Twelve public groups in a window for each run; steps of 20 minutes."""
    flow = {"flow": facts.pop("flow")} if "flow" in facts else {}
    query = debias_query(**_SHARED | facts)
    return QueryRuns(query=query, groups=12, apart="windows", plan=plan, **flow)


_STAGGERED = unit_pair(
    "a unit in half of the groups, and at the next trigger in the others",
    unit=tuple((group, group // 6) for group in range(12)),
)


_CHOSEN: dict[str, Any] = {
    "window": Tumble("8 hours"),
    "every": None,
    "max_groups_contributed": "auto",
}
_OPEN_SUM: dict[str, Any] = {
    "aggregates": (Sum("s", column="nth", contribution_bounds_per_row=(0, "auto")),),
}


def _chosen(about: str, *, groups: int = 8, **facts: Any) -> Maker:
    """Bounds that choose themselves: each run is a query of its own, with its own histograms.

    Runs that share a query would share these, and all their units together would move the choice.
    """
    options = {"apart": "nothing", "groups": groups, "privacy_unit_period": "8 hours"}
    facts = _CHOSEN | facts | options | {"public_groups": lambda _: range(groups)}
    pairs = unit_pairs(groups, again="max_rows_per_group" in facts)
    return query_target(
        f"A continual GROUP BY, strategy latched, {about}, each period by histograms of earlier.",
        _day_runs(**facts),
        *pairs[6:],  # nobody else: the unit alone moves the choice
        *pairs[:6],
        runs=(400, 1_500),
    )


_RISING: dict[str, Any] = {
    "privacy_unit_period": "24 hours",
    "groups": 16,
    "public_groups": lambda runs: range(16 * runs),
}


def query_targets() -> Catalogue:
    """GROUP BY queries of both strategies."""
    spellings = unit_pair(
        "a unit with a row in each spelling",
        others=((0, 0, 5),),
        unit=((0, 0),) * len(SPELLINGS),
    )
    return by_name(
        latched=_group_by(", one row per group."),
        latched_rows=_group_by(
            ": counts, sums and means of several rows.",
            again=True,
            aggregates=_VALUES,
            max_rows_per_group=2,
            max_rows_contributed=3,
        ),
        latched_per_group=_group_by(
            ": sums and counts that are clamped for each unit and group.",
            groups=1,
            aggregates=(
                Sum("s", column="swing", contribution_bounds_per_group=(-4, 4), quantum=1),
                Count("n", contribution_bounds_per_group=(0, 4)),
            ),
            pairs=(SWINGING,),
            **_DAYS,
        ),
        latched_distinct=_group_by(
            ": distinct values, which others bring twelve steps later.",
            groups=1,
            aggregates=(CountDistinct("d", column="value", max_values_per_group=2),),
            pairs=(
                unit_pair(
                    "a unit with two values, others with one of them each",
                    others=((0, 12, 1), (0, 13, 1)),
                    unit=((0, 0), (0, 1)),
                ),
            ),
            **_DAYS,
        ),
        latched_public_keys=_group_by(
            ", public keys.",
            again=True,
            groups=1,
            max_groups_contributed=1,
            max_rows_per_group=2,
            public_groups=range,
        ),
        latched_quantile=_group_by(
            ": a quantile, and all nodes of its tree that the unit moves.", again=True, **_NODES
        ),
        latched_weighted_keys=_group_by(
            ": keys alone, of which each of a unit's counts less the more it has.", **_WEIGHTED
        ),
        latched_weighted_keys_again=_group_by(
            ": weighted keys alone, published again and again.",
            **_WEIGHTED | {"every": "8 hours", "pairs": _many_keys(0, 2)},
        ),
        latched_choice=_group_by(
            ": a median by the exponential mechanism, 24 times.",
            pairs=(BESIDE_THE_MEDIAN,),
            **_CHOICE,
        ),
        without_delta=query_target(
            "A GROUP BY of public keys, published once, without a delta: counts, sums and a median",
            _day_runs(
                aggregates=(*_VALUES[:2], Quantile("q", column="nth", q=0.5, edges=[1, 6, 7, 100])),
                **_WITHOUT_DELTA,
            ),
            _rows_of_unit((0, 0), (1, 0), others=((0, 0, 11), (1, 0, 11))),
            runs=(6_000, 40_000),
            delta=0.0,
        ),
        latched_rollup=_group_by(
            ": two sets of keys, made consistent by least squares.",
            again=True,
            max_rows_per_group=2,
            aggregates=_VALUES,
            **_rollup(2),
        ),
        latched_rollup_found=_group_by(
            ": two sets of keys that are found, with rows for what is not shown.",
            **_rollup(2) | {"public_groups": None},
        ),
        latched_hop=_group_by(
            ", overlapping windows: a row is in two of them.",
            groups=1,
            window=Hop("16 hours", slide="8 hours"),
        ),
        latched_cumulate=_group_by(
            ", cumulating windows, units of periods.",
            groups=1,
            window=Cumulate("24 hours", step="8 hours"),
            every=None,
            privacy_unit_period="24 hours",
            max_groups_contributed=3,
        ),
        latched_months=_group_by(
            ", totals of overlapping windows of days; a unit is of a month, and in four of them.",
            pairs=(_rows_of_unit(*_MARCH), _rows_of_unit(*_MARCH, others=((0, 0, 9),))),
            plan=OneRunKnown,
            **_MONTHS,
        ),
        latched_late=_group_by(
            ", rows that arrive late.",
            window=Tumble("8 hours"),
            arrival_column="seen",
            allowed_lateness="8 hours",
        ),
        latched_remembered=_group_by(
            ", keys that the first window has shown, all of them shown in the others.",
            **_REMEMBERED,
            pairs=REMEMBERED,
        ),
        latched_correlated=query_target(
            "A GROUP BY of public keys, published once, with noise that all groups share",
            _sharing(correlated_noise=True),
            unit_pair("a unit in all groups", unit=tuple((group, 0) for group in range(12))),
            unit_pair("a unit in half of them", unit=tuple((group, 0) for group in range(6))),
            unit_pair("a unit in one of them", unit=((0, 0),)),
            runs=(2_000, 16_000),
        ),
        latched_correlated_last=query_target(
            "A GROUP BY of public keys whose last release has noise that all groups share",
            _sharing(every="20 minutes"),
            unit_pair("a unit in all groups", unit=tuple((group, 0) for group in range(12))),
            unit_pair("a unit in half of them", unit=tuple((group, 0) for group in range(6))),
            _STAGGERED,
            unit_pair("a unit in one of them", unit=((0, 0),)),
            runs=(1_000, 8_000),
        ),
        latched_chosen=_chosen("bounds on groups that are chosen"),
        latched_chosen_clamps=_chosen("sums whose clamps are chosen, too", **_OPEN_SUM),
        latched_chosen_rows=_chosen(
            "rows in a group that are chosen, too",
            groups=2,
            max_rows_per_group="auto",
            aggregates=(Count("n"),),
        ),
        sqlp_remembered=_group_by(
            ", keys that the first window has shown, all of them shown in the others.",
            **_REMEMBERED,
            pairs=REMEMBERED,
            strategy="sqlp",
        ),
        latched_spelled_keys=_group_by(
            ": keys that the unit writes in its own way, to the last bit.",
            keys=("key", "zero", "day"),
            looks=key_bytes,
        ),
        latched_spelled_units=_group_by(
            ", from JSON: a unit that writes its number in four ways.",
            groups=1,
            source=json_source,
            public_groups=range,
            max_groups_contributed=1,
            pairs=(spellings,),
        ),
        latched_join=_group_by(
            f", joined to a public table: a row becomes {MATCHES}.",
            again=True,
            groups=1,
            public_groups=range,
            max_groups_contributed=1,
            max_rows_per_group=2,
            joins=public_join,
        ),
        latched_registry=_group_by(
            f", joined to a registry that has {MATCHES} rows of the unit.",
            groups=1,
            max_groups_contributed=1,
            joins=registry_join,
        ),
        latched_subquery=_group_by(
            ", rows that subqueries over a public table let pass.",
            groups=1,
            public_groups=range,
            max_groups_contributed=1,
            joins=table_subqueries,
        ),
        latched_inner_rows=_group_by(
            ": the rows of each unit are grouped first, and counted by how many they are.",
            pairs=tuple(
                unit_pair(f"{len(unit)} rows of a unit", others=((0, 0, others),), unit=unit)
                for unit in (_SOMETIMES[:1], _SOMETIMES)
                for others in (0, 9)
            ),
            **_INNER,
        ),
        latched_funnel=_group_by(
            ": steps that each unit has reached, published as soon as it has.",
            pairs=tuple(
                _rows_of_unit(*_SOMETIMES[:many], others=((0, 0, others),))
                for many in (1, STEPS)
                for others in (0, 9)
            ),
            max_groups_contributed=STEPS,
            **_FUNNEL,
        ),
        latched_cohorts=_group_by(
            ": a unit's cohort, and when it came back.",
            pairs=(
                _rows_of_unit(*_SOMETIMES),
                _rows_of_unit(*_SOMETIMES, others=((0, 0, 9), (0, 1, 9), (0, 2, 9))),
            ),
            max_groups_contributed=STEPS,
            **_COHORTS,
        ),
        latched_sessions=_group_by(
            ": sessions of each unit within a period, which end with it.",
            pairs=(_period_pair(),),
            **_SESSIONS
            | {
                "window": Tumble("8 hours"),
                "privacy_unit_period": "8 hours",
                "joins": _sessions("8"),
            },
        ),
        sqlp=_group_by(", one row per group.", strategy="sqlp"),
        sqlp_rows=_group_by(
            ": counts of rows and of units, several rows.",
            again=True,
            strategy="sqlp",
            aggregates=(Count("n"), CountUnits("u")),
            max_rows_per_group=3,
        ),
        latched_debias=_debias(".", 9),
        latched_debias_public_keys=_debias(", public keys.", 2, public_groups=[0, 1]),
        latched_debias_groups=_debias_groups(
            ", by the size of the key.", GROUPS_OFFERED, elsewhere_pair(), elsewhere_pair(2)
        ),
        latched_debias_groups_public_keys=_debias_groups(
            ", public keys, published three times.",
            3,
            _GROUPS_FIRST,
            every="20 minutes",
            max_groups_contributed=2,
            public_groups=[0, 1, 2],
        ),
    )


def _rows_of_unit(*unit: Place, others: tuple[tuple[int, int, int], ...] = ()) -> Pair:
    return unit_pair("all rows of a unit", others=others, unit=unit)


def _control(
    about: str, pair: Pair, *, runs: tuple[int, int] = (16_000, 60_000), **facts: Any
) -> Maker:
    """A GROUP BY of which one piece is broken."""
    sample = _day_runs(**{"max_groups_contributed": 1} | facts)
    epsilon = float(facts.get("epsilon", EPSILON))
    return query_target(about, sample, pair, runs=runs, epsilon=epsilon, control=True)


def _debias_control(about: str, rows: int, **how: Any) -> Maker:
    return query_target(
        about,
        QueryRuns(query=debias_query(public_groups=[0, 1]), groups=2, apart="windows", **how),
        offering_pair(rows),
        runs=(600, 3_000),
        control=True,
    )


def _elsewhere_control(about: str, pair: Pair, **how: Any) -> Maker:
    query = debias_query(**_ELSEWHERE, public_groups=list(range(GROUPS_OFFERED)))
    return query_target(
        about,
        QueryRuns(query=query, groups=GROUPS_OFFERED, apart="windows", **how),
        pair,
        runs=(1_000, 4_000),
        control=True,
    )


def choices_charged_once(query: Query) -> NoisePlan:
    """The plan of the query, whose choices are charged as one."""
    return ChoiceChargedOnce(plan_query(query).query)


def query_controls() -> Catalogue:
    """GROUP BY queries through an engine with one line changed."""
    return by_name(
        bounds_off_by_one=_control(
            "One row and one group more than the plan knows.",
            _rows_of_unit((0, 0), (1, 0), others=((0, 0, 40), (1, 0, 40))),
            flow=BoundsOffByOne,
            groups=2,
            every=None,
            public_groups=lambda runs: range(2 * runs),
        ),
        noise_below_reach=_control(
            "Noise for one group of a unit that is in two windows of two keys.",
            _rows_of_unit((0, 1), (1, 1), others=((0, 0, 40), (1, 0, 40))),
            plan=NoiseBelowReach,
            window=Hop("16 hours", slide="8 hours"),
            groups=2,
            every=None,
            public_groups=lambda runs: range(2 * runs),
            max_groups_contributed=4,
        ),
        levels_charged_once=_control(
            "A quantile's levels, each with the budget of all of them.",
            _rows_of_unit((0, 0), (0, 1), others=((0, 0, 40),)),
            plan=LevelsChargedOnce,
            **_NODES,
        ),
        weights_not_shared=_control(
            "Eight keys of a unit, each with the weight of an only one.",
            _many_keys(0)[0],
            flow=WeightsNotShared,
            runs=(4_000, 20_000),
            **{name: fact for name, fact in _WEIGHTED.items() if name != "pairs"},
        ),
        choice_charged_once=_control(
            "A median chosen 24 times, each time with the budget of all of them.",
            BESIDE_THE_MEDIAN,
            plan=choices_charged_once,
            runs=(2_000, 20_000),
            **_CHOICE,
        ),
        pure_noise_in_l2=query_target(
            "Laplace noise for what a unit moves in L2: it is in eight groups.",
            _day_runs(
                plan=PureNoiseInL2,
                max_groups_contributed=8,
                **_WITHOUT_DELTA | {"groups": 8, "public_groups": lambda runs: range(8 * runs)},
            ),
            _rows_of_unit(*((group, 0) for group in range(8))),
            runs=(6_000, 40_000),
            delta=0.0,
            control=True,
        ),
        sets_charged_once=_control(
            "Each of four sets of keys with the budget of all of them.",
            _rows_of_unit((0, 0), others=((0, 0, 40),)),
            plan=SetsChargedOnce,
            every=None,
            **_rollup(1, "x", "zero"),
        ),
        totals_like_parts=_control(
            "Noise on a total of five groups as if a unit's rows lay in one of them each.",
            _rows_of_unit(*((group, 0) for group in range(5)), others=((0, 0, 40),)),
            plan=TotalsLikeParts,
            every=None,
            grouping_set_weights=(1, 9),
            **_rollup(5),
        ),
        months_counted_at_the_start=_control(
            "Noise on a total for the one window of the first month, where March is in four.",
            _rows_of_unit(*_MARCH),
            plan=WindowsOfTheFirstMonth,
            runs=(8_000, 40_000),
            **_MONTHS,
        ),
        months_all_as_the_shortest=_control(
            "Noise on a total for the two windows of February, where March is in four.",
            _rows_of_unit(*_MARCH),
            plan=WindowsOfTheShortestMonth,
            runs=(40_000, 60_000),
            **_MONTHS,
        ),
        keys_only_when_touched=_control(
            "A key is published only where it has new rows.",
            _rows_of_unit((0, 2), others=((0, 0, 40),)),
            flow=OnlyTouchedKeys,
            runs=(4_000, 20_000),
        ),
        threshold_without_plus_one=_control(
            "A key with one unit is tested against the threshold of its neighbour.",
            _rows_of_unit((0, 0)),
            plan=ThresholdWithoutPlusOne,
            every=None,
            epsilon=3,
            selection_share=Fraction(99, 100),
        ),
        remembered_once_touched=_control(
            "A remembered key is shown once somebody has a row in it.",
            _rows_of_unit((0, 1), others=((0, 0, 60),)),
            flow=RememberedOnceTouched,
            runs=(2_000, 8_000),
            **_REMEMBERED | {"groups": 1},
        ),
        shared_by_all_groups=query_target(
            "Noise that groups share, made for a unit in all of them; this one is in half.",
            _sharing(lambda query: SharedByAllGroups(plan_query(query).query)),
            unit_pair("a unit in half of the groups", unit=tuple((group, 0) for group in range(6))),
            runs=(1_000, 4_000),
            control=True,
        ),
        shared_in_every_release=query_target(
            "Noise that groups share at every release, made for groups that come in one step.",
            _sharing(
                lambda query: OwnNoiseOfShared(plan_query(query).query),
                flow=SharedInEveryRelease,
                every="20 minutes",
                last_budget=None,
                correlated_noise=False,
            ),
            _STAGGERED,
            runs=(1_000, 4_000),
            control=True,
        ),
        rising_bounds=_control(
            "Each window gets a bound of its own, and the period's rises from 1 to 4 to 16.",
            _rows_of_unit(
                (0, 0),
                *((group, 1) for group in range(3)),
                *((group, 2) for group in range(3, 15)),
            ),
            flow=RisingBounds,
            **_CHOSEN | _RISING,
        ),
        clamps_of_another_period=_control(
            "Values have clamps of ten times what the noise of their period is for.",
            _rows_of_unit((0, 0)),
            flow=ClampsOfAnotherPeriod,
            groups=1,
            runs=(2_000, 8_000),
            privacy_unit_period="8 hours",
            public_groups=range,
            **_CHOSEN | _OPEN_SUM,
        ),
        forgotten_by_exact_counts=_control(
            "A remembered key is forgotten at the end of a window in which nobody had a row in it.",
            _rows_of_unit((0, 1), others=((0, 0, 60),)),
            flow=ForgottenByExactCounts,
            runs=(2_000, 8_000),
            **_REMEMBERED | {"groups": 1},
        ),
        remembers_active_keys=_control(
            "A key is remembered that was looked at, and not shown.",
            _rows_of_unit((0, 0)),
            flow=RemembersActiveKeys,
            runs=(2_000, 8_000),
            **_REMEMBERED | {"groups": 1},
        ),
        unit_counted_twice=_control(
            "A unit counts once per row, not once per group.",
            _rows_of_unit((0, 0), (0, 1), (0, 2), others=((0, 0, 40),)),
            flow=UnitCountedTwice,
            aggregates=(CountUnits("n"),),
            max_rows_per_group=3,
            runs=(8_000, 40_000),
        ),
        net_clamp=_control(
            "The sum of a unit's rows in a group is clamped where it can rise and fall again.",
            SWINGING,
            groups=1,
            aggregates=(
                NetClamp("s", column="swing", contribution_bounds_per_group=(-4, 4), quantum=1),
            ),
            runs=(2_000, 20_000),
            **_DAYS,
        ),
        sqlp_per_trigger=_control(
            "DP-SQLP's bound per trigger, where it must hold for all triggers.",
            _rows_of_unit((0, 0)),
            plan=TailPerTrigger,
            strategy="sqlp",
            selection_share=Fraction(9, 10),
            every="1 hour",
        ),
        key_as_spelled=_control(
            "A key looks as the first row spelled it: -0.0 beside others' 0.0.",
            _rows_of_unit((0, 0), others=((0, 1, 60),)),
            reader=KeyAsSpelled,
            keys=("key", "zero"),
            looks=key_bytes,
            runs=(1_000, 4_000),
        ),
        type_from_data=_control(
            "A count is a column of floats once somebody had too many rows, else of integers.",
            _rows_of_unit((0, 0), (0, 0), others=((0, 0, 40),)),
            flow=ColumnTypeFromData,
            apart="nothing",
            epsilon=1,
            looks=column_types,
            public_groups=lambda runs: [0],
            runs=(120, 400),
        ),
        unit_by_spelling=_control(
            "A unit is what is written: 5, 5.0, 5e0 and ' 5' are four of them.",
            _rows_of_unit(*((0, 0),) * 4, others=((0, 0, 5),)),
            reader=UnitBySpelling,
            source=units_as_text,
            public_groups=range,
            runs=(4_000, 20_000),
        ),
        bounded_before_join=_control(
            f"Bounds for rows of the stream: a row becomes {MATCHES}, and all of them count.",
            _rows_of_unit((0, 0), others=((0, 0, 5),)),
            reader=BoundedBeforeJoin,
            public_groups=range,
            joins=public_join,
            runs=(4_000, 20_000),
        ),
        registry_not_bounded=_control(
            f"A unit has {MATCHES} rows in the registry, and all of them count.",
            _rows_of_unit((0, 0), others=((0, 0, 5),)),
            reader=BoundedBeforeJoin,
            public_groups=range,
            joins=registry_join,
            runs=(4_000, 20_000),
        ),
        subquery_over_stream=_control(
            "Rows pass where a subquery over the stream itself finds at most five.",
            _rows_of_unit((0, 0), others=((0, 0, 5),)),
            reader=SubqueryOverStream,
            public_groups=range,
            runs=(4_000, 20_000),
        ),
        inner_rows_of_others=_control(
            "A unit's inner rows count only where few other units are.",
            _rows_of_unit((0, 0), others=((0, 0, 9),)),
            reader=InnerRowsAmongFew,
            runs=(4_000, 20_000),
            **_INNER,
        ),
        inner_rows_charged_once=_control(
            "What becomes of a unit's rows in each window is bounded as if of another unit.",
            _rows_of_unit(*_SOMETIMES, others=((0, 0, 5),)),
            flow=UnitOfEachWindow,
            runs=(4_000, 20_000),
            **_INNER | {"window": Tumble("8 hours"), "joins": rows_of_units("8")},
        ),
        sessions_over_midnight=_control(
            "Sessions go on from one period to the next, and each is charged to one period alone.",
            _period_pair(),
            flow=UnitOfEachSession,
            runs=(4_000, 20_000),
            **_SESSIONS | {"joins": _sessions("24")},
        ),
        cohorts_charged_once=_control(
            "Noise is for one cell of a unit's cohort, and it is in a cell of each window.",
            _rows_of_unit(*_SOMETIMES, others=((0, 0, 5),)),
            flow=UnitOfEachWindow,
            max_groups_contributed=1,
            runs=(4_000, 20_000),
            **_COHORTS,
        ),
        net_results_published_twice=_control(
            "How many rows a unit has so far is published at each trigger, with noise for one bin.",
            _rows_of_unit(*_SOMETIMES, others=((0, 0, 5),)),
            flow=UnitOfEachStep,
            max_groups_contributed=1,
            runs=(4_000, 20_000),
            **_FUNNEL,
        ),
        watermark_from_data=_control(
            "Steps by the latest event time seen: one row moves those of all others.",
            _rows_of_unit((0, 2), others=((0, 0, 60),)),
            reader=WatermarkFromData,
            apart="nothing",
            epsilon=1,
            runs=(120, 400),
        ),
        debias_units_not_capped=_debias_control(
            "Dropped rows are counted without a bound for a unit.",
            20 * OFFERED,
            flow=UncappedDroppedRows,
        ),
        debias_noise_for_one_row=_debias_control(
            f"Noise on dropped rows for one row of a unit, of which {DROPPED} count.",
            OFFERED,
            plan=NoiseForOneDroppedRow,
        ),
        debias_groups_not_capped=_elsewhere_control(
            "Dropped rows of groups that their unit is not in are counted without a bound.",
            elsewhere_pair(20),
            flow=UncappedElsewhere,
        ),
        debias_groups_noise_for_one_row=_elsewhere_control(
            f"Noise on rows of groups that their unit is not in for one row, of which {DROPPED} "
            "count.",
            elsewhere_pair(),
            plan=NoiseForOneRowElsewhere,
        ),
    )


def crowded_pair(windows: range, *, others: tuple[int, ...] = (5,), name: str = "") -> Pair:
    """A unit with five rows in each of these windows; `others` in turn, from window to window."""
    return unit_pair(
        f"a unit with 5 rows in windows {windows[0]} to {windows[-1]}{name}",
        others=tuple(
            (0, window, others[window % len(others)])
            for window in range(WINDOWS)
            if others[window % len(others)]
        ),
        unit=tuple(place for step in windows for place in (*((0, step),) * 4, (0, step, 1))),
    )


ALL_WINDOWS = crowded_pair(range(1, 1 + W))
"""The first window is still open when its late rows come."""


def _series(about: str, sample: SeriesRuns, *pairs: Pair, **facts: Any) -> Maker:
    usual: dict[str, Any] = {"runs": (8_000, 60_000), "delta": 0.0}
    return query_target(about, sample, *pairs, **usual | facts)


def series_targets() -> Catalogue:
    """Time-series mechanisms through SQL."""
    return by_name(
        sql_w_event=_series(
            f"SQL through uniform noise, w = {W}: from the text to the tables.",
            SeriesRuns(options=_UNIFORM),
            ALL_WINDOWS,
            crowded_pair(range(W)),
            simple=True,
        ),
        sql_event=_series(
            "SQL through a tree of sums, one window of a unit: from the text to the tables.",
            SeriesRuns(options=_COUNTER),
            crowded_pair(range(1)),
            crowded_pair(range(1, 2)),
            delta=SERIES_DELTA,
            simple=True,
        ),
        sql_pacer=_series(
            f"SQL through the default mechanism, pacer, w = {W}: every run a query.",
            SeriesRuns(options=_W_EVENT, apart=False),
            crowded_pair(range(W), others=(40, 0), name=", jumping counts"),
            crowded_pair(range(W)),
            runs=(300, 2_000),
        ),
    )


def series_controls() -> Catalogue:
    """SQL through a mechanism that is charged too little."""
    facts: dict[str, Any] = {"control": True, "runs": (8_000, 40_000)}
    return by_name(
        sql_unit_enters_again=_series(
            "A unit whose rows come in two steps enters a window twice.",
            SeriesRuns(options=_UNIFORM, run=UnitEntersAgain),
            ALL_WINDOWS,
            **facts,
        ),
        sql_w_forgotten=_series(
            f"Promised for {W} windows, but the mechanism is made for one.",
            SeriesRuns(options=_UNIFORM.replace(f"w = {W}", "w = 1")),
            ALL_WINDOWS,
            **facts,
        ),
    )
