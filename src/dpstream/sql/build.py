"""The parts of a query that are made of expressions."""

from __future__ import annotations

from fractions import Fraction

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql.bounded import named_arguments
from dpstream.sql.columns import Expression, Prepared
from dpstream.sql.compiler import literal
from dpstream.sql.dialect import canonical
from dpstream.sql.draft import BOUNDED, Draft, called
from dpstream.sql.expressions import compiler
from dpstream.sql.relation import substituted
from dpstream.stages.aggregates import Aggregate, Count, CountUnits, Sum


class Builder:
    """The parts of a query that are made of expressions."""

    def __init__(self, draft: Draft) -> None:
        self.draft, parameters = draft, draft.parameters
        self.zone = str(parameters.get("time_zone", "UTC"))
        self._compiler = compiler(draft.statement, self.zone)
        whole = (parameters.get(name) for name in ("unit", "time", "arrival"))
        self.kept: list[str] = [name for name in whole if name is not None]
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
        node = substituted(self.draft, argument, self.draft.relation)
        if called(call) in ("COUNT", "COUNTIF"):
            test = node
            if called(call) == "COUNT":
                test = exp.Not(this=exp.Is(this=exp.Paren(this=node), expression=exp.Null()))
            ones = exp.Case(
                ifs=[exp.If(this=test, true=exp.Literal.number(1))], default=exp.Literal.number(0)
            )
            return Sum(name, column=self.value(ones), lo=0, hi=1, quantum=1)
        named = named_arguments(call)
        lo, hi = (self._number(each) for each in named["contribution_bounds_per_row"].expressions)
        quantum = self._number(named["quantum"]) if "quantum" in named else None
        kind = BOUNDED[called(call)]
        try:
            return kind(name, column=self.value(node), lo=lo, hi=hi, quantum=quantum)
        except InvalidParameter as error:
            raise self.draft.refusal(call, str(error), "change the bounds") from None

    def _number(self, node: exp.Expr) -> Fraction:
        try:
            return Fraction(str(literal(node)))
        except (ValueError, TypeError):
            raise self.draft.refusal(node, "a bound is a number", "write (0, 600)") from None

    def prepare(self) -> Prepared | None:
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
        return Prepared(
            columns=tuple(dict.fromkeys([*used, *(where.columns if where else ())])),
            kept=tuple(dict.fromkeys(self.kept)),
            made=tuple(self.made.items()),
            where=where,
            zone=self.zone,
        )
