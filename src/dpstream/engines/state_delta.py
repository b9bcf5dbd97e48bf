"""A query's state by window and by period: all of it, or what is new since the last time.

What is extracted is plain arrays, so it is a copy that a thread can write while the query goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.counting.noise_process import KeyedNoise
from dpstream.group_by.bounding import pair_table, unit_table
from dpstream.group_by.chosen_bounds import unit_facts
from dpstream.group_by.contributions import contribution_table, distinct_tables
from dpstream.group_by.flow import Flow
from dpstream.group_by.grouping_sets import counts_in_sets
from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.hash_tables import HashTable
from dpstream.rows.row_batch import Rows

Owner = tuple[str, int]
"""("window", number), ("period", number), or the version of what is "remembered" or "chosen"."""
Watermarks = dict[str, Any]
"""How much of an owner's tables a snapshot has: rows in use."""
STAGES = ("units", "groups")
"""What has state: bounding, by unit, and all that comes after it, by group."""
_UNSEEN = (0, 0, 0, (), ())  # rows of a group bucket's table, active groups, members; values; cells
_GROWTH = 2  # files that hold this many times what there is are written anew
_SMALL = 1 << 20  # bytes; waste below is left alone


def owners(flow: Flow) -> list[Owner]:
    """Every window and period that has state."""
    tables = (
        t
        for bucket in flow.state.units
        for t in (
            *(bucket.windows, bucket.counted_pairs, bucket.contributions, bucket.set_pairs),
            bucket.reached_pairs,
        )
    )
    windows = {number for by_window in tables for number in by_window}
    windows |= set(flow.state.windows) | set(flow.state.totals) | set(flow.state.held)
    windows |= set(flow.state.histograms)
    versions = [] if flow.remembered is None else [flow.remembered.version]
    choices = [] if flow.chosen is None else [flow.chosen.version]
    return (
        [("period", n) for n in sorted(flow.state.periods)]
        + [("window", n) for n in sorted(windows)]
        + [("remembered", n) for n in versions if n]
        + [("chosen", n) for n in choices if n]
    )


def extract(
    flow: Flow, owner: Owner, since: Watermarks | None, stages: Sequence[str] = STAGES
) -> tuple[dict[str, Any], Watermarks]:
    """What is new since `since` (None: everything), and the watermarks to go on from."""
    delta: dict[str, Any] = {}
    if owner[0] == "remembered":
        assert flow.remembered is not None
        return ({} if since else flow.remembered.save()), {"all": True}
    if owner[0] == "chosen":
        assert flow.chosen is not None
        return ({} if since else flow.chosen.save()), {"all": True}
    if "units" in stages:
        for name, tables in _unit_tables(flow, owner).items():
            known = [0] * len(tables) if since is None else since[name]
            delta[name] = flow.workers.each(HashTable.delta, tables, known)
        if owner[0] == "window" and flow.query.rows_wait:
            pieces = flow.state.held.get(owner[1], [])
            delta["held since"] = 0 if since is None else min(since["held"], len(pieces))
            delta["held"] = [_held(rows) for rows in pieces[delta["held since"] :]]
    if "groups" in stages and owner[0] == "window":
        buckets = _group_buckets(flow, owner[1])
        seen = [_UNSEEN] * len(buckets) if since is None else since["groups"]
        delta["groups"] = [
            _group(bucket, *rows) for bucket, rows in zip(buckets, seen, strict=True)
        ]
    return delta, _watermarks(flow, owner, stages)


