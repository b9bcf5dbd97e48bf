"""The options of the privacy clause: which parameter of a query each one is.

An option has a reader of its value in SQL, and one of the value that Python gives; both raise
`WrongKind` for a value that the option does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.period_bounds import AUTO
from dpstream.query.windows import duration
from dpstream.sql_compiler.expressions import literal_value, suggestion
from dpstream.sql_compiler.statement import Draft, KeysOf, canonical


class WrongKind(ValueError):
    """A value is not of the kind that an option takes; says which."""


def _constant(node: exp.Expr) -> Any:
    try:
        return literal_value(node)
    except (ValueError, TypeError):
        raise WrongKind("a constant") from None


def _constant_of(kind: type, words: str) -> Callable[[exp.Expr], Any]:
    """A reader of constants of one Python type."""

    def read(node: exp.Expr) -> Any:
        value = _constant(node)
        if type(value) is not kind:
            raise WrongKind(words)
        return value

    return read


integer = _constant_of(int, "a whole number")
text = _constant_of(str, "text in quotes")
flag = _constant_of(bool, "TRUE or FALSE")


def flag_or_integer(node: exp.Expr) -> bool | int:
    """TRUE, FALSE, or how many."""
    value: bool | int = _constant(node)
    if type(value) not in (bool, int):
        raise WrongKind("TRUE, FALSE or a whole number")
    return value


def is_word_auto(node: exp.Expr | None) -> bool:
    """Is it the word AUTO, without quotes?"""
    return isinstance(node, exp.Column | exp.Var) and node.name.upper() == "AUTO"


def integer_or_auto(node: exp.Expr) -> int | str:
    """A whole number, or AUTO: it is chosen."""
    if is_word_auto(node):
        return AUTO
    value: int = integer(node)
    return value


def number(node: exp.Expr) -> Any:
    """A number, or one divided by another: 1/2."""
    if isinstance(node, exp.Div):
        return number(node.this) / number(node.expression)
    value = _constant(node)
    if type(value) not in (int, float):
        raise WrongKind("a number")
    return Fraction(node.name) if isinstance(node, exp.Literal) else Fraction(repr(value))


def column(node: exp.Expr) -> str:
    """A column's name."""
    if isinstance(node, exp.Column) and not node.args.get("table"):
        return node.name
    raise WrongKind("a column's name, without quotes")


def interval(node: Any, *, calendar: bool = False) -> Any:
    """A length of time in words, from INTERVAL '15' MINUTE; `calendar`: also of months."""
    if isinstance(node, exp.Interval) and isinstance(node.args.get("unit"), exp.Var):
        length = f"{node.name} {node.args['unit'].name.lower()}"
        try:
            return duration(length, "an interval", least=0, calendar=calendar)
        except InvalidParameter:
            pass
    months = ", days, weeks or months" if calendar else ", days or weeks"
    raise WrongKind(f"an interval of seconds, minutes, hours{months}: INTERVAL '15' MINUTE")


def period(node: exp.Expr) -> Any:
    """A length of time, or 'forever'."""
    if isinstance(node, exp.Literal) and node.name.lower() == "forever":
        return "forever"
    try:
        return interval(node, calendar=True)
    except WrongKind:
        raise WrongKind("INTERVAL '1' DAY, or 'forever'") from None


def instant(node: exp.Expr) -> str:
    """A time, with or without the word TIMESTAMP."""
    inner = node.this if isinstance(node, exp.Cast) else node
    if isinstance(inner, exp.Literal) and inner.is_string:
        return str(inner.this)
    raise WrongKind("TIMESTAMP '2024-05-01 00:00'")


@dataclass(frozen=True)
class KeyNode:
    """Keys that are not written out: what the SQL says of them."""

    node: exp.Expr


def keys(node: exp.Expr) -> Any:
    """A list of keys, or a table, a SELECT, a range or a product that makes one."""
    if isinstance(node, KeysOf | exp.Subquery | exp.Anonymous):
        return KeyNode(node)
    return groups(node)


