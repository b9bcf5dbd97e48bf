"""What the rows of each unit in a window become: groups of them, sessions, or numbered rows.

Everything here looks at the rows of one unit at a time: the rows of others change neither how many
inner rows a unit has, nor what is in them. Nor does the order in which rows came: among rows of one
time their keyed digests decide, and sums are added up in the order of digests.

Proof: `docs/soundness/unit_rows.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.group_by.hash_tables import HashTable
from dpstream.query.per_unit import HeldRows, Span
from dpstream.query.windows import in_words
from dpstream.records import Integers, Words
from dpstream.rows.column_values import canonical
from dpstream.rows.parse import whole_column

MOMENT = pa.timestamp("us", tz="UTC")
OF_ROW = " of each row"
"""What the names of columns that wait end with."""
Kind = Literal["rows", "values", "distinct", "sum", "avg", "min", "max", "first", "last"]
_LARGEST = float(2**62)
_LARGEST_EXACT = float(2**53)  # below, floats that are whole add up exactly in any order


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the rows of an inner group: of a column that is held, or of their times."""

    name: str
    kind: Kind
    column: str | None = None


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """The places of rows among those of their session (or unit) with equal `parts`, from 1.

    `order`: columns (None: the time), is it descending, do NULLs come first?
    """

    name: str
    parts: tuple[str, ...]
    order: tuple[tuple[str | None, bool, bool], ...]


@dataclass(frozen=True, kw_only=True)
class InnerRows:
    """What becomes of a unit's rows of a window.

    They are put into groups by their session (`gap`: rows that are no further apart are of one) and
    by `keys`, columns that are held, and each group is a row with `figures`. With `each_row` every
    row stays one, with `numberings`.
    """

    keys: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    gap: int | None = None
    each_row: bool = False
    numberings: tuple[Numbering, ...] = ()
    grows: ClassVar[bool] = False
    across_windows: ClassVar[bool] = False
    most: ClassVar[None] = None

    @property
    def text(self) -> str:
        """All of it: part of what fixes a query's releases, so it never changes."""
        by = [*map(repr, self.keys), *([f"SESSION {self.gap}"] if self.gap is not None else [])]
        parts = [f"{each.kind} OF {each.column!r} AS {each.name!r}" for each in self.figures]
        parts += [
            f"NUMBER BY {each.parts!r} IN {each.order!r} AS {each.name!r}"
            for each in self.numberings
        ]
        rows = "EACH ROW" if self.each_row else f"GROUPS BY ({', '.join(by)})"
        return f"{rows} {', '.join(parts)}"

    @property
    def in_words(self) -> str:
        """The same for people."""
        if self.each_row:
            return "each row stays a row, numbered among those of its unit and window"
        keys = ", ".join(name.removesuffix(OF_ROW) for name in self.keys)
        if self.gap is None:
            return f"one row for each {keys}" if keys else "one row"
        session = f"session (rows at most {in_words(self.gap)} apart)"
        return f"one row for each {session}" + (f" and {keys}" if keys else "")

    @property
    def at_most_one(self) -> bool:
        """Has a unit at most one inner row in a window?"""
        return not self.each_row and not self.keys and self.gap is None

    @property
    def made_of(self) -> dict[str, tuple[str, ...]]:
        """The columns that wait behind each column of inner rows."""
        made: dict[str, tuple[str, ...]] = {}
        for figure in self.figures:
            made[figure.name] = () if figure.column is None else (figure.column,)
        for numbering in self.numberings:
            by = (column for column, _, _ in numbering.order if column is not None)
            made[numbering.name] = (*numbering.parts, *by)
        return made

    def __call__(
        self, rows: HeldRows, span: Span, step: int | None = None
    ) -> tuple[Words, pa.Table]:
        """The inner rows: whose they are, and a table of keys, figures, times and places."""
        held = _Held(rows, self.gap)
        first, columns = (
            self._numbered(held)
            if self.each_row
            else self._grouped(held, held.groups if self.keys else held.sessions)
        )
        taken = pa.array(first)
        columns |= {name: held.column(name).take(taken) for name in self.keys}
        columns |= times_of_window(span, len(first))
        if self.gap is not None:
            edges = zip(("session_start", "session_end"), held.session_edges, strict=True)
            columns |= {name: as_moments(times[held.sessions[first]]) for name, times in edges}
        return rows.units[first], pa.table(columns)

    def _numbered(self, held: _Held) -> tuple[Integers, dict[str, Any]]:
        columns: dict[str, Any] = {name: held.column(name) for name in held.rows.keys.column_names}
        columns |= {each.name: held.numbers(each) for each in self.numberings}
        return np.arange(held.size), columns

    def _grouped(self, held: _Held, groups: Integers) -> tuple[Integers, dict[str, Any]]:
        first = first_places(groups)
        columns = {each.name: held.figure(each, groups, len(first)) for each in self.figures}
        return first, columns or {"": pa.nulls(len(first))}


