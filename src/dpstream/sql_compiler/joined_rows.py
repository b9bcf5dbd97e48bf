"""Rows of the stream joined to tables that are read whole: before anything is bounded, row by row.

What a row becomes depends on that row and on the tables: it meets the rows of a table that are
equal to it, and each pair is a row of the same unit (docs/soundness/joins.md).

Names of columns: those of a table are written with its alias, `pages.category`, those of the stream
with its own name where they were qualified, `clicks.page`. A bare name is the column of the one
table that has it, and otherwise the stream's; the unit, the times and what USING names are always
those of the stream, or of the tables before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.group_by.hash_tables import HashTable, find_known
from dpstream.query.column_types import is_text
from dpstream.query.public_tables import Tables, WholeTable, missing_table
from dpstream.query.windows import in_words
from dpstream.records import Integers, Words
from dpstream.rows.column_values import in_type, never_becomes
from dpstream.rows.number_text import one_number_spelling
from dpstream.rows.parse import whole_column
from dpstream.rows.row_ids import group_ids
from dpstream.rows.row_reader import readable_text
from dpstream.sql_compiler.query_builder import Expression, QueryBuilder, RowPreparation
from dpstream.sql_compiler.sql_values import as_bool, as_float
from dpstream.sql_compiler.statement import Draft, Relation
from dpstream.sql_compiler.table_subqueries import VALUE, require_public

MOST_MATCHES = 10_000
"""Rows of a table that one row may meet: each of them takes memory until it is bounded."""
_NO_KEY = bytes(16)  # of ids that only tell whether two values are equal


@dataclass(frozen=True, kw_only=True)
class TableSelect:
    """A SELECT over a whole table: columns that are computed, with all others if `open`, WHERE."""

    columns: tuple[tuple[str, Expression], ...] = ()
    open: bool = True
    where: Expression | None = None
    zone: str = "UTC"

    @property
    def text(self) -> str:
        """All that it does, in SQL; nothing if it takes the table as it is."""
        if not self.columns and self.where is None:
            return ""
        named = [f"{each.text} AS {name!r}" for name, each in self.columns]
        where = "" if self.where is None else f" WHERE {self.where.text}"
        return f"(SELECT {', '.join([*(['*'] if self.open else []), *named])}{where}) OF "

    def __call__(self, name: str, table: pa.Table) -> pa.Table:
        """The rows and columns that are wanted of the table of this name."""
        parts = [expression for _, expression in self.columns]
        for expression in parts if self.where is None else [*parts, self.where]:
            for column in expression.columns:
                if column not in table.column_names:
                    raise no_such_column(name, column, table)
        if self.where is not None:
            table = table.filter(as_bool(self.where.evaluate(table, self.zone)))
        columns = {each: table[each] for each in table.column_names} if self.open else {}
        for each, expression in self.columns:
            if expression.plain:
                columns[each] = table[expression.columns[0]]
            else:
                columns[each] = expression.evaluate(table, self.zone)
        return pa.table(columns)


def no_such_column(name: str, column: str, table: pa.Table) -> InvalidParameter:
    """The query names a column that a table does not have."""
    return InvalidParameter(
        f"the table {name!r} has no column {column!r}; it has {', '.join(table.column_names)}"
    )


@dataclass(frozen=True, kw_only=True)
class Join:
    """One JOIN: rows of the left meet those of a table that are equal to them in `right`."""

    table: str
    """The name under which it is declared."""
    alias: str
    select: TableSelect
    left: tuple[Expression, ...]
    right: tuple[str, ...]
    using: tuple[str, ...] = ()
    outer: bool = False
    """Does a row without a match stay, with NULLs?"""
    on_unit: int | None = None
    """Which of the equal pairs has the privacy unit on its left."""
    lookup: ClassVar[bool] = False
    """Does it put a column beside each row, instead of rows in its place?"""

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        pairs = zip(self.left, self.right, strict=True)
        on = " AND ".join(f"{one.text} = {self.alias}.{other!r}" for one, other in pairs)
        using = f" USING {self.using!r}" if self.using else ""
        kind = "LEFT JOIN" if self.outer else "JOIN"
        return f"{kind} {self.select.text}{self.table!r} AS {self.alias!r} ON {on}{using}"

    def columns(self, whole: WholeTable) -> Sequence[str]:
        """What it brings: the columns of the table, as far as they are selected."""
        return [*_indexed(whole, self)[0].column_names]

    def check(self, whole: WholeTable) -> None:
        """Refuse a table that lacks what is wanted of it."""
        _indexed(whole, self)


@dataclass(frozen=True, kw_only=True)
class InTable(Join):
    """x IN (SELECT ...): beside each row the truth, NULL where nobody can tell."""

    lookup: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        from_ = f"{self.select.text}{self.table!r}"
        return f"WITH {self.left[0].text} IN ({from_}) AS {self.alias!r}"

    @property
    def words(self) -> str:
        """What it looks for."""
        return f"is {self.left[0].text} in it"

    def columns(self, whole: WholeTable) -> Sequence[str]:
        """What it brings."""
        return [VALUE]

    def check(self, whole: WholeTable) -> None:
        """Refuse a table that lacks what is wanted of it."""
        _indexed(whole, self)

    def beside(self, whole: WholeTable, columns: Sequence[pa.Array], size: int) -> Beside:
        """The column, and which of its rows each row has."""
        _, index = _indexed(whole, self)
        met, known = index.contains(columns)
        unknown = ~met & (~known | index.with_null) if index.size else np.zeros(size, bool)
        return pa.table({VALUE: pa.array(met, mask=unknown)}), None


@dataclass(frozen=True, kw_only=True)
class OneValue(Join):
    """(SELECT MAX(x) FROM ...): one value of a table, beside each row."""

    figure: str
    distinct: bool = False
    lookup: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """All that it does, in SQL."""
        return f"WITH {self._figure_text} OF {self.select.text}{self.table!r} AS {self.alias!r}"

    @property
    def _figure_text(self) -> str:
        return f"{self.figure}{' DISTINCT' if self.distinct else ''}" or "THE VALUE"

    @property
    def words(self) -> str:
        """What it looks for."""
        return f"one value of it ({self._figure_text})"

    def columns(self, whole: WholeTable) -> Sequence[str]:
        """What it brings."""
        return [VALUE]

    def check(self, whole: WholeTable) -> None:
        """Refuse a table that lacks what is wanted of it, or has several values."""
        _one_value(whole, self)

    def beside(self, whole: WholeTable, columns: Sequence[pa.Array], size: int) -> Beside:
        """The column, and which of its rows each row has."""
        return _one_value(whole, self), pa.array(np.zeros(size, np.int64))


Beside: TypeAlias = tuple[pa.Table, pa.Array | None]


@lru_cache(maxsize=16)
def _one_value(whole: WholeTable, wanted: OneValue) -> pa.Table:
    """A row with the one value that a subquery selects of a table."""
    column = whole_column(wanted.select(whole.name, whole.table)[VALUE])
    if not wanted.figure:
        if len(column) > 1:
            raise InvalidParameter(
                f"the subquery over {whole.name!r} selects {len(column)} rows, and one value is "
                "compared; filter them (WHERE id = 7), or aggregate: SELECT MAX(...)"
            )
        return pa.table({VALUE: column if len(column) else pa.nulls(1, column.type)})
    if wanted.figure == "COUNT":
        count = pc.count_distinct(column) if wanted.distinct else pc.count(column)
        return pa.table({VALUE: pa.array([count.as_py()], pa.int64())})
    if is_text(column.type):  # numbers of a CSV file; other text has an order of its own
        numbers = as_float(column)
        if wanted.figure in ("SUM", "AVG") or numbers.null_count == column.null_count:
            column = numbers
    compute = {"MAX": pc.max, "MIN": pc.min, "SUM": pc.sum, "AVG": pc.mean}[wanted.figure]
    value = compute(column)
    return pa.table({VALUE: pa.array([value.as_py()], value.type)})


class JoinIndex:
    """Finds the rows of a table that are equal to given values in some of its columns."""

    def __init__(self, table: pa.Table, names: Sequence[str], *, units: int | None = None) -> None:
        """`units`: which column names units; it is compared as the engine tells units apart."""
        self._units = units
        columns = [whole_column(table[name]) for name in names]
        if units is not None:
            columns[units] = _unit_names(columns[units], names[units])
        self.kinds = [column.type for column in columns]
        ids, known = _ids(columns)
        self.size, self.with_null = len(known), not known.all()
        found = HashTable()
        rows = found.rows(ids[known])
        self._words, self._slots = found.words[: max(found.used, 1)], found.index
        order = np.argsort(rows, kind="stable")
        self._rows: Integers = np.flatnonzero(known)[order]  # of the table, by key
        self._counts: Integers = np.bincount(rows, minlength=found.used)
        self._first: Integers = np.cumsum(self._counts) - self._counts
        self.most = int(self._counts.max(initial=0))

    def contains(self, columns: Sequence[pa.Array]) -> tuple[Any, Any]:
        """Which rows are equal to one of the table; in which no value is NULL."""
        keys, known = self._keys(columns)
        return keys >= 0, known

    def _keys(self, columns: Sequence[pa.Array]) -> tuple[Integers, Any]:
        """The key of the table that each row is equal to, -1 for none; has it no NULL?"""
        size = len(columns[0])
        typed = []
        for number, (column, kind) in enumerate(zip(columns, self.kinds, strict=True)):
            column = _unit_names(column, "the unit") if number == self._units else column
            typed.append(in_type(column, kind)[0])
        ids, known = _ids(typed)
        keys: Integers = np.full(size, -1, np.int64)
        if len(self._counts) and size:
            find_known(self._words, self._slots, ids, keys)
            keys[~known] = -1
        return keys, known

    def matches(self, columns: Sequence[pa.Array], *, outer: bool) -> tuple[pa.Array, pa.Array]:
        """Pairs of rows: of the columns, and of the table; NULL where `outer` keeps a row alone.

        The pairs are in the order of the columns' rows, and of the table's for each of them.
        """
        size = len(columns[0])
        keys, _ = self._keys(columns)
        if self.most <= 1:
            left: Integers = np.arange(size) if outer else np.flatnonzero(keys >= 0)
            found = keys[left]
            right = self._rows[np.maximum(found, 0)] if len(self._rows) else found
            return pa.array(left), pa.array(right, mask=found < 0)
        met = keys >= 0
        counts = np.where(met, self._counts[np.maximum(keys, 0)], 1 if outer else 0)
        left = np.repeat(np.arange(size), counts)
        within = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = keys[left]
        right = self._rows[np.where(found >= 0, self._first[np.maximum(found, 0)] + within, 0)]
        return pa.array(left), pa.array(right, mask=found < 0)


def _unit_names(column: pa.Array, name: str) -> pa.Array:
    """Units as the engine tells them apart: text, in which 5 and 5.0 are one; no other is equal."""
    if never_becomes(column.type, pa.string()):
        raise InvalidInput(
            f"a registry is joined on units that are text or numbers; {name!r} is {column.type}"
        )
    return one_number_spelling(in_type(column, pa.string())[0])


def _ids(columns: Sequence[pa.Array]) -> tuple[Words, Any]:
    """An id for each row, and whether no value of it is NULL, which equals nothing."""
    known = np.ones(len(columns[0]), bool)
    for column in columns:
        if column.null_count:
            known &= np.asarray(column.is_valid(), bool)
    return group_ids(list(columns), _NO_KEY), known


@lru_cache(maxsize=16)
def _indexed(whole: WholeTable, join: Join) -> tuple[pa.Table, JoinIndex]:
    """A join's table with its index: once in a process, whatever queries share it."""
    table = join.select(whole.name, whole.table)
    for name in (*join.right, *join.using):
        if name not in table.column_names:
            raise no_such_column(whole.name, name, table)
    units = join.on_unit if whole.registry else None
    index = JoinIndex(table, join.right, units=units)
    if index.most > MOST_MATCHES and not join.lookup:
        raise InvalidInput(
            f"a row may meet {index.most} rows of {whole.name}, which takes memory before it is "
            f"bounded; at most {MOST_MATCHES} are allowed; join on more columns"
            if not whole.registry
            else f"a unit may have at most {MOST_MATCHES} rows in the registry {whole.name}"
        )
    return table, index


