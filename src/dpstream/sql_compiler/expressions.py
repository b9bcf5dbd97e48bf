"""SQL expressions to functions of Arrow columns; one small builder per kind of expression.

Logic has three values, as in SQL: NULL where a comparison meets NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.errors import InvalidInput
from dpstream.sql_compiler import functions, text_functions, time_functions
from dpstream.sql_compiler.functions import PARTS, TRUNCATIONS, UNITS, Function
from dpstream.sql_compiler.over_clause import over, why_not_known
from dpstream.sql_compiler.sql_values import Value, as_bool, as_text, convert, kind, unify_kinds
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    SHRUNK,
    Item,
    Over,
    Statement,
    call_name,
    canonical,
    closest_word,
    present_args,
)

Columns: TypeAlias = Mapping[str, Value]
Compute: TypeAlias = Callable[[Columns], Value]
Build: TypeAlias = Callable[["Compiler", Any], Compute]
_INTEGERS = 1 << 31  # positions and lengths in a constant
_LISTS = text_functions.LIST_FUNCTIONS
FUNCTIONS: dict[str, Function] = {
    **functions.FUNCTIONS,
    **text_functions.TEXT_FUNCTIONS,
    **time_functions.TIME_FUNCTIONS,
}
"""Functions that give one value, by name."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Compiles expressions of one statement; times are in `zone`."""

    statement: Statement
    zone: str
    published: bool = False
    """Are the rows those of a release, which may be compared?"""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions in Python (`UserFunction`), by their names in capitals."""

    def compile(self, node: exp.Expr) -> Compute:
        """The function of the columns that an expression stands for."""
        build, more = BUILDERS.get(type(node), (None, ()))
        if build and present_args(node) <= {"this", "expression", "expressions", *more}:
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
        if wanted is list and isinstance(node, exp.Array):
            return [self.constant(each, float) for each in node.expressions]
        try:
            value = literal_value(node)
        except ValueError:
            value = None
        small = type(value) in (int, float) and abs(value) < _INTEGERS
        fits = {
            int: small and type(value) is int,
            float: small or (isinstance(value, float) and isfinite(value)),
            str: isinstance(value, str),
        }
        if not fits.get(wanted):
            words = _CONSTANTS[wanted]
            raise self.statement.refusal(
                node, f"{canonical(node)} must be a constant here: {words}", f"write {words}"
            )
        return float(value) if wanted is float else value


_CONSTANTS = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    list: "a list of numbers: [0, 10, 20]",
}


def literal_value(node: exp.Expr) -> Any:
    """The Python value of a constant; ValueError if it is none."""
    if isinstance(node, exp.Paren):
        return literal_value(node.this)
    if isinstance(node, exp.Neg):
        return -literal_value(node.this)
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


def suggestion(name: str, known: Any) -> str:
    """The most similar name there is, as advice."""
    meant = closest_word(name, known, least=0.6)
    return f"did you mean {meant}?" if meant else f"known are {', '.join(known)}"


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


def _cast(compiler: Compiler, node: exp.Expr) -> Compute:
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


def _extract(compiler: Compiler, node: exp.Expr) -> Compute:
    """EXTRACT(part FROM time)."""
    part, inner = node.name.upper(), compiler.compile(node.args["expression"])
    if part not in PARTS:
        raise compiler.statement.refusal(node, f"EXTRACT knows no {part}", suggestion(part, PARTS))
    return lambda columns: functions.extract_part(compiler.zone, inner(columns), part)


def _list_item(compiler: Compiler, node: exp.Expr) -> Compute:
    """SPLIT(x, ',')[OFFSET(0)]: an item of a list."""
    place = node.expressions[0] if len(node.expressions) == 1 else exp.Null()
    origins = {"OFFSET": 0, "SAFE_OFFSET": 0, "ORDINAL": 1, "SAFE_ORDINAL": 1}
    origin = origins.get(call_name(place))
    if origin is None or len(place.expressions) != 1:
        raise compiler.statement.refusal(
            node, "it is not said how items are counted", "write SPLIT(x, ',')[OFFSET(0)]"
        )
    at = compiler.constant(place.expressions[0], int) - origin
    if at < 0:
        raise compiler.statement.refusal(node, "there is no such item", "count from the beginning")
    lists = compile_list(compiler, node.this)
    return lambda columns: functions.list_item(compiler.zone, lists(columns), at)


def compile_list(compiler: Compiler, node: exp.Expr) -> Compute:
    """Lists: a column of them or of JSON arrays, or a function that gives some."""
    if call_name(node) in _LISTS:
        return _function(compiler, node, _LISTS[call_name(node)])
    column = node.unnest()
    if isinstance(column, exp.Column | Item):
        name = column.name if isinstance(column, exp.Column) else canonical(column)
        return lambda columns: text_functions.as_list(columns[name])
    if call_name(node) or not isinstance(node, exp.Paren | exp.Anonymous):
        known = ", ".join(_LISTS)
        raise compiler.statement.refusal(
            node,
            f"{canonical(node)} is no list",
            f"use a column of lists or of JSON arrays, or one of {known}",
        )
    return compile_list(compiler, column)


def _column(compiler: Compiler, node: exp.Expr) -> Compute:
    """A column that holds one value in each row."""
    name = node.name

    def compute(columns: Columns) -> Value:
        value = columns[name]
        if pa.types.is_list(value.type):
            raise InvalidInput(
                f"column {name!r} holds lists; read their items with UNNEST({name}), one with "
                f"{name}[OFFSET(0)], or their number with ARRAY_LENGTH({name})"
            )
        return value

    return compute


def _item(compiler: Compiler, node: exp.Expr) -> Compute:
    """An item of a list that UNNEST made a row of."""
    return itemgetter(canonical(node))


def _over(compiler: Compiler, node: exp.Expr) -> Compute:
    """RANK() OVER (PARTITION BY lang ORDER BY n DESC), of published rows."""
    name, arguments, order = node.this, node.expressions, node.args.get("order") or []
    if not_known := why_not_known(node):
        raise compiler.statement.refusal(node, *not_known)
    least = 0 if name in ("ROW_NUMBER", "RANK", "DENSE_RANK") else 1
    most = 2 if name in ("LAG", "LEAD", *SHRUNK) else least
    if not compiler.published or not least <= len(arguments) <= most:
        reason = f"{name} OVER takes {least} columns"
        if not compiler.published:
            reason = "a window function (OVER) looks at the rows of several units"
        raise compiler.statement.refusal(node, reason, "rank published rows, in the outer SELECT")
    if any(each.find(exp.Column) is None for each in order) or node.find(exp.Column) is None:
        reason = f"{canonical(node)} looks at no column"
        raise compiler.statement.refusal(node, reason, "name a column that is published")
    shrinks = name in SHRUNK
    if (name == "ENTROPY" or shrinks) and order:
        reason = f"{name} is of all rows of a part"
        raise compiler.statement.refusal(node, reason, "leave ORDER BY out")
    if not order and not shrinks and (least == 0 or most == 2):
        reason = f"{name} needs an order"
        raise compiler.statement.refusal(node, reason, f"write {name}(...) OVER (ORDER BY n DESC)")
    if shrinks and len(arguments) == 1:
        reason = f"{name} takes a published column that has an error bar"
        raise compiler.statement.refusal(node, reason, f"write {name}(n) OVER ()")
    value = compiler.compile(arguments[0]) if arguments else None
    spread = compiler.compile(arguments[1]) if shrinks else None
    places = compiler.constant(arguments[1], int) if len(arguments) == 2 and not shrinks else 1
    parts = [compiler.compile(each) for each in node.args.get("parts") or []]
    sorts = [
        (
            compiler.compile(each.this if isinstance(each, exp.Ordered) else each),
            bool(each.args.get("desc")),
            bool(each.args.get("nulls_first")),
        )
        for each in order
    ]

    def compute(columns: Columns) -> Value:
        given = None if value is None else value(columns)
        by = [(column(columns), down, first) for column, down, first in sorts]
        stddev = None if spread is None else spread(columns)
        return over(name, given, places, [part(columns) for part in parts], by, stddev)

    return compute


def _list_length(compiler: Compiler, node: exp.Expr) -> Compute:
    """ARRAY_LENGTH."""
    if len(node.expressions) != 1:
        raise compiler.statement.refusal(
            node, f"{call_name(node)} takes one list", "write ARRAY_LENGTH(SPLIT(x, ','))"
        )
    lists = compile_list(compiler, node.expressions[0])
    return lambda columns: text_functions.list_length(lists(columns))


def _call(compiler: Compiler, node: exp.Expr) -> Compute:
    """A function that gives a value."""
    name = call_name(node)
    if name in _SPECIAL:
        return _SPECIAL[name](compiler, node)
    if name in _LISTS:
        raise compiler.statement.refusal(
            node,
            f"{name} gives a list",
            f"take an item, {canonical(node)}[OFFSET(0)], or FROM table, "
            f"UNNEST({canonical(node)}) AS item",
        )
    if name in compiler.functions:
        return _user_call(compiler, node, compiler.functions[name])
    if name not in FUNCTIONS:
        known = [*AGGREGATES, *known_functions(), *compiler.functions]
        raise compiler.statement.refusal(
            node, f"there is no function {name}", suggestion(name, known)
        )
    return _function(compiler, node, FUNCTIONS[name])


def _function(compiler: Compiler, node: exp.Expr, function: Function) -> Compute:
    """A function of the table, with as many arguments as it takes."""
    name, arguments = call_name(node), node.expressions
    if not function.least <= len(arguments) <= function.most:
        some = f"{function.least} to {function.most}"
        wanted = some if function.most > function.least else str(function.least)
        raise compiler.statement.refusal(
            node, f"{name} takes {wanted} arguments, not {len(arguments)}", "give that many"
        )
    inputs = [
        compiler.constant(each, function.constants[at])
        if at in function.constants
        else compiler.compile(each)
        for at, each in enumerate(arguments)
    ]

    def apply(evaluate: Callable[[Compute], Value]) -> Value:
        values = (evaluate(each) if callable(each) else each for each in inputs)
        return function.compute(compiler.zone, *values)

    if function.constants:  # refuse those that Arrow cannot use, such as a broken pattern
        try:
            apply(lambda _: pa.array(["x"]))
        except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
            raise compiler.statement.refusal(
                node, f"{name} cannot use its constants: {error}", "correct them"
            ) from None
    return lambda columns: apply(lambda argument: argument(columns))


def _user_call(compiler: Compiler, node: exp.Expr, function: Any) -> Compute:
    """A function in Python."""
    inputs = [compiler.compile(each) for each in node.expressions]
    if not inputs or not function.takes(len(inputs)):
        raise compiler.statement.refusal(
            node,
            f"{function.reference} does not take {len(inputs)} columns",
            "give as many as it has parameters, at least one",
        )
    return lambda columns: function(compiler.zone, *(each(columns) for each in inputs))


def _truncation(compiler: Compiler, node: exp.Expr) -> Compute:
    """DATE_TRUNC(ts, DAY), and DATE_TRUNC('day', ts)."""
    arguments = list(node.expressions)
    if len(arguments) == 2 and isinstance(arguments[0], exp.Literal):
        arguments.reverse()
    unit = arguments[1].name.upper() if len(arguments) == 2 else ""
    if unit not in UNITS:
        reason = f"{node.name.upper()} takes a time and one of {', '.join(UNITS)}"
        raise compiler.statement.refusal(node, reason, suggestion(unit, UNITS))
    inner = compiler.compile(arguments[0])
    return lambda columns: functions.truncate_time(compiler.zone, inner(columns), unit)


def _difference(compiler: Compiler, node: exp.Expr) -> Compute:
    """DATE_DIFF(end, start, DAY), and DATEDIFF(DAY, start, end)."""
    written = call_name(node)
    name, unit, rest = _unit_of(node)
    units = [*time_functions.FIXED_UNITS]
    if name != "TIMESTAMP_DIFF":
        units = [*time_functions.BOUNDARIES]
    if unit not in units or len(rest) != 2:
        shape = "(DAY, start, end)" if name != written else "(end, start, DAY)"
        raise compiler.statement.refusal(
            node,
            f"{written} takes two times and one of {', '.join(units)}",
            f"write {written}{shape}",
        )
    end, start = (compiler.compile(each) for each in (rest if name == written else rest[::-1]))
    zone = compiler.zone
    return lambda columns: time_functions.difference(name, zone, end(columns), start(columns), unit)


def _unit_of(node: exp.Expr) -> tuple[str, str, list[exp.Expr]]:
    """What a call does, its unit of time and its other arguments."""
    name, arguments = call_name(node), list(node.expressions)
    first = name in time_functions.UNIT_FIRST
    name = time_functions.UNIT_FIRST.get(name, name)
    unit = arguments.pop(0 if first else -1) if arguments else exp.Null()
    if isinstance(unit, exp.Literal | exp.Var):
        return name, unit.name.upper().rstrip("S"), arguments
    return name, "", arguments


def _shift_call(compiler: Compiler, node: exp.Expr) -> Compute:
    """DATE_ADD(day, INTERVAL 1 DAY), and DATEADD(DAY, 1, day)."""
    name, arguments = call_name(node), node.expressions
    if name in time_functions.UNIT_FIRST:
        name, unit, rest = _unit_of(node)
        if len(rest) == 2 and unit:
            return _shift(compiler, node, name, rest[1], rest[0], unit)
    elif len(arguments) == 2 and isinstance(arguments[1], exp.Interval):
        value, (count, unit) = arguments[0], _interval(arguments[1])
        return _shift(compiler, node, name, value, count, unit)
    raise compiler.statement.refusal(
        node,
        f"{call_name(node)} takes a time and how far it is moved",
        f"write {call_name(node)}(DAY, 1, ts)"
        if call_name(node) in time_functions.UNIT_FIRST
        else f"write {call_name(node)}(ts, INTERVAL 1 DAY)",
    )


def _interval(node: exp.Expr) -> tuple[exp.Expr, str]:
    """The count of an INTERVAL and its unit."""
    count, unit = node.this, node.args.get("unit")
    if isinstance(count, exp.Literal):
        count = exp.Literal.number(count.name) if count.name.lstrip("-").isdigit() else count
        if count.name.startswith("-"):
            count = exp.Neg(this=exp.Literal.number(count.name[1:]))
    return count, unit.name.upper().rstrip("S") if isinstance(unit, exp.Var) else ""


def _shift(
    compiler: Compiler, node: exp.Expr, name: str, time: exp.Expr, count: exp.Expr, unit: str
) -> Compute:
    if unit not in time_functions.SHIFT_UNITS:
        raise compiler.statement.refusal(
            node,
            f"times are not moved by {unit or 'this'}",
            suggestion(unit, time_functions.SHIFT_UNITS),
        )
    what, sign = time_functions.SHIFTS[name]
    value, number, zone = compiler.compile(time), compiler.compile(count), compiler.zone
    return lambda columns: time_functions.shift(
        what, sign, zone, value(columns), number(columns), unit
    )


def _sum(name: str, shift_name: str) -> Build:
    """+ and -: of numbers, or of a time and an INTERVAL."""
    plain = _binary(partial(functions.arithmetic, name))

    def build(compiler: Compiler, node: exp.Expr) -> Compute:
        left, right = node.this, node.args["expression"]
        if name == "add" and isinstance(left, exp.Interval):
            left, right = right, left
        if isinstance(right, exp.Interval):
            return _shift(compiler, node, shift_name, left, *_interval(right))
        return plain(compiler, node)

    return build


_SPECIAL: dict[str, Build] = {
    **dict.fromkeys(TRUNCATIONS, _truncation),
    **dict.fromkeys((*time_functions.DIFFERENCES, "DATEDIFF", "TIMESTAMPDIFF"), _difference),
    **dict.fromkeys((*time_functions.SHIFTS, "DATEADD", "TIMESTAMPADD"), _shift_call),
    **dict.fromkeys(("ARRAY_LENGTH", "ARRAY_SIZE", "CARDINALITY"), _list_length),
}
"""Calls whose arguments are not all values."""


def known_functions() -> list[str]:
    """Every name that an expression may call."""
    return sorted([*FUNCTIONS, *_LISTS, *_SPECIAL, "CAST", "SAFE_CAST", "EXTRACT"])


def _constant(compiler: Compiler, node: exp.Expr) -> Compute:
    value = literal_value(node)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        value = float(value)
    scalar = pa.scalar(value)
    return lambda columns: scalar


def _negative(compiler: Compiler, node: exp.Expr) -> Compute:
    if isinstance(node.this, exp.Literal) and not node.this.is_string:
        return _constant(compiler, node)
    return compiler.compile(exp.Sub(this=exp.Literal.number(0), expression=node.this))


def _binary(compute: Callable[..., Value]) -> Build:
    """The builder of an operator of two values: `compute(zone, left, right)`."""

    def build(compiler: Compiler, node: exp.Expr) -> Compute:
        left, right = compiler.compile(node.this), compiler.compile(node.args["expression"])
        return lambda columns: compute(compiler.zone, left(columns), right(columns))

    return build


def _between(compiler: Compiler, node: exp.Expr) -> Compute:
    value, low, high = (compiler.compile(node.args[part]) for part in ("this", "low", "high"))

    def compute(columns: Columns) -> Value:
        it = value(columns)  # once: it may be long
        above = functions.compare("greater_equal", compiler.zone, it, low(columns))
        below = functions.compare("less_equal", compiler.zone, it, high(columns))
        return pc.and_kleene(above, below)

    return compute


def _in_list(compiler: Compiler, node: exp.Expr) -> Compute:
    if not node.expressions or any(node.args.get(n) for n in ("query", "unnest", "field")):
        raise compiler.statement.refusal(
            node,
            "IN takes a list of constants",
            "list them: x IN ('a', 'b'); a subquery would mix the rows of several units",
        )
    value = compiler.compile(node.this)
    try:
        listed = [pa.scalar(literal_value(item)) for item in node.expressions]
    except ValueError:
        raise compiler.statement.refusal(
            node, "IN takes a list of constants", "use = and OR for anything else"
        ) from None

    def compute(columns: Columns) -> Value:
        it, *rest = unify_kinds([value(columns), *listed], compiler.zone)
        known = [item for item in rest if item.is_valid]
        if kind(it) == "null" or not known:
            return pa.scalar(None, pa.bool_())
        wanted = pa.array([item.as_py() for item in known], it.type)
        is_listed = pc.is_in(it, value_set=wanted)
        unsure = pc.is_null(it)
        if len(known) < len(rest):  # NULL in the list may be equal to anything
            unsure = pc.or_(unsure, pc.invert(is_listed))
        return pc.if_else(unsure, pa.scalar(None, pa.bool_()), is_listed)

    return compute


def _is(compiler: Compiler, node: exp.Expr) -> Compute:
    value, other = compiler.compile(node.this), node.args["expression"]
    if isinstance(other, exp.Null):
        return lambda columns: pc.is_null(value(columns))
    if isinstance(other, exp.Boolean):
        wanted = pa.scalar(bool(other.this))
        return lambda columns: pc.fill_null(pc.equal(as_bool(value(columns)), wanted), False)
    raise compiler.statement.refusal(
        node, "IS goes with NULL, TRUE or FALSE", "use = for other comparisons"
    )


def _not(compiler: Compiler, node: exp.Expr) -> Compute:
    inner = compiler.logical(node.this)
    return lambda columns: pc.invert(inner(columns))


def _like(compiler: Compiler, node: exp.Expr) -> Compute:
    value = compiler.compile(node.this)
    pattern = compiler.constant(node.args["expression"], str)
    ignore, negated = isinstance(node, exp.ILike), bool(node.args.get("negate"))

    def compute(columns: Columns) -> Value:
        matches = pc.match_like(as_text(value(columns)), pattern, ignore_case=ignore)
        return pc.invert(matches) if negated else matches

    return compute


def _case(compiler: Compiler, node: exp.Expr) -> Compute:
    subject = node.args.get("this")
    tests = []
    for branch in node.args["ifs"]:
        test = branch.this if subject is None else exp.EQ(this=subject, expression=branch.this)
        tests.append(compiler.logical(test))
    answers = [compiler.compile(branch.args["true"]) for branch in node.args["ifs"]]
    default = node.args.get("default")
    answers.append(compiler.compile(exp.Null() if default is None else default))

    def compute(columns: Columns) -> Value:
        *values, chosen = unify_kinds([answer(columns) for answer in answers], compiler.zone)
        for test, value in zip(reversed(tests), reversed(values), strict=True):
            chosen = functions.if_else(compiler.zone, test(columns), value, chosen)
        return chosen

    return compute


def _if(compiler: Compiler, node: exp.Expr) -> Compute:
    return _case(compiler, exp.Case(ifs=[node], default=node.args.get("false")))


_PLAIN: dict[type, Build] = {
    exp.RawString: _constant,
    exp.Boolean: _constant,
    exp.Null: _constant,
    exp.Column: _column,
    exp.Paren: lambda compiler, node: compiler.compile(node.this),
    exp.Neg: _negative,
    exp.Add: _sum("add", "DATETIME_ADD"),
    exp.Sub: _sum("subtract", "DATETIME_SUB"),
    exp.Mul: _binary(partial(functions.arithmetic, "multiply")),
    exp.Mod: _binary(functions.remainder),
    exp.EQ: _binary(partial(functions.compare, "equal")),
    exp.NEQ: _binary(partial(functions.compare, "not_equal")),
    exp.LT: _binary(partial(functions.compare, "less")),
    exp.LTE: _binary(partial(functions.compare, "less_equal")),
    exp.GT: _binary(partial(functions.compare, "greater")),
    exp.GTE: _binary(partial(functions.compare, "greater_equal")),
    exp.Is: _is,
    exp.And: _binary(lambda zone, left, right: pc.and_kleene(as_bool(left), as_bool(right))),
    exp.Or: _binary(lambda zone, left, right: pc.or_kleene(as_bool(left), as_bool(right))),
    exp.Not: _not,
    exp.Extract: _extract,
    exp.Anonymous: _call,
}
BUILDERS: dict[type, tuple[Build, tuple[str, ...]]] = {
    **{type_: (build, ()) for type_, build in _PLAIN.items()},
    exp.Literal: (_constant, ("is_string",)),
    exp.Div: (_binary(functions.divide), ("typed", "safe")),
    exp.DPipe: (_binary(functions.concatenate), ("safe",)),
    exp.Between: (_between, ("low", "high")),
    exp.In: (_in_list, ("query", "unnest", "field")),
    exp.Like: (_like, ("negate",)),
    exp.ILike: (_like, ("negate",)),
    exp.Case: (_case, ("ifs", "default")),
    exp.If: (_if, ("true", "false")),
    exp.Cast: (_cast, ("to", "safe", "format")),
    exp.TryCast: (_cast, ("to", "safe", "format")),
    exp.Bracket: (_list_item, ("offset", "safe")),
    Item: (_item, ("number", "place")),
    Over: (_over, ("parts", "order", "other")),
}
"""What may stand in an expression, and with which arguments; anything else is refused."""
