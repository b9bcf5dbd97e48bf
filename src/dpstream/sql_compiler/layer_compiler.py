"""SELECTs over what a private query publishes, compiled one after another.

A column has an error bar where that is honest: a sum of columns whose noises are independent, or a
quotient of two such sums; a sum or mean of rows that are not chosen by noisy values; a figure of
several windows, whose noises are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.sql_compiler.earlier_windows import (
    FARTHEST,
    STDDEV,
    LookBack,
    WindowFunction,
    looks_at_windows,
    read_window_function,
)
from dpstream.sql_compiler.expressions import literal_value
from dpstream.sql_compiler.outer_select import NAMING, Layer
from dpstream.sql_compiler.outer_select import quoted_column as _column
from dpstream.sql_compiler.over_clause import error_bar
from dpstream.sql_compiler.published_select import (
    GroupAggregate,
    Grouping,
    Output,
    PublishedSelect,
    PublishedSelects,
    PublishedStep,
)
from dpstream.sql_compiler.published_shares import (
    COHORT,
    ENDS,
    SHARE,
    Shares,
    SharesOfCohorts,
    shares_of_users,
)
from dpstream.sql_compiler.query_builder import (
    ErrorBar,
    Expression,
    PostProcessing,
    QueryBuilder,
    WrittenErrorBar,
    linear_factors,
    nonzero_terms,
)
from dpstream.sql_compiler.select import expand_sets
from dpstream.sql_compiler.statement import (
    RELEASE_COLUMNS,
    WINDOW_COLUMNS,
    Draft,
    Over,
    call_name,
    canonical,
    find_calls,
    other_clauses,
    present_args,
)
from dpstream.sql_compiler.validate import refuse_changing_calls

_AGGREGATES = ("SUM", "AVG", "MIN", "MAX", "COUNT", "COUNTIF", "ENTROPY")
_PIVOT_MORE = ("unpivot", "using", "group", "include_nulls", "default_on_null", "into", "with_")
_CLAUSES = {
    *("expressions", "with_", "from_", "where", "group", "having", "qualify"),
    *("order", "limit", "offset", "emit"),
}
_REFUSED = {
    "JOINS": (
        "published rows are not joined: a run publishes the tables of one private query",
        "write each query to a table, and join these in the database that keeps them",
    ),
    "DISTINCT": ("DISTINCT is not known here", "use GROUP BY"),
}


Noise = frozenset[Any]
"""The noises that are in a figure: which measure, how many windows back."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a published column.

    `exact`: it is no noisy figure. `noise`: what is in it, if its error bar may be used further.
    `ends`: "" and what the names of the columns beside it end with.
    """

    exact: bool = False
    noise: Noise | None = None
    ends: tuple[str, ...] = ("",)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of the rows that a SELECT reads."""

    columns: dict[str, Known]
    constants: tuple[str, ...]
    """Columns that are the same in all rows of a release, beside the others or among them."""
    keys: tuple[str, ...] | None
    """Columns that name a row within its window; None: it is not known."""
    chosen: bool
    """Were rows chosen by noisy values?"""
    together: bool
    """Is there noise that all rows of a release share?"""

    @property
    def known(self) -> dict[str, Known]:
        """All columns that there are, by name."""
        beside = {f"{n}{end}": Known() for n, each in self.columns.items() for end in each.ends}
        constants = {name: Known(exact=name != "kept_share") for name in self.constants}
        return beside | constants | self.columns


