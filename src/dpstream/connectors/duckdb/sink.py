"""Releases in a DuckDB file: one table per query with DuckDB's own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.database import FileDatabase
from dpstream.optional import optional


class DuckdbSink(FileDatabase):
    """DuckDB syncs its log when a transaction commits."""

    kind = "a DuckDB"

    def __init__(self, path: Path) -> None:
        self._duckdb = optional("duckdb", extra="duckdb", who="a .duckdb sink")
        self.errors = self._duckdb.Error
        super().__init__(path)

    def connect(self) -> Any:
        """Open or make the file."""
        return self._duckdb.connect(str(self.path))

    def insert(self, name: str, table: pa.Table, *, create: bool) -> None:
        """DuckDB reads Arrow tables as they are, but for decimals that it has not."""
        wide = [n for n, kind in enumerate(table.schema.types) if pa.types.is_decimal256(kind)]
        for n in wide:
            table = table.set_column(n, table.column_names[n], table.column(n).cast(pa.string()))
        self.connection.register("dpstream_rows", table)
        try:
            verb = f"CREATE TABLE {name} AS" if create else f"INSERT INTO {name}"
            self.connection.execute(f"{verb} SELECT * FROM dpstream_rows")
        finally:
            self.connection.unregister("dpstream_rows")
