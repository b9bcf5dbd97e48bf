"""Rows of releases as JSON: keys, values and error bars, sorted and searched."""

from __future__ import annotations

import json
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
from dpstream.serve.parameters import Refusal
from dpstream.serve.store.keys import key_id, key_values
from dpstream.serve.store.segments import FIRST, Segment

CONFIDENCE = 0.95
"""Of all orders together that an answer calls meaningful."""
_LONGEST = 200  # code points of a key that are shown in lists


def rows_of(
    described: Described, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """Rows at these places, ready for JSON; long keys are cut, and say how long they are."""
    figures = figures_of(described, segment, places)
    taken = segment.table.select([*described.keys, "trigger_time"])
    taken = taken.take(pa.array(places, pa.int64()))
    times = [None if at is None else at.isoformat() for at in taken["trigger_time"].to_pylist()]
    releases, first = segment.array("release_index"), segment.array(FIRST)
    found = []
    for number, key in enumerate(key_values(taken, described.keys)):
        place = places[number]
        shown, lengths = cut(key)
        row: dict[str, Any] = {"id": segment.id_at(place), "key": shown}
        if any(lengths):
            row["cut"] = lengths
        row |= figures[number]
        row |= {"release_index": int(releases[place]), "time": times[number]}
        found.append(row | {"first_seen": int(first[place])})
    return found


def figures_of(
    described: Described, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """The published numbers of some rows, with their error bars."""
    chosen = np.asarray(places, np.int64)
    columns: dict[str, dict[str, list[Any]]] = {"values": {}, "stddev": {}, "low": {}, "high": {}}
    nothing = [None] * len(chosen)
    for name in described.figures:
        columns["values"][name] = _numbers(segment.array(name)[chosen])
        for kind in ("stddev", "low", "high"):
            spread = described.spread(name, kind)
            if spread is not None:
                columns[kind][name] = _numbers(segment.array(spread)[chosen])
            elif kind == "stddev":
                columns[kind][name] = nothing
    held = segment.table["held"].take(pa.array(chosen)).to_pylist() if described.holds else None
    found = []
    for number in range(len(chosen)):
        row: dict[str, Any] = {
            kind: {name: values[number] for name, values in named.items()}
            for kind, named in columns.items()
            if named
        }
        found.append(row if held is None else row | {"held": held[number]})
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


def id_of_json(text: str) -> str:
    """The id of a key that was given as JSON."""
    try:
        key = json.loads(text)
    except (ValueError, RecursionError):
        key = None
    if not isinstance(key, list) or any(isinstance(each, list | dict) for each in key):
        raise Refusal(422, "key must be a JSON array of texts, numbers or null")
    return key_id(key)


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
    return segment.array(name).astype(np.float64, copy=False)


def _numbers(values: Any) -> list[float | int | None]:
    """As JSON has them: what is no finite number is null."""
    return [None if not math.isfinite(value) else value for value in values.tolist()]
