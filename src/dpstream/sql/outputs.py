"""GROUP BY: which columns are keys, and what they are called."""

from __future__ import annotations

from sqlglot import exp

from dpstream.sql.dialect import canonical
from dpstream.sql.draft import AGGREGATES, WINDOW_COLUMNS, Draft, calls
from dpstream.sql.relation import substituted


def name_keys(draft: Draft) -> None:
    """The keys, under their aliases; GROUP BY takes columns, expressions, aliases and numbers."""
    group = draft.select.args.get("group")
    listed = [] if group is None else group.expressions
    for node in listed:
        item = _selected(draft, node)
        if is_window_column(draft, item):
            draft.windowed = True
            continue
        plain = item.this if isinstance(item, exp.Alias) else item
        for call in calls(plain, AGGREGATES):
            raise draft.refusal(
                call, "an aggregate cannot be a key", "group by columns and expressions of rows"
            )
        if isinstance(plain, exp.Literal | exp.Null | exp.Boolean):
            raise draft.refusal(node, "a constant is no key", "group by columns")
        expression = substituted(draft, plain, draft.relation)
        name = _alias_of(draft, plain) or _own_name(plain)
        if name in draft.keys:
            raise draft.refusal(node, f"the key {name} is listed twice", "list it once")
        draft.keys[name] = expression


def _selected(draft: Draft, node: exp.Expr) -> exp.Expr:
    """What an alias or a number in GROUP BY stands for."""
    chosen = draft.select.expressions
    if isinstance(node, exp.Literal) and not node.is_string:
        at = int(node.name) if node.name.isdigit() else 0
        if not 1 <= at <= len(chosen):
            raise draft.refusal(node, f"there is no column {node.name}", "count from 1")
        found: exp.Expr = chosen[at - 1]
        return found
    if isinstance(node, exp.Column) and not node.args.get("table"):
        for item in chosen:
            if isinstance(item, exp.Alias) and item.alias == node.name:
                return item
    return node


def _alias_of(draft: Draft, plain: exp.Expr) -> str:
    """The alias under which SELECT shows the same expression."""
    for item in draft.select.expressions:
        if isinstance(item, exp.Alias) and canonical(item.this) == canonical(plain):
            return str(item.alias)
    return ""


def _own_name(plain: exp.Expr) -> str:
    return plain.name if isinstance(plain, exp.Column) else canonical(plain)


def is_window_column(draft: Draft, node: exp.Expr) -> bool:
    """Is this window_start or window_end, of a query that has windows?"""
    plain = node.this if isinstance(node, exp.Alias) else node
    named = isinstance(plain, exp.Column) and plain.name in WINDOW_COLUMNS
    if not named:
        return False
    if draft.relation.window is None:
        raise draft.refusal(
            node,
            f"there is no {plain.name}: FROM has no window",
            "write FROM TUMBLE(table, DESCRIPTOR(time), INTERVAL '1' DAY)",
        )
    if isinstance(node, exp.Alias) and node.alias != plain.name:
        raise draft.refusal(
            node, f"{plain.name} keeps its name in what is published", "leave the alias out"
        )
    return True


def unit_stays_hidden(draft: Draft) -> None:
    """Nothing made of the unit is a key: each group would be one unit."""
    unit = draft.parameters["unit"]
    for item in draft.select.expressions:
        if isinstance(item, exp.Column) and item.name == unit and unit not in draft.keys:
            raise draft.refusal(
                item,
                f"{unit} is the privacy unit: it is never published",
                "leave it out; COUNT(DISTINCT unit) counts units",
            )
    for name, expression in draft.keys.items():
        for column in expression.find_all(exp.Column):
            if column.name == unit:
                raise draft.refusal(
                    expression,
                    f"the key {name} is made of the privacy unit {unit}: groups would show units",
                    "group by other columns; COUNT(DISTINCT unit) counts units",
                )


def windows_are_grouped(draft: Draft) -> None:
    """With TUMBLE each window is a group of its own."""
    if draft.relation.window is not None and not draft.windowed:
        raise draft.refusal(
            draft.relation.window,
            "windows are not grouped by",
            "add window_start to GROUP BY, or read the table without TUMBLE",
        )
