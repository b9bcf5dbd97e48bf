"""What a query says about rows: which are read, whose they are, and when they are published.

A `Query` (a continual GROUP BY) and a `SeriesQuery` (a time-series mechanism over counts) are both
a `RowSpec` plus what they compute of its rows. Whatever reads rows takes a `RowSpec` and knows no
budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import pyarrow as pa

from dpstream.errors import InvalidParameter, refuse_unwritable
from dpstream.mechanisms.base import whole
from dpstream.privacy.query_spend import ALL_PERIODS, PaidPeriods
from dpstream.privacy.state.identity import Identified, canonical
from dpstream.query.aggregates import Measure
from dpstream.query.column_types import Types, declared_types
from dpstream.query.per_unit import PerUnit
from dpstream.query.public_tables import Joining, KeyTable, NeedsTables, Tables
from dpstream.query.schedule import Schedule
from dpstream.query.union_tables import Unites
from dpstream.query.windows import (
    DAY,
    SECOND,
    Micros,
    Ticks,
    Tumble,
    duration,
    in_words,
    instant,
    iso,
    time_zone,
)

TIME_UNITS = {"us": 1, "ms": 1000, "s": SECOND, "min": 60 * SECOND, "h": 3600 * SECOND, "day": DAY}
"""What one unit of a numeric time column may be, in microseconds."""
_RESERVED = ("window_start", "window_end", "trigger_time", "release_index")
_ZERO, _ONE_DAY = Micros(0), Micros(DAY)
_KEYS = """
    name unit=privacy_unit_column period=privacy_unit_period keys public_keys=public_groups
    time=time_column time_unit time_origin arrival=arrival_column time_zone
    window every triggers start end allowed_lateness
    column_types max_key_bytes max_ahead prepare finish
"""  # a field that gets another name keeps its key: key=new_name


class Prepare(Protocol):
    """Makes the query's columns out of the source's: filters and expressions, row by row.

    It never raises for a row: what cannot be computed is NULL.
    """

    @property
    def text(self) -> str:
        """Says all that it does; it is part of what fixes the releases, so it never changes."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the source that it reads."""

    def columns_of(self, name: str) -> Sequence[str]:
        """The columns of the source that one of the query's columns is, or is computed from."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""


class Finish(Protocol):
    """Chooses and orders rows of a release by their noisy values."""

    @property
    def text(self) -> str:
        """Says all that it does; it is part of what fixes the releases, so it never changes."""

    @property
    def computed(self) -> Mapping[str, bool]:
        """The columns that it computes from noisy ones, and whether each has an error bar."""

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release."""


Earlier: TypeAlias = dict[int, dict[int, pa.Table]]
"""What was published of earlier windows: by the number of its reader, then of its window."""


@runtime_checkable
class LooksBack(Protocol):
    """A `Finish` that also looks at what was published of earlier windows."""

    @property
    def windows_back(self) -> int:
        """How many of them it looks at."""

    def look_back(self, release: pa.Table, window: int, earlier: Earlier) -> pa.Table:
        """What is published of a release of a window; notes in `earlier` what later ones need."""


