"""A continual GROUP BY, as a frozen value: what SQL compiles to and every engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import whole
from dpstream.privacy.amounts import positive
from dpstream.privacy.charges import Terms
from dpstream.privacy.promises import promise, rows_of
from dpstream.privacy.state.identity import Identified, canonical
from dpstream.stages.aggregates import Aggregate, Count, all_measures
from dpstream.stages.checks import (
    check_answers,
    check_names,
    check_read,
    check_strategy,
    checked_keys,
    checked_public_keys,
    checked_weights,
)
from dpstream.stages.column_types import Types, declared_types
from dpstream.stages.hooks import Finish, Prepare
from dpstream.stages.measures import Measure
from dpstream.stages.query_bounds import Bounds
from dpstream.stages.query_times import TIME_UNITS, checked_times, schedule_of
from dpstream.stages.schedule import Schedule
from dpstream.stages.ticks import (
    DAY,
    Micros,
    Ticks,
    in_words,
    instant,
    iso,
    time_zone,
)
from dpstream.stages.windows import Tumble

_ZERO, _ONE_DAY = Micros(0), Micros(DAY)
_KEYS = """
    name unit keys aggregates epsilon delta
    time time_unit time_origin arrival window strategy every triggers start end allowed_lateness
    period time_zone max_groups_contributed max_rows_per_group max_rows_contributed
    public_keys pre_threshold selection_share last_share last_budget weights
    confidence debias debias_rows min_change nonnegative buffers
    column_types max_key_bytes max_ahead prepare finish
"""  # a field that gets another name keeps its key: key=new_name
_TOTALS_WEIGHT = Fraction(1, 50)  # totals of a window are large beside their noise


@dataclass(frozen=True, kw_only=True)
class Query(Identified, identity="query", keys=_KEYS):
    """Aggregates per key, for ever, under user-level (epsilon, delta)-DP.

    `unit`: the column that names the protected unit, for ever or within each `period` of event
    time. `keys`: the columns to group by; which groups exist is itself private, unless
    `public_keys` lists them. `time`: the column of the event time; without it there is one window,
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

    >>> Query(unit="user", keys=["url"], epsilon=1, delta=1e-9, max_groups_contributed=8).bounds
    Bounds(rows=8, groups=8, rows_per_group=1)
    """

    name: str = "query"
    unit: str
    keys: Sequence[str] = ()
    aggregates: Sequence[Aggregate] = (Count(),)
    epsilon: Any
    delta: Any
    time: str | None = None
    time_unit: str | None = None
    time_origin: Any = _ZERO
    arrival: str | None = None
    window: Tumble | None = None
    strategy: Literal["latched", "sqlp"] = "latched"
    every: Any = None
    triggers: Sequence[Any] | None = None
    start: Any = None
    end: Any = None
    allowed_lateness: Any = _ZERO
    period: Any = "forever"
    time_zone: str = "UTC"
    max_groups_contributed: int
    max_rows_per_group: int = 1
    max_rows_contributed: int | None = None
    public_keys: Sequence[Any] | None = None
    pre_threshold: int | None = None
    selection_share: Any = Fraction(1, 2)
    last_share: Any | None = Fraction(1, 2)
    last_budget: Any | None = Fraction(1, 4)
    weights: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
    confidence: float | None = None
    debias: Literal["global"] | None = None
    debias_rows: int | None = None
    min_change: float | None = None
    nonnegative: bool = False
    buffers: int = 4
    column_types: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
    max_key_bytes: int = 4096
    max_ahead: Any = _ONE_DAY
    prepare: Prepare | None = None
    finish: Finish | None = None

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
        check_names(self.name, self.unit, self.keys, self.aggregates, self.confidence)
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
        put("public_keys", checked_public_keys(self.keys, self.public_keys))
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
        return self.strategy == "sqlp" and self.public_keys is None

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
            finder=finder if self.public_keys is None else None,
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
        if self.public_keys is None:
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
        if self.period == "forever":
            return None
        origin = instant("1970-01-01", "the first period", self.time_zone)
        return Ticks(origin=origin, size=self.period, zone=self.time_zone)

    @property
    def time_unit_micros(self) -> int | None:
        """What one unit of a numeric time column is."""
        return None if self.time_unit is None else TIME_UNITS[self.time_unit]

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        values = [m.column for m in self.measures if m.kind == "value"]
        wanted = [self.unit, *self.keys, self.time, self.arrival, *values]
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
        return "forever" if self.period == "forever" else in_words(self.period)

    @property
    def protected(self) -> str:
        """All that one unit may change, in the words of its dataset's book."""
        if self.period == "forever":
            return rows_of(self.unit)
        time = str(self.time)
        if self.time_unit is not None:  # a number, which counts from somewhere
            time += f" ({self.time_unit} from {iso(self.time_origin)})"
        return rows_of(self.unit, time=time)

    def promise(self, *, epsilon: Any, delta: Any) -> Terms:
        """The terms of a book for this query and others on its dataset.

        >>> query = Query(unit="user", epsilon=1, delta=1e-9, max_groups_contributed=8)
        >>> query.promise(epsilon=6, delta=1e-8).describe()
        "mu_squared = 1.02443, tail = 4.95e-09, drift = 0.01 for all rows with one 'user' (forever)"
        """
        return promise(
            epsilon=epsilon,
            delta=delta,
            period=self.period_in_words,
            time_zone=self.time_zone,
            change=self.protected,
        )

    @property
    def live(self) -> bool:
        """Has it no end of its own?"""
        return self.time is not None and self.end is None

    def starting(self, now: int) -> Query:
        """This query with its start fixed: the window or interval that `now` lies in."""
        if self.time is None or self.start is not None:
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
