"""What would break the promise is refused; one check per function, in this order."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from dpstream.sql.calls import known_functions
from dpstream.sql.clauses import (
    known_clauses,
    known_window,
    no_joins_inside,
    no_star,
    no_subqueries,
    no_window_functions,
    nothing_left_over,
    one_select,
    private,
    public_triggers,
)
from dpstream.sql.dialect import canonical
from dpstream.sql.draft import AGGREGATES, Draft, called, calls
from dpstream.sql.options import node_of, read_options, read_overrides
from dpstream.sql.series import which_unit
from dpstream.sql.statement import close

_NOW_WORDS = frozenset(
    [
        "CURRENT_DATE",
        "CURRENT_DATETIME",
        "CURRENT_TIME",
        "CURRENT_TIMESTAMP",
        "CURRENT_USER",
        "SESSION_USER",
        "SYSDATE",
        "SYSTIMESTAMP",
        "LOCALTIME",
        "LOCALTIMESTAMP",
    ]
)


_NOW = _NOW_WORDS | {"NOW", "GETDATE", "TODAY", "PROCTIME", "UNIX_TIMESTAMP"}


_CHANCE = frozenset(
    [
        "RAND",
        "RANDOM",
        "RANDN",
        "UUID",
        "GEN_RANDOM_UUID",
        "GENERATE_UUID",
        "NEWID",
        "RAND_INTEGER",
        "SETSEED",
    ]
)


_ONE_ROW = frozenset(
    [
        "MIN",
        "MAX",
        "ANY_VALUE",
        "FIRST",
        "LAST",
        "FIRST_VALUE",
        "LAST_VALUE",
        "ARG_MIN",
        "ARG_MAX",
        "MIN_BY",
        "MAX_BY",
        "MODE",
        "ARRAY_AGG",
        "STRING_AGG",
        "LISTAGG",
        "GROUP_CONCAT",
        "JSON_AGG",
        "ARRAY_CONCAT_AGG",
        "APPROX_TOP_COUNT",
    ]
)


_NOT_YET = frozenset(
    [
        "VAR_SAMP",
        "VAR",
        "STDDEV_SAMP",
        "MEDIAN",
        "PERCENTILE_CONT",
        "QUANTILE",
        "PERCENTILE_DISC",
        "APPROX_QUANTILES",
        "CORR",
        "COVAR_POP",
        "COVAR_SAMP",
        "BIT_AND",
        "BIT_OR",
        "LOGICAL_AND",
        "LOGICAL_OR",
        "APPROX_COUNT_DISTINCT",
        "GROUPING",
    ]
)


def deterministic(draft: Draft) -> None:
    """The same row gives the same result, today and in a replay."""
    for node in draft.select.find_all(exp.Anonymous, exp.Column):
        name = node.name.upper()
        call = isinstance(node, exp.Anonymous)
        word = not call and name in _NOW_WORDS and not node.this.args.get("quoted")
        if word or (call and name in _NOW):
            raise draft.refusal(
                node,
                f"{name} changes with the clock: a replay would publish other numbers",
                "use the time column, or a constant such as TIMESTAMP '2024-05-01'",
            )
        if call and name in _CHANCE:
            raise draft.refusal(
                node,
                f"{name} draws at random: a replay would publish other numbers",
                "leave it out; noise is added where it is accounted for",
            )


def known_aggregates(draft: Draft) -> None:
    """Only aggregates whose change by one unit is bounded."""
    for call in calls(draft.select, _ONE_ROW):
        raise draft.refusal(
            call,
            f"{called(call)} can show the value of a single row",
            "use COUNT, SUM or AVG with bounds",
        )
    for call in calls(draft.select, _NOT_YET):
        raise draft.refusal(
            call,
            f"{called(call)} is not offered",
            f"use one of {', '.join(AGGREGATES)}; variances are those of all rows",
        )
    for call in draft.select.find_all(exp.Anonymous):
        name = called(call)
        meant = None if name in {*AGGREGATES, *known_functions()} else close(name, AGGREGATES)
        if meant:
            raise draft.refusal(call, f"there is no function {name}", f"did you mean {meant}?")
    for node in draft.select.find_all(exp.Filter):
        raise draft.refusal(
            node, "FILTER is not known", "use COUNTIF(condition), or SUM(IF(condition, x, 0), ...)"
        )


def aggregates_in_place(draft: Draft) -> None:
    """Aggregates stand in SELECT, HAVING and ORDER BY, and not within each other."""
    for name in ("where", "group"):
        clause = draft.select.args.get(name)
        for call in calls(clause, AGGREGATES) if clause is not None else ():
            raise draft.refusal(
                call,
                f"an aggregate in {'WHERE' if name == 'where' else 'GROUP BY'} decides by exact "
                "numbers about rows",
                "use HAVING, which sees the noisy numbers",
            )
    for call in calls(draft.select, AGGREGATES):
        for inside in call.expressions:
            for nested in calls(inside, AGGREGATES):
                raise draft.refusal(nested, "an aggregate of an aggregate", "use one of them")


def options(draft: Draft) -> None:
    """Every option is known and readable; what was given to the call goes before the text."""
    found = read_options(draft.statement, draft.clause)
    found |= read_overrides(draft.statement, draft.overrides)
    draft.parameters = found


def what_is_protected(draft: Draft) -> None:
    """Unit, epsilon and delta have no defaults."""
    wanted = {
        "unit": ("which column names the protected unit", "privacy_unit_column = user_id"),
        "epsilon": ("how much may be learned about a unit", "epsilon = 1"),
    }
    if not draft.series:
        wanted["delta"] = ("with which chance more may be learned", "delta = 1e-9")
    for parameter, (meaning, fix) in wanted.items():
        if parameter not in draft.parameters:
            option = fix.split(" = ")[0]
            raise draft.refusal(
                draft.clause, f"{option} is missing: {meaning}", f"add {fix} to OPTIONS"
            )


def unit_is_a_column(draft: Draft) -> None:
    """The unit is a column of the source: anything made of it could split one person in many."""
    _plain(draft, "unit", "the privacy unit", "one person could become many units")


def times_are_columns(draft: Draft) -> None:
    """Event time and arrival are columns of the source: periods and budget are counted by them."""
    for parameter in ("time", "arrival"):
        if parameter in draft.parameters:
            _plain(draft, parameter, "the time", "periods would be cut at other times")


def _plain(draft: Draft, parameter: str, what: str, why: str) -> None:
    relation, name = draft.relation, draft.parameters[parameter]
    node = node_of(draft.clause, parameter) or draft.relation.window
    if not isinstance(name, str):
        raise draft.refusal(node, f"{what} must be a column's name; got {name!r}", "name a column")
    found = relation.columns.get(name)
    if found is None and relation.open:
        return
    if found is None:
        raise draft.refusal(
            node,
            f"{name} is not among the columns of the subquery: {', '.join(relation.columns)}",
            "select it there",
        )
    if not isinstance(found, exp.Column):
        raise draft.refusal(
            found,
            f"{what} must be a column of the source; {name} is {canonical(found)}: {why}",
            "name the column itself",
        )
    draft.parameters[parameter] = found.name


CHECKS: tuple[Callable[[Draft], None], ...] = (
    one_select,
    known_clauses,
    private,
    no_joins_inside,
    no_window_functions,
    no_subqueries,
    deterministic,
    known_aggregates,
    aggregates_in_place,
    no_star,
    known_window,
    public_triggers,
    nothing_left_over,
    options,
    which_unit,
    what_is_protected,
)
"""Of the statement as it is written."""
