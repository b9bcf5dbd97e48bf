"""Answers about one query from its releases: windows, the newest values, series, pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpstream.serve.described import Described
from dpstream.serve.parameters import Refusal
from dpstream.serve.routes import Given
from dpstream.serve.shown_rows import (
    CONFIDENCE,
    cut,
    figures_of,
    id_of_json,
    in_order,
    meaningful,
    order_threshold,
    rows_of,
    searched,
)
from dpstream.serve.store.keys import key_id, key_values
from dpstream.serve.store.reader import Released, ReleaseReader
from dpstream.serve.store.segments import FIRST


@dataclass(frozen=True, kw_only=True)
class History:
    """The releases of one query, as far as they can be seen."""

    described: Described
    reader: ReleaseReader

    def windows(self, before: int | None, limit: int) -> dict[str, Any]:
        """Windows, newest first; `next` goes on."""
        found = self.reader.windows(self.described.name, before=before, limit=limit + 1)
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
            for line in found[:limit]
        ]
        more = len(found) > limit
        return {"windows": shown, "next": str(found[limit - 1].window) if more else None}

    def latest(self, given: Given) -> dict[str, Any]:
        """The newest value of every key of a window: those that match, in order."""
        described, newest = self.described, self.newest(given["window"])
        segment = self.reader.segment(newest)
        figure = self._figure(given["sort"])
        places = searched(described, segment, given["q"] or "")
        matched, offset, limit = len(places), given["offset"], given["limit"]
        if figure is not None:
            places = in_order(segment, places, figure, falling=given["order"] == "desc")
        shown, following = places[offset : offset + limit], places[offset : offset + limit + 1]
        rows = rows_of(described, segment, shown)
        if figure is not None:
            clear = meaningful(segment, following, figure, described.spread(figure))
            for row, ordered in zip(rows, [*clear, None], strict=False):
                row["ordered"] = ordered
        return self._about(newest) | {
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
            if self.described.keys:
                raise Refusal(422, "name at least one key, with id or key")
            wanted = [key_id([])]
        head: dict[str, Any] = {"query": self.described.name}
        first: dict[str, int] = {}
        if given["window"] == "all":
            head["over"] = "windows"
            released = self.reader.last_of_windows(self.described.name, given["limit"])
            complete = True
        else:
            newest = self.newest(None if given["window"] is None else int(given["window"]))
            head |= {"over": "releases"} | self._about(newest)
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
            "aggregates": self.described.figures,
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
        described = self.described
        points: dict[str, list[dict[str, Any]]] = {identity: [] for identity in wanted}
        keys: dict[str, list[Any]] = {}
        for each in released:
            segment = self.reader.segment(each)
            at = {"window": each.window, "release_index": each.release, "time": each.time}
            find = segment.find_fresh if complete else segment.find
            known = [(one, find(one)) for one in wanted]
            places = [place for _, place in known if place is not None]
            here = [one for one, place in known if place is not None]
            figures = figures_of(described, segment, places) if places else []
            for identity, place, figure in zip(here, places, figures, strict=True):
                points[identity].append(at | figure)
                if identity not in keys:
                    row = segment.table.slice(place, 1)
                    keys[identity] = key_values(row, described.keys)[0]
        return [
            _line(identity, keys.get(identity), points[identity], first.get(identity))
            for identity in wanted
        ]

    def key(self, identity: str, window: int | None) -> dict[str, Any]:
        """The full text of a key that was published."""
        newest = self.newest(window)
        candidates = [newest]
        if window is None:
            candidates += self.reader.last_of_windows(self.described.name, 1000)[::-1]
        for released in candidates:
            segment = self.reader.segment(released)
            place = segment.find(identity)
            if place is not None:
                row = segment.table.slice(place, 1)
                return {"id": identity, "key": key_values(row, self.described.keys)[0]}
        raise Refusal(404, "there is no such key")

    def newest(self, window: int | None) -> Released:
        """The newest release of a window, or of the newest window."""
        found = self.reader.newest(self.described.name, window)
        if found is None:
            words = "nothing was published yet" if window is None else "there is no such window"
            raise Refusal(404, words)
        return found

    def _figure(self, sort: str | None) -> str | None:
        figures = self.described.figures
        if sort is not None and sort not in figures:
            raise Refusal(422, "sort must name an aggregate of the query")
        return sort if sort is not None else (figures[0] if figures else None)

    def _about(self, released: Released) -> dict[str, Any]:
        return {
            "query": released.query,
            "window": released.window,
            "start": released.start,
            "end": released.end,
            "release_index": released.release,
            "releases": released.planned,
            "time": released.time,
            "final": released.release == released.planned,
            "id": released.id,
        }


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
