"""What a query through a time-series mechanism will do and cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.explanation.plan_facts import (
    NOT_PROTECTED,
    Explanation,
    Stage,
    computed_columns,
    schema_facts,
)
from dpstream.group_by.release_table import series_schema
from dpstream.mechanisms import name_of
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.amounts import show
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import in_words, iso
from dpstream.rows.column_values import types_before_rows

_TRIED = 400  # steps of a made-up stream that tell the noise
_SEEN_BYTES = 16  # of a unit in an open window


def explain_series(query: SeriesQuery) -> Explanation:
    """Explain a query; one that runs live is taken to begin with its first window."""
    query = query.starting(0)
    terms = query.mechanism.terms()
    bins = len(query.public_groups or ())
    return Explanation(
        stages=_stages(query),
        unit=_unit(query),
        bounds={"groups": 1, "rows_per_group": 1, "rows": 1},
        schedule={
            "window": in_words(query.window.size),
            "every": None,
            "start": None if query.live else iso(query.start),
            "end": iso(query.end),
            "releases_per_window": 1,
        },
        budget={
            "measure": terms.measure,
            "total": float(terms.total),
            "windows": terms.window or 1,
            "mechanism": name_of(query.mechanism),
            "words": f"{terms.measure} = {show(terms.total)} within any {terms.window or 1} "
            "successive windows, charged as it is spent, before each noise",
        },
        measures=[
            {
                "measure": query.count.name,
                "sensitivity": 1.0,
                "quantum": 1.0,
                "derivation": "one row per unit and window: one count changes by 1",
                "share": "",
            }
        ],
        columns=[_noise(query, bins), *computed_columns(query.finish)],
        keys=_keys(query, bins),
        memory={
            "bytes_per_unit": [_SEEN_BYTES, _SEEN_BYTES],
            "words": f"about {_SEEN_BYTES} bytes per unit of a window that is not published yet, "
            f"and the mechanism's state: {bins} bin{'s' * (bins != 1)}",
        },
        schema=schema_facts(series_schema(query, types_before_rows(query)), query),
        not_protected=_not_protected(query),
    )


def _stages(query: SeriesQuery) -> list[Stage]:
    found = [Stage("source", f"read {', '.join(query.source_columns)}")]
    if query.prepare is not None:
        found.append(Stage("prepare", query.prepare.text))
    late = f", rows up to {in_words(query.allowed_lateness)} late" if query.allowed_lateness else ""
    size = in_words(query.window.size)
    found.append(
        Stage("window", f"windows of {size} by {query.time_column} in {query.time_zone}{late}")
    )
    found.append(Stage("bound", f"keep of each {query.privacy_unit_column} one row in each window"))
    by = ", ".join(query.keys) or "nothing (one bin)"
    found.append(Stage("count", f"{query.count.name} by {by}: each window is one step"))
    name = name_of(query.mechanism)
    does = f"{name} spends, adds noise or repeats; each window is published once"
    found.append(Stage("mechanism", does, noisy=True))
    if query.finish is not None:
        does = f"{query.finish!r} (of noisy values: costs nothing)"
        found.append(Stage("finish", does, noisy=True))
    return found


def _unit(query: SeriesQuery) -> str:
    several = (query.mechanism.terms().window or 1) > 1
    beyond = "windows further apart" if several else "other windows"
    return (
        f"Protected are {query.protected}, there or not: that changes the chance of anything that "
        "is published only within the budget. Other rows in their place count as two such changes. "
        f"What the same {query.privacy_unit_column} does in {beyond} is not protected "
        "together with it."
    )


def _noise(query: SeriesQuery, bins: int) -> dict[str, Any]:
    """From a run over made-up counts that never change: no data are needed, or read."""
    steps = min(_TRIED, query.schedule.steps or _TRIED)
    # made-up data and a fixed draw: the same answer for the same query, every time
    runner = Runner(query.mechanism, secret=bytes(32), run_id=bytes(16))
    found = [r for batch in runner.feed(np.full((steps, bins), 1000)) for r in batch]
    found += runner.finish()
    spreads = [float(np.mean(r.stddev)) for r in found if r.stddev is not None]
    known = [spread for spread in spreads if np.isfinite(spread)]
    column: dict[str, Any] = {"column": query.count.name, "first": None, "last": None}
    if not known:
        return column | {"note": "its releases do not say: the mechanism knows no noise of its own"}
    return column | {
        "note": f"{known[0]:.4g} in the first window, {known[-1]:.4g} in window {len(known)} of a "
        "stream that never changes; the more it changes the more; each release says its own, and "
        "`held` where an earlier value is repeated",
        "tried": {"windows": len(known), "first": known[0], "last": known[-1]},
    }


def _keys(query: SeriesQuery, bins: int) -> dict[str, Any]:
    words = f"the {bins} public groups are shown in every window; others are dropped"
    if not query.keys:
        words = "there is one group, all rows, and it is always shown"
    return {"public": True, "words": words}


def _not_protected(query: SeriesQuery) -> list[str]:
    found = list(NOT_PROTECTED)
    found.insert(
        0, f"what one {query.privacy_unit_column} does over more windows than that, together"
    )
    if query.keys:
        found.insert(1, "which groups exist: they were listed as public")
    return found
