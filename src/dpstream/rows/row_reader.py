"""Batches of a source become rows of the engine; what cannot be used is rejected.

Everything here looks at one row at a time: what becomes of a row depends on that row and on public
configuration alone. No row may stop the feed or touch another row: whatever is in it, it is read,
or rejected with a reason, spelled out for the operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.privacy.state import Secret
from dpstream.query.column_types import Types, is_text
from dpstream.query.per_unit import ROW, PerUnit
from dpstream.query.row_spec import Prepare, RowSpec
from dpstream.query.windows import within_calendar
from dpstream.records import Integers, Rejected, Words
from dpstream.rows import number_text, parse
from dpstream.rows.column_values import (
    in_type,
    never_becomes,
    public_keys,
    python_values,
    types_before_rows,
    types_of,
    unit_in_type,
    unwritable,
)
from dpstream.rows.number_text import one_number_spelling
from dpstream.rows.row_batch import (
    RejectedRows,
    RowKeys,
    Rows,
    among,
    id_order,
    in_order,
    stepwise,
)
from dpstream.rows.row_ids import RowIds, column_ids

Codes = npt.NDArray[np.uint8]
"""By row: one more than the place of its `Reason`; 0 for a row that can be used."""
T = TypeVar("T")
Once = Callable[..., Any]
"""once(*what, make=make): what `make` returns, or has returned under this name."""


class Reason(StrEnum):
    """Why a row cannot be used."""

    MISSING_UNIT = "missing unit"
    TIME = "unparsable time"
    ARRIVAL = "unparsable arrival time"
    NUMBER = "not a number"
    NOT_FINITE = "NaN or infinite number"
    OVERSIZE_KEY = "oversize key"
    AHEAD = "time too far ahead of the clock"
    NOT_UTF8 = "invalid UTF-8"
    TYPE = "not of its column's type"
    UNWRITABLE = "key beyond dates and numbers that every sink can write"


_REASONS = tuple(Reason)
_LONGEST_SHOWN = 4096  # characters of a rejected row
_MANY = 1000  # public groups
_NO_KEY = bytes(16)  # of ids that only tell whether two values are equal


def flag(reasons: Codes, reason: Reason, bad: parse.Mask) -> None:
    """Note a reason; the first one of a row counts."""
    if bad.any():
        reasons[bad & (reasons == 0)] = _REASONS.index(reason) + 1


def readable_text(table: pa.Table, name: str) -> tuple[pa.Array, parse.Mask]:
    """A column, with "" where it is text that is not UTF-8, and where that is."""
    array = parse.whole_column(table[name])
    bad = np.zeros(len(table), bool)
    if is_text(array.type) and not number_text.is_ascii(array):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            raw = array.cast(pa.binary()).to_pylist()
            bad[:] = [item is not None and not _is_utf8(item) for item in raw]
            cells = [b"" if wrong else item for item, wrong in zip(raw, bad, strict=True)]
            array = pa.array(cells, pa.binary()).cast(pa.string())
    return array, bad


def _is_utf8(raw: bytes) -> bool:
    return raw.decode(errors="ignore").encode() == raw


def missing(units: pa.Array) -> parse.Mask:
    """Where no unit is named."""
    if not units.null_count and (not is_text(units.type) or number_text.lengths(units)[0] > 0):
        return np.zeros(len(units), bool)
    none = units.is_null().to_numpy(zero_copy_only=False)
    if is_text(units.type):
        empty = pc.fill_null(pc.equal(units, ""), True)
        none = none | empty.to_numpy(zero_copy_only=False)
    return np.asarray(none, bool)


def oversize(column: pa.ChunkedArray, most: int) -> parse.Mask:
    """Where a key is longer than it may be."""
    if not (is_text(column.type) or pa.types.is_binary(column.type)):
        return np.zeros(len(column), bool)
    if all(number_text.lengths(chunk)[1] <= most for chunk in column.chunks):
        return np.zeros(len(column), bool)
    sizes = pc.fill_null(pc.binary_length(column), 0)
    return np.asarray(sizes.to_numpy() > most, bool)


def reject(table: pa.Table, reasons: Codes, where: str) -> list[Rejected]:
    """The rows that were marked, with their reasons."""
    bad = np.flatnonzero(reasons)
    if not len(bad):
        return []
    raw = table.take(pa.array(bad))
    columns = [python_values(parse.whole_column(raw[name])) for name in raw.column_names]
    rows = [dict(zip(raw.column_names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return [
        Rejected(
            where=f"{where}, row {number}",
            reason=_REASONS[reasons[number] - 1].value,
            row=json.dumps(row, default=str, ensure_ascii=False)[:_LONGEST_SHOWN],
        )
        for number, row in zip(bad.tolist(), rows, strict=True)
    ]


def rows_of_unit(
    rows: list[str], unit: Any, kind: pa.DataType, name: str
) -> tuple[parse.Mask, parse.Mask]:
    """Which texts of rejected rows are a unit's; and which others do not tell whose they are.

    A row that is JSON names its unit in the column `name`, of type `kind`. Any other (a line that
    could not be read, a row that was cut) counts as the unit's if the unit's text is a word of it.
    """
    cells = [_cell(row, name) for row in rows]
    unread = never_becomes(pa.string(), kind)
    untold = np.array([cell is None or unread for cell in cells], bool)
    mine = column_ids(one_number_spelling(unit_in_type(unit, kind, name)), _NO_KEY)
    values, lost = in_type(pa.array(cells, pa.string()), kind)
    named = column_ids(one_number_spelling(values), _NO_KEY)
    theirs = (named == mine).all(axis=1) & ~lost & ~untold
    word = re.compile(rf"(?<!\w){re.escape(str(unit).strip())}(?!\w)")
    theirs[untold] = [bool(word.search(rows[at])) for at in np.flatnonzero(untold)]
    return theirs, untold & ~theirs


def _cell(row: str, name: str) -> str | None:
    """A column of a rejected row, as text; None if the row does not tell it."""
    try:
        cell = json.loads(row, object_pairs_hook=_named_once)[name]
        text = cell if isinstance(cell, str) else "" if cell is None else json.dumps(cell)
        text.encode()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return text


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; nothing of one that says a name twice."""
    named = dict(pairs)
    return named if len(named) == len(pairs) else {}


