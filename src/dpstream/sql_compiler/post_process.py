"""SELECT, HAVING, ORDER BY and LIMIT as post-processing of what is published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.query.aggregates import Aggregate, Measure
from dpstream.records import Reals
from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import AGGREGATES, SHOWN_ALWAYS, WINDOW_COLUMNS, called
from dpstream.sql_compiler.expressions import literal
from dpstream.sql_compiler.row_expressions import Builder, Expression, computed
from dpstream.sql_compiler.sql_values import as_bool, usual

# What a query does after the private part: columns, rows, their order, of noisy values.

_CLEAR = 2  # a denominator must be so many standard deviations from 0 to have an error bar


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """The standard deviation of a computed column, where it follows from those of its aggregates.

    `terms`: aggregates and their factors, whose noises are independent. Of a quotient, `below` are
    those of the denominator `divisor`: then it is a first-order estimate, and NULL where the
    denominator may be 0.
    """

    terms: tuple[tuple[str, float], ...]
    below: tuple[tuple[str, float], ...] = ()
    divisor: Expression | None = None

    def of(self, release: pa.Table, value: pa.Array, divisor: pa.Array | None) -> pa.Array:
        """Per row."""
        found = _norm(release, self.terms)
        if divisor is None:
            return pa.array(found)
        bottom, spread = _reals(divisor), _norm(release, self.below)
        with np.errstate(all="ignore"):
            found = np.hypot(found, _reals(value) * spread) / np.abs(bottom)
            unclear = ~(np.abs(bottom) >= _CLEAR * spread)
        return pa.array(found, mask=unclear | ~np.isfinite(found))


def _norm(release: pa.Table, terms: tuple[tuple[str, float], ...]) -> Reals:
    total: Reals = np.zeros(len(release))
    with np.errstate(over="ignore"):
        for name, factor in terms:
            total = np.hypot(total, factor * _reals(release[f"{name}_stddev"]))
    return total


def _reals(column: pa.Array | pa.ChunkedArray) -> Reals:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found: Reals = whole.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return found


@dataclass(frozen=True, kw_only=True)
class ComputedColumn:
    """A column that SELECT computes from noisy ones; `spread` None: it has no error bar."""

    name: str
    value: Expression
    spread: ErrorBar | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class PostProcessing:
    """Computed columns, HAVING, ORDER BY, LIMIT, and which columns are shown: all of it is
    post-processing, so it costs nothing.
    """

    made: tuple[ComputedColumn, ...] = ()
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
        text = [f"{each.value.text} AS {each.name!r}," for each in self.made]
        if self.shown is not None:
            text.append(f"SHOW {', '.join(self.shown)}")
        if self.having is not None:
            text.append(f"HAVING {self.having.text}")
        if self.order:
            text.append(f"ORDER BY {', '.join(self._terms())}")
        if self.limit is not None:
            text.append(f"LIMIT {self.limit}")
        if self.offset:
            text.append(f"OFFSET {self.offset}")
        return " ".join([*text, f"IN {self.zone}"])

    def __repr__(self) -> str:
        return self.text

    @property
    def computed(self) -> dict[str, bool]:
        """Columns of SELECT that are made of noisy ones, and whether each has an error bar."""
        return {each.name: each.spread is not None for each in self.made}

    def _terms(self) -> Iterator[str]:
        for expression, down, nulls_first in self.order:
            way, nulls = "DESC" if down else "ASC", "FIRST" if nulls_first else "LAST"
            yield f"{expression.text} {way} NULLS {nulls}"

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release."""
        for each in self.made:
            value = self._computed(each.value, release)
            if each.spread is not None:
                divisor = each.spread.divisor
                bottom = None if divisor is None else self._computed(divisor, release)
                spread = each.spread.of(release, value, bottom)
                release = release.append_column(f"{each.name}_stddev", spread)
            release = release.append_column(each.name, value)
        if self.having is not None:
            kept = as_bool(self._computed(self.having, release))
            release = release.filter(pc.fill_null(kept, False))
        if self.order:
            release = release.take(pa.array(self._sorted(release)))
        end = len(release) if self.limit is None else self.offset + self.limit
        release = release.slice(self.offset, max(end - self.offset, 0))
        return release if self.shown is None else release.select(list(self.shown))

    def _sorted(self, release: pa.Table) -> Sequence[int]:
        """Row numbers in order, by the last term first: each sort keeps the order before it."""
        order = np.arange(len(release))
        for expression, down, nulls_first in reversed(self.order):
            column = self._computed(expression, release).take(pa.array(order))
            found = pc.array_sort_indices(
                column,
                order="descending" if down else "ascending",
                null_placement="at_start" if nulls_first else "at_end",
            )
            order = order[found.to_numpy()]
        return order  # type: ignore[return-value]

    def _computed(self, expression: Expression, release: pa.Table) -> pa.Array:
        columns = {name: usual(release[name], name, self.zone) for name in expression.columns}
        return computed(expression, columns, len(release))


# Error bars of computed columns: of sums with constant factors, and of quotients of them.
#
# The noises of two aggregates are independent unless both are made of one measure (AVG and COUNT(*)
# share the number of rows). Anything else has no error bar rather than a wrong one.

Factors = dict[str, float]


