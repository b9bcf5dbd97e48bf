"""SQL expressions to functions of Arrow columns; one small builder per kind of expression.

Logic has three values, as in SQL: NULL where a comparison meets NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import AGGREGATES
from dpstream.sql_compiler.functions import (
    FUNCTIONS,
    PARTS,
    TRUNCATIONS,
    UNITS,
    Function,
    arithmetic,
    concatenate,
    divide,
    extract_part,
    if_else,
    list_item,
    remainder,
    truncate_time,
)
from dpstream.sql_compiler.sql_values import Value, as_bool, as_text, convert, kind, unify_kinds
from dpstream.sql_compiler.statement import Statement, closest_word

# From parsed expressions to functions of Arrow columns: one builder per kind of expression.

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
            value = literal_value(node)
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
    found = closest_word(name, known, least=0.6)
    return f"did you mean {found}?" if found else f"known are {', '.join(known)}"


# Calls: functions, CAST, EXTRACT, DATE_TRUNC, items of SPLIT.

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
    return lambda columns: extract_part(compiler.zone, inner(columns), part)


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
    return lambda columns: list_item(compiler.zone, lists(columns), at)


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
        known = [*AGGREGATES, *function_names()]
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
    return lambda columns: truncate_time(compiler.zone, inner(columns), unit)


def function_names() -> list[str]:
    """Every name that an expression may call."""
    return sorted([*FUNCTIONS, *TRUNCATIONS, "CAST", "SAFE_CAST", "EXTRACT"])


def _unknown(compiler: Compiler, node: exp.Expr, reason: str, name: str, known: Any) -> Exception:
    return compiler.statement.refusal(node, reason, suggestion(name, known))


_COMPARISONS: dict[type, str] = {
    exp.EQ: "equal",
    exp.NEQ: "not_equal",
    exp.LT: "less",
    exp.LTE: "less_equal",
    exp.GT: "greater",
    exp.GTE: "greater_equal",
}


_ARITHMETIC: dict[type, str] = {exp.Add: "add", exp.Sub: "subtract", exp.Mul: "multiply"}


def _constant(compiler: Compiler, node: exp.Expr) -> Compute:
    value = literal_value(node)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        value = float(value)
    made = pa.scalar(value)
    return lambda columns: made


def _column(compiler: Compiler, node: exp.Expr) -> Compute:
    name = node.name
    return lambda columns: columns[name]


def _paren(compiler: Compiler, node: exp.Expr) -> Compute:
    return compiler.compile(node.this)


def _negative(compiler: Compiler, node: exp.Expr) -> Compute:
    if isinstance(node.this, exp.Literal) and not node.this.is_string:
        return _constant(compiler, node)
    inner = compiler.compile(node.this)
    return lambda columns: arithmetic("subtract", pa.scalar(0), inner(columns))


def _pair(compiler: Compiler, node: exp.Expr) -> tuple[Compute, Compute]:
    return compiler.compile(node.this), compiler.compile(node.args["expression"])


def _arithmetic(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    name = _ARITHMETIC[type(node)]
    return lambda columns: arithmetic(name, left(columns), right(columns))


def _divide(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    return lambda columns: divide(left(columns), right(columns))


def _remainder(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    return lambda columns: remainder(compiler.zone, left(columns), right(columns))


def _join(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    return lambda columns: concatenate(left(columns), right(columns))


def _comparison(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    compare = getattr(pc, _COMPARISONS[type(node)])

    def compute(columns: Columns) -> Value:
        return _compared(compare, left(columns), right(columns), compiler.zone)

    return compute


def _compared(compare: Callable[..., Value], left: Value, right: Value, zone: str) -> Value:
    left, right = unify_kinds([left, right], zone)
    if kind(left) == "null":
        return pc.cast(left, pa.bool_())
    return compare(left, right)


def _between(compiler: Compiler, node: exp.Expr) -> Compute:
    value, low, high = (compiler.compile(node.args[n]) for n in ("this", "low", "high"))

    def compute(columns: Columns) -> Value:
        it = value(columns)
        above = _compared(pc.greater_equal, it, low(columns), compiler.zone)
        below = _compared(pc.less_equal, it, high(columns), compiler.zone)
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
        found = pc.is_in(it, value_set=wanted)
        unsure = pc.is_null(it)
        if len(known) < len(rest):  # NULL in the list may be equal to anything
            unsure = pc.or_(unsure, pc.invert(found))
        return pc.if_else(unsure, pa.scalar(None, pa.bool_()), found)

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


def _logic(name: str) -> Callable[[Compiler, exp.Expr], Compute]:
    def build(compiler: Compiler, node: exp.Expr) -> Compute:
        left, right = compiler.logical(node.this), compiler.logical(node.args["expression"])
        combine = getattr(pc, name)
        return lambda columns: combine(left(columns), right(columns))

    return build


def _not(compiler: Compiler, node: exp.Expr) -> Compute:
    inner = compiler.logical(node.this)
    return lambda columns: pc.invert(inner(columns))


def _like(compiler: Compiler, node: exp.Expr) -> Compute:
    value = compiler.compile(node.this)
    pattern = compiler.constant(node.args["expression"], str)
    ignore, negated = isinstance(node, exp.ILike), bool(node.args.get("negate"))

    def compute(columns: Columns) -> Value:
        found = pc.match_like(as_text(value(columns)), pattern, ignore_case=ignore)
        return pc.invert(found) if negated else found

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
            chosen = if_else(compiler.zone, test(columns), value, chosen)
        return chosen

    return compute


def _if(compiler: Compiler, node: exp.Expr) -> Compute:
    return _case(compiler, exp.Case(ifs=[node], default=node.args.get("false")))


_PLAIN: dict[type, Build] = {
    exp.Literal: _constant,
    exp.RawString: _constant,
    exp.Boolean: _constant,
    exp.Null: _constant,
    exp.Column: _column,
    exp.Paren: _paren,
    exp.Neg: _negative,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    exp.Mod: _remainder,
    **dict.fromkeys(_COMPARISONS, _comparison),
    exp.Is: _is,
    exp.And: _logic("and_kleene"),
    exp.Or: _logic("or_kleene"),
    exp.Not: _not,
    exp.Extract: extract,
    exp.Anonymous: build_call,
}


BUILDERS: dict[type, tuple[Build, tuple[str, ...]]] = {
    **{type_: (build, ()) for type_, build in _PLAIN.items()},
    exp.Literal: (_constant, ("is_string",)),
    exp.Div: (_divide, ("typed", "safe")),
    exp.DPipe: (_join, ("safe",)),
    exp.Between: (_between, ("low", "high")),
    exp.In: (_in_list, ("query", "unnest", "field")),
    exp.Like: (_like, ("negate",)),
    exp.ILike: (_like, ("negate",)),
    exp.Case: (_case, ("ifs", "default")),
    exp.If: (_if, ("true", "false")),
    exp.Cast: (cast, ("to", "safe", "format")),
    exp.TryCast: (cast, ("to", "safe", "format")),
    exp.Bracket: (item_of_list, ("offset", "safe")),
}
"""What may stand in an expression, and with which parts; anything else is refused."""


def compiler(statement: Statement, zone: str) -> Compiler:
    """A compiler of one statement's expressions; times are in `zone`."""
    return Compiler(statement=statement, zone=zone, builders=BUILDERS)
