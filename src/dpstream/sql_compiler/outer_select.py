"""A private query inside of other SELECTs: what of a statement is private, what is around.

SELECTs around it see what it publishes and nothing else (`layer_compiler.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sqlglot import exp

from dpstream.sql_compiler.earlier_windows import looks_at_windows
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    Over,
    PrivacyClause,
    Statement,
    call_name,
    canonical,
    present_args,
)

NAMING = (exp.Ordered, exp.Identifier)
"""Nodes that may be written as what they hold is."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A SELECT around a private query, PIVOT in its FROM, and names to qualify columns with."""

    select: exp.Expr
    pivot: exp.Expr | None = None
    names: frozenset[str] = frozenset()


def unwrap(statement: Statement) -> tuple[Statement, list[Layer]]:
    """The private SELECT of a statement, and the SELECTs around it from the inside out.

    Without a private one inside, the statement itself is what must be private.
    """
    layers: list[Layer] = []
    sources: list[exp.Expr] = []
    tables: dict[str, exp.Expr] = {}
    tree, emit = statement.tree, None
    while isinstance(tree, exp.Select) and not _is_private(tree):
        emit = emit or tree.args.get("emit")
        with_, from_ = tree.args.get("with_"), tree.args.get("from_")
        for common in [] if with_ is None else with_.expressions:
            tables[common.alias] = common
        node = None if from_ is None else from_.this
        inner = _inner_select(node, tables)
        if node is None or inner is None:
            return statement, []
        sources.append(node)
        pivots, alias = node.args.get("pivots") or [], node.args.get("alias")
        if len(pivots) > 1:
            raise statement.refusal(pivots[1], "one PIVOT is wanted", "use a subquery for each")
        names = {node.name if isinstance(node, exp.Table) else ""}
        for each in [alias, *(pivot.args.get("alias") for pivot in pivots)]:
            names |= set() if each is None else {each.name}
        pivot = pivots[0] if pivots else None
        layers.append(Layer(select=tree, pivot=pivot, names=frozenset(names)))
        tree = inner
    if isinstance(tree, exp.SetOperation):
        refuse_union(statement, tree, within=bool(layers))
    if not isinstance(tree, exp.Select):
        return statement, []
    if layers:
        for node in [*sources, *statement.tree.find_all(exp.CTE)]:
            _refuse_more(statement, node)
        tree = tree.copy()
        rest = [common for common in tables.values() if common.find(PrivacyClause) is None]
        if len(rest) < len(tables):
            other = next(each for each in tables.values() if each not in rest)
            reason = f"{other.alias} is a second private query"
            raise statement.refusal(other, reason, "run it as a query of its own")
        own = tree.args.get("with_")
        rest = [*(each.copy() for each in rest), *([] if own is None else own.expressions)]
        if rest:
            tree.set("with_", exp.With(expressions=rest))
        if emit is not None:
            if tree.args.get("emit") is not None:
                raise statement.refusal(emit, "EMIT stands twice", "keep one of them")
            tree.set("emit", emit.copy())
    tree, own_layers = _split_windows(statement, tree)
    return replace(statement, tree=tree), [*own_layers, *layers[::-1]]


def _inner_select(node: exp.Expr | None, tables: dict[str, exp.Expr]) -> exp.Expr | None:
    """The SELECT that FROM reads, if it is one; a name of WITH is used up."""
    if isinstance(node, exp.Subquery):
        found: exp.Expr = node.this.unnest()
        return found
    named = isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier)
    if node is None or not named or node.args.get("db") or node.name not in tables:
        return None
    found = tables[node.name].this.unnest()
    if not _reads_private(found, tables):
        return None
    del tables[node.name]
    return found


def _refuse_more(statement: Statement, node: exp.Expr) -> None:
    """What FROM reads around a private query is a SELECT or a name, with an alias or a PIVOT."""
    alias = node.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        raise statement.refusal(alias, "columns cannot be renamed here", "use SELECT x AS y")
    while isinstance(node, exp.Subquery | exp.Table | exp.CTE):
        more = present_args(node) - {"this", "alias", "pivots"}
        if more:
            reason = f"{min(more).rstrip('_').upper()} is not known here"
            raise statement.refusal(node, reason, "leave it out, or write it in a SELECT")
        node = node.this


def _reads_private(select: exp.Expr, tables: Mapping[str, exp.Expr]) -> bool:
    """Does a SELECT read a private one, through names of WITH?"""
    rest = dict(tables)
    while isinstance(select, exp.Select) and select.find(PrivacyClause) is None:
        from_ = select.args.get("from_")
        node = None if from_ is None else from_.this
        if not isinstance(node, exp.Table) or node.name not in rest:
            return False
        select = rest.pop(node.name).this
    return select.find(PrivacyClause) is not None


def _is_private(tree: exp.Expr) -> bool:
    return isinstance(tree.args.get("hint"), PrivacyClause)


