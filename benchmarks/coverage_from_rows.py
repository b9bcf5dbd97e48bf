"""Coverage of what is no sum of rows: pairs of columns, distinct values, quantiles.

Their truths are computed from rows, by numpy and not by what publishes. So that it is known which
rows the bounds keep, a log is cut to them first: by code of its own, of each unit its first groups
and the first rows in each. That the query then drops none is checked row by row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import Row
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import StateError
from dpstream.evaluate.trials import fixed_noise
from dpstream.group_by.bounding import KEPT, KeepMask
from dpstream.group_by.flow import Flow
from dpstream.query.aggregates import CountDistinct
from dpstream.query.noise_plan import plan_query
from dpstream.query.quantiles import Quantile
from dpstream.query.query import Query
from dpstream.query.second_moments import Correlation, Covariance, Slope
from dpstream.records import Integers, Reals
from dpstream.rows.row_batch import Rows

CLAMP: Final = (0, 100)
_PAIR: Final[dict[str, Any]] = {
    "columns": ("y", "z"),
    "contribution_bounds_per_row": (CLAMP, CLAMP),
}
SHARES: Final = {"median": 0.5, "p95": 0.95}
Columns = dict[str, Any]
"""Of a group's rows: y, z and x clamped, and the numbers of items."""


def _quantile(share: float) -> Callable[[Columns], float]:
    return lambda c: float(np.quantile(c["x"], share, method="inverted_cdf"))


def _slope(columns: Columns) -> float:
    y, z = columns["y"], columns["z"]
    return float(np.polyfit(z - z.mean(), y, 1)[0]) if np.ptp(z) else math.nan


def _correlation(columns: Columns) -> float:
    y, z = columns["y"], columns["z"]
    return float(np.corrcoef(y, z)[0, 1]) if np.ptp(y) and np.ptp(z) else math.nan


TRUTHS: Final[Mapping[str, Callable[[Columns], float]]] = {
    "covariance": lambda c: float(np.cov(c["y"], c["z"], bias=True)[0, 1]),
    "correlation": _correlation,
    "slope": _slope,
    "distinct": lambda c: float(len(set(c["item"].tolist()))),
    **{name: _quantile(share) for name, share in SHARES.items()},
}
"""What an aggregate would be without noise, of a group with rows; NaN: nobody can tell."""


def query_from_rows(query: Query) -> Query:
    """The same keys, windows, bounds and budget, for aggregates that are no sums of rows.

    The strategy sqlp refuses distinct values and quantiles.
    """
    most = query.max_rows_per_group
    aggregates: list[Any] = [
        Covariance("covariance", **_PAIR),
        Correlation("correlation", **_PAIR),
        Slope("slope", **_PAIR),
    ]
    if query.strategy == "latched":
        aggregates.append(CountDistinct("distinct", column="item", max_values_per_group=most))
        aggregates += [
            Quantile(name, column="x", q=share, contribution_bounds_per_row=CLAMP)
            for name, share in SHARES.items()
        ]
    return replace(query, name=f"{query.name} from rows", aggregates=tuple(aggregates))


def windows_of(query: Query, table: pa.Table) -> Integers:
    """The window of each row."""
    ticks = np.asarray(table["ts"].to_numpy(), np.int64) * 1_000_000
    if query.window is None:
        return np.zeros(len(ticks), np.int64)
    return np.asarray(query.schedule.last_window_of(ticks), np.int64)


def within_bounds(query: Query, table: pa.Table) -> pa.Table:
    """Of each unit its first groups, and the first rows in each of them and in all."""
    groups, rows, most = (
        query.max_groups_contributed,
        query.max_rows_per_group,
        query.max_rows_contributed,
    )
    assert most is not None  # a query says it
    seen: dict[Any, Counter[Any]] = defaultdict(Counter)
    kept = []
    names = (table[name].to_pylist() for name in ("user", "key"))
    for user, key, window in zip(*names, windows_of(query, table).tolist(), strict=True):
        mine, place = seen[user], (window, key)
        room = place in mine or len(mine) < groups
        kept.append(room and mine[place] < rows and mine.total() < most)
        if kept[-1]:
            mine[place] += 1
    return table.filter(pa.array(kept))


