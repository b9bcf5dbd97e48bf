"""Counts per public group and window, published step by step through a time-series mechanism.

Each window is one step. Of each unit at most one row enters a step, so all that a unit does within
one window moves one count by 1: what the mechanisms call an event. Protected is

    event     all rows of one unit in one window,
    w_event   all rows of one unit in w successive windows,

added or removed (replacing them by others counts as two such changes). Which window a row belongs
to follows from its own time, and which of a unit's rows enters it from that unit's rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms import name_of
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.parts.factorised_counter import CounterMechanism
from dpstream.privacy.accounting.promises import rows_of
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.state.identity import canonical
from dpstream.query.aggregates import Count
from dpstream.query.query import Query
from dpstream.query.schedule import Schedule
from dpstream.query.windows import Tumble, in_words, iso

_ONE_COUNT = "a count by 1"  # what a unit changes, as books of histograms state it
_SAMPLE = np.arange(4.0)[:, None]  # counts that every mechanism must take


@dataclass(frozen=True, kw_only=True)
class SeriesQuery:
    """A mechanism, and the rows that it reads.

    `rows`: unit, public keys, times, window, filters and post-processing, as in a query over users;
    its aggregate is one `Count`. Its own epsilon and delta are not used: the mechanism's are.

    >>> from dpstream.mechanisms import Uniform
    >>> rows = Query(privacy_unit_column="user", keys=["page"], public_groups=["a", "b"],
    ...              time_column="ts", window=Tumble("1 hour"), epsilon=1, delta=0.5,
    ...              max_groups_contributed=1)
    >>> SeriesQuery(mechanism=Uniform(epsilon=1, window=24), rows=rows).protected
    "all rows with one 'user' in 24 successive windows of 1 hour"
    """

    mechanism: Mechanism
    rows: Query

    def __post_init__(self) -> None:
        rows, bounds = self.rows, self.rows.bounds
        side_by_side = rows.window is not None and rows.window.kind == "tumble"
        if not side_by_side or rows.every or rows.triggers is not None:
            raise InvalidParameter(
                "a time-series mechanism needs windows side by side, each published once: give "
                "window=Tumble(...), and neither every nor triggers"
            )
        if len(rows.aggregates) != 1 or not isinstance(rows.aggregates[0], Count):
            raise InvalidParameter(
                f"a time-series mechanism publishes one count; got {rows.aggregates!r}"
            )
        if rows.public_groups is None:
            raise InvalidParameter("a time-series mechanism needs public_groups: the bins it fills")
        if (bounds.rows, bounds.groups) != (1, 1) or rows.privacy_unit_period != "forever":
            raise InvalidParameter(
                "at most one row of a unit enters a step: max_groups_contributed must be 1, and "
                "max_rows_per_group and privacy_unit_period left out"
            )
        terms = self.mechanism.terms()
        if terms.unit not in ("event", "w_event"):
            raise InvalidParameter(f"{name_of(self.mechanism)} does not protect single events")
        if terms.change != _ONE_COUNT and not terms.change.startswith("one value within"):
            raise InvalidParameter(
                f"a unit changes {_ONE_COUNT}, but {name_of(self.mechanism)} is set for events "
                f"that change {terms.change}; leave its sensitivity at 1"
            )
        self.mechanism.check(np.repeat(_SAMPLE, len(rows.public_groups), axis=1))
        self._check_length()

    def _check_length(self) -> None:
        if not isinstance(self.mechanism, CounterMechanism) or self.rows.start is None:
            return
        most = self.mechanism.steps
        if self.schedule.steps is None or self.schedule.steps > most:
            found = "no end" if self.schedule.steps is None else f"{self.schedule.steps} windows"
            raise InvalidParameter(
                f"steps of {name_of(self.mechanism)} is {most}, but the query has {found}; raise "
                "it, or use unbounded_counter"
            )

    @property
    def name(self) -> str:
        """What its releases are called."""
        return self.rows.name

    @property
    def column(self) -> str:
        """The column that is published."""
        return self.rows.aggregates[0].name

    @property
    def schedule(self) -> Schedule:
        """Windows; each one's step is its number."""
        return self.rows.schedule

    @property
    def source_columns(self) -> list[str]:
        """The columns of the source that are needed."""
        return self.rows.source_columns

    @property
    def live(self) -> bool:
        """Has it no end of its own?"""
        return self.rows.live

    @property
    def time_column(self) -> str | None:
        """The column of the event time."""
        return self.rows.time_column

    @cached_property
    def window(self) -> Tumble:
        """Its windows."""
        assert self.rows.window is not None
        return self.rows.window

    @property
    def protected(self) -> str:
        """What the promise is about, in words."""
        size, terms = in_words(self.window.size), self.mechanism.terms()
        steps = f"one window of {size}"
        if terms.window is not None and terms.window > 1:
            steps = f"{terms.window} successive windows of {size}"
        return f"{rows_of(self.rows.privacy_unit_column)} in {steps}"

    @property
    def clock(self) -> str:
        """What one step is, in the words of its dataset's book: queries that share it agree."""
        rows = self.rows
        time = f"{rows.time_column!r}"
        if rows.time_unit is not None:
            time += f" ({rows.time_unit} from {iso(rows.time_origin)})"
        size = in_words(self.window.size)
        return (
            f"windows of {size} of {time} from {iso(rows.start)} ({rows.time_zone}), "
            f"one row of each {rows.privacy_unit_column!r}"
        )

    def terms(self) -> Terms:
        """The book that this query opens where there is none."""
        return replace(self.mechanism.terms(), clock=self.clock)

    def starting(self, now: int) -> SeriesQuery:
        """This query with its start fixed: the window that `now` lies in."""
        rows = self.rows.starting(now)
        return self if rows is self.rows else replace(self, rows=rows)

    def facts(self) -> dict[str, str]:
        """Everything that fixes the releases besides the data, by key."""
        return self.rows.facts() | {"mechanism": canonical(self.mechanism)}
