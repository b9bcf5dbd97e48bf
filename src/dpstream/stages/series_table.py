"""The table of a step that a time-series mechanism has released: one row for each public group."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Release
from dpstream.stages.release_table import about_release, instants
from dpstream.stages.row_reader import RowReader
from dpstream.stages.series_query import SeriesQuery


def series_table(
    query: SeriesQuery, release: Release, step: int, mark: str, reader: RowReader
) -> pa.Table:
    """All public groups of one window; `held`: the mechanism repeats an earlier value."""
    size = len(release.values)
    start, end = query.schedule.span(release.step)
    time = query.schedule.time_of(step)
    spread = np.full(size, np.nan) if release.stddev is None else release.stddev
    named: dict[str, Any] = {
        "window_start": instants(start, size),
        "window_end": instants(end, size),
    }
    if query.rows.keys:
        keys = reader.public_table()
        named |= {name: keys[name] for name in query.rows.keys}
    named[query.column] = pa.array(release.values)
    named[f"{query.column}_stddev"] = pa.array(np.broadcast_to(spread, size).copy())
    named["held"] = pa.array([release.held] * size)
    named["trigger_time"] = instants(time, size)
    named["release_index"] = pa.array(np.ones(size, np.int64))
    table = pa.table(named)
    if query.rows.finish is not None:
        table = query.rows.finish(table)
    about = about_release(query.name, mark, release.step, span=(start, end), time=time)
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})
