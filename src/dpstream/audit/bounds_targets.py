"""Paid `bounds`, as the audit attacks it: from rows to histograms, the bounds, and the sum of rows.

A run reads the rows of all units, asks both questions and sees all that is published of them: the
bins that the target is in, and the sum, by the cut that the histograms have chosen. The keyed hash
that picks rows of a unit is the same in all runs: the proof holds for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.query_samplers import Scenario, run_plan, scenario_table, unit_pair
from dpstream.audit.query_targets import DELTA, EPSILON, query_target
from dpstream.audit.targets import Catalogue, Pair, by_name, secret_of
from dpstream.bounds_proposal.histograms import (
    Histograms,
    UnitFacts,
    collect_unit_facts,
    exact_histograms,
    fact_names,
    fact_rows,
    histograms_of,
)
from dpstream.bounds_proposal.lost_rows import (
    LOST,
    Asked,
    Measurement,
)
from dpstream.bounds_proposal.propose import asked_about, from_histograms, reading_of
from dpstream.connectors.memory import TableSource
from dpstream.privacy.state import Secret
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Reals

GROUPS, ROWS = 24, 2
QUERY = Query(
    privacy_unit_column="user",
    keys=("key",),
    epsilon=EPSILON,
    delta=DELTA,
    max_groups_contributed=1,
).starting(0)
"""What bounds are wanted for."""
TARGET = Scenario(unit=tuple((group, 0) for group in range(GROUPS)) * ROWS)
"""A unit with more rows than any bounds keep that few others speak for."""


def ask_both(
    measurement: Measurement,
    facts: UnitFacts,
    propose: Callable[[Histograms], dict[str, Any]],
    *,
    secret: bytes,
) -> tuple[Histograms, Asked, pa.Table]:
    """Both answers, each by the whole path of a query, and what the second one is about."""
    rows = fact_rows(facts, measurement.asked, measurement.names)
    plan = _plan(measurement.asked)
    [(_, published)] = run_plan(plan, rows, secret=secret, run=b"histograms of it")
    histograms = histograms_of(published.table, measurement.names)
    about = asked_about(histograms, measurement, propose(histograms))
    table, plan = measurement.lost_table(facts, about), _plan(measurement.sum_query(about))
    [(_, told)] = run_plan(plan, table, secret=secret, run=b"what is left out")
    return histograms, about, told.table


_plan = lru_cache(maxsize=64)(plan_query)


@lru_cache(maxsize=64)
def _facts(data: Scenario) -> UnitFacts:
    """The facts of all units of a scenario, read from its rows as they are."""
    return collect_unit_facts(
        TableSource(scenario_table(data, 1, GROUPS, windows=False)),
        reading_of(QUERY, []),
        secret=Secret(bytes(32)),
        run=bytes(16),
        share=1.0,
        progress=lambda done, total: None,
    )


@dataclass(frozen=True, kw_only=True)
class PaidBounds:
    """A sampler: each run is a measurement of its own."""

    kind: type[Measurement] = Measurement
    epsilon: int = EPSILON

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """Of each run: the bins of `TARGET`, the sum by its cut, and all by how much each says."""
        names = fact_names(QUERY, [])
        measurement = self.kind.of(
            reading_of(QUERY, []), names, epsilon=self.epsilon, delta=DELTA, about="audit"
        )
        bins = exact_histograms(_facts(TARGET), names).bins
        facts, rows = _facts(data), []
        for run in range(runs):
            histograms, about, told = ask_both(
                measurement,
                facts,
                lambda found: from_histograms(QUERY, found),
                secret=secret_of(f"{secret.hex()} {run}"),
            )
            mine = [histograms.bins[name] @ bins[name] for name in names]
            lost = told[LOST][0].as_py() / about.cut
            whole = sum(mine) / histograms.stddev**2 + lost / measurement.noise_of_one**2
            rows.append([*mine, lost, whole])
        return np.array(rows)


class SumNotCut(Measurement):
    """Cuts what a unit loses in each of its groups, and not what it loses in all of them.

    True: a unit in n groups moves the sum by n times the cut, and noise is for one.
    """

    def lost_table(self, facts: UnitFacts, about: Asked) -> pa.Table:
        """A row for each unit and group, as if each were a unit."""
        whole = super().lost_table(facts, about)
        unit, of = self.asked.privacy_unit_column, facts.pair_units
        ids = [f"{whole[unit][int(at)]} {number}" for number, at in enumerate(of)]
        share = np.minimum(1.0, about.groups / facts.groups[of])
        lost = facts.pair_rows - share * np.minimum(facts.pair_rows, about.rows)
        return pa.table({unit: ids, LOST: lost.clip(0, about.cut)})


def _pair(others: int) -> Pair:
    """The target comes or goes beside others of one row each."""
    rows = tuple((group, 0, others) for group in range(GROUPS) if others)
    return unit_pair(f"{others} others in each group", others=rows, unit=TARGET.unit)


def bounds_targets() -> Catalogue:
    """What is shipped."""
    return by_name(
        bounds=query_target(
            "Bounds that are paid for: histograms, the bounds that follow, the sum they leave out.",
            PaidBounds(),
            _pair(3),
            runs=(160, 2_000),
        )
    )


def bounds_controls() -> Catalogue:
    """What must be caught."""
    return by_name(
        bounds_sum_not_cut=query_target(
            "What a unit loses by its bounds is cut in each of its groups, and not in all.",
            PaidBounds(kind=SumNotCut, epsilon=1),
            _pair(3),
            runs=(160, 2_000),
            epsilon=1.0,
            control=True,
        )
    )
