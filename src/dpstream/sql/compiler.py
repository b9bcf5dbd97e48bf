"""From parsed expressions to functions of Arrow columns: one builder per kind of expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlglot import exp

from dpstream.sql.dialect import canonical
from dpstream.sql.statement import Statement, close
from dpstream.sql.values import Value, as_bool

Columns: TypeAlias = Mapping[str, Value]
Compute: TypeAlias = Callable[[Columns], Value]
Build: TypeAlias = Callable[["Compiler", Any], Compute]
_INTEGERS = 1 << 31  # positions and lengths in a constant


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Compiles expressions of one statement; times are in `zone`.

    `builders`: by kind of expression, and with the parts that it may have.
    """

    statement: Statement
    zone: str
    builders: Mapping[type, tuple[Build, tuple[str, ...]]]

    def compile(self, node: exp.Expr) -> Compute:
        """The function of the columns that an expression stands for."""
        if type(node) in self.builders:
            build, parts = self.builders[type(node)]
            given = {name for name, value in node.args.items() if value}
            if given <= {"this", "expression", "expressions", *parts}:
                return build(self, node)
        raise self.statement.refusal(
            node,
            f"{canonical(node)} cannot be used in an expression",
            "use columns, constants, operators, CASE, CAST and the functions in the guide",
        )

    def logical(self, node: exp.Expr) -> Compute:
        """A condition."""
        inner = self.compile(node)
        return lambda columns: as_bool(inner(columns))

    def constant(self, node: exp.Expr, wanted: type) -> Any:
        """A constant argument, as Python has it."""
        try:
            value = literal(node)
        except ValueError:
            value = None
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = (whole and abs(value) < _INTEGERS) if wanted is int else isinstance(value, str)
        if not fits:
            words = "a whole number" if wanted is int else "text in quotes"
            raise self.statement.refusal(
                node, f"{canonical(node)} must be a constant here: {words}", f"write {words}"
            )
        return value


def literal(node: exp.Expr) -> Any:
    """The Python value of a constant; ValueError if it is none."""
    if isinstance(node, exp.Paren):
        return literal(node.this)
    if isinstance(node, exp.Neg):
        return -literal(node.this)
    if isinstance(node, exp.Null):
        return None
    if isinstance(node, exp.Boolean):
        return bool(node.this)
    if isinstance(node, exp.Literal):
        if node.is_string:
            return str(node.this)
        return int(node.this) if str(node.this).isdigit() else float(node.this)
    if isinstance(node, exp.RawString):
        return str(node.this)
    raise ValueError


def nearest(name: str, known: Any) -> str:
    """The most similar name there is, as advice."""
    found = close(name, known, least=0.6)
    return f"did you mean {found}?" if found else f"known are {', '.join(known)}"