def private_branches(statement: Statement) -> list[Statement]:
    """The private queries that a statement puts together by UNION ALL; none if it is another."""
    tree = statement.tree
    branches = _branches(tree) if isinstance(tree, exp.SetOperation) else []
    if not any(_is_private(branch) for branch in branches):
        return []
    for node in [tree, *tree.find_all(exp.SetOperation)]:
        if not isinstance(node, exp.Union) or node.args.get("distinct"):
            reason = "private queries are put together by UNION ALL alone"
            raise statement.refusal(node, reason, "write UNION ALL")
    for name in ("order", "limit", "offset", "emit"):
        if tree.args.get(name) is not None:
            reason = f"{name.upper()} stands behind a UNION ALL of private queries"
            fix = "write each branch in parentheses, with clauses of its own"
            raise statement.refusal(tree.args[name], reason, fix)
    with_ = tree.args.get("with_")
    found = []
    for branch in branches:
        own = branch.copy()
        mine = own.args.get("with_")
        if with_ is not None:
            named = [*with_.expressions, *([] if mine is None else mine.expressions)]
            own.set("with_", exp.With(expressions=[each.copy() for each in named]))
        found.append(replace(statement, tree=own))
    return found


def _branches(tree: exp.Expr) -> list[exp.Expr]:
    """What a UNION puts together, in order."""
    branches: list[exp.Expr] = []
    left: list[exp.Expr] = [tree]
    while left:
        node = left.pop().unnest()
        if isinstance(node, exp.SetOperation):
            left += [node.expression, node.this]
        else:
            branches.append(node)
    return branches


def refuse_union(statement: Statement, tree: exp.Expr, *, within: bool = False) -> None:
    """UNION ALL of private queries: each is a query of its own, with a budget of its own.

    `within`: it stands in the FROM of a SELECT, which nothing computes of several queries.
    """
    branches = _branches(tree)
    if not any(_is_private(branch) for branch in branches):
        return
    begins = [token.start for token in statement.tokens if token.text.upper() == "SELECT"]
    blocks = []
    for number, branch in enumerate(branches, 1):
        span = statement.span(branch)
        text = canonical(branch)
        if span is not None:
            first = max((at for at in begins if at <= span[0]), default=span[0])
            text = statement.text[first : span[1]]
        blocks.append(f"\n[[query]]\nname = \"part{number}\"\nsql = '''{text}'''")
    together = " UNION ALL ".join(f"SELECT * FROM part{n}" for n in range(1, len(blocks) + 1))
    how = "run the whole text, by dps.run(text) or `dpstream sql`"
    if within:
        how = (
            "take the SELECT around it away, or write it into each branch, and run that by "
            "dps.run(text) or `dpstream sql`"
        )
    raise statement.refusal(
        None,
        f"UNION ALL of {len(branches)} private queries: each has a budget and a run of its own",
        f"{how}: each pays from one book, and "
        "their rows come together; in a pipeline give each a [[query]] of its own: they share "
        f"source, book and sink; then read {together} there{''.join(blocks)}",
    )


def _split_windows(statement: Statement, tree: exp.Expr) -> tuple[exp.Expr, list[Layer]]:
    """Move what looks at earlier windows out of a private SELECT, into one around it."""
    outside = [tree.args[name] for name in ("qualify", "order") if tree.args.get(name)]
    seen = [each for node in [*tree.expressions, *outside] for each in node.find_all(Over)]
    if not any(looks_at_windows(each) for each in seen):
        return tree, []
    inner = tree.copy()
    names: dict[str, str] = {}
    outer: list[exp.Expr] = []
    kept: list[exp.Expr] = []
    for item in inner.expressions:
        if any(looks_at_windows(each) for each in item.find_all(Over)):
            outer.append(item)
            continue
        if not isinstance(item, exp.Alias | exp.Column):
            raise statement.refusal(
                item,
                "beside a figure of several windows every column needs a name",
                "name it: AS n",
            )
        kept.append(item)
        names.setdefault(canonical(item.unalias()), item.alias_or_name)
        outer.append(quoted_column(item.alias_or_name).update_positions(item))

    def name_parts(part: exp.Expr) -> exp.Expr:
        name = None if isinstance(part, NAMING) else names.get(canonical(part))
        if name is not None:
            return quoted_column(name)
        if call_name(part) in AGGREGATES:
            reason = f"{canonical(part)} is not among the columns of SELECT"
            raise statement.refusal(part, reason, "select it too, with AS")
        return part

    around = exp.Select(expressions=[item.transform(name_parts) for item in outer])
    for clause in ("qualify", "order", "limit", "offset"):
        node = inner.args.get(clause)
        if node:
            around.set(clause, node.transform(name_parts))
            inner.set(clause, None)
    inner.set("expressions", kept)
    return inner, [Layer(select=around)]


def quoted_column(name: str) -> exp.Expr:
    """A column by its name, whatever that is."""
    return exp.column(name, quoted=True)
