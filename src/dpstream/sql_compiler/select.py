"""GROUP BY: which columns are keys, and what they are called."""

from __future__ import annotations

from sqlglot import exp

from dpstream.sql_compiler.dialect import canonical
from dpstream.sql_compiler.draft import (
    AGGREGATES,
    SHOWN_ALWAYS,
    WINDOW_COLUMNS,
    Draft,
    called,
    calls,
)
from dpstream.sql_compiler.relation import substitute


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
        expression = substitute(draft, plain, draft.relation)
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
    unit = draft.parameters["privacy_unit_column"]
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


# SELECT: which columns are aggregates, which are computed from them, and what they are called.


def name_aggregates(draft: Draft) -> None:
    """The aggregates, under their aliases; any other column is a key, or made of both."""
    keys = {canonical(expression): name for name, expression in draft.keys.items()}
    later: list[exp.Expr] = []
    for item in draft.select.expressions:
        plain = item.this if isinstance(item, exp.Alias) else item
        if is_window_column(draft, item):
            if not draft.windowed:
                raise _raw(draft, item)
            _output(draft, item, plain.name)
        elif called(plain) in AGGREGATES:
            name = item.alias if isinstance(item, exp.Alias) else _default_name(draft, plain)
            if name in draft.keys:
                raise draft.refusal(item, f"two columns are named {name}", "name one with AS")
            _output(draft, item, name)
            draft.aggregates[name] = plain
        else:
            found = keys.get(canonical(substitute(draft, plain, draft.relation)))
            _output(draft, item, found or _computed_name(draft, item))
            later += [] if found else [item]
    for item in later:
        if {f"{item.alias}_stddev", item.alias.removesuffix("_stddev")} & {*draft.outputs} - {
            item.alias
        }:
            raise draft.refusal(item, f"{item.alias} would be taken for an error bar", "rename it")
        draft.computed[item.alias] = _of_published(draft, item.this, keys)
    if not draft.aggregates:
        raise draft.refusal(
            draft.clause, "nothing is aggregated", "add COUNT(*), or another aggregate"
        )


def _output(draft: Draft, item: exp.Expr, name: str) -> None:
    if name in draft.outputs:
        raise draft.refusal(item, f"two columns are named {name}", "name one with AS")
    draft.outputs.append(name)


def _computed_name(draft: Draft, item: exp.Expr) -> str:
    """Of a column that is neither a key nor an aggregate, but may be made of them."""
    plain = item.this if isinstance(item, exp.Alias) else item
    if isinstance(plain, exp.Column):
        raise _raw(draft, item)
    if not isinstance(item, exp.Alias):
        for column in [] if any(calls(plain, AGGREGATES)) else plain.find_all(exp.Column):
            if not _is_key(draft, column):
                raise _raw(draft, item)
        raise draft.refusal(
            item, "a computed column needs a name", f"write {canonical(plain)} AS x"
        )
    name = str(item.alias)
    taken = {f"{each}_stddev" for each in [*draft.outputs, *draft.aggregates]}
    if name in {*draft.keys, *WINDOW_COLUMNS, *SHOWN_ALWAYS, "held"} | taken:
        raise draft.refusal(item, f"two columns are named {name}", "name one with another AS")
    return name


def _is_key(draft: Draft, part: exp.Expr) -> bool:
    texts = {canonical(expression) for expression in draft.keys.values()}
    return canonical(substitute(draft, part, draft.relation)) in texts


def _of_published(draft: Draft, node: exp.Expr, keys: dict[str, str]) -> exp.Expr:
    """An expression in terms of published columns: keys, windows and (noisy) aggregates."""

    def replaced(part: exp.Expr) -> exp.Expr:
        if called(part) in AGGREGATES:
            return exp.column(_aggregate_named(draft, part), quoted=True)
        if isinstance(part, exp.Identifier | exp.Literal):
            return part
        if draft.windowed and isinstance(part, exp.Column) and part.name in WINDOW_COLUMNS:
            return exp.column(part.name, quoted=True)
        if part.find(exp.Anonymous, exp.Column) and not any(calls(part, AGGREGATES)):
            name = keys.get(canonical(substitute(draft, part, draft.relation)))
            if name is not None:
                return exp.column(name, quoted=True)
        if isinstance(part, exp.Column):
            raise _raw(draft, part)
        return part

    return node.transform(replaced)


def _aggregate_named(draft: Draft, call: exp.Expr) -> str:
    """The name under which an aggregate is published; one that is not shown has one too."""
    text = canonical(call)
    for name, known in draft.aggregates.items():
        if canonical(known) == text:
            return name
    name = text
    while name in {*draft.outputs, *draft.keys}:
        name += "'"
    draft.aggregates[name] = call
    draft.hidden.add(name)
    return name


def _raw(draft: Draft, item: exp.Expr) -> Exception:
    shown = canonical(item.this if isinstance(item, exp.Alias) else item)
    return draft.refusal(
        item,
        f"{shown} is neither grouped by nor aggregated: it would publish values of rows",
        f"add GROUP BY {shown}, or aggregate it",
    )


def _default_name(draft: Draft, call: exp.Expr) -> str:
    """count, units, sum_x, avg_x, variance_x."""
    argument = call.expressions[0] if call.expressions else None
    if isinstance(argument, exp.Star):
        return "count"
    if isinstance(argument, exp.Distinct):
        return "units"
    if isinstance(argument, exp.Column):
        return f"{called(call).lower()}_{argument.name}"
    raise draft.refusal(call, "the aggregate has no name", f"write {canonical(call)} AS name")
