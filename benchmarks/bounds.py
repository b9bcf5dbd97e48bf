"""How well `bounds` tells the share of rows that its proposal leaves out, paid with epsilon 0.1.

Generated logs of the two shapes of `generated_logs`, and a real one (DPSTREAM_DATA), each asked
about in a few ways and measured with the noise of 20 fixed secrets. The truth is that of the
bounds that were proposed, each time anew: a unit keeps G of its groups, in random order, and K rows
in each.

No measurement at this epsilon tells small shares within a fifth. Let l be the rows of a unit that
are left out, and s the noise of one count if all of epsilon went into it. A sum of l, cut at B a
unit, has the noise s B and lacks what is beyond; the *floor* is the least of the two together over
all B, which only who knows the data can choose:

    floor = min over B of sqrt((s B)^2 + (sum of (l - B)+)^2) / rows

A share is told well if it is off by at most a fifth of the truth, or by two floors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.generated_logs import CUSTOMERS, SESSIONS, customer_orders, web_sessions
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE
from dpstream.audit.bounds_targets import ask_both
from dpstream.bounds_proposal import propose
from dpstream.bounds_proposal.histograms import (
    COUNTS,
    UnitFacts,
    collect_unit_facts,
    fact_names,
)
from dpstream.bounds_proposal.lost_rows import Measurement, measured_sum
from dpstream.connectors.registry import open_source
from dpstream.evaluate.trials import fixed_noise
from dpstream.privacy.accounting.curves import gdp_mu
from dpstream.privacy.state import Secret
from dpstream.query.aggregates import Count
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Integers

EPSILON: Final = 0.1
DELTA: Final = 1e-9
CLOSE: Final = 0.2
FLOORS: Final = 2.0
MOST_SHARE: Final = 0.9
_DAY: Final = 86_400
_WEEKS: Final = 78


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A log, and a query whose bounds are to be chosen; `width` of its windows in seconds."""

    name: str
    table: pa.Table
    query: Query
    width: int = 0


def _query(unit: str, **facts: Any) -> Query:
    known: dict[str, Any] = {"epsilon": 1, "delta": DELTA, "max_groups_contributed": 1}
    return Query(privacy_unit_column=unit, aggregates=(Count("n"),), **known | facts)


def _windows(width: int, column: str, end: int) -> dict[str, Any]:
    times = {"time_column": column, "time_unit": "s", "start": "1970-01-01"}
    last = np.datetime64(end, "s").astype(str)
    return times | {"window": Tumble(f"{width} seconds"), "end": last}


