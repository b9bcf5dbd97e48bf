"""Aggregates: which measures each is made of, and what it makes of them once they are noisy.

Each aggregate is a function of a few *measures*: exact running sums of integers per group. Noise is
added to measures and to nothing else. A value lies on a public grid, `quantum`, after clamping to
[lo, hi]; what one row adds is at most `largest`, from which sensitivities are computed.

    COUNT(*)              rows (with one row per unit and group: units)
    COUNT(DISTINCT unit)  units
    SUM(x)                sum of clamp(x)
    AVG(x)                middle + sum of (clamp(x) - middle) / rows
    AVG(IF(c, x, NULL))   the same over the values that there are
    VARIANCE, STDDEV      AVG of the squared distance from the middle, less that of AVG, squared
    COUNT(DISTINCT x)     values, of which each unit brings a few to a group

Bounds per row clamp each row. Bounds per group clamp what all rows of a unit in a group make
together, however many they are. Proof: `docs/soundness/per_unit.md`.
    quantiles, histograms sums over cells of a column's range: `quantiles.py`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from scipy.special import ndtri

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import Amount, exact, positive
from dpstream.privacy.state.identity import Identified
from dpstream.query.period_bounds import AUTO, CLAMPS, FINEST, STEPS, is_auto
from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One exact column: units, rows, or the sum of a value on its grid less `middle`.

    "round": units since their group was last published. "weight": units, each with a weight of at
    most `hi` (`key_weights.py`). With `power` 2 the squared distance from `middle` is summed, less
    the middle of its own range; with 0, 1 for a value and 0 for NULL. "leaf", "level":
    `quantiles.py`. Of a window as a whole: "kept" and "dropped" rows, or with a column their
    values, units "beyond" the dropped rows that count, and dropped rows of groups that their unit
    is not in, "elsewhere". "clamped": of each unit what `of_unit`
    says of its rows, within [lo, hi]. "distinct": values, of
    which each unit brings at most `hi`.
    """

    kind: Literal[
        "units",
        "rows",
        "value",
        "round",
        "kept",
        "dropped",
        "beyond",
        "elsewhere",
        "clamped",
        "distinct",
        "leaf",
        "level",
        "weight",
    ]
    column: str = ""
    lo: Fraction = Fraction(0)
    hi: Fraction = Fraction(1)
    middle: Fraction = Fraction(0)
    quantum: Fraction = Fraction(1)
    power: Literal[0, 1, 2] = 1
    null: Fraction | None = None
    """What NULL counts as; None: the middle."""
    of_unit: Literal["parts", "sum", "mean"] = "parts"
    """What is clamped of a unit in a group: the sums of its positive values and of its negative
    ones, each apart; the sum of all; or their mean."""

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        if self.kind == "clamped":
            bounds = f"{self.lo}|{self.hi}|{self.middle}|{self.quantum}"
            return f"clamped|{self.of_unit}|{bounds}|{self.column}"
        if not self.column:
            return self.kind
        if self.kind != "value":
            return f"{self.kind}|{replace(self, kind='value').name}"
        squared = "" if self.power == 1 else f"^{self.power}|"
        if self.null is not None:
            squared = f"NULL={self.null}|{squared}"
        return f"{squared}{self.lo}|{self.hi}|{self.middle}|{self.quantum}|{self.column}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a row that it is made of, as `on_grid` takes them."""
        return (self.column,) if self.column else ()

    @property
    def signed(self) -> bool:
        """May a row take something away?"""
        if self.per_unit:
            return self.of_unit != "parts" or self.fall > 0
        return self.kind == "value" and (self.power == 2 or self.lo < self.middle)

    @property
    def reach(self) -> Fraction:
        """The largest distance of a clamped value from the middle."""
        return max(self.hi - self.middle, self.middle - self.lo)

    @property
    def offset(self) -> Fraction:
        """What is taken off a squared distance: a grid point halfway to the largest one."""
        return math.floor(self.reach**2 / 2 / self.quantum) * self.quantum

    @property
    def largest(self) -> Fraction:
        """The most that one row adds, in grid steps; for some kinds, that one unit adds."""
        if self.kind == "weight":
            return self.hi / self.quantum
        if not self.column and self.kind != "clamped":
            return Fraction(1)
        if self.power < 2:
            return self.reach / self.quantum
        return max(self.reach**2 - self.offset, self.offset) / self.quantum

    @property
    def per_unit(self) -> bool:
        """Is it bounded for each unit and group, however many rows the unit has there?"""
        return self.kind in ("clamped", "distinct")

    @property
    def columns_of_values(self) -> int:
        """How many numbers of each row it needs; the id of a value has two words."""
        return _NUMBERS_OF_ROWS.get(self.kind, 0)

    @property
    def fall(self) -> Fraction:
        """What a unit may take away at one step for each 1 that it adds at another, at most 1."""
        if self.kind == "distinct":  # without the unit, the next one who brings the value counts
            return Fraction(1)
        if self.kind != "clamped" or self.of_unit != "parts" or not self.lo < 0 < self.hi:
            return Fraction(0)
        return min(self.hi, -self.lo) / max(self.hi, -self.lo)

    def unclamped(self, values: Reals) -> Integers:
        """Values of rows on the grid, as long as they can matter to what is clamped later.

        Parts are clamped to what a part may be: more of one row never counts.
        """
        steps = values / float(self.quantum)
        lo, hi = float(-MOST_STEPS), float(MOST_STEPS)
        if self.of_unit == "parts":
            lo, hi = (
                min(float(self.lo / self.quantum), 0.0),
                max(float(self.hi / self.quantum), 0.0),
            )
        whole = np.rint(np.clip(np.where(np.isnan(steps), 0.0, steps), lo, hi)).astype(np.int64)
        return np.where(np.isnan(steps), NULL_STEPS, whole)

    def on_grid(self, values: Reals, /) -> Integers:
        """Clamp, take the middle off, round to the grid; NULL is NaN here."""
        if self.kind == "clamped":
            return self.unclamped(values)
        lo, hi, middle = float(self.lo), float(self.hi), float(self.middle)
        if self.power == 0:
            return (~np.isnan(values)).astype(np.int64)
        if self.null is not None:
            values = np.where(np.isnan(values), float(self.null), values)
        distances = np.clip(values, lo, hi) - middle
        if self.power == 2:
            distances = np.where(np.isnan(distances), 0, distances) ** 2 - float(self.offset)
        steps = np.rint(distances / float(self.quantum))
        most = float(self.largest)  # the division may round beyond the edge
        return np.where(np.isnan(steps), 0, np.clip(steps, -most, most)).astype(np.int64)


