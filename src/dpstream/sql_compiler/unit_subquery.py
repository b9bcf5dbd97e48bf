"""Subqueries per unit: FROM (SELECT user_id, COUNT(*) AS n FROM clicks GROUP BY user_id).

Such a subquery looks at the rows of one unit at a time: GROUP BY has the unit among its columns, or
ROW_NUMBER is OVER (PARTITION BY the unit). What it selects are expressions of figures (`InnerRows`)
that are known when the window closes; HAVING and QUALIFY filter inner rows by exact figures of
their own unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sqlglot import exp

from dpstream.group_by.cohorts import CohortRows
from dpstream.group_by.funnel import FunnelRows
from dpstream.group_by.inner_rows import OF_ROW, Figure, InnerRows, Kind, Numbering
from dpstream.sql_compiler import validate
from dpstream.sql_compiler.privacy_clause import WrongKind, interval
from dpstream.sql_compiler.statement import (
    WINDOW_COLUMNS,
    Draft,
    Over,
    Relation,
    UnitSelect,
    WindowTable,
    call_name,
    canonical,
    find_calls,
    other_clauses,
    present_args,
)

FIGURES: dict[str, Kind] = {
    "COUNT": "values",
    "COUNTIF": "sum",
    "SUM": "sum",
    "AVG": "avg",
    "MIN": "min",
    "MAX": "max",
    **dict.fromkeys(("FIRST", "FIRST_VALUE", "ANY_VALUE"), "first"),
    **dict.fromkeys(("LAST", "LAST_VALUE"), "last"),
}
"""What a call over the rows of a unit is; COUNT(*) and COUNT(DISTINCT x) are told by what is in."""
SESSION_COLUMNS = ("session_start", "session_end")
_CLAUSES = {"expressions", "from_", "joins", "where", "group", "having", "qualify"}
_SESSION = "SESSION(clicks, DESCRIPTOR(ts), INTERVAL '30' MINUTE)"
_HOMES = (exp.From, WindowTable, exp.SetOperation)


@dataclass(kw_only=True)
class UnitRelation:
    """The rows that a subquery per unit reads, and what it makes of them."""

    rows: Relation
    window: WindowTable | None = None
    time: str | None = None
    """The time column, as a session names it."""
    held: dict[str, exp.Expr] = field(default_factory=dict)
    """Columns that wait with a row: expressions of the source's columns."""
    numbers: set[str] = field(default_factory=set)
    inner: InnerRows | FunnelRows | CohortRows = field(default_factory=InnerRows)

    def hold(self, node: exp.Expr, *, number: bool = False) -> str:
        """The name under which the values of an expression wait."""
        name = f"{canonical(node)}{OF_ROW}"
        self.held[name] = node
        if number:
            self.numbers.add(name)
        return name


def detach_unit_subqueries(draft: Draft) -> None:
    """Take subqueries that group rows out of the statement: they have rules of their own."""
    for node in list(draft.select.find_all(exp.Subquery, exp.CTE)):
        select = node.this
        home = isinstance(node, exp.CTE) or isinstance(node.parent, _HOMES)
        if home and isinstance(select, exp.Select) and _groups_rows(select):
            _check(draft, select)
            draft.unit_selects.append(select)
            place = UnitSelect(number=len(draft.unit_selects) - 1)
            node.set("this", place.update_positions(_first_word(select)))


def _check(draft: Draft, select: exp.Expr) -> None:
    """The checks of a statement that a subquery per unit has too; calls of figures are fine."""
    functions = {**draft.functions, **dict.fromkeys(FIGURES)}
    statement = replace(draft.statement, tree=select)
    inner = replace(draft, statement=statement, functions=functions)
    for rule in (
        validate.refuse_joins,
        validate.refuse_unsafe_calls,
    ):
        rule(inner)
    where = select.args.get("where")
    for call in [] if where is None else find_calls(where, FIGURES):
        raise draft.refusal(call, "WHERE looks at single rows", "use HAVING, of the same subquery")


def _first_word(select: exp.Expr) -> exp.Expr:
    """A part of a SELECT that says where it stands."""
    return next((part for part in select.walk() if "start" in part.meta), select)