def groups(node: exp.Expr) -> Any:
    """A list of keys: single ones, or a tuple for each group."""
    if not isinstance(node, exp.Tuple | exp.Array | exp.Paren):
        raise WrongKind("a list: ('a', 'b'), or (('a', 1), ('b', 2)) for two keys")
    items = [node.this] if isinstance(node, exp.Paren) else node.expressions
    several = (exp.Tuple, exp.Array)
    return [
        tuple(map(_constant, item.expressions if isinstance(item, several) else [item]))
        for item in items
    ]


def mechanism_options(node: exp.Expr) -> dict[str, Any]:
    """(name = value, ...) of a mechanism."""
    values = {}
    for name, given in _assignments(node, "a list of parameters: (lo = 0, hi = 1000)"):
        value = _constant(given)
        finite = isinstance(value, float) and math.isfinite(value)
        values[name.lower()] = Fraction(str(value)) if finite else value
    return values


def weights(node: exp.Expr) -> dict[str, Any]:
    """(clicks = 2, selection = 1/2): parts of the budget, by the names that are published."""
    expected = "a list of columns and numbers: (clicks = 2, seconds = 1)"
    return {name: number(given) for name, given in _assignments(node, expected)}


def numbers(node: exp.Expr) -> list[Any]:
    """(2, 1, 1): a number for each, in order."""
    if not isinstance(node, exp.Tuple | exp.Array | exp.Paren):
        raise WrongKind("a list of numbers: (2, 1, 1)")
    items = [node.this] if isinstance(node, exp.Paren) else node.expressions
    return [number(each) for each in items]


def types(node: exp.Expr) -> dict[str, Any]:
    """(user_id = INT64, day = DATE): types of the source's columns, with quotes or without."""
    expected = "a list of columns and types: (user_id = INT64, day = DATE)"
    names = {}
    for name, given in _assignments(node, expected):
        if not isinstance(given, exp.Column | exp.Literal | exp.DataType) or not given.name:
            raise WrongKind(expected)
        names[name] = given.name
    return names


def _assignments(node: exp.Expr, expected: str) -> Iterator[tuple[str, exp.Expr]]:
    """Name and value of each `name = value` in a list, or of a single one."""
    items = node.expressions if isinstance(node, exp.Tuple) else [getattr(node, "this", node)]
    for item in items:
        if not isinstance(item, exp.EQ | exp.Kwarg) or not isinstance(item.this, exp.Expr):
            raise WrongKind(expected)
        yield item.this.name, item.expression


def named(value: Any) -> dict[str, Any]:
    """Names and values: a dict, or texts such as "lo=0" from the command line."""
    if isinstance(value, dict):
        return value
    values: dict[str, Any] = {}
    for item in value if isinstance(value, tuple | list) else (value,):
        name, equals, rest = str(item).partition("=")
        if not isinstance(item, str) or not equals or not name:
            raise WrongKind("names and values: {'lo': 0, 'hi': 1000}, or lo=0,hi=1000")
        try:
            values[name] = Fraction(rest)
        except (ValueError, ZeroDivisionError):
            values[name] = rest
    return values


def words(value: Any) -> str:
    """Text, given in Python."""
    if not isinstance(value, str):
        raise WrongKind("text")
    return value


def choice_of(*known: str) -> Callable[[Any], str]:
    """One of a few words."""

    def given(name: Any) -> str:
        if name not in known:
            raise WrongKind(" or ".join(map(repr, known)))
        return str(name)

    return given


def how_to_debias(name: Any) -> str | None:
    """What is made up for; 'none': nothing, as if it were not chosen."""
    given = choice_of("global", "groups", "none")(name)
    return None if given == "none" else given


def minus_one(units: Any) -> Any:
    """A threshold "more than n" for the number in "at least n + 1"."""
    if type(units) is not int:
        raise WrongKind("a whole number")
    return units - 1


_OTHER_DIALECTS = {
    "group_selection_strategy": "leave it out; groups are found by a threshold, or listed with "
    "public_groups = ('a', 'b')",
    "kappa": "write max_groups_contributed",
    "watermark": "use allowed_lateness: a watermark taken from the data depends on other rows",
}


