"""The options of the privacy clause: which parameter of a query each one is, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql.compiler import literal, nearest
from dpstream.sql.dialect import canonical
from dpstream.sql.statement import Statement
from dpstream.stages.ticks import duration

_LATER = {
    "group_selection_strategy": "leave it out; list public groups with public_groups = ('a', 'b')",
    "watermark": "use allowed_lateness: a watermark taken from the data depends on other rows",
}
_ITS_COLUMN = "privacy_unit_column = user_id"


class NotThat(ValueError):
    """A value is not of the kind that an option takes; says which."""


def _number(node: exp.Expr) -> Any:
    if isinstance(node, exp.Div):
        return _number(node.this) / _number(node.expression)
    value = _plain(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotThat("a number")
    return Fraction(node.name) if isinstance(node, exp.Literal) else Fraction(repr(value))


def _plain(node: exp.Expr) -> Any:
    try:
        return literal(node)
    except (ValueError, TypeError):
        raise NotThat("a constant") from None


def _whole(node: exp.Expr) -> int:
    value = _plain(node)
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotThat("a whole number")
    return value


def _column(node: exp.Expr) -> str:
    if isinstance(node, exp.Column) and not node.args.get("table"):
        return node.name
    raise NotThat("a column's name, without quotes")


def _text(node: exp.Expr) -> str:
    value = _plain(node)
    if not isinstance(value, str):
        raise NotThat("text in quotes")
    return value


def _flag(node: exp.Expr) -> bool:
    value = _plain(node)
    if not isinstance(value, bool):
        raise NotThat("TRUE or FALSE")
    return value


def interval(node: Any) -> Any:
    """A length of time in words, from INTERVAL '15' MINUTE."""
    if isinstance(node, exp.Interval) and isinstance(node.args.get("unit"), exp.Var):
        words = f"{node.name} {node.args['unit'].name.lower()}"
        try:
            return duration(words, "an interval", least=0)
        except InvalidParameter:
            pass
    raise NotThat("an interval of seconds, minutes, hours, days or weeks: INTERVAL '15' MINUTE")


def _period(node: exp.Expr) -> Any:
    if isinstance(node, exp.Literal) and node.name.lower() == "forever":
        return "forever"
    try:
        return interval(node)
    except NotThat:
        raise NotThat("INTERVAL '1' DAY, or 'forever'") from None


def _instant(node: exp.Expr) -> str:
    inner = node.this if isinstance(node, exp.Cast) else node
    if isinstance(inner, exp.Literal) and inner.is_string:
        return str(inner.this)
    raise NotThat("TIMESTAMP '2024-05-01 00:00'")


def _groups(node: exp.Expr) -> Any:
    wrapped = isinstance(node, exp.Tuple | exp.Array | exp.Paren)
    if not wrapped:
        raise NotThat("a list: ('a', 'b'), or (('a', 1), ('b', 2)) for two keys")
    items = [node.this] if isinstance(node, exp.Paren) else node.expressions
    found = []
    for item in items:
        several = isinstance(item, exp.Tuple | exp.Array)
        found.append(tuple(map(_plain, item.expressions)) if several else (_plain(item),))
    return found


def _parameters(node: exp.Expr) -> dict[str, Any]:
    """(name = value, ...) of a mechanism."""
    items = node.expressions if isinstance(node, exp.Tuple) else [getattr(node, "this", node)]
    found = {}
    for item in items:
        if not isinstance(item, exp.EQ | exp.Kwarg) or not isinstance(item.this, exp.Expr):
            raise NotThat("a list of parameters: (lo = 0, hi = 1000)")
        value = _plain(item.expression)
        found[item.this.name.lower()] = Fraction(str(value)) if _is_real(value) else value
    return found


def _is_real(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _weights(node: exp.Expr) -> dict[str, Any]:
    """(clicks = 2, selection = 1/2): parts of the budget, by the names that are published."""
    items = node.expressions if isinstance(node, exp.Tuple) else [getattr(node, "this", node)]
    found = {}
    for item in items:
        if not isinstance(item, exp.EQ | exp.Kwarg) or not isinstance(item.this, exp.Expr):
            raise NotThat("a list of columns and numbers: (clicks = 2, seconds = 1)")
        found[item.this.name] = _number(item.expression)
    return found


def _named(value: Any) -> dict[str, Any]:
    """Names and values: a dict, or texts such as "lo=0" from the command line."""
    if isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for item in value if isinstance(value, tuple | list) else (value,):
        name, equals, rest = str(item).partition("=")
        if not isinstance(item, str) or not equals or not name:
            raise NotThat("names and values: {'lo': 0, 'hi': 1000}, or lo=0,hi=1000")
        try:
            found[name] = Fraction(rest)
        except (ValueError, ZeroDivisionError):
            found[name] = rest
    return found


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise NotThat("text")
    return value


def _one_of(*known: str) -> Callable[[Any], str]:
    def given(name: Any) -> str:
        if name not in known:
            raise NotThat(" or ".join(map(repr, known)))
        return str(name)

    return given


def _one_less(units: Any) -> Any:
    if isinstance(units, bool) or not isinstance(units, int):
        raise NotThat("a whole number")
    return units - 1


@dataclass(frozen=True)
class Option:
    """The query's parameter, the reader of a value in SQL, and what becomes of a Python value."""

    parameter: str
    read: Callable[[Any], Any]
    given: Callable[[Any], Any] = lambda value: value


