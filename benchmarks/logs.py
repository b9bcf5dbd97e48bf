"""The continual GROUP BY on two real event logs: what is found, how far off, how fast.

Higgs: a day of retweets, mentions and replies about one topic (De Domenico, Lima, Mougel,
Musolesi, "The Anatomy of a Scientific Rumor", 2013); events per target, every 15 minutes. Online
Retail: seven months of orders (Chen, "Online Retail", 2015); quantity per stock code, weekly, each
customer's week protected.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.streams import VARIABLE
from dpstream.query.aggregates import Count, Sum
from dpstream.query.query import Query
from dpstream.session import run


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log, the query on it, and the figure that is compared with the truth."""

    file: str
    query: Query
    figure: str
    value: str | None = None


HIGGS = Log(
    file="events_higgs_twitter_20120704.csv",
    query=Query(
        name="higgs",
        privacy_unit_column="user",
        keys=["target"],
        aggregates=[Count("events")],
        epsilon=6,
        delta=1e-9,
        max_groups_contributed=8,
        time_column="sec",
        time_unit="s",
        time_origin="2012-07-04",
        start="2012-07-04",
        end="2012-07-05",
        every="15 minutes",
    ),
    figure="events",
)
RETAIL = Log(
    file="events_online_retail_2010_2011.csv",
    query=Query(
        name="retail",
        privacy_unit_column="customer",
        keys=["stock_code"],
        aggregates=[
            Sum("sold", column="quantity", contribution_bounds_per_row=(-20, 20)),
            Count("customers"),
        ],
        epsilon=6,
        delta=1e-9,
        max_groups_contributed=32,
        privacy_unit_period="7 days",
        time_column="minute",
        time_unit="min",
        time_origin="2010-12-01",
        start="2010-12-01",
        end="2011-07-01",
        every="7 days",
    ),
    figure="sold",
    value="quantity",
)


def measure(*, quick: bool, progress: Progress) -> Findings:
    """One row per log; the truth is what the query would publish without noise and bounds."""
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else None
    rows: list[Row] = []
    notes = ["the truth is exact: not private, for this comparison only"]
    course: Course | None = None
    for number, log in enumerate((HIGGS, RETAIL)):
        progress(number, 2, log.query.name)
        if folder is None or not (folder / log.file).exists():
            notes.append(f"{log.file} is not there: set {VARIABLE} to the folder that has it")
            continue
        table = pa_csv.read_csv(folder / log.file)
        row, releases = _measured(log, table)
        rows.append(row)
        if log is HIGGS:
            course = Course(query=log.query, figure=log.figure, releases=releases, table=table)
    every = bool(rows) and all(row["releases"] == row["scheduled"] for row in rows)
    return Findings(
        rows=rows,
        targets=[target("every scheduled table was published", float(every), "==", 1.0)]
        if rows
        else [],
        notes=notes,
        draw=None if course is None else partial(draw, course=course),
    )


def _measured(log: Log, table: pa.Table) -> tuple[Row, list[pa.Table]]:
    began = time.perf_counter()
    releases = list(run(log.query, source=table))
    seconds = time.perf_counter() - began
    last, key = releases[-1], log.query.keys[0]
    truth = _truth(log, table)
    shown = dict(zip(last[key].to_pylist(), last[log.figure].to_pylist(), strict=True))
    exact = np.array([truth[name] for name in shown])
    found = np.array(list(shown.values()), dtype=np.float64)
    row = {
        "log": log.query.name,
        "rows": len(table),
        "keys": len(truth),
        "releases": len(releases),
        "scheduled": log.query.schedule.steps,
        "keys_shown": len(shown),
        "stddev": float(last[f"{log.figure}_stddev"][0].as_py()) if shown else None,
        "mean_absolute_error": float(np.abs(found - exact).mean()) if shown else None,
        "median_relative_error": float(np.median(np.abs(found - exact) / np.abs(exact)))
        if shown
        else None,
        "share_of_total_shown": float(exact.sum() / sum(truth.values())),
        "seconds": seconds,
    }
    return row, releases


def _truth(log: Log, table: pa.Table) -> dict[Any, float]:
    key = log.query.keys[0]
    wanted = ([], "count_all") if log.value is None else (log.value, "sum")
    grouped = table.group_by(key).aggregate([wanted])
    name = next(name for name in grouped.column_names if name != key)
    return dict(zip(grouped[key].to_pylist(), grouped[name].to_pylist(), strict=True))


_RANKS = (12, 25, 50, 100, 200)
_COLOURS = ("#0b6e99", "#d1495b", "#8f6bb3", "#c98a1b", "#3d8b5f")


@dataclass(frozen=True, kw_only=True)
class Course:
    """The releases of a query over one window, and the rows behind them."""

    query: Query
    figure: str
    releases: list[pa.Table]
    table: pa.Table


def draw(figure: Any, course: Course) -> None:
    """Left: some keys through the day. Right: how many keys have appeared by when."""
    curves, keys = figure.subplots(1, 2, width_ratios=(2, 1))
    key, name = course.query.keys[0], course.figure
    hours = np.linspace(0, 24, len(course.releases) + 1)[1:]
    last = course.releases[-1].sort_by([(name, "descending")])
    ranks = [rank for rank in _RANKS if rank <= len(last)]
    for rank, colour in zip(ranks, _COLOURS, strict=False):
        one = last[key][rank - 1]
        published, spread = _course(course, one)
        curves.fill_between(hours, published - 2 * spread, published + 2 * spread,
                            color=colour, alpha=0.25, linewidth=0)  # fmt: skip
        curves.plot(hours, published, color=colour, label=f"number {rank}")
        curves.plot(hours, _exact(course, one, hours), color="#444444", linestyle=":", linewidth=1)
    curves.set(title="users per key: published ± 2 stddev, truth dotted", ylabel="users")
    if ranks:
        curves.legend(frameon=False, loc="upper left")
    shown = [len(release) for release in course.releases]
    keys.plot(hours, shown, color=_COLOURS[0])
    keys.set(title="keys that have appeared")
    for panel in (curves, keys):
        panel.set(xlabel="hour of the day", xlim=(0, 24), xticks=range(0, 25, 6), ylim=(0, None))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)


def _course(course: Course, key: Any) -> tuple[Any, Any]:
    """A key's figure and its standard deviation at each trigger; NaN before it appears."""
    column, values, spreads = course.query.keys[0], [], []
    for release in course.releases:
        row = release.filter(pc.equal(release[column], key))
        there = len(row) > 0
        values.append(row[course.figure][0].as_py() if there else np.nan)
        spreads.append(row[f"{course.figure}_stddev"][0].as_py() if there else np.nan)
    return np.array(values, dtype=np.float64), np.array(spreads, dtype=np.float64)


def _exact(course: Course, key: Any, hours: Any) -> Any:
    """Different units of a key by each trigger, from all rows."""
    query = course.query
    rows = course.table.filter(pc.equal(course.table[query.keys[0]], key))
    first = rows.group_by(query.privacy_unit_column).aggregate([(query.time_column, "min")])
    moments = np.sort(first[f"{query.time_column}_min"].to_numpy())
    return np.searchsorted(moments, hours * 3600, side="right")