@dataclass(frozen=True, kw_only=True, repr=False)
class JoinedRows:
    """Joins rows of the source to tables, one after another, then filters and computes columns.

    `own`: columns that are the source's whatever tables have: the unit and the times. `stream`: the
    name by which the SQL calls the source.
    """

    joins: tuple[Join, ...]
    rows: RowPreparation
    own: tuple[str, ...]
    stream: str
    tables: tuple[WholeTable, ...] = ()
    """Those of the joins, in their order; none yet if they are still to be given."""

    @property
    def table_names(self) -> list[str]:
        """The tables that are still to be given."""
        return [] if self.tables else [join.table for join in self.joins]

    def with_tables(self, tables: Tables) -> JoinedRows:
        """The same joins, with their tables; what cannot be joined is refused."""
        for join in self.joins:
            if join.table not in tables:
                raise missing_table(join.table)
            if tables[join.table].registry and join.lookup:
                raise require_public(join.table)
            if tables[join.table].registry and join.on_unit is None:
                raise InvalidParameter(
                    f"{join.table!r} is a registry, whose rows belong to units, and it is not "
                    f"joined on the privacy unit: rows of one unit would meet another's; join it "
                    f"with {self.own[0]} = {join.alias}.{self.own[0]}, or declare it --public if "
                    "everybody may know all of it"
                )
        bound = replace(self, tables=tuple(tables[join.table] for join in self.joins))
        columns: dict[str, str] = {}
        for join, whole in zip(self.joins, bound.tables, strict=True):
            if join.lookup:
                join.check(whole)  # now, and not in a run
                continue
            on = join.right[join.on_unit or 0]
            if whole.registry and columns.setdefault(whole.name, on) != on:
                raise InvalidParameter(
                    f"the registry {whole.name!r} names its units by one column; it is joined on "
                    f"{columns[whole.name]} and on {on}"
                )
        _ = bound._origins
        return bound

    @property
    def text(self) -> str:
        """All that it does, and which tables it does it with."""
        digests = [
            f"{whole.name!r} IS {whole.digest}"
            + ("" if whole.refresh is None else f" REFRESHED EVERY {whole.refresh}")
            for whole in self.tables
        ]
        return " ".join([*(join.text for join in self.joins), *digests, self.rows.text])

    def __repr__(self) -> str:
        return self.text

    @property
    def joins_in_words(self) -> list[str]:
        """What each join does to a row; nothing of a registry's rows is told."""
        words = []
        for join, whole in zip(self.joins, self.tables, strict=True):
            if isinstance(join, InTable | OneValue):
                words.append(
                    f"look into {_in_words(whole)} beside each row: {join.words}; no row is "
                    f"dropped or repeated{_anew(whole)}"
                )
                continue
            lonely = "stays, with NULLs" if join.outer else "is dropped"
            on = ", ".join(join.right)
            if whole.registry:
                words.append(
                    f"to the registry {whole.name} on the unit ({on}): rows of a unit meet rows "
                    f"of the same unit alone, and are bounded afterwards; a row without a match "
                    f"{lonely}"
                )
                continue
            table, index = _indexed(whole, join)
            most = "1 row" if index.most <= 1 else f"at most {index.most} rows"
            words.append(
                f"to {_in_words(whole, len(table))} on {on}: a row becomes {most} of the same "
                f"unit, bounded afterwards; a row without a match {lonely}{_anew(whole)}"
            )
        return words

    @property
    def plain_times(self) -> bool:
        """The times are columns of the source."""
        return True

    @property
    def rows_text(self) -> str:
        """What is done to joined rows, in SQL."""
        return self.rows.text

    @property
    def public_tables(self) -> list[str]:
        """The tables that everybody may know."""
        return list(dict.fromkeys(whole.name for whole in self.tables if not whole.registry))

    @property
    def registries(self) -> list[str]:
        """The tables whose rows belong to units."""
        return list(dict.fromkeys(whole.name for whole in self.tables if whole.registry))

    @cached_property
    def _origins(self) -> dict[str, tuple[int | None, str]]:
        """Every name that is read: the number of its join (None: the source), and its column."""
        origins: dict[str, tuple[int | None, str]] = {}
        for number in range(len(self.joins) + 1):
            last = number == len(self.joins)
            left = [self.rows] if last else self.joins[number].left
            for name in [name for each in left for name in each.columns]:
                origin = self._origin(name, number)
                if origins.setdefault(name, origin) != origin:
                    raise InvalidParameter(
                        f"the column {name!r} is one thing where {self.joins[number].table!r} is "
                        "joined and another in the result; write it with the name of its table"
                    )
        return origins

    @cached_property
    def _read(self) -> set[str]:
        """Every name that is read."""
        lefts = {name for join in self.joins for each in join.left for name in each.columns}
        return lefts | set(self.rows.columns)

    def _origin(self, name: str, before: int) -> tuple[int | None, str]:
        """Where a name comes from, among the source and the joins before a number."""
        head, dot, rest = name.partition(".")
        if dot and head == self.stream:
            return None, rest
        found: list[tuple[int | None, str]] = []
        for number, join in enumerate(self.joins[:before]):
            columns = join.columns(self.tables[number]) if self.tables else []
            if dot and head == join.alias:
                if self.tables and rest not in columns:
                    raise no_such_column(join.table, rest, pa.table({c: [] for c in columns}))
                return number, rest
            if join.lookup:
                continue  # only SQL that we have written names its column
            if name in columns and name not in join.using and name not in self.own:
                found.append((number, name))
        if f"{self.stream}.{name}" in self._read and found:
            found.insert(0, (None, name))
        if len(found) > 1:
            names = [self.stream if at is None else self.joins[at].alias for at, _ in found]
            both = " and ".join(names)
            raise InvalidParameter(
                f"the column {name!r} is in {both}; write it with the name of its table"
            )
        return found[0] if found else (None, name)

    @property
    def columns(self) -> list[str]:
        """The columns of the source that it reads."""
        return list(dict.fromkeys(name for join, name in self._origins.values() if join is None))

    def columns_of(self, name: str) -> list[str]:
        """The columns of the source that one of the query's columns is computed from."""
        origins = (self._origins[each] for each in self.rows.columns_of(name))
        return [column for join, column in origins if join is None]

    def __call__(self, table: pa.Table) -> pa.Table:
        """The joined rows that are wanted, with the query's columns."""
        if not self.tables:
            raise missing_table(self.joins[0].table)
        # Columns are taken from where they are when they are needed: rows of the source, and of
        # each table, that make up a joined row.
        taken: dict[int | None, tuple[pa.Table, pa.Array | None]] = {None: (table, None)}
        size = len(table)
        for number, join in enumerate(self.joins):
            if isinstance(join, InTable | OneValue):
                kinds = _indexed(self.tables[number], join)[1].kinds if join.right else []
                left = [*self._left_columns(join, taken, size, empty=not size, kinds=kinds)]
                taken[number] = join.beside(self.tables[number], left, size)
                continue
            whole, index = _indexed(self.tables[number], join)
            left = [*self._left_columns(join, taken, size, empty=not size, kinds=index.kinds)]
            mine, theirs = index.matches(left, outer=join.outer)
            if len(mine) != size or index.most > 1:
                taken = {
                    key: (rows, mine if at is None else at.take(mine))
                    for key, (rows, at) in taken.items()
                }
            taken[number], size = (whole, theirs), len(mine)
        needed = {name: self._column(name, taken) for name in self.rows.columns}
        return self.rows(pa.table(needed))

    def _column(self, name: str, taken: dict[Any, tuple[pa.Table, pa.Array | None]]) -> Any:
        origin, column = self._origins[name]
        rows, at = taken[origin]
        values = whole_column(rows[column])
        return values if at is None else values.take(at)

    def _left_columns(
        self, join: Join, taken: Any, size: int, *, empty: bool, kinds: Sequence[pa.DataType]
    ) -> Iterator[pa.Array]:
        """What the rows so far have, to be compared with each column of `right`."""
        for expression, name, kind in zip(join.left, join.right, kinds, strict=True):
            columns = {each: self._column(each, taken) for each in expression.columns}
            if expression.plain:
                rows = pa.table({"x": columns[expression.columns[0]]})
                text, bad = readable_text(rows, "x")
                value = pa.array(text, mask=bad) if bad.any() else text
            else:
                filler = columns or {"": pa.nulls(size)}
                value = expression.evaluate(pa.table(filler), self.rows.zone)
            if empty and never_becomes(value.type, kind):
                raise InvalidInput(
                    f"{expression.text} is {value.type} and {join.alias}.{name} is {kind}: they "
                    "are never equal; CAST one of them"
                )
            yield value


