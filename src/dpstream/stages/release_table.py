"""The table of a release: noisy sums become answers with error bars, beside keys and times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Integers
from dpstream.stages.answers import Reading, answers
from dpstream.stages.plan import Plan
from dpstream.stages.schedule import Due
from dpstream.stages.ticks import iso


@dataclass(frozen=True, kw_only=True)
class ReleaseTables:
    """Makes the tables of one run; `mark` names it, so that a sink can tell runs apart."""

    plan: Plan
    types: dict[str, pa.DataType]
    """Of the keys, once they are known."""
    mark: str = ""

    def made(
        self,
        step: int,
        due: Due,
        sums: Integers,
        keys: pa.Table | None,
        kept: tuple[float, float] = (1.0, 0.0),
    ) -> pa.Table:
        """What is published of groups with these noisy sums (groups x measures) and keys.

        `kept`: the noisy share of rows that bounding kept, and its standard deviation.
        """
        query, plan = self.plan.query, self.plan.window(due.releases)
        by_measure = {
            measure: (sums[:, number], float(plan.stddevs[number, due.release - 1]))
            for number, measure in enumerate(query.measures)
        }
        reading = Reading(
            one_row=query.one_row,
            nonnegative=query.nonnegative,
            deviations=self.plan.interval,
            kept=kept,
        )
        columns = answers(query.aggregates, by_measure, reading)
        start, end = query.schedule.span(due.window)
        time = query.schedule.time_of(step)
        size = len(sums)
        named: dict[str, Any] = {}
        if start is not None:
            named |= {"window_start": instants(start, size), "window_end": instants(end, size)}
        if query.keys:
            shown = self.no_keys() if keys is None else keys
            named |= {name: shown[name] for name in query.keys}
        named |= {name: pa.array(values) for name, values in columns.items()}
        named["trigger_time"] = instants(time, size)
        named["release_index"] = pa.array(np.full(size, due.release, np.int64))
        release = pa.table(named)
        if query.finish is not None:
            release = query.finish(release)
        about = about_release(
            query.name,
            self.mark,
            due.window,
            span=(start, end),
            time=time,
            release=due.release,
            releases=due.releases,
        )
        if query.totals:
            about["kept_share"] = kept[0]
        return release.replace_schema_metadata({"dpstream": json.dumps(about)})

    def try_finish(self) -> None:
        """See by types alone, before anything is paid, that the post-processing can be done."""
        query = self.plan.query
        if query.finish is None:
            return
        keys, no_times = self.no_keys(), instants(None, 0)
        added = ("", "_stddev", "_low", "_high")
        figures = [f"{a.name}{more}" for a in query.aggregates for more in added]
        times = ("window_start", "window_end", "trigger_time")
        named: dict[str, Any] = dict.fromkeys(times, no_times)
        named |= {name: keys[name] for name in query.keys}
        named |= dict.fromkeys(figures, pa.array([], pa.float64()))
        query.finish(pa.table(named | {"release_index": pa.array([], pa.int64())}))

    def no_keys(self) -> pa.Table:
        """Key columns without rows."""
        keys = self.plan.query.keys
        return pa.table({name: pa.array([], self.types.get(name, pa.string())) for name in keys})


def about_release(
    query: str,
    run: str,
    window: int,
    *,
    span: tuple[int | None, int | None],
    time: int | None,
    release: int = 1,
    releases: int = 1,
) -> dict[str, Any]:
    """What a sink is told of a table beside its rows: the metadata of its schema."""
    return {
        "query": query,
        "run": run,
        "window": window,
        "window_start": iso(span[0]),
        "window_end": iso(span[1]),
        "trigger_time": iso(time),
        "release_index": release,
        "releases": releases,
    }


def instants(time: int | None, size: int) -> pa.Array:
    """A column with one time in all rows."""
    kind = pa.timestamp("us", tz="UTC")
    if time is None:
        return pa.nulls(size, kind)
    return pa.array(np.full(size, time, np.int64)).view(kind)