OPTIONS = {
    "epsilon": Option("epsilon", _number),
    "delta": Option("delta", _number),
    "privacy_unit_column": Option("unit", _column),
    "privacy_unit_period": Option("period", _period),
    "max_groups_contributed": Option("max_groups_contributed", _whole),
    "max_rows_per_group": Option("max_rows_per_group", _whole),
    "max_rows_contributed": Option("max_rows_contributed", _whole),
    "max_key_bytes": Option("max_key_bytes", _whole),
    "public_groups": Option("public_keys", _groups),
    "strategy": Option("strategy", _text, _one_of("latched", "sqlp")),
    "weights": Option("weights", _weights, _named),
    "confidence": Option("confidence", lambda node: float(_number(node))),
    "debias": Option("debias", _text, _one_of("global")),
    "debias_rows": Option("debias_rows", _whole),
    "min_change": Option("min_change", lambda node: float(_number(node))),
    "nonnegative": Option("nonnegative", _flag),
    "pre_threshold": Option("pre_threshold", _whole),
    "min_privacy_units_per_group": Option("pre_threshold", _whole, _one_less),
    "time_column": Option("time", _column),
    "time_unit": Option("time_unit", _text),
    "time_origin": Option("time_origin", _instant),
    "time_zone": Option("time_zone", _text),
    "arrival_column": Option("arrival", _column),
    "allowed_lateness": Option("allowed_lateness", interval),
    "start": Option("start", _instant),
    "end": Option("end", _instant),
    "privacy_unit": Option("privacy_unit", _text, _words),
    "w": Option("w", _whole),
    "mechanism": Option("mechanism", _text, _words),
    "mechanism_options": Option("mechanism_options", _parameters, _named),
}
"""BigQuery's names where it has them; `start` and `end` of event time are public."""


def read_options(statement: Statement, clause: exp.Expr) -> dict[str, Any]:
    """Parameters of a query, from its clause."""
    found: dict[str, Any] = {}
    for node in clause.expressions:
        if not isinstance(node, exp.EQ) or not isinstance(node.this, exp.Column):
            raise statement.refusal(node, "an option is name = value", f"write {_ITS_COLUMN}")
        name = node.this.name.lower()
        option = known(statement, node.this, name)
        if option.parameter in found:
            raise statement.refusal(node, f"{name} is given twice", "give it once")
        try:
            found[option.parameter] = option.given(option.read(node.expression))
        except NotThat as wanted:
            raise statement.refusal(
                node.expression, f"{name} cannot be {canonical(node.expression)}", f"give {wanted}"
            ) from None
    return found


def read_overrides(statement: Statement, overrides: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a query, from options that were given as Python values."""
    found: dict[str, Any] = {}
    for name, value in overrides.items():
        option = known(statement, None, name)
        try:
            found[option.parameter] = option.given(value)
        except NotThat as wanted:
            raise statement.refusal(None, f"{name} cannot be {value!r}", f"give {wanted}") from None
    return found


def known(statement: Statement, node: exp.Expr | None, name: str) -> Option:
    """The option of a name, or a refusal with the nearest one."""
    if name in OPTIONS:
        return OPTIONS[name]
    fix = _LATER.get(name) or nearest(name, OPTIONS)
    raise statement.refusal(node, f"there is no option {name}", fix)


def node_of(clause: exp.Expr, parameter: str) -> exp.Expr | None:
    """Where a parameter was given."""
    given: list[exp.Expr] = clause.expressions
    for node in given:
        name = node.this.name.lower() if isinstance(node, exp.EQ) else ""
        if name in OPTIONS and OPTIONS[name].parameter == parameter:
            return node
    return None
