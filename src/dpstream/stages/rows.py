"""Rows as the engine needs them: ids, window, period, step and grid values; the rest is set aside.

Everything here looks at one row at a time: what becomes of a row depends on that row and on public
configuration alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.privacy.state import Secret
from dpstream.records import Integers, Rejected, Words
from dpstream.stages import parse
from dpstream.stages.hashing import column_ids, group_ids, row_digests
from dpstream.stages.query import Query
from dpstream.stages.ticks import within_calendar

_REASONS = (
    "",
    "missing unit",
    "unparsable time",
    "unparsable arrival time",
    "not a number",
    "NaN or infinite number",
    "oversize key",
    "time too far ahead of the clock",
)
_CUT = 4096
Codes = npt.NDArray[np.uint8]
"""Why a row cannot be used, by number; 0: it can."""


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
            edges[1:] |= column[1:] != column[:-1]
        starts = np.flatnonzero(edges)
        ends = [*starts[1:].tolist(), len(self)]
        columns = (self.steps[starts], self.windows[starts], self.periods[starts])
        return list(zip(*(c.tolist() for c in columns), starts.tolist(), ends, strict=True))

    @property
    def bytes(self) -> int:
        """Memory held."""
        arrays = (self.units, self.groups, self.digests, self.windows, self.periods, self.steps)
        return sum(a.nbytes for a in arrays) + self.values.nbytes + int(self.keys.nbytes)


@dataclass(kw_only=True)
class Setting:
    """Rows that were set aside, for the operator alone."""

    rejected: list[Rejected] = field(default_factory=list)
    outside: int = 0
    late: int = 0
    other_keys: int = 0


class RowReader:
    """Turns batches of one query's source into rows."""

    def __init__(self, query: Query, secret: Secret, run: bytes) -> None:
        self.query = query
        self.types: dict[str, pa.DataType] = {}
        self._unit_key, self._group_key, self._digest_key, self._period_key = (
            secret.key(use, run)[:16]
            for use in ("unit ids", "group ids", "row digests", "period ids")
        )
        self._public: Words | None = None

    def read(
        self, table: pa.Table, where: str, *, arrived: int | None = None
    ) -> tuple[Rows, Setting]:
        """The rows of a batch, and what was set aside. `arrived`: its step, for a live source."""
        aside = Setting()
        reasons: Codes = np.zeros(len(table), np.uint8)
        columns = self._columns(table, reasons, arrived)
        aside.rejected = _reject(table, reasons, where)
        good = reasons == 0
        inside = good & (columns["windows"] >= 0)
        late = inside & (columns["steps"] > self._last_steps(columns["windows"], inside))
        aside.outside, aside.late = int((good & ~inside).sum()), int(late.sum())
        columns = _filtered(columns, inside & ~late)
        columns["groups"] = self._group_ids(columns["keys"], len(columns["steps"]))
        if self.query.public_keys is not None:  # other keys go before anything is bounded
            known = np.isin(_pairs(columns["groups"]), _pairs(self.public_ids()))
            aside.other_keys = int((~known).sum())
            columns = _filtered(columns, known)
        return _in_order(self._identified(columns)), aside

    def _columns(self, table: pa.Table, reasons: Codes, arrived: int | None) -> dict[str, Any]:
        """Every column that matters, parsed; rows that cannot be used are marked."""
        query = self.query
        units = self._typed(table, query.unit)
        _mark(reasons, 1, _missing(units))
        moments, arrivals = self._times(table, reasons)
        values = self._values(table, reasons)
        keys = pa.table({name: self._typed(table, name) for name in query.keys})
        for name in query.keys:
            _mark(reasons, 6, _oversize(keys[name], query.max_key_bytes))
        if arrived is None:
            steps = query.schedule.step_of(arrivals)
        else:
            steps = np.full(len(table), arrived, np.int64)
            _mark(reasons, 7, self._ahead(moments, arrived))
        return {
            "units": units,
            "keys": keys,
            "moments": moments,
            "windows": query.schedule.window_of(moments),
            "steps": steps,
            "values": values,
        }

    def _last_steps(self, windows: Integers, inside: parse.Mask) -> Integers:
        last = np.zeros(len(windows), np.int64)
        last[inside] = self.query.schedule.last_steps(windows[inside])
        return last

    def _identified(self, columns: dict[str, Any]) -> Rows:
        """Ids and digests in place of units, keys and times."""
        moments, groups, values = columns["moments"], columns["groups"], columns["values"]
        periods = self._periods(moments)
        units = self._with_period(column_ids(columns["units"], self._unit_key), periods)
        content = [units, groups, columns["windows"], moments, *values.T]
        return Rows(
            units=units,
            groups=groups,
            digests=row_digests(content, self._digest_key),
            windows=columns["windows"],
            periods=periods,
            steps=columns["steps"],
            values=values,
            keys=columns["keys"],
        )

    def public_ids(self) -> Words:
        """The ids of the public groups, in the order of the query's list."""
        if self._public is None:
            self._public = self._group_ids(self.public_table(), len(self.query.public_keys or ()))
        return self._public

    def public_table(self) -> pa.Table:
        """The public groups' key columns, in the types of the data."""
        query = self.query
        columns = {}
        for number, name in enumerate(query.keys):
            kind = self.types[name]
            listed = [row[number] for row in query.public_keys or ()]
            if parse.is_text(kind):
                listed = [None if item is None else str(item) for item in listed]
            try:
                columns[name] = pa.array(listed, kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise InvalidInput(
                    f"public_keys of column {name!r} must fit its type {kind}: {error}"
                ) from None
        return pa.table(columns)

    def learn(self, declared: dict[str, pa.DataType] | None) -> None:
        """Fix the types of unit and keys by what the source declares: text if nothing."""
        for name in (self.query.unit, *self.query.keys):
            kind = pa.string() if declared is None else declared.get(name, pa.string())
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            self.types.setdefault(name, kind)

    def _typed(self, table: pa.Table, name: str) -> pa.Array:
        """A column in the type it has in this run: 5 and "5" must not become two users."""
        array = parse.whole_column(table[name])
        kind = self.types[name]
        if array.type.equals(kind):
            return array
        try:
            return pc.cast(array, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InvalidInput(
                f"column {name!r} was {kind} when this query began and is {array.type} now; give "
                "all files one type"
            ) from None

    def _times(self, table: pa.Table, reasons: Codes) -> tuple[Integers, Integers]:
        query = self.query
        if query.time is None:
            zero = np.zeros(len(table), np.int64)
            return zero, zero
        moments, readable = self._parsed(table, query.time)
        _mark(reasons, 2, ~readable)
        if query.arrival is None:
            return moments, moments
        arrivals, readable = self._parsed(table, query.arrival)
        _mark(reasons, 3, ~readable)
        return moments, arrivals

    def _parsed(self, table: pa.Table, name: str) -> tuple[Integers, parse.Mask]:
        query = self.query
        found, readable = parse.times(
            table[name],
            name,
            zone=query.time_zone,
            unit=query.time_unit_micros,
            origin=query.time_origin,
        )
        return found, readable & within_calendar(found)

    def steps_of(self, table: pa.Table) -> Integers:
        """The step of each row of a table with the time columns alone; -1 if it has none."""
        reasons: Codes = np.zeros(len(table), np.uint8)
        moments, arrivals = self._times(table, reasons)
        steps = self.query.schedule.step_of(arrivals)
        none = (reasons != 0) | (self.query.schedule.window_of(moments) < 0)
        return np.where(none, -1, steps)

    def _values(self, table: pa.Table, reasons: Codes) -> Integers:
        columns = []
        for measure in self.query.measures:
            if measure.kind != "value":
                continue
            values, readable = parse.numbers(table[measure.column], measure.column)
            _mark(reasons, 4, ~readable)
            _mark(reasons, 5, np.isinf(values))
            columns.append(measure.on_grid(values))
        return np.stack(columns, axis=1) if columns else np.zeros((len(table), 0), np.int64)

    def _ahead(self, moments: Integers, arrived: int) -> parse.Mask:
        clock = self.query.schedule.time_of(arrived)
        if clock is None:
            return np.zeros(len(moments), bool)
        ahead: parse.Mask = moments > clock + self.query.max_ahead
        return ahead

    def _group_ids(self, keys: pa.Table, count: int) -> Words:
        if not self.query.keys:
            return np.zeros((count, 2), np.uint64)
        return group_ids(keys.columns, self._group_key)

    def _periods(self, moments: Integers) -> Integers:
        ticks = self.query.periods
        return np.zeros(len(moments), np.int64) if ticks is None else ticks.before(moments)

    def _with_period(self, ids: Words, periods: Integers) -> Words:
        """A user in another period is another unit, with an id of its own."""
        if self.query.periods is None or not len(ids):
            return ids
        known, where = np.unique(periods, return_inverse=True)
        masks = row_digests([known.astype(np.int64)], self._period_key)
        return ids ^ masks[where]


def _mark(reasons: Codes, code: int, bad: parse.Mask) -> None:
    """Note a reason; the first one of a row counts."""
    reasons[bad & (reasons == 0)] = code


def _filtered(columns: dict[str, Any], kept: parse.Mask) -> dict[str, Any]:
    """The rows that are kept, of NumPy and Arrow columns alike."""
    if kept.all():
        return columns
    mask = pa.array(kept)
    return {
        name: column[kept] if isinstance(column, np.ndarray) else column.filter(mask)
        for name, column in columns.items()
    }


def _missing(units: pa.Array) -> parse.Mask:
    missing = units.is_null().to_numpy(zero_copy_only=False)
    if parse.is_text(units.type):
        empty = pc.fill_null(pc.equal(units, ""), True)
        missing = missing | empty.to_numpy(zero_copy_only=False)
    return np.asarray(missing, bool)


def _oversize(column: pa.ChunkedArray, most: int) -> parse.Mask:
    if not (parse.is_text(column.type) or pa.types.is_binary(column.type)):
        return np.zeros(len(column), bool)
    lengths = pc.fill_null(pc.binary_length(column), 0)
    return np.asarray(lengths.to_numpy() > most, bool)


def _pairs(ids: Words) -> Any:
    """Ids as single items, for set operations."""
    pair = np.dtype([("first", "<u8"), ("second", "<u8")])
    return np.ascontiguousarray(ids, "<u8").view(pair)[:, 0]


def _in_order(rows: Rows) -> Rows:
    """Sorted by step, window and period; rows that come so are left alone."""
    if len(rows.runs) == 1 or not len(rows):
        return rows
    firsts = [run[:3] for run in rows.runs]
    if all(one <= two for one, two in pairwise(firsts)):
        return rows
    order = np.lexsort((rows.periods, rows.windows, rows.steps))
    return Rows(
        **{
            name: getattr(rows, name)[order]
            for name in ("units", "groups", "digests", "windows", "periods", "steps", "values")
        },
        keys=rows.keys.take(pa.array(order)),
    )


def _reject(table: pa.Table, reasons: Codes, where: str) -> list[Rejected]:
    bad = np.flatnonzero(reasons)
    raw: Iterable[dict[str, object]] = table.take(pa.array(bad)).to_pylist() if len(bad) else []
    return [
        Rejected(
            where=f"{where}, row {number}",
            reason=_REASONS[reasons[number]],
            row=json.dumps(row, default=str, ensure_ascii=False)[:_CUT],
        )
        for number, row in zip(bad.tolist(), raw, strict=True)
    ]
