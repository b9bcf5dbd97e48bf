"""What a query does around its private part: filters and computed columns of rows before it;
SELECT, HAVING, ORDER BY and LIMIT as post-processing of what is published after it.

A computed column has an error bar if it is a sum of aggregates with constant factors, or a quotient
of two such sums, and the noises are independent: they are, unless two aggregates are made of one
measure (AVG and COUNT(*) share the number of rows). Any other column has none rather than a wrong
one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, reduce
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.query.aggregates import (
    Aggregate,
    ApproxCountDistinct,
    Avg,
    AvgOfValues,
    Count,
    CountDistinct,
    CountUnits,
    Measure,
    OfCells,
    OfPairs,
    Stddev,
    Sum,
    measures_by_name,
)
from dpstream.query.fieller import quotient_interval
from dpstream.query.noise_plan import interval_of
from dpstream.query.per_unit import ROW
from dpstream.query.period_bounds import AUTO
from dpstream.query.quantiles import Histogram, Quantile
from dpstream.records import Integers, Reals
from dpstream.rows.parse import row_codes
from dpstream.sql_compiler.expressions import Compiler, Compute, compile_list, literal_value
from dpstream.sql_compiler.from_clause import substitute
from dpstream.sql_compiler.over_clause import error_bar, rank_interval, sort_rows
from dpstream.sql_compiler.privacy_clause import is_word_auto
from dpstream.sql_compiler.select import (
    BOUNDS,
    GROUP_BOUNDS,
    GROUPING,
    distinct_values,
    grouping_call,
    named_arguments,
    selected_position,
)
from dpstream.sql_compiler.sql_values import KINDS, as_bool, source_column
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    BOUNDED_AGGREGATES,
    CELL_AGGREGATES,
    KEPT_SHARE,
    PAIR_AGGREGATES,
    RELEASE_COLUMNS,
    WINDOW_COLUMNS,
    Draft,
    Item,
    Over,
    call_name,
    canonical,
    find_calls,
)
from dpstream.sql_compiler.unnest import Unnest

INTERVAL = ("_low", "_high")
"""What the ends of an interval are called after their column."""
_CLEAR = 2  # a denominator must be so many standard deviations from 0 to have an error bar
Factors: TypeAlias = dict[str, float]
Terms: TypeAlias = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A compiled expression and its canonical text, which is all that it is known by."""

    text: str
    columns: tuple[str, ...]
    compute: Compute = field(compare=False)
    plain: bool = False
    """Is it a column itself?"""
    functions: tuple[str, ...] = ()
    """Functions in Python that it calls, and where they are."""

    def evaluate(self, table: pa.Table, zone: str) -> pa.Array:
        """The values of the expression for the rows of a table."""
        columns = {name: source_column(table[name], name, zone) for name in self.columns}
        return self._evaluate(columns, len(table))

    def _evaluate(self, columns: dict[str, pa.Array], size: int) -> pa.Array:
        """The same; where the computation fails, halving finds the rows at fault: they are NULL."""
        try:
            value = self.compute(columns)
        except pa.ArrowException as error:
            if not size:
                raise InvalidInput(f"{self.text} cannot be computed: {error}") from None
            if size == 1:
                empty = {name: column.slice(0, 0) for name, column in columns.items()}
                return pa.nulls(1, self._evaluate(empty, 0).type)
            halves = []
            for at, end in ((0, size // 2), (size // 2, size)):
                rows = {name: column.slice(at, end - at) for name, column in columns.items()}
                halves.append(self._evaluate(rows, end - at))
            return pa.concat_arrays(halves)
        if isinstance(value, pa.Scalar):
            value = pa.repeat(value, size)
        if isinstance(value, pa.ChunkedArray):
            value = value.combine_chunks()
        return value.cast(pa.string()) if value.type.equals(KINDS["null"]) else value


def functions_used(expressions: Iterable[Expression | None]) -> str:
    """Which functions in Python are called, and where they are."""
    used = sorted({text for each in expressions if each is not None for text in each.functions})
    return f" USING {', '.join(used)}" if used else ""


def columns_read(node: exp.Expr) -> dict[str, None]:
    """The columns that an expression reads; an item of a list is one."""
    names: dict[str, None] = {}
    for part in node.walk(prune=lambda each: isinstance(each, Item)):
        if isinstance(part, exp.Column | Item):
            names[canonical(part) if isinstance(part, Item) else part.name] = None
    return names


@dataclass(frozen=True, kw_only=True, repr=False)
class RowPreparation:
    """Filters and computed columns of a source's rows.

    `passed`: columns that pass as they are. `computed`: name and expression of each computed
    column; where it cannot be computed for a row it is NULL, and no row stops the others.
    """

    columns: Sequence[str]
    passed: tuple[str, ...]
    computed: tuple[tuple[str, Expression], ...]
    where: Expression | None
    zone: str
    unnests: tuple[Unnest, ...] = ()

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        computed = [f"{expression.text} AS {name!r}" for name, expression in self.computed]
        text = f"SELECT {', '.join([*map(repr, self.passed), *computed])}"
        if self.unnests:
            text += f" FROM EACH ROW, {', '.join(each.text for each in self.unnests)}"
        if self.where is not None:
            text += f" WHERE {self.where.text}"
        parts = [each for _, each in self.computed] + [each.lists for each in self.unnests]
        return f"{text} IN {self.zone}{functions_used([*parts, self.where])}"

    def __repr__(self) -> str:
        return self.text

    def columns_of(self, name: str) -> Sequence[str]:
        """The columns that an expression reads, or the column itself."""
        computed = dict(self.computed)
        return self._of_source(computed[name].columns) if name in computed else (name,)

    def _of_source(self, names: Iterable[str]) -> Sequence[str]:
        """The source's columns behind some columns: an item's are those of its list."""
        lists = {name: each.lists for each in self.unnests for name in (each.item, each.place)}
        found = [
            column
            for name in names
            for column in (self._of_source(lists[name].columns) if name in lists else (name,))
        ]
        return tuple(dict.fromkeys(found))

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""
        for unnest in self.unnests:
            table = unnest(table, self.zone)
        if self.where is not None:
            table = table.filter(as_bool(self.where.evaluate(table, self.zone)))
        columns = {name: table[name] for name in self.passed}
        for name, expression in self.computed:
            columns[name] = expression.evaluate(table, self.zone)
        return pa.table(columns)


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """The standard deviation of a computed column, where it follows from those of its aggregates.

    `terms`: factors of the aggregates. Of a quotient, `denominator_terms` are those of
    `denominator`: then it is a first-order estimate, and NULL where the denominator may be 0.
    Noises are independent but for those of sums about their `middles`: such a sum has the noise of
    its middle times that of the count `rows`.
    `deviations`: half the width of an interval, where one is asked for. That of one aggregate is
    scaled, that of a sum is as wide as its standard deviation says, and that of a quotient with
    this `numerator` is Fieller's.
    """

    terms: Terms
    denominator_terms: Terms = ()
    denominator: Expression | None = None
    rows: str = ""
    middles: Terms = ()
    numerator: Expression | None = None
    deviations: float | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """What the columns beside it end with."""
        return ("_stddev",) if self.deviations is None else ("_stddev", *INTERVAL)

    def beside(self, release: pa.Table, value: pa.Array, zone: str) -> dict[str, pa.Array]:
        """The columns that stand beside it, by what they end with."""
        columns = {"_stddev": self.stddevs(release, value, zone)}
        if self.deviations is not None:
            ends = self._interval(release, value, zone, self.deviations)
            columns |= zip(INTERVAL, ends, strict=True)
        return columns

    def _interval(
        self, release: pa.Table, value: pa.Array, zone: str, deviations: float
    ) -> tuple[pa.Array, pa.Array]:
        """The ends of each row's interval."""
        found, factors = floats(value), dict(self.terms)
        if self.denominator is None or self.numerator is None:
            if len(factors) == 1:
                [(name, factor)] = factors.items()
                own = floats(release[name])
                ends = [found + factor * (floats(release[name + end]) - own) for end in INTERVAL]
                return self._ends(found, *(ends if factor > 0 else ends[::-1]))
            half = deviations * self._stddevs(release, dict(self.terms))
            return self._ends(found, found - half, found + half)
        above, below = (
            floats(e.evaluate(release, zone)) for e in (self.numerator, self.denominator)
        )
        below_factors = dict(self.denominator_terms)
        low, high = quotient_interval(
            above,
            below,
            (self._stddevs(release, factors) ** 2, self._stddevs(release, below_factors) ** 2),
            self._shared(release, factors) * self._shared(release, below_factors),
            deviations,
        )
        return self._ends(above + below, low, high)

    @staticmethod
    def _ends(known: Reals, low: Reals, high: Reals) -> tuple[pa.Array, pa.Array]:
        """NULL where nothing is `known`."""
        low, high = (np.where(np.isnan(known), np.nan, each) for each in (low, high))
        return pa.array(low, from_pandas=True), pa.array(high, from_pandas=True)

    def stddevs(self, release: pa.Table, value: pa.Array, zone: str) -> pa.Array:
        """The standard deviation of each row's value."""
        if self.denominator is None:
            return pa.array(self._stddevs(release, dict(self.terms)))
        size = np.abs(floats(self.denominator.evaluate(release, zone)))
        factors: dict[str, float | Reals] = {**dict(self.terms)}
        for name, factor in self.denominator_terms:
            factors[name] = -factor * floats(value)
        with np.errstate(all="ignore"):
            stddevs = self._stddevs(release, factors) / size
            unclear = ~(size >= _CLEAR * self._stddevs(release, dict(self.denominator_terms)))
        return pa.array(stddevs, mask=unclear | ~np.isfinite(stddevs))

    def _stddevs(self, release: pa.Table, factors: Mapping[str, float | Reals]) -> Reals:
        """Of a sum of aggregates."""
        total: Reals = np.zeros(len(release))
        of_rows, middles = self._of_rows(release)
        with np.errstate(over="ignore", invalid="ignore"):
            for name, factor in factors.items():
                own, shared = floats(release[f"{name}_stddev"]), middles.get(name, 0) * of_rows
                own = np.sqrt(np.maximum(own - np.abs(shared), 0) * (own + np.abs(shared)))
                total = np.hypot(total, factor * own)
            return np.hypot(total, self._shared(release, factors))

    def _shared(self, release: pa.Table, factors: Mapping[str, float | Reals]) -> Reals:
        """The part of that which comes from the noise that sums about their middles share."""
        by_rows: Reals = np.zeros(len(release))
        of_rows, middles = self._of_rows(release)
        with np.errstate(over="ignore"):
            for name, factor in factors.items():
                by_rows = by_rows + factor * (middles.get(name, 0) * of_rows)
        return by_rows

    def _of_rows(self, release: pa.Table) -> tuple[Reals, dict[str, float]]:
        """The deviation of the count that is shared, and how much of it is in each aggregate."""
        if not self.rows:
            return np.zeros(len(release)), {}
        return floats(release[f"{self.rows}_stddev"]), {**dict(self.middles), self.rows: 1.0}


@dataclass(frozen=True, kw_only=True)
class WrittenErrorBar:
    """The standard deviation of a total or a share of rows, as an expression of the release."""

    value: Expression

    def stddevs(self, release: pa.Table, value: pa.Array, zone: str) -> pa.Array:
        """The standard deviation of each row's value."""
        return self.value.evaluate(release, zone)

    @property
    def ends(self) -> tuple[str, ...]:
        """What the columns beside it end with."""
        return ("_stddev",)

    def beside(self, release: pa.Table, value: pa.Array, zone: str) -> dict[str, pa.Array]:
        """The columns that stand beside it, by what they end with."""
        return {"_stddev": self.stddevs(release, value, zone)}


@dataclass(frozen=True, kw_only=True)
class RankInterval:
    """The best and the worst rank that the true figure of each row may have, among rows shown.

    `figure`: the aggregate that is ranked; `down`: is the largest one first? `parts`: of which rows
    are ranked apart. Intervals of all rows hold together, as often as `confidence` says.
    """

    figure: str
    down: bool
    parts: tuple[Expression, ...]
    confidence: float
    ends: ClassVar[tuple[str, ...]] = INTERVAL

    def beside(self, release: pa.Table, value: pa.Array, zone: str) -> dict[str, pa.Array]:
        """The columns that stand beside the rank, by what they end with."""
        values = floats(release[self.figure]) * (1 if self.down else -1)
        parts = row_codes([part.evaluate(release, zone) for part in self.parts], len(release))
        spread = floats(release[f"{self.figure}_stddev"])
        ends = rank_interval(values, spread, parts, self.confidence)
        return {end: pa.array(column) for end, column in zip(INTERVAL, ends, strict=True)}


def floats(column: pa.Array | pa.ChunkedArray) -> Reals:
    """The numbers of a column; NULL is NaN."""
    return np.asarray(column.cast(pa.float64()), np.float64)


@dataclass(frozen=True, kw_only=True)
class ComputedColumn:
    """A column that SELECT computes from noisy ones, and its error bar if it has one."""

    name: str
    value: Expression
    error_bar: ErrorBar | WrittenErrorBar | RankInterval | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """What the columns that stand beside it end with."""
        return () if self.error_bar is None else self.error_bar.ends


@dataclass(frozen=True, kw_only=True, repr=False)
class PostProcessing:
    """Computed columns, HAVING, ORDER BY, LIMIT, and which columns are shown: all of it is
    post-processing, so it costs nothing.
    """

    columns: tuple[ComputedColumn, ...] = ()
    having: Expression | None = None
    ranked: tuple[ComputedColumn, ...] = ()
    """Columns that compare the rows which HAVING leaves."""
    qualify: Expression | None = None
    order: tuple[tuple[Expression, bool, bool], ...] = ()
    """Expression, is it descending, do NULLs come first?"""
    limit: int | None = None
    offset: int = 0
    shown: tuple[str, ...] | None = None
    """Names in order; None: all, as the engine has them."""
    zone: str = "UTC"

    @property
    def text(self) -> str:
        """All of it, in SQL."""
        order = ", ".join(
            f"{by.text} {'DESC' if down else 'ASC'} NULLS {'FIRST' if nulls_first else 'LAST'}"
            for by, down, nulls_first in self.order
        )
        parts = (
            *(f"{each.value.text} AS {each.name!r}," for each in self.columns),
            "" if self.shown is None else f"SHOW {', '.join(self.shown)}",
            "" if self.having is None else f"HAVING {self.having.text}",
            *(f"THEN {each.value.text} AS {each.name!r}" for each in self.ranked),
            "" if self.qualify is None else f"QUALIFY {self.qualify.text}",
            f"ORDER BY {order}" if order else "",
            "" if self.limit is None else f"LIMIT {self.limit}",
            f"OFFSET {self.offset}" if self.offset else "",
            f"IN {self.zone}",
        )
        used = [
            *(each.value for each in (*self.columns, *self.ranked)),
            self.having,
            self.qualify,
            *(by for by, _, _ in self.order),
        ]
        return " ".join(filter(None, parts)) + functions_used(used)

    def __repr__(self) -> str:
        return self.text

    @property
    def computed(self) -> dict[str, bool]:
        """Columns that are computed from noisy ones, and whether each has an error bar."""
        return {each.name: each.error_bar is not None for each in (*self.columns, *self.ranked)}

    @property
    def ends(self) -> dict[str, tuple[str, ...]]:
        """What the columns beside each computed one end with."""
        return {each.name: each.ends for each in (*self.columns, *self.ranked)}

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release."""
        release = self._with_columns(release, self.columns)
        if self.having is not None:
            release = release.filter(as_bool(self.having.evaluate(release, self.zone)))
        release = self._with_columns(release, self.ranked)
        if self.qualify is not None:
            release = release.filter(as_bool(self.qualify.evaluate(release, self.zone)))
        if self.order:
            release = release.take(pa.array(self._row_order(release)))
        release = release.slice(self.offset, self.limit)
        return release if self.shown is None else release.select(self._names(release))

    def _with_columns(self, release: pa.Table, columns: Sequence[ComputedColumn]) -> pa.Table:
        for each in columns:
            value = each.value.evaluate(release, self.zone)
            if each.error_bar is not None:
                for end, column in each.error_bar.beside(release, value, self.zone).items():
                    release = release.append_column(each.name + end, column)
            release = release.append_column(each.name, value)
        return release

    def _names(self, release: pa.Table) -> list[str]:
        """The columns shown, and those that stand beside them where dropped rows are measured."""
        assert self.shown is not None
        beside = {f"{name}_all" for name in self.shown if name.endswith("_high")}
        beside &= set(release.column_names) - set(self.shown)
        names = [
            n for name in self.shown for n in (name, f"{name}_all") if n == name or n in beside
        ]
        return [*names, *({KEPT_SHARE} & set(release.column_names))]

    def _row_order(self, release: pa.Table) -> Integers:
        """Row numbers in order."""
        by = [(each.evaluate(release, self.zone), down, first) for each, down, first in self.order]
        return sort_rows(by, len(release))


def nonzero_terms(factors: Factors) -> Terms:
    """The factors that matter."""
    return tuple((name, factor) for name, factor in factors.items() if factor)


def linear_factors(node: exp.Expr, aggregates: Collection[str]) -> Factors | None:
    """Each aggregate's factor, if the expression is a sum of them and constants."""
    node = node.unnest()
    if _number(node) is not None:
        return {}
    if isinstance(node, exp.Column):
        return {node.name: 1.0} if node.name in aggregates else None
    if isinstance(node, exp.Neg):
        return _scaled(linear_factors(node.this, aggregates), -1.0)
    if isinstance(node, exp.Add | exp.Sub):
        left, right = (linear_factors(part, aggregates) for part in (node.this, node.expression))
        right = _scaled(right, 1.0 if isinstance(node, exp.Add) else -1.0)
        if left is None or right is None:
            return None
        return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}
    if isinstance(node, exp.Mul):
        for constant, other in ((node.this, node.expression), (node.expression, node.this)):
            factor = _number(constant.unnest())
            if factor is not None:
                return _scaled(linear_factors(other, aggregates), factor)
    if isinstance(node, exp.Div) and (factor := _number(node.expression.unnest())):
        return _scaled(linear_factors(node.this, aggregates), 1 / factor)
    return None


def _scaled(factors: Factors | None, by: float) -> Factors | None:
    return None if factors is None else {name: by * factor for name, factor in factors.items()}


def _number(node: exp.Expr) -> float | None:
    try:
        value = literal_value(node)
    except (ValueError, TypeError):
        return None
    return float(value) if type(value) in (int, float) else None


def _leaves_out(node: exp.Expr) -> bool:
    """Does an expression leave rows out, by NULL: IF(c, x, NULL), CASE without ELSE, NULLIF?"""
    node = node.unnest()
    if call_name(node) == "NULLIF":
        return True
    values: list[exp.Expr | None] = []
    if isinstance(node, exp.Case):
        values = [node.args.get("default"), *(each.args.get("true") for each in node.args["ifs"])]
    elif isinstance(node, exp.If):
        values = [node.args.get("true"), node.args.get("false")]
    return any(each is None or isinstance(each.unnest(), exp.Null) for each in values)


class QueryBuilder:
    """Builds the parts of a query that hold expressions: its aggregates, what is done before them
    (`prepare`) and after them (`finish`).
    """

    def __init__(self, draft: Draft) -> None:
        self._draft, parameters = draft, draft.parameters
        self.zone = str(parameters.get("time_zone", "UTC"))
        self._compiler = Compiler(
            statement=draft.statement, zone=self.zone, functions=draft.functions
        )
        passed = ("privacy_unit_column", "time_column", "arrival_column")
        self._passed: list[str] = [parameters[name] for name in passed if name in parameters]
        if draft.relation.unit is not None:  # inner rows: whose they are, their place says
            self._passed = [ROW]
        self._computed: dict[str, Expression] = {}
        for name, node in draft.keys.items():
            self._add_key(name, node)
        self.aggregates = {
            name: self._aggregate(name, call) for name, call in draft.aggregates.items()
        }

    def expression(self, node: exp.Expr, *, published: bool = False) -> Expression:
        """A compiled expression of the source's columns."""
        columns = columns_read(node)
        compiler = replace(self._compiler, published=True) if published else self._compiler
        compute = compiler.compile(node)
        return Expression(
            text=canonical(node),
            columns=tuple(columns),
            compute=compute,
            plain=isinstance(node.unnest(), exp.Column),
            functions=self._functions(node),
        )

    def _functions(self, node: exp.Expr) -> tuple[str, ...]:
        known = self._draft.functions
        return tuple(sorted({known[call_name(call)].text for call in find_calls(node, known)}))

    def _add_key(self, name: str, node: exp.Expr) -> None:
        """A column to group by, under its own name."""
        if isinstance(node, exp.Column) and node.name == name:
            self._passed.append(name)
        elif name in self._passed:
            raise self._draft.refusal(
                node, f"the key {name} has the name of another column that is used", "rename it"
            )
        else:
            self._computed[name] = self.expression(node)

    def _value(self, node: exp.Expr) -> str:
        """The name of a column that holds an expression's values."""
        if isinstance(node, exp.Column) and node.name not in self._computed:
            self._passed.append(node.name)
            return node.name
        expression = self.expression(node)
        name = expression.text
        while name in self._passed or self._computed.get(name, expression) != expression:
            name += "'"
        self._computed[name] = expression
        return name

    def _aggregate(self, name: str, call: exp.Expr) -> Aggregate:
        """One aggregate of the query."""
        kind, facts = self._kind(call)
        try:
            return kind(name, **facts)
        except InvalidParameter as error:
            raise self._draft.refusal(call, str(error), "change the bounds") from None

    def _kind(self, call: exp.Expr) -> tuple[type[Aggregate], dict[str, Any]]:
        """The class of an aggregate, and what it is made with."""
        argument, named = call.expressions[0], named_arguments(call)
        if call_name(call) in PAIR_AGGREGATES:
            return self._of_pairs(call)
        bounds: dict[str, Any] = {
            name: AUTO
            if is_word_auto(named[name])
            else tuple(map(self._bound, named[name].expressions))
            for name in (BOUNDS, GROUP_BOUNDS)
            if name in named
        }
        if isinstance(argument, exp.Star):
            return Count, bounds
        if isinstance(argument, exp.Distinct) or call_name(call) == "APPROX_COUNT_DISTINCT":
            values = distinct_values(self._draft, call)
            if values is None:
                return CountUnits, {}
            most = self._draft.parameters["max_values_per_group"]
            facts = {"column": self._value(values), "max_values_per_group": most}
            if isinstance(argument, exp.Distinct):
                return CountDistinct, facts
            given = {"one_in": self._number(named["one_in"])} if "one_in" in named else {}
            whole = {name: int(n) if n.denominator == 1 else n for name, n in given.items()}
            return ApproxCountDistinct, facts | whole
        node = substitute(self._draft, argument, self._draft.relation)
        if call_name(call) in CELL_AGGREGATES:
            made, arguments = self._of_cells(call)
            return made, {"column": self._value(node)} | arguments
        if call_name(call) in ("COUNT", "COUNTIF"):  # a SUM of ones and zeros
            test = node
            if call_name(call) == "COUNT":
                test = exp.Not(this=exp.Is(this=exp.Paren(this=node), expression=exp.Null()))
            ones = exp.Case(
                ifs=[exp.If(this=test, true=exp.Literal.number(1))], default=exp.Literal.number(0)
            )
            return Sum, {"column": self._value(ones), "quantum": 1} | (bounds or {BOUNDS: (0, 1)})
        quantum = self._number(named["quantum"]) if "quantum" in named else None
        kind = BOUNDED_AGGREGATES[call_name(call)]
        if kind is Avg and GROUP_BOUNDS not in named and _leaves_out(node):
            kind = AvgOfValues
        return kind, {"column": self._value(node), "quantum": quantum} | bounds

    def _bound(self, node: exp.Expr) -> Any:
        return AUTO if is_word_auto(node) else self._number(node)

    def _of_pairs(self, call: exp.Expr) -> tuple[type[Aggregate], dict[str, Any]]:
        """An aggregate of two columns, and what it is made with."""
        made, more = PAIR_AGGREGATES[call_name(call)]
        nodes = [substitute(self._draft, e, self._draft.relation) for e in call.expressions[:2]]
        bounds = tuple(
            tuple(self._number(each) for each in pair.expressions)
            for pair in named_arguments(call)[BOUNDS].expressions
        )
        columns = tuple(self._value(node) for node in nodes)
        return made, {"columns": columns, BOUNDS: bounds, **more}

    def _of_cells(self, call: exp.Expr) -> tuple[type[Histogram | Quantile], dict[str, Any]]:
        """A quantile, several, or a histogram, and what it is made with."""
        function, named = call_name(call), named_arguments(call)
        constant = next((e for e in call.expressions[1:] if not isinstance(e, exp.Kwarg)), call)
        if function == "HISTOGRAM":
            return Histogram, {"edges": self._edges(constant)}
        shares: Any = {"MEDIAN": Fraction(1, 2), "MIN": 0, "MAX": 1}.get(function)
        if function == "PERCENTILE_CONT":
            shares = self._number(constant, "the share", "0.95")
        elif function == "APPROX_QUANTILES":
            count = self._number(constant, "the number of parts", "4")
            if count.denominator > 1 or not 1 <= count <= 100:
                raise self._draft.refusal(
                    constant, "APPROX_QUANTILES takes a number of parts, 1 to 100", "write 4"
                )
            shares = [Fraction(i, int(count)) for i in range(int(count) + 1)]
        bounds, edges = named.get(BOUNDS), named.get("edges")
        leaves = Fraction(0)
        if "leaves" in named:
            leaves = self._number(named["leaves"], "leaves", "256")
        clamps = None if bounds is None else tuple(map(self._number, bounds.expressions))
        return Quantile, {
            "q": shares,
            "contribution_bounds_per_row": clamps,
            "leaves": int(leaves) if leaves.denominator == 1 else float(leaves),
            "edges": None if edges is None else self._edges(edges),
            "mechanism": self._word(named.get("mechanism"), "auto"),
        }

    def _word(self, node: exp.Expr | None, default: str) -> str:
        """A word in quotes."""
        if node is None:
            return default
        if isinstance(node, exp.Literal) and node.is_string:
            return str(node.name)
        raise self._draft.refusal(
            node, "a mechanism is a word in quotes", "write 'tree' or 'exponential'"
        )

    def _edges(self, node: exp.Expr) -> Any:
        """Numbers in brackets, or a word."""
        if isinstance(node, exp.Array | exp.Tuple):
            return [self._number(each, "an edge", "[0, 10, 100]") for each in node.expressions]
        if isinstance(node, exp.Literal) and node.is_string and node.name == "geometric":
            return node.name
        raise self._draft.refusal(
            node, "edges are numbers that rise", "write [0, 10, 100], or 'geometric'"
        )

    def _number(self, node: exp.Expr, what: str = "a bound", example: str = "(0, 600)") -> Fraction:
        try:
            return Fraction(str(literal_value(node)))
        except (ValueError, TypeError):
            raise self._draft.refusal(node, f"{what} is a number", f"write {example}") from None

    def condition(self, filters: Sequence[exp.Expr]) -> Expression | None:
        """All filters in one; None if there is none."""
        if not filters:
            return None
        wrapped = filters if len(filters) == 1 else [exp.Paren(this=node) for node in filters]
        return self.expression(
            reduce(lambda left, right: exp.And(this=left, expression=right), wrapped)
        )

    def prepare(self, *, always: bool = False) -> RowPreparation | None:
        """Filters and computed columns; None if rows are used as they are, unless `always`."""
        where = self.condition(self._draft.relation.where)
        if not self._computed and where is None and not always and not self._draft.relation.unnests:
            return None
        used = [*self._passed, *(name for each in self._computed.values() for name in each.columns)]
        unnests = tuple(self._unnest(*each) for each in self._draft.relation.unnests)
        used += [name for each in unnests for name in each.lists.columns]
        made = {name for each in unnests for name in (each.item, each.place)}
        read = dict.fromkeys([*used, *(where.columns if where else ())])
        return RowPreparation(
            columns=tuple(name for name in read if name not in made),
            passed=tuple(dict.fromkeys(self._passed)),
            computed=tuple(self._computed.items()),
            where=where,
            zone=self.zone,
            unnests=unnests,
        )

    def _unnest(self, item: Item, place: Item | None, outer: bool) -> Unnest:
        compute = compile_list(self._compiler, item.this)
        columns = tuple(columns_read(item.this))
        return Unnest(
            item=canonical(item),
            lists=Expression(
                text=canonical(item.this),
                columns=columns,
                compute=compute,
                functions=self._functions(item.this),
            ),
            outer=outer,
            place=None if place is None else canonical(place),
        )

    def finish(self) -> PostProcessing | None:
        """None if everything is published as the engine has it."""
        clauses = self._draft.select.args
        having, order = clauses.get("having"), clauses.get("order")
        qualify = clauses.get("qualify")
        limit, offset = clauses.get("limit"), clauses.get("offset")
        columns = tuple(
            ComputedColumn(
                name=name, value=self.expression(node), error_bar=self._error_bar(node.unnest())
            )
            for name, node in self._draft.computed.items()
        )
        self._refuse_lists([*self._draft.computed.values(), *self._draft.ranked.values()])
        self._refuse_lists([each for each in (having, order, qualify) if each is not None])
        ranked = tuple(self._ranked(name, node) for name, node in self._draft.ranked.items())
        shown = self._shown((*columns, *ranked))
        if not (qualify or ranked or having or order or limit or offset or columns or shown):
            return None
        return PostProcessing(
            columns=columns,
            having=None if having is None else self._published(having.this),
            ranked=ranked,
            qualify=None if qualify is None else self._published(qualify.this, ranked=True),
            order=tuple(
                (
                    self._published(term.this, ranked=True),
                    bool(term.args.get("desc")),
                    bool(term.args.get("nulls_first")),
                )
                for term in ([] if order is None else order.expressions)
            ),
            limit=None if limit is None else int(limit.expression.name),
            offset=0 if offset is None else int(offset.expression.name),
            shown=shown,
            zone=self.zone,
        )

    def _refuse_lists(self, nodes: Iterable[exp.Expr]) -> None:
        """Lists are published as they are: no expression reads them."""
        made = {name: getattr(each, "several", False) for name, each in self.aggregates.items()}
        listed = {name for name, is_list in made.items() if is_list}
        written = {canonical(self._draft.aggregates[name]): name for name in listed}
        for node in nodes:
            for part in node.find_all(exp.Column, exp.Anonymous):
                name = part.name if isinstance(part, exp.Column) else written.get(canonical(part))
                if name in listed:
                    raise self._draft.refusal(
                        part,
                        f"{name} is a list, and is published as it is",
                        "ask for the quantile alone, as PERCENTILE_CONT(x, 0.5, ...)",
                    )

    def _ranked(self, name: str, node: exp.Expr) -> ComputedColumn:
        """A column that compares published rows, with the error bar of a total or a share."""
        value = self._published_node(node)
        shared = self._draft.parameters.get("debias") is not None
        shared = shared or bool(self._draft.sets)  # by levels that were made consistent
        chosen = self._draft.select.args.get("having") is not None  # by noisy values
        made: WrittenErrorBar | RankInterval | None = None
        if not shared and not chosen:
            bar = error_bar(value, list(self.aggregates), list(self._draft.keys))
            if bar is not None:
                made = WrittenErrorBar(value=self.expression(bar, published=True))
            else:
                made = self._rank_interval(value)
        return ComputedColumn(
            name=name, value=self.expression(value, published=True), error_bar=made
        )

    def _rank_interval(self, node: exp.Expr) -> RankInterval | None:
        """The interval of a rank by one aggregate with normal noise; None: there is none."""
        node = node.unnest()
        confidence = self._draft.parameters.get("confidence")
        order, parts = node.args.get("order") or [], node.args.get("parts") or []
        if confidence is None or not isinstance(node, Over) or node.this != "RANK":
            return None
        by = order[0].this if len(order) == 1 and isinstance(order[0], exp.Ordered) else None
        ranked = self.aggregates.get(by.name) if isinstance(by, exp.Column) else None
        if ranked is None or ranked.error_bar != "fixed" or self._deviations([ranked.name]) is None:
            return None
        columns = (column for part in parts for column in part.find_all(exp.Column))
        if any(column.name not in self._draft.keys for column in columns):
            return None
        return RankInterval(
            figure=ranked.name,
            down=bool(order[0].args.get("desc")),
            parts=tuple(self.expression(part, published=True) for part in parts),
            confidence=float(confidence),
        )

    def _error_bar(self, node: exp.Expr) -> ErrorBar | None:
        """The error bar of an expression of published columns; None if there is no honest one."""
        shared = self._draft.parameters.get("debias") is not None  # one noisy factor for all
        factors = linear_factors(node, self.aggregates)
        if factors is not None:
            honest = self._independent(factors) and not (shared and len(factors) > 1)
            terms = nonzero_terms(factors)
            deviations = self._deviations([name for name, _ in terms], alone=len(terms) == 1)
            bar = ErrorBar(terms=terms, deviations=deviations, **self._about_rows)
            return bar if honest else None
        if not isinstance(node, exp.Div) or shared:
            return None
        above, below = (
            linear_factors(part, self.aggregates) for part in (node.this, node.expression)
        )
        if above is None or not below or set(above) & set(below):
            return None
        if not self._independent(above | below):
            return None
        return ErrorBar(
            terms=nonzero_terms(above),
            denominator_terms=nonzero_terms(below),
            denominator=self.expression(node.expression),
            numerator=self.expression(node.this),
            deviations=self._deviations([*above, *below]),
            **self._about_rows,
        )

    def _deviations(self, names: Sequence[str], *, alone: bool = False) -> float | None:
        """Half the width of an interval of what is made of some aggregates; None: it has none.

        Of several only where their errors are normal: not where noise is Laplace's or figures are
        cut off at 0, nor of quantiles and the like.
        """
        parameters = self._draft.parameters
        confidence = parameters.get("confidence")
        if confidence is None:
            return None
        if not alone:
            if parameters.get("delta") is None or parameters.get("nonnegative"):
                return None
            others = OfCells | OfPairs | Stddev
            if any(isinstance(self.aggregates[name], others) for name in names):
                return None
        return interval_of(float(confidence))

    def _independent(self, names: Iterable[str]) -> bool:
        """Is no measure behind two of them, but for the rows that sums about a middle share?

        Rows are units where a unit has one row per group.
        """
        rows, middles = self._about_rows["rows"], dict(self._about_rows["middles"])
        of_rows = {measure for each in self._behind for measure in each.get(rows, ())}
        with_rows = {rows, *middles} & {*names}
        if with_rows and any(type(self.aggregates[name]) is CountUnits for name in names):
            return False
        seen: set[Measure] = set()
        for name in names:
            mine = self.noise_of(name) - (of_rows if name in with_rows else set())
            if seen & mine:
                return False
            seen |= mine
        return True

    @cached_property
    def _behind(self) -> list[dict[str, tuple[Measure, ...]]]:
        """The measures behind each aggregate, with one row of a unit in a group and with more."""
        all_of_them = [*self.aggregates.values()]
        return [measures_by_name(all_of_them, one_row=one_row) for one_row in (True, False)]

    @cached_property
    def _about_rows(self) -> dict[str, Any]:
        """The count whose noise sums about their middles share, and their middles."""
        counts = [name for name, each in self.aggregates.items() if type(each) is Count]
        middles = [
            (name, float(each.middle))
            for name, each in self.aggregates.items()
            if type(each) is Sum and len(self._behind[0][name]) > 1
        ]
        return (
            {"rows": counts[0], "middles": tuple(middles)}
            if counts
            else {"rows": "", "middles": ()}
        )

    def noise_of(self, name: str) -> frozenset[Measure]:
        """The measures whose noise is in an aggregate."""
        return frozenset(measure for each in self._behind for measure in each[name])

    def _shown(self, columns: tuple[ComputedColumn, ...]) -> tuple[str, ...] | None:
        """The columns in SELECT's order, with their error bars; None if the engine has it so."""
        draft = self._draft
        windows = list(WINDOW_COLUMNS) if "time_column" in draft.parameters else []
        intervals = [] if draft.parameters.get("confidence") is None else INTERVAL
        suffixes = {each.name: [*each.ends] for each in columns}
        suffixes |= {name: ["_stddev", *intervals] for name in self.aggregates}

        def with_error_bars(names: Iterable[str]) -> list[str]:
            return [f"{name}{end}" for name in names for end in ["", *suffixes.get(name, [])]]

        natural = [*windows, *draft.keys, *draft.labels, *with_error_bars(self.aggregates)]
        labels = [name for name in draft.labels if name not in draft.outputs]
        last = max((n + 1 for n, name in enumerate(draft.outputs) if name in draft.keys), default=0)
        shown = with_error_bars([*draft.outputs[:last], *labels, *draft.outputs[last:]])
        if shown == natural[len(windows) :]:
            return None  # nothing is said about windows: they come first
        shown += [name for name in windows if name not in shown]
        if draft.series:
            shown.append("held")
            natural.append("held")
        return None if shown == natural else (*shown, *RELEASE_COLUMNS)

    def _published(self, node: exp.Expr, *, ranked: bool = False) -> Expression:
        """An expression of what is published, compiled."""
        return self.expression(self._published_node(node, ranked=ranked), published=True)

    def _published_node(self, node: exp.Expr, *, ranked: bool = False) -> exp.Expr:
        """An expression of what is published: names of keys, aggregates and windows."""
        draft = self._draft
        shown = [name for name in draft.aggregates if name not in draft.hidden]
        names = [name for each in shown for name in (each, f"{each}_stddev")]
        names += [*draft.computed, *(draft.ranked if ranked else ()), *draft.keys]
        names += draft.labels
        names += [*RELEASE_COLUMNS, KEPT_SHARE]
        if "time_column" in draft.parameters:
            names += WINDOW_COLUMNS
        if isinstance(node, exp.Literal) and not node.is_string:
            at = selected_position(draft, node)
            name = draft.outputs[at]
            node = draft.select.expressions[at].unalias()
            if name in draft.computed or name in draft.ranked:
                node = exp.column(name, quoted=True)
        written = {canonical(call): name for name, call in draft.aggregates.items()}
        keys = {canonical(expression): name for name, expression in draft.keys.items()}

        def publish(part: exp.Expr) -> exp.Expr:
            text = canonical(part)
            if call_name(part) in GROUPING:
                return grouping_call(draft, part, keys)
            if call_name(part) in AGGREGATES:
                if text not in written:
                    raise draft.refusal(
                        part, f"{text} is not among the columns of SELECT", "select it too"
                    )
                return exp.column(written[text], quoted=True)
            if isinstance(part, exp.Column) and part.name in names and not part.args.get("table"):
                return exp.column(part.name, quoted=True)
            if text in keys:
                return exp.column(keys[text], quoted=True)
            if isinstance(part, exp.Column):
                raise draft.refusal(
                    part,
                    f"{text} is not published: HAVING and ORDER BY see noisy results alone",
                    f"use {', '.join(names)}; filter rows in WHERE",
                )
            return part

        return node.transform(publish)
