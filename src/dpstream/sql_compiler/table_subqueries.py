"""Subqueries in expressions: x IN (SELECT page FROM pages), (SELECT MAX(price) FROM pages).

They read one table that everybody may know, and look a value up beside each row of the stream: no
row is dropped or repeated. What they find out depends on that row and on the table, as a join does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import validate
from dpstream.sql_compiler.join_clause import JoinClause, Substitute
from dpstream.sql_compiler.statement import (
    Draft,
    Item,
    PrivacyClause,
    Relation,
    TableSubquery,
    UserTable,
    WindowTable,
    call_name,
    canonical,
    present_args,
)

VALUE = "value"
"""The column that a subquery selects of its table, and the one that it puts beside each row."""
FIGURES = ("MAX", "MIN", "SUM", "AVG", "COUNT")
"""What a subquery of one value may make of the rows of its table."""
_HOMES = (exp.From, exp.Join, exp.Lateral, exp.SetOperation, exp.CTE, UserTable, WindowTable)
_OF_ROWS = ("expressions", "where", "group")
_IN = "write page IN (SELECT page FROM pages WHERE ...), over a public table"
_ONE = (
    "write (SELECT MAX(price) FROM pages WHERE ...) or (SELECT price FROM prices WHERE id = 7), "
    "over a public table"
)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A subquery that was taken out of an expression: what is wanted of the table's rows.

    `figure`: MAX and the like, "" for the value of its only row; of `x IN (...)` it is "IN".
    """

    select: exp.Expr
    figure: str
    distinct: bool = False


def detach_table_subqueries(draft: Draft) -> None:
    """Take subqueries out of expressions: they have rules of their own."""
    known: dict[str, int] = {}
    for node in list(draft.select.find_all(exp.Select, exp.SetOperation)):
        if node is draft.select or node.root() is not draft.select:
            continue
        home = node.parent
        if isinstance(home, exp.Subquery):
            home = home.parent
        if isinstance(home, _HOMES) or node.find_ancestor(PrivacyClause) is not None:
            continue
        whole = home if isinstance(home, exp.In | exp.Exists) else node.parent
        if not isinstance(whole, exp.In | exp.Subquery):
            reason = f"{canonical(whole or node)} mixes the rows of several units"
            raise draft.refusal(node, reason, _IN)
        if _clause_of(whole) not in _OF_ROWS:
            raise draft.refusal(
                node,
                "a subquery in an expression looks at rows, in SELECT, WHERE and GROUP BY",
                "give the value as a parameter: HAVING n > @least",
            )
        lookup = _lookup(draft, node, inside=isinstance(whole, exp.In))
        left = whole.this if isinstance(whole, exp.In) else None
        text = f"{'' if left is None else canonical(left)} {canonical(node)}"
        number = known.setdefault(text, len(draft.lookups))
        if number == len(draft.lookups):
            draft.lookups.append(lookup)
        place = TableSubquery(this=left, number=number)
        whole.replace(place.update_positions(_first_word(node)))


def _clause_of(node: exp.Expr) -> str:
    """The clause of its SELECT in which an expression stands."""
    while node.parent is not None and not isinstance(node.parent, exp.Select):
        node = node.parent
    return node.arg_key or ""


def _first_word(node: exp.Expr) -> exp.Expr:
    return next((part for part in node.walk() if "start" in part.meta), node)