def truths_from_rows(query: Query, table: pa.Table) -> dict[tuple[int, Any], dict[str, float]]:
    """(window, key) -> the aggregates of its rows, all of which count."""
    columns = {
        name: np.clip(table[name].to_numpy().astype(np.float64), *CLAMP) for name in ("x", "y", "z")
    }
    columns["item"] = table["item"].to_numpy()
    key = table["key"].to_numpy()
    window = windows_of(query, table)
    order = np.lexsort((key, window))
    rising, of = key[order], window[order]
    new = (rising[1:] != rising[:-1]) | (of[1:] != of[:-1])
    found = {}
    for places in np.split(order, np.flatnonzero(new) + 1):
        mine = {name: column[places] for name, column in columns.items()}
        where = int(window[places[0]]), table["key"][int(places[0])].as_py()
        found[where] = {name: truth(mine) for name, truth in TRUTHS.items()}
    return found


class NothingDropped(Flow):
    """Fails where bounds drop a row: truths would be of other rows."""

    def aggregate(self, window: int, rows: Rows, keep_mask: KeepMask) -> None:
        """As ever, once all rows are known to count."""
        dropped = int((keep_mask & KEPT == 0).sum())
        if dropped:
            raise StateError(f"bounds drop {dropped} rows of a log that was cut to them")
        super().aggregate(window, rows, keep_mask)


def of_rows(query: Query, table: pa.Table, *, runs: int) -> list[Row]:
    """Coverage of each aggregate, at every release that is the last of its window.

    Some intervals leave nothing out (a correlation from -1 to 1, an infinite slope) and hold the
    truth for sure. `told` is the share of the others, `kept_rows_told` how often these hold it.
    """
    asked = query_from_rows(query)
    table = within_bounds(asked, table)
    truth, plan = truths_from_rows(asked, table), plan_query(asked)
    covered: dict[str, list[Any]] = {each.name: [] for each in asked.aggregates}
    told: dict[str, list[Any]] = {each.name: [] for each in asked.aggregates}
    for run in range(runs):
        noise = fixed_noise(f"coverage of {asked.name}, {asked.strategy}", run)
        how: dict[str, Any] = {"secret": noise["secret"], "run": noise["run_id"]}
        for _, one in run_plan(plan, table, flow=NothingDropped, memory=1 << 30, **how):
            if one.due.release < one.due.releases:
                continue
            places = [(one.due.window, key) for key in one.table["key"].to_pylist()]
            for name in covered:
                exact = np.array([truth.get(p, {}).get(name, math.nan) for p in places], np.float64)
                low, high = (
                    one.table[f"{name}_{end}"].to_numpy(zero_copy_only=False).astype(np.float64)
                    for end in ("low", "high")
                )
                known = ~np.isnan(exact)
                says = says_something(name, low, high)[known]
                inside = ((low <= exact) & (exact <= high))[known]
                told[name] += says.tolist()
                covered[name] += inside.tolist()
    return [
        {
            "from_rows": name,
            "runs": runs,
            "figures": len(inside),
            "kept_rows": _mean(inside),
            "told": _mean(told[name]),
            "kept_rows_told": _mean(
                [held for held, says in zip(inside, told[name], strict=True) if says]
            ),
        }
        for name, inside in covered.items()
    ]


def _mean(shares: list[Any]) -> float | None:
    return float(np.mean(shares)) if shares else None


def says_something(name: str, low: Reals, high: Reals) -> Any:
    """Which intervals leave something out that the aggregate could be."""
    if name == "correlation":
        return (low > -1) | (high < 1)
    if name in SHARES:
        return (low > CLAMP[0]) | (high < CLAMP[1])
    return np.isfinite(low) | np.isfinite(high)
