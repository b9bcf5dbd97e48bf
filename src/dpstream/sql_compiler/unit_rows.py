"""Rows of each unit grouped in FROM: what is done to rows, and to what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from dpstream.group_by.cohorts import CohortRows
from dpstream.group_by.funnel import FunnelRows
from dpstream.group_by.inner_rows import InnerRows
from dpstream.query.per_unit import HeldRows, Span
from dpstream.records import Integers, Words
from dpstream.sql_compiler.query_builder import QueryBuilder, RowPreparation
from dpstream.sql_compiler.statement import Draft


@dataclass(frozen=True, kw_only=True, repr=False)
class PerUnitRows:
    """Prepares rows that wait, groups those of each unit, and does `after` to inner rows."""

    rows: RowPreparation
    inner_rows: InnerRows | FunnelRows | CohortRows
    after: RowPreparation
    held: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        numbers = f" NUMBERS {self.numbers!r}" if self.numbers else ""
        return f"{self.rows.text}{numbers} PER UNIT {self.inner_rows.text} THEN {self.after.text}"

    def __repr__(self) -> str:
        return self.text

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the source that it reads."""
        return self.rows.columns

    def columns_of(self, name: str) -> Sequence[str]:
        """The source's columns behind one of the query's."""
        figures = self.inner_rows.made_of
        read = [
            column
            for made in self.after.columns_of(name)
            for column in figures.get(made, (made,))
            if column in self.held
        ]
        found = [column for held in read for column in self.rows.columns_of(held)]
        return list(dict.fromkeys(found))

    @property
    def own_keys(self) -> Sequence[str]:
        """The columns that inner rows are grouped by, besides the unit."""
        return self.inner_rows.keys

    @property
    def at_most_one(self) -> bool:
        """Has a unit at most one inner row in a window?"""
        return self.inner_rows.at_most_one

    @property
    def most(self) -> int | None:
        """How many inner rows has a unit in all windows together at most; None: nobody knows."""
        return self.inner_rows.most

    @property
    def grows(self) -> bool:
        """Can more rows of a unit only add inner rows?"""
        return self.inner_rows.grows

    @property
    def across_windows(self) -> bool:
        """Is something of a unit carried from each window to the next one?"""
        return self.inner_rows.across_windows

    @property
    def in_words(self) -> str:
        """What becomes of a unit's rows."""
        return self.inner_rows.in_words

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that wait."""
        return self.rows(table)

    def inner(self, rows: HeldRows, span: Span, step: int | None) -> tuple[Words, pa.Table]:
        """The inner rows of a window: whose they are, and their columns."""
        return self.inner_rows(rows, span, step)

    def carried(self, rows: HeldRows) -> tuple[Integers, pa.Table]:
        """Places of rows that go on to the next window, and what is held with them there."""
        assert isinstance(self.inner_rows, CohortRows)
        return self.inner_rows.carried(rows)

    def finish(self, inner: pa.Table) -> pa.Table:
        """The inner rows that are wanted, with the query's keys and values."""
        return self.after(inner)


def per_unit_rows(draft: Draft, builder: QueryBuilder) -> PerUnitRows:
    """What becomes of the source's rows: they wait, and are grouped by unit."""
    unit = draft.relation.unit
    assert unit is not None
    of_rows = replace(draft, relation=unit.rows, keys=dict(unit.held), aggregates={})
    rows, after = QueryBuilder(of_rows).prepare(always=True), builder.prepare(always=True)
    assert rows is not None
    assert after is not None
    return PerUnitRows(
        rows=rows,
        inner_rows=unit.inner,
        after=after,
        held=tuple(unit.held),
        numbers=tuple(sorted(unit.numbers)),
    )
