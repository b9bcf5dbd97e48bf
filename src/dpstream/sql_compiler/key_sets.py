"""Public groups that are not written out: keys of tables, ranges, and products of lists.

TABLE pages                                        its columns that are named like the keys
(SELECT page FROM pages WHERE section = 'news')    as many columns as it selects
GENERATE_ARRAY(0, 23)                              whole numbers, the last one included
GENERATE_DATE_ARRAY('2024-01-01', '2024-12-31')    days; a third argument is the step
PRODUCT(('DE', 'FR'), GENERATE_ARRAY(0, 23))       every pair of items
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.errors import InvalidParameter
from dpstream.query.public_tables import KeyTable, Tables, missing_table
from dpstream.query.windows import DAY
from dpstream.rows.whole_table import key_table
from dpstream.sql_compiler.from_clause import select_of_table
from dpstream.sql_compiler.joined_rows import TableSelect, no_such_column, table_select
from dpstream.sql_compiler.privacy_clause import KeyNode, WrongKind, groups, integer, interval
from dpstream.sql_compiler.query_builder import QueryBuilder
from dpstream.sql_compiler.statement import Draft, KeysOf, call_name

_MOST = 20_000_000  # public groups: each is published in every table
Part = Callable[[Tables, Sequence[str]], list[pa.Array]]
"""Columns of keys, from the tables there are and the names of the keys that are still to come."""


@dataclass(frozen=True, kw_only=True)
class KeySet:
    """Keys that are known once their tables are; `text` says how."""

    keys: tuple[str, ...]
    table_names: tuple[str, ...]
    part: Part

    def with_tables(self, tables: Tables) -> KeyTable:
        """The keys themselves, each once."""
        for name in self.table_names:
            if name not in tables:
                raise missing_table(name, "has the keys")
            if tables[name].registry:
                raise InvalidParameter(
                    f"public_groups takes its keys from {name!r}, which is a registry: its rows "
                    "are private; take them from a public table"
                )
            if tables[name].refresh is not None:
                raise InvalidParameter(
                    f"public_groups takes its keys from {name!r}, which is read anew, and keys are "
                    "fixed for a whole run; take them from another public table, without refresh, "
                    "whose file stays as it is"
                )
        found = key_table(self.part(tables, self.keys))
        if len(found.columns) != len(self.keys):
            raise InvalidParameter(
                f"public_groups has {len(found.columns)} columns of keys, and the query groups by "
                f"{len(self.keys)}: {', '.join(self.keys)}"
            )
        return found


def resolve_key_sets(draft: Draft, builder: QueryBuilder) -> None:
    """Make keys of what `public_groups` says, where it is no plain list."""
    given = draft.parameters.get("public_groups")
    if not isinstance(given, KeyNode):
        return
    names: list[str] = []
    part = _part(draft, builder, given.node, names)
    keys = KeySet(keys=tuple(draft.keys), table_names=tuple(dict.fromkeys(names)), part=part)
    try:
        draft.parameters["public_groups"] = keys if names else keys.with_tables({})
    except InvalidParameter as problem:
        raise draft.refusal(given.node, str(problem), "change public_groups") from None


def _part(draft: Draft, builder: QueryBuilder, node: exp.Expr, names: list[str]) -> Part:
    """One list of keys; the names of its tables are added to `names`."""
    name = call_name(node)
    try:
        if isinstance(node, KeysOf):
            names.append(node.name)
            return _of_table(node.name)
        if isinstance(node, exp.Subquery):
            node.this.set("distinct", None)  # each key is there once in any case
            relation = select_of_table(draft, node.this)
            names.append(relation.table)
            return _of_select(relation.table, table_select(relation, builder))
        if name == "GENERATE_ARRAY":
            return _numbers(*map(integer, node.expressions))
        if name == "GENERATE_DATE_ARRAY":
            return _days(*node.expressions)
        if name == "PRODUCT":
            return _product([_part(draft, builder, each, names) for each in node.expressions])
        return _listed(groups(node))
    except (WrongKind, TypeError, ValueError) as wanted:
        words = str(wanted) if isinstance(wanted, WrongKind) else "its arguments as in the guide"
        reason = f"{node.sql()} is no list of keys"
        raise draft.refusal(node, reason, f"give {words}") from None


def _of_table(name: str) -> Part:
    """The columns of a table that have the names of the next keys."""

    def read(tables: Tables, keys: Sequence[str]) -> list[pa.Array]:
        table = tables[name].table
        if not keys or keys[0] not in table.column_names:
            raise no_such_column(name, keys[0] if keys else "", table)
        columns = []
        for key in keys:
            if key not in table.column_names:
                break
            columns.append(table[key])
        return columns

    return read


def _of_select(name: str, select: TableSelect) -> Part:
    def read(tables: Tables, keys: Sequence[str]) -> list[pa.Array]:
        if select.open:
            raise InvalidParameter("public_groups takes named columns: SELECT page FROM pages")
        return list(select(name, tables[name].table).columns)

    return read


def _listed(rows: Sequence[tuple[Any, ...]]) -> Part:
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    return lambda tables, keys: columns


def _numbers(first: int, last: int, step: int = 1) -> Part:
    if step < 1 or not first <= last or (last - first) // step >= _MOST:
        raise WrongKind(f"GENERATE_ARRAY(first, last[, step]) of at most {_MOST} numbers")
    return lambda tables, keys: [pa.array(np.arange(first, last + 1, step), pa.int64())]


def _days(first: exp.Expr, last: exp.Expr, step: exp.Expr | None = None) -> Part:
    days = [date.fromisoformat(_day(each)).toordinal() for each in (first, last)]
    size = DAY if step is None else interval(step)
    if size < DAY or size % DAY or days[0] > days[1]:
        raise WrongKind("GENERATE_DATE_ARRAY('2024-01-01', '2024-12-31'[, INTERVAL '7' DAY])")
    origin = date(1970, 1, 1).toordinal()
    numbers = np.arange(days[0], days[1] + 1, size // DAY) - origin
    return lambda tables, keys: [pa.array(numbers.astype(np.int32)).view(pa.date32())]


def _day(node: exp.Expr) -> str:
    """A day, with or without the word DATE."""
    inner = node.this if isinstance(node, exp.Cast) else node
    if isinstance(inner, exp.Literal) and inner.is_string:
        return str(inner.this)
    raise WrongKind("days as text: '2024-05-01'")


def _product(parts: Sequence[Part]) -> Part:
    """Every combination; the last list changes fastest."""
    if not parts:
        raise WrongKind("PRODUCT(list, list, ...)")

    def read(tables: Tables, keys: Sequence[str]) -> list[pa.Array]:
        columns: list[pa.Array] = []
        size = 1
        for part in parts:
            read = key_table(part(tables, keys[len(columns) :])).columns
            new = len(read[0])
            if size * new > _MOST:
                raise InvalidParameter(f"public_groups would have more than {_MOST} keys")
            old = pa.array(np.repeat(np.arange(size), new))
            again = pa.array(np.tile(np.arange(new), size))
            columns = [column.take(old) for column in columns]
            columns += [column.take(again) for column in read]
            size *= new
        return columns

    return read
