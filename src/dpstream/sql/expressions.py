"""SQL expressions to functions of Arrow columns; one small builder per kind of expression.

Logic has three values, as in SQL: NULL where a comparison meets NULL.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.sql.calls import build_call, cast, extract, item_of_list
from dpstream.sql.compiler import Build, Columns, Compiler, Compute, literal
from dpstream.sql.functions import choose, joined
from dpstream.sql.numbers import arithmetic, divide, remainder
from dpstream.sql.statement import Statement
from dpstream.sql.values import Value, as_bool, as_text, kind, together

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
    value = literal(node)
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
    return lambda columns: joined(left(columns), right(columns))


def _comparison(compiler: Compiler, node: exp.Expr) -> Compute:
    left, right = _pair(compiler, node)
    compare = getattr(pc, _COMPARISONS[type(node)])

    def compute(columns: Columns) -> Value:
        return _compared(compare, left(columns), right(columns), compiler.zone)

    return compute


def _compared(compare: Callable[..., Value], left: Value, right: Value, zone: str) -> Value:
    left, right = together([left, right], zone)
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
        listed = [pa.scalar(literal(item)) for item in node.expressions]
    except ValueError:
        raise compiler.statement.refusal(
            node, "IN takes a list of constants", "use = and OR for anything else"
        ) from None

    def compute(columns: Columns) -> Value:
        it, *rest = together([value(columns), *listed], compiler.zone)
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
        *values, chosen = together([answer(columns) for answer in answers], compiler.zone)
        for test, value in zip(reversed(tests), reversed(values), strict=True):
            chosen = choose(compiler.zone, test(columns), value, chosen)
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
