"""Rows of releases as JSON: keys, values and error bars, sorted and searched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.stats import norm

from dpstream.connectors.sinks.encode import plain
from dpstream.records import Integers, Reals
from dpstream.serve.described import Described
from dpstream.serve.store.keys import id_of, key_values
from dpstream.serve.store.segments import Segment

CONFIDENCE = 0.95
"""Of all orders together that an answer calls meaningful."""
_LONGEST = 200  # code points of a key that are shown in lists


def rows_of(
    described: Described, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """Rows at these places, ready for JSON; long keys are cut, and say how long they are."""
    taken = segment.table.take(pa.array(places, pa.int64()))
    ids = segment.digests[np.asarray(places, np.int64)].tolist() if len(segment) else []
    values = {name: _numbers(taken[name]) for name in described.figures}
    spreads = {name: described.spread(name) for name in described.figures}
    stddev = {name: _numbers(taken[at]) if at else None for name, at in spreads.items()}
    ends = {
        kind: {
            name: _numbers(taken[at])
            for name in described.figures
            if (at := described.spread(name, kind))
        }
        for kind in ("low", "high")
    }
    times = [None if at is None else at.isoformat() for at in taken["trigger_time"].to_pylist()]
    releases = taken["release_index"].to_pylist()
    held = taken["held"].to_pylist() if "held" in taken.column_names else None
    first = segment.first
    found = []
    for number, key in enumerate(key_values(taken, described.keys)):
        shown, lengths = cut(key)
        row: dict[str, Any] = {"id": id_of(*ids[number]), "key": shown}
        if any(lengths):
            row["cut"] = lengths
        row["values"] = {name: column[number] for name, column in values.items()}
        row["stddev"] = {
            name: None if column is None else column[number] for name, column in stddev.items()
        }
        for kind, columns in ends.items():
            if columns:
                row[kind] = {name: column[number] for name, column in columns.items()}
        row["release_index"], row["time"] = releases[number], times[number]
        row["first_seen"] = int(first[places[number]])
        if held is not None:
            row["held"] = held[number]
        found.append(row)
    return found


def cut(key: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """A key that fits into a list, and the full lengths of what was cut.

    >>> cut(["a" * 300, 5])[1]
    [300, None]
    """
    shown, lengths = [], []
    for value in key:
        long = isinstance(value, str) and len(value) > _LONGEST
        shown.append(value[:_LONGEST] if long else value)
        lengths.append(len(value) if long else None)
    return shown, lengths


def searched(described: Described, segment: Segment, text: str) -> Integers:
    """Places of the rows with a key that contains a text, in any case of letters."""
    if not text or not described.keys:
        return np.arange(len(segment) if not text else 0)
    found = np.zeros(len(segment), bool)
    for name in described.keys:
        column = plain(segment.table[name])
        if not pa.types.is_string(column.type):
            column = column.cast(pa.string())
        match = pc.match_substring(column, text, ignore_case=True)
        found |= pc.fill_null(match, False).to_numpy()
        if text.lower() == "null":
            found |= pc.is_null(column).to_numpy()
    return np.flatnonzero(found)


def in_order(segment: Segment, places: Integers, figure: str, *, falling: bool) -> Integers:
    """The places by a figure; rows without it come last, equal ones stay as they are."""
    values = _reals(segment, figure)[places]
    order = np.argsort(-values if falling else values, kind="stable")  # NaN goes last
    return places[order]


def meaningful(segment: Segment, places: Integers, figure: str, spread: str | None) -> list[Any]:
    """For each place but the last: is its order against the next one more than noise?

    Two values count as ordered if they are further apart than `order_threshold` standard
    deviations of their difference. Noise of two keys is independent.
    """
    if spread is None or len(places) < 2:
        return [None] * max(len(places) - 1, 0)
    values, deviations = _reals(segment, figure)[places], _reals(segment, spread)[places]
    apart = np.abs(np.diff(values))
    needed = order_threshold(len(places) - 1) * np.hypot(deviations[1:], deviations[:-1])
    known = np.isfinite(apart) & np.isfinite(needed)
    return [bool(a) if k else None for a, k in zip(apart > needed, known, strict=True)]


def order_threshold(pairs: int) -> float:
    """Standard deviations that make all of so many orders right together, 19 times in 20.

    >>> round(order_threshold(1), 2), round(order_threshold(20), 2)
    (1.96, 3.02)
    """
    return float(norm.isf((1 - CONFIDENCE) / 2 / max(pairs, 1)))


def _reals(segment: Segment, name: str) -> Reals:
    column = segment.table[name].combine_chunks()
    column = column.cast(pa.float64()) if not pa.types.is_float64(column.type) else column
    found: Reals = column.to_numpy(zero_copy_only=False)
    return found


def _numbers(column: pa.ChunkedArray) -> list[float | int | None]:
    return [
        None if value is None or not math.isfinite(value) else value for value in column.to_pylist()
    ]