def logs(*, quick: bool) -> Iterator[Asked]:
    """What is asked about each log; quick: two of them, with a tenth of the units."""
    web = web_sessions(sessions=SESSIONS // 10 if quick else SESSIONS)
    shop = customer_orders(customers=CUSTOMERS // 10 if quick else CUSTOMERS)
    yield Asked(name="sessions, by page", table=web, query=_query("session", keys=["page"]))
    weeks = _windows(7 * _DAY, "ts", _WEEKS * 7 * _DAY)
    asked = _query("customer", **weeks)
    yield Asked(name="orders, by week", table=shop, query=asked, width=7 * _DAY)
    if quick:
        return
    yield Asked(name="sessions, in all", table=web, query=_query("session"))
    four = _query("customer", **_windows(28 * _DAY, "ts", 80 * 7 * _DAY))
    yield Asked(name="orders, by four weeks", table=shop, query=four, width=28 * _DAY)
    yield Asked(name="orders, in all", table=shop, query=_query("customer"))
    higgs = Path(os.environ.get(VARIABLE, "/nowhere")) / "events_higgs_twitter_20120704.csv"
    if higgs.is_file():
        read = pa_csv.read_csv(higgs)
        yield Asked(name="higgs, by target", table=read, query=_query("user", keys=["target"]))
        hours = _query("user", keys=["target"], **_windows(3_600, "sec", _DAY))
        yield Asked(name="higgs, by target and hour", table=read, query=hours, width=3_600)
        yield Asked(name="higgs, in all", table=read, query=_query("user"))


def left_out(asked: Asked) -> Callable[[int, int], Any]:
    """For bounds (groups, rows): the rows of each unit that they leave out, in expectation."""
    table, query = asked.table, asked.query
    columns = [table[name].to_numpy(zero_copy_only=False) for name in query.keys]
    if asked.width:
        columns.append(table[str(query.time_column)].to_numpy() // asked.width)
    units = np.unique(table[query.privacy_unit_column].to_numpy(), return_inverse=True)[1]
    pairs: Integers = units.astype(np.int64)
    for column in columns:
        codes = np.unique(column, return_inverse=True)[1]
        pairs = np.unique(pairs * (codes.max() + 1) + codes, return_inverse=True)[1]
    first, rows = np.unique(pairs, return_index=True, return_counts=True)[1:]
    of, groups = units[first], np.bincount(units[first])

    def of_bounds(most: int, each: int) -> Any:
        share = np.minimum(1.0, most / groups)[of]
        return np.bincount(of, rows - share * np.minimum(rows, each))

    return of_bounds


def floor(lost: Any, rows: int, stddev: float) -> float:
    """The least error of one sum of what units lose, as a share of the rows.

    >>> floor(np.array([0.0, 3.0]), rows=100, stddev=0.1)
    0.003
    """
    found = [
        np.hypot(stddev * cut, np.maximum(lost - cut, 0.0).sum())
        for cut in (0, *COUNTS[: np.searchsorted(COUNTS, lost.max()) + 1])
    ]
    return round(float(min(found)) / rows, 6)


def of_log(asked: Asked, *, runs: int, said: Callable[[int], None]) -> Row:
    """What was proposed, how much it leaves out, and what was said of that, over noise seeds."""
    query = asked.query.starting(0)
    reading, names = propose.reading_of(query, []), fact_names(query, [])
    facts: UnitFacts = collect_unit_facts(
        open_source(asked.table),
        reading,
        secret=Secret(bytes(32)),
        run=bytes(16),
        share=1.0,
        progress=lambda *_: None,
    )
    paid = Measurement.of(reading, names, epsilon=EPSILON, delta=DELTA, about=asked.name)
    of_one = 1 / gdp_mu(epsilon=EPSILON, delta=DELTA)
    lost_by, total = left_out(asked), asked.table.num_rows
    off, truths, floors, bounds = [], [], [], []
    for run in range(runs):
        said(run)
        noise = fixed_noise(f"bounds of {asked.name}", run)
        choose = partial(propose.from_histograms, query)
        found, about, summed = ask_both(paid, facts, choose, secret=noise["secret"])
        measured = measured_sum(summed, about)
        proposal = propose.from_histograms(query, found, lost=measured)
        lost = lost_by(proposal["max_groups_contributed"], proposal["max_rows_per_group"])
        truths.append(float(lost.sum()) / total)
        off.append(proposal["left_out"] - truths[-1])
        floors.append(floor(lost, total, of_one))
        bounds.append((proposal["max_groups_contributed"], proposal["max_rows_per_group"]))
    errors, truth, least = np.abs(off), np.array(truths), np.array(floors)
    return {
        "log": asked.name,
        "units": len(facts.units),
        "runs": runs,
        "groups": f"{min(bounds)[0]} to {max(bounds)[0]}",
        "rows_per_group": f"{min(b for _, b in bounds)} to {max(b for _, b in bounds)}",
        "left_out": float(np.median(truth)),
        "said_too_much": float(np.mean(off)),
        "error": float(np.median(errors)),
        "most_error": float(errors.max()),
        "floor": float(np.median(least)),
        "within_a_fifth": float(np.mean(errors <= CLOSE * truth)),
        "within": float(np.mean(errors <= np.maximum(CLOSE * truth, FLOORS * least))),
    }


def measure(*, quick: bool, progress: Progress) -> Findings:
    """A row for each log and query; quick: two small logs, 2 runs."""
    asked, runs = list(logs(quick=quick)), 2 if quick else 20
    rows = []
    for number, one in enumerate(asked):
        said = partial(_said, progress, number * runs, len(asked) * runs, one.name)
        rows.append(of_log(one, runs=runs, said=said))
    targets = [
        target(
            f"{row['log']}: share of runs within a fifth or {FLOORS:g} floors",
            None if quick else row["within"],
            ">=",
            MOST_SHARE,
            reason="these logs have less than 10,000 units",
        )
        for row in rows
    ]
    notes = ["truths and floors are exact: not private, for this comparison only"]
    return Findings(rows=rows, targets=targets, notes=notes)


def _said(progress: Progress, before: int, total: int, name: str, run: int) -> None:
    progress(before + run, total, name)
