"""Rows as the engine needs them: ids, window, period, step and grid values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.privacy.state import Secret
from dpstream.records import Integers, Rejected, Words


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Readable rows, sorted by step, window and period; within that in the order they came."""

    units: Words
    groups: Words
    digests: Words
    windows: Integers
    periods: Integers
    steps: Integers
    values: Integers
    keys: pa.Table

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def runs(self) -> list[tuple[int, int, int, int, int]]:
        """(step, window, period, first row, end row) of each run of equal ones."""
        if not len(self):
            return []
        edges = np.zeros(len(self), bool)
        edges[0] = True
        for column in (self.steps, self.windows, self.periods):
            if not is_constant(column):
                edges[1:] |= column[1:] != column[:-1]
        starts = np.flatnonzero(edges)
        ends = [*starts[1:].tolist(), len(self)]
        columns = (self.steps[starts], self.windows[starts], self.periods[starts])
        return list(zip(*(c.tolist() for c in columns), starts.tolist(), ends, strict=True))

    @cached_property
    def bytes(self) -> int:
        """Memory held."""
        ids = (self.units, self.groups, self.digests, self.values)
        places = [c for c in (self.windows, self.periods, self.steps) if not is_constant(c)]
        return sum(a.nbytes for a in (*ids, *places)) + int(self.keys.nbytes)


RowSlice = tuple[Rows, int, int]
"""Rows `first` to `end` of a batch, all of one step, window and period."""


Join = Callable[[list[list[Any]]], list[Any]]
"""Joins the parts of each column; an engine does several at once."""


def join_columns(columns: list[list[Any]]) -> list[Any]:
    """One column after the other."""
    return [np.concatenate(parts) for parts in columns]


def rows_by_window(
    slices: Iterable[RowSlice], join: Join = join_columns
) -> Iterator[tuple[int, int, Rows]]:
    """Rows of each window and period together, in their order."""
    by_place: dict[tuple[int, int], list[RowSlice]] = {}
    for rows, first, end in slices:
        place = (int(rows.windows[first]), int(rows.periods[first]))
        by_place.setdefault(place, []).append((rows, first, end))
    for window, period in sorted(by_place):
        yield window, period, _join(by_place[window, period], window, period, join)


def _join(slices: Sequence[RowSlice], window: int, period: int, join: Join) -> Rows:
    names = ["units", "groups", "digests", "values"]
    size = sum(end - first for _, first, end in slices)
    steps = {int(rows.steps[first]) for rows, first, _ in slices}
    if len(steps) > 1:
        names.append("steps")
    parts = [[getattr(rows, name)[first:end] for rows, first, end in slices] for name in names]
    joined = [part[0] for part in parts] if len(slices) == 1 else join(parts)
    columns: dict[str, Any] = {"steps": np.broadcast_to(np.int64(steps.pop()), size)}
    columns |= dict(zip(names, joined, strict=True))
    keys = [rows.keys.slice(first, end - first) for rows, first, end in slices]
    windows, periods = (np.broadcast_to(np.int64(one), size) for one in (window, period))
    return Rows(**columns, windows=windows, periods=periods, keys=pa.concat_tables(keys))


def in_order(rows: Rows) -> Rows:
    """Sorted by step, window and period; rows that come so are left alone."""
    if len(rows.runs) == 1 or not len(rows):
        return rows
    firsts = [run[:3] for run in rows.runs]
    if all(one <= two for one, two in pairwise(firsts)):
        return rows
    return rows_at(rows, np.lexsort((rows.periods, rows.windows, rows.steps)))


def rows_at(rows: Rows, places: Integers) -> Rows:
    """The rows at some places, in that order."""
    names = ("units", "groups", "digests", "windows", "periods", "steps", "values")
    columns = {name: getattr(rows, name)[places] for name in names}
    return Rows(**columns, keys=rows.keys.take(pa.array(places)))


def id_pairs(ids: Words) -> Any:
    """Ids as single items, for set operations."""
    pair = np.dtype([("first", "<u8"), ("second", "<u8")])
    return np.ascontiguousarray(ids, "<u8").view(pair)[:, 0]


def among(ids: Words, known: Words) -> npt.NDArray[np.bool_]:
    """Which ids are known."""
    if len(ids) * len(known) > _BLOCK:
        return np.isin(id_pairs(ids), id_pairs(known))
    return np.asarray((ids[:, None] == known).all(axis=2).any(axis=1), bool)


def id_order(ids: Words) -> Integers:
    """The places of ids in their order; equal ones keep the order that they have."""
    return np.lexsort((ids[:, 1], ids[:, 0]))


@dataclass(kw_only=True)
class RejectedRows:
    """What became of the other rows of a batch, for the operator alone."""

    rejected: list[Rejected] = field(default_factory=list)
    outside: int = 0
    late: int = 0
    other_keys: int = 0


@dataclass(frozen=True, kw_only=True)
class RowKeys:
    """The keys that hash units, groups, rows and periods: secret.

    Names of units and groups are hashed under the secret's own keys, so that queries over one
    source hash a text once. Which rows of a unit are kept, and what a unit is called in a period,
    depends on keys of the run.
    """

    units: bytes = field(repr=False)
    groups: bytes = field(repr=False)
    digests: bytes = field(repr=False)
    periods: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: Secret, run: bytes) -> RowKeys:
        """Those of a run."""
        return cls(
            units=secret.key("unit ids")[:16],
            groups=secret.key("group ids")[:16],
            digests=secret.key("row digests", run)[:16],
            periods=secret.key("period ids", run)[:16],
        )


_BLOCK = 1 << 12
_FEW = 4 * _BLOCK


def stepwise(function: Callable[[Integers], Integers], times: Integers) -> Integers:
    """function(times), for a function that never falls where it is not negative.

    Logs are mostly written in the order of time. Then such a function is a staircase with few
    steps: it is worked out at the two ends of each block, and within a block only where these
    differ. If it has one value only, that is not written out: the array has one item, many times.
    """
    if len(times) < _FEW or not rising(times):
        return function(times)
    starts = np.arange(0, len(times), _BLOCK)
    stops = np.append(starts[1:], len(times))
    ends = function(np.concatenate([times[starts], times[stops - 1]]))
    first, last = ends[: len(starts)], ends[len(starts) :]
    flat = (first == last) & (first >= 0)
    if flat.all() and (first == first[0]).all():
        return np.broadcast_to(np.int64(first[0]), times.shape)
    values = np.repeat(first, stops - starts)
    for block in np.flatnonzero(~flat):
        part = slice(starts[block], stops[block])
        values[part] = function(times[part])
    return values


def is_constant(column: Integers) -> bool:
    """Is it one item, many times?"""
    return column.strides[0] == 0


def rising(times: Integers) -> bool:
    """Is no time earlier than the one before it?"""
    return bool((times[1:] >= times[:-1]).all())
