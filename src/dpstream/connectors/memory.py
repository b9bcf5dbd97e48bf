"""A table in memory as a source: Arrow, frames, records; a position is a row number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from numbers import Real
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from dpstream.connectors.files.parquet import plain_type
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Columns, Position, Rejected, select_columns
from dpstream.rows.column_values import text_of

ROWS = 1 << 18
Cells = dict[int, str]
"""Values by row, as Python shows them."""
_WRITTEN = (str, Real, Decimal, np.bool_, date, time, UUID)


def table_source(data: Any) -> TableSource | None:
    """Arrow, what offers itself as an Arrow stream, dicts; None for something else.

    A list of dicts has one for each row, a dict of lists one list for each column.
    """
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        return _source_of_records(data)
    if isinstance(data, Mapping):
        return _source_of_lists(data)
    if hasattr(data, "to_frame") and not hasattr(data, "columns"):
        raise InvalidInput(
            "a source has columns with names, and this is one column alone; give a frame, such as "
            "that of its to_frame()"
        )
    if isinstance(data, pa.RecordBatch):
        return TableSource(pa.Table.from_batches([data]))
    if type(data).__module__.partition(".")[0] == "pandas":
        return _pandas_source(data)
    if isinstance(data, pa.Table) or hasattr(data, "__arrow_c_stream__"):
        return TableSource(pa.table(data))
    return None


class TableSource:
    """One partition, named "table"."""

    bounded = True
    replayable = True

    def __init__(
        self,
        table: pa.Table,
        *,
        rows: int = ROWS,
        unusable: Mapping[str, Cells] | None = None,
        typed: bool = True,
    ) -> None:
        """`unusable`: by column, the rows whose values have no place in it.

        `typed`: its types mean something; of texts that stand for anything they do not.
        """
        names = table.column_names
        if len(set(names)) < len(names):
            raise InvalidInput(f"the columns of a table must differ; got {', '.join(names)}")
        self.inferred = _inferred(table.schema)
        """Columns whose types pandas has taken from their values, and what it made of them."""
        self._table = table.cast(
            pa.schema([(field.name, plain_type(field.type)) for field in table.schema])
        )
        self._rows, self._unusable, self._typed = rows, unusable or {}, typed

    def partitions(self) -> list[str]:
        """The table itself."""
        return ["table"]

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The table's types."""
        return None if not self._typed else {field.name: field.type for field in self._table.schema}

    def row_estimate(self, partition: str) -> int:
        """The rows of the table."""
        return len(self._table)

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """The next rows; a position is a row number."""
        names = select_columns("the table", self._table.column_names, columns)
        start = 0 if position is None else int(position)
        end = self._table.num_rows if until is None else int(until)
        if not 0 <= start <= end <= self._table.num_rows:
            raise InvalidInput(
                f"the table has {self._table.num_rows} rows, and none from {start} up to {end}"
            )
        table = self._table.slice(start, min(self._rows, end - start)).select(names)
        after = start + table.num_rows
        bad = {name: self._unusable[name] for name in names if name in self._unusable}
        wrong = sorted({row for cells in bad.values() for row in cells if start <= row < after})
        rejected = []
        for row in wrong:
            shown = {name: cells[row] for name, cells in bad.items() if row in cells}
            reason, where = f"not of its column's type: {', '.join(shown)}", f"table, row {row}"
            rejected.append(Rejected(where=where, reason=reason, row=json.dumps(shown)[:4096]))
        if wrong:
            table = table.filter(pa.array(~np.isin(np.arange(start, after), wrong)))
        return Batch(table=table, position=after, done=after >= end, rejected=rejected)

    def close(self) -> None:
        """Nothing is held open."""


def _pandas_source(frame: Any) -> TableSource:
    """A data frame; a column of objects that are of several kinds becomes text, value by value."""
    if not frame.columns.is_unique:
        raise InvalidInput(
            f"the columns of a table must differ; got {', '.join(map(str, frame.columns))}"
        )
    frame, unusable, mixed = frame.copy(deep=False), {}, []
    for name in frame.columns[[kind == "object" for kind in frame.dtypes]]:
        try:
            kind = pa.array(frame[name], from_pandas=True).type
            if kind != pa.binary() or not any(isinstance(value, str) for value in frame[name]):
                continue
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            pass  # one value is enough: Arrow takes a type from the first ones
        texts, wrong = _texts(name, frame[name], frame[name].isna())
        if any(isinstance(value, bool | np.bool_) for value in frame[name]):
            mixed.append(str(name))  # a column of them alone has a type of its own
        frame[name], unusable[str(name)] = texts, wrong
    source = TableSource(pa.Table.from_pandas(frame, preserve_index=False), unusable=unusable)
    source.inferred |= dict.fromkeys(mixed, "truth values beside others")
    return source


def _source_of_records(rows: list[Mapping[str, Any]]) -> TableSource:
    """Dicts, one a row, read as JSON lines are: every value as text, what a row lacks as null."""
    columns, unusable = {}, {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        missing = [value is None or value != value for value in values]
        columns[str(name)], unusable[str(name)] = _texts(name, values, missing)
    schema = pa.schema([(name, pa.string()) for name in columns])
    return TableSource(pa.table(columns, schema=schema), unusable=unusable, typed=False)


def _source_of_lists(columns: Mapping[Any, Any]) -> TableSource:
    """Columns by name, read as records are."""
    lists = {str(name): values for name, values in columns.items()}
    if not all(isinstance(values, list | tuple | np.ndarray) for values in lists.values()):
        raise InvalidInput(
            "a source that is a dict has a list of values for each column; for one row write a "
            "list with that dict, for a frame the frame itself"
        )
    lengths = {name: len(values) for name, values in lists.items()}
    if len({*lengths.values()}) != 1:
        raise InvalidInput(
            "the columns of a table must be of one length; got "
            f"{', '.join(f'{name}: {length}' for name, length in lengths.items()) or 'none'}"
        )
    (count,) = {*lengths.values()}
    return _source_of_records(
        [{name: values[row] for name, values in lists.items()} for row in range(count)]
    )


def _texts(name: Any, values: Any, are_missing: Any) -> tuple[list[str | None], Cells]:
    """Objects of a column as text files write them, and those that cannot be written so."""
    texts: list[str | None] = []
    unusable: Cells = {}
    for row, (value, missing) in enumerate(zip(values, are_missing, strict=True)):
        text = None if missing or not isinstance(value, _WRITTEN) else text_of(value)
        if not missing and (text is None or text.encode(errors="ignore").decode() != text):
            unusable[row] = repr(value)[:4096]
            text = None
        texts.append(text)
    if unusable and not any(texts):
        kind = type([*values][next(iter(unusable))]).__name__
        raise InvalidInput(
            f"the column {name!r} holds values of the type {kind}, which are no numbers, texts, "
            "dates or times; convert them"
        )
    return texts, unusable


def _inferred(schema: pa.Schema) -> dict[str, str]:
    """Columns whose type one value may have changed.

    pandas has floats where an integer is missing, and objects of any kind; Arrow looks at each of
    those to tell a type. Text is safe: another value beside it becomes text.
    """
    columns = (schema.pandas_metadata or {}).get("columns", ())
    objects = {column["field_name"] for column in columns if column["numpy_type"] == "object"}
    inferred = {}
    for field in schema if columns else ():
        kind = plain_type(field.type)
        if pa.types.is_floating(kind):
            inferred[field.name] = "floats (so are integers with a value that is missing)"
        elif field.name in objects and kind not in (pa.string(), pa.null(), pa.bool_()):
            inferred[field.name] = f"Python objects, which look like {kind}"
    return inferred
