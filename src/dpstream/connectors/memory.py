"""A table in memory as a source: Arrow, pandas or Polars; a position is a row number."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dpstream.connectors.files.parquet import plain_type
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Columns, Position, select_columns

ROWS = 1 << 18


def as_table(data: Any) -> pa.Table | None:
    """Arrow, or anything that offers itself as an Arrow stream; None for something else."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if type(data).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    return None


class TableSource:
    """One partition, named "table"."""

    bounded = True
    replayable = True

    def __init__(self, table: pa.Table, *, rows: int = ROWS) -> None:
        names = table.column_names
        if len(set(names)) < len(names):
            raise InvalidInput(f"the columns of a table must differ; got {', '.join(names)}")
        self.inferred = _inferred(table.schema)
        """Columns whose types pandas has taken from their values, and what it made of them."""
        self._table = table.cast(
            pa.schema([(field.name, plain_type(field.type)) for field in table.schema])
        )
        self._rows = rows

    def partitions(self) -> list[str]:
        """The table itself."""
        return ["table"]

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """The table's types."""
        return {field.name: field.type for field in self._table.schema}

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
        return Batch(table=table, position=after, done=after >= end)

    def close(self) -> None:
        """Nothing is held open."""


def _inferred(schema: pa.Schema) -> dict[str, str]:
    """Columns whose type one value may have changed.

    pandas has floats where an integer is missing, and objects of any kind; Arrow looks at each of
    those to tell a type. Text is safe: another value beside it is an error.
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
