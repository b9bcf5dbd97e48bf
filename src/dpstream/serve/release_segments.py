"""One release as one Arrow file that answers questions without being read whole.

Beside the published columns a segment has its own, whose names begin with `dpstream.`:

high, low       the digest of the row's key
order           rows in the order of their digests
first           the release of the window in which the row's key was first there
fresh           is the row part of this release, or carried over from an earlier one?

Queries that publish only what has changed carry over the rest, so the newest segment of a window
always holds the newest value of each of its keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.records import Integers
from dpstream.rows.column_values import python_values

Digests = npt.NDArray[np.uint64]
"""Rows x 2 words."""
KEY_ID = r"^[0-9a-f]{32}$"
HIGH, LOW, ORDER, FIRST, FRESH = OWN = tuple(
    f"dpstream.{name}" for name in ("high", "low", "order", "first", "fresh")
)


def as_json(value: Any) -> Any:
    """A key's value as JSON can hold it; no two values of a column look alike.

    >>> [as_json(value) for value in ("a", None, 5, float("nan"), date(2024, 5, 1), b"\\x00")]
    ['a', None, 5, 'nan', '2024-05-01', '00']
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def key_values(table: pa.Table, names: Sequence[str]) -> list[list[Any]]:
    """The key of every row; a release without keys has the empty one."""
    columns = [[as_json(value) for value in python_values(table[name])] for name in names]
    if not columns:
        return [[] for _ in range(table.num_rows)]
    return [list(key) for key in zip(*columns, strict=True)]


def key_id(key: Sequence[Any]) -> str:
    """32 hexadecimal digits that stand for a key.

    >>> key_id(["home", None])
    'bdbba6aec7a253403a2cba4366c98cf1'
    """
    return blake2b(_canonical(key), digest_size=16).hexdigest()


def digests(keys: Sequence[Sequence[Any]]) -> Digests:
    """The same as two words each."""
    joined = b"".join(blake2b(_canonical(key), digest_size=16).digest() for key in keys)
    words: Digests = np.frombuffer(joined, ">u8").reshape(-1, 2).astype(np.uint64)
    return words


def id_of(high: int, low: int) -> str:
    """The id of two words."""
    return f"{high:016x}{low:016x}"


def _canonical(key: Sequence[Any]) -> bytes:
    return json.dumps(list(key), separators=(",", ":")).encode()


_BOUNDS = "bounds"  # in the metadata of a segment


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A release, and where its keys are; columns are looked at in place."""

    table: pa.Table
    _arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers; without a copy, unless it has nulls, which become NaN."""
        values = self._arrays.get(name)
        if values is None:
            column = self.table[name]
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            values = self._arrays[name] = array.to_numpy(zero_copy_only=False)
        return values

    def item(self, name: str, place: int) -> npt.NDArray[Any]:
        """One number of each list in a column; NaN where it is not known."""
        values = self._arrays.get(f"{name}[{place}]")
        if values is None:
            found = pc.list_element(self.table[name], place).combine_chunks().cast(pa.float64())
            values = self._arrays[f"{name}[{place}]"] = found.to_numpy(zero_copy_only=False)
        return values

    @property
    def published(self) -> pa.Table:
        """The release as it was published."""
        shown = self.table.drop_columns(list(OWN))
        return shown if self.all_fresh else shown.filter(pa.array(self.array(FRESH) == 1))

    @cached_property
    def all_fresh(self) -> bool:
        """Are all rows of this release?"""
        return bool(self.array(FRESH).all())

    @property
    def fresh(self) -> Integers:
        """The rows that were published now."""
        return np.arange(len(self)) if self.all_fresh else np.flatnonzero(self.array(FRESH))

    def id_at(self, place: int) -> str:
        """The id of a row's key."""
        return id_of(int(self.array(HIGH)[place]), int(self.array(LOW)[place]))

    def find(self, identity: str) -> int | None:
        """The row of a key."""
        high, low = (np.uint64(int(word, 16)) for word in (identity[:16], identity[16:]))
        highs, lows, order = (self.array(name) for name in (HIGH, LOW, ORDER))
        at = int(np.searchsorted(highs, high, sorter=order))
        while at < len(order) and highs[order[at]] == high:
            if lows[order[at]] == low:
                return int(order[at])
            at += 1
        return None

    def find_fresh(self, identity: str) -> int | None:
        """The row of a key, if it was published now."""
        place = self.find(identity)
        return None if place is None or not self.array(FRESH)[place] else place

    @property
    def bounds(self) -> dict[str, Any] | None:
        """The bounds of its window, and since when they hold, where they are chosen."""
        told = (self.table.schema.metadata or {}).get(_BOUNDS.encode())
        return None if told is None else dict(json.loads(told))

    @property
    def digests(self) -> Digests:
        """By row, rows x 2."""
        return np.stack([self.array(HIGH), self.array(LOW)], axis=1)


