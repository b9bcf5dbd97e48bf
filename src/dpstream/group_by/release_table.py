"""The table of a release: noisy sums become answers with error bars, beside keys and times.

All of it is post-processing: nothing here has seen a row. `ReleaseTables` makes those of a query,
`series_table` that of a step that a time-series mechanism has released.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.errors import StateError
from dpstream.group_by.bias import Bias, made_up_powers
from dpstream.group_by.consistent import make_consistent
from dpstream.query.aggregates import (
    Aggregate,
    ApproxCountDistinct,
    Count,
    Measure,
    OfCells,
    OfPairs,
    Pair,
    Stddev,
    Sum,
    measures_by_name,
)
from dpstream.query.column_types import Types
from dpstream.query.grouping_sets import GROUPING_ID
from dpstream.query.noise_plan import USUAL_INTERVAL, NoisePlan, laplace_reach
from dpstream.query.query import Query
from dpstream.query.row_spec import Earlier, LooksBack, RowSpec
from dpstream.query.schedule import DueRelease
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import iso
from dpstream.records import Integers, Reals, Release
from dpstream.rows.row_reader import RowReader

_USUAL = 0.95  # the confidence of a kept share where none is asked for


def answer_columns(
    aggregates: Sequence[Aggregate],
    noisy: Mapping[Measure, tuple[Any, float | Reals]],
    *,
    one_row: bool,
    nonnegative: bool,
    deviations: float | None = None,
    bias: Bias | None = None,
    debias: str | None = None,
    powers: tuple[Reals, Reals] | None = None,
    cells: Mapping[str, tuple[Integers, float]] = MappingProxyType({}),
    confidence: float | None = None,
    scales: Mapping[Measure, Fraction] = MappingProxyType({}),
) -> dict[str, Any]:
    """Named columns of a release: each aggregate, `<name>_stddev`, and an interval if asked for.

    `deviations`: half the width of a confidence interval, in standard deviations. `bias`: what
    bounding has dropped, where that is measured; with `debias` counts and sums make up for it, and
    with "groups" for what `powers` of that share leave of it.
    `cells`: by aggregate what was read off its noisy cells, and the noise of their last level.
    `scales`: of Laplace noise, where that is what there is: then intervals are of `confidence`.
    """
    table: dict[str, Any] = {}
    measures = measures_by_name(aggregates, one_row=one_row)
    for aggregate in aggregates:
        if isinstance(aggregate, OfCells):
            read, stddev = cells[aggregate.name]
            table |= aggregate.columns(read, stddev, confidence, nonnegative)
            continue
        pairs = []
        for measure in measures[aggregate.name]:
            steps, spread = noisy[measure]
            quantum = float(measure.quantum)
            summed = measure.kind in ("value", "clamped") and measure.column
            values = steps * quantum if summed else steps * int(measure.quantum)
            pairs.append((values, np.full(len(steps), spread * quantum)))
        values, spread = aggregate.answer(pairs, nonnegative)
        kept = None if bias is None else bias.of_aggregate(aggregate)
        high_of_kept = None
        exact = None
        if scales and confidence is not None:
            exact = _enclosed(aggregate, measures[aggregate.name], pairs, scales, confidence)
        if deviations is not None:
            ends = exact or _ends(aggregate, pairs, (values, spread), deviations)
            _, high_of_kept = aggregate.within(*ends, nonnegative)
        if aggregate.grows and bias is not None and debias == "groups":
            values, spread = _groups_made_up(values, spread, bias, powers)
        elif aggregate.grows and kept is not None and debias:  # by the query alone: it makes reals
            share = kept.divisor or 1.0
            values = values / share
            spread = np.hypot(spread, values * kept.stddev * (kept.divisor is not None)) / share
        name = aggregate.name
        if isinstance(aggregate, OfPairs):  # NaN where it cannot be told
            values, spread = (pa.array(each, from_pandas=True) for each in (values, spread))
        table[name], table[f"{name}_stddev"] = values, spread
        if deviations is not None:
            ends = exact or _ends(aggregate, pairs, (values, spread), deviations)
            table[f"{name}_low"], table[f"{name}_high"] = aggregate.within(*ends, nonnegative)
        if bias and kept and high_of_kept is not None and aggregate.bounds_all:
            lost = kept.lost(is_least=bias.is_least)
            table[f"{name}_high_all"] = aggregate.high_all(high_of_kept, lost)
    return table


def _groups_made_up(
    values: Any, spread: Reals, bias: Bias, powers: tuple[Reals, Reals] | None
) -> tuple[Any, Reals]:
    """Counts and sums with what the bound on groups has left out; counts stay whole."""
    share = bias.groups.divisor
    if share is None:
        return values, spread
    power, steeper = (np.ones(len(values)), 0.0) if powers is None else powers
    divisors = share**power
    relative = power * bias.groups.stddev / share
    more = spread * (1 - math.log(share) * steeper)
    whole = np.issubdtype(np.asarray(values).dtype, np.integer)
    made_up = values / divisors
    spread = np.hypot(more / divisors, made_up * relative)
    return (np.rint(made_up).astype(np.int64), spread) if whole else (made_up, spread)


def _enclosed(
    aggregate: Count | Sum | OfPairs,
    measures: Sequence[Measure],
    noisy: Sequence[Pair],
    scales: Mapping[Measure, Fraction],
    confidence: float,
) -> tuple[Reals, Reals]:
    """An interval where noise is Laplace's: its columns (and a sample) share 1 - confidence."""
    parts = len(measures) + isinstance(aggregate, ApproxCountDistinct)
    tail = (1 - confidence) / parts
    reach = [laplace_reach(scales[m], tail) * float(m.quantum) for m in measures]
    return aggregate.enclose(noisy, reach, tail)


