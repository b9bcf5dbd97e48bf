"""`debias="global"` on real logs: errors with and without, for several bounds.

Higgs: De Domenico, Lima, Mougel, Musolesi, "The Anatomy of a Scientific Rumor", 2013. Online
Retail: Chen, 2015. MovieLens: Harper, Konstan, "The MovieLens Datasets", 2015.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from dpstream.bench.harness import Row
from dpstream.bench.logs import HIGGS, RETAIL
from dpstream.bench.sqlp_runs import DELTA, EPSILON, metrics
from dpstream.bench.streams import VARIABLE
from dpstream.session import run
from dpstream.stages.aggregates import Count
from dpstream.stages.query import Query

RUNS: Final = 3
_COUNT: Final = (Count("events"),)
_RETAIL: Final = replace(RETAIL.query, aggregates=_COUNT, period="forever")
_MOVIES: Final = Query(
    name="movies",
    unit="user",
    keys=("movie",),
    aggregates=_COUNT,
    epsilon=EPSILON,
    delta=DELTA,
    max_groups_contributed=1,
)
_GENRES: Final = replace(_MOVIES, name="genres", keys=("main_genre",))
_MOVIELENS: Final = "events_movielens_100k_2016.csv"
# File, query, and pairs of bounds: groups a unit, rows a group.
CASES: Final[tuple[tuple[str, Query, tuple[tuple[int, int], ...]], ...]] = (
    (HIGGS.file, replace(HIGGS.query, every="1 hour"), ((4, 1), (8, 1), (8, 3), (16, 3))),
    (RETAIL.file, _RETAIL, ((32, 1), (64, 2))),
    (_MOVIELENS, _MOVIES, ((32, 1),)),
    (_MOVIELENS, _GENRES, ((4, 1), (8, 4), (8, 16))),
)


def logs() -> Iterator[Row]:
    """A row for each log, bounds and form; nothing without the data."""
    named = os.environ.get(VARIABLE)
    for file, query, bounds in CASES if named else ():
        path = Path(str(named)) / file
        if not path.exists():
            continue
        table = pa_csv.read_csv(path)
        for groups, rows in bounds:
            for form in (None, "global"):
                asked = replace(
                    query,
                    max_groups_contributed=groups,
                    max_rows_per_group=rows,
                    max_rows_contributed=None,
                    debias=form,
                )
                about = {"part": f"debias, {query.name}", "form": f"debias = {form}"}
                yield about | {"bound": groups, "rows_per_group": rows} | _mean(asked, table)


def _mean(asked: Query, table: pa.Table) -> Row:
    """Errors of the last table, the mean over runs."""
    key = asked.keys[0]
    grouped = table.group_by(key).aggregate([([], "count_all")])
    names, truth = grouped[key].to_pylist(), grouped["count_all"].to_numpy()
    place = {name: at for at, name in enumerate(names)}
    each = []
    for _ in range(RUNS):
        *_, last = run(asked, source=table)
        values = np.full(len(truth), np.nan)
        values[[place[name] for name in last[key].to_pylist()]] = last["events"].to_numpy()
        each.append(metrics(values, truth) | _shown(values, truth))
    return {name: statistics.fmean(row[name] for row in each) for name in each[0]}


def _shown(values: Any, truth: Any) -> Row:
    """Of the keys that are shown: the median relative error, and their total over the true one."""
    shown = ~np.isnan(values)
    if not shown.any():
        return {"median_relative_error": np.nan, "shown_over_true": np.nan}
    found, exact = values[shown], truth[shown]
    return {
        "median_relative_error": float(np.median(np.abs(found - exact) / exact)),
        "shown_over_true": float(found.sum() / exact.sum()),
    }
