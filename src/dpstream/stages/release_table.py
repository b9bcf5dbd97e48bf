"""The table of a release: noisy sums become answers with error bars, beside keys and times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import StateError
from dpstream.records import Integers, Reals
from dpstream.stages.answers import Reading, answers
from dpstream.stages.column_types import Types
from dpstream.stages.plan import Plan
from dpstream.stages.schedule import Due
from dpstream.stages.ticks import iso

WINDOW = ("window_start", "window_end")


@dataclass(frozen=True, kw_only=True)
class ReleaseTables:
    """Makes the tables of one run; `run_tag` names it, so that a sink can tell runs apart."""

    plan: Plan
    types: Types
    """Of the keys, once they are known."""
    run_tag: str = ""

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
        start, end = query.schedule.span(due.window)
        time = query.schedule.time_of(step)
        release = self._finished(
            sums,
            plan.stddevs[:, due.release - 1],
            self.no_keys() if keys is None else keys,
            span=(start, end),
            time=time,
            release=due.release,
            kept=kept,
        )
        if not release.schema.equals(self.schema):
            raise StateError(
                f"the releases of {query.name!r} have the columns {shown_schema(self.schema)}, and "
                f"this one has {shown_schema(release.schema)}; it was not published: please report "
                "this query"
            )
        about = about_release(
            query.name,
            self.run_tag,
            due.window,
            span=(start, end),
            time=time,
            release=due.release,
            releases=due.releases,
        )
        if query.totals:
            about["kept_share"] = kept[0]
        return release.replace_schema_metadata({"dpstream": json.dumps(about)})

    def _finished(
        self,
        sums: Integers,
        stddevs: Reals,
        keys: pa.Table,
        *,
        span: tuple[int | None, int | None],
        time: int | None,
        release: int,
        kept: tuple[float, float],
    ) -> pa.Table:
        """All columns of a table, after the query's own post-processing."""
        query, size = self.plan.query, len(sums)
        by_measure = {
            measure: (sums[:, number], float(stddevs[number]))
            for number, measure in enumerate(query.measures)
        }
        reading = Reading(
            one_row=query.one_row,
            nonnegative=query.nonnegative,
            deviations=self.plan.interval,
            kept=kept if query.totals else None,
        )
        columns = answers(query.aggregates, by_measure, reading)
        named: dict[str, Any] = {}
        if query.time is not None:
            named |= dict(zip(WINDOW, (instants(edge, size) for edge in span), strict=True))
        named |= {name: keys[name] for name in query.keys}
        named |= {name: pa.array(values) for name, values in columns.items()}
        named["trigger_time"] = instants(time, size)
        named["release_index"] = pa.array(np.full(size, release, np.int64))
        made = pa.table(named)
        return made if query.finish is None else query.finish(made)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types: known before the first one."""
        measures = len(self.plan.query.measures)
        none: Integers = np.zeros((0, measures), np.int64)
        made = self._finished(
            none,
            np.zeros(measures),
            self.no_keys(),
            span=(None, None),
            time=None,
            release=1,
            kept=(1.0, 0.0),
        )
        return made.schema.remove_metadata()

    def no_keys(self) -> pa.Table:
        """Key columns without rows."""
        keys = self.plan.query.keys
        return pa.table({name: pa.array([], self.types[name]) for name in keys})


def release_schema(plan: Plan, types: Types) -> pa.Schema:
    """The columns of every release of a query, by the types of its keys."""
    return ReleaseTables(plan=plan, types=types).schema


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


def shown_schema(schema: pa.Schema) -> str:
    """Names and types, for people."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def instants(time: int | None, size: int) -> pa.Array:
    """A column with one time in all rows."""
    kind = pa.timestamp("us", tz="UTC")
    if time is None:
        return pa.nulls(size, kind)
    return pa.array(np.full(size, time, np.int64)).view(kind)