_NUMBERS_OF_ROWS = {"value": 1, "clamped": 1, "distinct": 2, "leaf": 1, "weight": 1}
MOST_STEPS = 1 << 40
"""Grid steps of one row's value, where it is not clamped itself."""
_MOST_VALUES = 1 << 20
NULL_STEPS = -(1 << 62)
"""Stands for NULL among values that are not clamped themselves."""

Pair: TypeAlias = tuple[Any, Reals]
"""Answers and their standard deviations."""


class Lost(NamedTuple):
    """What one group may have lost by the bounds, of its rows or of its values.

    `least_kept`: the share of it that was kept at least, by assumption (`group_by/bias.py`);
    `most`: all that the window has lost, at most; infinite where that is not known.
    """

    least_kept: float
    most: float

    def added_to(self, high: Reals) -> Reals:
        """The figure of all rows at most, if that of the rows kept is at most `high`."""
        all_lost: Reals = high + self.most
        return np.minimum(high / self.least_kept, all_lost) if self.least_kept else all_lost


ErrorBar: TypeAlias = Literal["fixed", "per_row", "with_release"]
"""That of its first measure; that, divided by the rows of the group; or only a release says it."""


@dataclass(frozen=True)
class Count(Identified, identity="count", keys="name"):
    """COUNT(*): rows per group.

    >>> Count("visits").name
    'visits'
    """

    name: str = "count"
    contribution_bounds_per_group: tuple[Amount, Amount] | None = field(
        kw_only=True, default=None, repr=False
    )
    grows: ClassVar[bool] = True
    """Does it grow with every row? Then rows that bounding dropped can be made up for."""
    per_unit: ClassVar[bool] = False
    """Does it ask for units, or for what each unit has in a group, and not for rows?"""
    error_bar: ClassVar[ErrorBar] = "fixed"
    """What is known of its error bar before a row is read."""
    bounds_all: ClassVar[bool] = True
    """Can `high_all` say how large it may be of all rows, dropped ones too?"""

    def __new__(cls, *args: Any, **facts: Any) -> Any:
        """With bounds per group it is another aggregate, with an identity of its own."""
        return _new(cls, facts)

    def __post_init__(self) -> None:
        if self.contribution_bounds_per_group is not None:
            raise InvalidParameter(
                f"contribution_bounds_per_group are for Count, Sum and Avg; {self.name!r} is none"
            )

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Rows; they are the units where a unit has one row per group."""
        return (Measure(kind="units" if one_row else "rows"),)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The noisy count."""
        values, stddev = noisy[0]
        return np.maximum(values, 0) if nonnegative else values, stddev

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """What it may be where each column lies within its `reach` of the noisy one.

        `tail`: the part of 1 - confidence that each column, and a sample, is given.
        """
        return noisy[0][0] - reach[0], noisy[0][0] + reach[0]

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """An interval, cut to what is possible: a count is not below 0."""
        return np.maximum(low, 0.0), np.maximum(high, 0.0)

    def high_all(self, high: Reals, lost: Lost) -> Reals:
        """How large the figure of all rows may be, if that of the rows kept is at most `high`."""
        return lost.added_to(high)