def times_of_window(span: Span, size: int) -> dict[str, pa.Array]:
    """The columns that say from when to when the window of inner rows reaches."""
    edges = zip(("window_start", "window_end"), span, strict=True)
    return {
        name: pa.repeat(pa.scalar(time, MOMENT), size) for name, time in edges if time is not None
    }


def as_moments(times: Integers) -> pa.Array:
    """Microseconds as instants."""
    return pa.array(np.ascontiguousarray(times), pa.int64()).view(MOMENT)


def first_places(groups: Integers) -> Integers:
    """The first place of each group, of groups numbered from 0 without gaps."""
    size = int(groups.max()) + 1 if len(groups) else 0
    first = np.zeros(size, np.int64)
    first[groups[::-1]] = np.arange(len(groups))[::-1]
    return first


class _Held:
    """The rows of a window that have waited, and what several figures need of them."""

    def __init__(self, rows: HeldRows, gap: int | None) -> None:
        self.rows, self._gap = rows, gap
        self.size, self.moments = len(rows.values), rows.values[:, 0]
        self._columns: dict[str, pa.Array] = {}
        self._ranks: dict[str, tuple[Integers, Integers, pa.Array]] = {}
        self._edges: dict[tuple[int, str], Integers] = {}

    @cached_property
    def units(self) -> Integers:
        """By row: the number of its unit."""
        return HashTable().rows(np.ascontiguousarray(self.rows.units))

    @cached_property
    def sessions(self) -> Integers:
        """By row: the number of its session, or of its unit where there are none."""
        if self._gap is None:
            return self.units
        order = np.lexsort((self.moments, self.units))
        new = np.ones(self.size, bool)
        units, moments = self.units[order], self.moments[order]
        new[1:] = (units[1:] != units[:-1]) | (moments[1:] - moments[:-1] > self._gap)
        sessions: Integers = np.empty(self.size, np.int64)
        sessions[order] = np.cumsum(new) - 1
        return sessions

    @cached_property
    def session_edges(self) -> tuple[Integers, Integers]:
        """When each session begins and ends: the times of its first and last row."""
        size = int(self.sessions.max()) + 1 if self.size else 0
        starts, ends = np.full(size, 2**62), np.full(size, -(2**62))
        np.minimum.at(starts, self.sessions, self.moments)
        np.maximum.at(ends, self.sessions, self.moments)
        return starts, ends

    @cached_property
    def groups(self) -> Integers:
        """By row: the number of its session (or unit) with its own keys."""
        keys = HashTable().rows(np.ascontiguousarray(self.rows.groups))
        return numbered_pairs(self.sessions, keys)

    def column(self, name: str) -> pa.Array:
        """A column that is held."""
        if name not in self._columns:
            self._columns[name] = whole_column(self.rows.keys[name])
        return self._columns[name]

    def _valid(self, name: str) -> Integers:
        """The places of rows that have a value."""
        return np.flatnonzero(np.asarray(self.column(name).is_valid(), bool))

    def ranks(self, name: str) -> tuple[Integers, Integers, pa.Array]:
        """Places with a value, the rank of each value, and the values in order."""
        if name not in self._ranks:
            places = self._valid(name)
            coded = canonical(self.column(name)).take(pa.array(places)).dictionary_encode()
            values = coded.dictionary
            sortable = pc.cast(values, pa.int8()) if pa.types.is_boolean(values.type) else values
            order = np.asarray(pc.sort_indices(sortable), np.int64)
            rank: Integers = np.empty(len(order), np.int64)
            rank[order] = np.arange(len(order))
            ranks = rank[np.asarray(coded.indices, np.int64)]
            self._ranks[name] = places, ranks, values.take(pa.array(order))
        return self._ranks[name]

    def numbers(self, each: Numbering) -> pa.Array:
        """The places of rows among those of their session (or unit) and parts."""
        parts = self.sessions
        for part in each.parts:
            parts = numbered_pairs(parts, self._ranks_of_all(part, nulls_first=True))
        by: list[Any] = []
        for name, down, nulls_first in each.order:
            ranks = self.moments if name is None else self._ranks_of_all(name, nulls_first != down)
            by.append(-ranks if down else ranks)
        digests = self.rows.digests
        order = np.lexsort((digests[:, 1], digests[:, 0], *by[::-1], parts))
        begins = np.ones(self.size, bool)
        begins[1:] = parts[order][1:] != parts[order][:-1]
        at = np.arange(self.size)
        places: Integers = np.empty(self.size, np.int64)
        places[order] = at - np.maximum.accumulate(np.where(begins, at, 0)) + 1
        return pa.array(places)

    def _ranks_of_all(self, name: str, nulls_first: bool) -> Integers:
        """A rank for every row, NULL too."""
        places, ranks, values = self.ranks(name)
        of_all = np.full(self.size, -1 if nulls_first else len(values))
        of_all[places] = ranks
        return of_all

    def figure(self, each: Figure, groups: Integers, size: int) -> pa.Array:
        """A figure of every group."""
        if each.kind in ("first", "last"):
            return self._edge_values(each, groups, size)
        if each.kind == "rows":
            return pa.array(np.bincount(groups, minlength=size))
        if each.column is None:
            return self._time(each.kind, groups, size)
        if each.kind in ("min", "max"):
            return self._extreme(each.column, each.kind, groups, size)
        if each.kind in ("sum", "avg"):
            return self._total(each.column, each.kind, groups, size)
        places = self._valid(each.column)
        if each.kind == "distinct":
            places, ranks, values = self.ranks(each.column)
            pairs = np.unique(groups[places] * max(len(values), 1) + ranks)
            return pa.array(np.bincount(pairs // max(len(values), 1), minlength=size))
        return pa.array(np.bincount(groups[places], minlength=size))

    def _time(self, kind: str, groups: Integers, size: int) -> pa.Array:
        times = np.full(size, 2**62 if kind == "min" else -(2**62))
        (np.minimum if kind == "min" else np.maximum).at(times, groups, self.moments)
        return as_moments(times)

    def _extreme(self, name: str, kind: str, groups: Integers, size: int) -> pa.Array:
        """The least or largest value; NULL where there is none."""
        places, ranks, values = self.ranks(name)
        none = len(values) if kind == "min" else -1
        best = np.full(size, none)
        (np.minimum if kind == "min" else np.maximum).at(best, groups[places], ranks)
        return values.take(pa.array(np.where(best == none, 0, best), mask=best == none))

    def _edge_values(self, each: Figure, groups: Integers, size: int) -> pa.Array:
        """The value of the first or last row, by time; of one time, that with the least digest."""
        key = (id(groups), each.kind)
        if key not in self._edges:
            times = np.asarray(self._time("min" if each.kind == "first" else "max", groups, size))
            at = np.flatnonzero(self.moments == times.view(np.int64)[groups])
            words = self.rows.digests[at]
            order = at[np.lexsort((words[:, 1], words[:, 0]))[::-1]]
            edge: Integers = np.zeros(size, np.int64)
            edge[groups[order]] = order  # the least digest is written last
            self._edges[key] = edge
        edge = self._edges[key]
        if each.column is None:
            return as_moments(self.moments[edge])
        return self.column(each.column).take(pa.array(edge))

    def _total(self, name: str, kind: str, groups: Integers, size: int) -> pa.Array:
        """The sum or the mean of the values; NULL where there is none, or beyond all numbers."""
        places, column = self._valid(name), self.column(name)
        taken = column.take(pa.array(places))  # a safe cast refuses numbers, and tells them
        values = np.asarray(taken.cast(pa.float64(), safe=False), np.float64)
        counts = np.bincount(groups[places], minlength=size)
        whole = bool((np.floor(values) == values).all())
        if not whole or np.abs(values).sum() >= _LARGEST_EXACT:
            words = self.rows.digests[places]  # else the order of rows would be in the last bits
            order = np.lexsort((words[:, 1], words[:, 0]))
            places, values = places[order], values[order]
        sums = np.bincount(groups[places], weights=values, minlength=size)
        nothing = (counts == 0) | ~np.isfinite(sums)
        if kind == "avg":
            with np.errstate(divide="ignore", invalid="ignore"):
                return pa.array(np.where(nothing, 0.0, sums / np.maximum(counts, 1)), mask=nothing)
        if not pa.types.is_integer(column.type):
            return pa.array(np.where(nothing, 0.0, sums), mask=nothing)
        nothing |= np.abs(sums) >= _LARGEST
        exact: Integers = np.zeros(size, np.int64)
        taken = column.take(pa.array(places)).cast(pa.int64(), safe=False)  # modulo 2^64
        np.add.at(exact, groups[places], np.asarray(taken, np.int64))
        return pa.array(exact, mask=nothing)


def numbered_pairs(one: Integers, other: Integers) -> Integers:
    """A number for each pair of numbers, from 0 without gaps."""
    least = int(other.min()) if len(other) else 0
    width = (int(other.max()) - least + 1) if len(other) else 1
    _, numbers = np.unique(one * width + (other - least), return_inverse=True)
    return np.asarray(numbers, np.int64)
