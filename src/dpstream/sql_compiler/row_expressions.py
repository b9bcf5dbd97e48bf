"""What a query does before the private part, row by row: filters and computed columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.query.aggregates import Aggregate, Count, CountUnits, Sum
from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import BOUNDED_AGGREGATES, Draft, call_name
from dpstream.sql_compiler.expressions import Compiler, Compute, literal_value
from dpstream.sql_compiler.from_clause import substitute
from dpstream.sql_compiler.select import BOUNDS, named_arguments
from dpstream.sql_compiler.sql_values import KINDS, as_bool, source_column


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A compiled expression and its canonical text, which is all that it is known by."""

    text: str
    columns: tuple[str, ...]
    compute: Compute = field(compare=False)

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
            half = size // 2
            halves = []
            for at, length in ((0, half), (half, size - half)):
                rows = {name: column.slice(at, length) for name, column in columns.items()}
                halves.append(self._evaluate(rows, length))
            return pa.concat_arrays(halves)
        if isinstance(value, pa.Scalar):
            value = pa.repeat(value, size)
        if isinstance(value, pa.ChunkedArray):
            value = value.combine_chunks()
        return value.cast(pa.string()) if value.type.equals(KINDS["null"]) else value


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

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        computed = [f"{expression.text} AS {name!r}" for name, expression in self.computed]
        text = f"SELECT {', '.join([*map(repr, self.passed), *computed])}"
        if self.where is not None:
            text += f" WHERE {self.where.text}"
        return f"{text} IN {self.zone}"

    def __repr__(self) -> str:
        return self.text

    def columns_of(self, name: str) -> Sequence[str]:
        """The columns that an expression reads, or the column itself."""
        computed = dict(self.computed)
        return computed[name].columns if name in computed else (name,)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""
        if self.where is not None:
            condition = as_bool(self.where.evaluate(table, self.zone))
            table = table.filter(pc.fill_null(condition, False))
        columns = {name: table[name] for name in self.passed}
        for name, expression in self.computed:
            columns[name] = expression.evaluate(table, self.zone)
        return pa.table(columns)


class QueryBuilder:
    """Builds the parts of a query that hold expressions."""

    def __init__(self, draft: Draft) -> None:
        self.draft, parameters = draft, draft.parameters
        self.zone = str(parameters.get("time_zone", "UTC"))
        self._compiler = Compiler(statement=draft.statement, zone=self.zone)
        passed = ("privacy_unit_column", "time_column", "arrival_column")
        self._passed: list[str] = [parameters[name] for name in passed if name in parameters]
        self._computed: dict[str, Expression] = {}

    def expression(self, node: exp.Expr) -> Expression:
        """A compiled expression of the source's columns."""
        columns = dict.fromkeys(column.name for column in node.find_all(exp.Column))
        compute = self._compiler.compile(node)
        return Expression(text=canonical(node), columns=tuple(columns), compute=compute)

    def key(self, name: str, node: exp.Expr) -> None:
        """A column to group by, under its own name."""
        if isinstance(node, exp.Column) and node.name == name:
            self._passed.append(name)
            return
        if name in self._passed:
            raise self.draft.refusal(
                node, f"the key {name} has the name of another column that is used", "rename it"
            )
        self._computed[name] = self.expression(node)

    def value(self, node: exp.Expr) -> str:
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

    def aggregate(self, name: str, call: exp.Expr) -> Aggregate:
        """One aggregate of the query."""
        argument = call.expressions[0]
        if isinstance(argument, exp.Star):
            return Count(name)
        if isinstance(argument, exp.Distinct):
            return CountUnits(name)
        node = substitute(self.draft, argument, self.draft.relation)
        if call_name(call) in ("COUNT", "COUNTIF"):  # a SUM of ones and zeros
            test = node
            if call_name(call) == "COUNT":
                test = exp.Not(this=exp.Is(this=exp.Paren(this=node), expression=exp.Null()))
            ones = exp.Case(
                ifs=[exp.If(this=test, true=exp.Literal.number(1))], default=exp.Literal.number(0)
            )
            return Sum(name, column=self.value(ones), contribution_bounds_per_row=(0, 1), quantum=1)
        named = named_arguments(call)
        lo, hi = (self._number(each) for each in named[BOUNDS].expressions)
        quantum = self._number(named["quantum"]) if "quantum" in named else None
        kind = BOUNDED_AGGREGATES[call_name(call)]
        try:
            column = self.value(node)
            return kind(name, column=column, contribution_bounds_per_row=(lo, hi), quantum=quantum)
        except InvalidParameter as error:
            raise self.draft.refusal(call, str(error), "change the bounds") from None

    def _number(self, node: exp.Expr) -> Fraction:
        try:
            return Fraction(str(literal_value(node)))
        except (ValueError, TypeError):
            raise self.draft.refusal(node, "a bound is a number", "write (0, 600)") from None

    def prepare(self) -> RowPreparation | None:
        """Filters and computed columns; None if rows are used as they are."""
        filters = self.draft.relation.where
        if not self._computed and not filters:
            return None
        where = None
        if filters:
            wrapped = filters if len(filters) == 1 else [exp.Paren(this=node) for node in filters]
            both = reduce(lambda left, right: exp.And(this=left, expression=right), wrapped)
            where = self.expression(both)
        used = [*self._passed, *(name for each in self._computed.values() for name in each.columns)]
        return RowPreparation(
            columns=tuple(dict.fromkeys([*used, *(where.columns if where else ())])),
            passed=tuple(dict.fromkeys(self._passed)),
            computed=tuple(self._computed.items()),
            where=where,
            zone=self.zone,
        )