def published_by(draft: Draft, builder: QueryBuilder, query: Query | SeriesQuery) -> Published:
    """What a private query publishes."""
    finish: Any = query.finish
    bars = {} if finish is None else finish.ends
    columns: dict[str, Known] = {}
    debias = frozenset([("debias", 0)]) if draft.parameters.get("debias") else frozenset()

    def noise_of(names: Iterable[str]) -> Noise:
        return debias | {(m, 0) for each in names for m in builder.noise_of(each)}

    for name in draft.outputs:
        if name in draft.aggregates:
            beside = (
                query.interval_ends(builder.aggregates[name]) if isinstance(query, Query) else ()
            )
            columns[name] = Known(noise=noise_of([name]), ends=("", STDDEV, *beside))
        elif name in draft.computed or name in draft.ranked:
            node = draft.computed.get(name)
            read = [] if node is None else [each.name for each in node.find_all(exp.Column)]
            noise = None if node is None else noise_of(e for e in read if e in draft.aggregates)
            ends = bars.get(name, ())
            columns[name] = Known(noise=noise if STDDEV in ends else None, ends=("", *ends))
            if node is not None and not any(each in draft.aggregates for each in read):
                columns[name] = replace(columns[name], exact=True, noise=None)
        else:
            columns[name] = Known(exact=True)
    columns |= {name: Known(exact=True) for name in draft.labels}
    windows = WINDOW_COLUMNS if "time_column" in draft.parameters else ()
    more = ["held"] if draft.series else []
    share = ["kept_share"] if "kept_share" in query.answer_columns else []
    clauses = draft.select.args
    return Published(
        columns=columns,
        constants=(*windows, *more, *RELEASE_COLUMNS, *share),
        keys=(*draft.keys, *draft.labels) if all(key in columns for key in draft.keys) else None,
        chosen=any(clauses.get(name) for name in ("having", "qualify", "limit", "offset")),
        together=draft.series or bool(debias) or bool(draft.sets),
    )


def with_layers(
    draft: Draft, builder: QueryBuilder, query: Query | SeriesQuery, layers: list[Layer]
) -> Query | SeriesQuery:
    """The query with the SELECTs around it as its post-processing."""
    published = published_by(draft, builder, query)
    selects: list[PublishedStep] = []
    shares = shares_of_users(draft, query)
    if shares is not None:
        published = _with_shares(published, shares)
        selects.append(shares)
    if not layers and not selects:
        return query
    for layer in layers:
        if layer.pivot is not None:
            compiler = LayerCompiler(draft, builder, query, published, layer)
            select, published = compiler.pivot(layer.pivot)
            selects.append(select)
        select, published = LayerCompiler(draft, builder, query, published, layer).select()
        selects.append(select)
    first: Any = query.finish
    assert first is None or isinstance(first, PostProcessing)
    return replace(query, finish=PublishedSelects(first=first, selects=tuple(selects)))


def _with_shares(published: Published, shares: Shares) -> Published:
    """What is known of the rows once shares stand in them."""
    columns: dict[str, Known] = {}
    for name, known in published.columns.items():
        if isinstance(shares, SharesOfCohorts) and name == shares.lag:
            columns[COHORT] = Known(exact=True)
        columns[name] = known
        if name in shares.counts:
            columns[f"{name}{SHARE}"] = Known(ends=ENDS)
    return replace(published, columns=columns)


@dataclass(kw_only=True)
class _Groups:
    """The groups of a SELECT while it is compiled: canonical expressions and their columns."""

    keys: dict[str, str] = field(default_factory=dict)
    aggregates: dict[str, GroupAggregate] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    expressions: list[tuple[str, Expression]] = field(default_factory=list)
    sets: list[tuple[str, ...]] = field(default_factory=list)


