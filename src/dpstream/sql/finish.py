"""SELECT, HAVING, ORDER BY and LIMIT as post-processing of what is published."""

from __future__ import annotations

from collections.abc import Mapping

from sqlglot import exp

from dpstream.sql.build import Builder
from dpstream.sql.columns import Expression
from dpstream.sql.dialect import canonical
from dpstream.sql.draft import AGGREGATES, SHOWN_ALWAYS, WINDOW_COLUMNS, called
from dpstream.sql.published import Made, Published
from dpstream.sql.spreads import spread_of
from dpstream.stages.aggregates import Aggregate


class Finisher:
    """Makes a query's post-processing out of its draft."""

    def __init__(self, builder: Builder, aggregates: Mapping[str, Aggregate]) -> None:
        self.builder, self.draft, self._aggregates = builder, builder.draft, aggregates

    def finish(self) -> Published | None:
        """None if everything is published as the engine has it."""
        draft, select = self.draft, self.draft.select
        having, order = select.args.get("having"), select.args.get("order")
        limit, offset = select.args.get("limit"), select.args.get("offset")
        made = tuple(self._made(name, node) for name, node in draft.computed.items())
        shown = self._shown(made)
        if not (having or order or limit or offset or made or shown):
            return None
        terms = []
        for term in [] if order is None else order.expressions:
            down = bool(term.args.get("desc"))
            first = term.args.get("nulls_first")
            terms.append((self._published(term.this), down, bool(first)))
        return Published(
            made=made,
            having=None if having is None else self._published(having.this),
            order=tuple(terms),
            limit=None if limit is None else int(limit.expression.name),
            offset=0 if offset is None else int(offset.expression.name),
            shown=shown,
            zone=self.builder.zone,
        )

    def _made(self, name: str, node: exp.Expr) -> Made:
        shared = self.draft.parameters.get("debias") is not None  # one noisy factor for all
        spread = spread_of(node, self._aggregates, self.builder.expression, shared=shared)
        return Made(name=name, value=self.builder.expression(node), spread=spread)

    def _shown(self, made: tuple[Made, ...]) -> tuple[str, ...] | None:
        """The columns in SELECT's order, with their error bars; None if the engine has it so."""
        draft = self.draft
        windows = list(WINDOW_COLUMNS) if "time" in draft.parameters else []
        intervals = [] if draft.parameters.get("confidence") is None else ["_low", "_high"]
        with_bars = {each.name: ["_stddev"] for each in made if each.spread is not None}
        with_bars |= {name: ["_stddev", *intervals] for name in self._aggregates}
        natural = [*windows, *draft.keys]
        for name in self._aggregates:
            natural += [name, *(f"{name}{more}" for more in with_bars[name])]
        found: list[str] = []
        for name in draft.outputs:
            found += [name, *(f"{name}{more}" for more in with_bars.get(name, []))]
        if found == natural[len(windows) :]:
            return None  # nothing is said about windows: they come first
        found += [name for name in windows if name not in found]
        if draft.series:
            found.append("held")
            natural.append("held")
        if found == natural:
            return None
        return (*found, *SHOWN_ALWAYS)

    def _published(self, node: exp.Expr) -> Expression:
        """An expression of what is published: names of keys, aggregates and windows."""
        draft = self.draft
        names = [name for each in draft.aggregates for name in (each, f"{each}_stddev")]
        names = [name for name in names if name.removesuffix("_stddev") not in draft.hidden]
        names += [*draft.computed, *draft.keys, *SHOWN_ALWAYS]
        if "time" in draft.parameters:
            names += WINDOW_COLUMNS
        if isinstance(node, exp.Literal) and not node.is_string:
            node = self._by_number(node)
        written = {canonical(call): name for name, call in draft.aggregates.items()}
        keys = {canonical(expression): name for name, expression in draft.keys.items()}

        def replaced(part: exp.Expr) -> exp.Expr:
            text = canonical(part)
            if called(part) in AGGREGATES:
                if text not in written:
                    raise draft.refusal(
                        part, f"{text} is not among the columns of SELECT", "select it too"
                    )
                return exp.column(written[text], quoted=True)
            if isinstance(part, exp.Column) and part.name in names and not part.args.get("table"):
                return exp.column(part.name, quoted=True)
            if text in keys:
                return exp.column(keys[text], quoted=True)
            if isinstance(part, exp.Column):
                raise draft.refusal(
                    part,
                    f"{text} is not published: HAVING and ORDER BY see noisy results alone",
                    f"use {', '.join(names)}; filter rows in WHERE",
                )
            return part

        return self.builder.expression(node.transform(replaced))

    def _by_number(self, node: exp.Expr) -> exp.Expr:
        chosen = self.draft.select.expressions
        at = int(node.name) if node.name.isdigit() else 0
        if not 1 <= at <= len(chosen):
            raise self.draft.refusal(node, f"there is no column {node.name}", "count from 1")
        name = self.draft.outputs[at - 1]
        return (
            exp.column(name, quoted=True) if name in self.draft.computed else _plain(chosen[at - 1])
        )


def _plain(item: exp.Expr) -> exp.Expr:
    found: exp.Expr = item.unalias()
    return found
