"""A continual GROUP BY, as a frozen value: what SQL compiles to and every engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import whole
from dpstream.privacy.accounting.promises import promise, rows_of
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.state.identity import Identified, canonical
from dpstream.query.aggregates import Aggregate, Count, Measure, Sum, all_measures
from dpstream.query.column_types import Types, declared_types
from dpstream.query.schedule import TIME_UNITS, Schedule, checked_times, schedule_of
from dpstream.query.windows import (
    DAY,
    Duration,
    Instant,
    Micros,
    Ticks,
    Tumble,
    in_words,
    instant,
    iso,
    time_zone,
)

# Names, keys, weights and answers of a query: understood and checked, each by itself.

_RESERVED = ("window_start", "window_end", "trigger_time", "release_index")


def checked_keys(given: Iterable[str]) -> tuple[str, ...]:
    """Different names of columns."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(set(names)) < len(names) or not all(names):
        raise InvalidParameter(f"keys must be different column names; got {names!r}")
    return names


def check_names(
    name: str,
    unit: str,
    keys: Sequence[str],
    aggregates: Sequence[Aggregate],
    confidence: float | None,
) -> None:
    """Refuse what would make a release ambiguous, or each group one unit."""
    if not aggregates or not all(isinstance(a, Count | Sum) for a in aggregates):
        raise InvalidParameter(
            "aggregates must be such as Count, CountUnits, Sum(...) or Avg(...); got "
            f"{aggregates!r}"
        )
    if unit in keys:
        raise InvalidParameter(
            f"the unit {unit!r} must not be a key: each group would be one unit; group by other "
            "columns"
        )
    added = ("", "_stddev") if confidence is None else ("", "_stddev", "_low", "_high")
    outputs = [f"{a.name}{more}" for a in aggregates for more in added]
    outputs += [*keys, *_RESERVED]
    twice = {output for output in outputs if outputs.count(output) > 1}
    if twice:
        raise InvalidParameter(
            f"a release cannot have two columns named {sorted(twice)}; rename an aggregate"
        )
    if not name or len(name.encode()) > 60:
        raise InvalidParameter(f"name must have 1 to 60 bytes; got {name!r}")


def checked_public_groups(
    keys: Sequence[str], given: Sequence[Any] | None
) -> tuple[tuple[Any, ...], ...] | None:
    """One tuple for each public group; without key columns all rows are one group, known to all."""
    if not keys and given in (None, ((),)):
        return ((),)
    if given is None:
        return None
    rows = tuple(tuple(row) if isinstance(row, tuple | list) else (row,) for row in given)
    if not rows or not keys or any(len(row) != len(keys) for row in rows):
        raise InvalidParameter(
            f"public_groups must list one value for each of the key columns {list(keys)}; got "
            f"{list(given)[:3]!r}"
        )
    as_text = {tuple(None if item is None else str(item) for item in row) for row in rows}
    if len(as_text) < len(rows):  # in a column of text, 1 and "1" are one key
        raise InvalidParameter("public_groups must not list a key twice")
    return rows


def checked_weights(
    given: Mapping[str, Any] | Sequence[tuple[str, Any]], aggregates: Sequence[Aggregate]
) -> tuple[tuple[str, Fraction], ...]:
    """Names and exact weights, in the order of the names: part of what fixes the releases."""
    known = {*(a.name for a in aggregates), "selection", "debias"}
    weights = dict(given)
    if not weights.keys() <= known:
        raise InvalidParameter(
            "weights must name aggregates of the query or 'selection'; got "
            f"{sorted(weights.keys() - known)}, known are {sorted(known)}"
        )
    return tuple((n, positive(w, f"the weight of {n}")) for n, w in sorted(weights.items()))


