"""The table of a release: noisy sums become answers with error bars, beside keys and times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import StateError
from dpstream.query.aggregates import Aggregate, Measure
from dpstream.query.column_types import Types
from dpstream.query.noise_plan import NoisePlan
from dpstream.query.schedule import DueRelease
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import iso
from dpstream.records import Integers, Reals, Release
from dpstream.rows.row_reader import RowReader

# Noisy measures become the columns of a release: answers, their error bars, intervals.
#
# All of it is post-processing: nothing here has seen a row.


@dataclass(frozen=True, kw_only=True)
class AnswerContext:
    """How noisy columns are read: public facts, and the noisy share of rows that were kept."""

    one_row: bool
    nonnegative: bool
    deviations: float | None = None
    """Half the width of a confidence interval, in standard deviations."""
    kept: tuple[float, float] | None = None
    """The share of rows that bounding kept, and the standard deviation of that; None: not asked."""


def answer_columns(
    aggregates: Sequence[Aggregate],
    noisy: Mapping[Measure, tuple[Integers, float]],
    reading: AnswerContext,
) -> dict[str, Any]:
    """Named columns of a release: each aggregate, `<name>_stddev`, and an interval if asked for."""
    table: dict[str, Any] = {}
    for aggregate in aggregates:
        pairs = []
        for measure in aggregate.measures(reading.one_row):
            steps, stddev = noisy[measure]
            quantum = float(measure.quantum)
            values = steps if measure.kind != "value" else steps * quantum
            pairs.append((values, np.full(len(steps), stddev * quantum)))
        values, spread = aggregate.answer(pairs, reading.nonnegative)
        if aggregate.grows and reading.kept is not None:  # by the query alone: it makes reals
            share, of_share = reading.kept
            values = values / share
            spread = np.hypot(spread, values * of_share) / share
        name = aggregate.name
        table[name], table[f"{name}_stddev"] = values, spread
        if reading.deviations is not None:
            low, high = values - reading.deviations * spread, values + reading.deviations * spread
            table[f"{name}_low"], table[f"{name}_high"] = aggregate.within(
                low, high, reading.nonnegative
            )
    return table


def kept_share(offered: tuple[int, float], kept: tuple[int, float]) -> tuple[float, float]:
    """Share of rows that were kept, and its standard deviation, from two noisy counts.

    Where the counts drown in their noise nothing is known, and nothing is made up for.
    """
    (rows, of_rows), (left, of_left) = offered, kept
    if rows < 10 * of_rows or left < 10 * of_left or left >= rows:
        return 1.0, 0.0
    share = left / rows
    return share, share * math.hypot(of_rows / rows, of_left / left)


WINDOW = ("window_start", "window_end")


@dataclass(frozen=True, kw_only=True)
class ReleaseTables:
    """Makes the tables of one run; `run_tag` names it, so that a sink can tell runs apart."""

    plan: NoisePlan
    types: Types
    """Of the keys, once they are known."""
    run_tag: str = ""

    def made(
        self,
        step: int,
        due: DueRelease,
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
        reading = AnswerContext(
            one_row=query.one_row,
            nonnegative=query.nonnegative,
            deviations=self.plan.interval,
            kept=kept if query.totals else None,
        )
        columns = answer_columns(query.aggregates, by_measure, reading)
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


def release_schema(plan: NoisePlan, types: Types) -> pa.Schema:
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


# The table of a step that a time-series mechanism has released: one row for each public group.


def series_table(
    query: SeriesQuery, release: Release, step: int, run_tag: str, reader: RowReader
) -> pa.Table:
    """All public groups of one window; `held`: the mechanism repeats an earlier value."""
    start, end = query.schedule.span(release.step)
    time = query.schedule.time_of(step)
    keys = reader.public_table() if query.keys else None
    table = _finished(query, release, keys, span=(start, end), time=time)
    about = about_release(query.name, run_tag, release.step, span=(start, end), time=time)
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def series_schema(query: SeriesQuery, types: Types) -> pa.Schema:
    """The columns of every release and their types, by those of the keys."""
    keys = pa.table({name: pa.array([], types[name]) for name in query.keys})
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
        named |= {name: keys[name] for name in query.keys}
    count = query.count.name
    named[count] = pa.array(release.values, pa.float64())
    named[f"{count}_stddev"] = pa.array(np.broadcast_to(spread, size).copy(), pa.float64())
    named["held"] = pa.array([release.held] * size, pa.bool_())
    named["trigger_time"] = instants(time, size)
    named["release_index"] = pa.array(np.ones(size, np.int64))
    table = pa.table(named)
    return table if query.finish is None else query.finish(table)