@dataclass(frozen=True)
class Option:
    """The reader of a value in SQL, what becomes of a Python value, the parameter it sets.

    An option has the name of its parameter of `Query`, unless `sets` names another one.
    """

    read: Callable[[Any], Any]
    given: Callable[[Any], Any] = lambda value: value
    sets: str = ""


OPTIONS = {
    "epsilon": Option(number),
    "delta": Option(number),
    "privacy_unit_column": Option(column),
    "privacy_unit_period": Option(period),
    "max_groups_contributed": Option(integer_or_auto),
    "max_rows_per_group": Option(integer_or_auto),
    "max_rows_contributed": Option(integer),
    "max_values_per_group": Option(integer),
    "column_types": Option(types, named),
    "max_key_bytes": Option(integer),
    "public_groups": Option(keys),
    "strategy": Option(text, choice_of("latched", "sqlp")),
    "weights": Option(weights, named),
    "grouping_set_weights": Option(numbers),
    "confidence": Option(lambda node: float(number(node))),
    "debias": Option(text, how_to_debias),
    "report_bias": Option(flag),
    "max_dropped_rows": Option(integer),
    "min_change": Option(lambda node: float(number(node))),
    "nonnegative": Option(flag),
    "remember_keys": Option(flag_or_integer),
    "correlated_noise": Option(flag),
    "weighted_keys": Option(flag),
    "pre_threshold": Option(integer),
    "min_privacy_units_per_group": Option(integer, minus_one, sets="pre_threshold"),
    "time_column": Option(column),
    "time_unit": Option(text),
    "time_origin": Option(instant),
    "time_zone": Option(text),
    "arrival_column": Option(column),
    "allowed_lateness": Option(interval),
    "start": Option(instant),
    "end": Option(instant),
    "privacy_unit": Option(text, words),
    "w": Option(integer),
    "mechanism": Option(text, words),
    "mechanism_options": Option(mechanism_options, named),
}
"""BigQuery's names where it has them; `start` and `end` of event time are public."""


def read_parameters(draft: Draft) -> None:
    """Every option is known and readable; what was given to the call goes before the text."""
    for node in draft.clause.expressions:
        if not isinstance(node, exp.EQ) or not isinstance(node.this, exp.Column):
            fix = "write privacy_unit_column = user_id"
            raise draft.refusal(node, "an option is name = value", fix)
        name, value = node.this.name.lower(), node.expression
        option = _find_option(draft, node.this, name)
        if parameter_of(name) in draft.parameters:
            raise draft.refusal(node, f"{name} is given twice", "give it once")
        try:
            draft.parameters[parameter_of(name)] = option.given(option.read(value))
        except WrongKind as wanted:
            reason = f"{name} cannot be {canonical(value)}"
            raise draft.refusal(value, reason, f"give {wanted}") from None
    for name, value in draft.overrides.items():
        option = _find_option(draft, None, name)
        try:
            draft.parameters[parameter_of(name)] = option.given(value)
        except WrongKind as wanted:
            raise draft.refusal(None, f"{name} cannot be {value!r}", f"give {wanted}") from None


def _find_option(draft: Draft, node: exp.Expr | None, name: str) -> Option:
    """The option of a name, or a refusal with the nearest one."""
    if name in OPTIONS:
        return OPTIONS[name]
    fix = _OTHER_DIALECTS.get(name) or suggestion(name, OPTIONS)
    raise draft.refusal(node, f"there is no option {name}", fix)


def parameter_of(option: str) -> str:
    """The parameter of `Query` that an option sets."""
    return OPTIONS[option].sets or option


def node_of(clause: exp.Expr, parameter: str) -> exp.Expr | None:
    """The option of the clause that gives a parameter."""
    options: list[exp.Expr] = clause.expressions
    for node in options:
        name = node.this.name.lower() if isinstance(node, exp.EQ) else ""
        if name in OPTIONS and parameter_of(name) == parameter:
            return node
    return None