@dataclass(frozen=True)
class CountUnits(Count, identity="count_units"):
    """COUNT(DISTINCT unit): units per group.

    >>> CountUnits("visitors").name
    'visitors'
    """

    name: str = "units"
    grows = False
    per_unit = True

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Distinct units."""
        return (Measure(kind="units"),)


@dataclass(frozen=True)
class Sum(Identified, identity="sum", keys="name column lo hi quantum"):
    """SUM of a column, each value clamped to `contribution_bounds_per_row`, (lo, hi), first.

    With `contribution_bounds_per_group` no row is clamped, and all rows count of a unit that is in
    a group, whatever `max_rows_per_group` is: what they add up to is clamped (`SumPerGroup`).
    "auto", or (0, "auto") for values that are not below 0: each period of units gets clamps that
    noisy histograms of earlier periods speak for.

    >>> spent = Sum("spent", column="price", contribution_bounds_per_row=(0, 50))
    >>> float(spent.lo), float(spent.hi)
    (0.0, 50.0)
    """

    name: str
    column: str = field(kw_only=True)
    contribution_bounds_per_row: tuple[Amount, Amount] | str | None = field(
        kw_only=True, default=None, repr=False
    )
    contribution_bounds_per_group: tuple[Amount, Amount] | None = field(
        kw_only=True, default=None, repr=False
    )
    lo: Fraction = field(init=False)
    hi: Fraction = field(init=False)
    quantum: Any = field(kw_only=True, default=None)
    chosen: bool = field(kw_only=True, default=True, repr=False)
    """Did the user choose the quantum?"""
    grows: ClassVar[bool] = True
    per_unit: ClassVar[bool] = False
    error_bar: ClassVar[ErrorBar] = "fixed"
    bounds_all: ClassVar[bool] = True

    def __new__(cls, *args: Any, **facts: Any) -> Any:
        """With bounds per group it is another aggregate, with an identity of its own."""
        return _new(cls, facts)

    def __post_init__(self) -> None:
        argument = f"contribution_bounds_per_{'group' if self.per_unit else 'row'}"
        other = "contribution_bounds_per_row" if self.per_unit else "contribution_bounds_per_group"
        if getattr(self, other) is not None:
            raise InvalidParameter(
                f"{self.name!r} has bounds per row and per group: give one of them"
                if self.per_unit
                else f"contribution_bounds_per_group are for Count, Sum and Avg; {self.name!r} is "
                "none: give it contribution_bounds_per_row"
            )
        given: Any = getattr(self, argument)
        if is_auto(given):
            self._leave_open(given)
            return
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise InvalidParameter(f"{self.name!r} needs {argument}=(lo, hi); got {given!r}")
        lo, hi = exact(given[0], "lo"), exact(given[1], "hi")
        if lo >= hi:
            raise InvalidParameter(f"{self.name!r} needs lo < hi; got lo={given[0]}, hi={given[1]}")
        if self.quantum is None:
            object.__setattr__(self, "chosen", False)
        quantum = _quantum(lo, hi) if self.quantum is None else positive(self.quantum, "quantum")
        if (lo / quantum).denominator > 1 or (hi / quantum).denominator > 1:
            raise InvalidParameter(
                f"lo and hi of {self.name!r} must be multiples of its quantum; got lo={given[0]}, "
                f"hi={given[1]}, quantum={quantum}"
            )
        if max(abs(lo), abs(hi)) / quantum > 1 << 31:
            raise InvalidParameter(
                f"{self.name!r} has more than 2^31 grid steps; use a coarser quantum"
            )
        exact_values = {argument: (lo, hi), "lo": lo, "hi": hi}
        for name, value in (exact_values | {"quantum": quantum}).items():
            object.__setattr__(self, name, value)

    def _leave_open(self, given: Any) -> None:
        """Its clamps are chosen for each period; until then values wait on a fine grid."""
        problem = ""
        if self.per_unit:
            problem = "bounds of all rows of a unit in a group are not chosen; give two numbers"
        elif type(self) not in (Sum, Avg, AvgOfValues):
            problem = f"the clamps of {type(self).__name__} are not chosen; give two numbers"
        elif self.quantum not in (None, FINEST):
            problem = "its grid is chosen with its clamps; leave quantum out"
        elif given != AUTO and (exact(given[0], "lo") != 0 or type(self) is not Sum):
            problem = "write 'auto', or of a Sum whose values are not below 0 (0, 'auto')"
        if problem:
            said = repr(given) if given == AUTO else f"({given[0]}, {AUTO!r})"
            raise InvalidParameter(f"{self.name!r} has the bounds {said}: {problem}")
        lo = -CLAMPS[-1] if given == AUTO else Fraction(0)
        kept = AUTO if given == AUTO else (Fraction(0), AUTO)
        found = {"contribution_bounds_per_row": kept, "lo": lo, "hi": CLAMPS[-1]}
        for name, value in found.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "quantum", FINEST)

    @property
    def is_open(self) -> bool:
        """Are its clamps chosen for each period?"""
        return is_auto(self.contribution_bounds_per_row)

    def clamped_at(self, clamp: Fraction) -> Any:
        """The same with the clamp of one period."""
        bounds = (-clamp if self.lo < 0 else Fraction(0), clamp)
        return replace(self, contribution_bounds_per_row=bounds, quantum=clamp / STEPS, chosen=True)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The clamped values."""
        return (self._value(Fraction(0)),)

    def _value(self, middle: Fraction) -> Measure:
        return Measure(
            kind="value",
            column=self.column,
            lo=self.lo,
            hi=self.hi,
            middle=middle,
            quantum=self.quantum,
        )

    @property
    def middle(self) -> Fraction:
        """A grid point halfway between lo and hi."""
        steps = math.floor((self.lo + self.hi) / 2 / self.quantum)
        return Fraction(steps * self.quantum)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The noisy sum; below zero only if a value may be. Rows come second if it is centred."""
        values, stddev = noisy[0]
        if len(noisy) > 1:
            middle, (rows, of_rows) = float(self.middle), noisy[1]
            values, stddev = values + middle * rows, np.hypot(stddev, middle * of_rows)
        return np.maximum(values, 0.0) if nonnegative and self.lo >= 0 else values, stddev

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """As that of a count; of both columns if it is centred."""
        values, far = self.answer(noisy, nonnegative=False)[0], reach[0]
        if len(noisy) > 1:
            far = far + abs(float(self.middle)) * reach[1]
        return values - far, values + far

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """An interval, cut to what is possible."""
        least = 0.0 if self.lo >= 0 else -np.inf
        return np.maximum(low, least), np.maximum(high, least)

    def high_all(self, high: Reals, lost: Lost) -> Reals:
        """How large the figure of all rows may be: where rows may take away, by their number."""
        if self.lo >= 0:
            return lost.added_to(high)
        return high + lost.most * float(self.hi) if self.hi > 0 else high


@dataclass(frozen=True)
class Avg(Sum, identity="avg"):
    """AVG of a column, each value clamped to its bounds first; NULL counts as the middle.

    >>> Avg("seconds", column="seconds", contribution_bounds_per_row=(0, 300)).name
    'seconds'
    """

    grows = False
    error_bar: ClassVar[ErrorBar] = "per_row"

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Sums about the middle, and rows."""
        return self._value(self.middle), *Count().measures(one_row)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """Middle plus noisy sum over noisy rows, within [lo, hi]."""
        (sums, spread), (rows, of_rows) = noisy
        count = np.maximum(rows, 1.0)
        shift = sums / count
        stddev = np.sqrt(spread**2 + (shift * of_rows) ** 2) / count
        middle, lo, hi = float(self.middle), float(self.lo), float(self.hi)
        return np.clip(middle + shift, lo, hi), np.minimum(stddev, hi - lo)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """The least and the largest quotient of sums and of rows (1 at least) within reach."""
        low, high = _quotients(noisy[0], noisy[1], reach)
        middle, lo, hi = float(self.middle), float(self.lo), float(self.hi)
        return np.clip(middle + low, lo, hi), np.clip(middle + high, lo, hi)

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """A mean lies between the clamps."""
        return np.maximum(low, float(self.lo)), np.minimum(high, float(self.hi))

    def high_all(self, high: Reals, lost: Lost) -> Reals:
        """Rows that were dropped may all have the largest value."""
        return lost.least_kept * high + (1 - lost.least_kept) * float(self.hi)


