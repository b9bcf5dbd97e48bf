"""Error bars of computed columns: of sums with constant factors, and of quotients of them.

The noises of two aggregates are independent unless both are made of one measure (AVG and COUNT(*)
share the number of rows). Anything else has no error bar rather than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlglot import exp

from dpstream.sql.columns import Expression
from dpstream.sql.compiler import literal
from dpstream.sql.published import Spread
from dpstream.stages.aggregates import Aggregate
from dpstream.stages.measures import Measure

Factors = dict[str, float]


def spread_of(
    node: exp.Expr,
    aggregates: Mapping[str, Aggregate],
    compiled: Callable[[exp.Expr], Expression],
    *,
    shared: bool = False,
) -> Spread | None:
    """The error bar of an expression of published columns; None if there is no honest one.

    `shared`: all aggregates share some noise, whatever they are made of.
    """
    node = _bare(node)
    factors = _factors(node, aggregates)
    if factors is not None and (shared and len(factors) > 1):
        return None
    if factors is not None:
        return Spread(terms=_terms(factors)) if _independent(factors, aggregates) else None
    if not isinstance(node, exp.Div) or shared:
        return None
    above, below = (_factors(part, aggregates) for part in (node.this, node.expression))
    if above is None or not below or set(above) & set(below):
        return None
    if not _independent(above | below, aggregates):
        return None
    divisor = compiled(node.expression)
    return Spread(terms=_terms(above), below=_terms(below), divisor=divisor)


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
