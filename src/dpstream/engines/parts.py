"""A query's state in parts, one per window and one per period: whole, or what is new.

A part is made of plain arrays, so it is a copy that a thread can write while the query goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.mechanisms.parts.counting.keyed import KeyedNoise
from dpstream.stages.bounding import UnitBucket, pair_table, unit_table
from dpstream.stages.flow import Flow
from dpstream.stages.groups import GroupBucket
from dpstream.stages.tables import Table

Owner = tuple[str, int]
"""("window", number) or ("period", number)."""
Watermarks = dict[str, Any]
"""How much of an owner's tables a snapshot has: rows in use."""
_UNSEEN = (0, 0, 0)  # rows of a group bucket's table, active groups, rows of its members


def owners(flow: Flow) -> list[Owner]:
    """Every window and period that has state."""
    windows = {n for bucket in flow.state.units for n in bucket.windows}
    windows |= set(flow.state.windows) | set(flow.state.totals)
    return [("period", n) for n in sorted(flow.state.periods)] + [
        ("window", n) for n in sorted(windows)
    ]


def extract(
    flow: Flow, owner: Owner, watermarks: Watermarks | None
) -> tuple[dict[str, Any], Watermarks]:
    """What is new since `watermarks` (None: everything), and the watermarks to go on from."""
    part, new = extract_units(flow, owner, watermarks)
    if owner[0] == "window":
        groups, more = extract_groups(flow, owner[1], watermarks)
        part, new = part | groups, new | more
    return part, new


def extract_units(
    flow: Flow, owner: Owner, watermarks: Watermarks | None
) -> tuple[dict[str, Any], Watermarks]:
    """The units' share of it."""
    kind, number = owner
    tables = [_table_of(bucket, kind, number) for bucket in flow.state.units]
    since = [0] * len(tables) if watermarks is None else watermarks["tables"]
    part: dict[str, Any] = {
        "tables": flow.workers.each(Table.delta, tables, since),
    }
    new: Watermarks = {"tables": [table.used for table in tables]}
    if kind == "period" and flow.query.totals:
        offered = [bucket.offered.setdefault(number, Table(1)) for bucket in flow.state.units]
        first = [0] * len(offered) if watermarks is None else watermarks["offered"]
        part["offered"] = flow.workers.each(Table.delta, offered, first)
        new["offered"] = [table.used for table in offered]
    return part, new


def extract_groups(
    flow: Flow, window: int, watermarks: Watermarks | None
) -> tuple[dict[str, Any], Watermarks]:
    """The groups' share of it."""
    buckets = _buckets(flow, window)
    known = [_UNSEEN] * len(buckets) if watermarks is None else watermarks["groups"]
    groups = [_group(bucket, *seen) for bucket, seen in zip(buckets, known, strict=True)]
    return {"groups": groups}, {"groups": [_seen(bucket) for bucket in buckets]}


def _buckets(flow: Flow, window: int) -> list[GroupBucket]:
    """The groups of a window, and its totals if they are counted."""
    return [*flow.groups(window), *([flow.totals(window).bucket] if flow.query.totals else [])]


def _seen(bucket: GroupBucket) -> tuple[int, int, int]:
    members = 0 if bucket.members is None else bucket.members.used
    return bucket.table.used, len(bucket.active), members


def size_of(flow: Flow, owner: Owner) -> int:
    """About how many bytes the whole of an owner's state takes."""
    kind, number = owner
    tables = [_table_of(bucket, kind, number) for bucket in flow.state.units]
    groups = flow.state.windows.get(number, []) if kind == "window" else []
    rows = sum(table.stored for table in [*tables, *(bucket.table for bucket in groups)])
    return rows + sum(bucket.bytes - bucket.table.bytes for bucket in groups)


def restore(flow: Flow, owner: Owner, part: dict[str, Any]) -> Watermarks:
    """Take a part in, after those before it."""
    watermarks = restore_units(flow, owner, part)
    if owner[0] == "window":
        watermarks |= restore_groups(flow, owner[1], part)
    return watermarks