def restore(
    flow: Flow, owner: Owner, delta: dict[str, Any], stages: Sequence[str] = STAGES
) -> Watermarks:
    """Take in what was extracted, after all that was extracted before it."""
    if owner[0] == "remembered":
        assert flow.remembered is not None
        if delta:
            flow.remembered.restore(delta)
        return {"all": True}
    if owner[0] == "chosen":
        assert flow.chosen is not None
        if delta:
            flow.chosen.restore(delta)
        return {"all": True}
    if "units" in stages:
        for name, tables in _unit_tables(flow, owner).items():
            for table, rows in zip(tables, delta[name], strict=True):
                table.apply(rows)
        if "held" in delta:
            _restore_held(flow, owner[1], delta)
    if "groups" in stages and owner[0] == "window":
        flow.state.windows.setdefault(owner[1], [flow.new_groups() for _ in range(flow.buckets)])
        for bucket, group in zip(_group_buckets(flow, owner[1]), delta["groups"], strict=True):
            _restore_group(bucket, group)
    return _watermarks(flow, owner, stages)


def is_wasteful(flow: Flow, current: Sequence[Owner], stored: int) -> bool:
    """Do files of `stored` bytes hold far more than there is of these owners?"""
    size = 0  # about
    for owner in current:
        if owner[0] in ("remembered", "chosen"):
            continue
        groups = flow.state.windows.get(owner[1], []) if owner[0] == "window" else []
        of_units = [table for some in _unit_tables(flow, owner).values() for table in some]
        tables = [*of_units, *(bucket.table for bucket in groups)]
        size += sum(table.stored for table in tables)
        if owner[0] == "window":
            size += sum(rows.bytes for rows in flow.state.held.get(owner[1], []))
        size += sum(bucket.bytes - bucket.table.bytes for bucket in groups)
    return stored > _GROWTH * size + _SMALL


def _watermarks(flow: Flow, owner: Owner, stages: Sequence[str]) -> Watermarks:
    marks: Watermarks = {}
    if "units" in stages:
        for name, tables in _unit_tables(flow, owner).items():
            marks[name] = [table.used for table in tables]
        if owner[0] == "window" and flow.query.rows_wait:
            marks["held"] = len(flow.state.held.get(owner[1], []))
    if "groups" in stages and owner[0] == "window":
        marks["groups"] = [
            (
                b.table.used,
                len(b.active),
                0 if b.members is None else b.members.used,
                tuple(values.used for values in b.values),
                tuple(cells.table.used for cells in b.cells),
            )
            for b in _group_buckets(flow, owner[1])
        ]
    return marks


def _unit_tables(flow: Flow, owner: Owner) -> dict[str, list[HashTable]]:
    """An owner's table in each bucket of units; where totals are counted, what they need too."""
    (kind, number), units = owner, flow.state.units
    if kind == "window":
        tables = {"tables": [b.windows.setdefault(number, pair_table(b.bounds)) for b in units]}
        if flow.query.totals and flow.query.counts_units:
            tables["counted"] = [b.counted_pairs.setdefault(number, HashTable()) for b in units]
        if flow.query.candidates:
            tables["reached"] = [b.reached_pairs.setdefault(number, HashTable(1)) for b in units]
        if counts_in_sets(flow.query):
            tables["sets"] = [b.set_pairs.setdefault(number, HashTable()) for b in units]
        if flow.query.unit_measures:
            for bucket in units:
                bucket.contributions.setdefault(number, contribution_table(flow.query))
                bucket.values.setdefault(number, distinct_tables(flow.query))
            tables["contributions"] = [b.contributions[number] for b in units]
            for at in range(len(units[0].values[number])):
                tables[f"values {at}"] = [b.values[number][at] for b in units]
        return tables
    tables = {"tables": [b.periods.setdefault(number, unit_table()) for b in units]}
    if flow.query.totals:
        tables["dropped"] = [b.dropped.setdefault(number, HashTable(1)) for b in units]
    if flow.query.candidates:
        tables["reached"] = [b.reached.setdefault(number, unit_facts(flow.query)) for b in units]
    return tables


_OF_ROW = ("units", "groups", "digests", "steps", "values")


def _held(rows: Rows) -> dict[str, Any]:
    """Rows that wait, as plain arrays."""
    keys = np.frombuffer(arrow_stream(rows.keys.combine_chunks()), np.uint8)
    arrays = {name: np.ascontiguousarray(getattr(rows, name)) for name in _OF_ROW}
    return arrays | {"period": int(rows.periods[0]), "keys": keys}