@dataclass(frozen=True, kw_only=True)
class RowSpec(Identified, identity=None, keys=_KEYS):
    """Rows of a source, the groups they belong to, and the times at which groups are published.

    `privacy_unit_column` names the protected unit, for ever or within each `privacy_unit_period` of
    event time. `keys`: the columns to group by; which groups exist is itself private, unless
    `public_groups` lists them. `time_column` has the event time; without it there is one window,
    published once. `start` and `end` are public; rows outside are dropped. `every`: publish at
    these intervals; without it each window is published once, when it closes.

    `column_types`: types of columns of the source, such as {"user": "INT64"}: what is read is cast
    to them by value, and a row with another value is set aside. The types of unit and keys are
    fixed before the first release; those that are not declared are what the first schema says.
    """

    name: str = "query"
    privacy_unit_column: str
    privacy_unit_period: Micros | Literal["forever"] = "forever"
    keys: tuple[str, ...] = ()
    public_groups: Sequence[tuple[Any, ...]] | None = None
    time_column: str | None = None
    time_unit: str | None = None
    time_origin: Micros = _ZERO
    arrival_column: str | None = None
    time_zone: str = "UTC"
    window: Tumble | None = None
    every: Micros | None = None
    triggers: tuple[Micros, ...] | None = None
    start: Micros | None = None
    end: Micros | None = None
    allowed_lateness: Micros = _ZERO
    column_types: tuple[tuple[str, pa.DataType], ...] = ()
    max_key_bytes: int = 4096
    max_ahead: Micros = _ONE_DAY
    prepare: Prepare | None = None
    finish: Finish | None = None

    def __post_init__(self) -> None:
        refuse_unwritable("query", self)
        put = partial(object.__setattr__, self)
        put("keys", _column_names(self.keys))
        put("public_groups", _one_tuple_per_group(self.keys, self.public_groups))
        time_zone(self.time_zone)
        for name, time in self._understood_times():
            put(name, time)
        self._check_times()
        self._check_names()
        put("max_key_bytes", whole(self.max_key_bytes, "max_key_bytes", at_least=1))
        put("column_types", declared_types(self.column_types))
        for name in self.declared:
            if name not in self.source_columns:
                raise InvalidParameter(
                    f"column_types names {name!r}, and the query reads "
                    f"{', '.join(self.source_columns)}; leave it out"
                )
        _ = self.schedule

    def _check_names(self) -> None:
        """Refuse what would make a release ambiguous, or each group one unit."""
        unit = self.privacy_unit_column
        if unit in self.keys:
            raise InvalidParameter(
                f"the unit {unit!r} must not be a key: each group would be one unit; group by "
                "other columns"
            )
        outputs = [*self.answer_columns, *self.label_columns, *_RESERVED]
        twice = {output for output in outputs if outputs.count(output) > 1}
        if twice:
            raise InvalidParameter(
                f"a release cannot have two columns named {sorted(twice)}; rename an aggregate"
            )
        if not self.name or len(self.name.encode()) > 60:
            raise InvalidParameter(f"name must have 1 to 60 bytes; got {self.name!r}")

    def _understood_times(self) -> Iterable[tuple[str, Any]]:
        """Durations and instants in microseconds, by the name of their field."""
        for name in ("allowed_lateness", "max_ahead"):
            yield name, duration(getattr(self, name), name, least=0)
        if self.every is not None:
            yield "every", duration(self.every, "every", calendar=True)
        if self.privacy_unit_period != "forever":
            name = "privacy_unit_period"
            yield name, duration(self.privacy_unit_period, name, calendar=True)
        for name in ("start", "end", "time_origin"):
            if getattr(self, name) is not None:
                yield name, instant(getattr(self, name), name, self.time_zone)
        if self.triggers is not None:
            times = (instant(time, "a trigger", self.time_zone) for time in self.triggers)
            yield "triggers", tuple(times)

    def _check_times(self) -> None:
        """Refuse times that do not go together."""
        if self.every is not None and self.triggers is not None:
            raise InvalidParameter("give every= or triggers=, not both")
        if not isinstance(self.window, Tumble | None):
            raise InvalidParameter(
                f"window must be Tumble, Hop or Cumulate, such as Tumble('1 hour'); got "
                f"{self.window!r}"
            )
        if self.window is not None:
            self.window.check(self.time_zone)
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise InvalidParameter(
                f"time_unit must be one of {', '.join(TIME_UNITS)}; got {self.time_unit!r}"
            )
        timed = (self.window, self.every, self.triggers, self.start, self.end, self.arrival_column)
        if self.time_column is None and any(item is not None for item in timed):
            raise InvalidParameter(
                "window, every, triggers, start, end and arrival_column need time_column, the "
                "column of the event time"
            )
        if self.time_column is None and self.privacy_unit_period != "forever":
            raise InvalidParameter(
                "privacy_unit_period needs time_column, the column of the event time"
            )
        if self.per_unit is not None:
            self._check_per_unit()
        if self.time_column is not None and self.window is None and self.start is None:
            raise InvalidParameter(
                "a query with a time column needs its public range: start= and end= (or a window "
                "and a live source); taken from the data it would reveal the first and last row"
            )

    def _check_per_unit(self) -> None:
        """Inner rows leave once, when the window closes, and are of one period of a unit.

        But for those that more rows cannot take away, which may leave before, and for those that
        look back at earlier windows, which are of a unit for ever.
        """
        assert self.per_unit is not None
        published_again = self.every is not None or self.triggers is not None
        if published_again and not self.per_unit.grows:
            raise InvalidParameter(
                "every and triggers must be left out where the rows of each unit are grouped: what "
                "a unit has in a window is known when the window closes, and published then; for "
                "figures in between use shorter windows"
            )
        period, window, end = self.privacy_unit_period, self.window, self.end
        if period == "forever":
            return
        if self.per_unit.across_windows:
            raise InvalidParameter(
                "privacy_unit_period must be 'forever' for cohorts: without one period of a user "
                "the user begins in another one, and each lag moves, so a user within a period "
                "would need twice the budget for less protection (noise larger by 1.41); got "
                f"{in_words(period)}"
            )
        if window is None and self.start is not None and end is not None:
            period_end = Ticks(origin=self.start, size=period, zone=self.time_zone).at(1)
            if end > period_end:
                raise InvalidParameter(
                    f"privacy_unit_period must be as long as the only window ({iso(self.start)} to "
                    f"{iso(end)}) where the rows of each unit are grouped: they would be cut every "
                    f"{in_words(period)}; got {in_words(period)}; did you forget windows, such as "
                    "TUMBLE?"
                )
        if window is not None and window.size > period:
            raise InvalidParameter(
                f"privacy_unit_period must be as long as the windows ({in_words(window.size)}) "
                "where the rows of each unit are grouped: what a unit has in a window would be cut "
                f"every {in_words(period)}; got {in_words(period)}"
            )

    @cached_property
    def per_unit(self) -> PerUnit | None:
        """What the rows of each unit become when their window closes; None: rows stay rows."""
        prepare: object = self.prepare
        return prepare if isinstance(prepare, PerUnit) else None

    @property
    def answer_columns(self) -> Sequence[str]:
        """The columns of a release that are computed from rows."""
        return ()

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns that name a group."""
        return self.keys

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that name a row of a release."""
        return self.group_columns

    @property
    def value_measures(self) -> Sequence[Measure]:
        """The measures that sum a value of each row."""
        return ()

    @property
    def typed_columns(self) -> list[str]:
        """The columns whose types are fixed before the first release: they are hashed by value."""
        counted = [m.column for m in self.value_measures if m.kind == "distinct"]
        held = () if self.per_unit is None else self.per_unit.held
        return list(dict.fromkeys([self.privacy_unit_column, *self.keys, *counted, *held]))

    @property
    def columns(self) -> list[str]:
        """The columns that are read, once the source's are prepared."""
        values = [name for measure in self.value_measures for name in measure.columns]
        times = [self.time_column, self.arrival_column]
        wanted = [self.privacy_unit_column, *self.keys, *times, *values]
        if self.per_unit is not None:  # keys and values are made of what waits
            wanted = [self.privacy_unit_column, *times, *self.per_unit.held]
        return list(dict.fromkeys(name for name in wanted if name is not None))

    @property
    def source_columns(self) -> list[str]:
        """The columns of the source that are needed."""
        return self.columns if self.prepare is None else list(self.prepare.columns)

    @property
    def key_columns(self) -> set[str]:
        """The columns of the source that keys are, or are computed from."""
        if self.prepare is None:
            return set(self.keys)
        return {column for name in self.keys for column in self.prepare.columns_of(name)}

    @property
    def declared(self) -> Types:
        """The types of the source's columns that are declared."""
        return dict(self.column_types)

    @property
    def time_unit_micros(self) -> int | None:
        """What one unit of a numeric time column is."""
        return None if self.time_unit is None else TIME_UNITS[self.time_unit]

    @property
    def counted_from(self) -> str:
        """Where the numbers of a numeric time column count from, in brackets."""
        unit = self.time_unit
        return "" if unit is None else f" ({unit} from {iso(self.time_origin)})"

    @property
    def period_in_words(self) -> str:
        """What a unit's bounds and budget renew with."""
        period = self.privacy_unit_period
        return "forever" if period == "forever" else in_words(period)

    @cached_property
    def periods(self) -> Ticks | None:
        """Periods of event time in which a user is one unit; None: for ever."""
        if self.privacy_unit_period == "forever":
            return None
        origin = instant("1970-01-01", "the first period", self.time_zone)
        return Ticks(origin=origin, size=self.privacy_unit_period, zone=self.time_zone)

    @cached_property
    def schedule(self) -> Schedule:
        """When what is published; an endless query is given its start when it first runs."""
        if self.time_column is None or self.start is None:
            return Schedule()
        ticks = partial(Ticks, origin=self.start, zone=self.time_zone)
        triggers = self.triggers if self.every is None else ticks(size=self.every)
        return Schedule(
            start=self.start,
            end=self.end,
            edges=None if self.window is None else ticks(size=self.window.cell),
            kind="tumble" if self.window is None else self.window.kind,
            cells=1 if self.window is None else self.window.cells,
            triggers=triggers,
            lateness=self.allowed_lateness,
        )

    @property
    def live(self) -> bool:
        """Has it no end of its own?"""
        return self.time_column is not None and self.end is None

    def starting(self, now: int) -> Self:
        """This query with its start fixed: the window that `now` lies in."""
        if self.time_column is None or self.start is not None:
            return self
        assert self.window is not None
        origin = instant("1970-01-01", "the first window", self.time_zone)
        ticks = Ticks(origin=origin, size=self.window.size, zone=self.time_zone)
        return replace(self, start=Micros(ticks.at(ticks.last_before(now))))

    def not_before(self, border: int) -> Self:
        """This query from a time on: windows that begin before it are left out.

        A window that reaches beyond the end of a period would read rows of both.
        """
        assert self.start is not None
        schedule = self.schedule
        if border <= self.start:
            return self
        if schedule.edges is None or (self.end is not None and border >= self.end):
            raise InvalidParameter(
                f"no window of {self.name!r} lies behind {iso(border)}, before which all periods "
                "are spent"
            )
        number = schedule.edges.next_from(border)
        if schedule.kind == "cumulate":
            number = -(-number // schedule.cells) * schedule.cells
        start, times = schedule.edges.at(number), self.triggers
        if times is not None:
            times = tuple(time for time in times if time > start)
        return replace(self, start=Micros(start), triggers=times)

    @property
    def paid_periods(self) -> PaidPeriods:
        """The periods whose rows it reads, and the last one that each window reaches into."""
        ticks, schedule, start = self.periods, self.schedule, self.start
        if ticks is None or start is None:
            return ALL_PERIODS

        def last_of(window: int) -> int:
            end = schedule.span(window)[1]
            assert end is not None
            return ticks.last_before(end - 1)

        last = None if self.end is None else ticks.last_before(self.end - 1)
        return PaidPeriods(first=ticks.last_before(start), last=last, last_of=last_of)

    @property
    def table_names(self) -> list[str]:
        """The tables that it joins, or takes its keys from, and that are not given yet."""
        parts: list[object] = [self.prepare, self.public_groups]
        needing = [part for part in parts if isinstance(part, NeedsTables)]
        return list(dict.fromkeys(name for part in needing for name in part.table_names))

    def with_tables(self, tables: Tables) -> Self:
        """This query with the tables that it names; what cannot be joined is refused."""
        parts: dict[str, Any] = {"prepare": self.prepare, "public_groups": self.public_groups}
        for name, part in parts.items():
            if isinstance(part, NeedsTables) and part.table_names:
                parts[name] = part.with_tables(tables)
        return replace(self, **parts)

    @property
    def times_are_plain(self) -> bool:
        """Are event and arrival time columns of the source, whatever is done to its rows?"""
        prepare: object = self.prepare
        return prepare is None or (isinstance(prepare, Joining) and prepare.plain_times)

    @property
    def sources(self) -> Sequence[str]:
        """The sources of a UNION ALL, by their names; none: there is one source."""
        prepare: object = self.prepare
        return prepare.sources if isinstance(prepare, Unites) else ()

    def written(self) -> dict[str, Any]:
        """The value of every field by its key; hooks and Arrow's types are known by their texts."""
        keys = self.public_groups
        written = super().written()
        if isinstance(keys, KeyTable):
            written["public_keys"] = ("keys", len(keys), keys.digest)
        return written | {
            "prepare": None if self.prepare is None else self.prepare.text,
            "finish": None if self.finish is None else self.finish.text,
            "column_types": tuple((name, str(kind)) for name, kind in self.declared.items()),
        }

    def facts(self) -> dict[str, str]:
        """Everything that fixes the releases besides the data, by key."""
        return {key: canonical(value) for key, value in self.written().items()}


def _column_names(given: Iterable[str]) -> tuple[str, ...]:
    """Different names of columns."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(set(names)) < len(names) or not all(names):
        raise InvalidParameter(f"keys must be different column names; got {names!r}")
    return names


def _one_tuple_per_group(keys: Sequence[str], given: Sequence[Any] | None) -> Any:
    """The public groups; without key columns all rows are one group, known to all."""
    if not keys and given in (None, ((),)):
        return ((),)
    if given is None:
        return None
    if isinstance(given, NeedsTables):
        return given
    if isinstance(given, KeyTable):
        if len(given.columns) != len(keys) or not len(given):
            raise InvalidParameter(
                f"public_groups must have one column for each of the keys {list(keys)}, and a row; "
                f"got {len(given.columns)} columns with {len(given)} rows"
            )
        return given
    rows = tuple(tuple(row) if isinstance(row, tuple | list) else (row,) for row in given)
    if not rows or not keys or any(len(row) != len(keys) for row in rows):
        raise InvalidParameter(
            f"public_groups must list one value for each of the key columns {list(keys)}; got "
            f"{list(given)[:3]!r}"
        )
    as_text = {tuple(None if item is None else str(item) for item in row) for row in rows}
    if len(as_text) < len(rows):  # in a column of text, 1 and "1" are one key
        raise InvalidParameter("public_groups must not list a group twice")
    return rows
