"""FROM and EMIT: the table behind subqueries, its window function, and when it publishes.

Subqueries and common tables may only project and filter, so they are written into one relation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.windows import Cumulate, Hop, Tumble
from dpstream.sql_compiler.join_clause import add_join, joined_column
from dpstream.sql_compiler.privacy_clause import WrongKind, interval
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    USER_TABLES,
    WINDOWS,
    Draft,
    Item,
    Relation,
    UnitSelect,
    UserTable,
    WindowTable,
    call_name,
    canonical,
    closest_word,
    find_calls,
    other_clauses,
    present_args,
)
from dpstream.sql_compiler.table_subqueries import add_table_subqueries
from dpstream.sql_compiler.unit_subquery import require_own_windows, unit_relation
from dpstream.sql_compiler.unnest import add_unnest, is_unnest
from dpstream.sql_compiler.user_tables import user_relation

_ATOMS = (exp.Column, Item, exp.Literal, exp.Anonymous, exp.Paren, exp.Cast, exp.Null, exp.Boolean)
_MIXES = "inside FROM it would mix the rows of several units before they are bounded"


def inline_subqueries(draft: Draft) -> None:
    """Find the one table behind FROM, its filters and the expressions of its columns."""
    select = draft.select
    if select.args.get("from_") is None:
        raise draft.refusal(select.expressions[0], "there is no FROM", "name a table: FROM clicks")
    tables: dict[str, Relation] = {}
    with_ = select.args.get("with_")
    if with_ is not None:
        if with_.args.get("recursive"):
            raise draft.refusal(with_, "WITH RECURSIVE mixes rows", "use WITH name AS (SELECT ...)")
        for common in with_.expressions:
            tables[common.alias] = _subquery(draft, common.this, tables)
    draft.relation = _from_and_where(draft, select, tables)
    if draft.relation.unit is not None:
        require_own_windows(draft)


def _from_and_where(draft: Draft, select: exp.Expr, tables: dict[str, Relation]) -> Relation:
    relation = _relation(draft, select.args["from_"].this, tables)
    for join in select.args.get("joins") or ():
        if relation.unit is not None:
            raise draft.refusal(
                join,
                "what a subquery per unit gives is not joined",
                "compute what you need in the subquery, or join in the database of the releases",
            )
        if is_unnest(join):
            add_unnest(draft, relation, join, substitute)
            continue
        right = _relation(draft, join.this, tables)
        if right.unit is not None:
            reason = "a join to what a subquery per unit gives lets units meet"
            raise draft.refusal(join, reason, "join public tables and registries")
        add_join(draft, relation, join, right, substitute)

    def read(inner: exp.Expr) -> Relation:
        return _subquery(draft, inner, tables)

    add_table_subqueries(draft, relation, select, read, substitute)
    where = select.args.get("where")
    if where is not None:
        relation.where.append(substitute(draft, where.this, relation))
    return relation


def _relation(draft: Draft, node: exp.Expr, tables: dict[str, Relation]) -> Relation:
    """A table, a window function of one, FUNNEL or RETENTION of one, or a subquery."""
    if isinstance(node, exp.Table) and isinstance(node.this, WindowTable):
        window = node.this
        if not isinstance(window.this, exp.Expr):
            raise draft.refusal(window, "the window has no table", _example("TUMBLE"))
        relation = _relation(draft, window.this, tables)
        if isinstance(window, UserTable):
            relation = user_relation(draft, window, relation, substitute)
        elif relation.window is not None:
            raise draft.refusal(window, "a window of windows", "use one window")
        else:
            relation.window = window
    elif isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
        if present_args(node) - {"this", "alias", "db", "catalog"}:
            if node.args.get("sample"):
                reason = "TABLESAMPLE draws rows at random, outside of the ledger"
                raise draft.refusal(node, reason, "leave it out")
            raise draft.refusal(
                node, f"{canonical(node)} is more than a table's name", "name a table: FROM clicks"
            )
        table = tables.get(node.name) or Relation(table=node.name)
        relation = replace(
            table,
            columns=dict(table.columns),
            where=list(table.where),
            unnests=list(table.unnests),
            joins=list(table.joins),
            names={node.name},
        )
    elif isinstance(node, exp.Subquery) and not present_args(node) - {"this", "alias"}:
        relation = _subquery(draft, node.this, tables)
    else:
        meant = closest_word(
            node.this.name if isinstance(node, exp.Table) else "", (*WINDOWS, *USER_TABLES)
        )
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
        relation.names = {alias.name}
    return relation


def _subquery(draft: Draft, select: exp.Expr, tables: dict[str, Relation]) -> Relation:
    """A SELECT that projects and filters, or groups the rows of each unit, as a relation."""
    if isinstance(select, UnitSelect):
        whole = draft.unit_selects[select.args["number"]]
        return unit_relation(draft, whole, _from_and_where(draft, whole, tables), substitute)
    if isinstance(select, exp.Union) and not select.args.get("distinct"):
        return _union(draft, select, tables)
    if not isinstance(select, exp.Select):
        raise draft.refusal(
            select, f"{type(select).__name__.upper()} is refused: {_MIXES}", "read one table"
        )
    for name, node in other_clauses(select, {"expressions", "from_", "joins", "where"}):
        shown = "WITH DIFFERENTIAL_PRIVACY" if name == "HINT" else name
        fix = "keep only columns and WHERE there, and aggregate outside"
        raise draft.refusal(node, f"{shown} is refused: {_MIXES}", fix)
    for call in find_calls(select, AGGREGATES):
        raise draft.refusal(
            call, f"an aggregate is refused: {_MIXES}", "aggregate in the outer SELECT alone"
        )
    if select.args.get("from_") is None:
        raise draft.refusal(select, "the subquery has no FROM", "name a table: FROM clicks")
    relation = _from_and_where(draft, select, tables)
    if relation.window is not None:
        raise draft.refusal(
            relation.window,
            "the window stands inside a subquery",
            "put it around: TUMBLE((SELECT ...), ...)",
        )
    columns: dict[str, exp.Expr] = {}
    star, without = False, set[str]()  # a * takes all other columns along
    for node in select.expressions:
        if isinstance(node, exp.Star) and not present_args(node) - {"except_", "replace"}:
            star = True
            for each in node.args.get("except_") or ():
                if not isinstance(each, exp.Column):
                    raise draft.refusal(node, "EXCEPT takes columns", "write * EXCEPT (a, b)")
                without.add(each.name)
            for each in node.args.get("replace") or ():
                if not isinstance(each, exp.Alias):
                    fix = "write * REPLACE (LOWER(a) AS a)"
                    raise draft.refusal(node, "REPLACE takes expressions with names", fix)
                columns[each.alias] = substitute(draft, each.this, relation)
            continue
        expression = node.unalias()
        name = node.alias_or_name if isinstance(node, exp.Alias | exp.Column) else ""
        if not name or isinstance(expression, exp.Star) or isinstance(expression.this, exp.Star):
            raise draft.refusal(
                node, "a column of a subquery needs a name", "write it as x AS name"
            )
        if name in columns:
            raise draft.refusal(node, f"two columns are named {name}", "rename one of them")
        columns[name] = substitute(draft, expression, relation)
    return replace(
        relation,
        columns={**_without(relation.columns, without), **columns} if star else columns,
        open=star and relation.open,
        without=(relation.without | without) - set(columns) if star else set(),
        names=set(),
    )


def _without(columns: dict[str, exp.Expr], names: set[str]) -> dict[str, exp.Expr]:
    return {name: node for name, node in columns.items() if name not in names}


def _union(draft: Draft, node: exp.Expr, tables: dict[str, Relation]) -> Relation:
    """Rows of several tables with equal columns, as one relation."""
    for name, part in other_clauses(node, {"this", "expression"}):
        if name not in ("DISTINCT", "SIDE", "KIND"):
            raise draft.refusal(part, f"{name} is refused: {_MIXES}", "keep columns and WHERE")
    branches: list[Relation] = []
    for part in (node.this, node.expression):
        inner = part.unnest()
        relation = _subquery(draft, inner, tables)
        if relation.unit is not None:
            reason = "a branch of UNION ALL groups the rows of each unit"
            raise draft.refusal(part, reason, "run a query for each branch")
        if relation.joins or relation.unnests:
            reason = "a branch of UNION ALL joins tables or lists"
            outside = "FROM (... UNION ALL ...) AS u JOIN pages USING (page), UNNEST(u.tags) AS tag"
            raise draft.refusal(part, reason, f"write them outside of it: {outside}")
        if relation.without:
            raise draft.refusal(part, "EXCEPT is not known in UNION ALL", "name the columns")
        branches += relation.union or [relation]
    first = branches[0]
    for branch in branches:
        plain = branch.open and not branch.columns
        if list(branch.columns) != list(first.columns) or (branch.open and not plain):
            raise draft.refusal(
                node,
                "the branches of UNION ALL must have the same columns, in one order; got "
                f"{_columns_in_words(first)}, and {_columns_in_words(branch)}",
                "name the same columns in each, with AS, or select * in each",
            )
        for parameter in ("privacy_unit_column", "time_column", "arrival_column"):
            column = branch.columns.get(str(draft.parameters.get(parameter)))
            if column is not None and not isinstance(column, exp.Column):
                raise draft.refusal(
                    column,
                    f"{draft.parameters[parameter]} must be a column of each source; it is "
                    f"{canonical(column)}",
                    "name the column itself",
                )
    names = dict.fromkeys(branch.table for branch in branches)
    columns: dict[str, exp.Expr] = {
        name: exp.Column(this=exp.to_identifier(name, quoted=True)) for name in first.columns
    }
    return Relation(table="+".join(names), columns=columns, open=first.open, union=branches)


def _columns_in_words(relation: Relation) -> str:
    return ", ".join([*(["*"] if relation.open else []), *relation.columns])


def select_of_table(draft: Draft, select: exp.Expr) -> Relation:
    """A SELECT over one table that is read whole, as a relation."""
    relation = _subquery(draft, select, {})
    if relation.joins or relation.unnests or relation.union:
        raise draft.refusal(select, "it reads more than a table", "select from one table")
    return relation


def substitute(draft: Draft, node: exp.Expr, relation: Relation) -> exp.Expr:
    """Write an expression in terms of the source's columns."""

    def replace_column(part: exp.Expr) -> exp.Expr:
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
        joined = joined_column(draft, part, relation) if relation.joins else None
        if joined is not None:
            return joined
        if part.name in relation.columns:
            expression = relation.columns[part.name].copy()
            return expression if isinstance(expression, _ATOMS) else exp.Paren(this=expression)
        beside = any(join.alias in relation.names for join in relation.joins)
        if (relation.open and part.name not in relation.without) or beside:
            return exp.Column(this=part.this.copy())
        raise draft.refusal(
            part,
            f"the subquery has no column {part.name}",
            "take it out of EXCEPT"
            if part.name in relation.without
            else f"it has {', '.join(relation.columns)}",
        )

    return node.transform(replace_column)


