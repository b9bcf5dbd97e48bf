"""All that a query has published, oldest first: page by page, or in one file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.connectors.encode import csv, jsonl, with_numbers
from dpstream.records import Integers
from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_history import id_of_json, rows_of
from dpstream.serve.release_segments import OWN, Segment
from dpstream.serve.release_store import Released, ReleaseReader
from dpstream.serve.routing import Given

_AT_ONCE = 64  # releases that are looked up together
FILE_TYPES = {
    "arrow": "application/vnd.apache.arrow.stream",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/jsonl",
}
Numbered = tuple[int, int, pa.Table]
"""Window, release and table."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The releases of one query, as far as they can be seen."""

    description: QueryDescription
    reader: ReleaseReader

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

    def all(self, window: int | None) -> Iterator[Numbered]:
        """Every release (of a window), as it was published."""
        after = 0
        while True:
            batch = self.reader.releases(self.description.name, window, after=after, limit=_AT_ONCE)
            for released in batch:
                yield released.window, released.release, self.reader.segment(released).published
                after = released.id
            if len(batch) < _AT_ONCE:
                return

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
            for each in batch:
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
            if len(batch) < _AT_ONCE:
                return


def _fresh(segment: Segment, wanted: str | None) -> Integers:
    if wanted is None:
        return segment.fresh
    place = segment.find_fresh(wanted)
    return np.array([] if place is None else [place], np.int64)


def file_stream(kind: str, releases: Iterable[Numbered], empty: pa.Schema) -> Iterator[bytes]:
    """The bytes of a file with all releases, as they are made; one without any has a header."""
    tables = (with_numbers(table, window, release) for window, release, table in releases)
    if kind == "jsonl":
        return map(jsonl, tables)
    if kind == "csv":
        return _csv(tables, empty)
    return _write_tables(tables, empty, pa.ipc.new_stream if kind == "arrow" else pq.ParquetWriter)


def _write_tables(
    tables: Iterable[pa.Table],
    empty: pa.Schema,
    open_writer: Callable[[_Pieces, pa.Schema], pa.ipc.RecordBatchStreamWriter | pq.ParquetWriter],
) -> Iterator[bytes]:
    pieces, writer = _Pieces(), None
    for table in tables:
        if writer is None:
            writer = open_writer(pieces, table.schema)
        writer.write_table(table)
        yield pieces.take()
    if writer is None:
        writer = open_writer(pieces, empty)
    writer.close()
    yield pieces.take()


def _csv(tables: Iterable[pa.Table], empty: pa.Schema) -> Iterator[bytes]:
    first = True
    for table in tables:
        text = csv(table)
        yield text if first else text[len(csv(table.slice(0, 0))) :]
        first = False
    if first:
        yield csv(empty.empty_table())


class _Pieces(io.RawIOBase):
    """A file that is given away while it is written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, piece: Any) -> int:
        """Take a piece."""
        self._pieces.append(bytes(piece))
        self._at += len(self._pieces[-1])
        return len(self._pieces[-1])

    def tell(self) -> int:
        """How much was written."""
        return self._at

    def take(self) -> bytes:
        """What was written since the last time."""
        written, self._pieces = b"".join(self._pieces), []
        return written
