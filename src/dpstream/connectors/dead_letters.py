"""Rows that could not be used, kept for the operator with the place and the reason.

They are raw data: the files are for this user alone, and nothing of them enters a release.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from dpstream.connectors.encode import jsonl
from dpstream.connectors.storage import open_folder, put, safe_name
from dpstream.privacy.state.durable_files import remove_leftovers, writing
from dpstream.records import Rejected

_COLUMNS = ("where", "reason", "row")


class DeadLetters:
    """One file of JSON lines per name; writing a name again replaces its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[Path, int] = {}
        if folder.is_dir():
            with writing(folder):
                remove_leftovers(folder)
                for path in folder.glob("*.jsonl"):
                    self._counts[path] = path.read_bytes().count(b"\n")

    def write(self, name: str, rows: list[Rejected] | pa.Table) -> None:
        """Keep the rows as `<name>.jsonl`; no file is written for no rows."""
        table = rows if isinstance(rows, pa.Table) else _table(rows)
        if table.num_rows == 0:
            return
        open_folder(self._folder)
        path = self._folder / f"{safe_name(name)}.jsonl"
        put(path, jsonl(table.select(_COLUMNS)))
        self._counts[path] = table.num_rows

    def count(self) -> int:
        """How many rows are kept."""
        return sum(self._counts.values())


def _table(rows: list[Rejected]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
