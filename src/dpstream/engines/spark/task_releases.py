"""Tasks that publish: bound contributions, aggregate, latch keys, add noise.

The stages themselves are the embedded engine's (`group_by/flow.py`), on the state of one bucket.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.spark import bucket_files
from dpstream.engines.spark.bucket_files import Chain, Waiting
from dpstream.engines.spark.packets import (
    Shape,
    by_number,
    ids,
    notes,
    numbers,
    opened,
    packed_ids,
    packets,
)
from dpstream.engines.spark.tasks import Batches, Task, attempt, divided
from dpstream.errors import StateError
from dpstream.group_by.flow import Flow
from dpstream.group_by.groups import sum_groups
from dpstream.group_by.perturb import NoisySums
from dpstream.query.noise_plan import NoisePlan, WindowPlan
from dpstream.query.schedule import DueRelease
from dpstream.rows.row_batch import Rows, rows_by_window


@dataclass(frozen=True)
class ShippedPlan(NoisePlan):
    """A plan as the driver made it: no executor computes noise parameters of its own."""

    windows: dict[int, WindowPlan]
    of_totals: dict[int, WindowPlan]

    @classmethod
    def of(cls, plan: NoisePlan, due: Iterable[DueRelease]) -> ShippedPlan:
        """For a job that publishes these; its rows may enter windows that are due later."""
        of_due = {one.releases for one in due}
        lengths = of_due | set(plan.query.schedule.lengths)
        totals = of_due if plan.query.totals else set()
        return cls(
            query=plan.query,
            windows={length: plan.window(length) for length in lengths},
            of_totals={length: plan.totals(length) for length in totals},
        )

    def window(self, releases: int) -> WindowPlan:
        """The noise of a window with so many releases."""
        return self.windows[releases]

    def totals(self, releases: int) -> WindowPlan:  # type: ignore[override]
        """The noise of a window's totals."""
        return self.of_totals[releases]


@dataclass(frozen=True, kw_only=True)
class PublishTask(Task):
    """Steps `first` to `end` - 1, from waiting rows and chains of state to noisy sums."""

    first: int
    end: int
    waiting: Sequence[Waiting]
    units: Mapping[int, Chain]
    groups: Mapping[int, Chain]


def bound(task: PublishTask, batches: Batches) -> Batches:
    """Stage 1, by bucket of units: keep what fits the bounds, send it to its groups' buckets."""
    for bucket in [int(n) for b in batches for n in b["id"].to_pylist()]:
        yield from _bound(task, bucket)


def _bound(task: PublishTask, bucket: int) -> Batches:
    flow, shape = task.flow(bucket), task.shape
    chain = task.units.get(bucket, ())
    watermarks = bucket_files.load_segments(task.files, flow, "units", chain)
    mine = [w for w in task.waiting if w.bucket == bucket]
    parts = [bucket_files.load_waiting(task.files, shape, w, task.first, task.end) for w in mine]
    told: list[dict[str, Any]] = []
    kept_rows: list[pa.Table] = []
    for step in range(task.first, task.end):
        pieces = [(rows, a, b) for rows in parts for at, _, _, a, b in rows.runs if at == step]
        for window, period, rows in rows_by_window(pieces):
            keep_mask = flow.bound(window, period, rows)
            if flow.query.totals:
                kept = int(np.count_nonzero(keep_mask))
                counts = {"offered": flow.offered_rows(period, rows), "kept": kept}
                told.append({"total": [step, window], **counts})
            if keep_mask.any():
                kept_rows.append(_kept(task, rows, keep_mask))
        for due in flow.query.schedule.due(step):
            if due.release == due.releases:
                flow.evict(due.window)
        flow.evict_periods(step + 1)
    name = f"state/{task.job}-units-{bucket}-{attempt()}.dps"
    stored, whole = bucket_files.save(task.files, flow, "units", name, chain, watermarks)
    saved = {"stage": "units", "bucket": bucket, "segment": stored, "whole": whole}
    yield notes(bucket, [json.dumps(saved)])
    if told:
        yield notes(0, [json.dumps(one) for one in told])
    if kept_rows:
        table = pa.concat_tables(kept_rows).combine_chunks()
        yield from packets(divided(task, table, ids(table, "group")))


