"""The options of the privacy clause: which parameter of a query each one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from dpstream.sql.compiler import nearest
from dpstream.sql.dialect import canonical
from dpstream.sql.option_values import (
    NotThat,
    column,
    flag,
    groups,
    instant,
    interval,
    named,
    number,
    one_less,
    one_of,
    parameters,
    period,
    text,
    types,
    weights,
    whole,
    words,
)
from dpstream.sql.statement import Statement

_LATER = {
    "group_selection_strategy": "leave it out; list public groups with public_groups = ('a', 'b')",
    "watermark": "use allowed_lateness: a watermark taken from the data depends on other rows",
}
_ITS_COLUMN = "privacy_unit_column = user_id"


@dataclass(frozen=True)
class Option:
    """The query's parameter, the reader of a value in SQL, and what becomes of a Python value."""

    parameter: str
    read: Callable[[Any], Any]
    given: Callable[[Any], Any] = lambda value: value


OPTIONS = {
    "epsilon": Option("epsilon", number),
    "delta": Option("delta", number),
    "privacy_unit_column": Option("unit", column),
    "privacy_unit_period": Option("period", period),
    "max_groups_contributed": Option("max_groups_contributed", whole),
    "max_rows_per_group": Option("max_rows_per_group", whole),
    "max_rows_contributed": Option("max_rows_contributed", whole),
    "column_types": Option("column_types", types, named),
    "max_key_bytes": Option("max_key_bytes", whole),
    "public_groups": Option("public_keys", groups),
    "strategy": Option("strategy", text, one_of("latched", "sqlp")),
    "weights": Option("weights", weights, named),
    "confidence": Option("confidence", lambda node: float(number(node))),
    "debias": Option("debias", text, one_of("global")),
    "debias_rows": Option("debias_rows", whole),
    "min_change": Option("min_change", lambda node: float(number(node))),
    "nonnegative": Option("nonnegative", flag),
    "pre_threshold": Option("pre_threshold", whole),
    "min_privacy_units_per_group": Option("pre_threshold", whole, one_less),
    "time_column": Option("time", column),
    "time_unit": Option("time_unit", text),
    "time_origin": Option("time_origin", instant),
    "time_zone": Option("time_zone", text),
    "arrival_column": Option("arrival", column),
    "allowed_lateness": Option("allowed_lateness", interval),
    "start": Option("start", instant),
    "end": Option("end", instant),
    "privacy_unit": Option("privacy_unit", text, words),
    "w": Option("w", whole),
    "mechanism": Option("mechanism", text, words),
    "mechanism_options": Option("mechanism_options", parameters, named),
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
