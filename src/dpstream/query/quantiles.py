"""Quantiles and histograms: sums over cells of a column's range, and what is read off them.

The range of a column is cut into public leaves. A histogram counts the rows of each leaf. A
quantile is read off Haar coefficients: for each node of the binary tree over 2^h leaves, the rows
in its left half less those in its right half. A row moves one node of each level, by 1, so a level
is a sum like any other, and h levels share what one aggregate is given. With the noisy number of
rows they tell how many rows lie below any edge. Proof: `docs/soundness/quantiles.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
from scipy.special import ndtri

from dpstream.errors import InvalidParameter
from dpstream.privacy.amounts import Amount, exact
from dpstream.query.aggregates import Count, Measure, OfCells
from dpstream.records import Integers, Reals

MOST_LEAVES = 4096
"""Levels grow with the logarithm, memory with the leaves that are visited."""
MOST_BINS = 1024
_LEAVES = 256  # levels cost noise: 0.29 h; finer leaves are worth it where values are many
_FINER_LEAVES = 4096  # to choose among more leaves costs next to nothing
_MOST_QUANTILES = 101
FRACTION = 20
"""Bits of the place within a leaf, in what walks find."""
_INSIDE = 2.0  # standard deviations that the rank of MIN and MAX lies inside
FINEST_SHARE = 1_000_000
"""Ranks are looked for in so many parts of a row at most, by the exponential mechanism."""
_MECHANISMS = ("auto", "tree", "exponential")
_SLACK_DIGITS = 6  # the same number on every machine


@dataclass(frozen=True, kw_only=True)
class Cells(Measure):
    """A column's value as the number of its leaf; NULL is in none (-1).

    `spacing`: "linear" or "geometric" leaves between `lo` and `hi`, or all edges. `haar`: sums are
    kept of the levels of a tree; otherwise of the leaves themselves. `choices`: shares for which a
    leaf is chosen by exact sums, each with a budget of its own.
    """

    kind: Literal["leaf"] = "leaf"
    leaves: int = _LEAVES
    spacing: str | tuple[Fraction, ...] = "linear"
    haar: bool = True
    choices: tuple[Fraction, ...] = ()

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        edges = self.spacing
        if not isinstance(edges, str):
            edges = ",".join(map(str, edges))
        kind = "haar" if self.haar else "bins"
        if self.choices:
            kind = f"choice {','.join(map(str, self.choices))}"
        return f"{kind}|{self.lo}|{self.hi}|{self.leaves}|{edges}|{self.column}"

    @property
    def depth(self) -> int:
        """Levels of the tree; leaves that are not there stay empty."""
        return max(1, math.ceil(math.log2(self.leaves)))

    @cached_property
    def edges(self) -> Reals:
        """The edges of all leaves; those beyond the last leaf are the upper bound."""
        lo, hi, count = self.lo, self.hi, self.leaves
        size = (1 << self.depth if self.haar else count) + 1
        made: Reals = np.full(size, float(hi))
        if not isinstance(self.spacing, str):
            made[: count + 1] = [float(edge) for edge in self.spacing]
        elif self.spacing == "linear":
            made[: count + 1] = [float(lo + (hi - lo) * i / count) for i in range(count + 1)]
        else:  # halves of halves: roots are rounded in the same way on every machine
            made[0], step = float(lo), count
            while step > 1:
                low, high = made[0:count:step], made[step : count + 1 : step]
                made[step // 2 : count : step] = np.sqrt(low) * np.sqrt(high)
                step //= 2
        return made

    def on_grid(self, values: Reals, /) -> Integers:
        """The leaf of each value: [edge, next edge), what is outside belongs to the outermost."""
        inner = self.edges[1 : self.leaves]
        leaves = np.searchsorted(inner, values, side="right")
        return np.where(np.isnan(values), -1, leaves).astype(np.int64)

    def value_at(self, places: Integers) -> Reals:
        """The value at a place: leaves times 2^FRACTION, and the place within the leaf."""
        leaf, within = places >> FRACTION, (places & ((1 << FRACTION) - 1)) / (1 << FRACTION)
        above = self.edges[np.minimum(leaf + 1, len(self.edges) - 1)]
        low = self.edges[leaf]
        values: Reals = low + within * (above - low)
        return values

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The columns that need noise."""
        count = self.depth if self.haar else max(1, len(self.choices))
        return tuple(Level(cells=self, level=level) for level in range(count))

    @cached_property
    def rank_weights(self) -> Reals:
        """Squared weights of the levels in the rank of each node's middle edge, nodes x levels.

        The rank of an edge at x of the range is x N plus a c for each node on the way to it, with
        a = f/2 or (1 - f)/2 where f is the edge's place within the left or the right half.
        """
        weights = np.zeros((1 << self.depth, self.depth))
        for level in range(self.depth):
            nodes = np.arange(1 << level, 2 << level)
            x = (2 * (nodes - (1 << level)) + 1) / (2 << level)
            for above in range(level + 1):
                place = (x * (1 << above)) % 1.0  # within the node of that level
                left = place <= 0.5
                weights[nodes, above] = np.where(left, place, 1 - place) ** 2
        return weights