class ParsedColumns:
    """Remembers what was made of a chunk; queries that come later, or at once, need not make it.

    Only what does not depend on a query's secret keys belongs here: ids differ from run to run.
    """

    def __init__(self) -> None:
        self._lock, self._known = RLock(), dict[Hashable, Any]()

    def once(self, *what: Hashable, make: Callable[[], Any]) -> Any:
        """What was made under this name, or is made now."""
        with self._lock:
            if what not in self._known:
                self._known[what] = make()
            return self._known[what]


def _each_time(*what: Hashable, make: Callable[[], Any]) -> Any:
    """In place of `ParsedColumns.once`, where no other query reads the same table."""
    return make()


class RowReader:
    """Turns batches of one query's source into rows."""

    def __init__(self, query: RowSpec, secret: Secret, run: bytes) -> None:
        self._begin(query, RowKeys.of(secret, run))

    @classmethod
    def with_keys(cls, query: RowSpec, keys: RowKeys, types: Types) -> RowReader:
        """A reader in another process, for a run whose types are fixed."""
        reader = cls.__new__(cls)
        reader._begin(query, keys)
        reader.types = dict(types)
        return reader

    def _begin(self, query: RowSpec, keys: RowKeys) -> None:
        self.query = query
        self.types: Types = {}
        self.learned: Callable[[Types], None] = lambda _: None
        """Called with the types when they are fixed, before they are used."""
        self.ids = RowIds(query, keys)
        self._preparing = RLock()  # functions of the user's may be in it: one thread at a time
        self._public: Words | None = None
        self._ordered: Words | None = None

    def read(
        self,
        table: pa.Table,
        where: str,
        *,
        arrived: int | None = None,
        parsed: ParsedColumns | None = None,
        prepare: Prepare | None = None,
    ) -> tuple[Rows, RejectedRows]:
        """The rows of a batch, and what was rejected. `arrived`: its step, for a live source.

        `parsed`: what other queries have parsed of this batch, and what they need not parse again.
        `prepare`: in place of the query's own, with other versions of its tables.
        """
        rejects, prepare = RejectedRows(), prepare or self.query.prepare
        table = self._declared(table, where, rejects.rejected)
        declared = sorted((name, str(kind)) for name, kind in self.query.declared.items())
        once: Once = _each_time
        if parsed is not None:  # shared with queries that prepare the table alike
            once = partial(parsed.once, f"{declared} {type(prepare)} {prepare!r}")
        if prepare is not None:
            with self._preparing:
                table = once("prepare", make=partial(prepare, table))
        reasons: Codes = np.zeros(len(table), np.uint8)
        columns = self._columns(table, reasons, arrived, once)
        rejects.rejected += reject(table, reasons, where)
        good = reasons == 0
        inside = good & (columns["windows"] >= 0)
        late = np.zeros(len(inside), bool)
        schedule = self.query.schedule
        by_clock = arrived is not None or self.query.arrival_column is not None
        if by_clock and not schedule.overlapping:  # else some windows of a row may be over
            last_steps = schedule.last_steps(columns["windows"][inside])
            late[inside] = columns["steps"][inside] > last_steps
        rejects.outside, rejects.late = int((good & ~inside).sum()), int(late.sum())
        columns = _filtered(columns, inside & ~late)
        if "groups" not in columns:
            columns["groups"] = self._group_ids(columns["keys"])
        if self.query.per_unit is None:
            columns = self._of_public_groups(columns, rejects)
        return in_order(self._identified(columns, rejects)), rejects

    def _group_ids(self, keys: pa.Table) -> Words:
        """The ids of groups; of rows that wait, those of the columns they are grouped by."""
        per_unit = self.query.per_unit
        if per_unit is None:
            return self.ids.groups(keys, len(keys))
        return self.ids.of_columns(keys.select(per_unit.own_keys), len(keys))

    def _of_public_groups(self, columns: dict[str, Any], rejects: RejectedRows) -> dict[str, Any]:
        """Rows whose key is listed, if keys are: others go before anything is bounded."""
        if self.query.public_groups is None:
            return columns
        known = columns.pop("known", None)
        if known is None:
            known = self._is_public(columns["groups"])
        rejects.other_keys += int((~known).sum())
        return _filtered(columns, known)

    def inner_rows(
        self, rows: Rows, where: str, step: int | None = None
    ) -> tuple[Rows, RejectedRows]:
        """What rows of one window and period become once the window is over, in its last step.

        Where a `step` is given, it is then that they come, if that is earlier. A rejected one is
        told without its values: it does not say whose it is.
        """
        query, per_unit = self.query, self.query.per_unit
        assert per_unit is not None
        window, period = int(rows.windows[0]), int(rows.periods[0])
        units, table = per_unit.inner(rows, query.schedule.span(window), step)
        table = table.append_column(ROW, pa.array(np.arange(len(units))))
        with self._preparing:
            table = per_unit.finish(table)
        reasons: Codes = np.zeros(len(table), np.uint8)
        values = self._values(table, reasons, _each_time)
        keys = self._keys(table, reasons)
        rejects = RejectedRows()
        rejects.rejected = [
            replace(each, row="an inner row") for each in reject(table, reasons, where)
        ]
        columns: dict[str, Any] = {
            "units": units[table[ROW].to_numpy()],
            "keys": keys,
            "values": values,
            "groups": self.ids.groups(keys, len(table)),
        }
        columns = self._of_public_groups(_filtered(columns, reasons == 0), rejects)
        last = query.schedule.last_step(window)
        of_all = {
            "windows": window,
            "periods": period,
            "steps": last if step is None else min(step, last),
        }
        size = len(columns["units"])
        columns |= {name: np.broadcast_to(np.int64(n), size) for name, n in of_all.items()}
        content = [columns["units"], columns["groups"], columns["windows"], *columns["values"].T]
        return Rows(**columns, digests=self.ids.digests(content)), rejects

    def _columns(
        self, table: pa.Table, reasons: Codes, arrived: int | None, once: Once
    ) -> dict[str, Any]:
        """Every column that matters, parsed; rows that cannot be used are marked."""
        query = self.query
        for name in query.columns:
            if name == query.privacy_unit_column and is_text(self.types[name]):
                continue  # only hashed, never shown
            column, bad = once("text", name, make=partial(readable_text, table, name))
            if bad.any() or table[name].num_chunks != 1 or table[name].type != column.type:
                table = table.set_column(table.column_names.index(name), name, column)
                flag(reasons, Reason.NOT_UTF8, bad)
        unit = query.privacy_unit_column
        of_unit = ("unit", unit, str(self.types[unit]))
        units = _flagged(reasons, once, of_unit, partial(self._units, table))
        moments, arrivals = self._times(table, reasons, once)
        if query.per_unit is not None:
            keys, values = self._held(table, query.per_unit, reasons), moments[:, None]
        else:
            values = self._values(table, reasons, once)
            kinds = tuple(str(self.types[name]) for name in query.keys)
            of_keys = ("keys", unit, query.keys, kinds, query.max_key_bytes)
            keys = _flagged(reasons, once, of_keys, partial(self._keys, table))
        if arrived is None:
            steps = stepwise(query.schedule.step_of, arrivals)
            if arrivals is not moments:
                flag(reasons, Reason.AHEAD, moments - arrivals > query.max_ahead)
        else:
            steps = np.broadcast_to(np.int64(arrived), len(table))
            clock = query.schedule.time_of(arrived)
            if clock is not None:
                flag(reasons, Reason.AHEAD, moments > clock + query.max_ahead)
        return self._hashed_once(table, units, keys, once) | {
            "units": units,
            "keys": keys,
            "moments": moments,
            "windows": stepwise(query.schedule.window_of, moments),
            "steps": steps,
            "values": values,
        }

    def _units(self, table: pa.Table, reasons: Codes) -> pa.Array:
        """The column that names the units; where it does not is marked."""
        units = self._typed(table, self.query.privacy_unit_column, reasons)
        flag(reasons, Reason.MISSING_UNIT, missing(units))
        return units

    def _keys(self, table: pa.Table, reasons: Codes) -> pa.Table:
        """The columns to group by; what cannot be a key is marked."""
        query = self.query
        keys = pa.table({name: self._typed(table, name, reasons) for name in query.keys})
        if not query.keys:
            return pa.table({"": pa.nulls(len(table))})  # a table knows its rows by its columns
        for name in query.keys:
            flag(reasons, Reason.OVERSIZE_KEY, oversize(keys[name], query.max_key_bytes))
            flag(reasons, Reason.UNWRITABLE, unwritable(parse.whole_column(keys[name])))
        return keys

    def _held(self, table: pa.Table, per_unit: PerUnit, reasons: Codes) -> pa.Table:
        """The columns that wait with a row: numbers as numbers, all in the types of the run."""
        columns = {}
        for name in per_unit.held:
            array = self._typed(table, name, reasons)
            if name in per_unit.numbers:
                values, readable = parse.numbers(array, name)
                flag(reasons, Reason.NUMBER, ~readable)
                flag(reasons, Reason.NOT_FINITE, np.isinf(values))
                if not pa.types.is_integer(array.type):
                    array = pa.array(values, pa.float64(), mask=np.isnan(values))
            columns[name] = array
        return pa.table(columns or {"": pa.nulls(len(table))})

    def _hashed_once(
        self, table: pa.Table, units: pa.Array, keys: pa.Table, once: Once
    ) -> dict[str, Words]:
        """Ids of units and groups, where other queries may need them too."""
        if once is _each_time or self.query.per_unit is not None:
            return {}
        ids, unit = self.ids, self.query.privacy_unit_column
        names = once("names", ids.common, unit, str(units.type), make=partial(ids.names, units))
        kinds = [str(kind) for kind in keys.schema.types]
        of_keys = partial(ids.groups, keys, len(table))
        of = ("groups", ids.common, tuple(keys.column_names), tuple(kinds))
        groups = once(*of, make=of_keys)
        if self.query.public_groups is None:
            return {"names": names, "groups": groups}
        listed = self.public_ids().tobytes()
        known = once("listed", *of, listed, make=partial(self._is_public, groups))
        return {"names": names, "groups": groups, "known": known}

    def _in_every_window(self, columns: dict[str, Any], rejects: RejectedRows) -> dict[str, Any]:
        """Once for each window of a row that is not over; the row's own step stays."""
        schedule = self.query.schedule
        if not schedule.overlapping:
            return columns
        last = schedule.last_window_of(columns["moments"])
        counts = last - columns["windows"] + 1
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = {
            name: column[rows] if isinstance(column, np.ndarray) else column.take(pa.array(rows))
            for name, column in columns.items()
        }
        columns["windows"] += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        late = columns["steps"] > schedule.last_steps(columns["windows"])
        rejects.late += int(late.sum())
        return _filtered(columns, ~late)

    def _identified(self, columns: dict[str, Any], rejects: RejectedRows) -> Rows:
        """Ids and digests in place of units, keys and times."""
        columns["periods"] = self.ids.periods(columns["moments"])
        names = columns.pop("names", None)
        if names is None:
            names = self.ids.names(columns["units"])
        columns["units"] = self.ids.in_periods(names, columns["periods"])
        columns = self._in_every_window(columns, rejects)
        moments = columns.pop("moments")
        content = [columns[name] for name in ("units", "groups", "windows")]
        if self.query.per_unit is not None:  # all that waits is part of what was read
            content.append(self.ids.of_columns(columns["keys"], len(moments)))
        digests = self.ids.digests([*content, moments, *columns["values"].T])
        return Rows(**columns, digests=digests)

    def public_ids(self) -> Words:
        """The ids of the public groups, in the order of the query's list."""
        if self._public is None:
            ids = self.ids.groups(self.public_table(), len(self.query.public_groups or ()))
            ordered = ids[id_order(ids)]
            if (ordered[1:] == ordered[:-1]).all(axis=1).any():
                raise InvalidInput(
                    f"public_groups lists one key twice: by value, in the types {self.types}"
                )
            self._ordered, self._public = ordered, ids  # in this order: other threads look
        return self._public

    def _is_public(self, ids: Words) -> parse.Mask:
        """Which ids are those of public groups; of many they are looked up in order."""
        self.public_ids()
        listed = self._ordered
        assert listed is not None
        if len(listed) < _MANY or (listed[1:, 0] == listed[:-1, 0]).any():
            return among(ids, listed)
        at = np.minimum(np.searchsorted(listed[:, 0], ids[:, 0]), len(listed) - 1)
        return np.asarray((listed[at] == ids).all(axis=1), bool)

    def public_table(self) -> pa.Table:
        """The public groups' key columns, in the types of the data."""
        self.settle_types()
        query = self.query
        columns = {}
        for number, name in enumerate(query.keys):
            columns[name] = public_keys(query, number, self.types[name])
        return pa.table(columns or {"": pa.nulls(1)})

    def learn(self, declared: Types | None) -> None:
        """Fix the types of unit and keys by what the source declares: text if nothing."""
        self._fix_types(types_of(self.query, declared))

    def settle_types(self) -> None:
        """Fix the types that no source has told, before the first release: they stay."""
        if not {*self.query.typed_columns} <= self.types.keys():
            self._fix_types(types_before_rows(self.query))

    def _fix_types(self, kinds: Types) -> None:
        new = {name: kind for name, kind in kinds.items() if name not in self.types}
        if new:
            self.learned(self.types | new)
            self.types |= new

    def _typed(self, table: pa.Table, name: str, reasons: Codes) -> pa.Array:
        """A column in the type it has in this run: 5 and "5" must not become two users."""
        column, lost = in_type(parse.whole_column(table[name]), self.types[name])
        flag(reasons, Reason.TYPE, lost)
        return column

    def _declared(self, table: pa.Table, where: str, rejected: list[Rejected]) -> pa.Table:
        """The source's columns in the types that the query declares; other rows are rejected."""
        reasons: Codes = np.zeros(len(table), np.uint8)
        typed = table
        for name, kind in self.query.declared.items():
            if name in table.column_names:
                column, bad = readable_text(typed, name)
                flag(reasons, Reason.NOT_UTF8, bad)
                column, lost = in_type(column, kind)
                flag(reasons, Reason.TYPE, lost)
                typed = typed.set_column(typed.column_names.index(name), name, column)
        if not reasons.any():
            return typed
        rejected += reject(table, reasons, where)
        return typed.filter(pa.array(reasons == 0))

    def _times(self, table: pa.Table, reasons: Codes, once: Once) -> tuple[Integers, Integers]:
        """The event time and the arrival time of each row."""
        if self.query.time_column is None:
            zero = np.zeros(len(table), np.int64)
            return zero, zero
        moments = self._parsed_times(table, self.query.time_column, Reason.TIME, reasons, once)
        if self.query.arrival_column is None:
            return moments, moments
        arrival = self.query.arrival_column
        return moments, self._parsed_times(table, arrival, Reason.ARRIVAL, reasons, once)

    def _parsed_times(
        self, table: pa.Table, name: str, problem: Reason, reasons: Codes, once: Once
    ) -> Integers:
        zone, unit = self.query.time_zone, self.query.time_unit_micros
        origin = self.query.time_origin
        read = partial(parse.times, table[name], name, zone=zone, unit=unit, origin=origin)
        parsed: tuple[Integers, parse.Mask] = once("time", name, zone, unit, origin, make=read)
        times, readable = parsed
        flag(reasons, problem, ~(readable & within_calendar(times)))
        return times

    def steps_of(self, table: pa.Table) -> Integers:
        """The step of each row of a table with the time columns alone; -1 if it has none."""
        table = self._declared(table, "", [])
        if self.query.prepare is not None and not self.query.times_are_plain:
            table = self.query.prepare(table)
        reasons: Codes = np.zeros(len(table), np.uint8)
        for name in table.column_names:
            column, bad = readable_text(table, name)
            table = table.set_column(table.column_names.index(name), name, column)
            flag(reasons, Reason.NOT_UTF8, bad)
        moments, arrivals = self._times(table, reasons, _each_time)
        steps = self.query.schedule.step_of(arrivals)
        none = (reasons != 0) | (self.query.schedule.window_of(moments) < 0)
        return np.where(none, -1, steps)

    def _values(self, table: pa.Table, reasons: Codes, once: Once) -> Integers:
        """What each row adds to the measures of values, rows x measures, in grid steps."""
        columns = []
        for measure in self.query.value_measures:
            if measure.kind == "distinct":
                typed = self._typed(table, measure.column, reasons)
                one_in = int(measure.quantum)
                columns += [*self.ids.values(typed, one_in).view(np.int64).T]
                continue
            if not measure.column:  # rows are counted
                columns.append(np.ones(len(table), np.int64))
                continue
            numbers = []
            for name in measure.columns:
                read = partial(parse.numbers, table[name], name)
                values, readable = once("number", name, make=read)
                flag(reasons, Reason.NUMBER, ~readable)
                flag(reasons, Reason.NOT_FINITE, np.isinf(values))
                numbers.append(values)
            columns.append(measure.on_grid(*numbers))
        return np.stack(columns, axis=1) if columns else np.zeros((len(table), 0), np.int64)


def _flagged(reasons: Codes, once: Once, what: tuple[Any, ...], read: Callable[[Codes], T]) -> T:
    """What `read` makes of a batch, which marks rows, for all queries that ask for the same."""

    def make() -> tuple[T, Codes | None]:
        own: Codes = np.zeros(len(reasons), np.uint8)
        return read(own), own if own.any() else None

    column, marked = once(*what, make=make)
    if marked is not None:
        np.copyto(reasons, marked, where=reasons == 0)
    return column  # type: ignore[no-any-return]


def _filtered(columns: dict[str, Any], kept: parse.Mask) -> dict[str, Any]:
    """The rows that are kept, of NumPy and Arrow columns alike."""
    if kept.all():
        return columns
    mask = pa.array(kept)
    return {
        name: column[kept] if isinstance(column, np.ndarray) else column.filter(mask)
        for name, column in columns.items()
    }
