"""Erase what a query's state says about one unit.

The tables hold a unit as a keyed hash with two counters, and a keyed hash for each group that it is
in. The latter go. The former stays, marked as full: a unit that could begin anew would contribute
twice what the promise allows. Sums have taken the unit in long ago, and leave the process with
noise only; nothing of them is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.snapshots import Snapshots
from dpstream.errors import InvalidInput, StateError
from dpstream.privacy.run_directory import RunDirectory
from dpstream.privacy.state import chain_digest
from dpstream.records import Integers, Words
from dpstream.stages.column_values import in_type
from dpstream.stages.flow import Flow
from dpstream.stages.rows import id_pairs
from dpstream.stages.tables import Table


def erase_unit(flow: Flow, directory: RunDirectory, unit: Any, *, digest_key: bytes) -> int:
    """Erase a unit from the newest snapshot; returns in how many (period, group) places it was.

    The run must have stopped in good order: steps that a restart takes again would lack the unit,
    and the same noise would meet other sums.
    """
    snapshots = Snapshots(directory.folder, settled=lambda facts: None)
    try:
        facts = snapshots.load(flow)
        if facts is None:
            raise StateError(
                f"{directory.folder} holds no snapshot yet; let the run publish and stop first"
            )
        if directory.log.last >= facts["step"]:
            raise StateError(
                f"the run in {directory.folder} was killed after its last snapshot (step "
                f"{facts['step']} of {directory.log.last + 1} is saved); start it, stop it with "
                "Ctrl-C, and try again"
            )
        before = [*facts.get("before_erasures", []), facts["chain"]]
        directory.refuse_undone_erasure(facts["step"], before)
        directory.begin()  # a copy must not go on with the unit
        ids = list(_ids(flow, unit))
        found = sum(_erase(flow, one) for one in ids)
        # What follows depends on this: a replay without it must not pass for the same input.
        said = b"forgot" + b"".join(one.tobytes() for one in ids)
        chain = chain_digest(digest_key, facts["chain"], said)
        snapshots.save_whole(flow, facts | {"chain": chain, "before_erasures": before})
        snapshots.finish(overwrite=True)
        about, run = directory.about, directory.run.hex()
        directory.ledger.note_erasure(about["dataset"], run, facts["step"], chain.hex())
    finally:
        snapshots.close()
    return found


def _ids(flow: Flow, unit: Any) -> Iterator[Words]:
    """The unit's ids, one per period that has state."""
    kind = flow.reader.types.get(flow.query.unit)
    if kind is None:
        raise StateError("this run has read nothing yet; there is nothing to erase")
    try:
        value, lost = in_type(pa.array([unit]), kind, flow.query.unit)
    except (InvalidInput, pa.ArrowException, OverflowError):
        value, lost = pa.nulls(1, kind), np.ones(1, bool)
    if lost.any():
        raise InvalidInput(
            f"the unit must fit the type of column {flow.query.unit!r}, {kind}; got {unit!r}"
        )
    for period in sorted(flow.state.periods):
        yield flow.reader.ids.units(value, np.array([period]))


def _erase(flow: Flow, one: Words) -> int:
    """Empty the places of one unit, and mark it as full."""
    bounds, most, found = flow.query.bounds, flow.query.debias_rows or 0, 0
    for bucket in flow.state.units:
        for units in bucket.periods.values():
            units.numbers[_rows_of(units, one)] = (bounds.rows, bounds.groups)
        for offered in bucket.offered.values():
            offered.numbers[_rows_of(offered, one)] = most
    for window, buckets in flow.state.windows.items():
        groups = np.concatenate([b.table.ids[: b.table.used] for b in buckets])
        places = one ^ groups[:, ::-1]  # as bounding names a unit in a group
        tables = [b.windows[window] for b in flow.state.units if window in b.windows]
        for table in tables:
            found += _empty(table, places)
        for group in buckets:
            if group.members is not None:
                _empty(group.members, places)
    return found


def _rows_of(table: Table, wanted: Words) -> Integers:
    """The rows of ids that are there."""
    present = np.isin(id_pairs(table.ids[: table.used]), id_pairs(wanted))
    rows: Integers = np.flatnonzero(present)
    return rows


def _empty(table: Table, places: Words) -> int:
    """Overwrite rows with zeros; the index forgets them when it is next built."""
    rows = _rows_of(table, places)
    table.words[rows] = 0
    return len(rows)
