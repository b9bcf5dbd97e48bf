"""A continual GROUP BY, as a frozen value: what SQL compiles to and every engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import whole
from dpstream.privacy.accounting.promises import promise, rows_of
from dpstream.privacy.amounts import Amount, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.state.identity import canonical
from dpstream.query.aggregates import (
    Aggregate,
    Avg,
    AvgOfValues,
    AvgPerGroup,
    Count,
    CountUnits,
    Measure,
    OfCells,
    OfPairs,
    Sum,
    SumPerGroup,
    all_measures,
    measures_by_name,
)
from dpstream.query.grouping_sets import (
    GROUPING_ID,
    NOT_SHOWN,
    checked_sets,
    checked_weights,
    count_groups,
    grouping_id,
    is_chain,
    is_product,
)
from dpstream.query.key_weights import KeyWeights
from dpstream.query.period_bounds import (
    AUTO,
    CLAMPS,
    FINEST,
    FIRST_CLAMP,
    FIRST_GROUPS,
    FIRST_ROWS,
    HALF_OCTAVES,
    MOST_ROWS,
    Candidates,
    PeriodBounds,
    cut,
)
from dpstream.query.public_tables import NeedsTables
from dpstream.query.quantiles import Cells, Level, cells_of
from dpstream.query.row_spec import Finish, Prepare, RowSpec
from dpstream.query.settings import USUAL_GROUPS, part_of_last
from dpstream.query.shared_noise import SHARING_RULE, shares_by_itself, why_not_shared
from dpstream.query.windows import Duration, Instant, Tumble
from dpstream.records import Integers

_KEYS = """
    aggregates epsilon delta strategy max_groups_contributed max_rows_per_group max_rows_contributed
    pre_threshold selection_share last_share last_budget weights
    confidence debias debias_rows=max_dropped_rows report_bias min_change nonnegative buffers
    grouping_sets grouping_set_weights remember_keys choose_groups weighted_keys
    correlated_noise choose_rows choose_clamps bounds_chosen