def _kept(task: PublishTask, rows: Rows, keep_mask: Any) -> pa.Table:
    """What is kept of a step and window: a row for each group, however many it has here.

    So a key that half of the rows have costs its bucket no more than others. Where keys are found
    in rounds the rows themselves go on.
    """
    query, shape = task.plan.query, task.shape
    if not query.in_rounds:
        groups, sums, first = sum_groups(query.measures, rows.groups, keep_mask, rows.values)
        of = {"step": rows.steps[first], "window": rows.windows[first]}
        return shape.of_groups(groups, sums, rows.keys.take(pa.array(first)), **of)
    table = shape.packed(
        rows,
        unit=packed_ids(rows.units) if query.rounds_of_units else None,
        digest=None,
        period=None,
        verdict=keep_mask,
    )
    return table.take(pa.array(np.flatnonzero(keep_mask)))


def add(task: PublishTask, flow: Flow, window: int, table: pa.Table) -> None:
    """Take in what `_kept` has sent of a step and window."""
    shape = task.shape
    if flow.query.in_rounds:
        keep_mask = numbers(table, "verdict").astype(np.uint8)
        flow.aggregate(window, shape.rows(table), keep_mask)
    else:
        flow.add_sums(window, ids(table, "group"), shape.sums(table), shape.keys_of(table))


def publish(task: PublishTask, batches: Batches) -> Batches:
    """Stage 2, by bucket of groups: add up, latch keys, draw noise; what is shown goes out."""
    heard, rows = opened(batches)
    if not rows.keys() <= heard.keys():  # every bucket of units sends a note to its namesake
        raise StateError("the rows of a bucket came without its notes: the shuffle was divided")
    for bucket, told in heard.items():
        yield from _publish(task, bucket, rows.get(bucket), told)


def _publish(task: PublishTask, bucket: int, table: pa.Table | None, told: list[str]) -> Batches:
    flow, shape = task.flow(bucket), task.shape
    assert task.keys is not None
    assert task.keys.lent is not None
    doors = task.keys.lent.doors()
    chain = task.groups.get(bucket, ())
    watermarks = bucket_files.load_segments(task.files, flow, "groups", chain)
    heard = [json.loads(text) for text in told]
    by_step = {} if table is None else dict(by_number(table, "step"))
    for step in range(task.first, task.end):
        for window, mine in by_number(by_step[step], "window") if step in by_step else ():
            add(task, flow, window, mine)
        for one in (one for one in heard if one.get("total", [None])[0] == step):
            flow.totals(one["total"][1]).add(offered=one["offered"], kept=one["kept"])
        for due in flow.query.schedule.due(step):
            (noisy,) = flow.perturb(due, doors)
            if len(noisy.ids):
                yield from packets([(0, _shown(flow, shape, step, due, noisy))])
            if flow.query.totals and bucket == 0:
                share = [number.hex() for number in flow.kept_share(due, doors)]
                yield notes(0, [json.dumps({"share": [step, due.window, *share]})])
            if due.release == due.releases:
                flow.evict(due.window)
    name = f"state/{task.job}-groups-{bucket}-{attempt()}.dps"
    stored, whole = bucket_files.save(task.files, flow, "groups", name, chain, watermarks)
    saved = {"stage": "groups", "bucket": bucket, "segment": stored, "whole": whole}
    passed = [text for text, one in zip(told, heard, strict=True) if "stage" in one]
    yield notes(0, [*passed, json.dumps(saved)])


def _shown(flow: Flow, shape: Shape, step: int, due: DueRelease, noisy: NoisySums) -> pa.Table:
    (bucket,) = flow.groups(due.window)
    keys, size = bucket.key_columns(noisy.groups), len(noisy.ids)
    of = {"step": np.full(size, step, np.int64), "window": np.full(size, due.window, np.int64)}
    return shape.of_groups(noisy.ids, noisy.sums, keys, **of, since=noisy.since)