@dataclass(frozen=True)
class AvgOfValues(Avg, identity="avg_of_values"):
    """AVG of a column's values that are not NULL, each clamped to its bounds first.

    >>> AvgOfValues("seconds", column="seconds", contribution_bounds_per_row=(0, 300)).column
    'seconds'
    """

    bounds_all: ClassVar[bool] = False

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Sums about the middle, and the number of values."""
        return self._value(self.middle), Measure(kind="value", column=self.column, power=0)


@dataclass(frozen=True)
class Variance(Avg, identity="variance"):
    """VAR_POP of a column, each value clamped to its bounds first; NULL counts as the middle.

    >>> Variance("spread", column="seconds", contribution_bounds_per_row=(0, 300)).column
    'seconds'
    """

    error_bar: ClassVar[ErrorBar] = "with_release"
    bounds_all: ClassVar[bool] = False

    @property
    def squares(self) -> Measure:
        """Sums of squared distances, with as many grid steps as the distances have."""
        reach = self._value(self.middle).reach
        quantum = reach**2 / math.ceil(reach / self.quantum)
        return replace(self._value(self.middle), quantum=quantum, power=2)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Squared distances, distances, and rows."""
        return self.squares, *super().measures(one_row)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """Mean square less squared mean, within what values in [lo, hi] can have."""
        (squares, of_squares), (sums, of_sums), (rows, of_rows) = noisy
        count = np.maximum(rows, 1.0)
        shift, square = sums / count, squares / count
        most = float((self.hi - self.lo) ** 2) / 4
        variance = np.clip(float(self.squares.offset) + square - shift**2, 0.0, most)
        by_rows = (2 * shift**2 - square) * of_rows
        spread = np.sqrt(of_squares**2 + (2 * shift * of_sums) ** 2 + by_rows**2) / count
        return variance, np.minimum(spread, most)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """Any mean square within reach, less the square of any mean within reach."""
        squares, sums, rows = noisy
        low, high = _quotients(squares, rows, (reach[0], reach[2]))
        left, right = _quotients(sums, rows, reach[1:])
        least = np.maximum(np.maximum(left, -right), 0.0)  # 0 where the mean may be the middle
        most = np.maximum(-left, right)
        offset, largest = float(self.squares.offset), float((self.hi - self.lo) ** 2) / 4
        ends = offset + low - most**2, offset + high - least**2
        return np.clip(ends[0], 0.0, largest), np.clip(ends[1], 0.0, largest)

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """Nor can it be below 0, or above that of values at both clamps."""
        return np.maximum(low, 0.0), np.minimum(high, float((self.hi - self.lo) ** 2) / 4)


