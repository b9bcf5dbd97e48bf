"""Answers about one query from its releases: windows, the newest values, series, files of all."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.special import ndtri

from dpstream.connectors.encode import csv, jsonl, simple_column, with_numbers
from dpstream.records import Integers, Reals
from dpstream.serve.public_facts import SPREADS, QueryDescription
from dpstream.serve.release_segments import FIRST, OWN, Segment, key_id, key_values
from dpstream.serve.release_store import Released, ReleaseReader
from dpstream.serve.sides import Given, Refusal

FILE_TYPES = {
    "arrow": "application/vnd.apache.arrow.stream",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/jsonl",
}
Numbered = tuple[int, int, pa.Table]
"""Window, release and table."""
_AT_ONCE = 64  # releases that are looked up together
CONFIDENCE = 0.95
"""Of all orders together that an answer calls meaningful."""
_LONGEST = 200  # code points of a key that are shown in lists


@dataclass(frozen=True, kw_only=True)
class History:
    """The releases of one query, as far as they can be seen."""

    description: QueryDescription
    reader: ReleaseReader

    def windows(self, given: Given) -> dict[str, Any]:
        """Windows, newest first; `next` goes on."""
        limit = given["limit"]
        lines = self.reader.windows(self.description.name, before=given["after"], limit=limit + 1)
        following = str(lines[limit - 1]["window"]) if len(lines) > limit else None
        return {"windows": lines[:limit], "next": following}

    def latest(self, given: Given) -> dict[str, Any]:
        """The newest value of every key of a window: those that match, in order."""
        description, newest = self.description, self.newest(given["window"])
        segment = self._segment(newest)
        figure = given["sort"]
        if figure is None:
            figure = next(iter(description.figures), None)
        elif figure not in description.figures:
            raise Refusal(422, "sort must name an aggregate of the query")
        places = matching_rows(description, segment, given["q"] or "")
        matched, offset, limit = len(places), given["offset"], given["limit"]
        if figure is not None:
            places = sorted_rows(
                column_of(description, segment, figure), places, falling=given["order"] == "desc"
            )
        shown, following = places[offset : offset + limit], places[offset : offset + limit + 1]
        rows = rows_of(description, segment, shown)
        if figure is not None:
            spread = description.spread(figure)
            deviations = None if spread is None else column_of(description, segment, figure, spread)
            clear = clear_orders(
                column_of(description, segment, figure)[following],
                None if deviations is None else deviations[following],
            )
            for row, ordered in zip(rows, [*clear, None], strict=False):
                row["ordered"] = ordered
        return _about(newest) | {
            "total": len(segment),
            "matched": matched,
            "offset": offset,
            "limit": limit,
            "sort": figure,
            "order": given["order"],
            "kept_share": _kept_share(segment, newest),
            "bounds": segment.bounds,
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
        return head | {
            "complete": complete,
            "aggregates": self.description.figures,
            "series": self._lines(wanted, first, released, complete=complete, head=head),
        }

    def _first_seen(self, wanted: Sequence[str], newest: Released) -> dict[str, int]:
        """The releases at which keys have appeared; a key that is not there has none."""
        segment = self._segment(newest)
        first = segment.array(FIRST)
        return {
            each: int(first[place]) for each in wanted if (place := segment.find(each)) is not None
        }

    def _lines(
        self,
        wanted: Sequence[str],
        first: dict[str, int],
        released: Sequence[Released],
        *,
        complete: bool,
        head: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Some keys over these releases; one that is in none of them has no key and no points.

        Over windows a point says where its window begins, and whether it has ended. Bins, and all
        quantiles of a list, are those of the newest point alone. Of releases
        that hold changes only, all tell what has changed; a selection of them tells what was known
        at each.
        """
        points: dict[str, list[dict[str, Any]]] = {identity: [] for identity in wanted}
        keys: dict[str, list[Any]] = {}
        newest: dict[str, dict[str, Any]] = {}
        for each, segment in self._segments(released):
            at = {"window": each.window, "release_index": each.release, "time": each.time}
            if head["over"] == "windows":
                at |= {"start": each.start, "end": each.end, "final": each.release == each.planned}
            find = segment.find_fresh if complete else segment.find
            places = {key: place for key in wanted if (place := find(key)) is not None}
            figures = figures_of(self.description, segment, list(places.values()))
            for (identity, place), figure in zip(places.items(), figures, strict=True):
                points[identity].append(at | figure)
                if identity not in keys:
                    keys[identity] = self._key_at(segment, place)
            whole = lists_of(self.description, segment, list(places.values()))
            newest |= dict(zip(places, whole, strict=True))
        for identity, line in points.items():
            if line:
                first.setdefault(identity, line[0]["release_index"])
        return [
            shown_key(identity, keys.get(identity))
            | {"first_seen": first.get(identity), "points": line}
            | newest.get(identity, {})
            for identity, line in points.items()
        ]

    def _key_at(self, segment: Segment, place: int) -> list[Any]:
        return key_values(segment.table.slice(place, 1), self.description.keys)[0]

    def key(self, given: Given) -> dict[str, Any]:
        """The full text of a key that was published."""
        candidates = [self.newest(given["window"])]
        if given["window"] is None:
            candidates += self.reader.last_of_windows(self.description.name, 1000)[::-1]
        for _, segment in self._segments(candidates):
            place = segment.find(given["id"])
            if place is not None:
                return {"id": given["id"], "key": self._key_at(segment, place)}
        raise Refusal(404, "there is no such key")

    def newest(self, window: int | None) -> Released:
        """The newest release of a window, or of the newest window."""
        newest = self.reader.newest(self.description.name, window)
        if newest is None:
            words = "nothing was published yet" if window is None else "there is no such window"
            raise Refusal(404, words)
        return newest

    def page(self, given: Given) -> dict[str, Any]:
        """Rows of all releases, oldest first; `next` goes on."""
        rows: list[dict[str, Any]] = []
        following = None
        for released, segment, places, cursor in self._places(given):
            place = {"release": released.id, "window": released.window}
            rows += [place | row for row in rows_of(self.description, segment, places)]
            following = cursor
        return {"query": self.description.name, "rows": rows, "next": following}

    def tables(self, given: Given) -> tuple[list[Numbered], str | None]:
        """The same rows as tables."""
        tables, following = [], None
        for released, segment, places, cursor in self._places(given):
            table = segment.table.drop_columns(list(OWN)).take(pa.array(places))
            tables.append((released.window, released.release, table))
            following = cursor
        return tables, following

    def newest_values(self, newest: Released) -> pa.Table:
        """The newest value of every key of a release's window, as it was published."""
        return self._segment(newest).table.drop_columns(list(OWN))

    def all(
        self, window: int | None, *, after: int = 0, upto: int | None = None
    ) -> Iterator[Numbered]:
        """Every release (of a window) after a number, up to another, as it was published."""
        while True:
            batch = self.reader.releases(self.description.name, window, after=after, limit=_AT_ONCE)
            for released, segment in self._segments(batch):
                if upto is not None and released.id > upto:
                    return
                yield released.window, released.release, segment.published
            after = batch[-1].id if batch else after
            if len(batch) < _AT_ONCE:
                return

    def _segments(self, released: Iterable[Released]) -> Iterator[tuple[Released, Segment]]:
        """Releases with their contents; those that have gone meanwhile are left out."""
        for each in released:
            with suppress(KeyError):
                yield each, self.reader.segment(each)

    def _segment(self, released: Released) -> Segment:
        for _, segment in self._segments([released]):
            return segment
        raise Refusal(404, "this release is no longer served")

    def _places(self, given: Given) -> Iterator[tuple[Released, Segment, Integers, str | None]]:
        """Releases with the places of their rows on one page, and the cursor behind each."""
        wanted = given["id"] or (None if given["key"] is None else id_of_json(given["key"]))
        number, _, skipped = (given["after"] or "0").partition(".")
        left, skip, after = given["limit"], int(skipped or 0), int(number)
        at = after - 1 if skip else after
        while left > 0:
            batch = self.reader.releases(
                self.description.name, given["window"], after=at, limit=_AT_ONCE
            )
            at = batch[-1].id if batch else at
            for each, segment in self._segments(batch):
                places = segment.fresh
                if wanted is not None:
                    place = segment.find_fresh(wanted)
                    places = places[:0] if place is None else np.array([place])
                start = skip if each.id == after else 0
                shown = places[start : start + left]
                left -= len(shown)
                rest = start + len(shown) < len(places)
                cursor = f"{each.id}.{start + len(shown)}" if rest else str(each.id)
                yield each, segment, shown, cursor
                if left <= 0:
                    return
            if len(batch) < _AT_ONCE:
                return