def _lookup(draft: Draft, select: exp.Expr, *, inside: bool) -> Lookup:
    """What a subquery wants of its table; its SELECT is left with one column, or none to count."""
    advice = _IN if inside else _ONE
    if not isinstance(select, exp.Select):
        raise draft.refusal(select, "a subquery in an expression reads one table", advice)
    allowed = {"expressions", "from_", "where"} | ({"distinct"} if inside else set())
    for name in sorted(present_args(select) - allowed):
        reason = f"{name.rstrip('_').upper()} is not known in a subquery of an expression"
        raise draft.refusal(select, reason, advice)
    if select.args.get("from_") is None:
        raise draft.refusal(select, "the subquery has no FROM", advice)
    if any(each is not select for each in select.find_all(exp.Select)):
        raise draft.refusal(select, "a subquery within a subquery of an expression", advice)
    statement = replace(draft.statement, tree=select)
    validate.refuse_unsafe_calls(replace(draft, statement=statement))
    if len(select.expressions) != 1:
        reason = f"the subquery selects {len(select.expressions)} columns, and one is compared"
        raise draft.refusal(select, reason, advice)
    select.set("distinct", None)
    wanted = select.expressions[0].unalias()
    if isinstance(wanted, exp.Star):
        raise draft.refusal(select, "* is no single value", advice)
    figure, distinct, name = "", False, call_name(wanted)
    if not inside and name in FIGURES:
        if len(wanted.expressions) != 1:
            raise draft.refusal(wanted, f"{name} takes one column", advice)
        figure, wanted = name, wanted.expressions[0]
        if isinstance(wanted, exp.Distinct):
            distinct, wanted = True, wanted.expressions[0]
            if figure != "COUNT":
                raise draft.refusal(wanted, f"{figure} takes no DISTINCT", advice)
    if isinstance(wanted, exp.Star):
        if figure != "COUNT":
            raise draft.refusal(wanted, f"{figure}(*) is not known", advice)
        wanted = exp.Literal.number(1)
    for call in [each for each in wanted.find_all(exp.Anonymous) if call_name(each) in FIGURES]:
        reason = f"{canonical(call)} stands alone in its subquery"
        fix = "compute around it: 2 * (SELECT AVG(price) FROM pages)"
        raise draft.refusal(call, reason, fix)
    alias = exp.to_identifier(VALUE, quoted=True)
    select.set("expressions", [exp.Alias(this=wanted, alias=alias)])
    return Lookup(select=select, figure="IN" if inside else figure, distinct=distinct)


def add_table_subqueries(
    draft: Draft,
    relation: Relation,
    select: exp.Expr,
    read: Callable[[exp.Expr], Relation],
    substitute: Substitute,
) -> None:
    """Look values up for the expressions of a SELECT, which then read them as columns."""
    added: dict[int, str] = {}
    for node in list(select.find_all(TableSubquery)):
        if node.find_ancestor(exp.Select) is not select:
            continue
        number = node.args["number"]
        lookup: Lookup = draft.lookups[number]
        if relation.unit is not None:
            raise draft.refusal(
                node,
                "what a subquery per unit gives is not compared with tables",
                "filter in WHERE around the source, or compare with constants",
            )
        if number not in added:
            added[number] = alias = f"subquery {number + 1}"
            left, right = node.this, read(lookup.select.copy())
            if right.table in {relation.table, *(each.table for each in relation.union)}:
                raise draft.refusal(
                    node,
                    f"a subquery over {right.table}, the stream itself, mixes the rows of several "
                    "units",
                    "use constants or a public table, or group the rows of each unit in FROM "
                    "(SELECT user_id, ... GROUP BY user_id)",
                )
            if right.window is not None or right.union or right.joins or right.unnests:
                raise draft.refusal(node, "the subquery reads more than a table", _IN)
            pairs = [] if left is None else [(substitute(draft, left, relation), VALUE)]
            if pairs and pairs[0][0].find(Item) is not None:
                raise draft.refusal(
                    left,
                    "items of a list are made after tables were looked at",
                    "filter the items by constants, tag IN ('a', 'b'), or give the stream a row "
                    "for each item",
                )
            relation.joins.append(
                JoinClause(
                    alias=alias, right=right, pairs=pairs, using=[], outer=True, lookup=lookup
                )
            )
            relation.names = {*relation.names, alias}
        column = exp.column(VALUE, table=added[number], quoted=True)
        node.replace(column.update_positions(_first_word(node)))


def require_public(name: str) -> InvalidParameter:
    """A registry is not compared with: its rows belong to units."""
    return InvalidParameter(
        f"{name!r} is a registry, whose rows belong to units, and a subquery in an expression "
        "would show a row of one unit to another's; join it on the privacy unit, or declare it "
        "--public if everybody may know all of it"
    )
