"""Clauses that a private query may have, and those that would mix the rows of units."""

from __future__ import annotations

from sqlglot import exp

from dpstream.sql.dialect import Emit, PrivacyClause, WindowTable
from dpstream.sql.draft import Draft, parts
from dpstream.sql.statement import close

_ALLOWED = {"hint", "expressions", "from_", "where", "group", "having", "order", "limit"}


_ALLOWED |= {"offset", "emit", "with_"}


_CLAUSES = {
    "joins": (
        "a join lets one unit's rows meet another's, so a unit's part has no bound",
        "join before the stream is read, with public tables only, and read the result",
    ),
    "distinct": (
        "DISTINCT compares the rows of several units",
        "group by the columns, or use COUNT(DISTINCT unit)",
    ),
    "laterals": ("LATERAL makes several rows of one", "split rows before they are read"),
    "qualify": ("QUALIFY ranks rows of several units", "use HAVING on the published values"),
    "windows": ("a window function looks at other rows", "use TUMBLE for windows of time"),
    "sample": ("TABLESAMPLE draws rows at random, outside of the ledger", "leave it out"),
    "pivots": ("PIVOT is not known", "use CASE in the aggregates"),
    "into": ("INTO is not known", "give the sink to the run"),
}


def one_select(draft: Draft) -> None:
    """The statement is one SELECT."""
    tree = draft.statement.tree
    if not isinstance(tree, exp.Select):
        kind = type(tree).__name__.upper()
        reason = f"a SELECT is wanted; this is {kind}"
        if isinstance(tree, exp.SetOperation):
            reason = f"{kind} joins tables of several queries"
        raise draft.refusal(
            tree, reason, "write SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (...) ..."
        )


def private(draft: Draft) -> None:
    """It has the privacy clause."""
    if not isinstance(draft.select.args.get("hint"), PrivacyClause):
        first = draft.select.expressions[0] if draft.select.expressions else None
        raise draft.refusal(
            first,
            "the query is not private",
            "write SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, "
            "privacy_unit_column = user_id, max_groups_contributed = 8) ...",
        )


def known_clauses(draft: Draft) -> None:
    """It has no clause that would mix units, or that is not understood."""
    for name in sorted(parts(draft.select) - _ALLOWED):
        value = draft.select.args[name]
        node = value[0] if isinstance(value, list) else value
        shown = name.rstrip("_").upper()
        reason, fix = _CLAUSES.get(name, (f"{shown} is not known here", "leave it out"))
        raise draft.refusal(node if isinstance(node, exp.Expr) else draft.select, reason, fix)
    group = draft.select.args.get("group")
    if group is not None and (parts(group) - {"expressions"} or group.find(exp.Rollup, exp.Cube)):
        raise draft.refusal(
            group, "only plain columns can be grouped by", "run a query for each set of keys"
        )


def no_joins_inside(draft: Draft) -> None:
    """No joins anywhere, tables separated by commas included."""
    for node in draft.select.find_all(exp.Join, exp.Lateral, exp.Unnest):
        raise draft.refusal(node, *_CLAUSES["joins"])


def no_window_functions(draft: Draft) -> None:
    """OVER compares rows of several units."""
    for node in draft.select.find_all(exp.Window):
        raise draft.refusal(
            node,
            "a window function (OVER) looks at the rows of several units",
            "use TUMBLE for windows of time; rank the published values yourself",
        )


def no_subqueries(draft: Draft) -> None:
    """A subquery stands in FROM or nowhere."""
    for node in draft.select.find_all(exp.Select, exp.SetOperation, exp.Exists):
        if node is draft.select or isinstance(node.parent, exp.CTE):
            continue
        home = node.parent
        if isinstance(home, exp.Subquery):
            home = home.parent
        if not isinstance(home, exp.From | WindowTable | exp.SetOperation):
            raise draft.refusal(
                node,
                "a subquery in an expression mixes the rows of several units",
                "use constants, or filter in FROM (SELECT ... WHERE ...)",
            )


def no_star(draft: Draft) -> None:
    """SELECT * would publish rows."""
    for node in draft.select.expressions:
        if isinstance(node, exp.Star) or isinstance(node.this, exp.Star):
            raise draft.refusal(
                node, "SELECT * would publish rows as they are", "name keys and aggregates"
            )


def public_triggers(draft: Draft) -> None:
    """When tables are published depends on the clock and on nothing in the data."""
    emit = draft.select.args.get("emit")
    if isinstance(emit, Emit) and emit.args.get("other"):
        ways = "use EMIT EVERY INTERVAL '15' MINUTE, or EMIT ON WINDOW CLOSE"
        word = draft.statement.word_after(emit)
        if word != "EVERY" and close(word, ["EVERY"]):
            raise draft.refusal(emit, f"EMIT {word} is not known", "did you mean EMIT EVERY?")
        raise draft.refusal(
            emit,
            "EMIT must not depend on the data: that and when a table comes would reveal rows",
            ways,
        )


def known_window(draft: Draft) -> None:
    """Sessions are understood and refused."""
    for window in draft.select.find_all(WindowTable):
        kind = window.args["kind"]
        if kind == "SESSION":
            raise draft.refusal(
                window,
                "session windows begin and end with the rows of units: their edges are private",
                "use TUMBLE, whose edges are public",
            )


def nothing_left_over(draft: Draft) -> None:
    """LIMIT and OFFSET are plain numbers; the order is plain."""
    order = draft.select.args.get("order")
    for term in [] if order is None else order.expressions:
        if not isinstance(term, exp.Ordered) or parts(term) - {"this", "desc", "nulls_first"}:
            raise draft.refusal(term, "ORDER BY takes columns", "write ORDER BY n DESC NULLS LAST")
    for name in ("limit", "offset"):
        node = draft.select.args.get(name)
        value = None if node is None else node.args.get("expression")
        plain = isinstance(value, exp.Literal) and not value.is_string and value.name.isdigit()
        if node is not None and (not plain or parts(node) - {"expression"}):
            raise draft.refusal(
                node, f"{name.upper()} takes a whole number", f"write {name.upper()} 10"
            )