def _about(released: Released) -> dict[str, Any]:
    return released.facts | {"final": released.release == released.planned}


def _kept_share(segment: Segment, newest: Released) -> float | None:
    """The share of rows that the bounds have kept, as the newest release says; None: not known."""
    if "kept_share" not in segment.table.column_names:
        return None
    mine = np.flatnonzero(segment.array("release_index") == newest.release)
    share = _numbers(segment.array("kept_share")[mine[:1]])
    return share[0] if share else None


def rows_of(
    description: QueryDescription, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """Rows at these places, ready for JSON; long keys are cut, and say how long they are."""
    figures = figures_of(description, segment, places)
    taken = segment.table.select([*description.keys, "trigger_time"])
    taken = taken.take(pa.array(places, pa.int64()))
    times = [None if at is None else at.isoformat() for at in taken["trigger_time"].to_pylist()]
    releases, first = segment.array("release_index"), segment.array(FIRST)
    whole = lists_of(description, segment, places)
    rows = []
    for number, key in enumerate(key_values(taken, description.keys)):
        place = places[number]
        row = shown_key(segment.id_at(place), key) | figures[number] | whole[number]
        row |= {"release_index": int(releases[place]), "time": times[number]}
        rows.append(row | {"first_seen": int(first[place])})
    return rows


def figures_of(
    description: QueryDescription, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """The published numbers of some rows, with their error bars."""
    chosen = np.asarray(places, np.int64)
    columns: dict[str, dict[str, list[Any]]] = {kind: {} for kind in ("values", *SPREADS)}
    nothing = [None] * len(chosen)
    for name in description.figures:
        columns["values"][name] = _numbers(column_of(description, segment, name)[chosen])
        for kind in SPREADS:
            spread = description.spread(name, kind)
            if spread is not None:
                ends = column_of(description, segment, name, spread)
                columns[kind][name] = _numbers(ends[chosen])
            elif kind == "stddev":
                columns[kind][name] = nothing
    held = None
    if "held" in description.schema.names:  # which values repeat earlier ones
        held = segment.table["held"].take(pa.array(chosen)).to_pylist()
    rows = []
    for number in range(len(chosen)):
        row: dict[str, Any] = {
            kind: {name: values[number] for name, values in named.items()}
            for kind, named in columns.items()
            if named
        }
        rows.append(row if held is None else row | {"held": held[number]})
    return rows


def lists_of(
    description: QueryDescription, segment: Segment, places: Sequence[int] | Integers
) -> list[dict[str, Any]]:
    """The bins or quantiles of some rows, with their error bars; nothing where there are none."""
    if not description.lists:
        return [{} for _ in places]
    rows: list[dict[str, Any]] = [
        {"lists": {name: {} for name in description.lists}} for _ in places
    ]
    for name in description.lists:
        found = {"values": name} | {kind: description.spread(name, kind) for kind in SPREADS}
        for kind, column in found.items():
            if column is None:
                continue
            taken = segment.table[column].take(pa.array(places, pa.int64())).to_pylist()
            for row, values in zip(rows, taken, strict=True):
                row["lists"][name][kind] = None if values is None else [_number(v) for v in values]
    return rows


def column_of(
    description: QueryDescription, segment: Segment, figure: str, column: str | None = None
) -> npt.NDArray[Any]:
    """A figure of every row, or another column beside it; of quantiles the middle one."""
    column = column or figure
    if figure not in description.lists:
        return segment.array(column)
    return segment.item(column, description.lists[figure]["middle"])


def shown_key(identity: str, key: list[Any] | None) -> dict[str, Any]:
    """A key that fits into a list; `cut` has the full lengths of texts that were cut.

    >>> shown_key("id", ["a" * 300, 5])["cut"]
    [300, None]
    """
    lengths = [
        len(value) if isinstance(value, str) and len(value) > _LONGEST else None
        for value in key or []
    ]
    if key is None or not any(lengths):
        return {"id": identity, "key": key}
    shown = [value[:_LONGEST] if cut else value for value, cut in zip(key, lengths, strict=True)]
    return {"id": identity, "key": shown, "cut": lengths}


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
        column = simple_column(segment.table[name]).cast(pa.string())
        match = pc.match_substring(column, text, ignore_case=True)
        matches |= pc.fill_null(match, False).to_numpy()
        if text.lower() == "null":
            matches |= pc.is_null(column).to_numpy()
    return np.flatnonzero(matches)


def sorted_rows(values: npt.NDArray[Any], places: Integers, *, falling: bool) -> Integers:
    """The places by their values; rows without one come last, equal ones stay as they are."""
    values = _reals(values)[places]
    order = np.argsort(-values if falling else values, kind="stable")  # NaN goes last
    return places[order]


def clear_orders(values: npt.NDArray[Any], deviations: npt.NDArray[Any] | None) -> list[Any]:
    """For each value but the last: is its order against the next one more than noise?

    Two values count as ordered if they are further apart than `order_threshold` standard
    deviations of their difference. Noise of two keys is independent.
    """
    if deviations is None or len(values) < 2:
        return [None] * max(len(values) - 1, 0)
    values, deviations = _reals(values), _reals(deviations)
    apart = np.abs(np.diff(values))
    needed = order_threshold(len(values) - 1) * np.hypot(deviations[1:], deviations[:-1])
    known = np.isfinite(apart) & np.isfinite(needed)
    return [bool(a) if k else None for a, k in zip(apart > needed, known, strict=True)]


def order_threshold(pairs: int) -> float:
    """How many standard deviations apart make all these orders right together, 19 times in 20.

    >>> round(order_threshold(1), 2), round(order_threshold(20), 2)
    (1.96, 3.02)
    """
    return -float(ndtri((1 - CONFIDENCE) / 2 / max(pairs, 1)))


def _reals(values: npt.NDArray[Any]) -> Reals:
    return values.astype(np.float64, copy=False)


def _numbers(values: Any) -> list[float | int | None]:
    """As JSON has them: what is no finite number is null."""
    return [_number(value) for value in values.tolist()]


def _number(value: float | None) -> float | int | None:
    return None if value is None or not math.isfinite(value) else value


def file_stream(
    kind: str, releases: Iterable[Numbered], empty: pa.Schema, *, escape: bool = False
) -> Iterator[bytes]:
    """The bytes of a file with all releases, as they are made; one without any has a header.

    `escape`: no text of a CSV is taken for a formula.
    """
    tables = (with_numbers(table, window, release) for window, release, table in releases)
    if kind == "jsonl":
        return map(jsonl, tables)
    if kind == "csv":
        return _csv(map(escape_formulas, tables) if escape else tables, empty)
    return _write_tables(tables, empty, pa.ipc.new_stream if kind == "arrow" else pq.ParquetWriter)


def _write_tables(
    tables: Iterable[pa.Table],
    empty: pa.Schema,
    open_writer: Callable[
        [io.BytesIO, pa.Schema], pa.ipc.RecordBatchStreamWriter | pq.ParquetWriter
    ],
) -> Iterator[bytes]:
    file, writer = io.BytesIO(), None
    for table in tables:
        writer = writer or open_writer(file, table.schema)
        writer.write_table(table)
        yield _take(file)
    (writer or open_writer(file, empty)).close()
    yield _take(file)


def _take(file: io.BytesIO) -> bytes:
    """What was written since the last time; writers of Arrow count what they write themselves."""
    content = file.getvalue()
    file.seek(0)
    file.truncate()
    return content


def escape_formulas(table: pa.Table) -> pa.Table:
    """Text that a spreadsheet would take for a formula, behind an apostrophe; numbers stay."""
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        simple = simple_column(column)
        if pa.types.is_string(simple.type):
            escaped = pc.replace_substring_regex(simple, r"\A[=+\-@\t\r]", r"'\0")
            table = table.set_column(number, name, escaped)
    return table


def _csv(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    first = True
    for table in tables:
        text = csv(table)
        yield text if first else text[len(csv(table.slice(0, 0))) :]
        first = False
    if first:
        yield csv(empty.empty_table())
