"""Counts per public group and window, published step by step through a time-series mechanism.

Each window is one step. Of each unit at most one row enters a step, so all that a unit does within
one window moves one count by 1: what the mechanisms call an event. Protected is

    event     all rows of one unit in one window,
    w_event   all rows of one unit in w successive windows,

added or removed (replacing them by others counts as two such changes). Which window a row belongs
to follows from its own time, and which of a unit's rows enters it from that unit's rows alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms import name_of
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.counters.factorised_counter import CounterMechanism
from dpstream.privacy.accounting.promises import rows_of
from dpstream.privacy.ledger.charges import Terms
from dpstream.query.aggregates import Count
from dpstream.query.public_tables import NeedsTables
from dpstream.query.row_spec import Finish, Prepare, RowSpec
from dpstream.query.windows import Duration, Instant, Tumble, in_words, iso

_ONE_COUNT = "a count by 1"  # what a unit changes, as books of histograms state it
_SAMPLE = np.arange(4.0)[:, None]  # counts that every mechanism must take


@dataclass(frozen=True, kw_only=True)
class SeriesQuery(RowSpec, identity="series_query", keys="mechanism count"):
    """A mechanism, and the rows that it counts; the budget is the mechanism's own.

    Rows, public keys, times and windows are said as in `RowSpec`. `count` names the column that is
    published.

    >>> from dpstream.mechanisms import Uniform
    >>> query = SeriesQuery(mechanism=Uniform(epsilon=1, window=24), privacy_unit_column="user",
    ...                     keys=["page"], public_groups=["a", "b"], time_column="ts",
    ...                     window=Tumble("1 hour"))
    >>> query.protected
    "all rows with one 'user' in 24 successive windows of 1 hour"
    """

    mechanism: Mechanism
    count: Count = field(default_factory=Count)
    time_column: str
    window: Tumble

    if TYPE_CHECKING:  # what may be given; the fields are what becomes of it

        def __init__(
            self,
            *,
            mechanism: Mechanism,
            count: Count = ...,
            name: str = "query",
            privacy_unit_column: str,
            keys: Iterable[str] = (),
            public_groups: Sequence[object] | None = None,
            time_column: str,
            time_unit: str | None = None,
            time_origin: Instant = ...,
            arrival_column: str | None = None,
            time_zone: str = "UTC",
            window: Tumble,
            start: Instant | None = None,
            end: Instant | None = None,
            allowed_lateness: Duration = ...,
            column_types: Mapping[str, object] | Sequence[tuple[str, object]] = (),
            max_key_bytes: int = 4096,
            max_ahead: Duration = ...,
            prepare: Prepare | None = None,
            finish: Finish | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.window) is not Tumble or self.every or self.triggers is not None:
            raise InvalidParameter(
                "a time-series mechanism needs windows side by side, each published once: give "
                "window=Tumble(...), and neither every nor triggers"
            )
        if not isinstance(self.count, Count):
            raise InvalidParameter(
                f"a time-series mechanism publishes one count; got {self.count!r}"
            )
        if self.public_groups is None:
            raise InvalidParameter("a time-series mechanism needs public_groups: the bins it fills")
        if self.privacy_unit_period != "forever":
            raise InvalidParameter(
                "a window, or w of them, is what is protected together: leave out "
                "privacy_unit_period"
            )
        if not isinstance(self.public_groups, NeedsTables):  # else it is checked with them
            self._check_mechanism(len(self.public_groups))

    def _check_mechanism(self, bins: int) -> None:
        """Refuse one that promises another thing, or cannot go through all windows."""
        terms, name = self.mechanism.terms(), name_of(self.mechanism)
        if terms.unit not in ("event", "w_event"):
            raise InvalidParameter(f"{name} does not protect single events")
        if terms.change != _ONE_COUNT and not terms.change.startswith("one value within"):
            raise InvalidParameter(
                f"a unit changes {_ONE_COUNT}, but {name} is set for events that change "
                f"{terms.change}; leave its sensitivity at 1"
            )
        self.mechanism.check(np.repeat(_SAMPLE, bins, axis=1))
        if not isinstance(self.mechanism, CounterMechanism) or self.start is None:
            return
        most, steps = self.mechanism.steps, self.schedule.steps
        if steps is None or steps > most:
            asked = "no end" if steps is None else f"{steps} windows"
            raise InvalidParameter(
                f"steps of {name} is {most}, but the query has {asked}; raise it, or use "
                "unbounded_counter"
            )

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """The count, its standard deviation, and whether it repeats an earlier one."""
        return self.count.name, f"{self.count.name}_stddev", "held"

    @property
    def protected(self) -> str:
        """What the promise is about, in words."""
        size, window = in_words(self.window.size), self.mechanism.terms().window or 1
        steps = f"{window} successive windows of {size}" if window > 1 else f"one window of {size}"
        return f"{rows_of(self.privacy_unit_column)} in {steps}"

    @property
    def clock(self) -> str:
        """What one step is, in the words of its dataset's book: queries that share it agree."""
        size, time = in_words(self.window.size), f"{self.time_column!r}{self.counted_from}"
        return (
            f"windows of {size} of {time} from {iso(self.start)} ({self.time_zone}), one row of "
            f"each {self.privacy_unit_column!r}"
        )

    def terms(self) -> Terms:
        """The book that this query opens where there is none."""
        return replace(self.mechanism.terms(), clock=self.clock)