def check_answers(
    min_change: float | None,
    confidence: float | None,
    debias: str | None,
    debias_rows: int | None,
) -> None:
    """How answers are to be shown."""
    if min_change is not None and not min_change > 0:
        raise InvalidParameter(f"min_change must be above 0; got {min_change}")
    if confidence is not None and not 0 < confidence < 1:
        raise InvalidParameter(
            f"confidence must lie between 0 and 1, such as 0.95; got {confidence}"
        )
    if debias not in (None, "global"):
        raise InvalidParameter(f"debias must be 'global' or None; got {debias!r}")
    if debias_rows is not None and debias is None:
        raise InvalidParameter("debias_rows needs debias='global'")


def check_strategy(strategy: str, min_change: float | None) -> None:
    """How keys are found, and when they are published again."""
    if strategy not in ("latched", "sqlp"):
        raise InvalidParameter(f"strategy must be 'latched' or 'sqlp'; got {strategy!r}")
    if strategy == "sqlp" and min_change is not None:
        raise InvalidParameter(
            "min_change is for the strategy 'latched': 'sqlp' publishes a group only when "
            "enough units have come to it anyway"
        )


def check_read(what: str, named: Iterable[str], columns: Sequence[str]) -> None:
    """Columns that are named must be among those that the query reads."""
    for name in named:
        if name not in columns:
            raise InvalidParameter(
                f"{what} names {name!r}, and the query reads {', '.join(columns)}; leave it out"
            )


# What a query may do to rows before everything else, and to releases after it.


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


# What is kept of each unit's rows.


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """At most `rows` rows and `groups` groups of a unit, `rows_per_group` rows in each group."""

    rows: int
    groups: int
    rows_per_group: int


_ZERO, _ONE_DAY = Micros(0), Micros(DAY)
_KEYS = """
    name unit=privacy_unit_column keys aggregates epsilon delta
    time=time_column time_unit time_origin arrival=arrival_column
    window strategy every triggers start end allowed_lateness
    period=privacy_unit_period time_zone
    max_groups_contributed max_rows_per_group max_rows_contributed
    public_keys=public_groups pre_threshold selection_share last_share last_budget weights
    confidence debias debias_rows min_change nonnegative buffers
    column_types max_key_bytes max_ahead prepare finish
"""  # a field that gets another name keeps its key: key=new_name
_TOTALS_WEIGHT = Fraction(1, 50)  # totals of a window are large beside their noise


