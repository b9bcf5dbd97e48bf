"""Errors of public groups that share a part of their noise, and of what they add up to.

A made-up log of users who are each in as many groups as they may be; COUNT(*) of a day, published
once or every hour. Beside it stands the same query with independent noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import Findings, Progress, Row, target
from dpstream.audit.query_samplers import run_plan
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Reals

GROUPS: Final = (3, 8, 24)
_DAYS: Final = 40
_HOUR: Final = 3600
_Z: Final = 1.959963984540054


def query_of(groups: int, reached: int, days: int, **facts: Any) -> Query:
    """COUNT(*) by day and public group, for users of a day."""
    return Query(
        privacy_unit_column="user",
        keys=("page",),
        public_groups=range(groups),
        epsilon=1,
        delta=1e-6,
        max_groups_contributed=reached,
        time_column="ts",
        time_unit="s",
        start="1970-01-01",
        end=str(np.datetime64("1970-01-01") + days),
        window=Tumble("1 day"),
        privacy_unit_period="1 day",
        report_bias=False,
        **facts,
    )


def log(groups: int, reached: int, days: int) -> pa.Table:
    """Fifty users a day, each in some groups at some hours."""
    rng = np.random.default_rng(7)
    rows = [
        (user, int(page), day * 24 * _HOUR + int(rng.integers(24)) * _HOUR)
        for day in range(days)
        for user in range(50)
        for page in rng.permutation(groups)[:reached]
    ]
    users, pages, times = zip(*rows, strict=True)
    return pa.table({"user": users, "page": pages, "ts": times})


def errors(query: Query, table: pa.Table, runs: int) -> tuple[Reals, Reals, Reals]:
    """(errors, error bars) of groups at each window's last release, (errors) of their sums."""
    exact: dict[tuple[int, int], int] = {}
    for page, at in zip(table["page"].to_pylist(), table["ts"].to_pylist(), strict=True):
        place = (at // (24 * _HOUR), page)
        exact[place] = exact.get(place, 0) + 1
    found, bars = [], []
    plan = plan_query(query)
    for number in range(runs):
        for _, release in run_plan(plan, table, run=number.to_bytes(16, "big")):
            if release.due.release == release.due.releases:
                pages = release.table["page"].to_pylist()
                truth = [exact.get((release.due.window, page), 0) for page in pages]
                found.append(release.table["count"].to_numpy() - np.array(truth, np.float64))
                bars.append(release.table["count_stddev"].to_numpy())
    of_groups = np.array(found)
    return of_groups, np.array(bars), of_groups.sum(axis=1)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """Groups and their sums, with a part of the noise alike and without."""
    rows: list[Row] = []
    cases = [(d, c, every) for d in GROUPS for c in (d, d // 2) for every in (None, "1 hour")]
    runs, days = (1, 10) if quick else (10, _DAYS)
    for done, (groups, reached, every) in enumerate(cases):
        progress(done, len(cases), f"{reached} of {groups} groups")
        query = query_of(groups, reached, days, every=every, correlated_noise=True)
        table = log(groups, reached, days)
        seen, bars, sums = errors(query, table, runs)
        alone, _, sums_alone = errors(replace(query, correlated_noise=False), table, runs)
        by_itself = replace(query, correlated_noise=None)
        spread, spread_alone = (float(np.sqrt((each**2).mean())) for each in (seen, alone))
        rows.append(
            {
                "groups": groups,
                "reached": reached,
                "releases": 1 if every is None else 24,
                "by_itself": by_itself.shares_noise,
                "independent": spread_alone,
                "shared": spread,
                "ratio": spread / spread_alone,
                "said": float(bars.mean()),
                "covered": float((np.abs(seen) <= _Z * bars).mean()),
                "total_ratio": float(np.sqrt((sums**2).mean() / (sums_alone**2).mean())),
            }
        )
    progress(len(cases), len(cases), "done")
    chosen = [float(row["ratio"]) for row in rows if row["by_itself"]]
    within = [abs(float(row["shared"]) / float(row["said"]) - 1) for row in rows]
    targets = [
        target("largest error by itself, shared / independent", max(chosen), "<=", 1),
        target("largest error, found / said - 1", max(within), "<=", 0.3 if quick else 0.1),
    ]
    return Findings(rows=rows, targets=targets, notes=["errors at each window's last release"])
