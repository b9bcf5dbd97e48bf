"""Values of options, as SQL writes them and as Python gives them; anything else is `NotThat`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql.compiler import literal
from dpstream.stages.ticks import duration


class NotThat(ValueError):
    """A value is not of the kind that an option takes; says which."""


def number(node: exp.Expr) -> Any:
    """A number, or one divided by another: 1/2."""
    if isinstance(node, exp.Div):
        return number(node.this) / number(node.expression)
    value = _plain(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotThat("a number")
    return Fraction(node.name) if isinstance(node, exp.Literal) else Fraction(repr(value))


def _plain(node: exp.Expr) -> Any:
    try:
        return literal(node)
    except (ValueError, TypeError):
        raise NotThat("a constant") from None


def whole(node: exp.Expr) -> int:
    """A whole number."""
    value = _plain(node)
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotThat("a whole number")
    return value


def column(node: exp.Expr) -> str:
    """A column's name."""
    if isinstance(node, exp.Column) and not node.args.get("table"):
        return node.name
    raise NotThat("a column's name, without quotes")


def text(node: exp.Expr) -> str:
    """Text in quotes."""
    value = _plain(node)
    if not isinstance(value, str):
        raise NotThat("text in quotes")
    return value


def flag(node: exp.Expr) -> bool:
    """TRUE or FALSE."""
    value = _plain(node)
    if not isinstance(value, bool):
        raise NotThat("TRUE or FALSE")
    return value


def interval(node: Any) -> Any:
    """A length of time in words, from INTERVAL '15' MINUTE."""
    if isinstance(node, exp.Interval) and isinstance(node.args.get("unit"), exp.Var):
        length = f"{node.name} {node.args['unit'].name.lower()}"
        try:
            return duration(length, "an interval", least=0)
        except InvalidParameter:
            pass
    raise NotThat("an interval of seconds, minutes, hours, days or weeks: INTERVAL '15' MINUTE")


def period(node: exp.Expr) -> Any:
    """A length of time, or 'forever'."""
    if isinstance(node, exp.Literal) and node.name.lower() == "forever":
        return "forever"
    try:
        return interval(node)
    except NotThat:
        raise NotThat("INTERVAL '1' DAY, or 'forever'") from None


def instant(node: exp.Expr) -> str:
    """A time, with or without the word TIMESTAMP."""
    inner = node.this if isinstance(node, exp.Cast) else node
    if isinstance(inner, exp.Literal) and inner.is_string:
        return str(inner.this)
    raise NotThat("TIMESTAMP '2024-05-01 00:00'")


def groups(node: exp.Expr) -> Any:
    """A list of keys: single ones, or a tuple for each group."""
    wrapped = isinstance(node, exp.Tuple | exp.Array | exp.Paren)
    if not wrapped:
        raise NotThat("a list: ('a', 'b'), or (('a', 1), ('b', 2)) for two keys")
    items = [node.this] if isinstance(node, exp.Paren) else node.expressions
    found = []
    for item in items:
        several = isinstance(item, exp.Tuple | exp.Array)
        found.append(tuple(map(_plain, item.expressions)) if several else (_plain(item),))
    return found


def parameters(node: exp.Expr) -> dict[str, Any]:
    """(name = value, ...) of a mechanism."""
    found = {}
    for name, given in _assigned(node, "a list of parameters: (lo = 0, hi = 1000)"):
        value = _plain(given)
        found[name.lower()] = Fraction(str(value)) if _is_real(value) else value
    return found


def _is_real(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def weights(node: exp.Expr) -> dict[str, Any]:
    """(clicks = 2, selection = 1/2): parts of the budget, by the names that are published."""
    expected = "a list of columns and numbers: (clicks = 2, seconds = 1)"
    return {name: number(given) for name, given in _assigned(node, expected)}


def types(node: exp.Expr) -> dict[str, Any]:
    """(user_id = INT64, day = DATE): types of the source's columns, with quotes or without."""
    expected = "a list of columns and types: (user_id = INT64, day = DATE)"
    found = {}
    for name, given in _assigned(node, expected):
        if not isinstance(given, exp.Column | exp.Literal | exp.DataType) or not given.name:
            raise NotThat(expected)
        found[name] = given.name
    return found


def _assigned(node: exp.Expr, expected: str) -> Iterator[tuple[str, exp.Expr]]:
    """Name and value of each `name = value` in a list, or of a single one."""
    items = node.expressions if isinstance(node, exp.Tuple) else [getattr(node, "this", node)]
    for item in items:
        if not isinstance(item, exp.EQ | exp.Kwarg) or not isinstance(item.this, exp.Expr):
            raise NotThat(expected)
        yield item.this.name, item.expression


def named(value: Any) -> dict[str, Any]:
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


def words(value: Any) -> str:
    """Text, given in Python."""
    if not isinstance(value, str):
        raise NotThat("text")
    return value


def one_of(*known: str) -> Callable[[Any], str]:
    """One of a few words."""

    def given(name: Any) -> str:
        if name not in known:
            raise NotThat(" or ".join(map(repr, known)))
        return str(name)

    return given


def one_less(units: Any) -> Any:
    """The number in "more than so many" for the one in "at least so many"."""
    if isinstance(units, bool) or not isinstance(units, int):
        raise NotThat("a whole number")
    return units - 1