@dataclass(frozen=True)
class Stddev(Variance, identity="stddev"):
    """STDDEV_POP of a column, each value clamped to its bounds first.

    >>> Stddev("spread", column="seconds", contribution_bounds_per_row=(0, 300)).column
    'seconds'
    """

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The root of the variance; where that drowns in noise, so does this."""
        variance, spread = super().answer(noisy, nonnegative)
        stddev, most = np.sqrt(variance), float(self.hi - self.lo) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(stddev > 0, spread / (2 * stddev), np.inf)
        return stddev, np.minimum(np.minimum(slope, np.sqrt(spread)), most)

    def ends(self, noisy: Sequence[Pair], deviations: float) -> tuple[Reals, Reals]:
        """An interval: the roots of the variance's ends. Its own error is far from normal where
        values are alike.
        """
        variance, spread = super().answer(noisy, nonnegative=True)
        low, high = variance - deviations * spread, variance + deviations * spread
        return np.sqrt(np.maximum(low, 0.0)), np.sqrt(high)

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """The roots of the variance's ends."""
        low, high = super().enclose(noisy, reach, tail)
        return np.sqrt(low), np.sqrt(high)

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """Nor can it be below 0, or above that of values at both clamps."""
        return np.maximum(low, 0.0), np.minimum(high, float(self.hi - self.lo) / 2)


