"""Parameters of a statement: @name, :name and ? stand for values that are given beside the text.

A value takes its parameter's place before anything else is read, so it is part of what the query
does, as if it were written there: of its plan, its facts and its identity. A parameter never stands
for a name of a column or a table.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql_compiler.statement import Statement

Params = Mapping[str, Any] | list[Any] | tuple[Any, ...]
"""Values by name, or one after the other for ?."""
_KINDS = "numbers, text, TRUE or FALSE, NULL, dates, times, and lists of these"
_NAMES = (exp.Table, exp.Alias, exp.TableAlias, exp.Dot, exp.Group, exp.Ordered, exp.DataType)


def bind(statement: Statement, params: Params | None) -> Statement:
    """The statement with a value in the place of every parameter."""
    values, used = _by_name(params), set[str]()
    place = 0
    nodes = [*statement.tree.find_all(exp.Parameter, exp.Placeholder)]
    for node in sorted(nodes, key=lambda each: int(each.meta.get("start", 0))):
        if isinstance(node, exp.Placeholder) and not node.this:
            place += 1
            name, shown = str(place), f"? number {place}"
        else:
            name = node.name
            shown = f"{'@' if isinstance(node, exp.Parameter) else ':'}{name}"
        if isinstance(node.parent, _NAMES) and not _is_value(node):
            raise statement.refusal(
                node,
                f"the parameter {shown} stands where a name is wanted, and is a value",
                "write the name itself; a parameter may stand where a constant may",
            )
        if name not in values:
            known = f"; given are {', '.join(values)}" if values else ""
            raise statement.refusal(
                node,
                f"the parameter {shown} has no value{known}",
                f"give one: params={{{name!r}: ...}}, or --param {name}=VALUE",
            )
        used.add(name)
        node.replace(_positioned(literal(name, values[name]), node))
    for node in statement.tree.find_all(exp.In):  # x IN UNNEST(['a', 'b'])
        lists = node.args["unnest"].expressions if node.args.get("unnest") else []
        if len(lists) == 1 and isinstance(lists[0], exp.Array):
            node.set("expressions", lists[0].expressions)
            node.set("unnest", None)
    strange = [name for name in values if name not in used]
    if strange:
        raise InvalidParameter(
            f"the SQL has no parameter {strange[0]!r}; leave it out, or write @{strange[0]}"
        )
    return statement


def _is_value(node: exp.Expr) -> bool:
    """Is it a constant that is selected under another name, `@x AS x`?"""
    return isinstance(node.parent, exp.Alias) and node.arg_key == "this"


def _by_name(params: Params | None) -> dict[str, Any]:
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return {str(name).lstrip("@:"): value for name, value in params.items()}
    if isinstance(params, list | tuple):
        return {str(number): value for number, value in enumerate(params, 1)}
    raise InvalidParameter(
        f"params must be names and values, such as {{'country': 'IT'}}, or a list for ?; got "
        f"{params!r}"
    )


def literal(name: str, value: Any) -> exp.Expr:
    """A Python value as it would be written in SQL."""
    if value is None:
        return exp.Null()
    if isinstance(value, bool):
        return exp.Boolean(this=value)
    if isinstance(value, str):
        return exp.Literal.string(value)
    if isinstance(value, int | float | Decimal | Fraction):
        return _number(name, value)
    if isinstance(value, dt.date):
        kind = "TIMESTAMP" if isinstance(value, dt.datetime) else "DATE"
        return exp.Cast(this=exp.Literal.string(value.isoformat()), to=exp.DataType.build(kind))
    if isinstance(value, list | tuple):
        return exp.Array(expressions=[literal(name, each) for each in value])
    raise InvalidParameter(
        f"the parameter {name!r} cannot be a {type(value).__name__}; parameters are {_KINDS}"
    )


def _number(name: str, value: Any) -> exp.Expr:
    if not isfinite(value):
        raise InvalidParameter(f"the parameter {name!r} must be finite; got {value}")
    if isinstance(value, Fraction):
        value = value.numerator if value.denominator == 1 else float(value)
    number = exp.Literal.number(repr(abs(value)) if isinstance(value, float) else str(abs(value)))
    return exp.Neg(this=number) if value < 0 else number


def _positioned(value: exp.Expr, node: exp.Expr) -> exp.Expr:
    """The value, which stands in the text where its parameter does."""
    known = {key: node.meta[key] for key in ("line", "col", "start", "end") if key in node.meta}
    return value.update_positions(**known) if known else value


def read_param(text: str) -> Any:
    """A value from a command line: a number, TRUE, NULL or 'text' as in SQL, else text as it is.

    >>> read_param("12"), read_param("1e-9"), read_param("'12'"), read_param("IT"), read_param("")
    (12, 1e-09, '12', 'IT', '')
    """
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
