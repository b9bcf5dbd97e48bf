"""Checks of the statement as it is written; each refuses what would break the guarantee."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from dpstream.sql_compiler.expressions import known_functions
from dpstream.sql_compiler.over_clause import why_not_known
from dpstream.sql_compiler.privacy_clause import node_of
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    USER_TABLES,
    Draft,
    Emit,
    Over,
    PrivacyClause,
    UserTable,
    WindowTable,
    call_name,
    canonical,
    closest_word,
    find_calls,
    other_clauses,
    present_args,
)

_ALLOWED_CLAUSES = {
    *("hint", "expressions", "with_", "from_", "joins", "where", "group", "having"),
    *("order", "limit", "offset", "emit", "qualify"),
}
_REFUSED_CLAUSES = {
    "JOINS": (
        "a join lets one unit's rows meet another's, so a unit's part has no bound",
        "join before the stream is read, with public tables only, and read the result",
    ),
    "DISTINCT": (
        "DISTINCT compares the rows of several units",
        "group by the columns, or use COUNT(DISTINCT unit)",
    ),
    "LATERALS": ("LATERAL is not known", "write FROM log, UNNEST(tags) AS tag"),
    "WINDOWS": ("a window function looks at other rows", "use TUMBLE for windows of time"),
    "SAMPLE": ("TABLESAMPLE draws rows at random, outside of the ledger", "leave it out"),
    "PIVOTS": ("PIVOT is not known", "use it around: FROM (SELECT ...) PIVOT(...)"),
    "INTO": ("INTO is not known", "give the sink to the run"),
}


def require_one_select(draft: Draft) -> None:
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


_CLAUSE = {"epsilon", "privacy_unit_column"}
"""With these options beside it, SQL is private without a clause of its own."""


def require_privacy_clause(draft: Draft) -> None:
    """The statement has the privacy clause."""
    if draft.select.args.get("hint") is None and draft.overrides.keys() >= _CLAUSE:
        draft.select.set("hint", PrivacyClause(expressions=[]))  # all of it was said beside it
    if not isinstance(draft.select.args.get("hint"), PrivacyClause):
        first = draft.select.expressions[0] if draft.select.expressions else None
        raise draft.refusal(
            first,
            "the query is not private",
            "write SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, "
            "privacy_unit_column = user_id, max_groups_contributed = 8) ...",
        )


def refuse_unknown_clauses(draft: Draft) -> None:
    """The statement has no clause that would mix units, or that is not understood."""
    for name, node in other_clauses(draft.select, _ALLOWED_CLAUSES):
        unknown = (f"{name} is not known here", "leave it out")
        raise draft.refusal(node, *_REFUSED_CLAUSES.get(name, unknown))
    group = draft.select.args.get("group")
    if group is not None and {"expressions", "all"} <= present_args(group):
        raise draft.refusal(group, "ALL stands alone", "list the columns, or ALL")
    if group is not None and present_args(group) - {"expressions", "all"}:
        raise draft.refusal(
            group,
            "this GROUP BY is not known",
            "group by columns, ROLLUP (a, b), CUBE (a, b) or GROUPING SETS ((a, b), (a), ())",
        )


def refuse_joins(draft: Draft) -> None:
    """No lateral joins; those to tables are read with FROM, and a row meets its own list."""
    for node in draft.select.find_all(exp.Lateral, exp.Unnest):
        if isinstance(node, exp.Unnest) and isinstance(node.parent, exp.Join | exp.In):
            continue
        lateral = isinstance(node, exp.Lateral)
        raise draft.refusal(node, *_REFUSED_CLAUSES["LATERALS" if lateral else "JOINS"])


def refuse_window_functions_of_rows(draft: Draft) -> None:
    """OVER compares rows: those that are published, in SELECT, QUALIFY and ORDER BY, no others."""
    for node in draft.select.find_all(exp.Window, Over):
        clause: exp.Expr = node
        inside = False
        while clause.parent is not None and not isinstance(clause.parent, exp.Select):
            clause = clause.parent
            inside = inside or call_name(clause) in AGGREGATES
        published = clause.arg_key in ("expressions", "qualify", "order")
        if inside or clause.parent is not draft.select or not published:
            raise draft.refusal(
                node,
                "a window function (OVER) looks at the rows of several units",
                "use TUMBLE for windows of time; published rows may be compared, in the outer "
                "SELECT, QUALIFY and ORDER BY",
            )
        if not_known := why_not_known(node):
            raise draft.refusal(node, *not_known)


def refuse_select_star(draft: Draft) -> None:
    """SELECT * would publish rows."""
    for node in draft.select.expressions:
        if isinstance(node, exp.Star) or isinstance(node.this, exp.Star):
            raise draft.refusal(
                node, "SELECT * would publish rows as they are", "name keys and aggregates"
            )


def refuse_data_dependent_triggers(draft: Draft) -> None:
    """When tables are published depends on the clock and on nothing in the data."""
    emit = draft.select.args.get("emit")
    if isinstance(emit, Emit) and emit.args.get("other"):
        word = draft.statement.word_after(emit)
        if word != "EVERY" and closest_word(word, ["EVERY"]):
            raise draft.refusal(emit, f"EMIT {word} is not known", "did you mean EMIT EVERY?")
        raise draft.refusal(
            emit,
            "EMIT must not depend on the data: that and when a table comes would reveal rows",
            "use EMIT EVERY INTERVAL '15' MINUTE, or EMIT ON WINDOW CLOSE",
        )


def refuse_session_windows(draft: Draft) -> None:
    """Session windows are understood, and refused."""
    for window in draft.select.find_all(WindowTable):
        if window.args["kind"] == "SESSION":
            raise draft.refusal(
                window,
                "session windows begin and end with the rows of units: their edges are private",
                "use TUMBLE, whose edges are public; sessions of each unit stand in a subquery: "
                "TUMBLE((SELECT user_id, session_start, COUNT(*) AS n FROM SESSION(clicks, "
                "DESCRIPTOR(ts), INTERVAL '30' MINUTE) GROUP BY user_id, session_start), "
                "DESCRIPTOR(session_start), INTERVAL '1' DAY)",
            )


def require_plain_order_and_limit(draft: Draft) -> None:
    """LIMIT and OFFSET are plain numbers; the order is plain."""
    order = draft.select.args.get("order")
    for term in [] if order is None else order.expressions:
        if not isinstance(term, exp.Ordered) or present_args(term) - {
            "this",
            "desc",
            "nulls_first",
        }:
            raise draft.refusal(term, "ORDER BY takes columns", "write ORDER BY n DESC NULLS LAST")
    for name in ("limit", "offset"):
        node = draft.select.args.get(name)
        value = None if node is None else node.args.get("expression")
        plain = isinstance(value, exp.Literal) and not value.is_string and value.name.isdigit()
        if node is not None and (not plain or present_args(node) - {"expression"}):
            raise draft.refusal(
                node, f"{name.upper()} takes a whole number", f"write {name.upper()} 10"
            )


_CLOCK_WORDS = {
    *("CURRENT_DATE", "CURRENT_DATETIME", "CURRENT_TIME", "CURRENT_TIMESTAMP", "CURRENT_USER"),
    *("SESSION_USER", "SYSDATE", "SYSTIMESTAMP", "LOCALTIME", "LOCALTIMESTAMP"),
}
_CLOCK = (
    "changes with the clock: a replay would publish other numbers",
    "use the time column, or a constant such as TIMESTAMP '2024-05-01'",
)
_CHANGING = {*_CLOCK_WORDS, "NOW", "GETDATE", "TODAY", "RAND", "RANDOM", "UUID", "GENERATE_UUID"}
_REFUSED_CALLS = (
    (
        {f"ANON_{name}" for name in (*AGGREGATES, "PERCENTILE_CONT", "QUANTILES")},
        "has another name here",
        "write COUNT(*) or another aggregate, with contribution_bounds_per_row for values",
    ),
    (
        {f"{kind}_{edge}" for kind in ("TUMBLE", "HOP", "SESSION") for edge in ("START", "END")},
        "is not known",
        "write FROM TUMBLE(table, DESCRIPTOR(time), INTERVAL '1' HOUR), and select window_start",
    ),
    ({*_CLOCK_WORDS, "NOW", "GETDATE", "TODAY", "PROCTIME", "UNIX_TIMESTAMP"}, *_CLOCK),
    (
        {
            *("RAND", "RANDOM", "RANDN", "RAND_INTEGER", "SETSEED"),
            *("UUID", "GEN_RANDOM_UUID", "GENERATE_UUID", "NEWID"),
        },
        "draws at random: a replay would publish other numbers",
        "leave it out; noise is added where it is accounted for",
    ),
    (
        {
            *("ARG_MIN", "ARG_MAX", "MIN_BY", "MAX_BY", "MODE", "ANY_VALUE"),
            *("FIRST", "LAST", "FIRST_VALUE", "LAST_VALUE", "APPROX_TOP_COUNT"),
            *("ARRAY_AGG", "ARRAY_CONCAT_AGG", "STRING_AGG", "LISTAGG", "GROUP_CONCAT", "JSON_AGG"),
        },
        "can show the value of a single row",
        "use COUNT, SUM or AVG with bounds",
    ),
    (
        {
            *("VAR", "VAR_SAMP", "STDDEV_SAMP", "REGR_INTERCEPT", "REGR_R2", "COVAR"),
            *("QUANTILE", "PERCENTILE_DISC"),
            *("BIT_AND", "BIT_OR", "LOGICAL_AND", "LOGICAL_OR"),
        },
        "is not offered",
        f"use one of {', '.join(AGGREGATES)}; variances are those of all rows",
    ),
)
"""Names, what is wrong with them, and what to do instead."""


def refuse_changing_calls(draft: Draft, node: exp.Expr) -> None:
    """What is made of published rows is the same in a replay: no clock, no dice."""
    for names, reason, fix in _REFUSED_CALLS:
        for call in find_calls(node, names & _CHANGING):
            raise draft.refusal(call, f"{call_name(call)} {reason}", fix)


def refuse_unsafe_calls(draft: Draft) -> None:
    """The same row gives the same result, today and in a replay, and no call shows single rows."""
    for column in draft.select.find_all(exp.Column):
        name, (reason, fix) = column.name.upper(), _CLOCK
        if name in _CLOCK_WORDS and not column.this.args.get("quoted"):
            raise draft.refusal(column, f"{name} {reason}", fix)
    for names, reason, fix in _REFUSED_CALLS:
        for call in find_calls(draft.select, names - draft.functions.keys()):
            name, text = call_name(call), canonical(call).removeprefix("ANON_")
            if name in ("ANON_SUM", "ANON_AVG"):
                fix = f"write {text[:-1]}, contribution_bounds_per_group => (0, 10))"
            elif name == "ANON_COUNT":
                fix = f"write {text}"
            raise draft.refusal(call, f"{call_name(call)} {reason}", fix)
    for call in draft.select.find_all(exp.Anonymous):
        name = call_name(call)
        meant = closest_word(name, AGGREGATES)
        if meant and name not in {*AGGREGATES, *known_functions(), *draft.functions}:
            raise draft.refusal(call, f"there is no function {name}", f"did you mean {meant}?")
    for node in draft.select.find_all(exp.Filter):
        raise draft.refusal(
            node, "FILTER is not known", "use COUNTIF(condition), or SUM(IF(condition, x, 0), ...)"
        )


def refuse_misplaced_aggregates(draft: Draft) -> None:
    """Aggregates stand in SELECT, HAVING and ORDER BY, and not within each other."""
    for name in ("where", "group"):
        clause = draft.select.args.get(name)
        for call in find_calls(clause, AGGREGATES) if clause is not None else ():
            raise draft.refusal(
                call,
                f"an aggregate in {'WHERE' if name == 'where' else 'GROUP BY'} decides by exact "
                "numbers about rows",
                "use HAVING, which sees the noisy numbers",
            )
    for call in find_calls(draft.select, AGGREGATES):
        for inside in call.expressions:
            for nested in find_calls(inside, AGGREGATES):
                raise draft.refusal(nested, "an aggregate of an aggregate", "use one of them")


def require_unit_and_budget(draft: Draft) -> None:
    """Unit and epsilon have no defaults, nor has delta where keys are to be found or windows are
    published again and again."""
    wanted = {
        "privacy_unit_column": ("which column names the protected unit", "user_id"),
        "epsilon": ("how much may be learned about a unit", "1"),
    }
    if not draft.series and _needs_delta(draft):
        wanted["delta"] = ("with which chance more may be learned", "1e-9")
    for option, (meaning, example) in wanted.items():
        if option not in draft.parameters:
            raise draft.refusal(
                draft.clause,
                f"{option} is missing: {meaning}",
                f"add {option} = {example} to OPTIONS",
            )


def _needs_delta(draft: Draft) -> bool:
    """Are keys to be found, or windows published again and again?"""
    emit, group = draft.select.args.get("emit"), draft.select.args.get("group")
    if isinstance(emit, Emit) and emit.args.get("every"):
        return True
    keys = [] if group is None else group.expressions
    public = "public_groups" in draft.parameters
    from_ = draft.select.args.get("from_")
    table = None if from_ is None else from_.this.this
    of_table = USER_TABLES[table.args["kind"]] if isinstance(table, UserTable) else ()
    listed = ("window_start", "window_end", *of_table)
    return not public and any(key.name not in listed for key in keys)


_PERIODS = "periods would be cut at other times"
_SOURCE_COLUMNS = {
    "privacy_unit_column": ("the privacy unit", "one person could become many units"),
    "time_column": ("the time", _PERIODS),
    "arrival_column": ("the time", _PERIODS),
}


def require_source_columns(draft: Draft) -> None:
    """Unit and times are columns of the source: no expression, no other table's column."""
    unit = draft.relation.unit
    for parameter, (what, why) in _SOURCE_COLUMNS.items():
        if parameter not in draft.parameters:
            continue
        relation = draft.relation
        if unit is not None and parameter != "privacy_unit_column":  # of the rows that are grouped
            relation = replace(unit.rows, window=relation.window)
        name = draft.parameters[parameter]
        node = node_of(draft.clause, parameter) or relation.window
        if not isinstance(name, str):
            reason = f"{what} must be a column's name; got {name!r}"
            raise draft.refusal(node, reason, "name a column")
        expression = relation.columns.get(name)
        if expression is None and (not relation.open or name in relation.without):
            known = "EXCEPT leaves it out" if relation.open else ", ".join(relation.columns)
            reason = f"{name} is not among the columns of the subquery: {known}"
            raise draft.refusal(node, reason, "select it there")
        if isinstance(expression, exp.Column):
            draft.parameters[parameter] = expression.name
        elif expression is not None:
            raise draft.refusal(
                expression,
                f"{what} must be a column of the source; {name} is {canonical(expression)}: {why}",
                "name the column itself",
            )
