"""SELECT over published rows: filters, groups, pivots and orders the rows of a release, and looks
at the rows of earlier windows (`earlier_windows.py`).

All of it is post-processing: it sees noisy tables and nothing else, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dpstream.query.row_spec import Earlier
from dpstream.records import Integers
from dpstream.rows.parse import row_codes, whole_column
from dpstream.sql_compiler.earlier_windows import (
    STDDEV,
    LookBack,
    known_numbers,
    numbers_of,
)
from dpstream.sql_compiler.over_clause import entropy, sort_rows
from dpstream.sql_compiler.query_builder import (
    ErrorBar,
    Expression,
    PostProcessing,
    WrittenErrorBar,
    floats,
    functions_used,
)
from dpstream.sql_compiler.sql_values import as_bool, as_float


@dataclass(frozen=True, kw_only=True)
class GroupAggregate:
    """SUM, AVG, MIN, MAX, COUNT or ENTROPY of the rows of a group; `only` of those where it holds.

    `value` None: of rows, not of values.
    """

    name: str
    function: str
    value: Expression | None
    error_bar: ErrorBar | None = None
    only: Expression | None = None

    @property
    def text(self) -> str:
        """All of it, in SQL."""
        only = "" if self.only is None else f" IF {self.only.text}"
        value = "*" if self.value is None else self.value.text
        return f"{self.function}({value}){only} AS {self.name!r}"

    def columns(self, table: pa.Table, groups: Integers, size: int, zone: str) -> dict[str, Any]:
        """The aggregate of each group, and its standard deviation if it has one."""
        counted = np.ones(len(table), bool)
        if self.only is not None:
            counted &= _truths(self.only.evaluate(table, zone))
        if self.value is None:
            return {self.name: pa.array(np.bincount(groups[counted], minlength=size))}
        value = self.value.evaluate(table, zone)
        counted &= np.asarray(value.is_valid())
        rows, groups = np.flatnonzero(counted), groups[counted]
        value = value.take(pa.array(rows))
        counts = np.bincount(groups, minlength=size)
        if self.function == "COUNT":
            return {self.name: pa.array(counts)}
        if self.function in ("MIN", "MAX"):
            order = sort_rows([(value, self.function == "MAX", False)], len(rows))
            present, first = np.unique(groups[order], return_index=True)
            at: Integers = np.full(size, -1)
            at[present] = order[first]
            return {self.name: value.take(pa.array(at, mask=at < 0))}
        if self.function == "ENTROPY":
            bits = entropy(floats(as_float(value)), groups, size)
            return {self.name: pa.array(bits, mask=np.isnan(bits))}
        none = counts == 0
        columns = {self.name: self._sums(value, groups, counts)}
        if self.error_bar is not None:
            stddevs = self.error_bar.stddevs(table.take(pa.array(rows)), value, zone)
            with np.errstate(all="ignore"):
                total = np.sqrt(np.bincount(groups, weights=floats(stddevs) ** 2, minlength=size))
                total /= counts if self.function == "AVG" else 1
            columns[self.name + STDDEV] = pa.array(total, mask=none | ~np.isfinite(total))
        return columns

    def _sums(self, value: pa.Array, groups: Integers, counts: Integers) -> pa.Array:
        if pa.types.is_integer(value.type) and self.function == "SUM":
            whole: Integers = np.zeros(len(counts), np.int64)
            np.add.at(whole, groups, np.asarray(value))
            return pa.array(whole, mask=counts == 0)
        weights = floats(as_float(value))
        sums: Any = np.bincount(groups, weights=weights, minlength=len(counts))
        with np.errstate(all="ignore"):
            sums = sums / (counts if self.function == "AVG" else 1)
        return pa.array(sums, mask=counts == 0)


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """GROUP BY of published rows: groups in the order in which they first come, set by set."""

    keys: tuple[tuple[str, Expression], ...]
    aggregates: tuple[GroupAggregate, ...]
    constants: tuple[str, ...]
    """Columns that are the same in all rows of a release."""
    sets: tuple[tuple[str, ...], ...]
    """Names of the keys that each set groups by: one set, or those of ROLLUP and its like."""

    @property
    def text(self) -> str:
        """The groups and their conditions, in SQL."""
        texts = {name: value.text for name, value in self.keys}
        sets = [", ".join(texts[name] for name in names) or "()" for names in self.sets]
        if len(sets) > 1:
            sets = [f"SETS (({'), ('.join(sets)}))"]
        return f"GROUP BY {sets[0]} WITH {', '.join(each.text for each in self.aggregates)}"

    def __call__(self, table: pa.Table, zone: str) -> pa.Table:
        """One row for each group of each set; keys that a set leaves out are NULL."""
        keys = {
            name: whole_column(table[name]) if value.plain else value.evaluate(table, zone)
            for name, value in self.keys
        }
        made = [self._of_set(table, keys, names, zone) for names in self.sets]
        return pa.concat_tables(made).combine_chunks()

    def _of_set(
        self, table: pa.Table, keys: dict[str, pa.Array], names: tuple[str, ...], zone: str
    ) -> pa.Table:
        codes = row_codes([keys[name] for name in names], len(table))
        _, first, groups = np.unique(codes, return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))
        groups, first = place[groups.reshape(-1)], np.sort(first)
        columns: dict[str, Any] = {
            name: key.take(pa.array(first)) if name in names else pa.nulls(len(first), key.type)
            for name, key in keys.items()
        }
        columns |= {name: table[name].take(pa.array(first)) for name in self.constants}
        for each in self.aggregates:
            columns |= each.columns(table, groups, len(first), zone)
        return pa.table(columns)


def _truths(value: Any) -> Any:
    return np.asarray(as_bool(value).fill_null(False), bool)


@dataclass(frozen=True, kw_only=True)
class Output:
    """A column of SELECT; `passed`: a column as it is, with those that end with `ends`."""

    name: str
    value: Expression
    error_bar: ErrorBar | WrittenErrorBar | None = None
    passed: str = ""
    ends: tuple[str, ...] = ()
    exact: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class PublishedSelect:
    """One SELECT over the rows of a release."""

    outputs: tuple[Output, ...]
    constants: tuple[str, ...]
    """Columns that stand beside the outputs, as they are."""
    where: Expression | None = None
    grouping: Grouping | None = None
    having: Expression | None = None
    look_back: LookBack | None = None
    qualify: Expression | None = None
    order: tuple[tuple[Expression, bool, bool], ...] = ()
    """Expression, is it descending, do NULLs come first?"""
    limit: int | None = None
    offset: int = 0
    zone: str = "UTC"

    @cached_property
    def text(self) -> str:
        """All of it, in SQL."""
        grouping, back = self.grouping, self.look_back
        order = ", ".join(
            f"{by.text} {'DESC' if down else 'ASC'} NULLS {'FIRST' if first else 'LAST'}"
            for by, down, first in self.order
        )
        parts = [
            f"SELECT {', '.join(f'{each.value.text} AS {each.name!r}' for each in self.outputs)}",
            "" if self.where is None else f"WHERE {self.where.text}",
        ]
        if grouping is not None:
            parts.append(grouping.text)
        parts += [
            "" if self.having is None else f"HAVING {self.having.text}",
            "" if back is None else f"OVER WINDOWS OF {', '.join(back.keys) or 'ALL ROWS'}",
            "" if self.qualify is None else f"QUALIFY {self.qualify.text}",
            f"ORDER BY {order}" if order else "",
            "" if self.limit is None else f"LIMIT {self.limit}",
            f"OFFSET {self.offset}" if self.offset else "",
            f"IN {self.zone}",
        ]
        return " ".join(filter(None, parts)) + functions_used(self._expressions())

    def _expressions(self) -> Iterable[Expression | None]:
        yield from (each.value for each in self.outputs)
        yield from (self.where, self.having, self.qualify, *(by for by, _, _ in self.order))
        if self.grouping is not None:
            yield from (value for _, value in self.grouping.keys)
            for each in self.grouping.aggregates:
                yield from (each.value, each.only)

    @property
    def windows_back(self) -> int:
        """How many earlier windows it looks at."""
        functions = () if self.look_back is None else self.look_back.functions
        return max((1 if each.first is None else each.first for each in functions), default=0)

    def computed(self, before: Mapping[str, bool]) -> dict[str, bool]:
        """Columns that are computed from noisy ones, here or `before`; has each an error bar?"""
        made = {each.name for each in (self.grouping.aggregates if self.grouping else ())}
        made |= {each.name for each in (self.look_back.functions if self.look_back else ())}
        computed = {}
        for each in self.outputs:
            if each.passed in before and each.passed not in made:
                computed[each.name] = before[each.passed]
            elif not each.exact and (not each.passed or each.passed in made):
                computed[each.name] = each.error_bar is not None or STDDEV in each.ends
        return computed

    def __call__(self, table: pa.Table, window: int, earlier: dict[int, pa.Table]) -> pa.Table:
        """What it makes of a table; `earlier`: what it has noted of other windows, by number."""
        if self.where is not None:
            table = table.filter(pa.array(_truths(self.where.evaluate(table, self.zone))))
        if self.grouping is not None:
            table = self.grouping(table, self.zone)
        if self.having is not None:
            table = table.filter(pa.array(_truths(self.having.evaluate(table, self.zone))))
        if self.look_back is not None:
            table = self.look_back(table, window, earlier)
        columns: dict[str, Any] = {}
        for each in self.outputs:
            if each.passed:
                columns |= {f"{each.name}{end}": table[f"{each.passed}{end}"] for end in each.ends}
                continue
            columns[each.name] = value = each.value.evaluate(table, self.zone)
            if each.error_bar is not None:
                bar = each.error_bar.stddevs(table, value, self.zone)
                columns[each.name + STDDEV] = known_numbers(numbers_of(bar))
        columns |= {name: table[name] for name in self.constants}
        by = [(each.evaluate(table, self.zone), down, first) for each, down, first in self.order]
        rows = sort_rows(by, len(table))
        if self.qualify is not None:
            rows = rows[_truths(self.qualify.evaluate(table, self.zone))[rows]]
        end = None if self.limit is None else self.offset + self.limit
        return pa.table(columns).take(pa.array(rows[self.offset : end]))


class PublishedStep(Protocol):
    """What is made of the rows of a release, one step after another: a SELECT, or shares."""

    @property
    def text(self) -> str:
        """All of it, in SQL."""

    @property
    def windows_back(self) -> int:
        """How many earlier windows it looks at."""

    def computed(self, before: Mapping[str, bool]) -> dict[str, bool]:
        """Columns that are computed from noisy ones, here or `before`; has each an error bar?"""

    def __call__(self, table: pa.Table, window: int, earlier: dict[int, pa.Table]) -> pa.Table:
        """What it makes of a table; `earlier`: what it has noted of other windows, by number."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PublishedSelects:
    """The private query's own post-processing, then one SELECT after another."""

    first: PostProcessing | None
    selects: tuple[PublishedStep, ...]

    @property
    def text(self) -> str:
        """All of it, in SQL."""
        texts = ["" if self.first is None else self.first.text]
        return " THEN ".join(filter(None, [*texts, *(each.text for each in self.selects)]))

    def __repr__(self) -> str:
        return self.text

    @property
    def computed(self) -> dict[str, bool]:
        """Columns that are computed from noisy ones, and whether each has an error bar."""
        computed: Mapping[str, bool] = {} if self.first is None else self.first.computed
        for select in self.selects:
            computed = select.computed(computed)
        return dict(computed)

    @cached_property
    def windows_back(self) -> int:
        """How many earlier windows it looks at."""
        return max(each.windows_back for each in self.selects)

    def __call__(self, release: pa.Table) -> pa.Table:
        """What is published of a release that has none before it."""
        return self.look_back(release, 0, {})

    def look_back(self, release: pa.Table, window: int, earlier: Earlier) -> pa.Table:
        """What is published of a release of a window; notes in `earlier` what later ones need."""
        table = release if self.first is None else self.first(release)
        for number, select in enumerate(self.selects):
            known = earlier.setdefault(number, {}) if select.windows_back else {}
            table = select(table, window, known)
        return table
