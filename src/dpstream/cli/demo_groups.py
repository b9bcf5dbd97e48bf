"""The demo's second part: a continual GROUP BY, killed half-way and started again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from dpstream.data.clicks import DAY, clicks
from dpstream.session import run
from dpstream.stages.aggregates import Avg, Count
from dpstream.stages.plan import planned
from dpstream.stages.query import Query

QUERY = Query(
    name="pages",
    unit="user",
    keys=["page"],
    aggregates=[Count("visitors"), Avg("seconds", column="seconds", lo=0, hi=300)],
    epsilon=2,
    delta=1e-9,
    max_groups_contributed=4,
    time="at",
    time_unit="s",
    start=DAY,
    end="2024-05-02",
    every="1 hour",
    period="1 day",
)
_KILLED_AFTER = 17
_SHOWN = (3, 9, 24)

INTRO = """\
A made-up day of {rows:,} clicks by {users:,} users, published every hour: visitors and mean seconds
per page; epsilon = 2, delta = 1e-9 for all rows of a user on that day. Which pages exist is private
too: a page appears once about {threshold} users are behind it, and stays. A user counts for at most
4 pages, so large figures are a little low: the band knows the noise, not what bounds leave out.
"""


def publish() -> dict[str, Any]:
    """Run the query over the bundled clicks, with a kill in between."""
    table = clicks()
    with TemporaryDirectory() as folder:
        place: dict[str, Any] = {
            "source": table,
            "sink": str(Path(folder) / "out/"),
            "checkpoint_location": Path(folder) / "state",
        }
        first = run(QUERY, **place)
        tables = [release for _, release in zip(range(_KILLED_AFTER), first, strict=False)]
        first.close()  # no goodbye: as a kill would
        again = {int(t["release_index"][0].as_py()): t for t in run(QUERY, **place) if len(t)}
    hours = dict(enumerate(tables, start=1)) | again
    repeated = [hour for hour in again if hour <= _KILLED_AFTER]
    return {
        "rows": len(table),
        "users": len(pc.unique(table["user"])),
        "threshold": int(planned(QUERY).window(24).thresholds[-1]),
        "hours": hours,
        "repeated": repeated,
        "identical": all(again[hour].equals(tables[hour - 1]) for hour in repeated),
        "truth": _truth(table),
    }


def _truth(table: pa.Table) -> dict[str, int]:
    """Visitors per page, at the end of the day; for this demo only."""
    pairs = set(zip(table["user"].to_pylist(), table["page"].to_pylist(), strict=True))
    return dict(Counter(page for _, page in pairs).most_common())


def show(console: Console, found: dict[str, Any]) -> None:
    """Which pages have appeared by when, and how far off the figures are."""
    console.print(INTRO.format(**found), soft_wrap=True)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("page")
    for hour in _SHOWN:
        shown.add_column(f"by {hour:02d}:00", justify="right")
    shown.add_column("mean seconds", justify="right")
    shown.add_column("truth (demo only)", justify="right", style="dim")
    hours = {hour: _by_page(found["hours"][hour]) for hour in _SHOWN}
    for page, truth in found["truth"].items():
        cells = [_cell(hours[hour].get(page), "visitors") for hour in _SHOWN]
        mean = _cell(hours[_SHOWN[-1]].get(page), "seconds")
        shown.add_row(page, *cells, mean, f"{truth:,}")
    console.print(shown)
    console.print(
        f"\nKilled after hour {_KILLED_AFTER} and started again from its state directory: hours "
        f"{found['repeated'][0]} to {_KILLED_AFTER} were replayed, "
        + ("byte for byte the same.\n" if found["identical"] else "and DIFFER.\n"),
        soft_wrap=True,
    )


def as_json(found: dict[str, Any]) -> dict[str, Any]:
    """The same for scripts."""
    last = found["hours"][24].select(
        ["page", "visitors", "visitors_stddev", "seconds", "seconds_stddev"]
    )
    kept = {name: found[name] for name in ("rows", "users", "threshold", "repeated", "identical")}
    return kept | {"last_release": last.to_pylist(), "truth": found["truth"]}


def _by_page(release: pa.Table) -> dict[str, dict[str, Any]]:
    return {row["page"]: row for row in release.to_pylist()}


def _cell(row: dict[str, Any] | None, name: str) -> str:
    return "" if row is None else f"{row[name]:,.0f} ± {2 * row[f'{name}_stddev']:,.0f}"