"""  # a field that gets another name keeps its key: key=new_name
_OF_BIAS = Fraction(1, 50)  # of the budget: totals of a window are large beside their noise
_USUALLY_KEPT = Fraction(9, 10)  # of the rows; whatever it is, sound
_OF_BEYOND = Fraction(1, 5)  # of what is spent on rows
_TIMES_KEPT = 4  # the same of rows kept, where what is dropped is made up for
_FEWEST_DROPPED = 4  # rows that count of a unit of which few are kept
_USUAL_LAST = Fraction(1, 4)  # of the budget, for a window's last release, beside a given bound
MOST_REMEMBERED = 1_000_000
"""Keys of earlier windows that are remembered, if nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What is kept of a unit: `rows` rows, `groups` groups, `rows_per_group` rows in each group."""

    rows: int
    groups: int
    rows_per_group: int


@dataclass(frozen=True, kw_only=True)
class Query(RowSpec, identity="query", keys=_KEYS):
    """Aggregates per key, for ever, under user-level (epsilon, delta)-DP.

    Rows, keys, times and windows are said as in `RowSpec`. Without aggregates the keys that are
    found are published alone, and all of the budget finds keys. A unit contributes at most
    `max_groups_contributed` groups (over all windows), `max_rows_per_group` rows to each and
    `max_rows_contributed` rows in all.

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
    `report_bias`: measure, with 2% of the budget, what share of the rows and of the values summed
    the bounds have dropped; of each unit at most `max_dropped_rows` dropped rows count (default:
    twice as many as are kept, and at least 4). `debias="global"` makes up for that share in counts
    and sums; "groups" makes up for the groups that the bounds leave out alone, in whole counts, and
    by half where a key is close to the threshold. `remember_keys`: a key that an earlier window has
    shown needs no threshold in the next ones; a number says how many are remembered at most (True:
    a million). `max_groups_contributed` may be "auto", as if none is given: each period gets the
    bound that noisy histograms of earlier periods, which take 2% of the budget, speak for, and
    units for ever get 16 groups; `max_rows_per_group` and the clamps of sums may be "auto", too.
    Where the bound on groups is not given, `last_budget` and `debias` are chosen with it, from
    public facts alone (`settings.py`); beside a given bound they are 1/4 and None. `planned` names
    what nobody gave. `weighted_keys`: of keys that are published alone, a unit with few of them
    counts more in each; what a unit counts in all asks for the noise of one key.
    `correlated_noise`: of public groups in a window that holds all rows of a unit, counts and sums
    from 0 on get noise that the groups have partly alike, in its last release: less for each, and
    more for what is added up over them (None: where it is less, and nothing is computed from them).
    `grouping_sets`: sets of the keys (ROLLUP, CUBE): rows are bounded by all keys, and what is kept
    counts in each set. `grouping_set_weights`: how the sets share the budget (1 each). Over public
    groups the sets are made consistent by least squares, which lowers their error.

    >>> query = Query(privacy_unit_column="user", keys=["url"], epsilon=1, delta=1e-9,
    ...               max_groups_contributed=8)
    >>> query.bounds
    Bounds(rows=8, groups=8, rows_per_group=1)
    """

    aggregates: tuple[Aggregate, ...] = (Count(),)
    epsilon: Fraction
    delta: Fraction = Fraction(0)
    strategy: Literal["latched", "sqlp"] = "latched"
    max_groups_contributed: int = cast("int", AUTO)
    choose_groups: bool = False
    max_rows_per_group: int = 1
    choose_rows: bool = False
    choose_clamps: tuple[str, ...] = ()
    bounds_chosen: bool = False
    max_rows_contributed: int | None = None
    pre_threshold: int | None = None
    selection_share: Fraction = Fraction(1, 2)
    last_share: Fraction | None = Fraction(1, 2)
    last_budget: Fraction | None = cast("Fraction", AUTO)
    weights: tuple[tuple[str, Fraction], ...] = ()
    confidence: float | None = None
    debias: Literal["global", "groups"] | None = cast("None", AUTO)
    report_bias: bool = True
    max_dropped_rows: int | None = None
    min_change: float | None = None
    nonnegative: bool = False
    buffers: int = 4
    remember_keys: bool | int = True
    correlated_noise: bool | None = None
    weighted_keys: bool = False
    grouping_sets: tuple[tuple[str, ...], ...] = ()
    grouping_set_weights: tuple[Fraction, ...] = ()
    planned: tuple[str, ...] = field(default=(), repr=False, compare=False)

    if TYPE_CHECKING:  # what may be given; the fields above are what becomes of it

        def __init__(
            self,
            *,
            name: str = "query",
            privacy_unit_column: str,
            keys: Iterable[str] = (),
            aggregates: Iterable[Aggregate] = ...,
            epsilon: Amount,
            delta: Amount = 0,
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
            max_groups_contributed: int | Literal["auto"] = "auto",
            choose_groups: bool = False,
            max_rows_per_group: int | Literal["auto"] = 1,
            choose_rows: bool = False,
            choose_clamps: tuple[str, ...] = (),
            bounds_chosen: bool = False,
            max_rows_contributed: int | None = None,
            public_groups: Sequence[object] | None = None,
            pre_threshold: int | None = None,
            selection_share: Amount = ...,
            last_share: Amount | None = ...,
            last_budget: Amount | Literal["auto"] | None = "auto",
            weights: Mapping[str, Amount] | Sequence[tuple[str, Amount]] = (),
            confidence: float | None = None,
            debias: Literal["auto", "global", "groups"] | None = "auto",
            report_bias: bool = True,
            max_dropped_rows: int | None = None,
            min_change: float | None = None,
            nonnegative: bool = False,
            buffers: int = 4,
            remember_keys: bool | int = True,
            correlated_noise: bool | None = None,
            weighted_keys: bool = False,
            grouping_sets: Iterable[Iterable[str]] = (),
            grouping_set_weights: Sequence[Amount] = (),
            planned: tuple[str, ...] = (),
            column_types: Mapping[str, object] | Sequence[tuple[str, object]] = (),
            max_key_bytes: int = 4096,
            max_ahead: Duration = ...,
            prepare: Prepare | None = None,
            finish: Finish | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        open_settings = self._open_settings()
        for name in ("epsilon", "delta", "selection_share", "last_share", "last_budget"):
            if getattr(self, name) is None and name.startswith("last_"):
                continue
            if name == "delta" and self.delta == 0:
                put(name, Fraction(0))
                continue
            amount = positive(getattr(self, name), name)
            if amount >= 1 and name != "epsilon":
                raise InvalidParameter(f"{name} must be below 1; got {float(amount):g}")
            put(name, amount)
        if self.strategy == "sqlp":
            put("last_budget", None)  # its trees measure every step alike
        put("aggregates", tuple(self.aggregates))
        if "max_groups_contributed" in open_settings and self._has_one_bound:
            put("max_groups_contributed", USUAL_GROUPS)
        most_of = {"max_groups_contributed": HALF_OCTAVES[-1], "max_rows_per_group": MOST_ROWS}
        for name, largest in most_of.items():
            given: Any = getattr(self, name)
            if given == AUTO:
                put("choose_groups" if name == "max_groups_contributed" else "choose_rows", True)
                put(name, largest)
                if self.max_rows_contributed is not None:
                    raise InvalidParameter(
                        f"{name} = AUTO does not go with max_rows_contributed = "
                        f"{self.max_rows_contributed}, which would have to change with it; leave "
                        "that out: a unit has max_rows_per_group rows in each group that is chosen"
                    )
        for name in ("max_groups_contributed", "max_rows_per_group", "buffers"):
            put(name, whole(getattr(self, name), name, at_least=1))
        most = self.max_groups_contributed * self.max_rows_per_group
        rows = most if self.max_rows_contributed is None else self.max_rows_contributed
        put("max_rows_contributed", whole(rows, "max_rows_contributed", at_least=1))
        put("report_bias", bool(self.report_bias))
        if not isinstance(self.remember_keys, bool):
            put("remember_keys", whole(self.remember_keys, "remember_keys", at_least=1))
        if self.max_dropped_rows is not None:
            put("max_dropped_rows", whole(self.max_dropped_rows, "max_dropped_rows", at_least=1))
        if self.pre_threshold is not None:
            put("pre_threshold", whole(self.pre_threshold, "pre_threshold", at_least=0))
        self._settle_debias(open_settings)
        self._check_answers()
        put("weights", _exact_weights(self.weights, self.aggregates))
        put("grouping_sets", tuple(self.grouping_sets))
        super().__post_init__()
        put("grouping_sets", checked_sets(self.keys, self.grouping_sets))
        weights = checked_weights(self.grouping_sets, self.grouping_set_weights)
        put("grouping_set_weights", weights)
        self._settle_last_budget(open_settings)
        self._check_pure()
        put("weighted_keys", bool(self.weighted_keys))
        if self.weighted_keys:
            self._check_weighted_keys()
        if self.grouping_sets:
            self._check_sets()
        if not self.bounds_chosen:
            open_sums = (a for a in self.aggregates if isinstance(a, Sum) and a.is_open)
            put("choose_clamps", tuple(each.name for each in open_sums))
        if self.chooses:
            self._check_choices()
        if self.correlated_noise and (reason := why_not_shared(self)):
            raise InvalidParameter(f"correlated_noise in the query {self.name!r} {reason}")

    def _open_settings(self) -> set[str]:
        """The settings that nobody gave; what can be any number has its usual one meanwhile."""
        names = ("max_groups_contributed", "last_budget", "debias")
        found = {name for name in names if getattr(self, name) == AUTO}
        usual = {"last_budget": _USUAL_LAST, "debias": None}
        for name in found & usual.keys():
            object.__setattr__(self, name, usual[name])
        return found

    @property
    def _has_one_bound(self) -> bool:
        """Do all of a unit's rows count under one bound, that of a unit for ever?

        So do those of a unit in a query without windows. Where noise grows with the bound itself,
        or the bound follows from what is asked, it is given.
        """
        usual = self.strategy == "latched" and not self.grouping_sets and self.per_unit is None
        once = self.window is None or self.privacy_unit_period == "forever"
        return usual and once and self.delta != 0 and not self.weighted_keys

    def _settle_debias(self, open_settings: set[str]) -> None:
        """Make up for groups that are left out where nobody gave the bound, nor how.

        Not where columns are computed: those of one release would share the error of its share.
        """
        if "max_groups_contributed" not in open_settings:
            return
        object.__setattr__(self, "planned", ("max_groups_contributed",))
        grows = any(each.grows for each in self.aggregates if isinstance(each, Count | Sum))
        usual = grows and not self.grouping_sets and not self.pure and self.strategy == "latched"
        computes = bool(self.finish is not None and self.finish.computed)
        if "debias" in open_settings and usual and self.report_bias and not computes:
            object.__setattr__(self, "debias", "groups")
            object.__setattr__(self, "planned", (*self.planned, "debias"))

    def _settle_last_budget(self, open_settings: set[str]) -> None:
        """Choose what measures a window's last release once more, likewise."""
        if {"max_groups_contributed", "last_budget"} <= open_settings and not self.in_rounds:
            releases = max(self.starting(0).schedule.lengths)
            object.__setattr__(self, "last_budget", part_of_last(releases))
            object.__setattr__(self, "planned", (*self.planned, "last_budget"))

    def _check_answers(self) -> None:
        """Refuse aggregates and ways to show them that have no meaning."""
        if not self.aggregates and (not self.keys or self.public_groups is not None):
            raise InvalidParameter(
                "a query without aggregates publishes the keys that it finds, and here "
                f"{'all keys are public' if self.keys else 'there are none'}; add an aggregate, "
                "such as Count()"
            )
        if not all(isinstance(a, Count | Sum | OfPairs | OfCells) for a in self.aggregates):
            raise InvalidParameter(
                "aggregates must be such as Count, CountUnits, Sum(...) or Avg(...); got "
                f"{self.aggregates!r}"
            )
        if self.min_change is not None and not self.min_change > 0:
            raise InvalidParameter(f"min_change must be above 0; got {self.min_change}")
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise InvalidParameter(
                f"confidence must lie between 0 and 1, such as 0.95; got {self.confidence}"
            )
        if self.debias not in (None, "global", "groups"):
            raise InvalidParameter(
                f"debias must be 'global', 'groups' or None; got {self.debias!r}"
            )
        if not self.report_bias and (self.debias or self.max_dropped_rows is not None):
            name = "debias" if self.debias else "max_dropped_rows"
            raise InvalidParameter(
                f"{name} needs report_bias: without it nobody measures what the bounds drop"
            )
        once = self.every is None and self.triggers is None
        for each in self.aggregates:
            if isinstance(each, AvgPerGroup) and not once:
                raise InvalidParameter(
                    f"{each.name!r} averages each unit's own average, which rises and falls as "
                    "rows come, so its windows cannot be published again and again: publish each "
                    "window once (without EMIT EVERY, every and triggers), ask for a SUM and a "
                    "COUNT with contribution_bounds_per_group, or give the AVG "
                    "contribution_bounds_per_row"
                )
        fitted = (
            replace(a, once=once) if isinstance(a, SumPerGroup | AvgPerGroup) else a
            for a in self.aggregates
        )
        object.__setattr__(self, "aggregates", tuple(fitted))
        if self.strategy not in ("latched", "sqlp"):
            raise InvalidParameter(f"strategy must be 'latched' or 'sqlp'; got {self.strategy!r}")
        if self.strategy == "sqlp" and self.min_change is not None:
            raise InvalidParameter(
                "min_change is for the strategy 'latched': 'sqlp' publishes a group only when "
                "enough units have come to it anyway"
            )
        per_unit = [a.name for a in self.aggregates if any(m.per_unit for m in a.measures(True))]
        if self.strategy == "sqlp" and per_unit:
            raise InvalidParameter(
                f"{per_unit[0]!r} bounds what each unit has in a group, which the strategy 'sqlp' "
                "does not know; use 'latched'"
            )
        for each in self.aggregates if self.confidence is not None else ():
            if getattr(each, "mechanism", "") == "exponential":
                raise InvalidParameter(
                    f"{each.name!r} asks for the exponential mechanism, which tells no interval; "
                    "leave confidence or mechanism out"
                )
        given = "min_change" if self.min_change is not None else "strategy = 'sqlp'"
        for each in self.aggregates if self.min_change or self.strategy == "sqlp" else ():
            if isinstance(each, OfCells):
                raise InvalidParameter(
                    f"{given} is not for quantiles and histograms such as {each.name!r}: they are "
                    "read off many sums, at every release; leave it out"
                )

    def _check_weighted_keys(self) -> None:
        """Weights find keys; nothing else is measured by them."""
        problem = ""
        if self.aggregates:
            problem = f"it has aggregates, such as {self.aggregates[0].name!r}"
        elif self.strategy != "latched":
            problem = f"the strategy {self.strategy!r} counts units"
        elif self.grouping_sets:
            problem = "it has several sets of keys"
        elif self.choose_groups:
            problem = "its max_groups_contributed is chosen for each period; give a number"
        if problem:
            raise InvalidParameter(
                f"weighted_keys are for a query that publishes keys alone, and {problem}; leave "
                "one of both out"
            )

    @property
    def pure(self) -> bool:
        """Is there no delta? Then noise is Laplace's, and all that is spent is epsilon."""
        return self.delta == 0

    def _check_pure(self) -> None:
        """Without delta groups are public and windows are published once."""
        if not self.pure:
            return
        reason = ""
        if self.keys and self.public_groups is None:
            reason = "keys that are not public are found only with a delta"
        elif self.every is not None or self.triggers is not None:
            reason = "windows that are published again and again take Gaussian noise"
        elif self.strategy != "latched":
            reason = f"the strategy {self.strategy!r} takes Gaussian noise"
        elif self.grouping_sets:
            reason = "several sets of keys (ROLLUP, CUBE) take Gaussian noise"
        if reason:
            raise InvalidParameter(
                f"the query {self.name!r} has no delta, and {reason}; give it one, such as "
                "delta = 1e-9 (well below one in the number of users)"
            )
        if self.confidence is not None and self.debias is not None:
            raise InvalidParameter(
                f"the query {self.name!r} has no delta, and no interval of figures that debias has "
                "made; leave confidence or debias out, or give it a delta, such as 1e-9"
            )
        for each in self.aggregates if self.confidence is not None else ():
            if isinstance(each, OfCells):
                raise InvalidParameter(
                    f"{each.name!r} has no interval without a delta; leave confidence out, or "
                    "give the query a delta, such as 1e-9"
                )

    def _check_sets(self) -> None:
        """Refuse what is not known of several sets of keys."""
        if not self.aggregates:
            raise InvalidParameter("grouping_sets need an aggregate, such as Count()")
        for name, wrong in {
            "strategy = 'sqlp'": self.strategy == "sqlp",
            "min_change": self.min_change is not None,
            "nonnegative": self.nonnegative,
        }.items():
            if wrong:
                raise InvalidParameter(
                    f"{name} is not for GROUPING SETS, ROLLUP and CUBE: a total would not be the "
                    "sum of its parts; leave it out, or ask for one set of keys"
                )
        for each in self.aggregates:
            bounded = isinstance(each, OfCells) or any(m.per_unit for m in each.measures(False))
            if bounded:
                raise InvalidParameter(
                    f"{each.name!r} does not go with GROUPING SETS, ROLLUP and CUBE: they take "
                    "COUNT, COUNT(DISTINCT unit) and what is made of sums of clamped rows "
                    "(contribution_bounds_per_row); ask for it in a query for each set of keys"
                )
        public = self.public_groups
        if public is None or isinstance(public, NeedsTables) or is_chain(self.grouping_sets):
            return
        if not is_product(self.keys, public):
            raise InvalidParameter(
                "sets of keys of which none holds the other, as with CUBE, are made consistent "
                "where public_groups has all combinations of the values of each key; list them "
                "all, or use ROLLUP"
            )

    def _check_choices(self) -> None:
        """Refuse what is not known of bounds that are chosen for each period."""
        given = f"max_groups_contributed = AUTO (as if none is given) in the query {self.name!r}"
        if not self.choose_groups:
            what = "max_rows_per_group" if self.choose_rows else f"the clamps of {self._open[0]!r}"
            given = f"AUTO for {what} in the query {self.name!r}"
        for name, wrong in {
            "delta": self.pure,
            "strategy = 'sqlp'": self.strategy == "sqlp",
            "grouping_sets": bool(self.grouping_sets),
            "rows of each unit that are grouped first": self.per_unit is not None,
        }.items():
            if wrong:
                what = "a query without a delta" if name == "delta" else name
                raise InvalidParameter(f"{given} does not go with {what}; give a number")
        if self.window is None or self.privacy_unit_period == "forever":
            raise InvalidParameter(
                f"{given} needs windows and a privacy_unit_period, which each have a bound of "
                "their own, chosen by what was published of earlier periods; a unit for ever has "
                "one bound for good: give a number (`dpstream bounds` proposes one, paid for)"
            )
        known = (Count, CountUnits, Sum, Avg, AvgOfValues)
        for each in self.aggregates if self.choose_rows or self.choose_clamps else ():
            if type(each) not in known:
                raise InvalidParameter(
                    f"AUTO for rows and clamps in the query {self.name!r} goes with COUNT, SUM and "
                    f"AVG of clamped rows alone, and {each.name!r} is none; give numbers"
                )
        if self.choose_rows and all(a.per_unit for a in self.aggregates):
            raise InvalidParameter(
                f"max_rows_per_group = AUTO in the query {self.name!r} needs an aggregate of rows, "
                "such as COUNT(*); units are counted once in a group: leave it out"
            )

    @property
    def chooses(self) -> bool:
        """Is some bound chosen for each period?"""
        any_open = self.choose_groups or self.choose_rows or bool(self.choose_clamps)
        return any_open and not self.bounds_chosen

    @property
    def _open(self) -> tuple[str, ...]:
        return self.choose_clamps

    @cached_property
    def shares_noise(self) -> bool:
        """Do public groups have a part of their noise alike?"""
        if self.correlated_noise is None:
            return shares_by_itself(self)
        return self.correlated_noise

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The bounds on groups of which each period gets one; none: one bound holds for all.

        >>> asked = {"epsilon": 1, "delta": 1e-9, "time_column": "ts", "window": Tumble("1 hour")}
        >>> Query(privacy_unit_column="user", keys=["page"], privacy_unit_period="1 day",
        ...       max_groups_contributed="auto", **asked).choices[:6]
        (1, 2, 3, 4, 6, 8)
        """
        most = self.bounds.groups
        if not self.choose_groups or self.bounds_chosen or most == 1:
            return ()
        return cut(HALF_OCTAVES, most)

    @property
    def first_choice(self) -> int:
        """The bound on groups of periods before which nothing was published."""
        return max(choice for choice in self.choices if choice <= FIRST_GROUPS)

    @cached_property
    def candidates(self) -> tuple[Candidates, ...]:
        """The bounds that are chosen for each period; none: all of them are given."""
        if not self.chooses:
            return ()
        found = []
        if self.choices:
            found.append(Candidates(kind="groups", edges=self.choices, first=self.first_choice))
        if self.choose_rows and self.max_rows_per_group > 1:
            first = min(FIRST_ROWS, self.max_rows_per_group)
            edges = cut(HALF_OCTAVES, self.max_rows_per_group)
            found.append(Candidates(kind="rows", edges=edges, first=first))
        for number, (column, _) in enumerate(self._open_values):
            kind = f"rows of {column}"
            found.append(Candidates(kind=kind, edges=CLAMPS, first=FIRST_CLAMP, clamp=number))
        return tuple(found)

    @cached_property
    def _open_values(self) -> dict[tuple[str, Fraction], int]:
        """The values whose clamps are chosen: (column, least value), and the clamp's number."""
        sums = [a for a in self.aggregates if isinstance(a, Sum) and a.is_open]
        names = dict.fromkeys((each.column, each.lo) for each in sums)
        return {name: number for number, name in enumerate(names)}

    def clamp_of(self, measure: Measure) -> int | None:
        """Which of the chosen clamps a column has; None: it has clamps that were given, or none."""
        if measure.kind != "value" or measure.power == 0 or measure.quantum != FINEST:
            return None
        return self._open_values.get((measure.column, measure.lo))

    @property
    def first_bounds(self) -> PeriodBounds:
        """Those of periods before which nothing was published."""
        return self._bounds_with({each: each.first for each in self.candidates})

    @property
    def widest_bounds(self) -> PeriodBounds:
        """The largest of each."""
        return self._bounds_with({each: each.edges[-1] for each in self.candidates})

    def _bounds_with(self, edges: Mapping[Candidates, Fraction | int]) -> PeriodBounds:
        clamps = (FIRST_CLAMP,) * len(self._open_values)
        bounds = PeriodBounds(
            groups=self.max_groups_contributed, rows=self.max_rows_per_group, clamps=clamps
        )
        for each, edge in edges.items():
            bounds = each.put(bounds, edge)
        return bounds

    @property
    def _rows_given(self) -> int | None:
        """Rows of a unit in all, where that does not follow from bounds that are chosen."""
        return None if self.choose_groups or self.choose_rows else self.max_rows_contributed

    def with_bounds(self, bounds: PeriodBounds) -> Query:
        """The query with the bounds of one period."""
        aggregates = tuple(
            each.clamped_at(bounds.clamps[self._open_values[each.column, each.lo]])
            if isinstance(each, Sum) and each.is_open
            else each
            for each in self.aggregates
        )
        return replace(
            self,
            aggregates=aggregates,
            max_groups_contributed=bounds.groups,
            max_rows_per_group=bounds.rows,
            max_rows_contributed=self._rows_given,
            choose_groups=False,
            bounds_chosen=True,
        )

    @property
    def rows_wait(self) -> bool:
        """May rows wait for a later step than their own?"""
        return self.per_unit is not None or bool(self.candidates)

    @property
    def begins_with_tables(self) -> bool:
        """Does a window begin with what tables of earlier steps tell?"""
        return bool(self.remembered_keys or self.candidates)

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns that name a group: its keys, and its set where there are several."""
        return (*self.keys, GROUPING_ID) if self.grouping_sets else self.keys

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that name a row of a release."""
        rest = self.grouping_sets and self.public_groups is None
        return (*self.group_columns, NOT_SHOWN) if rest else self.group_columns

    @cached_property
    def grouping_ids(self) -> Integers:
        """The number of each set."""
        return np.array([grouping_id(self.keys, names) for names in self.grouping_sets], np.int64)

    def sets_of(self, groups: pa.Table) -> Integers:
        """For each group which of the sets it is of."""
        order = np.argsort(self.grouping_ids)
        numbers = np.asarray(groups[GROUPING_ID].combine_chunks(), np.int64)
        found: Integers = order[np.searchsorted(self.grouping_ids[order], numbers)]
        return found

    def groups_of_set(self, names: Sequence[str]) -> int:
        """How many groups (key and window) of a set of keys one unit can be in, at most."""
        if len(names) == len(self.keys):
            return self.bounds.groups
        public = self.public_groups
        if public is None and names:
            return self.bounds.groups
        if public is None or isinstance(public, NeedsTables):
            cells = 1 if not names else None
        else:
            cells = count_groups(self.keys, public, names)
        windows = self.windows_reached
        if cells is None or windows is None:
            return self.bounds.groups
        return min(self.bounds.groups, windows * cells)

    def is_additive(self, measure: Measure) -> bool:
        """Is a group's sum that of the groups that it is divided into?

        A unit in several of them counts once in each, and once in the whole.
        """
        return measure.kind != "units" or self.bounds.groups == 1

    @cached_property
    def bounds(self) -> Bounds:
        """What is kept of each unit: noise and memory are for groups that exist.

        >>> asked = {"epsilon": 1, "delta": 1e-9, "max_groups_contributed": 8}
        >>> Query(privacy_unit_column="user", **asked).bounds
        Bounds(rows=1, groups=1, rows_per_group=1)
        """
        most = self.max_groups_contributed
        return self._bounds(min(most, most if self.reachable is None else self.reachable))

    @property
    def declared_bounds(self) -> Bounds:
        """What the query asks to be kept of each unit, were there groups enough."""
        return self._bounds(self.max_groups_contributed)

    def _bounds(self, groups: int) -> Bounds:
        assert self.max_rows_contributed is not None
        rows = min(self.max_rows_contributed, groups * self.max_rows_per_group)
        return Bounds(
            rows=rows, groups=min(groups, rows), rows_per_group=min(self.max_rows_per_group, rows)
        )

    @cached_property
    def reachable(self) -> int | None:
        """Groups (key and window) that rows of one unit can be in at all; None: without limit.

        Proof: `docs/soundness/latched.md`.
        """
        once = self.per_unit is not None and self.per_unit.at_most_one
        untold = self.public_groups is None or isinstance(self.public_groups, NeedsTables)
        if self.per_unit is not None and self.per_unit.most is not None:
            return self.per_unit.most
        if untold and not once:
            return None
        windows = self.windows_reached
        return None if windows is None else windows * (1 if once else len(self.public_groups or ()))

    @cached_property
    def windows_reached(self) -> int | None:
        """Windows that rows of one unit can be in; None: without limit."""
        fixed = self.starting(0)  # a live query begins with a whole window, whenever that is
        return fixed.schedule.windows_of_a_period(fixed.periods)

    def facts(self) -> dict[str, str]:
        """Everything that fixes the releases besides the data, by key.

        Bounds that are cut to what is reachable, and sums that share their measures, have keys of
        their own: without these the facts are as they were when neither was known.
        """
        facts = super().facts()
        if self.bounds != self.declared_bounds:
            facts["reachable_groups"] = canonical(self.reachable)
        if any(measure.null is not None for measure in self.measures):
            facts["shared_sums"] = canonical(True)
        return facts

    @property
    def in_rounds(self) -> bool:
        """Are keys found again and again, each time by the units since the last time?"""
        return self.strategy == "sqlp" and self.public_groups is None

    @property
    def remembered_keys(self) -> int:
        """How many keys of earlier windows it remembers at most; 0: it remembers none.

        Only windows that repeat have any, and queries without several sets of keys. Keys that are
        found in rounds are judged by the first column beside the count that finds them.
        """
        found = bool(self.keys) and self.public_groups is None
        if not found or self.window is None or not self.remember_keys or self.grouping_sets:
            return 0
        if self.in_rounds and len(self.measures) == 1:
            return 0
        if self.start is not None and self.schedule.windows == 1:
            return 0
        return MOST_REMEMBERED if self.remember_keys is True else self.remember_keys

    @property
    def sized_by(self) -> int:
        """The measure whose noisy value says how large a remembered key is: it is published."""
        return 1 if self.in_rounds else 0

    @property
    def sends_rows(self) -> bool:
        """Does it matter to a group which rows come to it, and not only what they add up to?"""
        distinct = any(measure.kind == "distinct" for measure in self.measures)
        return self.in_rounds or distinct or bool(self.cells)

    @property
    def rounds_of_units(self) -> bool:
        """Must a group remember which units have come to it in its round?"""
        return self.in_rounds and self.bounds.rows_per_group > 1

    @property
    def one_row(self) -> bool:
        """Are rows units in what is published? A unit has one row in a group, then."""
        several = bool(self.grouping_sets) and self.bounds.groups > 1
        one = self.bounds.rows_per_group == 1 and not self.choose_rows
        return one and not self.in_rounds and not several

    @cached_property
    def key_weights(self) -> KeyWeights | None:
        """What a unit's keys count, where not all count alike."""
        if not self.weighted_keys:
            return None
        once = self.window is None and self.every is None and self.triggers is None
        return KeyWeights(groups=self.bounds.groups, once=once)

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The exact columns behind the aggregates."""
        finder = Measure(kind="round" if self.in_rounds else "units")
        if self.key_weights is not None:
            finder = self.key_weights.measure
        return all_measures(
            self.aggregates,
            one_row=self.one_row,
            finder=finder if self.public_groups is None else None,
        )

    @cached_property
    def measures_of(self) -> dict[str, tuple[Measure, ...]]:
        """The measures behind each aggregate, by its name."""
        return measures_by_name(self.aggregates, one_row=self.one_row)

    @cached_property
    def cells(self) -> tuple[Cells, ...]:
        """The cells of columns behind quantiles and histograms."""
        return cells_of(self.aggregates)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Their levels: columns with noise for each node."""
        return tuple(level for cells in self.cells for level in cells.levels)

    @property
    def found(self) -> int:
        """Numbers that are read off cells in each group: they follow the measures."""
        return sum(each.found for each in self.aggregates if isinstance(each, OfCells))

    @property
    def answer_columns(self) -> list[str]:
        """Of each aggregate its value, its standard deviation, and its interval if asked for.

        And the share of the rows that the bounds have kept, where it is measured.
        """
        names = [
            f"{aggregate.name}{more}"
            for aggregate in self.aggregates
            for more in ("", "_stddev", *self.interval_ends(aggregate))
        ]
        return [*names, "kept_share"] if self.totals else names

    def interval_ends(self, aggregate: Aggregate) -> tuple[str, ...]:
        """What the columns of an aggregate's interval end with."""
        if self.confidence is None:
            return ()
        return ("_low", "_high", *(["_high_all"] if self.totals and aggregate.bounds_all else []))

    @property
    def value_measures(self) -> list[Measure]:
        """The measures that are made of a value of each row, then the cells that one falls into."""
        return [*(measure for measure in self.measures if measure.columns_of_values), *self.cells]

    @property
    def rows_differ(self) -> bool:
        """Does it matter which rows of a unit in a group are kept? Then that goes by hashes alone.

        Sums of clamped rows and cells take the rows that are kept; what is bounded for each unit
        and group takes all of them.
        """
        return bool(self.cells) or any(measure.kind == "value" for measure in self.measures)

    @cached_property
    def value_columns(self) -> dict[Measure, int]:
        """The first column of each of them among the values of rows."""
        widths = [measure.columns_of_values for measure in self.value_measures]
        return {m: sum(widths[:at]) for at, m in enumerate(self.value_measures)}

    @cached_property
    def unit_measures(self) -> tuple[Measure, ...]:
        """The measures that are bounded for each unit and group, however many rows it has there."""
        return tuple(measure for measure in self.measures if measure.per_unit)

    @cached_property
    def totals(self) -> tuple[Measure, ...]:
        """Exact figures of each window as a whole: what the bounds have kept and dropped.

        Rows first, then the values of each sum to which no row adds less than 0. None where nobody
        asks for them, or where no bound can drop anything.
        """
        if not self.report_bias or not self.may_drop or not self.aggregates:
            return ()
        rows = Measure(kind="dropped"), Measure(kind="kept"), Measure(kind="beyond")
        pairs = ((replace(m, kind="dropped"), replace(m, kind="kept")) for m in self.summed)
        elsewhere = (Measure(kind="elsewhere"),) if self.counts_elsewhere else ()
        return *rows, *(total for pair in pairs for total in pair), *elsewhere

    @property
    def counts_elsewhere(self) -> bool:
        """Are dropped rows of groups that their unit does not count in told from the others?

        Where units in groups are counted all of them are such.
        """
        return self.debias == "groups" and not self.counts_units

    @cached_property
    def summed(self) -> tuple[Measure, ...]:
        """The measures of sums to which no row adds less than 0."""
        sums = (a for a in self.aggregates if isinstance(a, Sum) and a.grows and a.lo >= 0)
        return tuple(dict.fromkeys(measure for a in sums for measure in a.measures(self.one_row)))

    @cached_property
    def summed_values(self) -> list[tuple[int, int]]:
        """For each of `summed` its column among the values of rows, and what brings that to 0.

        A sum that is measured about the middle has values that are less by it, in grid steps.
        """
        sums = (a for a in self.aggregates if isinstance(a, Sum) and a.grows and a.lo >= 0)
        measured = {a.measures(self.one_row)[0]: self.measures_of[a.name][0] for a in sums}
        return [
            (self.value_columns[each], int(each.middle / each.quantum))
            for each in (measured[measure] for measure in self.summed)
        ]

    @property
    def most_dropped(self) -> int:
        """How many dropped rows of a unit count, over all windows."""
        times = _TIMES_KEPT if self.debias == "groups" else 2
        usual = max(times * self.bounds.rows, _FEWEST_DROPPED)
        return usual if self.max_dropped_rows is None else self.max_dropped_rows

    @property
    def may_drop(self) -> bool:
        """Can bounding drop anything that would be counted?

        Further rows of a unit in a group are nothing to COUNT(DISTINCT unit).
        """
        if self.per_unit is not None and self.per_unit.at_most_one:  # one row in each window
            return self.reachable is None or self.reachable > self.bounds.rows
        groups = self.public_groups
        untold = groups is None or isinstance(groups, NeedsTables)
        most = None if untold or self.window is not None else len(groups or ())
        fits = most is not None and most <= self.bounds.groups and self.bounds.rows_per_group == 1
        return not (self.counts_units and fits)

    @property
    def counts_units(self) -> bool:
        """Does it ask for units alone, or for what each has in a group? Then what bounding drops
        are units in groups, not rows."""
        return all(aggregate.per_unit for aggregate in self.aggregates)

    @cached_property
    def column_weights(self) -> tuple[Fraction, ...]:
        """How the budget is divided among measures and totals: by the greatest wish for each."""
        columns: tuple[Measure, ...] = self.measures + self.levels
        wishes: dict[Measure, list[Fraction]] = {measure: [] for measure in columns}
        given = dict(self.weights)
        for aggregate in self.aggregates:
            measures = self.measures_of[aggregate.name]
            wish = given.get(aggregate.name, Fraction(1))
            if isinstance(aggregate, OfCells):
                levels = [each for each in self.levels if each.cells == aggregate.cells]
                for level in levels:
                    wishes[level].append(wish * (1 - aggregate.of_rows) / len(levels))
                wish *= aggregate.of_rows
            for measure in measures:
                wishes[measure].append(wish)
        if self.public_groups is None:
            finder = wishes[self.measures[0]]
            asked = any(
                self.measures[0] in self.measures_of[each.name]
                for each in self.aggregates
                if not isinstance(each, OfCells)
            )
            if "selection" in given or not asked:
                finder.append(given.get("selection", Fraction(1)))
        weights = tuple(max(wish) for wish in wishes.values())
        if of_sets := self.grouping_set_weights:
            weights = tuple(wish * each / sum(of_sets) for each in of_sets for wish in weights)
        total = given.get("bias", sum(weights) * _OF_BIAS / (1 - _OF_BIAS))
        return weights + tuple(total * part for part in self._parts_of_totals)

    @property
    def _parts_of_totals(self) -> list[Fraction]:
        """How totals divide what is theirs.

        The share s = k / (k + d) moves by ((1 - s) dk - s dd) / (k + d): with noise in proportion
        to the bounds R and R_d, its variance is least if mu^2 is divided as (1 - s) R : s R_d.
        """
        if not self.totals:
            return []
        dropped = _USUALLY_KEPT * self.most_dropped
        kept = (1 - _USUALLY_KEPT) * self.bounds.rows
        pair = [dropped / (dropped + kept), kept / (dropped + kept)]
        sums = len(self.summed)
        parts = [*(part * (1 - _OF_BEYOND) for part in pair), _OF_BEYOND, *(pair * sums)]
        if self.counts_elsewhere:  # what is made up for is as sure as what is told
            parts[0] /= 2
            parts.append(parts[0])
        return [part / (1 + sums) for part in parts]

    def written(self) -> dict[str, Any]:
        """As for any rows; a query without totals is the one that it was before they were known."""
        facts = super().written() | {"debias_rows": self.most_dropped if self.totals else None}
        if not self.totals:
            del facts["report_bias"]
        if not self.remembered_keys:
            del facts["remember_keys"]
        if not self.weighted_keys:
            del facts["weighted_keys"]
        for name in ("choose_groups", "choose_rows", "choose_clamps", "bounds_chosen"):
            if not getattr(self, name):
                del facts[name]
        if self.shares_noise:
            facts["correlated_noise"] = SHARING_RULE
        else:
            del facts["correlated_noise"]
        if not self.grouping_sets:
            del facts["grouping_sets"], facts["grouping_set_weights"]
        return facts

    @property
    def protected(self) -> str:
        """All that one unit may change, in the words of its dataset's book."""
        if self.privacy_unit_period == "forever":
            return rows_of(self.privacy_unit_column)
        return rows_of(self.privacy_unit_column, time=f"{self.time_column}{self.counted_from}")

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


def _exact_weights(
    given: Mapping[str, Any] | Sequence[tuple[str, Any]], aggregates: Sequence[Aggregate]
) -> tuple[tuple[str, Fraction], ...]:
    """Names and exact weights, in the order of the names: part of what fixes the releases."""
    known = {*(a.name for a in aggregates), "selection", "bias"}
    weights = dict(given)
    if not weights.keys() <= known:
        raise InvalidParameter(
            "weights must name aggregates of the query or 'selection'; got "
            f"{sorted(weights.keys() - known)}, known are {sorted(known)}"
        )
    return tuple((n, positive(w, f"the weight of {n}")) for n, w in sorted(weights.items()))