def _restore_held(flow: Flow, window: int, delta: dict[str, Any]) -> None:
    pieces = flow.state.held.setdefault(window, [])
    del pieces[delta["held since"] :]
    for piece in delta["held"]:
        arrays: dict[str, Any] = {name: piece[name] for name in _OF_ROW}
        size, keys = len(arrays["steps"]), pa.py_buffer(piece["keys"].tobytes())
        of_all = {"windows": window, "periods": piece["period"]}
        arrays |= {name: np.broadcast_to(np.int64(n), size) for name, n in of_all.items()}
        pieces.append(Rows(**arrays, keys=pa.ipc.open_stream(keys).read_all()))
    if not pieces:
        del flow.state.held[window]


def _group_buckets(flow: Flow, window: int) -> list[GroupBucket]:
    """The groups of a window, its totals if they are counted, the histogram of its period."""
    buckets = [*flow.groups(window), *([flow.totals(window).bucket] if flow.query.totals else [])]
    if flow.query.candidates and flow.ends_period(window):
        buckets.append(flow.histogram(window).bucket)
    return buckets


def _group(
    bucket: GroupBucket,
    rows: int,
    active: int,
    members: int,
    values: Sequence[int],
    cells: Sequence[int],
) -> dict[str, Any]:
    shown, known = bucket.shown, bucket.members
    of_values = [each.delta(values[n] if values else 0) for n, each in enumerate(bucket.values)]
    of_cells = [each.delta(cells[n] if cells else 0) for n, each in enumerate(bucket.cells)]
    more: dict[str, Any] = {"values": of_values} if of_values else {}
    more |= {"remembered": bucket.remembered.copy()} if len(bucket.remembered) else {}
    return (
        more
        | ({"cells": of_cells} if of_cells else {})
        | {
            "table": bucket.table.delta(rows),
            "members": None if known is None else known.delta(members),
            "round": bucket.round.copy(),
            "active since": active,
            "active": bucket.active[active:].copy(),
            "keys": _keys_since(bucket, active),
            "joined": bucket.joined,
            "noise": None if bucket.noise is None else bucket.noise.state.copy(),
            "noise step": None if bucket.noise is None else bucket.noise.step,
            "shown": shown.active.copy(),
            "shown since": shown.since.copy(),
            "shown noise": [noise.state.copy() for noise in shown.noise],
            "published": None if shown.published is None else shown.published.copy(),
        }
    )


def _restore_group(bucket: GroupBucket, part: dict[str, Any]) -> None:
    bucket.table.apply(part["table"])
    for cells, delta in zip(bucket.cells, part.get("cells", ()), strict=True):
        cells.apply(delta)
    if part["members"] is not None:
        bucket.members = bucket.members or HashTable(1)
        bucket.members.apply(part["members"])
    for table, rows in zip(bucket.values, part.get("values", ()), strict=True):
        table.apply(rows)
    bucket.round = part["round"]
    if part["active since"] == 0:
        bucket.active, bucket.keys = np.zeros(0, np.int64), []
    bucket.active = np.concatenate([bucket.active, part["active"]])
    if len(part["active"]):
        bucket.keys.append(pa.ipc.open_stream(pa.py_buffer(part["keys"].tobytes())).read_all())
    bucket.remembered = part.get("remembered", np.zeros(0, np.int64))
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


def _keys_since(bucket: GroupBucket, first: int) -> Any:
    """Key columns of active groups from one on, as an Arrow stream; none are no bytes."""
    if first == len(bucket.active):
        return np.zeros(0, np.uint8)
    keys = pa.concat_tables(bucket.keys).slice(first, len(bucket.active) - first)
    return np.frombuffer(arrow_stream(keys.combine_chunks()), np.uint8)


def arrow_stream(table: pa.Table) -> pa.Buffer:
    """A table as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
