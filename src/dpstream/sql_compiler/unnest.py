"""UNNEST: a row that holds a list becomes a row of the same unit for each item.

Rows are made before anything is bounded, and each from one row alone, so a unit's part is bounded
as that of a unit with as many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from dpstream.rows.parse import whole_column
from dpstream.sql_compiler.statement import Draft, Item, Relation, canonical, present_args

if TYPE_CHECKING:
    from dpstream.sql_compiler.query_builder import Expression

Substitute = Callable[[Draft, exp.Expr, Relation], exp.Expr]
MOST_ITEMS = 10_000
"""Items of one list that become rows, the first ones: each takes memory until it is bounded."""
_SHAPE = "write FROM log, UNNEST(tags) AS tag, or LEFT JOIN UNNEST(tags) AS tag"


@dataclass(frozen=True, kw_only=True)
class Unnest:
    """Makes a row of each item of a list; `outer` keeps a row without items, with NULL."""

    item: str
    """The column that holds the items."""
    lists: Expression
    outer: bool = False
    place: str | None = None
    """The column that counts the items of a row from 0, if there is one."""

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        return f"{'LEFT JOIN ' if self.outer else ''}{self.item}{' WITH OFFSET' * bool(self.place)}"

    def __call__(self, table: pa.Table, zone: str) -> pa.Table:
        """The rows, with a column of items."""
        lists = whole_column(self.lists.evaluate(table, zone))
        sizes = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
        counts = np.minimum(sizes, MOST_ITEMS)
        kept = np.maximum(counts, 1) if self.outer else counts
        rows = np.repeat(np.arange(len(counts)), kept)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(kept) - kept, kept)
        first = np.cumsum(sizes) - sizes
        none = within >= counts[rows]  # a row without items
        places = pa.array(np.where(none, 0, first[rows] + within), mask=none)
        items = pc.list_flatten(lists).take(places)
        if pa.types.is_null(items.type):
            items = items.cast(pa.string())
        columns = dict(zip(table.column_names, table.take(pa.array(rows)).columns, strict=True))
        columns[self.item] = items
        if self.place is not None:
            columns[self.place] = pa.array(within, pa.int64(), mask=none)
        return pa.table(columns)


def is_unnest(join: exp.Expr) -> bool:
    """Is it the join of a row to its own list?"""
    return isinstance(join, exp.Join) and isinstance(join.this, exp.Unnest)


def add_unnest(draft: Draft, relation: Relation, join: exp.Expr, substitute: Substitute) -> None:
    """The relation with a row for each item."""
    node, on = join.this, join.args.get("on")
    plain = join.args.get("kind", "") in ("", "CROSS", "INNER", "OUTER") and (
        join.args.get("side", "") in ("", "LEFT")
    )
    always = on is None or (isinstance(on, exp.Boolean) and on.this)
    known = present_args(join) <= {"this", "on", "kind", "side"} and (
        present_args(node) <= {"expressions", "alias", "offset"}
    )
    if not (plain and always and known) or len(node.expressions) != 1:
        raise draft.refusal(node, "UNNEST takes one list, and no condition", _SHAPE)
    alias, offset = node.args.get("alias"), node.args.get("offset")
    columns = [] if alias is None else alias.args.get("columns") or []
    if alias is None or len(columns) > 1:
        raise draft.refusal(node, "the items of UNNEST need one name", _SHAPE)
    name = columns[0].name if columns else alias.name
    lists = substitute(draft, node.expressions[0], relation)
    number = sum(canonical(each.this) == canonical(lists) for each, _, _ in relation.unnests)
    item = Item(this=lists, number=number)
    place = Item(this=lists.copy(), number=number, place=True) if offset else None
    named = {name: item} | ({} if place is None else {offset.name: place})
    for each, value in named.items():
        if isinstance(relation.columns.get(each), Item):
            raise draft.refusal(node, f"two columns are named {each}", "rename one of them")
        relation.columns[each] = value
    relation.unnests.append((item, place, join.args.get("side") == "LEFT"))
    if columns and alias.name:
        relation.names = {*relation.names, alias.name}