@dataclass(frozen=True, kw_only=True)
class Query(Identified, identity="query", keys=_KEYS):
    """Aggregates per key, for ever, under user-level (epsilon, delta)-DP.

    `privacy_unit_column` names the protected unit, for ever or within each `privacy_unit_period` of
    event time. `keys`: the columns to group by; which groups exist is itself private, unless
    `public_groups` lists them. `time_column` has the event time; without it there is one window,
    published once. `start` and `end` are public; rows outside are dropped. `every`: publish at
    these intervals; without it each window is published once, when it closes.

    Every group that has been shown is published at every trigger of its window; with `min_change`
    only if some sum has moved by so many standard deviations since (and always at the window's
    last trigger). `nonnegative` clamps counts and sums at 0. `pre_threshold`: groups with no more
    units are never looked at (default: as many as raise the threshold by 2%).

    `strategy`: "latched", or "sqlp", which publishes a group only when enough units have come to it
    since the last time. `weights`: by aggregate, how much of the budget it gets beside the
    others (1 each); "selection" is the count that finds keys. `last_share`: the part of what the
    selection of keys may lose that is kept for a window's last release; `last_budget`: the part of
    the budget that measures that release once more (None: all releases alike).
    `confidence`: publish an interval that holds the truth of the rows kept with this probability.
    `debias="global"` estimates, under the same budget, what share of all rows the bounds have
    kept, and makes up for it in counts and sums; it counts at most `debias_rows` rows of a unit.

    `column_types`: types of columns of the source, such as {"user": "INT64"}: what is read is cast
    to them by value, and a row with another value is set aside. The types of unit and keys are
    fixed before the first release; those that are not declared are what the first schema says.

    A unit contributes at most `max_groups_contributed` groups (over all windows),
    `max_rows_per_group` rows to each and `max_rows_contributed` rows in all.

    >>> query = Query(privacy_unit_column="user", keys=["url"], epsilon=1, delta=1e-9,
    ...               max_groups_contributed=8)
    >>> query.bounds
    Bounds(rows=8, groups=8, rows_per_group=1)
    """

    name: str = "query"
    privacy_unit_column: str
    keys: tuple[str, ...] = ()
    aggregates: tuple[Aggregate, ...] = (Count(),)
    epsilon: Fraction
    delta: Fraction
    time_column: str | None = None
    time_unit: str | None = None
    time_origin: Micros = _ZERO
    arrival_column: str | None = None
    window: Tumble | None = None
    strategy: Literal["latched", "sqlp"] = "latched"
    every: Micros | None = None
    triggers: tuple[Micros, ...] | None = None
    start: Micros | None = None
    end: Micros | None = None
    allowed_lateness: Micros = _ZERO
    privacy_unit_period: Micros | Literal["forever"] = "forever"
    time_zone: str = "UTC"
    max_groups_contributed: int
    max_rows_per_group: int = 1
    max_rows_contributed: int | None = None
    public_groups: tuple[tuple[Any, ...], ...] | None = None
    pre_threshold: int | None = None
    selection_share: Fraction = Fraction(1, 2)
    last_share: Fraction | None = Fraction(1, 2)
    last_budget: Fraction | None = Fraction(1, 4)
    weights: tuple[tuple[str, Fraction], ...] = ()
    confidence: float | None = None
    debias: Literal["global"] | None = None
    debias_rows: int | None = None
    min_change: float | None = None
    nonnegative: bool = False
    buffers: int = 4
    column_types: tuple[tuple[str, pa.DataType], ...] = ()
    max_key_bytes: int = 4096
    max_ahead: Micros = _ONE_DAY
    prepare: Prepare | None = None
    finish: Finish | None = None

    if TYPE_CHECKING:  # what may be given; the fields above are what becomes of it

        def __init__(
            self,
            *,
            name: str = "query",
            privacy_unit_column: str,
            keys: Iterable[str] = (),
            aggregates: Iterable[Aggregate] = ...,
            epsilon: Amount,
            delta: Amount,
            time_column: str | None = None,
            time_unit: str | None = None,
            time_origin: Instant = ...,
            arrival_column: str | None = None,
            window: Tumble | None = None,
            strategy: Literal["latched", "sqlp"] = "latched",
            every: Duration | None = None,
            triggers: Iterable[Instant] | None = None,
            start: Instant | None = None,
            end: Instant | None = None,
            allowed_lateness: Duration = ...,
            privacy_unit_period: Duration = "forever",
            time_zone: str = "UTC",
            max_groups_contributed: int,
            max_rows_per_group: int = 1,
            max_rows_contributed: int | None = None,
            public_groups: Sequence[object] | None = None,
            pre_threshold: int | None = None,
            selection_share: Amount = ...,
            last_share: Amount | None = ...,
            last_budget: Amount | None = ...,
            weights: Mapping[str, Amount] | Sequence[tuple[str, Amount]] = (),
            confidence: float | None = None,
            debias: Literal["global"] | None = None,
            debias_rows: int | None = None,
            min_change: float | None = None,
            nonnegative: bool = False,
            buffers: int = 4,
            column_types: Mapping[str, object] | Sequence[tuple[str, object]] = (),
            max_key_bytes: int = 4096,
            max_ahead: Duration = ...,
            prepare: Prepare | None = None,
            finish: Finish | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("epsilon", positive(self.epsilon, "epsilon"))
        put("delta", positive(self.delta, "delta"))
        put("selection_share", positive(self.selection_share, "selection_share"))
        for name in ("last_share", "last_budget"):
            if getattr(self, name) is not None:
                put(name, positive(getattr(self, name), name))
        if self.strategy == "sqlp":
            put("last_budget", None)  # its trees measure every step alike
        put("keys", checked_keys(self.keys))
        put("aggregates", tuple(self.aggregates))
        check_names(
            self.name, self.privacy_unit_column, self.keys, self.aggregates, self.confidence
        )
        time_zone(self.time_zone)
        for name, value in checked_times(self).items():
            put(name, value)
        for name in ("max_groups_contributed", "max_rows_per_group", "max_key_bytes", "buffers"):
            put(name, whole(getattr(self, name), name, at_least=1))
        most = self.max_groups_contributed * self.max_rows_per_group
        rows = most if self.max_rows_contributed is None else self.max_rows_contributed
        put("max_rows_contributed", whole(rows, "max_rows_contributed", at_least=1))
        if self.pre_threshold is not None:
            put("pre_threshold", whole(self.pre_threshold, "pre_threshold", at_least=0))
        for name in ("delta", "selection_share", "last_share", "last_budget"):
            if getattr(self, name) is not None and getattr(self, name) >= 1:
                raise InvalidParameter(
                    f"{name} must be below 1; got {float(getattr(self, name)):g}"
                )
        check_answers(self.min_change, self.confidence, self.debias, self.debias_rows)
        if self.debias is not None:
            rows = 4 * self.bounds.rows if self.debias_rows is None else self.debias_rows
            put("debias_rows", whole(rows, "debias_rows", at_least=self.bounds.rows))
        put("weights", checked_weights(self.weights, self.aggregates))
        put("public_groups", checked_public_groups(self.keys, self.public_groups))
        check_strategy(self.strategy, self.min_change)
        put("column_types", declared_types(self.column_types))
        check_read("column_types", self.declared, self.source_columns)
        _ = self.schedule

    @cached_property
    def bounds(self) -> Bounds:
        """What is kept of each unit."""
        assert self.max_rows_contributed is not None
        most = self.max_groups_contributed * self.max_rows_per_group
        rows = min(self.max_rows_contributed, most)
        return Bounds(
            rows=rows,
            groups=min(self.max_groups_contributed, rows),
            rows_per_group=min(self.max_rows_per_group, rows),
        )

    @property
    def in_rounds(self) -> bool:
        """Are keys found again and again, each time by the units since the last time?"""
        return self.strategy == "sqlp" and self.public_groups is None

    @property
    def rounds_of_units(self) -> bool:
        """Must a group remember which units have come to it in its round?"""
        return self.in_rounds and self.bounds.rows_per_group > 1

    @property
    def one_row(self) -> bool:
        """Are rows units in what is published? A unit has one row in a group, then."""
        return self.bounds.rows_per_group == 1 and not self.in_rounds

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The exact columns behind the aggregates."""
        finder = Measure(kind="round" if self.in_rounds else "units")
        return all_measures(
            self.aggregates,
            one_row=self.one_row,
            finder=finder if self.public_groups is None else None,
        )

    @cached_property
    def totals(self) -> tuple[Measure, ...]:
        """Exact counts of each window as a whole."""
        if self.debias is None:
            return ()
        return Measure(kind="offered"), Measure(kind="kept")

    @cached_property
    def column_weights(self) -> tuple[Fraction, ...]:
        """How the budget is divided among measures and totals: by the greatest wish for each."""
        wishes: dict[Measure, list[Fraction]] = {measure: [] for measure in self.measures}
        given = dict(self.weights)
        for aggregate in self.aggregates:
            for measure in aggregate.measures(self.one_row):
                wishes[measure].append(given.get(aggregate.name, Fraction(1)))
        if self.public_groups is None:
            finder = wishes[self.measures[0]]
            if "selection" in given or not finder:
                finder.append(given.get("selection", Fraction(1)))
        total = given.get("debias", _TOTALS_WEIGHT)
        return (*(max(wish) for wish in wishes.values()), *(total for _ in self.totals))

    @property
    def declared(self) -> Types:
        """The types of the source's columns that are declared."""
        return dict(self.column_types)

    @cached_property
    def schedule(self) -> Schedule:
        """When what is published; an endless query is given its start when it first runs."""
        return schedule_of(self)

    @cached_property
    def periods(self) -> Ticks | None:
        """Periods of event time in which a user is one unit; None: for ever."""
        if self.privacy_unit_period == "forever":
            return None
        origin = instant("1970-01-01", "the first period", self.time_zone)
        return Ticks(origin=origin, size=self.privacy_unit_period, zone=self.time_zone)

    @property
    def time_unit_micros(self) -> int | None:
        """What one unit of a numeric time column is."""
        return None if self.time_unit is None else TIME_UNITS[self.time_unit]

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        values = [m.column for m in self.measures if m.kind == "value"]
        wanted = [
            self.privacy_unit_column,
            *self.keys,
            self.time_column,
            self.arrival_column,
            *values,
        ]
        return list(dict.fromkeys(name for name in wanted if name is not None))

    @property
    def key_columns(self) -> set[str]:
        """The columns of the source that keys are, or are computed from."""
        if self.prepare is None:
            return set(self.keys)
        return {column for name in self.keys for column in self.prepare.columns_of(name)}

    @property
    def source_columns(self) -> list[str]:
        """The columns of the source that are needed."""
        return self.columns if self.prepare is None else list(self.prepare.columns)

    @property
    def period_in_words(self) -> str:
        """What a unit's bounds and budget renew with."""
        return (
            "forever"
            if self.privacy_unit_period == "forever"
            else in_words(self.privacy_unit_period)
        )

    @property
    def protected(self) -> str:
        """All that one unit may change, in the words of its dataset's book."""
        if self.privacy_unit_period == "forever":
            return rows_of(self.privacy_unit_column)
        time = str(self.time_column)
        if self.time_unit is not None:  # a number, which counts from somewhere
            time += f" ({self.time_unit} from {iso(self.time_origin)})"
        return rows_of(self.privacy_unit_column, time=time)

    def promise(self, *, epsilon: Amount, delta: Amount) -> Terms:
        """The terms of a book for this query and others on its dataset.

        >>> query = Query(privacy_unit_column="user", epsilon=1, delta=1e-9,
        ...               max_groups_contributed=8)
        >>> query.promise(epsilon=6, delta=1e-8).describe()
        "mu_squared = 1.02443, tail = 4.95e-09, drift = 0.01 for all rows with one 'user' (forever)"
        """
        return promise(
            epsilon=epsilon,
            delta=delta,
            privacy_unit_period=self.period_in_words,
            time_zone=self.time_zone,
            change=self.protected,
        )

    @property
    def live(self) -> bool:
        """Has it no end of its own?"""
        return self.time_column is not None and self.end is None

    def starting(self, now: int) -> Query:
        """This query with its start fixed: the window or interval that `now` lies in."""
        if self.time_column is None or self.start is not None:
            return self
        assert self.window is not None
        origin = instant("1970-01-01", "the first window", self.time_zone)
        ticks = Ticks(origin=origin, size=self.window.size, zone=self.time_zone)
        return replace(self, start=Micros(ticks.at(ticks.last_before(now))))

    def written(self) -> dict[str, Any]:
        """The value of every field by its key; hooks and Arrow's types are known by their texts."""
        return super().written() | {
            "prepare": None if self.prepare is None else self.prepare.text,
            "finish": None if self.finish is None else self.finish.text,
            "column_types": tuple((name, str(kind)) for name, kind in self.declared.items()),
        }

    def facts(self) -> dict[str, str]:
        """Everything that fixes the releases besides the data, by key."""
        return {key: canonical(value) for key, value in self.written().items()}