_WINDOW_LENGTHS: dict[str, tuple[type[Tumble], tuple[str, ...]]] = {
    "TUMBLE": (Tumble, ("size",)),
    "HOP": (Hop, ("slide", "size")),
    "CUMULATE": (Cumulate, ("step", "size")),
}
"""What a window function makes, and the lengths it takes after its table and time column."""


def _example(kind: str) -> str:
    names = _WINDOW_LENGTHS[kind][1]
    lengths = (f"INTERVAL '1' {'DAY' if name == 'size' else 'HOUR'}" for name in names)
    return f"write {kind}(clicks, DESCRIPTOR(ts), {', '.join(lengths)})"


def read_window(draft: Draft) -> None:
    """Read the lengths and the time column of TUMBLE, HOP or CUMULATE."""
    window = draft.relation.window
    if window is None:
        return
    time, sizes, kind = window.args.get("time"), window.expressions, window.args["kind"]
    if isinstance(time, exp.Anonymous) and call_name(time) == "DESCRIPTOR":
        time = time.expressions[0] if len(time.expressions) == 1 else None
    window_type, names = _WINDOW_LENGTHS[kind]
    if not isinstance(time, exp.Column) or len(sizes) != len(names):
        takes = " and ".join(f"a {name}" for name in names)
        raise draft.refusal(
            window, f"{kind} takes a table, the time column and {takes}", _example(kind)
        )
    if draft.parameters.setdefault("time_column", time.name) != time.name:
        raise draft.refusal(window, "two time columns are named", "leave time_column out")
    lengths = [_window_length(draft, kind, size) for size in sizes]
    try:
        draft.parameters["window"] = window_type(**dict(zip(names, lengths, strict=True)))
    except InvalidParameter as error:
        raise draft.refusal(window, str(error), _example(kind)) from None