def _ends(
    aggregate: Aggregate, noisy: Sequence[Pair], answer: Pair, deviations: float
) -> tuple[Reals, Reals]:
    """An interval, so many standard deviations to both sides."""
    if isinstance(aggregate, Stddev | OfPairs):
        return aggregate.ends(noisy, deviations)
    values, spread = answer
    return values - deviations * spread, values + deviations * spread


@dataclass(frozen=True, kw_only=True)
class ReleaseTables:
    """Makes the tables of one run; `run_tag` names it, so that a sink can tell runs apart."""

    plan: NoisePlan
    types: Types
    """Of the keys, once they are known."""
    run_tag: str = ""
    earlier: Earlier = field(default_factory=dict, compare=False)
    """What was published of earlier windows, where the query looks at it."""

    def table(
        self,
        step: int,
        due: DueRelease,
        sums: Integers,
        keys: pa.Table | None,
        totals: Sequence[int] = (),
        *,
        chosen: Mapping[str, Any] | None = None,
        bounded: NoisePlan | None = None,
    ) -> pa.Table:
        """What is published of groups with these noisy sums (groups x measures) and keys.

        `totals`: those of the window, with noise, where the query has any. `chosen`: the bounds of
        the window, where they are chosen, in words; `bounded`: the plan with them.
        """
        bounded = bounded or self.plan
        query, plan = self.plan.query, bounded.window(due.releases)
        span, time = query.schedule.span(due.window), query.schedule.time_of(step)
        keys = no_keys(query, self.types) if keys is None else keys
        sets = query.sets_of(keys) if query.grouping_sets else None
        stddevs = plan.stddevs_of(due.release, sets)
        place = Place(span, time, due.release, due.releases)
        bias = self._bias(totals, due, bounded)
        finish: object = query.finish
        if isinstance(finish, LooksBack):
            finish = partial(finish.look_back, window=due.window, earlier=self.earlier)
        powers = None
        if query.debias == "groups" and not plan.public:
            threshold = float(plan.thresholds[..., due.release - 1].min())
            powers = made_up_powers(sums[:, 0].astype(np.float64), threshold)
        more_of = (plan.scales, bounded.query, powers)
        release = self._columns(sums, stddevs, keys, bias, place, finish, *more_of)
        if not release.schema.equals(self.schema):
            known, new = (
                ", ".join(f"{field.name} ({field.type})" for field in schema)
                for schema in (self.schema, release.schema)
            )
            raise StateError(
                f"the releases of {query.name!r} have the columns {known}, and this one has {new}; "
                "it was not published: please report this query"
            )
        if due.release == due.releases:
            self._forget(due.window)
        more = {} if bias is None else bias.facts(query)
        more |= {} if chosen is None else {"bounds": dict(chosen)}
        return place.describe(release, query.name, self.run_tag, due.window, **more)

    def _forget(self, window: int) -> None:
        """Forget what no window after a final one looks at."""
        finish: object = self.plan.query.finish
        back = finish.windows_back if isinstance(finish, LooksBack) else 0
        for known in self.earlier.values():
            for old in [each for each in known if each <= window - back]:
                del known[old]

    def save_earlier(self) -> list[tuple[int, int, bytes]]:
        """What was published of earlier windows, for `restore_earlier`."""
        return [
            (reader, window, _packed(table))
            for reader, known in self.earlier.items()
            for window, table in known.items()
        ]

    def restore_earlier(self, saved: Iterable[tuple[int, int, bytes]]) -> None:
        """Go on from what `save_earlier` gave."""
        self.earlier.clear()
        for reader, window, content in saved:
            table = pa.ipc.open_stream(content).read_all()
            self.earlier.setdefault(reader, {})[window] = table

    def _columns(
        self,
        sums: Integers,
        stddevs: Reals,
        keys: pa.Table,
        bias: Bias | None,
        place: Place,
        finish: Any,
        scales: Sequence[Fraction],
        bounded: Query | None = None,
        powers: tuple[Reals, Reals] | None = None,
    ) -> pa.Table:
        """All columns of a table, after the query's own post-processing."""
        query, levels = bounded or self.plan.query, None
        if query.grouping_sets:
            levels = make_consistent(query, sums, stddevs, keys)
            keys = levels.keys
        noisy = {
            measure: (sums[:, number], float(stddevs[number]))
            if levels is None
            else (levels.sums[:, number], levels.stddevs[:, number])
            for number, measure in enumerate(query.measures)
        }
        answers = answer_columns(
            query.aggregates,
            noisy,
            one_row=query.one_row,
            nonnegative=query.nonnegative,
            deviations=self.plan.interval,
            bias=bias,
            debias=query.debias,
            powers=powers,
            cells=self._of_cells(sums, stddevs),
            confidence=query.confidence,
            scales=dict(zip(query.measures, scales, strict=False)),  # those of levels come after
        )
        share = None if bias is None else pa.scalar(bias.rows.share, pa.float64())
        if levels is not None and levels.unknown is not None:
            answers |= self._not_known(answers, levels.unknown)
        return place.table(query, finish, len(keys), keys, answers, kept_share=share)

    def _not_known(self, answers: Mapping[str, Any], rest: Any) -> dict[str, Any]:
        """NULL for groups that are not shown, where what they have cannot be told from the rest."""
        query = self.plan.query
        return {
            name: pa.array(np.asarray(values), mask=rest, from_pandas=True)
            for each in query.aggregates
            if not all(query.is_additive(measure) for measure in query.measures_of[each.name])
            for name, values in answers.items()
            if name in {each.name + end for end in ("", "_stddev", *query.interval_ends(each))}
        }

    def _of_cells(self, sums: Integers, stddevs: Reals) -> dict[str, tuple[Integers, float]]:
        """What was read off noisy cells: it stands beside the noisy sums, by aggregate."""
        query, read = self.plan.query, {}
        levels, first = list(query.levels), len(query.measures)
        for each in query.aggregates:
            if isinstance(each, OfCells):
                last = max(n for n, level in enumerate(levels) if level.cells == each.cells)
                stddev = float(stddevs[len(query.measures) + last])
                read[each.name] = (sums[:, first : first + each.found], stddev)
                first += each.found
        return read

    def _bias(
        self,
        totals: Sequence[int],
        due: DueRelease | None = None,
        bounded: NoisePlan | None = None,
    ) -> Bias | None:
        """What the totals of a window say at a release."""
        query = (bounded or self.plan).query
        if not query.totals:
            return None
        size = len(query.totals)
        if due is None:  # a release that is made for its columns alone
            return Bias.of(query, [0] * size, np.ones(size), deviations=1.0)
        plan = (bounded or self.plan).totals(due.releases)
        stddevs = plan.stddevs[:, due.release - 1]
        deviations = self.plan.interval or USUAL_INTERVAL
        if plan.scales:  # two totals share what may fail: (1 - s) a + s b <= sqrt(2) hypot(...)
            tail = (1 - (query.confidence or _USUAL)) / 2
            reach = [laplace_reach(scale, tail) for scale in plan.scales]
            deviations = math.sqrt(2) * float(np.max(reach / stddevs))
        return Bias.of(query, totals, stddevs, deviations)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types: known before the first one."""
        query, keys = self.plan.query, no_keys(self.plan.query, self.types)
        none: Integers = np.zeros((0, len(query.measures) + query.found), np.int64)
        place = Place((None, None), None)
        stddevs = np.zeros(len(query.measures + query.levels))
        if query.grouping_sets:
            stddevs = np.zeros((0, len(query.measures)))
        scales = self.plan.window(1).scales if query.pure else ()
        table = self._columns(none, stddevs, keys, self._bias([]), place, query.finish, scales)
        return table.schema.remove_metadata()


def release_schema(plan: NoisePlan, types: Types) -> pa.Schema:
    """The columns of every release of a query, by the types of its keys."""
    return ReleaseTables(plan=plan, types=types).schema


def series_table(
    query: SeriesQuery, release: Release, step: int, run_tag: str, reader: RowReader
) -> pa.Table:
    """All public groups of one window; `held`: the mechanism repeats an earlier value."""
    place = Place(query.schedule.span(release.step), query.schedule.time_of(step))
    table = _series_columns(query, release, reader.public_table(), place)
    return place.describe(table, query.name, run_tag, release.step)


def series_schema(query: SeriesQuery, types: Types) -> pa.Schema:
    """The columns of every release and their types, by those of the keys."""
    none = Release(step=0, values=np.zeros(0), paid=False)
    return _series_columns(query, none, no_keys(query, types), Place((None, None), None)).schema


def _series_columns(query: SeriesQuery, release: Release, keys: pa.Table, place: Place) -> pa.Table:
    """All columns of a table, after the query's own post-processing."""
    size = len(release.values)
    spread = np.full(size, np.nan) if release.stddev is None else release.stddev
    answers = {
        query.count.name: np.asarray(release.values, np.float64),
        f"{query.count.name}_stddev": np.broadcast_to(np.asarray(spread, np.float64), size),
        "held": np.full(size, release.held),
    }
    return place.table(query, query.finish, size, keys, answers)