@dataclass(frozen=True, kw_only=True)
class Level(Measure):
    """One level of the cells of a column: a unit's rows move as many of its nodes as they are."""

    kind: Literal["level"] = "level"
    cells: Cells
    level: int

    @property
    def name(self) -> str:
        """Injective; part of every noise address."""
        return f"level {self.level}|{self.cells.name}"

    @property
    def nodes(self) -> int:
        """How many there are in a group."""
        return 1 << self.level if self.cells.haar else self.cells.leaves

    @property
    def signed(self) -> bool:
        """May a row take something away?"""
        return self.cells.haar or self.share is not None

    @property
    def share(self) -> Fraction | None:
        """The quantile for which a leaf is chosen, where that is what it is."""
        return self.cells.choices[self.level] if self.cells.choices else None


@dataclass(frozen=True)
class Quantile(OfCells, identity="quantile", keys="column q lo hi leaves edges"):
    """The value below which a share `q` of a group's values lies, or a list of such values.

    Each value is clamped to `contribution_bounds_per_row`, (lo, hi), first; NULL is left out.
    `leaves`: how finely the range is divided, a power of two. `edges`: "geometric" for leaves that
    grow by a factor (lo above 0), or all edges, in place of the bounds. 0 and 1 are the smallest
    and the largest value at a rank that noise cannot feign, two standard deviations inside.
    `mechanism`: "tree" for noisy levels, which tell intervals and serve every release, or
    "exponential" to choose a leaf anew at each release, without an error bar; "auto" takes what
    errs less, and the tree where the query has `confidence`.

    >>> Quantile("p95", column="seconds", q=0.95, contribution_bounds_per_row=(0, 600)).leaves
    256
    """

    of_rows: ClassVar[Fraction] = Fraction(1, 8)  # its noise counts (x - p)^2, levels h^2/12
    column: str = field(kw_only=True)
    q: Any = field(kw_only=True)
    contribution_bounds_per_row: tuple[Amount, Amount] | None = field(
        kw_only=True, default=None, repr=False
    )
    lo: Fraction = field(init=False)
    hi: Fraction = field(init=False)
    leaves: int = field(kw_only=True, default=0)
    edges: Any = field(kw_only=True, default=None)
    mechanism: str = field(kw_only=True, default="auto", repr=False)
    fixed: bool = field(kw_only=True, default=True, repr=False)
    """Did the user choose the leaves?"""

    def __post_init__(self) -> None:
        put = _setter(self)
        put("q", _shares(self.name, self.q))
        if self.mechanism not in _MECHANISMS:
            raise InvalidParameter(
                f"mechanism of {self.name!r} must be one of {', '.join(_MECHANISMS)}; got "
                f"{self.mechanism!r}"
            )
        if self.mechanism == "exponential" and not self.inside:
            raise InvalidParameter(
                f"the exponential mechanism finds quantiles between 0 and 1, and {self.name!r} "
                "asks for the smallest or largest value; leave mechanism out"
            )
        edges = self.edges
        if edges is None or edges == "linear":
            put("edges", None)
        elif edges != "geometric":
            put("edges", _all_edges(self.name, edges, MOST_LEAVES))
        if isinstance(self.edges, tuple):
            lo, hi, leaves = self.edges[0], self.edges[-1], len(self.edges) - 1
            beside = (self.contribution_bounds_per_row or (lo, hi), self.leaves or leaves)
            if beside != ((lo, hi), leaves):
                raise InvalidParameter(
                    f"{self.name!r} has edges, which say the bounds and the leaves; leave "
                    "contribution_bounds_per_row and leaves out"
                )
        else:
            lo, hi = _bounds(self.name, self.contribution_bounds_per_row)
            if self.leaves == 0:
                put("fixed", False)
            leaves = _LEAVES if self.leaves == 0 else self.leaves
            if type(leaves) is not int or leaves.bit_count() != 1 or not 2 <= leaves <= MOST_LEAVES:
                raise InvalidParameter(
                    f"leaves of {self.name!r} must be a power of two from 2 to {MOST_LEAVES} (more "
                    f"take more memory and noise); got {leaves!r}"
                )
        if self.edges == "geometric" and lo <= 0:
            raise InvalidParameter(
                f"geometric edges of {self.name!r} need a lower bound above 0; got {float(lo):g}; "
                "raise it to the smallest value that matters, or leave edges out"
            )
        for name, value in {"lo": lo, "hi": hi, "leaves": leaves}.items():
            put(name, value)
        put("contribution_bounds_per_row", (lo, hi))

    @property
    def several(self) -> bool:
        """Is it a list of quantiles?"""
        return isinstance(self.q, tuple)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """All that are asked for."""
        return self.q if isinstance(self.q, tuple) else (self.q,)

    @property
    def inside(self) -> bool:
        """Are all of them between the smallest and the largest value?"""
        return all(0 < share < 1 for share in self.shares)

    @property
    def by_choice(self) -> ExponentialQuantile:
        """The same by the exponential mechanism."""
        return cast(ExponentialQuantile, self._as(ExponentialQuantile, _FINER_LEAVES))

    def by(self, mechanism: str) -> Quantile:
        """The same, by another mechanism."""
        return replace(self._as(Quantile, _LEAVES), mechanism=mechanism)

    def _as(self, kind: type[Quantile], leaves: int) -> Quantile:
        """As another kind of quantile, with so many leaves where nobody has chosen them."""
        given = {each.name: getattr(self, each.name) for each in fields(Quantile) if each.init}
        return kind(**given | ({} if self.fixed else {"leaves": leaves}))

    @cached_property
    def cells(self) -> Cells:
        """The tree that it is read off."""
        return Cells(
            column=self.column,
            lo=self.lo,
            hi=self.hi,
            leaves=self.leaves,
            spacing=self.edges or "linear",
        )

    @property
    def found(self) -> int:
        """Numbers that a walk finds in each group: of each quantile its place, lowest, highest."""
        return 3 * len(self.shares)

    @property
    def rows(self) -> Measure:
        """The number of values that are not NULL."""
        return Measure(kind="value", column=self.column, power=0)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """The number of values; levels are columns of their own."""
        return (self.rows,)

    def slack(self, confidence: float | None) -> float:
        """Standard deviations that the ends of an interval keep from the noisy rank.

        Each level tests one edge of the true path, and only one end can be wrong there, so the
        levels share 1 - confidence. Without an interval: one, for the error bar.
        """
        if confidence is None:
            return 1.0
        return round(float(-ndtri((1 - confidence) / self.cells.depth)), _SLACK_DIGITS)

    def walks(self, confidence: float | None) -> list[tuple[float, float]]:
        """(share, slack) of each walk: the rank it looks for, in standard deviations beside it."""
        slack = self.slack(confidence)
        inside = {Fraction(0): _INSIDE, Fraction(1): -_INSIDE}
        return [
            (float(share), beside)
            for share in self.shares
            for beside in (inside.get(share, 0.0), -slack, slack)
        ]

    def columns(
        self, found: Integers, stddev: float, confidence: float | None, nonnegative: bool
    ) -> dict[str, Any]:
        """What is published of the walks of each group."""
        values = self.cells.value_at(found).reshape(len(found), len(self.shares), 3)
        middle, low, high = (values[:, :, each] for each in range(3))
        answers = {"": middle, "_stddev": (high - low) / (2 * self.slack(confidence))}
        if confidence is not None:
            answers |= {"_low": low, "_high": high}
        make = lists if self.several else _flat
        return {f"{self.name}{end}": make(each) for end, each in answers.items()}