def _groups_rows(select: exp.Expr) -> bool:
    args = select.args
    from_ = args.get("from_")
    source = None if from_ is None else from_.this
    session = (
        isinstance(source, exp.Table)
        and isinstance(source.this, WindowTable)
        and source.this.args["kind"] == "SESSION"
    )
    if args.get("hint"):
        return False
    numbered = any(item.find(Over) for item in select.expressions)
    grouped = args.get("group") or args.get("qualify") or numbered
    return bool(session or grouped or _has_figures(select))


def _has_figures(select: exp.Expr) -> bool:
    having = select.args.get("having")
    written = [*select.expressions, *([] if having is None else [having])]
    return any(any(find_calls(each, FIGURES)) for each in written)


class _UnitSubquery:
    """Compiles one subquery per unit into a relation over its inner rows."""

    def __init__(self, draft: Draft, select: exp.Expr, rows: Relation, substitute: Any) -> None:
        self._draft, self._select, self._substitute = draft, select, substitute
        self._unit = UnitRelation(rows=rows)
        self._keys: dict[str, str] = {}  # canonical expressions of the source: names that are held
        self._figures: dict[str, Figure] = {}
        self._numberings: dict[str, Numbering] = {}
        self._each_row = False

    def relation(self) -> Relation:
        """The relation that the outer SELECT reads."""
        draft, unit, args = self._draft, self._unit, self._select.args
        for name, node in other_clauses(self._select, _CLAUSES):
            fix = "keep columns, WHERE, GROUP BY, HAVING and QUALIFY there"
            raise draft.refusal(node, f"{name} is not known in a subquery per unit", fix)
        self._read_window()
        rows = unit.rows
        if rows.joins or rows.unnests or rows.union or rows.unit is not None:
            raise draft.refusal(
                self._select,
                "a subquery that groups the rows of each unit reads one table",
                "write FROM (SELECT user_id, COUNT(*) AS n FROM clicks GROUP BY user_id), without "
                "joins, lists, UNION ALL or another such subquery inside",
            )
        self._each_row = args.get("group") is None and not _has_figures(self._select)
        self._read_groups()
        columns = self._columns()
        where = [
            self._of_inner(self._named(args[name].this))
            for name in ("having", "qualify")
            if args.get(name)
        ]
        gap = self._gap()
        unit.inner = InnerRows(
            keys=tuple(self._keys.values()),
            figures=tuple(self._figures.values()),
            gap=gap,
            each_row=self._each_row,
            numberings=tuple(self._numberings.values()),
        )
        return Relation(table=rows.table, columns=columns, open=False, where=where, unit=unit)

    def _read_window(self) -> None:
        unit = self._unit
        window, unit.rows.window = unit.rows.window, None
        unit.window = window

    def _gap(self) -> int | None:
        """How far the rows of a session may be apart."""
        unit, window = self._unit, self._unit.window
        if window is None or window.args["kind"] != "SESSION":
            return None
        unit.window = None
        time, sizes, parts = _time_of(window), window.expressions, window.args.get("parts")
        other = parts is not None and not self._is_unit(parts)
        if time is None or len(sizes) != 1 or other:
            raise self._draft.refusal(
                window,
                "SESSION takes a table, the time column and a gap, and is of each unit",
                f"write {_SESSION}",
            )
        unit.time = time
        try:
            gap = interval(sizes[0])
        except WrongKind as wanted:
            raise self._draft.refusal(
                sizes[0], "SESSION cannot use this interval", f"write {wanted}"
            ) from None
        if not isinstance(gap, int) or gap < 0:
            raise self._draft.refusal(sizes[0], "the gap is a length of time", f"write {_SESSION}")
        return int(gap)

    # Columns.

    @property
    def _of_windows(self) -> tuple[str, ...]:
        """The columns that windows and sessions bring."""
        window = self._unit.window
        if window is None:
            return ()
        return SESSION_COLUMNS if window.args["kind"] == "SESSION" else WINDOW_COLUMNS

    def _of_source(self, node: exp.Expr) -> exp.Expr:
        found: exp.Expr = self._substitute(self._draft, node, self._unit.rows)
        return found

    def _is_unit(self, node: exp.Expr) -> bool:
        """Is it the unit's column?"""
        if not isinstance(node, exp.Column):
            return False
        return self._is_column(node, self._unit_name)

    @property
    def _unit_name(self) -> str:
        """What the unit's column is called here: it may be selected under another name."""
        unit = str(self._draft.parameters["privacy_unit_column"])
        items = (e for e in self._select.expressions if isinstance(e, exp.Column | exp.Alias))
        plain = next((item.unalias() for item in items if item.alias_or_name == unit), None)
        return plain.name if isinstance(plain, exp.Column) else unit

    def _is_time(self, node: exp.Expr) -> bool:
        """Is it the time of rows?"""
        return self._time is not None and self._is_column(node, self._time)

    def _is_column(self, node: exp.Expr, name: str) -> bool:
        rows = self._unit.rows
        there = name in rows.columns or (rows.open and name not in rows.without)
        if not there or not isinstance(node, exp.Column) or node.name in self._of_windows:
            return False
        mine, asked = (self._of_source(each) for each in (exp.column(name, quoted=True), node))
        return isinstance(asked, exp.Column) and asked.name == mine.name

    @property
    def _time(self) -> str | None:
        """The source's time column."""
        window = self._unit.window
        time = None if window is None else _time_of(window)
        return time or self._draft.parameters.get("time_column")

    def _held(self, node: exp.Expr, *, number: bool = False) -> str:
        """The name under which an expression waits; nothing made of the unit does."""
        for column in node.find_all(exp.Column):
            if self._is_unit(column):
                raise self._draft.refusal(
                    node,
                    f"{canonical(node)} is made of the privacy unit, whose rows are grouped here",
                    "leave it out; COUNT(DISTINCT unit) outside counts units",
                )
        for call in node.find_all(exp.Anonymous):
            if call_name(call) in FIGURES:
                raise self._draft.refusal(call, "a figure of a figure", "use one of them")
        return self._unit.hold(self._of_source(node), number=number)

    def _read_groups(self) -> None:
        """The columns of GROUP BY: the unit, those of windows, and its own keys."""
        draft, group = self._draft, self._select.args.get("group")
        if self._each_row:
            return
        if group is None or present_args(group) - {"expressions"}:
            raise self._without_unit(group or self._select)
        items = {e.alias: e.this for e in self._select.expressions if isinstance(e, exp.Alias)}
        of_unit, seen = False, set[str]()
        for node in group.expressions:
            plain = node
            if isinstance(node, exp.Literal) and not node.is_string:
                at = int(node.name) if node.name.isdigit() else 0
                if not 1 <= at <= len(self._select.expressions):
                    raise draft.refusal(node, f"there is no column {node.name}", "count from 1")
                plain = self._select.expressions[at - 1].unalias()
            elif isinstance(node, exp.Column) and not node.args.get("table"):
                plain = items.get(node.name, node)
            if self._is_unit(plain):
                of_unit = True
            elif isinstance(plain, exp.Column) and plain.name in self._of_windows:
                seen.add(plain.name)
            else:
                self._keys[canonical(self._of_source(plain))] = self._held(plain)
        if not of_unit:
            raise self._without_unit(group)
        if self._of_windows and not seen:
            name = self._of_windows[0]
            raise draft.refusal(group, f"{name} is not grouped by", f"add {name} to this GROUP BY")

    def _without_unit(self, node: exp.Expr) -> Exception:
        unit = self._draft.parameters["privacy_unit_column"]
        return self._draft.refusal(
            node,
            f"GROUP BY of a subquery has no {unit}: inside FROM it would mix the rows of several "
            "units before they are bounded",
            f"add {unit} to this GROUP BY (the rows of each unit are grouped), or aggregate "
            "outside alone, where noise is added",
        )

    def _columns(self) -> dict[str, exp.Expr]:
        """What it selects, by name: expressions of inner columns."""
        draft, columns = self._draft, dict[str, exp.Expr]()
        unit = str(draft.parameters["privacy_unit_column"])
        for item in self._select.expressions:
            name = item.alias_or_name if isinstance(item, exp.Alias | exp.Column) else ""
            if not name or isinstance(item, exp.Star) or isinstance(item.this, exp.Star):
                raise draft.refusal(
                    item, "a column of a subquery needs a name", "write it as x AS name"
                )
            if name in columns:
                raise draft.refusal(item, f"two columns are named {name}", "rename one of them")
            node = item.unalias()
            columns[name] = self._of_source(node) if self._is_unit(node) else self._of_inner(node)
        if not any(
            isinstance(e, exp.Column | exp.Alias) and self._is_unit(e.unalias())
            for e in self._select.expressions
        ):
            raise draft.refusal(
                self._select.expressions[0],
                f"the subquery does not select {unit}",
                f"select {unit} first",
            )
        return columns

    def _named(self, node: exp.Expr) -> exp.Expr:
        """HAVING and QUALIFY, in which names of SELECT stand for what they are."""
        items = {e.alias: e.this for e in self._select.expressions if isinstance(e, exp.Alias)}

        def expand(part: exp.Expr) -> exp.Expr:
            if not isinstance(part, exp.Column) or part.args.get("table"):
                return part
            return exp.Paren(this=items[part.name].copy()) if part.name in items else part

        return node.transform(expand)

    def _of_inner(self, node: exp.Expr) -> exp.Expr:
        """An expression in terms of inner columns."""

        def replaced(part: exp.Expr) -> exp.Expr:
            if isinstance(part, Over):
                return _column(self._numbering(part), part)
            if not self._each_row and call_name(part) in FIGURES:
                return _column(self._figure(part), part)
            if isinstance(part, exp.Identifier | exp.Literal):
                return part
            if not self._each_row and part.find(exp.Column) and not any(find_calls(part, FIGURES)):
                key = self._keys.get(canonical(self._of_source_or_window(part)))
                if key is not None:
                    return _column(key, part)
            if not isinstance(part, exp.Column):
                return part
            if part.name in self._of_windows and not part.args.get("table"):
                return _column(part.name, part)
            if self._each_row:
                return _column(self._held(part), part)
            if self._is_unit(part):
                raise self._draft.refusal(
                    part, f"{part.name} is the privacy unit", "select it alone, by its name"
                )
            raise self._draft.refusal(
                part,
                f"{canonical(part)} is neither grouped by nor a figure of the unit's rows",
                f"add it to this GROUP BY, or write FIRST({canonical(part)}), MAX(...), ...",
            )

        return node.transform(replaced)

    def _of_source_or_window(self, node: exp.Expr) -> exp.Expr:
        names = {column.name for column in node.find_all(exp.Column)}
        return node if names & set(self._of_windows) else self._of_source(node)

    def _figure(self, call: exp.Expr) -> str:
        """The name of a figure of the rows of an inner group."""
        arguments, kind = call.expressions, FIGURES[call_name(call)]
        if len(arguments) != 1 or isinstance(arguments[0], exp.Kwarg):
            raise self._draft.refusal(
                call,
                f"{call_name(call)} takes one column here: a unit's own rows need no bounds",
                "leave the others out; bounds stand in the outer SELECT",
            )
        argument, column = arguments[0], None
        if isinstance(argument, exp.Star):
            if call_name(call) != "COUNT":
                raise self._draft.refusal(call, f"{call_name(call)}(*) has no meaning", "name it")
            kind = "rows"
        elif isinstance(argument, exp.Distinct):
            if call_name(call) != "COUNT" or len(argument.expressions) != 1:
                raise self._draft.refusal(
                    call, "DISTINCT goes with COUNT and one column", "write COUNT(DISTINCT x)"
                )
            kind, column = "distinct", self._held(argument.expressions[0])
        elif self._is_time(argument) and kind in ("min", "max", "first", "last"):
            column = None
        else:
            if call_name(call) == "COUNTIF":
                one, zero = exp.Literal.number(1), exp.Literal.number(0)
                argument = exp.Case(ifs=[exp.If(this=argument.copy(), true=one)], default=zero)
            column = self._held(argument, number=kind in ("sum", "avg"))
        name = canonical(call)
        self._figures[name] = Figure(name=name, kind=kind, column=column)
        return name

    def _numbering(self, over: Over) -> str:
        """The name of ROW_NUMBER() OVER (PARTITION BY unit, ... ORDER BY ...)."""
        draft, name = self._draft, canonical(over)
        order, parts = over.args.get("order") or [], over.args.get("parts") or []
        example = "ROW_NUMBER() OVER (PARTITION BY user_id, window_start ORDER BY ts)"
        if over.this != "ROW_NUMBER" or over.args.get("other") or over.args.get("frame"):
            raise draft.refusal(over, f"{name} is not known in a subquery per unit", example)
        if not self._each_row:
            fix = "write GROUP BY in one subquery, or number rows in another query"
            raise draft.refusal(over, "rows are grouped, and numbered", fix)
        if not any(self._is_unit(part) for part in parts):
            raise draft.refusal(
                over,
                "a window function (OVER) looks at the rows of several units",
                f"partition by the unit: {example}",
            )
        if not order:
            raise draft.refusal(over, "ROW_NUMBER has no ORDER BY", example)
        if self._of_windows and not any(part.name in self._of_windows for part in parts):
            name = self._of_windows[0]
            raise draft.refusal(over, f"rows are numbered in each {name}", f"add {name}: {example}")
        by = []
        for term in order:
            down, first = bool(term.args.get("desc")), bool(term.args.get("nulls_first"))
            timed = self._is_time(term.this)
            by.append((None if timed else self._held(term.this), down, first))
        own = [
            self._held(part)
            for part in parts
            if not self._is_unit(part) and part.name not in self._of_windows
        ]
        self._numberings[name] = Numbering(name=name, parts=tuple(own), order=tuple(by))
        return name