@dataclass(frozen=True)
class SumPerGroup(Sum, identity="sum_per_group"):
    """SUM of a column, of each unit what its rows in a group add up to, clamped to [lo, hi].

    Of a window that is published again and again, positive values count up to hi and negative ones
    down to lo, each apart, so that nothing of a unit rises and falls more than once. Where bounds
    leave 0 out, values beyond it count as 0, and a unit in a group counts with the nearer bound at
    least. A window that is published once (`once`) has the sum itself clamped. NULL adds nothing.
    """

    once: bool = field(kw_only=True, default=False, repr=False)
    """Is each window published once? The query says so."""
    grows: ClassVar[bool] = False
    per_unit: ClassVar[bool] = True
    bounds_all: ClassVar[bool] = False

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """What is clamped of each unit."""
        clamped = replace(self._value(Fraction(0)), kind="clamped")
        return (replace(clamped, of_unit="sum") if self.once else clamped,)


@dataclass(frozen=True)
class AvgPerGroup(Avg, identity="avg_per_group"):
    """AVG of the units' own averages in a group, each clamped to [lo, hi].

    An average moves both ways as rows come, so each window must be published `once`.
    """

    once: bool = field(kw_only=True, default=False, repr=False)
    per_unit: ClassVar[bool] = True
    bounds_all: ClassVar[bool] = False

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Units' averages about the middle, and units."""
        mean = replace(self._value(self.middle), kind="clamped", of_unit="mean")
        return mean, Measure(kind="units")


@dataclass(frozen=True)
class CountPerGroup(Count, identity="count_per_group", keys="lo hi"):
    """COUNT(*), of each unit the number of its rows in a group, clamped to [lo, hi]."""

    lo: Fraction = field(init=False)
    hi: Fraction = field(init=False)
    grows = False
    per_unit = True
    bounds_all = False

    def __post_init__(self) -> None:
        same = Sum(
            self.name,
            column="rows",
            contribution_bounds_per_group=self.contribution_bounds_per_group,
            quantum=1,
        )
        if same.lo < 0:
            raise InvalidParameter(f"a count is not below 0; {self.name!r} has lo={same.lo}")
        for name in ("lo", "hi", "contribution_bounds_per_group"):
            object.__setattr__(self, name, getattr(same, name))

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """What is clamped of each unit: a sum of ones."""
        return (Measure(kind="clamped", lo=self.lo, hi=self.hi),)


