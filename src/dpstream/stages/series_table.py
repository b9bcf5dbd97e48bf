"""The table of a step that a time-series mechanism has released: one row for each public group."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Release
from dpstream.stages.column_types import Types
from dpstream.stages.release_table import WINDOW, about_release, instants
from dpstream.stages.row_reader import RowReader
from dpstream.stages.series_query import SeriesQuery


def series_table(
    query: SeriesQuery, release: Release, step: int, run_tag: str, reader: RowReader
) -> pa.Table:
    """All public groups of one window; `held`: the mechanism repeats an earlier value."""
    start, end = query.schedule.span(release.step)
    time = query.schedule.time_of(step)
    keys = reader.public_table() if query.rows.keys else None
    table = _finished(query, release, keys, span=(start, end), time=time)
    about = about_release(query.name, run_tag, release.step, span=(start, end), time=time)
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def series_schema(query: SeriesQuery, types: Types) -> pa.Schema:
    """The columns of every release and their types, by those of the keys."""
    keys = pa.table({name: pa.array([], types[name]) for name in query.rows.keys})
    none = Release(step=0, values=np.zeros(0), paid=False)
    return _finished(query, none, keys, span=(None, None), time=None).schema


def _finished(
    query: SeriesQuery,
    release: Release,
    keys: pa.Table | None,
    *,
    span: tuple[int | None, int | None],
    time: int | None,
) -> pa.Table:
    """All columns of a table, after the query's own post-processing."""
    size = len(release.values)
    spread = np.full(size, np.nan) if release.stddev is None else release.stddev
    named: dict[str, Any] = dict(zip(WINDOW, (instants(edge, size) for edge in span), strict=True))
    if keys is not None:
        named |= {name: keys[name] for name in query.rows.keys}
    named[query.column] = pa.array(release.values, pa.float64())
    named[f"{query.column}_stddev"] = pa.array(np.broadcast_to(spread, size).copy(), pa.float64())
    named["held"] = pa.array([release.held] * size, pa.bool_())
    named["trigger_time"] = instants(time, size)
    named["release_index"] = pa.array(np.ones(size, np.int64))
    table = pa.table(named)
    return table if query.rows.finish is None else query.rows.finish(table)
