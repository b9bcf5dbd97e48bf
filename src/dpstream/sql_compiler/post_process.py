"""SELECT, HAVING, ORDER BY and LIMIT as post-processing of what is published.

A computed column has an error bar if it is a sum of aggregates with constant factors, or a quotient
of two such sums, and the noises are independent: they are, unless two aggregates are made of one
measure (AVG and COUNT(*) share the number of rows). Any other column has none rather than a wrong
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.query.aggregates import Aggregate, Measure
from dpstream.records import Integers, Reals
from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import AGGREGATES, RELEASE_COLUMNS, WINDOW_COLUMNS, call_name
from dpstream.sql_compiler.expressions import literal_value
from dpstream.sql_compiler.row_expressions import Expression, QueryBuilder
from dpstream.sql_compiler.select import selected_position
from dpstream.sql_compiler.sql_values import as_bool

_CLEAR = 2  # a denominator must be so many standard deviations from 0 to have an error bar
Factors: TypeAlias = dict[str, float]
Terms: TypeAlias = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """The standard deviation of a computed column, where it follows from those of its aggregates.

    `terms`: factors of aggregates whose noises are independent. Of a quotient, `denominator_terms`
    are those of `denominator`: then it is a first-order estimate, and NULL where the denominator
    may be 0.
    """

    terms: Terms
    denominator_terms: Terms = ()
    denominator: Expression | None = None

    def stddevs(self, release: pa.Table, value: pa.Array, zone: str) -> pa.Array:
        """The standard deviation of each row's value."""
        stddevs = _norm(release, self.terms)
        if self.denominator is None:
            return pa.array(stddevs)
        size = np.abs(_floats(self.denominator.evaluate(release, zone)))
        noise = _norm(release, self.denominator_terms)
        with np.errstate(all="ignore"):
            stddevs = np.hypot(stddevs, _floats(value) * noise) / size
            unclear = ~(size >= _CLEAR * noise)
        return pa.array(stddevs, mask=unclear | ~np.isfinite(stddevs))


def _norm(release: pa.Table, terms: Terms) -> Reals:
    total: Reals = np.zeros(len(release))
    with np.errstate(over="ignore"):
        for name, factor in terms:
            total = np.hypot(total, factor * _floats(release[f"{name}_stddev"]))
    return total


def _floats(column: pa.Array | pa.ChunkedArray) -> Reals:
    return np.asarray(column.cast(pa.float64()), np.float64)


@dataclass(frozen=True, kw_only=True)
class ComputedColumn:
    """A column that SELECT computes from noisy ones, and its error bar if it has one."""

    name: str
    value: Expression
    error_bar: ErrorBar | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class PostProcessing:
    """Computed columns, HAVING, ORDER BY, LIMIT, and which columns are shown: all of it is
    post-processing, so it costs nothing.
    """

    columns: tuple[ComputedColumn, ...] = ()
    having: Expression | None = None
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
        text = [f"{each.value.text} AS {each.name!r}," for each in self.columns]
        if self.shown is not None:
            text.append(f"SHOW {', '.join(self.shown)}")
        if self.having is not None:
            text.append(f"HAVING {self.having.text}")
        if self.order:
            terms = (
                f"{by.text} {'DESC' if down else 'ASC'} NULLS {'FIRST' if nulls_first else 'LAST'}"
                for by, down, nulls_first in self.order
            )
            text.append(f"ORDER BY {', '.join(terms)}")
        if self.limit is not None:
            text.append(f"LIMIT {self.limit}")
        if self.offset:
            text.append(f"OFFSET {self.offset}")
        return " ".join([*text, f"IN {self.zone}"])

    def __repr__(self) -> str:
        return self.text

    @property
    def computed(self) -> dict[str, bool]:
        """Columns that are computed from noisy ones, and whether each has an error bar."""
        return {each.name: each.error_bar is not None for each in self.columns}

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release."""
        for each in self.columns:
            value = each.value.evaluate(release, self.zone)
            if each.error_bar is not None:
                stddevs = each.error_bar.stddevs(release, value, self.zone)
                release = release.append_column(f"{each.name}_stddev", stddevs)
            release = release.append_column(each.name, value)
        if self.having is not None:
            condition = as_bool(self.having.evaluate(release, self.zone))
            release = release.filter(pc.fill_null(condition, False))
        if self.order:
            release = release.take(pa.array(self._row_order(release)))
        release = release.slice(self.offset, self.limit)
        return release if self.shown is None else release.select(list(self.shown))

    def _row_order(self, release: pa.Table) -> Integers:
        """Row numbers in order, by the last term first: each sort keeps the order before it."""
        order = np.arange(len(release))
        for expression, down, nulls_first in reversed(self.order):
            column = expression.evaluate(release, self.zone).take(pa.array(order))
            indices = pc.array_sort_indices(
                column,
                order="descending" if down else "ascending",
                null_placement="at_start" if nulls_first else "at_end",
            )
            order = order[indices.to_numpy()]
        return order


def error_bar(
    node: exp.Expr, aggregates: Mapping[str, Aggregate], builder: QueryBuilder, *, shared: bool
) -> ErrorBar | None:
    """The error bar of an expression of published columns; None if there is no honest one.

    `shared`: all aggregates share some noise, whatever they are made of.
    """
    node = node.unnest()
    factors = _factors(node, aggregates)
    if factors is not None:
        honest = _independent(factors, aggregates) and not (shared and len(factors) > 1)
        return ErrorBar(terms=_terms(factors)) if honest else None
    if not isinstance(node, exp.Div) or shared:
        return None
    above, below = (_factors(part, aggregates) for part in (node.this, node.expression))
    if above is None or not below or set(above) & set(below):
        return None
    if not _independent(above | below, aggregates):
        return None
    denominator = builder.expression(node.expression)
    return ErrorBar(terms=_terms(above), denominator_terms=_terms(below), denominator=denominator)


def _terms(factors: Factors) -> Terms:
    return tuple((name, factor) for name, factor in factors.items() if factor)


def _factors(node: exp.Expr, aggregates: Mapping[str, Aggregate]) -> Factors | None:
    """Each aggregate's factor, if the expression is a sum of them and constants."""
    node = node.unnest()
    if _number(node) is not None:
        return {}
    if isinstance(node, exp.Column):
        return {node.name: 1.0} if node.name in aggregates else None
    if isinstance(node, exp.Neg):
        return _scaled(_factors(node.this, aggregates), -1.0)
    if isinstance(node, exp.Add | exp.Sub):
        left, right = (_factors(part, aggregates) for part in (node.this, node.expression))
        if left is None or right is None:
            return None
        sign = 1.0 if isinstance(node, exp.Add) else -1.0
        names = {**left, **right}
        return {name: left.get(name, 0.0) + sign * right.get(name, 0.0) for name in names}
    if isinstance(node, exp.Mul):
        for constant, other in ((node.this, node.expression), (node.expression, node.this)):
            factor = _number(constant.unnest())
            if factor is not None:
                return _scaled(_factors(other, aggregates), factor)
    if isinstance(node, exp.Div):
        factor = _number(node.expression.unnest())
        if factor:
            return _scaled(_factors(node.this, aggregates), 1 / factor)
    return None


