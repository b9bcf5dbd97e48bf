"""What a query does after the private part: columns, rows, their order, of noisy values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.records import Reals
from dpstream.sql.columns import Expression, computed
from dpstream.sql.values import as_bool, usual

_CLEAR = 2  # a denominator must be so many standard deviations from 0 to have an error bar


@dataclass(frozen=True, kw_only=True)
class Spread:
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
class Made:
    """A column that SELECT computes from noisy ones; `spread` None: it has no error bar."""

    name: str
    value: Expression
    spread: Spread | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Published:
    """Computed columns, HAVING, ORDER BY, LIMIT, and which columns are shown: all of it is
    post-processing, so it costs nothing.
    """

    made: tuple[Made, ...] = ()
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
