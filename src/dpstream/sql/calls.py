"""Calls: functions, CAST, EXTRACT, DATE_TRUNC, items of SPLIT."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from sqlglot import exp

from dpstream.sql.compiler import Columns, Compiler, Compute, nearest
from dpstream.sql.dialect import canonical
from dpstream.sql.draft import AGGREGATES
from dpstream.sql.functions import FUNCTIONS, Function, element
from dpstream.sql.times import PARTS, TRUNCATIONS, UNITS, part_of, truncated
from dpstream.sql.values import Value, convert

_TYPES = {
    exp.DType.BOOLEAN: "bool",
    **dict.fromkeys((exp.DType.TINYINT, exp.DType.SMALLINT, exp.DType.INT), "int64"),
    exp.DType.BIGINT: "int64",
    **dict.fromkeys((exp.DType.FLOAT, exp.DType.DOUBLE, exp.DType.DECIMAL), "float64"),
    **dict.fromkeys((exp.DType.VARCHAR, exp.DType.TEXT, exp.DType.CHAR), "text"),
    exp.DType.DATE: "date",
    **dict.fromkeys((exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ, exp.DType.DATETIME), "moment"),
}


_USER_TYPES = {"INT64": "int64", "FLOAT64": "float64", "STRING": "text", "BOOL": "bool"}


def cast(compiler: Compiler, node: exp.Expr) -> Compute:
    """CAST and SAFE_CAST: both give NULL where a value does not fit."""
    inner, to = compiler.compile(node.this), node.args["to"]
    name = _TYPES.get(to.this)
    if to.this == exp.DType.USERDEFINED:
        name = _USER_TYPES.get(str(to.args.get("kind", "")).upper())
    if name is None or node.args.get("format") or to.expressions:
        raise compiler.statement.refusal(
            node,
            f"CAST to {canonical(to)} is not known",
            "cast to INT64, FLOAT64, STRING, BOOL, DATE or TIMESTAMP",
        )
    return lambda columns: convert(inner(columns), name, compiler.zone)


def extract(compiler: Compiler, node: exp.Expr) -> Compute:
    """EXTRACT(part FROM time)."""
    part, inner = node.name.upper(), compiler.compile(node.args["expression"])
    if part not in PARTS:
        raise _unknown(compiler, node, f"EXTRACT knows no {part}", part, PARTS)
    return lambda columns: part_of(compiler.zone, inner(columns), part)


def item_of_list(compiler: Compiler, node: exp.Expr) -> Compute:
    """SPLIT(x, ',')[OFFSET(0)]: the only lists there are."""
    place = node.expressions[0] if len(node.expressions) == 1 else None
    words = place.name.upper() if isinstance(place, exp.Anonymous) else ""
    origin = {"OFFSET": 0, "SAFE_OFFSET": 0, "ORDINAL": 1, "SAFE_ORDINAL": 1}.get(words)
    called = node.this.name.upper() if isinstance(node.this, exp.Anonymous) else ""
    if origin is None or called != "SPLIT" or place is None or len(place.expressions) != 1:
        raise compiler.statement.refusal(
            node, "items are taken from SPLIT alone", "write SPLIT(x, ',')[OFFSET(0)]"
        )
    at = compiler.constant(place.expressions[0], int) - origin
    if at < 0:
        raise compiler.statement.refusal(node, "there is no such item", "count from the beginning")
    lists = build_call(compiler, node.this, whole=False)
    return lambda columns: element(compiler.zone, lists(columns), at)


def build_call(compiler: Compiler, node: exp.Expr, *, whole: bool = True) -> Compute:
    """A function of the table, with as many arguments as it takes."""
    name = node.name.upper()
    if name in TRUNCATIONS:
        return _truncation(compiler, node)
    function = FUNCTIONS.get(name)
    if function is None or (whole and name == "SPLIT"):
        if function is not None:
            raise compiler.statement.refusal(
                node, "SPLIT gives a list", "take an item: SPLIT(x, ',')[OFFSET(0)]"
            )
        known = [*AGGREGATES, *known_functions()]
        raise _unknown(compiler, node, f"there is no function {name}", name, known)
    arguments = node.expressions
    if not function.least <= len(arguments) <= function.most:
        some = f"{function.least} to {function.most}"
        wanted = some if function.most > function.least else str(function.least)
        raise compiler.statement.refusal(
            node, f"{name} takes {wanted} arguments, not {len(arguments)}", "give that many"
        )
    made = [
        compiler.constant(each, function.constants[at])
        if at in function.constants
        else compiler.compile(each)
        for at, each in enumerate(arguments)
    ]
    _tried(compiler, node, function, made)

    def compute(columns: Columns) -> Value:
        ready = [item(columns) if callable(item) else item for item in made]
        return function.compute(compiler.zone, *ready)

    return compute


def _tried(compiler: Compiler, node: exp.Expr, function: Function, made: list[Any]) -> None:
    """Refuse constants that Arrow cannot use, such as a broken pattern, before any row."""
    if not function.constants:
        return
    ready = [pa.array(["x"]) if callable(item) else item for item in made]
    try:
        function.compute(compiler.zone, *ready)
    except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
        raise compiler.statement.refusal(
            node, f"{node.name.upper()} cannot use its constants: {error}", "correct them"
        ) from None


def _truncation(compiler: Compiler, node: exp.Expr) -> Compute:
    """DATE_TRUNC(ts, DAY), and DATE_TRUNC('day', ts)."""
    arguments = list(node.expressions)
    if len(arguments) == 2 and isinstance(arguments[0], exp.Literal):
        arguments.reverse()
    unit = arguments[1].name.upper() if len(arguments) == 2 else ""
    if unit not in UNITS:
        reason = f"{node.name.upper()} takes a time and one of {', '.join(UNITS)}"
        raise _unknown(compiler, node, reason, unit, UNITS)
    inner = compiler.compile(arguments[0])
    return lambda columns: truncated(compiler.zone, inner(columns), unit)


def known_functions() -> list[str]:
    """Every name that an expression may call."""
    return sorted([*FUNCTIONS, *TRUNCATIONS, "CAST", "SAFE_CAST", "EXTRACT"])


def _unknown(compiler: Compiler, node: exp.Expr, reason: str, name: str, known: Any) -> Exception:
    return compiler.statement.refusal(node, reason, nearest(name, known))
