"""UNION ALL in FROM: rows of several sources, each with its own columns and filter, become one.

It is done row by row, so a unit's rows depend on that unit's rows of all sources together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.query.public_tables import Tables, WholeTable
from dpstream.query.union_tables import TABLE
from dpstream.sql_compiler.joined_rows import JoinedRows, TableSelect, table_select, with_joins
from dpstream.sql_compiler.query_builder import QueryBuilder, RowPreparation
from dpstream.sql_compiler.statement import Draft
from dpstream.sql_compiler.unit_rows import PerUnitRows, per_unit_rows


@dataclass(frozen=True, kw_only=True, repr=False)
class UnionRows:
    """Selects the columns of each source's rows, then does `rows` to all of them."""

    branches: tuple[tuple[str, TableSelect], ...]
    """The source, and what is selected of it."""
    rows: RowPreparation | JoinedRows

    @property
    def sources(self) -> list[str]:
        """The sources that are read."""
        return list(dict.fromkeys(name for name, _ in self.branches))

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        return f"{self._union_text} {self.rows.text}"

    @property
    def _union_text(self) -> str:
        parts = (f"{select.text or 'TABLE '}{name!r}" for name, select in self.branches)
        return f"({' UNION ALL '.join(parts)})"

    def __repr__(self) -> str:
        return self.text

    @property
    def plain_times(self) -> bool:
        """The times are columns of several sources."""
        return False

    @property
    def _joined(self) -> JoinedRows | None:
        return self.rows if isinstance(self.rows, JoinedRows) else None

    @property
    def joins_in_words(self) -> Sequence[str]:
        """What each join does to a row."""
        return [] if self._joined is None else self._joined.joins_in_words

    @property
    def rows_text(self) -> str:
        """What is done to rows, in SQL; digests of tables are left out."""
        rows = self.rows.text if self._joined is None else self._joined.rows_text
        return f"{self._union_text} {rows}"

    @property
    def tables(self) -> Sequence[WholeTable]:
        """The tables of its joins."""
        return [] if self._joined is None else self._joined.tables

    @property
    def public_tables(self) -> Sequence[str]:
        """The tables that it joins and that everybody may know."""
        return [] if self._joined is None else self._joined.public_tables

    @property
    def registries(self) -> Sequence[str]:
        """The tables that it joins whose rows belong to units."""
        return [] if self._joined is None else self._joined.registries

    @property
    def table_names(self) -> Sequence[str]:
        """The tables that it joins and that are still to be given."""
        return [] if self._joined is None else self._joined.table_names

    def with_tables(self, tables: Tables) -> UnionRows:
        """The same with the tables that it joins."""
        assert isinstance(self.rows, JoinedRows)
        return replace(self, rows=self.rows.with_tables(tables))

    @property
    def columns(self) -> list[str]:
        """The columns of all sources that it reads."""
        found = [TABLE]
        for name, select in self.branches:
            used = [each for one in self.rows.columns for each in _read(select, one)]
            used += select.where.columns if select.where is not None else ()
            found += [f"{name}.{column}" for column in used]
        return list(dict.fromkeys(found))

    def columns_of(self, name: str) -> list[str]:
        """The columns of all sources that one of the query's columns is computed from."""
        return [
            f"{source}.{column}"
            for source, select in self.branches
            for one in self.rows.columns_of(name)
            for column in _read(select, one)
        ]

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that are wanted, with the query's columns."""
        return self.rows(pa.concat_tables(self._selected(table), promote_options="permissive"))

    def _selected(self, table: pa.Table) -> list[pa.Table]:
        """What each branch has of the rows; of no rows, one branch's columns without rows."""
        found = []
        whose = table[TABLE]
        present = pc.unique(whose).to_pylist()
        for name, select in self.branches:
            if name not in present and not (len(table) == 0 and _is_told(table, name)):
                continue
            mine = table if len(present) <= 1 else table.filter(pc.equal(whose, name))
            prefix = f"{name}."
            names = [each for each in mine.column_names if each.startswith(prefix)]
            own = mine.select(names).rename_columns([each.removeprefix(prefix) for each in names])
            found.append(select(name, own).select(self.rows.columns))
            if not present:
                break
        if not found:  # no source has told its types
            found.append(pa.table({each: pa.nulls(0) for each in self.rows.columns}))
        return found


def _read(select: TableSelect, name: str) -> Sequence[str]:
    """The source's columns that a column of the union is made of."""
    known = dict(select.columns)
    return known[name].columns if name in known else (name,)


def _is_told(table: pa.Table, name: str) -> bool:
    """Are there types of this source's columns?"""
    kinds = [field.type for field in table.schema if field.name.startswith(f"{name}.")]
    return any(kind != pa.null() for kind in kinds)


def prepared_rows(
    draft: Draft, builder: QueryBuilder
) -> RowPreparation | JoinedRows | UnionRows | PerUnitRows | None:
    """What becomes of the sources' rows before they are bounded; None: nothing."""
    if draft.relation.unit is not None:
        return per_unit_rows(draft, builder)
    branches = draft.relation.union
    rows = with_joins(draft, builder, always=bool(branches))
    if not branches or rows is None:
        return rows
    selects = tuple((branch.table, table_select(branch, builder)) for branch in branches)
    return UnionRows(branches=selects, rows=rows)