def _time_of(window: WindowTable) -> str | None:
    """The time column that a window names, if it names one."""
    time = window.args.get("time")
    if isinstance(time, exp.Anonymous) and call_name(time) == "DESCRIPTOR":
        time = time.expressions[0] if len(time.expressions) == 1 else None
    return time.name if isinstance(time, exp.Column) else None


def _column(name: str, at: exp.Expr) -> exp.Expr:
    return exp.column(name, quoted=True).update_positions(_first_word(at))


def unit_relation(draft: Draft, select: exp.Expr, rows: Relation, substitute: Any) -> Relation:
    """What a subquery per unit over these rows gives."""
    return _UnitSubquery(draft, select, rows, substitute).relation()


def require_own_windows(draft: Draft) -> None:
    """Inner rows are of one window, and are published once, when it closes."""
    relation, emit = draft.relation, draft.select.args.get("emit")
    unit: UnitRelation = relation.unit
    if draft.series:
        raise draft.refusal(
            draft.clause,
            "a time-series mechanism counts rows as they are, not what becomes of a unit's rows",
            "leave privacy_unit and mechanism out",
        )
    if emit is not None and emit.args.get("every") is not None and not unit.inner.grows:
        raise draft.refusal(
            emit,
            "what a unit has in a window is known when the window closes, and published then",
            "leave EMIT EVERY out, or use shorter windows; who has k rows, or takes k steps in "
            "order, may be published again and again: FROM FUNNEL(clicks, steps => (a, b, ...))",
        )
    if relation.window is None:
        relation.window = unit.window
    elif unit.window is not None:
        raise draft.refusal(relation.window, "a window of windows", "use the inner one alone")
    else:
        _read_session_window(draft, relation.window)
    if unit.time is not None and draft.parameters.setdefault("time_column", unit.time) != unit.time:
        raise draft.refusal(relation.window, "two time columns are named", "leave time_column out")


def _read_session_window(draft: Draft, window: WindowTable) -> None:
    """Windows around sessions are of the time at which sessions begin."""
    unit: UnitRelation = draft.relation.unit
    time = _time_of(window)
    begins = None if time is None else draft.relation.columns.get(time)
    if unit.inner.gap is None:
        raise draft.refusal(
            window,
            "the window stands around a subquery per unit",
            "put it inside: FROM (SELECT user_id, window_start, ... FROM TUMBLE(clicks, "
            "DESCRIPTOR(ts), INTERVAL '1' DAY) GROUP BY user_id, window_start)",
        )
    if not isinstance(begins, exp.Column) or begins.name != SESSION_COLUMNS[0]:
        raise draft.refusal(
            window,
            "windows of sessions are of the time at which these begin",
            "select session_start in the subquery, and write TUMBLE((SELECT ...), "
            "DESCRIPTOR(session_start), INTERVAL '1' DAY)",
        )
    window.set("time", exp.column(str(unit.time), quoted=True))
