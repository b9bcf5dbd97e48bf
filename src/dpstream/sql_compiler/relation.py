"""FROM: subqueries and common tables that only project and filter are written into one."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from dpstream.sql_compiler.dialect import WINDOWS, WindowTable, canonical
from dpstream.sql_compiler.draft import AGGREGATES, Draft, Relation, find_calls, present_args
from dpstream.sql_compiler.statement import closest_word

_ATOMS = (exp.Column, exp.Literal, exp.Anonymous, exp.Paren, exp.Cast, exp.Null, exp.Boolean)
_MIXES = "inside FROM it would mix the rows of several units before they are bounded"


def inline_subqueries(draft: Draft) -> None:
    """Find the one table behind FROM, its filters and the expressions of its columns."""
    select = draft.select
    source = select.args.get("from_")
    if source is None:
        raise draft.refusal(select.expressions[0], "there is no FROM", "name a table: FROM clicks")
    tables: dict[str, Relation] = {}
    with_ = select.args.get("with_")
    if with_ is not None:
        if with_.args.get("recursive"):
            raise draft.refusal(with_, "WITH RECURSIVE mixes rows", "use WITH name AS (SELECT ...)")
        for common in with_.expressions:
            tables[common.alias] = _inner(draft, common.this, tables)
    relation = _relation(draft, source.this, tables)
    where = select.args.get("where")
    if where is not None:
        relation.where.append(substitute(draft, where.this, relation))
    draft.relation = relation


def _relation(draft: Draft, node: exp.Expr, tables: dict[str, Relation]) -> Relation:
    if isinstance(node, exp.Table) and isinstance(node.this, WindowTable):
        found = _windowed(draft, node.this, tables)
    elif isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
        if present_args(node) - {"this", "alias"}:
            raise draft.refusal(
                node, f"{canonical(node)} is more than a table's name", "name a table: FROM clicks"
            )
        found = _copy(tables.get(node.name) or Relation(table=node.name))
        found.names = {node.name}
    elif isinstance(node, exp.Subquery) and not present_args(node) - {"this", "alias"}:
        found = _inner(draft, node.this, tables)
    else:
        meant = closest_word(node.this.name if isinstance(node, exp.Table) else "", WINDOWS)
        raise draft.refusal(
            node,
            f"{canonical(node)} is no table",
            f"did you mean {meant}?"
            if meant
            else "name a table, TUMBLE(table, DESCRIPTOR(time), INTERVAL ...), or a subquery",
        )
    alias = node.args.get("alias")
    if alias is not None:
        if alias.args.get("columns"):
            raise draft.refusal(alias, "columns cannot be renamed here", "use SELECT x AS y")
        found.names = {alias.name}
    return found


def _copy(relation: Relation) -> Relation:
    return replace(relation, columns=dict(relation.columns), where=list(relation.where))


def _windowed(draft: Draft, window: WindowTable, tables: dict[str, Relation]) -> Relation:
    if not isinstance(window.this, exp.Expr):
        raise draft.refusal(
            window,
            "the window has no table",
            "write TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY)",
        )
    found = _relation(draft, window.this, tables)
    if found.window is not None:
        raise draft.refusal(window, "a window of windows", "use one window")
    found.window = window
    return found


def _inner(draft: Draft, select: exp.Expr, tables: dict[str, Relation]) -> Relation:
    """A SELECT that projects and filters, as a relation."""
    if not isinstance(select, exp.Select):
        raise draft.refusal(
            select, f"{type(select).__name__.upper()} is refused: {_MIXES}", "read one table"
        )
    _refuse_mixing(draft, select)
    source = select.args.get("from_")
    if source is None:
        raise draft.refusal(select, "the subquery has no FROM", "name a table: FROM clicks")
    found = _relation(draft, source.this, tables)
    if found.window is not None:
        raise draft.refusal(
            found.window,
            "the window stands inside a subquery",
            "put it around: TUMBLE((SELECT ...), ...)",
        )
    where = select.args.get("where")
    if where is not None:
        found.where.append(substitute(draft, where.this, found))
    columns, every = _projected(draft, select, found)
    found.columns, found.open = columns, every and found.open
    found.names = set()
    return found


def _refuse_mixing(draft: Draft, select: exp.Select) -> None:
    for name in present_args(select) - {"expressions", "from_", "where"}:
        value = select.args[name]
        node = value[0] if isinstance(value, list) else value
        words = {"hint": "WITH DIFFERENTIAL_PRIVACY", "from_": "FROM", "with_": "WITH"}
        shown = words.get(name, name.rstrip("_").upper())
        raise draft.refusal(
            node if isinstance(node, exp.Expr) else select,
            f"{shown} is refused: {_MIXES}",
            "keep only columns and WHERE there, and aggregate outside",
        )
    for call in find_calls(select, AGGREGATES):
        raise draft.refusal(
            call, f"an aggregate is refused: {_MIXES}", "aggregate in the outer SELECT alone"
        )


def _projected(
    draft: Draft, select: exp.Select, inside: Relation
) -> tuple[dict[str, exp.Expr], bool]:
    """The columns that are named, and whether all others come along (*)."""
    found: dict[str, exp.Expr] = {}
    every = any(
        isinstance(node, exp.Star) and not present_args(node) for node in select.expressions
    )
    for node in select.expressions:
        if isinstance(node, exp.Star) and not present_args(node):
            continue
        plain = node.this if isinstance(node, exp.Alias) else node
        name = node.alias_or_name if isinstance(node, exp.Alias | exp.Column) else ""
        if not name or isinstance(plain, exp.Star) or isinstance(plain.this, exp.Star):
            raise draft.refusal(
                node, "a column of a subquery needs a name", "write it as x AS name"
            )
        if name in found:
            raise draft.refusal(node, f"two columns are named {name}", "rename one of them")
        found[name] = substitute(draft, plain, inside)
    return {**inside.columns, **found} if every else found, every


def substitute(draft: Draft, node: exp.Expr, relation: Relation) -> exp.Expr:
    """An expression in terms of the source's columns."""

    def replaced(part: exp.Expr) -> exp.Expr:
        if not isinstance(part, exp.Column):
            return part
        qualifier = part.args.get("table")
        if present_args(part) - {"this", "table"} or not isinstance(part.this, exp.Identifier):
            raise draft.refusal(part, f"{canonical(part)} is no column", "name a column")
        if qualifier is not None and qualifier.name not in relation.names:
            names = ", ".join(sorted(relation.names)) or "no table"
            raise draft.refusal(
                part, f"there is no table {qualifier.name} here, only {names}", "leave it out"
            )
        if part.name not in relation.columns and relation.open:
            return exp.Column(this=part.this.copy())
        if part.name not in relation.columns:
            raise draft.refusal(
                part,
                f"the subquery has no column {part.name}",
                f"it has {', '.join(relation.columns)}",
            )
        found = relation.columns[part.name].copy()
        return found if isinstance(found, _ATOMS) else exp.Paren(this=found)

    return node.transform(replaced)