def build(
    table: pa.Table,
    *,
    keys: Sequence[str],
    release: int,
    before: Segment | None,
    carry: bool,
) -> Segment:
    """The segment of a release, after the one `before` it in its window."""
    told = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}")).get("bounds")
    table = table.replace_schema_metadata(None).combine_chunks()
    ids = _digests(table, keys, before)
    fresh = np.ones(len(ids), np.uint8)
    first = np.full(len(ids), release, np.int64)
    if before is not None:
        known, at = _places(before.digests, ids)
        first[known] = before.array(FIRST)[at[known]]
        if carry:
            left = np.ones(len(before), bool)
            left[at[known]] = False
            old = before.table.filter(pa.array(left)).drop_columns(list(OWN))
            table = pa.concat_tables([table, old]).combine_chunks()
            ids = np.concatenate([ids, before.digests[left]])
            first = np.concatenate([first, before.array(FIRST)[left]])
            fresh = np.concatenate([fresh, np.zeros(len(ids) - len(fresh), np.uint8)])
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    own = (ids[:, 0], ids[:, 1], order.astype(np.int64), first, fresh)
    for name, values in zip(OWN, own, strict=True):
        table = table.append_column(name, pa.array(values))
    metadata = None if told is None else {_BOUNDS: json.dumps(told)}
    return Segment(table=table.replace_schema_metadata(metadata))


def encode(segment: Segment) -> bytes:
    """As an Arrow file with one batch, uncompressed: it is read in place."""
    file = pa.BufferOutputStream()
    table = segment.table.combine_chunks()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    written: bytes = file.getvalue().to_pybytes()
    return written


def decode(content: pa.Buffer | pa.NativeFile | bytes) -> Segment:
    """From a file in memory, or one that is mapped into it."""
    return Segment(table=pa.ipc.open_file(content).read_all())


def _digests(table: pa.Table, keys: Sequence[str], before: Segment | None) -> Digests:
    """Of every row; keys mostly stand where they stood, and are not looked at again then."""
    same = 0
    if before is not None and keys:
        most = min(len(before), table.num_rows)
        mine, old = table.select(keys), before.table.select(keys)
        if mine.schema.equals(old.schema) and mine.slice(0, most).equals(old.slice(0, most)):
            same = most
    fresh = digests(key_values(table.slice(same), keys))
    return fresh if not same or before is None else np.concatenate([before.digests[:same], fresh])


def _places(known: Digests, wanted: Digests) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Which of the wanted are known, and where."""
    if known.shape == wanted.shape and np.array_equal(known, wanted):
        return np.ones(len(wanted), bool), np.arange(len(wanted))
    at = pc.index_in(_pairs(wanted), value_set=_pairs(known))
    is_known = at.is_valid().to_numpy(zero_copy_only=False)
    return is_known, at.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _pairs(ids: Digests) -> pa.Array:
    """Both words as one value."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(ids))]
    return pa.Array.from_buffers(pa.binary(16), len(ids), buffers)