def _scaled(factors: Factors | None, by: float) -> Factors | None:
    return None if factors is None else {name: by * factor for name, factor in factors.items()}


def _number(node: exp.Expr) -> float | None:
    try:
        value = literal_value(node)
    except (ValueError, TypeError):
        return None
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain else None


def _independent(factors: Factors, aggregates: Mapping[str, Aggregate]) -> bool:
    """Is no measure behind two of them? Rows are units where a unit has one row per group."""
    seen: set[Measure] = set()
    for name in factors:
        mine = {m for one_row in (True, False) for m in aggregates[name].measures(one_row)}
        if seen & mine:
            return False
        seen |= mine
    return True


class Finisher:
    """Builds a query's post-processing out of its draft."""

    def __init__(self, builder: QueryBuilder, aggregates: Mapping[str, Aggregate]) -> None:
        self.builder, self.draft, self._aggregates = builder, builder.draft, aggregates

    def finish(self) -> PostProcessing | None:
        """None if everything is published as the engine has it."""
        draft, select = self.draft, self.draft.select
        having, order = select.args.get("having"), select.args.get("order")
        limit, offset = select.args.get("limit"), select.args.get("offset")
        columns = tuple(self._column(name, node) for name, node in draft.computed.items())
        shown = self._shown(columns)
        if not (having or order or limit or offset or columns or shown):
            return None
        return PostProcessing(
            columns=columns,
            having=None if having is None else self._published(having.this),
            order=tuple(
                (
                    self._published(term.this),
                    bool(term.args.get("desc")),
                    bool(term.args.get("nulls_first")),
                )
                for term in ([] if order is None else order.expressions)
            ),
            limit=None if limit is None else int(limit.expression.name),
            offset=0 if offset is None else int(offset.expression.name),
            shown=shown,
            zone=self.builder.zone,
        )

    def _column(self, name: str, node: exp.Expr) -> ComputedColumn:
        shared = self.draft.parameters.get("debias") is not None  # one noisy factor for all
        bar = error_bar(node, self._aggregates, self.builder, shared=shared)
        return ComputedColumn(name=name, value=self.builder.expression(node), error_bar=bar)

    def _shown(self, columns: tuple[ComputedColumn, ...]) -> tuple[str, ...] | None:
        """The columns in SELECT's order, with their error bars; None if the engine has it so."""
        draft = self.draft
        windows = list(WINDOW_COLUMNS) if "time_column" in draft.parameters else []
        intervals = [] if draft.parameters.get("confidence") is None else ["_low", "_high"]
        suffixes = {each.name: ["_stddev"] for each in columns if each.error_bar is not None}
        suffixes |= {name: ["_stddev", *intervals] for name in self._aggregates}

        def with_error_bars(names: Iterable[str]) -> list[str]:
            return [f"{name}{end}" for name in names for end in ["", *suffixes.get(name, [])]]

        natural = [*windows, *draft.keys, *with_error_bars(self._aggregates)]
        shown = with_error_bars(draft.outputs)
        if shown == natural[len(windows) :]:
            return None  # nothing is said about windows: they come first
        shown += [name for name in windows if name not in shown]
        if draft.series:
            shown.append("held")
            natural.append("held")
        return None if shown == natural else (*shown, *RELEASE_COLUMNS)

    def _published(self, node: exp.Expr) -> Expression:
        """An expression of what is published: names of keys, aggregates and windows."""
        draft = self.draft
        names = [name for each in draft.aggregates for name in (each, f"{each}_stddev")]
        names = [name for name in names if name.removesuffix("_stddev") not in draft.hidden]
        names += [*draft.computed, *draft.keys, *RELEASE_COLUMNS]
        if "time_column" in draft.parameters:
            names += WINDOW_COLUMNS
        if isinstance(node, exp.Literal) and not node.is_string:
            at = selected_position(draft, node)
            name = draft.outputs[at]
            computed = name in draft.computed
            node = (
                exp.column(name, quoted=True)
                if computed
                else draft.select.expressions[at].unalias()
            )
        written = {canonical(call): name for name, call in draft.aggregates.items()}
        keys = {canonical(expression): name for name, expression in draft.keys.items()}

        def publish(part: exp.Expr) -> exp.Expr:
            text = canonical(part)
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

        return self.builder.expression(node.transform(publish))
