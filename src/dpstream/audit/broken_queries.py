"""Whole queries through an engine with one line changed, with what they claim."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dpstream.audit.controls.engine import (
    CountedTwice,
    DataWatermark,
    KeyAsSpelled,
    NoPlusOne,
    OffByOne,
    OneRowOffered,
    PerTrigger,
    TouchedOnly,
    TypeFromData,
    Uncapped,
    UnitBySpelling,
    units_as_text,
)
from dpstream.audit.neighbours import Pair
from dpstream.audit.queries import DELTA, EPSILON, OFFERED, debiased, offering, query_of
from dpstream.audit.query_samplers import (
    QueryRuns,
    Scenario,
    column_types,
    key_bytes,
)
from dpstream.audit.targets import Audited, Target
from dpstream.stages.aggregates import CountUnits
from dpstream.stages.flow import Flow
from dpstream.stages.query import Query


def _query(
    name: str,
    about: str,
    scenario: Scenario,
    *,
    plan: Any = None,
    flow: type[Flow] | None = None,
    runs: tuple[int, int] = (16_000, 60_000),
    groups: int = 1,
    apart: Any = "groups",
    reader: Any = None,
    source: Any = None,
    looks: Any = None,
    **facts: Any,
) -> Callable[[], Target]:
    def make() -> Target:
        def query(runs: int) -> Query:
            made = {n: fact(runs) if n == "public_keys" else fact for n, fact in facts.items()}
            return query_of(**{"max_groups_contributed": 1} | made)

        how: dict[str, Any] = {"query": query, "groups": groups, "apart": apart}
        given = {"plan": plan, "reader": reader, "source": source, "looks": looks}
        how |= {name: piece for name, piece in given.items() if piece is not None}
        if flow is not None:
            how["flow"] = lambda plan, reader: flow(plan, reader, buckets=1, threads=1)
        without = Scenario(others=scenario.others)
        return Target(
            name=name,
            about=about,
            sample=QueryRuns(**how),
            pairs=(Pair(name="all rows of a unit", one=scenario, two=without),),
            epsilon=float(query(1).epsilon),
            delta=float(query(1).delta),
            control=True,
            runs=runs,
        )

    return make


def broken_queries() -> dict[str, Callable[[], Audited]]:
    """By name, and made when asked for."""
    return {
        "bounds_off_by_one": _query(
            "bounds_off_by_one",
            "One row and one group more than the plan knows.",
            Scenario(others=((0, 0, 40), (1, 0, 40)), unit=((0, 0), (1, 0))),
            flow=OffByOne,
            groups=2,
            every=None,
            public_keys=lambda runs: list(range(2 * runs)),
        ),
        "keys_only_when_touched": _query(
            "keys_only_when_touched",
            "A key is published only where it has new rows.",
            Scenario(others=((0, 0, 40),), unit=((0, 2),)),
            flow=TouchedOnly,
            runs=(4_000, 20_000),
        ),
        "threshold_without_plus_one": _query(
            "threshold_without_plus_one",
            "A key with one unit is tested against the threshold of its neighbour.",
            Scenario(unit=((0, 0),)),
            plan=NoPlusOne,
            every=None,
            epsilon=3,
            selection_share=Fraction(99, 100),
        ),
        "unit_counted_twice": _query(
            "unit_counted_twice",
            "A unit counts once per row, not once per group.",
            Scenario(others=((0, 0, 40),), unit=((0, 0), (0, 1), (0, 2))),
            flow=CountedTwice,
            aggregates=(CountUnits("n"),),
            max_rows_per_group=3,
            runs=(8_000, 40_000),
        ),
        "sqlp_per_trigger": _query(
            "sqlp_per_trigger",
            "DP-SQLP's bound per trigger, where it must hold for all triggers.",
            Scenario(unit=((0, 0),)),
            plan=PerTrigger,
            strategy="sqlp",
            selection_share=Fraction(9, 10),
            every="1 hour",
        ),
        "key_as_spelled": _query(
            "key_as_spelled",
            "A key looks as the first row spelled it: -0.0 beside others' 0.0.",
            Scenario(others=((0, 1, 60),), unit=((0, 0),)),
            reader=KeyAsSpelled,
            keys=("key", "zero"),
            looks=key_bytes,
            runs=(1_000, 4_000),
        ),
        "type_from_data": _query(
            "type_from_data",
            "A count is a column of floats once somebody had too many rows, else of integers.",
            Scenario(others=((0, 0, 40),), unit=((0, 0), (0, 0))),
            flow=TypeFromData,
            apart="nothing",
            epsilon=1,
            looks=column_types,
            public_keys=lambda runs: [0],
            runs=(120, 400),
        ),
        "unit_by_spelling": _query(
            "unit_by_spelling",
            "A unit is what is written: 5, 5.0, 5e0 and ' 5' are four of them.",
            Scenario(others=((0, 0, 5),), unit=((0, 0),) * 4),
            reader=UnitBySpelling,
            source=units_as_text,
            public_keys=lambda runs: list(range(runs)),
            runs=(4_000, 20_000),
        ),
        "watermark_from_data": _query(
            "watermark_from_data",
            "Steps by the latest event time seen: one row moves those of all others.",
            Scenario(others=((0, 0, 60),), unit=((0, 2),)),
            reader=DataWatermark,
            apart="nothing",
            epsilon=1,
            runs=(120, 400),
        ),
        "debias_units_not_capped": _totals(
            "debias_units_not_capped",
            "Rows offered are counted without a bound for a unit.",
            offering(20 * OFFERED),
            flow=lambda plan, reader: Uncapped(plan, reader, buckets=1, threads=1),
        ),
        "debias_noise_for_one_row": _totals(
            "debias_noise_for_one_row",
            f"Noise on rows offered for one row of a unit, which offers {OFFERED}.",
            offering(OFFERED),
            plan=OneRowOffered,
        ),
    }


def _totals(name: str, about: str, pair: Pair, **how: Any) -> Callable[[], Target]:
    query = debiased(public_keys=[0, 1])
    return lambda: Target(
        name=name,
        about=about,
        sample=QueryRuns(query=query, groups=2, apart="windows", **how),
        pairs=(pair,),
        epsilon=float(EPSILON),
        delta=DELTA,
        control=True,
        runs=(600, 3_000),
    )
