"""A log through its day: what was published, its error bars, and the truth beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.stages.query import Query

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
    first = rows.group_by(query.unit).aggregate([(query.time, "min")])
    moments = np.sort(first[f"{query.time}_min"].to_numpy())
    return np.searchsorted(moments, hours * 3600, side="right")
