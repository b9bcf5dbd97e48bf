"""Answers about one query from its releases: windows, the newest values, series."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.stats import norm

from dpstream.connectors.encode import simple_column
from dpstream.records import Integers, Reals
from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_segments import FIRST, Segment, key_id, key_values
from dpstream.serve.release_store import Released, ReleaseReader
from dpstream.serve.routing import Given, Refusal

CONFIDENCE = 0.95
"""Of all orders together that an answer calls meaningful."""
_LONGEST = 200  # code points of a key that are shown in lists


@dataclass(frozen=True, kw_only=True)
class History:
    """The releases of one query, as far as they can be seen."""

    description: QueryDescription
    reader: ReleaseReader

    def windows(self, before: int | None, limit: int) -> dict[str, Any]:
        """Windows, newest first; `next` goes on."""
        lines = self.reader.windows(self.description.name, before=before, limit=limit + 1)
        shown = [
            {
                "window": line.window,
                "start": line.start,
                "end": line.end,
                "releases": line.releases,
                "planned": line.planned,
                "last_release_index": line.last_release,
                "last_release_time": line.last_time,
            }
            for line in lines[:limit]
        ]
        more = len(lines) > limit
        return {"windows": shown, "next": str(lines[limit - 1].window) if more else None}

    def latest(self, given: Given) -> dict[str, Any]:
        """The newest value of every key of a window: those that match, in order."""
        description, newest = self.description, self.newest(given["window"])
        segment = self.reader.segment(newest)
        figure = self._figure(given["sort"])
        places = matching_rows(description, segment, given["q"] or "")
        matched, offset, limit = len(places), given["offset"], given["limit"]
        if figure is not None:
            places = sorted_rows(segment, places, figure, falling=given["order"] == "desc")
        shown, following = places[offset : offset + limit], places[offset : offset + limit + 1]
        rows = rows_of(description, segment, shown)
        if figure is not None:
            clear = clear_orders(segment, following, figure, description.spread(figure))
            for row, ordered in zip(rows, [*clear, None], strict=False):
                row["ordered"] = ordered
        return _about(newest) | {
            "total": len(segment),
            "matched": matched,
            "offset": offset,
            "limit": limit,
            "sort": figure,
            "order": given["order"],
            "confidence": CONFIDENCE,
            "deviations": order_threshold(max(len(following) - 1, 1)),
            "rows": rows,
        }

    def series(self, given: Given) -> dict[str, Any]:
        """The releases of some keys in a window; of all windows the newest release each."""
        wanted = list(dict.fromkeys([*given["id"], *map(id_of_json, given["key"])]))
        if not wanted:
            if self.description.keys:
                raise Refusal(422, "name at least one key, with id or key")
            wanted = [key_id([])]
        head: dict[str, Any] = {"query": self.description.name}
        first: dict[str, int] = {}
        if given["window"] == "all":
            head["over"] = "windows"
            released = self.reader.last_of_windows(self.description.name, given["limit"])
            complete = True
        else:
            newest = self.newest(None if given["window"] is None else int(given["window"]))
            head |= {"over": "releases"} | _about(newest)
            first = self._first_seen(wanted, newest)
            released, complete = self.reader.spread(
                newest.query,
                newest.window,
                last=newest.release,
                also=list(first.values()),
                limit=given["limit"],
            )
        lines = self._lines(wanted, first, released, complete=complete)
        return head | {
            "complete": complete,
            "aggregates": self.description.figures,
            "series": lines,
        }

    def _first_seen(self, wanted: Sequence[str], newest: Released) -> dict[str, int]:
        """The releases at which keys have appeared; a key that is not there has none."""
        segment = self.reader.segment(newest)
        places = {identity: segment.find(identity) for identity in wanted}
        first = segment.array(FIRST)
        return {one: int(first[place]) for one, place in places.items() if place is not None}

    def _lines(
        self,
        wanted: list[str],
        first: Mapping[str, int],
        released: Sequence[Released],
        *,
        complete: bool,
    ) -> list[dict[str, Any]]:
        """Some keys over these releases; one that is in none of them has no key and no points.

        Of releases that hold changes only, all tell what has changed; a selection of them tells
        what was known at each.
        """
        description = self.description
        points: dict[str, list[dict[str, Any]]] = {identity: [] for identity in wanted}
        keys: dict[str, list[Any]] = {}
        for each in released:
            segment = self.reader.segment(each)
            at = {"window": each.window, "release_index": each.release, "time": each.time}
            find = segment.find_fresh if complete else segment.find
            known = [(one, find(one)) for one in wanted]
            places = [place for _, place in known if place is not None]
            here = [one for one, place in known if place is not None]
            figures = figures_of(description, segment, places) if places else []
            for identity, place, figure in zip(here, places, figures, strict=True):
                points[identity].append(at | figure)
                if identity not in keys:
                    row = segment.table.slice(place, 1)
                    keys[identity] = key_values(row, description.keys)[0]
        return [
            _line(identity, keys.get(identity), points[identity], first.get(identity))
            for identity in wanted
        ]

    def key(self, identity: str, window: int | None) -> dict[str, Any]:
        """The full text of a key that was published."""
        newest = self.newest(window)
        candidates = [newest]
        if window is None:
            candidates += self.reader.last_of_windows(self.description.name, 1000)[::-1]
        for released in candidates:
            segment = self.reader.segment(released)
            place = segment.find(identity)
            if place is not None:
                row = segment.table.slice(place, 1)
                return {"id": identity, "key": key_values(row, self.description.keys)[0]}
        raise Refusal(404, "there is no such key")

    def newest(self, window: int | None) -> Released:
        """The newest release of a window, or of the newest window."""
        newest = self.reader.newest(self.description.name, window)
        if newest is None:
            words = "nothing was published yet" if window is None else "there is no such window"
            raise Refusal(404, words)
        return newest

    def _figure(self, sort: str | None) -> str | None:
        figures = self.description.figures
        if sort is not None and sort not in figures:
            raise Refusal(422, "sort must name an aggregate of the query")
        return sort if sort is not None else (figures[0] if figures else None)


def _about(released: Released) -> dict[str, Any]:
    return released.facts | {"final": released.release == released.planned}


def _line(
    identity: str, key: list[Any] | None, points: list[dict[str, Any]], first: int | None
) -> dict[str, Any]:
    shown, lengths = cut(key or [])
    line: dict[str, Any] = {"id": identity, "key": None if key is None else shown}
    if any(lengths):
        line["cut"] = lengths
    if first is None and points:
        first = points[0]["release_index"]
    return line | {"first_seen": first, "points": points}


def rows_of(
    description: QueryDescription, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """Rows at these places, ready for JSON; long keys are cut, and say how long they are."""
    figures = figures_of(description, segment, places)
    taken = segment.table.select([*description.keys, "trigger_time"])
    taken = taken.take(pa.array(places, pa.int64()))
    times = [None if at is None else at.isoformat() for at in taken["trigger_time"].to_pylist()]
    releases, first = segment.array("release_index"), segment.array(FIRST)
    rows = []
    for number, key in enumerate(key_values(taken, description.keys)):
        place = places[number]
        shown, lengths = cut(key)
        row: dict[str, Any] = {"id": segment.id_at(place), "key": shown}
        if any(lengths):
            row["cut"] = lengths
        row |= figures[number]
        row |= {"release_index": int(releases[place]), "time": times[number]}
        rows.append(row | {"first_seen": int(first[place])})
    return rows


def figures_of(
    description: QueryDescription, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """The published numbers of some rows, with their error bars."""
    chosen = np.asarray(places, np.int64)
    columns: dict[str, dict[str, list[Any]]] = {"values": {}, "stddev": {}, "low": {}, "high": {}}
    nothing = [None] * len(chosen)
    for name in description.figures:
        columns["values"][name] = _numbers(segment.array(name)[chosen])
        for kind in ("stddev", "low", "high"):
            spread = description.spread(name, kind)
            if spread is not None:
                columns[kind][name] = _numbers(segment.array(spread)[chosen])
            elif kind == "stddev":
                columns[kind][name] = nothing
    held = segment.table["held"].take(pa.array(chosen)).to_pylist() if description.holds else None
    rows = []
    for number in range(len(chosen)):
        row: dict[str, Any] = {
            kind: {name: values[number] for name, values in named.items()}
            for kind, named in columns.items()
            if named
        }
        rows.append(row if held is None else row | {"held": held[number]})
    return rows


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


def matching_rows(description: QueryDescription, segment: Segment, text: str) -> Integers:
    """Places of the rows with a key that contains a text, in any case of letters."""
    if not text or not description.keys:
        return np.arange(len(segment) if not text else 0)
    matches = np.zeros(len(segment), bool)
    for name in description.keys:
        column = simple_column(segment.table[name])
        if not pa.types.is_string(column.type):
            column = column.cast(pa.string())
        match = pc.match_substring(column, text, ignore_case=True)
        matches |= pc.fill_null(match, False).to_numpy()
        if text.lower() == "null":
            matches |= pc.is_null(column).to_numpy()
    return np.flatnonzero(matches)


def sorted_rows(segment: Segment, places: Integers, figure: str, *, falling: bool) -> Integers:
    """The places by a figure; rows without it come last, equal ones stay as they are."""
    values = _reals(segment, figure)[places]
    order = np.argsort(-values if falling else values, kind="stable")  # NaN goes last
    return places[order]


def clear_orders(segment: Segment, places: Integers, figure: str, spread: str | None) -> list[Any]:
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
    """How many standard deviations apart make all these orders right together, 19 times in 20.

    >>> round(order_threshold(1), 2), round(order_threshold(20), 2)
    (1.96, 3.02)
    """
    return float(norm.isf((1 - CONFIDENCE) / 2 / max(pairs, 1)))


def _reals(segment: Segment, name: str) -> Reals:
    return segment.array(name).astype(np.float64, copy=False)


def _numbers(values: Any) -> list[float | int | None]:
    """As JSON has them: what is no finite number is null."""
    return [None if not math.isfinite(value) else value for value in values.tolist()]