class LayerCompiler:
    """Compiles one SELECT over published rows."""

    def __init__(
        self,
        draft: Draft,
        builder: QueryBuilder,
        query: Query | SeriesQuery,
        published: Published,
        layer: Layer,
    ) -> None:
        self._draft, self._builder, self._query = draft, builder, query
        self._from, self._layer = published, layer
        self._known = published.known
        self._chosen, self._together = published.chosen, published.together
        self._row_keys = published.keys
        self._functions: dict[str, WindowFunction] = {}

    def _refuse(self, node: exp.Expr | None, reason: str, fix: str) -> InvalidParameter:
        return self._draft.refusal(node, reason, fix)

    def select(self) -> tuple[PublishedSelect, Published]:
        """The SELECT, and what is known of its rows."""
        clauses = self._layer.select.args
        for name, node in other_clauses(self._layer.select, _CLAUSES):
            raise self._refuse(
                node, *_REFUSED.get(name, (f"{name} is not known here", "leave it out"))
            )
        where = None
        if clauses.get("where"):
            where = self._where(clauses["where"].this)
        items = self._items()
        having, qualify = clauses.get("having"), clauses.get("qualify")
        order = clauses["order"].expressions if clauses.get("order") else []
        sorts = [self._aliased(each.this, items, numbers=True) for each in order]
        of_groups = None if having is None else self._aliased(having.this, items, inputs=True)
        of_rows = None if qualify is None else self._aliased(qualify.this, items)
        nodes = [*items.values(), *sorts, *(e for e in (of_groups, of_rows) if e is not None)]
        groups = self._groups(clauses.get("group"), items, nodes)
        if of_groups is not None and groups is None:
            raise self._refuse(having, "HAVING goes with GROUP BY", "use WHERE")
        known = self._known if groups is None else groups.known
        if of_groups is not None:
            self._chosen = self._chosen or self._is_noisy(of_groups, known)
        written = {
            name: self._look_back(self._grouped(node, groups), known)
            for name, node in items.items()
        }
        sorted_by = [self._look_back(self._grouped(node, groups), known) for node in sorts]
        if of_rows is not None:
            of_rows = self._look_back(self._grouped(of_rows, groups), known)
        outputs = [self._output(name, node, known) for name, node in written.items()]
        columns = {
            each.name: self._known_output(each, written[each.name], known) for each in outputs
        }
        outputs = self._named_apart(outputs)
        limit, offset = (self._number(clauses.get(name), name) for name in ("limit", "offset"))
        select = PublishedSelect(
            outputs=tuple(outputs),
            constants=tuple(name for name in self._from.constants if name not in columns),
            where=where,
            grouping=self._grouping(groups),
            having=None
            if of_groups is None
            else self._expression(self._grouped(of_groups, groups)),
            look_back=self._windows(),
            qualify=None if of_rows is None else self._expression(of_rows),
            order=tuple(
                (
                    self._expression(node),
                    bool(term.args.get("desc")),
                    bool(term.args.get("nulls_first")),
                )
                for node, term in zip(sorted_by, order, strict=True)
            ),
            limit=limit,
            offset=offset or 0,
            zone=self._builder.zone,
        )
        return select, Published(
            columns=columns,
            constants=self._from.constants,
            keys=self._new_keys(outputs),
            chosen=self._chosen or of_rows is not None or limit is not None or bool(offset),
            together=self._together,
        )

    # Names.

    def _resolved(self, node: exp.Expr) -> exp.Expr:
        """An expression whose columns are all there, quoted and without their table's name."""

        def resolve(part: exp.Expr) -> exp.Expr:
            if isinstance(part, exp.Select | exp.SetOperation):
                reason = "a subquery in an expression is not known here"
                raise self._refuse(part, reason, "use constants")
            if not isinstance(part, exp.Column):
                return part
            table = part.args.get("table")
            if present_args(part) - {"this", "table"} or not isinstance(part.this, exp.Identifier):
                raise self._refuse(part, f"{canonical(part)} is no column", "name a column")
            if table is not None and table.name not in self._layer.names:
                raise self._refuse(part, f"there is no table {table.name} here", "leave it out")
            if part.name not in self._known:
                raise self._refuse(
                    part,
                    f"{part.name} is not published by the query inside",
                    f"it publishes {', '.join(self._known)}",
                )
            return _column(part.name).update_positions(part.this)

        refuse_changing_calls(self._draft, node)
        return node.transform(resolve)

    def _items(self) -> dict[str, exp.Expr]:
        """The columns of SELECT by their names; * stands for all that is published."""
        items: dict[str, exp.Expr] = {}
        for item in self._layer.select.expressions:
            if isinstance(item, exp.Star) or isinstance(item.this, exp.Star):
                star = item if isinstance(item, exp.Star) else item.this
                if present_args(star) - {"except_"}:
                    raise self._refuse(item, "only * EXCEPT (...) is known here", "name columns")
                without = {each.name for each in star.args.get("except_") or ()}
                if without - set(self._from.columns):
                    reason = f"there is no column {min(without - set(self._from.columns))}"
                    raise self._refuse(item, reason, "leave it out of EXCEPT")
                found = {n: _column(n) for n in self._from.columns if n not in without}
            else:
                name = item.alias_or_name if isinstance(item, exp.Alias | exp.Column) else ""
                if not name:
                    fix = f"write {canonical(item)} AS x"
                    raise self._refuse(item, "a computed column needs a name", fix)
                found = {name: self._resolved(item.unalias())}
            for name, node in found.items():
                if name in items:
                    raise self._refuse(item, f"two columns are named {name}", "name one with AS")
                items[name] = node
        return items

    def _aliased(
        self,
        node: exp.Expr,
        items: Mapping[str, exp.Expr],
        *,
        inputs: bool = False,
        numbers: bool = False,
    ) -> exp.Expr:
        """An expression in which names of SELECT stand for what they are; `inputs` go before."""
        if numbers and isinstance(node, exp.Literal) and not node.is_string:
            at = int(node.name) if node.name.isdigit() else 0
            if not 1 <= at <= len(items):
                raise self._refuse(node, f"there is no column {node.name}", "count from 1")
            return list(items.values())[at - 1].copy()

        def expand(part: exp.Expr) -> exp.Expr:
            if not isinstance(part, exp.Column) or part.args.get("table"):
                return part
            if part.name not in items or (inputs and part.name in self._known):
                return part
            node = items[part.name].copy()
            return node if isinstance(node, exp.Column) else exp.Paren(this=node)

        expanded = node.transform(expand)
        return self._resolved(expanded)

    def _named_apart(self, outputs: list[Output]) -> list[Output]:
        """Outputs without two columns of one name: an error bar that is asked for stands once."""
        named = {each.name: each for each in outputs}
        made = []
        for each in outputs:
            if each.name in self._from.constants and each.passed != each.name:
                reason = f"{each.name} has a meaning in what is published"
                raise self._refuse(self._layer.select, reason, "use another name")
            figure = named.get(each.name.removesuffix(STDDEV))
            if figure not in (None, each) and each.passed != f"{figure.passed}{STDDEV}":
                reason = f"{each.name} would be taken for an error bar"
                raise self._refuse(self._layer.select, reason, "rename it")
            ends = tuple(end for end in each.ends if not end or f"{each.name}{end}" not in named)
            made.append(replace(each, ends=ends))
        return made

    # WHERE and GROUP BY.

    def _where(self, node: exp.Expr) -> Expression:
        for call in find_calls(node, _AGGREGATES):
            raise self._refuse(call, "WHERE looks at single rows", "use HAVING")
        if node.find(Over) is not None:
            raise self._refuse(node, "WHERE looks at single rows", "use QUALIFY")
        resolved = self._resolved(node)
        self._chosen = self._chosen or self._is_noisy(resolved, self._known)
        return self._expression(resolved)

    def _is_noisy(self, node: exp.Expr, known: Mapping[str, Known]) -> bool:
        return any(
            column.name not in known or not known[column.name].exact
            for column in node.find_all(exp.Column)
        ) or any(find_calls(node, _AGGREGATES))

    def _groups(
        self, group: exp.Expr | None, items: Mapping[str, exp.Expr], nodes: list[exp.Expr]
    ) -> _Groups | None:
        """The groups of GROUP BY, or of aggregates alone; None: rows are not grouped."""
        calls = [call for node in nodes for call in find_calls(node, _AGGREGATES)]
        if group is None and not calls:
            return None
        groups = _Groups()
        listed = [[]] if group is None else self._grouping_sets(group, items)
        for nodes_of_set in listed:
            names = []
            for node in nodes_of_set:
                key = self._aliased(node, items, inputs=True, numbers=True).unnest()
                if any(find_calls(key, _AGGREGATES)) or key.find(Over):
                    raise self._refuse(node, "an aggregate cannot be a key", "group by columns")
                names.append(self._add_key(groups, key))
            groups.sets.append(tuple(name for name in names if name not in self._from.constants))
        groups.known |= {name: self._known[name] for name in self._from.constants}
        for call in calls:
            self._add_aggregate(groups, canonical(call), call)
        self._row_keys = tuple(name for name, _ in groups.expressions)
        if len(groups.sets) > 1:  # a row of one set has the noise of rows of another
            self._row_keys, self._together = None, True
        return groups

    def _add_key(self, groups: _Groups, key: exp.Expr) -> str:
        """Group by an expression; the name of its column. Times of the window change nothing."""
        name = key.name if isinstance(key, exp.Column) else canonical(key)
        noisy = self._is_noisy(key, self._known)
        self._chosen = self._chosen or noisy
        if canonical(key) not in groups.keys and name not in self._from.constants:
            groups.known[name] = Known(exact=not noisy)
            groups.expressions.append((name, self._expression(key)))
        groups.keys[canonical(key)] = name
        return name

    def _grouping_sets(
        self, group: exp.Expr, items: Mapping[str, exp.Expr]
    ) -> list[list[exp.Expr]]:
        """What each set of GROUP BY lists; there is one, but for ROLLUP and its like."""
        if present_args(group) - {"expressions", "all"}:
            raise self._refuse(group, "this GROUP BY is not known", "write GROUP BY ROLLUP (a, b)")
        if group.args.get("all"):
            return [
                [
                    node
                    for node in items.values()
                    if not any(find_calls(node, _AGGREGATES)) and node.find(Over) is None
                ]
            ]
        return expand_sets(self._draft, group)

    def _add_aggregate(
        self, groups: _Groups, name: str, call: exp.Expr, only: exp.Expr | None = None
    ) -> None:
        """SUM(n) and its like, once."""
        function, arguments = call_name(call), call.expressions
        if name in groups.aggregates:
            return
        plain = len(arguments) == 1 and not isinstance(arguments[0], exp.Kwarg | exp.Distinct)
        star = plain and isinstance(arguments[0], exp.Star)
        if not plain or (star and function != "COUNT"):
            raise self._refuse(
                call, f"{function} takes one published column here", f"write {function}(n)"
            )
        argument = arguments[0]
        if not star and (any(find_calls(argument, _AGGREGATES)) or argument.find(Over)):
            raise self._refuse(call, "an aggregate of an aggregate", "use a subquery for each")
        if function == "COUNTIF":
            function, only, star = "COUNT", argument, True
        value = None if star else self._expression(argument)
        bar = noise = None
        honest = function in ("SUM", "AVG") and not self._chosen and not self._together
        if honest and (only is None or not self._is_noisy(only, self._known)):
            bar, noise = self._bar(argument, self._known)
        groups.aggregates[name] = GroupAggregate(
            name=name,
            function=function,
            value=value,
            error_bar=bar,
            only=None if only is None else self._expression(only),
        )
        groups.known[name] = Known(noise=noise, ends=("",) if bar is None else ("", STDDEV))

    def _grouped(self, node: exp.Expr, groups: _Groups | None) -> exp.Expr:
        """An expression of the columns that GROUP BY leaves."""
        if groups is None:
            return node

        def replace_part(part: exp.Expr) -> exp.Expr:
            text = canonical(part)
            if isinstance(part, NAMING):
                return part
            if call_name(part) in _AGGREGATES:
                return _column(text)
            if text in groups.keys:
                return _column(groups.keys[text])
            if isinstance(part, exp.Column) and part.name not in groups.known:
                raise self._refuse(
                    part,
                    f"{part.name} is neither grouped by nor aggregated",
                    f"add it to GROUP BY, or use one of {', '.join(_AGGREGATES)}",
                )
            return part

        return node.transform(replace_part)

    def _grouping(self, groups: _Groups | None) -> Grouping | None:
        if groups is None:
            return None
        return Grouping(
            keys=tuple(groups.expressions),
            aggregates=tuple(groups.aggregates.values()),
            constants=self._from.constants,
            sets=tuple(groups.sets),
        )

    def pivot(self, node: exp.Expr) -> tuple[PublishedSelect, Published]:
        """PIVOT(SUM(n) FOR country IN ('de', 'fr')): a column for each value, rows by the rest."""
        fields = node.args.get("fields") or []
        shape = "write PIVOT(SUM(n) FOR country IN ('de', 'fr'))"
        more = any(node.args.get(name) for name in _PIVOT_MORE)
        if more or len(fields) != 1 or not isinstance(fields[0], exp.In):
            raise self._refuse(node, "PIVOT takes aggregates and one list of values", shape)
        by = self._resolved(fields[0].this)
        if not isinstance(by, exp.Column) or not self._known[by.name].exact:
            raise self._refuse(fields[0], "PIVOT is by a key that is published", shape)
        groups, used = _Groups(), {by.name}
        made: dict[str, exp.Expr] = {}
        for item in node.expressions:
            call = self._resolved(item.unalias())
            if call_name(call) not in _AGGREGATES:
                raise self._refuse(item, f"{canonical(item)} is no aggregate", shape)
            if len(node.expressions) > 1 and not isinstance(item, exp.Alias):
                raise self._refuse(item, "several aggregates of a PIVOT need names", "add AS")
            used |= {column.name for column in call.find_all(exp.Column)}
            for value in fields[0].expressions:
                constant, name = self._pivot_value(value, shape)
                name = f"{item.alias}_{name}" if isinstance(item, exp.Alias) else name
                if name in groups.aggregates or name in self._from.constants:
                    raise self._refuse(value, f"two columns are named {name}", "name one with AS")
                if name.endswith(STDDEV):
                    raise self._refuse(
                        value, f"{name} would be taken for an error bar", "name it with AS"
                    )
                self._add_aggregate(groups, name, call, exp.EQ(this=by.copy(), expression=constant))
                made[name] = _column(name)
        rest = [n for n in self._from.columns if n not in used and n not in self._from.constants]
        for name in rest:
            if not self._known[name].exact or name in made:
                raise self._refuse(
                    node,
                    f"PIVOT would group by {name} too, which is a noisy figure"
                    if name not in made
                    else f"two columns are named {name}",
                    "put SELECT of the columns that are wanted into a subquery before it",
                )
            self._add_key(groups, _column(name))
        groups.sets.append(tuple(rest))
        made = {name: _column(name) for name in rest} | made
        outputs = [self._output(name, column, groups.known) for name, column in made.items()]
        columns = {each.name: groups.known[each.name] for each in outputs}
        select = PublishedSelect(
            outputs=tuple(self._named_apart(outputs)),
            constants=tuple(name for name in self._from.constants if name not in columns),
            grouping=self._grouping(groups),
            zone=self._builder.zone,
        )
        return select, replace(self._from, columns=columns, keys=tuple(rest))

    def _pivot_value(self, node: exp.Expr, shape: str) -> tuple[exp.Expr, str]:
        """A constant of PIVOT's list, and the name of its column."""
        alias = node.args.get("alias") if isinstance(node, exp.Alias | exp.PivotAlias) else None
        constant = node.this if alias is not None else node
        try:
            value = literal_value(constant)
        except ValueError:
            value = None
        if value is None:
            raise self._refuse(node, "PIVOT takes constants that are not NULL", shape)
        return constant.copy(), str(value) if alias is None else alias.name

    # Columns and their error bars.

    def _expression(self, node: exp.Expr) -> Expression:
        for window in node.find_all(Over):
            if looks_at_windows(window):
                raise self._refuse(
                    window,
                    "windows are compared after groups are chosen",
                    "do it in SELECT, QUALIFY or ORDER BY",
                )
            if window.args.get("frame") or window.args.get("other"):
                raise self._refuse(
                    window,
                    f"{canonical(window)} is not known: a frame is of windows",
                    "order by window_start, or leave ROWS out",
                )
        for other in node.find_all(exp.Window):
            raise self._refuse(other, f"{canonical(other)} is not known", "use SUM(n) OVER (...)")
        return self._builder.expression(node, published=True)

    def _output(self, name: str, node: exp.Expr, known: Mapping[str, Known]) -> Output:
        plain = node.unnest()
        exact = not self._is_noisy(node, known)
        if isinstance(plain, exp.Column):
            ends = known[plain.name].ends
            value = self._expression(plain)
            return Output(name=name, value=value, passed=plain.name, ends=ends, exact=exact)
        bar: ErrorBar | WrittenErrorBar | None = None
        if not exact:
            bar, _ = self._bar(plain, known)
        if bar is None and plain.find(Over) and not self._chosen and not self._together:
            barred = [each for each, about in known.items() if about.noise is not None]
            written = error_bar(plain, barred, [n for n, about in known.items() if about.exact])
            if written is not None:
                bar = WrittenErrorBar(value=self._expression(written))
        return Output(name=name, value=self._expression(node), error_bar=bar, exact=exact)

    def _known_output(self, output: Output, node: exp.Expr, known: Mapping[str, Known]) -> Known:
        if output.passed:
            return known[output.passed]
        if output.exact:
            return Known(exact=True)
        noise = None if output.error_bar is None else self._bar(node.unnest(), known)[1]
        return Known(noise=noise, ends=("",) if output.error_bar is None else ("", STDDEV))

    def _bar(
        self, node: exp.Expr, known: Mapping[str, Known]
    ) -> tuple[ErrorBar | None, Noise | None]:
        """The error bar of an expression and the noises in it; None where none is honest."""
        barred = [name for name, each in known.items() if each.noise is not None]
        above, below = linear_factors(node, barred), dict[str, float]()
        plain = node.unnest()
        if above is None and isinstance(plain, exp.Div):
            above, found = (linear_factors(part, barred) for part in (plain.this, plain.expression))
            below = found or {}
            above = above if below else None
        if above is None or not {*above, *below}:
            return None, None
        noise: set[Any] = set()
        for name in [*above, *below]:
            mine = known[name].noise or frozenset()
            if noise & mine:
                return None, None
            noise |= mine
        return (
            ErrorBar(
                terms=nonzero_terms(above),
                denominator_terms=nonzero_terms(below),
                denominator=self._expression(plain.expression) if below else None,
            ),
            frozenset(noise),
        )

    # Earlier windows.

    def _look_back(self, node: exp.Expr, known: dict[str, Known]) -> exp.Expr:
        """An expression in which functions of several windows are columns."""

        def replace_part(part: exp.Expr) -> exp.Expr:
            if not isinstance(part, Over) or not looks_at_windows(part):
                return part
            function = read_window_function(
                part,
                draft=self._draft,
                query=self._query,
                keys=self._row_keys,
                columns=known,
                barred=set()
                if self._chosen
                else {name for name, each in known.items() if each.noise is not None},
            )
            self._functions[function.name] = function
            about = known[function.column]
            noise = None
            if function.has_bar and about.noise is not None:
                farthest = FARTHEST + 1 if function.first is None else function.first
                back = range(function.last, farthest + 1)
                noise = frozenset((m, at + n) for m, at in about.noise for n in back)
            known[function.name] = Known(noise=noise, ends=function.ends)
            return _column(function.name)

        return node.transform(replace_part)

    def _windows(self) -> LookBack | None:
        if not self._functions:
            return None
        assert self._row_keys is not None
        return LookBack(keys=self._row_keys, functions=tuple(self._functions.values()))

    def _new_keys(self, outputs: list[Output]) -> tuple[str, ...] | None:
        """The keys by their names among the outputs, if all are there."""
        if self._row_keys is None:
            return None
        named = {each.passed: each.name for each in outputs if each.passed}
        if not set(self._row_keys) <= set(named):
            return None
        return tuple(named[key] for key in self._row_keys)

    def _number(self, node: exp.Expr | None, name: str) -> int | None:
        """LIMIT and OFFSET are plain numbers."""
        value = None if node is None else node.args.get("expression")
        if node is None:
            return None
        if not isinstance(value, exp.Literal) or value.is_string or not value.name.isdigit():
            raise self._refuse(
                node, f"{name.upper()} takes a whole number", f"write {name.upper()} 10"
            )
        return int(value.name)