def _window_length(draft: Draft, kind: str, size: exp.Expr) -> Any:
    try:
        length = interval(size, calendar=True)
    except WrongKind as wanted:
        raise draft.refusal(size, f"{kind} cannot use this interval", f"write {wanted}") from None
    if not length:
        raise draft.refusal(size, f"{kind} needs an interval longer than 0", "make it longer")
    return length


def read_emit(draft: Draft) -> None:
    """Read how often EMIT publishes each window."""
    emit = draft.select.args.get("emit")
    if emit is None:
        return
    if "time_column" not in draft.parameters:
        raise draft.refusal(
            emit,
            "EMIT needs event times",
            "write FROM TUMBLE(...), or add time_column, start and end to OPTIONS",
        )
    every = emit.args.get("every")
    if every is not None:
        try:
            draft.parameters["every"] = interval(every, calendar=True)
        except WrongKind as wanted:
            raise draft.refusal(every, "EMIT EVERY cannot use this interval", f"{wanted}") from None


def require_unit_period(draft: Draft) -> None:
    """Over endless windows the query says for how long a user is one unit."""
    parameters = draft.parameters
    endless = "time_column" in parameters and parameters.get("end") is None and not draft.series
    if endless and "privacy_unit_period" not in parameters:
        raise draft.refusal(
            draft.relation.window or draft.clause,
            "the windows have no end, and it is not said for how long a user is one unit",
            "add privacy_unit_period = INTERVAL '1' DAY (bounds and budget renew daily), or "
            "'forever' (they hold for all time), or start and end, which a query over files needs "
            "in any case",
        )
