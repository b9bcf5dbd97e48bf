"""FUNNEL and RETENTION in FROM: tables of what each unit has reached, and when it came back.

FUNNEL(TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' DAY),
       steps => (page = '/home' AS home, page = '/buy' AS buy), within => INTERVAL '1' HOUR)
RETENTION(log, DESCRIPTOR(ts), first => event = 'signup', again => event = 'visit',
          period => INTERVAL '7' DAY, lags => 8)

Both look at the rows of one unit at a time, as subqueries per unit do (`unit_subquery.py`), and are
relations as these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.group_by.cohorts import AGAIN, FIRST, LAG, MOST_LAGS, CohortRows
from dpstream.group_by.funnel import MOST_STEPS, STEP, STEP_NAME, FunnelRows
from dpstream.query.windows import Tumble, duration
from dpstream.sql_compiler.outer_select import quoted_column
from dpstream.sql_compiler.privacy_clause import WrongKind, integer, interval, node_of
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    USER_TABLES,
    Draft,
    Over,
    Relation,
    UserTable,
    WindowTable,
    canonical,
    find_calls,
)
from dpstream.sql_compiler.unit_subquery import UnitRelation

EXAMPLES = {
    "FUNNEL": "FUNNEL(TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY), steps => (page = '/home' "
    "AS home, page = '/buy' AS buy), within => INTERVAL '1' HOUR)",
    "RETENTION": "RETENTION(clicks, DESCRIPTOR(ts), first => event = 'signup', again => event = "
    "'visit', period => INTERVAL '7' DAY, lags => 8)",
}
_NAMED = {
    "FUNNEL": {"steps": True, "within": False, "strict": False, "by": False},
    "RETENTION": {"first": True, "again": True, "period": True, "lags": True, "by": False},
}
"""The named arguments of each, and which of them must be given."""


def user_relation(draft: Draft, table: UserTable, rows: Relation, substitute: Any) -> Relation:
    """What FUNNEL or RETENTION over these rows gives."""
    return _UserTable(draft, table, rows, substitute).relation()


class _UserTable:
    """Compiles FUNNEL or RETENTION into a relation over inner rows."""

    def __init__(self, draft: Draft, table: UserTable, rows: Relation, substitute: Any) -> None:
        self._draft, self._table, self._rows = draft, table, rows
        self._substitute, self._kind = substitute, str(table.args["kind"])
        named = table.args.get("named")
        self._named = {each.this.name.lower(): each.expression for each in named or ()}

    def _refuse(self, node: exp.Expr | None, reason: str, fix: str = "") -> InvalidParameter:
        return self._draft.refusal(
            self._table if node is None else node, reason, fix or f"write {EXAMPLES[self._kind]}"
        )

    def relation(self) -> Relation:
        """The relation that the outer SELECT reads."""
        rows, known = self._rows, _NAMED[self._kind]
        if rows.joins or rows.unnests or rows.union or rows.unit is not None:
            raise self._refuse(
                None, f"{self._kind} reads one table, without joins, lists and UNION ALL inside"
            )
        for name in self._named:
            if name not in known:
                reason = f"{self._kind} has no argument {name}: it has {', '.join(known)}"
                raise self._refuse(self._named[name], reason)
        for name, needed in known.items():
            if needed and name not in self._named:
                raise self._refuse(None, f"{self._kind} has no {name}")
        unit = UnitRelation(rows=rows)
        unit.window, rows.window = rows.window, None
        time = self._table.args.get("time")
        if time is not None:
            unit.time = self._time(time)
        columns = self._funnel(unit) if self._kind == "FUNNEL" else self._retention(unit)
        name = str(self._draft.parameters["privacy_unit_column"])
        of_unit = self._substitute(self._draft, quoted_column(name), rows)
        return Relation(table=rows.table, columns={name: of_unit} | columns, open=False, unit=unit)

    def _time(self, node: exp.Expr) -> str:
        """The time column of DESCRIPTOR(ts)."""
        inside = node.expressions if isinstance(node, exp.Anonymous) else []
        column = inside[0] if len(inside) == 1 and node.name.upper() == "DESCRIPTOR" else node
        if not isinstance(column, exp.Column):
            raise self._refuse(node, "the time column is wanted here")
        return str(column.name)

    def _funnel(self, unit: UnitRelation) -> dict[str, exp.Expr]:
        steps, keys = self._steps(), self._keys(unit)
        conditions = [self._condition(step.unalias()) for step in steps]
        strict = self._truth("strict")
        if not strict:  # other rows change nothing, so they need not wait
            anything = conditions[0].copy()
            for each in conditions[1:]:
                anything = exp.Or(this=anything, expression=each.copy())
            unit.rows.where.append(exp.Paren(this=anything))
        within = None
        if "within" in self._named:
            within = self._length("within")
        unit.inner = FunnelRows(
            steps=self._names(steps),
            column=unit.hold(_bits(conditions)),
            keys=tuple(keys.values()),
            within=within,
            strict=strict,
        )
        made = {name: quoted_column(held) for name, held in keys.items()}
        return made | {name: quoted_column(name) for name in (STEP, STEP_NAME)}

    def _retention(self, unit: UnitRelation) -> dict[str, exp.Expr]:
        if unit.window is not None or unit.time is None:
            raise self._refuse(None, "RETENTION has windows of its own, as long as its period")
        lags = self._named["lags"]
        try:
            most = integer(lags)
        except WrongKind as wanted:
            raise self._refuse(lags, f"lags cannot be this: {wanted} is wanted") from None
        if not 1 <= most <= MOST_LAGS:
            raise self._refuse(lags, f"lags must be from 1 to {MOST_LAGS}; got {most}")
        self._length("period")
        unit.window = WindowTable(
            kind="TUMBLE",
            this=self._table.this.copy(),
            time=exp.column(unit.time, quoted=True),
            expressions=[self._named["period"].copy()],
        )
        unit.window.update_positions(self._table)
        unit.time = None
        conditions = [self._condition(self._named[name]) for name in ("first", "again")]
        anything = exp.Or(this=conditions[0].copy(), expression=conditions[1].copy())
        unit.rows.where.append(exp.Paren(this=anything))
        keys = self._keys(unit)
        column = unit.hold(_bits(conditions, (FIRST, AGAIN)))
        unit.inner = CohortRows(column=column, lags=most, keys=tuple(keys.values()))
        return {name: quoted_column(held) for name, held in keys.items()} | {
            LAG: quoted_column(LAG)
        }

    def _steps(self) -> list[exp.Expr]:
        """The steps as they are written."""
        given = self._named["steps"]
        steps = list(given.expressions) if isinstance(given, exp.Tuple) else [given]
        if not 2 <= len(steps) <= MOST_STEPS:
            raise self._refuse(given, f"a funnel has 2 to {MOST_STEPS} steps; got {len(steps)}")
        return steps

    def _names(self, steps: Sequence[exp.Expr]) -> tuple[str, ...]:
        """What each step is called; steps of one name are numbered."""
        found: list[str] = []
        for step in steps:
            name = step.alias or (
                step.name if isinstance(step, exp.Column) else canonical(step.unalias())
            )
            number = sum(each == name or each.startswith(f"{name} #") for each in found)
            found.append(f"{name} #{number + 1}" if number else name)
        return tuple(found)

    def _keys(self, unit: UnitRelation) -> dict[str, str]:
        """The columns of BY, and the names under which they wait."""
        given = self._named.get("by")
        nodes = [] if given is None else [given]
        if isinstance(given, exp.Tuple | exp.Paren):
            nodes = given.expressions if isinstance(given, exp.Tuple) else [given.this]
        keys: dict[str, str] = {}
        for node in nodes:
            name = node.alias or (node.name if isinstance(node, exp.Column) else "")
            if not name or name in keys or name in USER_TABLES[self._kind]:
                raise self._refuse(node, "each column of by needs a name of its own: x AS name")
            keys[name] = unit.hold(self._expression(node.unalias()))
        return keys

    def _condition(self, node: exp.Expr) -> exp.Expr:
        return exp.Paren(this=self._expression(node))

    def _expression(self, node: exp.Expr) -> exp.Expr:
        """An expression of single rows, in terms of the source's columns."""
        for call in find_calls(node, AGGREGATES):
            raise self._refuse(
                call,
                f"{self._kind} looks at single rows here",
                "group the rows of each unit in a subquery instead: FROM (SELECT user_id, "
                "window_start, COUNT(*) AS n FROM TUMBLE(...) GROUP BY user_id, window_start)",
            )
        if node.find(Over) is not None:
            raise self._refuse(node, f"{self._kind} looks at single rows here", "leave OVER out")
        unit = str(self._draft.parameters["privacy_unit_column"])
        found: exp.Expr = self._substitute(self._draft, node, self._rows)
        for column in found.find_all(exp.Column):
            if column.name == unit:
                raise self._refuse(
                    node, f"{canonical(node)} is made of the privacy unit", "leave it out"
                )
        return found

    def _length(self, name: str) -> int:
        node = self._named[name]
        try:
            length = interval(node, calendar=name == "period")
        except WrongKind as wanted:
            raise self._refuse(node, f"{name} is a length of time", f"write {wanted}") from None
        if not isinstance(length, int) or length <= 0:
            raise self._refuse(node, f"{name} must be longer than 0")
        return int(length)

    def _truth(self, name: str) -> bool:
        node = self._named.get(name)
        if node is not None and not isinstance(node, exp.Boolean):
            raise self._refuse(node, f"{name} is TRUE or FALSE")
        return node is not None and bool(node.this)


