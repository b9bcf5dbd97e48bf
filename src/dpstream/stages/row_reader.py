"""Batches of a source become rows of the engine; what cannot be used is set aside.

Everything here looks at one row at a time: what becomes of a row depends on that row and on public
configuration alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidInput
from dpstream.privacy.state import Secret
from dpstream.records import Integers, Rejected, Words
from dpstream.stages import parse
from dpstream.stages.column_types import Types
from dpstream.stages.column_values import in_type
from dpstream.stages.parsed import ParsedColumns
from dpstream.stages.query import Query
from dpstream.stages.query_types import listed_keys, types_before_rows, types_of
from dpstream.stages.row_ids import RowIds
from dpstream.stages.rows import RowKeys, Rows, Setting, id_pairs, in_order
from dpstream.stages.screening import (
    Codes,
    Reason,
    flag,
    missing,
    oversize,
    readable_text,
    reject,
)
from dpstream.stages.stepwise import stepwise
from dpstream.stages.ticks import within_calendar


class RowReader:
    """Turns batches of one query's source into rows."""

    def __init__(self, query: Query, secret: Secret, run: bytes) -> None:
        self._begin(query, RowKeys.of(secret, run))

    @classmethod
    def with_keys(cls, query: Query, keys: RowKeys, types: Types) -> RowReader:
        """One that reads elsewhere, for a run whose types are fixed."""
        made = cls.__new__(cls)
        made._begin(query, keys)
        made.types = dict(types)
        return made

    def _begin(self, query: Query, keys: RowKeys) -> None:
        self.query = query
        self.types: Types = {}
        self.learned: Callable[[Types], None] = lambda _: None
        """Called with the types when they are fixed, before they are used."""
        self.ids = RowIds(query, keys)
        self._public: Words | None = None

    def read(
        self,
        table: pa.Table,
        where: str,
        *,
        arrived: int | None = None,
        parsed: ParsedColumns | None = None,
    ) -> tuple[Rows, Setting]:
        """The rows of a batch, and what was set aside. `arrived`: its step, for a live source.

        `parsed`: what other queries have parsed of this batch, and what they need not parse again.
        """
        aside, prepare = Setting(), self.query.prepare
        table = self._declared(table, where, aside.rejected)
        declared = sorted((name, str(kind)) for name, kind in self.query.declared.items())
        once = _Once(parsed, f"{declared} {type(prepare)} {prepare!r}")
        if prepare is not None:
            table = once("prepare", make=partial(prepare, table))
        reasons: Codes = np.zeros(len(table), np.uint8)
        columns = self._columns(table, reasons, arrived, once)
        aside.rejected += reject(table, reasons, where)
        good = reasons == 0
        inside = good & (columns["windows"] >= 0)
        late = np.zeros(len(inside), bool)
        overlapping = self.query.schedule.overlapping  # then, some windows of a row may be over
        if not overlapping and (arrived is not None or self.query.arrival is not None):
            late = inside & (columns["steps"] > self._last_steps(columns["windows"], inside))
        aside.outside, aside.late = int((good & ~inside).sum()), int(late.sum())
        columns = _filtered(columns, inside & ~late)
        if "groups" not in columns:
            columns["groups"] = self.ids.groups(columns["keys"], len(columns["steps"]))
        if self.query.public_keys is not None:  # other keys go before anything is bounded
            known = np.isin(id_pairs(columns["groups"]), id_pairs(self.public_ids()))
            aside.other_keys = int((~known).sum())
            columns = _filtered(columns, known)
        return in_order(self._identified(columns, aside)), aside

    def _columns(
        self, table: pa.Table, reasons: Codes, arrived: int | None, once: _Once
    ) -> dict[str, Any]:
        """Every column that matters, parsed; rows that cannot be used are marked."""
        query = self.query
        for name in query.columns:
            if name == query.unit:
                continue  # only hashed, never shown
            column, bad = once("text", name, make=partial(readable_text, table, name))
            table = table.set_column(table.column_names.index(name), name, column)
            flag(reasons, Reason.NOT_UTF8, bad)
        units = self._typed(table, query.unit, reasons)
        flag(reasons, Reason.MISSING_UNIT, missing(units))
        moments, arrivals = self._times(table, reasons, once)
        values = self._values(table, reasons, once)
        keys = pa.table({name: self._typed(table, name, reasons) for name in query.keys})
        if not query.keys:
            keys = pa.table({"": pa.nulls(len(table))})  # a table knows its rows by its columns
        for name in query.keys:
            flag(reasons, Reason.OVERSIZE_KEY, oversize(keys[name], query.max_key_bytes))
        if arrived is None:
            steps = stepwise(query.schedule.step_of, arrivals)
            if arrivals is not moments:
                flag(reasons, Reason.AHEAD, moments - arrivals > query.max_ahead)
        else:
            steps = np.broadcast_to(np.int64(arrived), len(table))
            flag(reasons, Reason.AHEAD, self._ahead(moments, arrived))
        return self._hashed_once(table, units, keys, once) | {
            "units": units,
            "keys": keys,
            "moments": moments,
            "windows": stepwise(query.schedule.window_of, moments),
            "steps": steps,
            "values": values,
        }

    def _hashed_once(
        self, table: pa.Table, units: pa.Array, keys: pa.Table, once: _Once
    ) -> dict[str, Words]:
        """Ids of units and groups, where other queries may need them too."""
        if not once.shared:
            return {}
        ids, unit, kinds = self.ids, self.query.unit, [str(kind) for kind in keys.schema.types]
        names = once("names", ids.common, unit, str(units.type), make=partial(ids.names, units))
        of_keys = partial(ids.groups, keys, len(table))
        of = ("groups", ids.common, tuple(keys.column_names), tuple(kinds))
        return {"names": names, "groups": once(*of, make=of_keys)}

    def _last_steps(self, windows: Integers, inside: parse.Mask) -> Integers:
        last = np.zeros(len(windows), np.int64)
        last[inside] = self.query.schedule.last_steps(windows[inside])
        return last

    def _in_every_window(self, columns: dict[str, Any], aside: Setting) -> dict[str, Any]:
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
        aside.late += int(late.sum())
        return _filtered(columns, ~late)

    def _identified(self, columns: dict[str, Any], aside: Setting) -> Rows:
        """Ids and digests in place of units, keys and times."""
        columns["periods"] = self.ids.periods(columns["moments"])
        names = columns.pop("names", None)
        if names is None:
            names = self.ids.names(columns["units"])
        columns["units"] = self.ids.in_periods(names, columns["periods"])
        columns = self._in_every_window(columns, aside)
        moments, groups, values = columns["moments"], columns["groups"], columns["values"]
        units, periods = columns["units"], columns["periods"]
        content = [units, groups, columns["windows"], moments, *values.T]
        return Rows(
            units=units,
            groups=groups,
            digests=self.ids.digests(content),
            windows=columns["windows"],
            periods=periods,
            steps=columns["steps"],
            values=values,
            keys=columns["keys"],
        )

    def public_ids(self) -> Words:
        """The ids of the public groups, in the order of the query's list."""
        if self._public is None:
            ids = self.ids.groups(self.public_table(), len(self.query.public_keys or ()))
            if len(np.unique(id_pairs(ids))) < len(ids):
                raise InvalidInput(
                    f"public_keys lists one key twice: by value, in the types {self.types}"
                )
            self._public = ids
        return self._public

    def public_table(self) -> pa.Table:
        """The public groups' key columns, in the types of the data."""
        self.settle_types()
        query = self.query
        columns = {}
        for number, name in enumerate(query.keys):
            listed = [row[number] for row in query.public_keys or ()]
            columns[name] = listed_keys(listed, self.types[name], name)
        return pa.table(columns or {"": pa.nulls(1)})

    def learn(self, declared: Types | None) -> None:
        """Fix the types of unit and keys by what the source declares: text if nothing."""
        self._fix(types_of(self.query, declared))

    def settle_types(self) -> None:
        """Fix the types that no source has told, before the first release: they stay."""
        if any(name not in self.types for name in (self.query.unit, *self.query.keys)):
            self._fix(types_before_rows(self.query))

    def _fix(self, kinds: Types) -> None:
        new = {name: kind for name, kind in kinds.items() if name not in self.types}
        if new:
            self.learned(self.types | new)
            self.types |= new

    def _typed(self, table: pa.Table, name: str, reasons: Codes) -> pa.Array:
        """A column in the type it has in this run: 5 and "5" must not become two users."""
        made, lost = in_type(parse.whole_column(table[name]), self.types[name], name)
        flag(reasons, Reason.TYPE, lost)
        return made

    def _declared(self, table: pa.Table, where: str, rejected: list[Rejected]) -> pa.Table:
        """The source's columns in the types that the query declares; other rows are rejected."""
        reasons: Codes = np.zeros(len(table), np.uint8)
        made = table
        for name, kind in self.query.declared.items():
            if name in table.column_names:
                column, bad = readable_text(made, name)
                flag(reasons, Reason.NOT_UTF8, bad)
                column, lost = in_type(column, kind, name)
                flag(reasons, Reason.TYPE, lost)
                made = made.set_column(made.column_names.index(name), name, column)
        if not reasons.any():
            return made
        rejected += reject(table, reasons, where)
        return made.filter(pa.array(reasons == 0))

    def _times(self, table: pa.Table, reasons: Codes, once: _Once) -> tuple[Integers, Integers]:
        query = self.query
        if query.time is None:
            zero = np.zeros(len(table), np.int64)
            return zero, zero
        how = (query.time_zone, query.time_unit_micros, query.time_origin)
        moments, readable = once(
            "time", query.time, *how, make=partial(self._parsed, table, query.time)
        )
        flag(reasons, Reason.TIME, ~readable)
        if query.arrival is None:
            return moments, moments
        arrivals, readable = once(
            "time", query.arrival, *how, make=partial(self._parsed, table, query.arrival)
        )
        flag(reasons, Reason.ARRIVAL, ~readable)
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
        table = self._declared(table, "", [])
        if self.query.prepare is not None:
            table = self.query.prepare(table)
        reasons: Codes = np.zeros(len(table), np.uint8)
        for name in table.column_names:
            column, bad = readable_text(table, name)
            table = table.set_column(table.column_names.index(name), name, column)
            flag(reasons, Reason.NOT_UTF8, bad)
        moments, arrivals = self._times(table, reasons, _Once(None, ""))
        steps = self.query.schedule.step_of(arrivals)
        none = (reasons != 0) | (self.query.schedule.window_of(moments) < 0)
        return np.where(none, -1, steps)

    def _values(self, table: pa.Table, reasons: Codes, once: _Once) -> Integers:
        columns = []
        for measure in self.query.measures:
            if measure.kind != "value":
                continue
            values, readable = once(
                "number",
                measure.column,
                make=partial(parse.numbers, table[measure.column], measure.column),
            )
            flag(reasons, Reason.NUMBER, ~readable)
            flag(reasons, Reason.NOT_FINITE, np.isinf(values))
            columns.append(measure.on_grid(values))
        return np.stack(columns, axis=1) if columns else np.zeros((len(table), 0), np.int64)

    def _ahead(self, moments: Integers, arrived: int) -> parse.Mask:
        clock = self.query.schedule.time_of(arrived)
        if clock is None:
            return np.zeros(len(moments), bool)
        ahead: parse.Mask = moments > clock + self.query.max_ahead
        return ahead


class _Once:
    """What is made of a table's columns, shared with queries that prepare the table alike."""

    def __init__(self, parsed: ParsedColumns | None, prepared: str) -> None:
        self._parsed, self._prepared = parsed, prepared

    @property
    def shared(self) -> bool:
        """Do other queries read the same table?"""
        return self._parsed is not None

    def __call__(self, *what: Any, make: Callable[[], Any]) -> Any:
        if self._parsed is None:
            return make()
        return self._parsed.once((self._prepared, *what), make)


def _filtered(columns: dict[str, Any], kept: parse.Mask) -> dict[str, Any]:
    """The rows that are kept, of NumPy and Arrow columns alike."""
    if kept.all():
        return columns
    mask = pa.array(kept)
    return {
        name: column[kept] if isinstance(column, np.ndarray) else column.filter(mask)
        for name, column in columns.items()
    }
