"""What a query does before the private part, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.sql.compiler import Compute
from dpstream.sql.values import KINDS, as_bool, usual


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A compiled expression and its canonical text, which is all that it is known by."""

    text: str
    columns: tuple[str, ...]
    compute: Compute = field(compare=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Prepared:
    """Filters and computed columns of a source's rows.

    `kept`: columns that pass as they are. `made`: name and expression of each computed column.
    A row for which an expression cannot be computed has NULL there; no row stops the others.
    """

    columns: Sequence[str]
    kept: tuple[str, ...]
    made: tuple[tuple[str, Expression], ...]
    where: Expression | None
    zone: str

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        made = [f"{expression.text} AS {name!r}" for name, expression in self.made]
        text = f"SELECT {', '.join([*map(repr, self.kept), *made])}"
        if self.where is not None:
            text += f" WHERE {self.where.text}"
        return f"{text} IN {self.zone}"

    def __repr__(self) -> str:
        return self.text

    def columns_of(self, name: str) -> Sequence[str]:
        """Those that its expression reads, or the column itself."""
        made = dict(self.made)
        return made[name].columns if name in made else (name,)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""
        if self.where is not None:
            condition = self._computed(self.where, table)
            table = table.filter(pc.fill_null(as_bool(condition), False))
        made = {name: self._computed(expression, table) for name, expression in self.made}
        return pa.table({name: table[name] for name in self.kept} | made)

    def _computed(self, expression: Expression, table: pa.Table) -> pa.Array:
        columns = {name: usual(table[name], name, self.zone) for name in expression.columns}
        return computed(expression, columns, len(table))


def computed(expression: Expression, columns: dict[str, pa.Array], size: int) -> pa.Array:
    """An expression's column; where the whole fails, halves find the rows to blame: NULL."""
    try:
        value = expression.compute(columns)
    except pa.ArrowException as error:
        empty = {name: column.slice(0, 0) for name, column in columns.items()}
        if not size:
            raise InvalidInput(f"{expression.text} cannot be computed: {error}") from None
        kind = computed(expression, empty, 0).type
        if size == 1:
            return pa.nulls(1, kind)
        half = size // 2
        parts = [
            ({name: column.slice(at, length) for name, column in columns.items()}, length)
            for at, length in ((0, half), (half, size - half))
        ]
        return pa.concat_arrays([computed(expression, *part) for part in parts])
    if isinstance(value, pa.Scalar):
        value = pa.repeat(value, size)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    return value.cast(pa.string()) if value.type.equals(KINDS["null"]) else value