class Place(NamedTuple):
    """Where a table stands: the span of its window, its trigger, and which of its releases."""

    span: tuple[int | None, int | None]
    time: int | None
    release: int = 1
    releases: int = 1

    def table(
        self,
        query: RowSpec,
        finish: Callable[[pa.Table], pa.Table] | None,
        size: int,
        keys: pa.Table,
        answers: Mapping[str, Any],
        kept_share: pa.Scalar | None = None,
    ) -> pa.Table:
        """Window, keys, answers and trigger side by side, after the query's post-processing."""
        named: dict[str, Any] = {}
        if query.time_column is not None:
            named = {
                "window_start": _instants(self.span[0], size),
                "window_end": _instants(self.span[1], size),
            }
        named |= {name: keys[name] for name in query.label_columns}
        named |= {
            name: values if isinstance(values, pa.Array) else pa.array(values)
            for name, values in answers.items()
        }
        named["trigger_time"] = _instants(self.time, size)
        named["release_index"] = pa.array(np.full(size, self.release, np.int64))
        if kept_share is not None:
            named["kept_share"] = pa.repeat(kept_share, size)
        table = pa.table(named)
        return table if finish is None else finish(table)

    def describe(
        self, table: pa.Table, query: str, run_tag: str, window: int, **more: Any
    ) -> pa.Table:
        """The table with what a sink is told beside its rows: the metadata of its schema."""
        about = {
            "query": query,
            "run": run_tag,
            "window": window,
            "window_start": iso(self.span[0]),
            "window_end": iso(self.span[1]),
            "trigger_time": iso(self.time),
            "release_index": self.release,
            "releases": self.releases,
        }
        return table.replace_schema_metadata({"dpstream": json.dumps(about | more)})


def _packed(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = out.getvalue().to_pybytes()
    return packed


def _instants(time: int | None, size: int) -> pa.Array:
    """A column with one time in all rows."""
    kind = pa.timestamp("us", tz="UTC")
    if time is None:
        return pa.nulls(size, kind)
    return pa.repeat(pa.scalar(time, kind), size)


def no_keys(query: RowSpec, types: Types) -> pa.Table:
    """Key columns without rows."""
    kinds = dict(types) | {GROUPING_ID: pa.int64()}
    return pa.table({name: pa.array([], kinds[name]) for name in query.group_columns})