@dataclass(frozen=True)
class CountDistinct(Count, identity="count_distinct", keys="column most=max_values_per_group"):
    """COUNT(DISTINCT column): values per group, of which each unit brings a few.

    The first `max_values_per_group` values of a unit in a group count, and stay. A value counts
    once in a group, from the first unit on that brings it. NULL is no value.

    >>> CountDistinct("articles", column="article", max_values_per_group=5).max_values_per_group
    5
    """

    name: str = "distinct"
    column: str = field(kw_only=True)
    max_values_per_group: int = field(kw_only=True)
    grows = False
    per_unit = True
    bounds_all = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most: Any = self.max_values_per_group
        if not isinstance(most, int | np.integer) or isinstance(most, bool) or most < 1:
            raise InvalidParameter(
                f"max_values_per_group of {self.name!r} must be a whole number of at least 1; got "
                f"{most!r}"
            )
        if most > _MOST_VALUES:
            raise InvalidParameter(
                f"max_values_per_group of {self.name!r} must be at most {_MOST_VALUES}; got {most}"
            )
        object.__setattr__(self, "max_values_per_group", int(most))

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Values that nobody has brought before."""
        most = Fraction(self.max_values_per_group)
        return (Measure(kind="distinct", column=self.column, hi=most),)


@dataclass(frozen=True)
class ApproxCountDistinct(CountDistinct, identity="approx_count_distinct", keys="one_in"):
    """COUNT(DISTINCT column) from a sample: one value in `one_in` is looked at, by a keyed hash.

    It takes that much less memory. A unit brings its part of `max_values_per_group`, rounded up.
    What the sample leaves to chance is in the error bar.

    >>> ApproxCountDistinct("articles", column="article", max_values_per_group=32).one_in
    16
    """

    name: str = "approx_distinct"
    one_in: int = field(kw_only=True, default=16)
    error_bar: ClassVar[ErrorBar] = "with_release"

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.one_in
        if not isinstance(given, int) or given not in (2**power for power in range(1, 21)):
            raise InvalidParameter(
                f"one_in of {self.name!r} must be a power of 2 from 2 to 2^20; got {given!r}"
            )

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Values of the sample, each for `one_in` of them."""
        most = math.ceil(Fraction(self.max_values_per_group, self.one_in)) * self.one_in
        each = Fraction(self.one_in)
        return (Measure(kind="distinct", column=self.column, hi=Fraction(most), quantum=each),)

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The noisy count; of D values the sample has D / one_in, give or take its root."""
        values, stddev = super().answer(noisy, nonnegative)
        return values, np.sqrt(stddev**2 + np.maximum(values, 0) * (self.one_in - 1))

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """What noise may do, and what the sample leaves to chance, as a normal number."""
        low, high = super().enclose(noisy, reach, tail)
        sampled = -ndtri(tail / 2) * np.sqrt(np.maximum(high, 0) * (self.one_in - 1))
        return low - sampled, high + sampled


@dataclass(frozen=True)
class OfCells(Identified, identity=None, keys="name"):
    """An aggregate that is read off sums over cells of a column's range (`quantiles.py`)."""

    name: str
    of_rows: ClassVar[Fraction]
    """The part of its budget that its number of rows gets; levels of cells share the rest."""
    grows: ClassVar[bool] = False
    per_unit: ClassVar[bool] = False
    error_bar: ClassVar[ErrorBar] = "with_release"
    bounds_all: ClassVar[bool] = False

    @property
    def cells(self) -> Measure:
        """The cells: a `Cells`."""
        raise NotImplementedError  # quantiles and histograms have their own

    @property
    def found(self) -> int:
        """Numbers that are read off them in each group."""
        raise NotImplementedError  # quantiles and histograms have their own

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The columns beside the cells."""
        raise NotImplementedError  # quantiles and histograms have their own

    def columns(
        self, found: Integers, stddev: float, confidence: float | None, nonnegative: bool
    ) -> dict[str, Any]:
        """What is published of these numbers; `stddev`: that of the last level."""
        raise NotImplementedError  # quantiles and histograms have their own


@dataclass(frozen=True)
class OfPairs(Identified, identity=None, keys="name"):
    """An aggregate of the pairs of values in two columns (`second_moments.py`)."""

    name: str
    grows: ClassVar[bool] = False
    per_unit: ClassVar[bool] = False
    error_bar: ClassVar[ErrorBar] = "with_release"
    bounds_all: ClassVar[bool] = False

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The sums that it is made of."""
        raise NotImplementedError  # each has its own

    def answer(self, noisy: Sequence[Pair], nonnegative: bool) -> Pair:
        """The figure, and its error to first order."""
        raise NotImplementedError  # each has its own

    def ends(self, noisy: Sequence[Pair], deviations: float) -> tuple[Reals, Reals]:
        """An interval, so many standard deviations to both sides."""
        raise NotImplementedError  # each has its own

    def enclose(
        self, noisy: Sequence[Pair], reach: Sequence[float], tail: float
    ) -> tuple[Reals, Reals]:
        """What it may be where each sum lies within its `reach` of the noisy one."""
        raise NotImplementedError  # each has its own

    def within(self, low: Reals, high: Reals, nonnegative: bool) -> tuple[Reals, Reals]:
        """An interval, cut to what is possible."""
        return low, high

    def high_all(self, high: Reals, lost: Lost) -> Reals:
        """Of all rows it says nothing (`bounds_all`)."""
        return np.full(len(high), np.inf)