@dataclass(frozen=True)
class ExponentialQuantile(Quantile, identity="exponential_quantile"):
    """A quantile for which each release chooses a leaf by the exponential mechanism.

    A leaf's odds fall with the distance of its ranks from the one that is looked for. Nothing else
    is measured: no number of rows, no error bar. Plans make it of a `Quantile`.
    """

    of_rows: ClassVar[Fraction] = Fraction(0)

    @cached_property
    def cells(self) -> Cells:
        """Leaves, and what is chosen among them."""
        shares = tuple(each.limit_denominator(FINEST_SHARE) for each in self.shares)
        return replace(super().cells, haar=False, choices=shares)

    @property
    def found(self) -> int:
        """The place of each."""
        return len(self.shares)

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """None: leaves are all that it looks at."""
        return ()

    def columns(
        self, found: Integers, stddev: float, confidence: float | None, nonnegative: bool
    ) -> dict[str, Any]:
        """The leaves that were chosen; how far off they are is known in ranks alone."""
        values = self.cells.value_at(found)
        make = lists if self.several else _flat
        unknown: Any = pa.nulls(len(values), pa.float64())
        if self.several:
            unknown = pa.nulls(len(values), pa.list_(pa.float64()))
        return {self.name: make(values), f"{self.name}_stddev": unknown}