def error_bar_of(
    node: exp.Expr,
    aggregates: Mapping[str, Aggregate],
    compiled: Callable[[exp.Expr], Expression],
    *,
    shared: bool = False,
) -> ErrorBar | None:
    """The error bar of an expression of published columns; None if there is no honest one.

    `shared`: all aggregates share some noise, whatever they are made of.
    """
    node = _bare(node)
    factors = _factors(node, aggregates)
    if factors is not None and (shared and len(factors) > 1):
        return None
    if factors is not None:
        return ErrorBar(terms=_terms(factors)) if _independent(factors, aggregates) else None
    if not isinstance(node, exp.Div) or shared:
        return None
    above, below = (_factors(part, aggregates) for part in (node.this, node.expression))
    if above is None or not below or set(above) & set(below):
        return None
    if not _independent(above | below, aggregates):
        return None
    divisor = compiled(node.expression)
    return ErrorBar(terms=_terms(above), below=_terms(below), divisor=divisor)


def _terms(factors: Factors) -> tuple[tuple[str, float], ...]:
    return tuple((name, factor) for name, factor in factors.items() if factor)


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _factors(node: exp.Expr, aggregates: Mapping[str, Aggregate]) -> Factors | None:
    """Each aggregate's factor, if the expression is a sum of them and constants."""
    node = _bare(node)
    number = _number(node)
    if number is not None:
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
        for one, other in ((node.this, node.expression), (node.expression, node.this)):
            factor = _number(_bare(one))
            if factor is not None:
                return _scaled(_factors(other, aggregates), factor)
    if isinstance(node, exp.Div):
        factor = _number(_bare(node.expression))
        if factor:
            return _scaled(_factors(node.this, aggregates), 1 / factor)
    return None


def _scaled(factors: Factors | None, by: float) -> Factors | None:
    return None if factors is None else {name: by * factor for name, factor in factors.items()}


def _number(node: exp.Expr) -> float | None:
    try:
        value = literal(node)
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
    """Makes a query's post-processing out of its draft."""

    def __init__(self, builder: Builder, aggregates: Mapping[str, Aggregate]) -> None:
        self.builder, self.draft, self._aggregates = builder, builder.draft, aggregates

    def finish(self) -> PostProcessing | None:
        """None if everything is published as the engine has it."""
        draft, select = self.draft, self.draft.select
        having, order = select.args.get("having"), select.args.get("order")
        limit, offset = select.args.get("limit"), select.args.get("offset")
        made = tuple(self._made(name, node) for name, node in draft.computed.items())
        shown = self._shown(made)
        if not (having or order or limit or offset or made or shown):
            return None
        terms = []
        for term in [] if order is None else order.expressions:
            down = bool(term.args.get("desc"))
            first = term.args.get("nulls_first")
            terms.append((self._published(term.this), down, bool(first)))
        return PostProcessing(
            made=made,
            having=None if having is None else self._published(having.this),
            order=tuple(terms),
            limit=None if limit is None else int(limit.expression.name),
            offset=0 if offset is None else int(offset.expression.name),
            shown=shown,
            zone=self.builder.zone,
        )

    def _made(self, name: str, node: exp.Expr) -> ComputedColumn:
        shared = self.draft.parameters.get("debias") is not None  # one noisy factor for all
        spread = error_bar_of(node, self._aggregates, self.builder.expression, shared=shared)
        return ComputedColumn(name=name, value=self.builder.expression(node), spread=spread)

    def _shown(self, made: tuple[ComputedColumn, ...]) -> tuple[str, ...] | None:
        """The columns in SELECT's order, with their error bars; None if the engine has it so."""
        draft = self.draft
        windows = list(WINDOW_COLUMNS) if "time_column" in draft.parameters else []
        intervals = [] if draft.parameters.get("confidence") is None else ["_low", "_high"]
        with_bars = {each.name: ["_stddev"] for each in made if each.spread is not None}
        with_bars |= {name: ["_stddev", *intervals] for name in self._aggregates}
        natural = [*windows, *draft.keys]
        for name in self._aggregates:
            natural += [name, *(f"{name}{more}" for more in with_bars[name])]
        found: list[str] = []
        for name in draft.outputs:
            found += [name, *(f"{name}{more}" for more in with_bars.get(name, []))]
        if found == natural[len(windows) :]:
            return None  # nothing is said about windows: they come first
        found += [name for name in windows if name not in found]
        if draft.series:
            found.append("held")
            natural.append("held")
        if found == natural:
            return None
        return (*found, *SHOWN_ALWAYS)

    def _published(self, node: exp.Expr) -> Expression:
        """An expression of what is published: names of keys, aggregates and windows."""
        draft = self.draft
        names = [name for each in draft.aggregates for name in (each, f"{each}_stddev")]
        names = [name for name in names if name.removesuffix("_stddev") not in draft.hidden]
        names += [*draft.computed, *draft.keys, *SHOWN_ALWAYS]
        if "time_column" in draft.parameters:
            names += WINDOW_COLUMNS
        if isinstance(node, exp.Literal) and not node.is_string:
            node = self._by_number(node)
        written = {canonical(call): name for name, call in draft.aggregates.items()}
        keys = {canonical(expression): name for name, expression in draft.keys.items()}

        def replaced(part: exp.Expr) -> exp.Expr:
            text = canonical(part)
            if called(part) in AGGREGATES:
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

        return self.builder.expression(node.transform(replaced))

    def _by_number(self, node: exp.Expr) -> exp.Expr:
        chosen = self.draft.select.expressions
        at = int(node.name) if node.name.isdigit() else 0
        if not 1 <= at <= len(chosen):
            raise self.draft.refusal(node, f"there is no column {node.name}", "count from 1")
        name = self.draft.outputs[at - 1]
        return (
            exp.column(name, quoted=True) if name in self.draft.computed else _plain(chosen[at - 1])
        )


def _plain(item: exp.Expr) -> exp.Expr:
    found: exp.Expr = item.unalias()
    return found