def _in_words(whole: WholeTable, rows: int | None = None) -> str:
    size = len(whole.table) if rows is None else rows
    return f"the public table {whole.name} ({size} rows, SHA-256 {whole.digest[:16]}...)"


def _anew(whole: WholeTable) -> str:
    if whole.refresh is None:
        return ""
    every = in_words(whole.refresh)
    return f"; a live run reads the table anew every {every}, at the next trigger"


def with_joins(
    draft: Draft, builder: QueryBuilder, *, always: bool = False
) -> RowPreparation | JoinedRows | None:
    """What becomes of the source's rows before they are bounded; None: nothing."""
    relation, parameters = draft.relation, draft.parameters
    rows = builder.prepare(always=always or bool(relation.joins))
    if not relation.joins or rows is None:
        return rows
    unit = parameters["privacy_unit_column"]
    joins: list[Join] = []
    for clause in relation.joins:
        units = clause.on_unit(unit)
        parts: dict[str, Any] = {
            "table": clause.right.table,
            "alias": clause.alias,
            "select": table_select(clause.right, builder),
            "left": tuple(builder.expression(left) for left, _ in clause.pairs),
            "right": tuple(column for _, column in clause.pairs),
            "using": tuple(clause.using),
            "outer": clause.outer,
            "on_unit": units[0] if units else None,
        }
        if clause.lookup is None:
            joins.append(Join(**parts))
        elif clause.lookup.figure == "IN":
            joins.append(InTable(**parts))
        else:
            how = {"figure": clause.lookup.figure, "distinct": clause.lookup.distinct}
            joins.append(OneValue(**parts, **how))
    times = (parameters.get(name) for name in ("time_column", "arrival_column"))
    own = (unit, *(name for name in times if name is not None))
    return JoinedRows(joins=tuple(joins), rows=rows, own=own, stream=relation.table)


def table_select(relation: Relation, builder: QueryBuilder) -> TableSelect:
    """What a subquery over a table that is read whole takes of it."""
    return TableSelect(
        columns=tuple((name, builder.expression(node)) for name, node in relation.columns.items()),
        open=relation.open,
        where=builder.condition(relation.where),
        zone=builder.zone,
    )