@dataclass(frozen=True)
class Histogram(OfCells, identity="histogram", keys="column edges"):
    """How many of a group's rows lie between each two neighbours of `edges`, as a list.

    A bin holds its lower edge; values outside belong to the outermost bins, NULL to none.

    >>> Histogram("sizes", column="size", edges=[0, 10, 100]).found
    2
    """

    of_rows: ClassVar[Fraction] = Fraction(1, 50)  # public groups need a first column
    several: ClassVar[bool] = True
    column: str = field(kw_only=True)
    edges: Any = field(kw_only=True)

    def __post_init__(self) -> None:
        _setter(self)("edges", _all_edges(self.name, self.edges, MOST_BINS))

    @cached_property
    def cells(self) -> Cells:
        """The bins."""
        edges = self.edges
        return Cells(
            column=self.column,
            lo=edges[0],
            hi=edges[-1],
            leaves=len(edges) - 1,
            spacing=edges,
            haar=False,
        )

    @property
    def found(self) -> int:
        """Numbers in each group: the bins."""
        return len(self.edges) - 1

    def measures(self, one_row: bool) -> tuple[Measure, ...]:
        """Rows; the bins are columns of their own."""
        return Count().measures(one_row)

    def columns(
        self, found: Integers, stddev: float, confidence: float | None, nonnegative: bool
    ) -> dict[str, Any]:
        """What is published of the noisy bins of each group."""
        shown = np.maximum(found, 0) if nonnegative else found
        answers: dict[str, Any] = {"": shown, "_stddev": np.full(found.shape, stddev)}
        if confidence is not None:
            half = float(-ndtri((1 - confidence) / 2)) * stddev
            ends = np.maximum(found - half, 0.0), np.maximum(found + half, 0.0)
            answers |= {"_low": ends[0], "_high": ends[1]}
        return {f"{self.name}{end}": lists(each) for end, each in answers.items()}


def lists(values: Any) -> pa.Array:
    """A list in each row, of a matrix."""
    rows, width = values.shape
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * width, pa.int32())
    return pa.ListArray.from_arrays(offsets, flat)


def _flat(values: Any) -> Any:
    return np.ascontiguousarray(values[:, 0])


def _setter(made: object) -> Any:
    return lambda name, value: object.__setattr__(made, name, value)


def _shares(name: str, given: Any) -> Fraction | tuple[Fraction, ...]:
    """One share, or several that rise."""
    several = isinstance(given, Sequence) and not isinstance(given, str)
    shares = [exact(each, f"q of {name!r}") for each in (given if several else [given])]
    if not shares or len(shares) > _MOST_QUANTILES:
        raise InvalidParameter(
            f"{name!r} needs 1 to {_MOST_QUANTILES} quantiles; got {len(shares)}"
        )
    for share, told in zip(shares, given if several else [given], strict=True):
        if not 0 <= share <= 1:
            raise InvalidParameter(
                f"q of {name!r} must lie between 0 and 1, such as 0.95; got {told}"
            )
    if sorted(set(shares)) != shares:
        raise InvalidParameter(f"the quantiles of {name!r} must rise; got {list(given)}")
    return tuple(shares) if several else shares[0]


def _all_edges(name: str, given: Any, most: int) -> tuple[Fraction, ...]:
    """Edges that rise."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidParameter(
            f"edges of {name!r} must be numbers that rise, such as (0, 10, 100); got {given!r}"
        )
    edges = tuple(exact(edge, f"an edge of {name!r}") for edge in given)
    if not 3 <= len(edges) <= most + 1:
        raise InvalidParameter(
            f"{name!r} needs 3 to {most + 1} edges, which make 2 to {most} parts; got {len(edges)}"
        )
    if any(float(a) >= float(b) for a, b in pairwise(edges)):
        raise InvalidParameter(f"the edges of {name!r} must rise; got {list(given)}")
    return edges


def _bounds(name: str, given: Any) -> tuple[Fraction, Fraction]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidParameter(
            f"{name!r} needs contribution_bounds_per_row=(lo, hi); got {given!r}"
        )
    lo, hi = exact(given[0], "lo"), exact(given[1], "hi")
    if lo >= hi:
        raise InvalidParameter(f"{name!r} needs lo < hi; got lo={given[0]}, hi={given[1]}")
    if not math.isfinite(float(hi)) or not math.isfinite(float(lo)):
        raise InvalidParameter(f"{name!r} needs finite bounds; got {given!r}")
    return lo, hi


def cells_of(aggregates: Sequence[Any]) -> tuple[Cells, ...]:
    """The cells behind aggregates, each once."""
    return tuple(dict.fromkeys(cast(Cells, a.cells) for a in aggregates if isinstance(a, OfCells)))
