"""All that a query has published, oldest first: page by page, or in one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.records import Integers
from dpstream.serve.described import Described
from dpstream.serve.formats import Numbered
from dpstream.serve.routes import Given
from dpstream.serve.shown_rows import id_of_json, rows_of
from dpstream.serve.store.reader import Released, ReleaseReader
from dpstream.serve.store.segments import OWN, Segment

_AT_ONCE = 64  # releases that are looked up together


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The releases of one query, as far as they can be seen."""

    described: Described
    reader: ReleaseReader

    def page(self, given: Given) -> dict[str, Any]:
        """Rows of all releases, oldest first; `next` goes on."""
        rows: list[dict[str, Any]] = []
        following = None
        for released, segment, places, cursor in self._places(given):
            place = {"release": released.id, "window": released.window}
            rows += [place | row for row in rows_of(self.described, segment, places)]
            following = cursor
        return {"query": self.described.name, "rows": rows, "next": following}

    def tables(self, given: Given) -> tuple[list[Numbered], str | None]:
        """The same rows as tables."""
        found, following = [], None
        for released, segment, places, cursor in self._places(given):
            table = segment.table.drop_columns(list(OWN)).take(pa.array(places))
            found.append((released.window, released.release, table))
            following = cursor
        return found, following

    def all(self, window: int | None) -> Iterator[Numbered]:
        """Every release (of a window), as it was published."""
        after = 0
        while True:
            found = self.reader.releases(self.described.name, window, after=after, limit=_AT_ONCE)
            for released in found:
                yield released.window, released.release, self.reader.segment(released).published
                after = released.id
            if len(found) < _AT_ONCE:
                return

    def _places(self, given: Given) -> Iterator[tuple[Released, Segment, Integers, str | None]]:
        """Releases with the places of their rows on one page, and the cursor behind each."""
        wanted = given["id"] or (None if given["key"] is None else id_of_json(given["key"]))
        number, _, skipped = (given["after"] or "0").partition(".")
        left, skip, after = given["limit"], int(skipped or 0), int(number)
        at = after - 1 if skip else after
        while left > 0:
            found = self.reader.releases(
                self.described.name, given["window"], after=at, limit=_AT_ONCE
            )
            for each in found:
                segment = self.reader.segment(each)
                places = _fresh(segment, wanted)
                start = skip if each.id == after else 0
                shown = places[start : start + left]
                left -= len(shown)
                rest = start + len(shown) < len(places)
                cursor = f"{each.id}.{start + len(shown)}" if rest else str(each.id)
                yield each, segment, shown, cursor
                if left <= 0:
                    return
                at = each.id
            if len(found) < _AT_ONCE:
                return


def _fresh(segment: Segment, wanted: str | None) -> Integers:
    if wanted is None:
        return segment.fresh
    place = segment.find_fresh(wanted)
    return np.array([] if place is None else [place], np.int64)