def restore_units(flow: Flow, owner: Owner, part: dict[str, Any]) -> Watermarks:
    """Take the units' share in."""
    kind, number = owner
    tables = [_table_of(bucket, kind, number) for bucket in flow.state.units]
    for table, delta in zip(tables, part["tables"], strict=True):
        table.apply(delta)
    watermarks: Watermarks = {"tables": [table.used for table in tables]}
    if kind == "period" and flow.query.totals:
        offered = [bucket.offered.setdefault(number, Table(1)) for bucket in flow.state.units]
        for table, delta in zip(offered, part["offered"], strict=True):
            table.apply(delta)
        watermarks["offered"] = [table.used for table in offered]
    return watermarks


def restore_groups(flow: Flow, window: int, part: dict[str, Any]) -> Watermarks:
    """Take the groups' share in."""
    flow.state.windows.setdefault(
        window, [GroupBucket(flow.query.measures) for _ in range(flow.buckets)]
    )
    buckets = _buckets(flow, window)
    for bucket, group in zip(buckets, part["groups"], strict=True):
        _restore_group(bucket, group)
    return {"groups": [_seen(bucket) for bucket in buckets]}


def _table_of(bucket: UnitBucket, kind: str, number: int) -> Table:
    if kind == "period":
        return bucket.periods.setdefault(number, unit_table())
    return bucket.windows.setdefault(number, pair_table(bucket.bounds))


def _group(bucket: GroupBucket, rows: int, active: int, members: int) -> dict[str, Any]:
    shown, known = bucket.shown, bucket.members
    return {
        "table": bucket.table.delta(rows),
        "members": None if known is None else known.delta(members),
        "round": bucket.round.copy(),
        "active since": active,
        "active": bucket.active[active:].copy(),
        "keys": _to_bytes(bucket.keys, active, len(bucket.active) - active),
        "joined": bucket.joined,
        "noise": None if bucket.noise is None else bucket.noise.state.copy(),
        "noise step": None if bucket.noise is None else bucket.noise.step,
        "shown": shown.active.copy(),
        "shown since": shown.since.copy(),
        "shown noise": [noise.state.copy() for noise in shown.noise],
        "published": None if shown.published is None else shown.published.copy(),
    }


def _restore_group(bucket: GroupBucket, part: dict[str, Any]) -> None:
    bucket.table.apply(part["table"])
    if part["members"] is not None:
        bucket.members = bucket.members or Table(1)
        bucket.members.apply(part["members"])
    bucket.round = part["round"]
    if part["active since"] == 0:
        bucket.active, bucket.keys = np.zeros(0, np.int64), []
    bucket.active = np.concatenate([bucket.active, part["active"]])
    if len(part["active"]):
        bucket.keys.append(_from_bytes(part["keys"]))
    bucket.joined = part["joined"]
    if part["noise"] is not None:
        joined = bucket.round if bucket.in_rounds else np.arange(bucket.joined)
        ids = bucket.ids(joined)
        bucket.noise = KeyedNoise(ids=ids, state=part["noise"], step=part["noise step"])
    shown = bucket.shown
    shown.active, shown.since = part["shown"], part["shown since"]
    ids = bucket.ids(shown.active)
    shown.noise = [
        KeyedNoise(ids=ids.copy(), state=state, step=part["noise step"])
        for state in part["shown noise"]
    ]
    shown.published = part["published"]


def _to_bytes(tables: Sequence[pa.Table], first: int, count: int) -> Any:
    """Key columns as an Arrow stream."""
    if not count:
        return np.zeros(0, np.uint8)
    keys = pa.concat_tables(tables).slice(first, count).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, keys.schema) as writer:
        writer.write_table(keys)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _from_bytes(stored: Any) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(stored.tobytes())).read_all()
