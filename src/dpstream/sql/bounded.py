"""Every aggregate is one whose change by one unit is known."""

from __future__ import annotations

from sqlglot import exp

from dpstream.sql.dialect import canonical
from dpstream.sql.draft import BOUNDED, Draft, called, parts
from dpstream.sql.relation import substituted

_BOUNDS = "contribution_bounds_per_row"


def bounded_aggregates(draft: Draft) -> None:
    """Every aggregate is one whose change by one unit is known."""
    for call in draft.aggregates.values():
        arguments = [each for each in call.expressions if not isinstance(each, exp.Kwarg)]
        if len(arguments) != 1:
            raise draft.refusal(
                call, f"{called(call)} takes one column", f"write {called(call)}(column)"
            )
        named = named_arguments(call)
        known = {_BOUNDS, "quantum"} if called(call) in BOUNDED else set()
        for name in named:
            if name not in known:
                raise draft.refusal(
                    call,
                    f"{called(call)} has no argument {name}",
                    f"known are {', '.join(sorted(known))}" if known else "leave it out",
                )
        if isinstance(arguments[0], exp.Distinct):
            _counts_units(draft, call, arguments[0])
        elif called(call) in BOUNDED and not _pair(named.get(_BOUNDS)):
            raise draft.refusal(
                call,
                f"{called(call)} has no bounds: one row could change it by any amount",
                f"write {called(call)}({canonical(arguments[0])}, {_BOUNDS} => (0, 600)), with "
                "bounds that do not come from the data",
            )
        elif isinstance(arguments[0], exp.Star) and called(call) != "COUNT":
            raise draft.refusal(call, f"{called(call)}(*) has no meaning", "name a column")


def _pair(node: exp.Expr | None) -> bool:
    return isinstance(node, exp.Tuple) and len(node.expressions) == 2


def _counts_units(draft: Draft, call: exp.Expr, distinct: exp.Expr) -> None:
    column = distinct.expressions[0] if len(distinct.expressions) == 1 else None
    found = None
    if (
        called(call) == "COUNT"
        and isinstance(column, exp.Column)
        and not parts(distinct) - {"expressions"}
    ):
        found = substituted(draft, column, draft.relation)
    if not isinstance(found, exp.Column) or found.name != draft.parameters["unit"]:
        raise draft.refusal(
            call,
            "only the privacy unit can be counted DISTINCT: other values are shared by units, and "
            "the change by one unit is not known",
            f"write COUNT(DISTINCT {draft.parameters['unit']}), or group by the column",
        )


def named_arguments(call: exp.Expr) -> dict[str, exp.Expr]:
    """Name => value arguments of a call."""
    return {
        each.this.name.lower(): each.expression
        for each in call.expressions
        if isinstance(each, exp.Kwarg)
    }
