"""Several sets of keys in one query: errors of totals and parts, before least squares and after it.

A made-up log of one row a user, by three keys of which all combinations are public. Each set is
published with its share of the budget. Beside it stands the other way to totals: one query by all
keys with the whole budget, its parts added up, which costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import Findings, Progress, Row, target
from dpstream.audit.query_samplers import run_plan
from dpstream.query.grouping_sets import GROUPING_ID, grouping_id, set_name
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Reals

KEYS: Final = ("country", "page", "device")
SIZES: Final = (8, 20, 4)
CELLS: Final = list(product(*(range(size) for size in SIZES)))
SETS: Final = {
    "ROLLUP": (KEYS, KEYS[:2], KEYS[:1], ()),
    "CUBE": tuple(tuple(k for k in names if k) for names in product(*((k, "") for k in KEYS))),
}
_ROWS: Final = 20_000
_Z: Final = 1.959963984540054
_LOWEST, _HIGHEST = 0.94, 0.96


def log() -> pa.Table:
    """Large cells and small ones."""
    rng = np.random.default_rng(5)
    weights = rng.lognormal(0, 1.5, len(CELLS))
    places = rng.choice(len(CELLS), _ROWS, p=weights / weights.sum())
    columns = {key: [CELLS[at][n] for at in places] for n, key in enumerate(KEYS)}
    return pa.table({"user": np.arange(_ROWS), **columns})


def query_of(**facts: Any) -> Query:
    """COUNT(*) by all keys."""
    return Query(
        privacy_unit_column="user",
        keys=KEYS,
        public_groups=CELLS,
        epsilon=1,
        delta=1e-6,
        max_groups_contributed=1,
        report_bias=False,
        **facts,
    )


def releases(query: Query, table: pa.Table, runs: int) -> Iterator[pa.Table]:
    """What so many runs publish, each with other noise."""
    plan = plan_query(query)
    for number in range(runs):
        for _, publication in run_plan(plan, table, run=number.to_bytes(16, "big")):
            yield publication.table


def truths(table: pa.Table, release: pa.Table, names: tuple[str, ...]) -> Reals:
    """The exact counts of a set's rows."""
    counts = dict.fromkeys(product(*(range(SIZES[KEYS.index(name)]) for name in names)), 0)
    for row in zip(*(table[name].to_pylist() for name in names), strict=True):
        counts[row] += 1
    if not names:
        counts[()] = len(table)
    rows = zip(*(release[name].to_pylist() for name in names), strict=True)
    return np.array([counts[row] for row in rows] if names else [len(table)], np.float64)


def of_sets(name: str, table: pa.Table, runs: int) -> list[Row]:
    """A row for each set: its noise as measured, what is published, and parts added up."""
    query = query_of(grouping_sets=SETS[name])
    window, made = plan_query(query).window(1), list(releases(query, table, runs))
    alone = float(plan_query(query_of()).window(1).stddevs[0, 0])
    rows: list[Row] = []
    for at, names in enumerate(query.grouping_sets):
        mine = np.asarray(made[0][GROUPING_ID]) == grouping_id(KEYS, names)
        shown = [each.filter(pa.array(mine)) for each in made]
        exact = truths(table, shown[0], names)
        errors = np.array([each["count"].to_numpy() for each in shown]) - exact
        bars = np.array([each["count_stddev"].to_numpy() for each in shown])
        before = float(window.stddevs[at * window.measures, 0])
        parts = len(CELLS) // len(exact)
        after = float(np.sqrt((errors**2).mean()))
        rows.append(
            {
                "sets": name,
                "set": set_name(names),
                "groups": len(exact),
                "before": before,
                "after": after,
                "ratio": after / before,
                "said": float(bars.mean()),
                "said_ratio": float(bars.mean()) / before,
                "covered": float((np.abs(errors) <= _Z * bars).mean()),
                "parts_added_up": alone * parts**0.5,
            }
        )
    return rows


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Errors of every set of a ROLLUP and of a CUBE."""
    table, runs, rows = log(), 5 if quick else 100, []
    for done, name in enumerate(SETS):
        rows += of_sets(name, table, runs)
        progress(done + 1, len(SETS), name)
    weights = [row["groups"] * row["covered"] for row in rows]
    covered = sum(weights) / sum(row["groups"] for row in rows)
    targets = [
        target("largest said error, after / before", max(r["said_ratio"] for r in rows), "<=", 1),
        target("share of figures within 95% bars, at least", covered, ">=", _LOWEST),
        target("share of figures within 95% bars, at most", covered, "<=", _HIGHEST),
    ]
    return Findings(rows=rows, targets=targets, notes=["before: each set alone, with its share"])