Aggregate: TypeAlias = Count | Sum | OfPairs | OfCells


def _quotients(sums: Pair, rows: Pair, reach: Sequence[float]) -> tuple[Reals, Reals]:
    """The least and the largest sum over rows where both lie within reach, rows at least 1."""
    ends = [
        (sums[0] + over) / np.maximum(rows[0] + under, 1.0)
        for over in (-reach[0], reach[0])
        for under in (-reach[1], reach[1])
    ]
    return np.min(ends, axis=0), np.max(ends, axis=0)


def _new(cls: type, facts: dict[str, Any]) -> Any:
    """An aggregate; with bounds per group, of the class for these."""
    others: dict[type, type] = {Count: CountPerGroup, Sum: SumPerGroup, Avg: AvgPerGroup}
    if facts.get("contribution_bounds_per_group") is not None:
        cls = others.get(cls, cls)
    return object.__new__(cls)


def _quantum(lo: Fraction, hi: Fraction) -> Fraction:
    """A grid of about a thousand steps or more: a power of ten where lo and hi lie on it."""
    largest, power = max(abs(lo), abs(hi)), Fraction(1)
    while largest / power < 1000:
        power /= 10
    while largest / power >= 10000:
        power *= 10
    if (lo / power).denominator == 1 and (hi / power).denominator == 1:
        return power
    shared = Fraction(
        math.gcd(lo.numerator * hi.denominator, hi.numerator * lo.denominator),
        lo.denominator * hi.denominator,
    )
    return shared / math.ceil(1000 * shared / largest)


def measures_by_name(
    aggregates: Sequence[Aggregate], *, one_row: bool
) -> dict[str, tuple[Measure, ...]]:
    """The measures behind each aggregate, by its name.

    Beside a COUNT or an AVG a SUM is that about the middle, and the middle for each row: rows are
    measured anyway, and half a range takes half the noise. With an AVG of the same values it shares
    both, and costs nothing. NULL adds nothing to a SUM, so it counts as 0 in such an AVG, too;
    where the clamps leave 0 out, a SUM has a measure of its own.

    >>> pair = [kind("x", column="x", contribution_bounds_per_row=(0, 10)) for kind in (Sum, Avg)]
    >>> names = measures_by_name([pair[0], replace(pair[1], name="y")], one_row=False)
    >>> names["x"] == names["y"], [measure.kind for measure in names["x"]]
    (True, ['value', 'rows'])
    """
    own = {each.name: each.measures(one_row) for each in aggregates}
    (rows,) = Count().measures(one_row)
    if not any(rows in measures for measures in own.values()):
        return own
    summed = {_clamped(each) for each in aggregates if type(each) is Sum} - {None}
    for each in aggregates:
        if type(each) in (Sum, Avg, Variance, Stddev) and _clamped(each) in summed:
            made = Avg.measures(cast("Avg", each), one_row) if type(each) is Sum else own[each.name]
            shared = (replace(m, null=Fraction(0)) if m.kind == "value" else m for m in made)
            own[each.name] = tuple(shared)
    return own


def _clamped(aggregate: Any) -> tuple[str, Fraction, Fraction, Fraction] | None:
    """The values that it is made of; None where sums about 0 and about the middle do not mix."""
    if not aggregate.lo <= 0 <= aggregate.hi or not aggregate.middle:
        return None
    return aggregate.column, aggregate.lo, aggregate.hi, aggregate.quantum


def all_measures(
    aggregates: Sequence[Aggregate], *, one_row: bool, finder: Measure | None
) -> tuple[Measure, ...]:
    """Every column that needs noise, once; unknown keys are found by `finder`, column 0."""
    behind = measures_by_name(aggregates, one_row=one_row).values()
    measures = [measure for each in behind for measure in each]
    return tuple(dict.fromkeys(measures if finder is None else [finder, *measures]))