def _bits(conditions: Sequence[exp.Expr], bits: Sequence[int] | None = None) -> exp.Expr:
    """An expression with a bit for each condition that holds."""
    total: exp.Expr | None = None
    for number, condition in enumerate(conditions):
        bit = exp.Literal.number(1 << number if bits is None else bits[number])
        zero = exp.Literal.number(0)
        one: exp.Expr = exp.Case(ifs=[exp.If(this=condition.copy(), true=bit)], default=zero)
        total = one if total is None else exp.Add(this=total, expression=one)
    assert total is not None
    return total


def complete_user_table(draft: Draft) -> None:
    """Say what the text of FUNNEL or RETENTION says of keys and bounds; refuse other groups."""
    unit, given = draft.relation.unit, draft.parameters
    inner = None if unit is None else unit.inner
    if not isinstance(inner, FunnelRows | CohortRows):
        return
    kind = "FUNNEL" if isinstance(inner, FunnelRows) else "RETENTION"
    listed = USER_TABLES[kind]
    names = {
        key: node.name
        for key, node in draft.keys.items()
        if isinstance(node, exp.Column) and node.name in listed
    }
    if listed[0] not in names.values():
        raise draft.refusal(
            draft.select.args.get("group") or draft.clause,
            f"{kind} has a row of a unit for each {listed[0]}, and {listed[0]} is not grouped by",
            f"add {listed[0]} to GROUP BY",
        )
    others = [key for key in draft.keys if key not in names]
    if not others:
        if "public_groups" in given:
            raise draft.refusal(
                node_of(draft.clause, "public_groups"),
                f"which values {listed[0]} has is said in FROM",
                "leave public_groups out",
            )
        values = range(inner.lags + 1) if isinstance(inner, CohortRows) else inner.steps
        given["public_groups"] = [
            tuple(_value(inner, names[key], number, value) for key in draft.keys)
            for number, value in enumerate(values)
        ]
    given.setdefault("max_rows_per_group", 1)
    if isinstance(inner, CohortRows):
        _require_users_for_ever(draft)
        given.setdefault("max_groups_contributed", inner.most)
        return
    window, period = given.get("window"), given.get("privacy_unit_period", "forever")
    once = (
        type(window) is Tumble
        and period != "forever"
        and window.size == duration(period, "privacy_unit_period", calendar=True)
    )
    if not others and (window is None or once):  # a unit is in one window
        given.setdefault("max_groups_contributed", len(inner.steps))


def _require_users_for_ever(draft: Draft) -> None:
    """A cohort is of a user for ever: without one of its periods it would be another one."""
    given = draft.parameters
    endless = given.get("end") is None and "privacy_unit_period" not in given
    if endless or given.get("privacy_unit_period", "forever") != "forever":
        raise draft.refusal(
            node_of(draft.clause, "privacy_unit_period") or draft.clause,
            "cohorts are of users for ever: without one of its periods a user would be of another "
            "cohort, and protecting that takes 1.41 times the noise for less protection",
            "write privacy_unit_period = 'forever'",
        )


def _value(inner: FunnelRows | CohortRows, name: str, number: int, value: Any) -> Any:
    if isinstance(inner, CohortRows):
        return value
    return number + 1 if name == STEP else value
