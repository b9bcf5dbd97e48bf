"""The parts of a query that are made of expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.query.aggregates import Aggregate, Count, CountUnits, Sum
from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import BOUNDED, Draft, called, parts
from dpstream.sql_compiler.expressions import Compute, compiler, literal
from dpstream.sql_compiler.relation import substitute
from dpstream.sql_compiler.sql_values import KINDS, as_bool, usual

# What a query does before the private part, row by row.


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A compiled expression and its canonical text, which is all that it is known by."""

    text: str
    columns: tuple[str, ...]
    compute: Compute = field(compare=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class RowPreparation:
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


# Every aggregate is one whose change by one unit is known.

_BOUNDS = "contribution_bounds_per_row"


def bounded_aggregates(draft: Draft) -> None:
    """Every aggregate is one whose change by one unit is known."""
    for call in draft.aggregates.values():
        arguments = [each for each in call.expressions if not isinstance(each, exp.Kwarg)]
        if len(arguments) != 1:
            raise draft.refusal(
                call, f"{called(call)} takes one column", f"write {called(call)}(column)"
            )
        named = named_arguments(call)
        known = {_BOUNDS, "quantum"} if called(call) in BOUNDED else set()
        for name in named:
            if name not in known:
                raise draft.refusal(
                    call,
                    f"{called(call)} has no argument {name}",
                    f"known are {', '.join(sorted(known))}" if known else "leave it out",
                )
        if isinstance(arguments[0], exp.Distinct):
            _counts_units(draft, call, arguments[0])
        elif called(call) in BOUNDED and not _pair(named.get(_BOUNDS)):
            raise draft.refusal(
                call,
                f"{called(call)} has no bounds: one row could change it by any amount",
                f"write {called(call)}({canonical(arguments[0])}, {_BOUNDS} => (0, 600)), with "
                "bounds that do not come from the data",
            )
        elif isinstance(arguments[0], exp.Star) and called(call) != "COUNT":
            raise draft.refusal(call, f"{called(call)}(*) has no meaning", "name a column")


def _pair(node: exp.Expr | None) -> bool:
    return isinstance(node, exp.Tuple) and len(node.expressions) == 2


def _counts_units(draft: Draft, call: exp.Expr, distinct: exp.Expr) -> None:
    column = distinct.expressions[0] if len(distinct.expressions) == 1 else None
    found = None
    if (
        called(call) == "COUNT"
        and isinstance(column, exp.Column)
        and not parts(distinct) - {"expressions"}
    ):
        found = substitute(draft, column, draft.relation)
    unit = draft.parameters["privacy_unit_column"]
    if not isinstance(found, exp.Column) or found.name != unit:
        raise draft.refusal(
            call,
            "only the privacy unit can be counted DISTINCT: other values are shared by units, and "
            "the change by one unit is not known",
            f"write COUNT(DISTINCT {unit}), or group by the column",
        )


def named_arguments(call: exp.Expr) -> dict[str, exp.Expr]:
    """Name => value arguments of a call."""
    return {
        each.this.name.lower(): each.expression
        for each in call.expressions
        if isinstance(each, exp.Kwarg)
    }


class Builder:
    """The parts of a query that are made of expressions."""

    def __init__(self, draft: Draft) -> None:
        self.draft, parameters = draft, draft.parameters
        self.zone = str(parameters.get("time_zone", "UTC"))
        self._compiler = compiler(draft.statement, self.zone)
        kept = ("privacy_unit_column", "time_column", "arrival_column")
        self.kept: list[str] = [parameters[name] for name in kept if name in parameters]
        self.made: dict[str, Expression] = {}

    def expression(self, node: exp.Expr) -> Expression:
        """A compiled expression of the source's columns."""
        columns = dict.fromkeys(column.name for column in node.find_all(exp.Column))
        compute = self._compiler.compile(node)
        return Expression(text=canonical(node), columns=tuple(columns), compute=compute)

    def key(self, name: str, node: exp.Expr) -> None:
        """A column to group by, under its own name."""
        if isinstance(node, exp.Column) and node.name == name:
            self.kept.append(name)
            return
        if name in self.kept:
            raise self.draft.refusal(
                node, f"the key {name} has the name of another column that is used", "rename it"
            )
        self.made[name] = self.expression(node)

    def value(self, node: exp.Expr) -> str:
        """The name of a column that holds an expression's values."""
        if isinstance(node, exp.Column) and node.name not in self.made:
            self.kept.append(node.name)
            return node.name
        expression = self.expression(node)
        name = expression.text
        while name in self.kept or (name in self.made and self.made[name] != expression):
            name += "'"
        self.made[name] = expression
        return name

    def aggregate(self, name: str, call: exp.Expr) -> Aggregate:
        """One aggregate of the query."""
        argument = call.expressions[0]
        if isinstance(argument, exp.Star):
            return Count(name)
        if isinstance(argument, exp.Distinct):
            return CountUnits(name)
        node = substitute(self.draft, argument, self.draft.relation)
        if called(call) in ("COUNT", "COUNTIF"):
            test = node
            if called(call) == "COUNT":
                test = exp.Not(this=exp.Is(this=exp.Paren(this=node), expression=exp.Null()))
            ones = exp.Case(
                ifs=[exp.If(this=test, true=exp.Literal.number(1))], default=exp.Literal.number(0)
            )
            return Sum(name, column=self.value(ones), contribution_bounds_per_row=(0, 1), quantum=1)
        named = named_arguments(call)
        lo, hi = map(self._number, named["contribution_bounds_per_row"].expressions)
        quantum = self._number(named["quantum"]) if "quantum" in named else None
        kind = BOUNDED[called(call)]
        try:
            column = self.value(node)
            return kind(name, column=column, contribution_bounds_per_row=(lo, hi), quantum=quantum)
        except InvalidParameter as error:
            raise self.draft.refusal(call, str(error), "change the bounds") from None

    def _number(self, node: exp.Expr) -> Fraction:
        try:
            return Fraction(str(literal(node)))
        except (ValueError, TypeError):
            raise self.draft.refusal(node, "a bound is a number", "write (0, 600)") from None

    def prepare(self) -> RowPreparation | None:
        """Filters and computed columns; None if rows are used as they are."""
        filters = self.draft.relation.where
        if not self.made and not filters:
            return None
        together = None
        for node in filters:
            wrapped = node if len(filters) == 1 else exp.Paren(this=node)
            together = wrapped if together is None else exp.And(this=together, expression=wrapped)
        where = None if together is None else self.expression(together)
        used = [*self.kept, *(name for each in self.made.values() for name in each.columns)]
        return RowPreparation(
            columns=tuple(dict.fromkeys([*used, *(where.columns if where else ())])),
            kept=tuple(dict.fromkeys(self.kept)),
            made=tuple(self.made.items()),
            where=where,
            zone=self.zone,
        )
