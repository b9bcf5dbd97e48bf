"""JOIN: which table is joined, and which columns must be equal; what would mix units is refused.

The table is declared public, or a registry of units, when the query is run: the text does not tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from dpstream.sql_compiler.statement import Draft, Item, Relation, canonical, present_args

Substitute = Callable[[Draft, exp.Expr, Relation], exp.Expr]
_WHY = "a join lets one unit's rows meet another's, so a unit's part has no bound"
_SHAPE = (
    "join public tables by equal columns: JOIN pages USING (page), or LEFT JOIN codes ON "
    "clicks.country = codes.iso"
)
_STREAMS = (
    "read both with UNION ALL; or name a table that is read whole: a public one, or a registry of "
    "the units that is joined on the unit"
)
_LISTS = (
    "write UNNEST last: FROM clicks JOIN pages USING (page), UNNEST(tags) AS tag; to join on the "
    "items themselves, give the stream, or the table, a row for each item"
)
_ADVICE = {
    "RIGHT": "its rows without a match belong to no unit: write the stream first, and LEFT JOIN",
    "FULL": "its rows without a match belong to no unit: use JOIN or LEFT JOIN",
}


@dataclass(kw_only=True)
class JoinClause:
    """A JOIN as it was read: pairs of a left expression and a column of the right table."""

    alias: str
    right: Relation
    pairs: list[tuple[exp.Expr, str]]
    using: list[str]
    outer: bool
    lookup: Any = None
    """What a subquery of an expression wants of the table (`Lookup`); None: rows are joined."""

    def on_unit(self, unit: str) -> list[int]:
        """Which pairs have the privacy unit on their left."""
        lefts = [left for left, _ in self.pairs]
        return [n for n, e in enumerate(lefts) if isinstance(e, exp.Column) and e.name == unit]


def add_join(
    draft: Draft, relation: Relation, node: exp.Expr, right: Relation, substitute: Substitute
) -> None:
    """Join a table to a relation, whose columns get the name of the stream."""
    side, on, using = node.args.get("side", ""), node.args.get("on"), node.args.get("using") or []
    if side in _ADVICE:
        raise draft.refusal(node, f"a {side} JOIN is refused: {_ADVICE[side]}", _SHAPE)
    unknown = present_args(node) - {"this", "on", "using", "side", "kind"}
    plain = node.args.get("kind", "") in ("", "INNER", "OUTER") and not unknown
    if not plain or bool(on) == bool(using):
        raise draft.refusal(node, _WHY, _SHAPE)
    if relation.unnests or right.unnests:
        raise draft.refusal(node, "items of a list are made after all joins", _LISTS)
    if right.without:
        raise draft.refusal(node, "EXCEPT is not known in a joined table", "name its columns")
    if right.window is not None or right.union:
        raise draft.refusal(node, f"what is joined is a stream: {_WHY}", _STREAMS)
    if right.joins:
        raise draft.refusal(node, "the joined table is a join", "join tables one by one")
    alias = next(iter(right.names), "")
    taken = {relation.table, *(join.alias for join in relation.joins)}
    if not alias or alias in taken:
        reason = "the joined table needs a name" if not alias else f"two tables are called {alias}"
        raise draft.refusal(node, reason, "give it one of its own: JOIN pages AS p")
    for name, expression in relation.columns.items():
        relation.columns[name] = _of_stream(draft, expression, relation)
    relation.where[:] = [_of_stream(draft, each, relation) for each in relation.where]
    clause = JoinClause(
        alias=alias,
        right=right,
        pairs=[],
        using=[each.name for each in using],
        outer=side == "LEFT",
    )
    for column in clause.using:
        left = substitute(draft, exp.column(exp.to_identifier(column, quoted=True)), relation)
        clause.pairs.append((left, _right_column(draft, node, right, column)))
    for equal in [] if on is None else _conjuncts(on):
        clause.pairs.append(_pair(draft, relation, equal, alias, right, substitute))
    if not relation.joins:  # all that is there is the stream's
        clause.pairs = [(_of_stream(draft, left, relation), name) for left, name in clause.pairs]
    if any(left.find(Item) for left, _ in clause.pairs):
        raise draft.refusal(node, "items of a list are made after all joins", _LISTS)
    relation.joins.append(clause)
    relation.names = {*relation.names, alias}


def _conjuncts(node: exp.Expr) -> list[exp.Expr]:
    node = node.unnest()
    if isinstance(node, exp.And):
        return [*_conjuncts(node.this), *_conjuncts(node.expression)]
    return [node]


def _pair(
    draft: Draft,
    relation: Relation,
    node: exp.Expr,
    alias: str,
    right: Relation,
    substitute: Substitute,
) -> tuple[exp.Expr, str]:
    """The pair of an equality with a column of the right table on one side."""
    if isinstance(node, exp.EQ):
        for one, other in ((node.this, node.expression), (node.expression, node.this)):
            theirs = isinstance(other, exp.Column) and other.args.get("table")
            names = {each.args["table"].name for each in one.find_all(exp.Column) if each.table}
            if theirs and theirs.name == alias and alias not in names:
                column = _right_column(draft, other, right, other.name)
                return substitute(draft, one, relation), column
    raise draft.refusal(
        node,
        f"{canonical(node)} does not say which column of {alias} must be equal to what",
        f"write ON clicks.x = {alias}.y [AND ...], with the name of the table; other conditions "
        "belong in WHERE",
    )


def _right_column(draft: Draft, node: exp.Expr, right: Relation, name: str) -> str:
    if not right.open and name not in right.columns:
        reason = f"the subquery has no column {name}"
        raise draft.refusal(node, reason, f"it has {', '.join(right.columns)}")
    return name


def _of_stream(draft: Draft, node: exp.Expr, relation: Relation) -> exp.Expr:
    """The same expression, in which no column can be taken for one of a table."""

    def qualify(part: exp.Expr) -> exp.Expr:
        bare = isinstance(part, exp.Column) and "." not in part.name
        return stream_column(draft, part.name, relation) if bare else part

    return node.transform(qualify)


def stream_column(draft: Draft, name: str, relation: Relation) -> exp.Expr:
    """A column of the stream in a relation with joins; the unit and times are known by their own
    names.
    """
    own = ("privacy_unit_column", "time_column", "arrival_column")
    bare = any(draft.parameters.get(each) == name for each in own)
    shown = name if bare else f"{relation.table}.{name}"
    return exp.Column(this=exp.to_identifier(shown, quoted=True))


def joined_column(draft: Draft, part: exp.Expr, relation: Relation) -> exp.Expr | None:
    """What a column of a relation with joins is; None: as in a relation without."""
    qualifier = part.args.get("table")
    if "." in part.name:
        raise draft.refusal(
            part,
            f"{part.name} has a dot, which joins use to tell tables apart",
            "rename it in a subquery: FROM (SELECT ... AS name FROM ...)",
        )
    if qualifier is None:
        return None
    clause = next((each for each in relation.joins if each.alias == qualifier.name), None)
    if clause is not None and clause.alias in relation.names:
        name = _right_column(draft, part, clause.right, part.name)
        shown = f"{clause.alias}.{name}"
        return exp.Column(this=exp.to_identifier(shown, quoted=True))
    if part.name not in relation.columns and relation.open:
        return stream_column(draft, part.name, relation)
    return None


def unit_columns(draft: Draft) -> set[str]:
    """The unit, and columns of tables that must be equal to it."""
    unit = draft.parameters["privacy_unit_column"]
    return {unit} | {
        f"{clause.alias}.{clause.pairs[at][1]}"
        for clause in draft.relation.joins
        if clause.lookup is None
        for at in clause.on_unit(unit)
    }
