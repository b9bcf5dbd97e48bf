"""OVER: ranks, totals, shares and neighbours of the rows of one release, which are noisy.

It is post-processing of what is published, so it costs nothing; a row expression never has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import ndtri
from sqlglot import exp

from dpstream.errors import InvalidInput
from dpstream.records import Integers, Reals
from dpstream.rows.parse import row_codes
from dpstream.sql_compiler.model_estimates import shrink
from dpstream.sql_compiler.sql_values import Value, as_float
from dpstream.sql_compiler.statement import SHRUNK, Over, canonical, parse

_RANKS = ("ROW_NUMBER", "RANK", "DENSE_RANK")
_NEIGHBOURS = {"LAG": -1, "LEAD": 1}
_TOTALS = ("SUM", "AVG", "MIN", "MAX", "RATIO_TO_REPORT", "ENTROPY")
FUNCTIONS = (*_RANKS, *_NEIGHBOURS, *_TOTALS, *SHRUNK)
"""Functions that OVER knows."""
Order: TypeAlias = tuple[Value, bool, bool]
"""A column, is it descending, do NULLs come first?"""
_ACCUMULATE: dict[str, Callable[..., Any]] = {
    "MIN": np.fmin.accumulate,
    "MAX": np.fmax.accumulate,
}


def over(
    name: str,
    value: Value | None,
    places: int,
    parts: Sequence[Value],
    order: Sequence[Order],
    stddev: Value | None = None,
) -> pa.Array:
    """What a function gives each row; `value` is its argument, `places` how far LAG looks.

    `stddev`: the error bar of the argument, for SHRINK.
    """
    given = [*([] if value is None else [value]), *parts, *(column for column, _, _ in order)]
    sizes = [len(column) for column in given if not isinstance(column, pa.Scalar)]
    if not sizes:
        raise InvalidInput(f"{name} OVER looks at no column; name one")
    size = sizes[0]
    value, *columns = (
        pa.repeat(column, size) if isinstance(column, pa.Scalar) else column
        for column in [pa.nulls(size, pa.float64()) if value is None else value, *parts]
    )
    sorts = [
        (pa.repeat(c, size) if isinstance(c, pa.Scalar) else c, down, first)
        for c, down, first in order
    ]
    rows = sort_rows(sorts, size)
    groups, peers = row_codes(columns, size), row_codes([column for column, _, _ in sorts], size)
    rows = rows[np.argsort(groups[rows], kind="stable")]
    borders = np.flatnonzero(np.diff(groups[rows])) + 1
    found: Any = np.zeros(size, np.int64 if name in (*_RANKS, *_NEIGHBOURS) else np.float64)
    numbers = spreads = None
    if name in (*_TOTALS, *SHRUNK):
        numbers = np.asarray(pc.fill_null(as_float(value), np.nan), np.float64)
    if name in SHRUNK:
        spreads = np.asarray(pc.fill_null(as_float(stddev), np.nan), np.float64)
    for part in np.split(rows, borders) if size else ():
        if numbers is not None and spreads is not None:
            found[part] = shrink(numbers[part], spreads[part])[SHRUNK.index(name)]
            continue
        found[part] = (
            _places(name, places, part, peers)
            if numbers is None
            else _total(name, numbers[part], peers[part], ordered=bool(sorts))
        )
    if name in _NEIGHBOURS:
        return value.take(pa.array(found, mask=found < 0))
    if numbers is None:
        return pa.array(found)
    return pa.array(found, mask=~np.isfinite(found))


def why_not_known(node: exp.Expr) -> tuple[str, str] | None:
    """Why OVER does not know what is asked, and what to write; None: it does."""
    if isinstance(node, Over) and node.this == "SMOOTH":
        return (
            f"{canonical(node)} does not say in which order windows come",
            "write SMOOTH(n) OVER (PARTITION BY ... ORDER BY window_start), with all keys",
        )
    other = node.args.get("other") or node.args.get("frame")
    if isinstance(node, Over) and node.this in FUNCTIONS and not other:
        return None
    return (
        f"{canonical(node)} is not known: OVER takes PARTITION BY and ORDER BY alone",
        f"use one of {', '.join(FUNCTIONS)}",
    )


def sort_rows(order: Sequence[Order], size: int) -> Integers:
    """Row numbers in order, by the last term first: each sort keeps the order before it."""
    rows: Integers = np.arange(size)
    for column, down, nulls_first in reversed(order):
        indices = pc.array_sort_indices(
            column.take(pa.array(rows)),
            order="descending" if down else "ascending",
            null_placement="at_start" if nulls_first else "at_end",
        )
        rows = rows[indices.to_numpy()]
    return rows


def _places(name: str, places: int, part: Integers, peers: Integers) -> Integers:
    """Ranks of the rows of a part, or the rows that LAG and LEAD take; -1: none."""
    at = np.arange(len(part))
    if name in _NEIGHBOURS:
        other = at + _NEIGHBOURS[name] * places
        inside = (other >= 0) & (other < len(part))
        return np.where(inside, part[np.clip(other, 0, len(part) - 1)], -1)
    if name == "ROW_NUMBER":
        return at + 1
    begins = np.append(True, np.diff(peers[part]) != 0)
    if name == "DENSE_RANK":
        return np.cumsum(begins)
    return np.maximum.accumulate(np.where(begins, at, 0)) + 1


def entropy(values: Reals, groups: Integers, size: int) -> Reals:
    """Of each group the entropy, in bits, of shares in proportion to its values; NaN of none.

    What noise has made negative has no share.

    >>> entropy(np.array([2.0, 1.0, 1.0, -3.0]), np.zeros(4, np.int64), 1).tolist()
    [1.5]
    """
    parts = np.maximum(values, 0.0)
    totals = np.bincount(groups, weights=parts, minlength=size)
    with np.errstate(all="ignore"):
        shares = parts / totals[groups]
        bits = np.where(shares > 0, -shares * np.log2(shares), 0.0)
        return np.where(totals > 0, np.bincount(groups, weights=bits, minlength=size), np.nan)


def _total(name: str, numbers: Any, peers: Integers, *, ordered: bool) -> Any:
    """Of all rows of a part, or with an order of those up to each row and its peers."""
    known, none = np.nan_to_num(numbers), np.isnan(numbers)
    if name == "RATIO_TO_REPORT":
        with np.errstate(all="ignore"):
            return numbers / known.sum()
    if name == "ENTROPY":
        return np.full(len(numbers), entropy(known, np.zeros(len(known), np.int64), 1)[0])
    if name in _ACCUMULATE:
        running = _ACCUMULATE[name](numbers)
    else:
        counts = np.cumsum(~none)
        with np.errstate(all="ignore"):
            running = np.cumsum(known) / (counts if name == "AVG" else (counts > 0))
    if not ordered:
        return np.full(len(numbers), running[-1])
    ends = np.append(np.flatnonzero(np.diff(peers)), len(numbers) - 1)
    return running[ends[np.searchsorted(ends, np.arange(len(numbers)))]]


def rank_interval(
    values: Reals, stddevs: Reals, parts: Integers, confidence: float
) -> tuple[Integers, Integers]:
    """The best and the worst rank that each true value may have within its part, largest first.

    All rows of the table are right together with the probability `confidence`: of two rows of a
    part one is certainly larger where it is so by z deviations of their difference, and the pairs
    share what may fail. Noises are independent.

    >>> best, worst = rank_interval(
    ...     np.array([50.0, 0.0, 48.0]), np.ones(3), np.zeros(3, np.int64), 0.95)
    >>> best.tolist(), worst.tolist()
    ([1, 3, 1], [2, 3, 2])
    """
    best, worst = np.ones(len(values), np.int64), np.ones(len(values), np.int64)
    _, part, sizes = np.unique(parts, return_inverse=True, return_counts=True)
    pairs = float((sizes * (sizes - 1) // 2).sum())
    z = 0.0 if not pairs else float(-ndtri((1 - confidence) / pairs))
    order = np.argsort(part.reshape(-1), kind="stable")
    for rows in np.split(order, np.cumsum(sizes)[:-1]) if len(values) else ():
        known = np.sort(values[rows])  # NaN comes last, and is never certainly less or more
        most = stddevs[rows].max(initial=0.0, where=~np.isnan(stddevs[rows]))
        apart = z * np.hypot(stddevs[rows], most)
        above, below = values[rows] + apart, values[rows] - apart
        count = len(known) - int(np.isnan(known).sum())
        larger = count - np.searchsorted(known[:count], above, side="right")
        best[rows] = 1 + np.where(np.isnan(above), 0, larger)
        smaller = np.searchsorted(known[:count], below, side="left")
        worst[rows] = len(rows) - np.where(np.isnan(below), 0, smaller)
    return best, worst


def error_bar(node: exp.Expr, aggregates: Sequence[str], keys: Sequence[str]) -> exp.Expr | None:
    """The standard deviation of a total or a share of an aggregate, in SQL; None: no honest one.

    Noises of different groups are independent. Which rows are added must not depend on them, so an
    order by noisy values leaves none. Of a share it is to first order, and NULL where the total may
    be 0.
    """
    node = node.unnest()
    sorts = node.args.get("order") or []
    parts = node.args.get("parts") or []
    if any(
        column.name not in keys for term in [*sorts, *parts] for column in term.find_all(exp.Column)
    ):
        return None
    column = node.expressions[0] if isinstance(node, Over) and node.expressions else None
    if not isinstance(column, exp.Column) or column.name not in aggregates:
        return None
    spec = canonical(Over(this="X", parts=node.args.get("parts"), order=node.args.get("order")))
    spec = spec.partition(" OVER ")[2]
    value, stddev = canonical(column), canonical(exp.column(f"{column.name}_stddev", quoted=True))
    variance = f"SUM({stddev} * {stddev}) OVER {spec}"
    if node.this == "SUM":
        text = f"SQRT({variance})"
    elif node.this == "RATIO_TO_REPORT":
        total, share = f"SUM({value}) OVER {spec}", canonical(node)
        spread = f"(1 - 2 * {share}) * {stddev} * {stddev} + {share} * {share} * {variance}"
        text = f"IF(ABS({total}) >= 2 * SQRT({variance}), SQRT({spread}) / ABS({total}), NULL)"
    elif node.this == "SHRINK":
        text = f"SHRINK_STDDEV({value}) OVER {spec}"
    else:
        return None
    bar: exp.Expr = parse(f"SELECT {text}").tree.expressions[0]
    return bar
