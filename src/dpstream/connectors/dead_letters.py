"""Rows that could not be used, kept for the operator with the place and the reason.

They are raw data: folder and files are for this user alone, and nothing of them enters a release.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.encode import jsonl
from dpstream.connectors.storage import open_folder, put, safe_name
from dpstream.privacy.state.durable_files import erase_part, remove_leftovers, wrap_write_errors
from dpstream.records import Rejected

_COLUMNS = ("where", "reason", "row")


class DeadLetters:
    """One file of JSON lines per name; writing a name again replaces its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[Path, int] = {}
        if folder.is_dir():
            with wrap_write_errors(folder):
                _keep_private(folder)
                remove_leftovers(folder, overwrite=True)
                for path in folder.glob("*.jsonl"):
                    self._counts[path] = path.read_bytes().count(b"\n")

    def write(self, name: str, rows: list[Rejected] | pa.Table) -> None:
        """Keep the rows as `<name>.jsonl`; no file is written for no rows."""
        table = rows if isinstance(rows, pa.Table) else _table(rows)
        if table.num_rows == 0:
            return
        open_folder(self._folder)
        _keep_private(self._folder)
        path = self._folder / f"{safe_name(name)}.jsonl"
        put(path, jsonl(table.select(_COLUMNS)))
        self._counts[path] = table.num_rows

    def erase(self, select: Callable[[list[str]], Any]) -> tuple[int, int]:
        """Erase rows of every file, each rewritten atomically; how many, and how many are unclear.

        `select` is given the texts of rows and answers two masks: the rows to erase, and those
        that do not tell whether they are among them, which stay.
        """
        erased = unclear = 0
        for path in sorted(self._folder.glob("*.jsonl")):
            with wrap_write_errors(path):
                lines = path.read_bytes().splitlines(keepends=True)
                gone, untold = select([_row_text(line) for line in lines])
                if gone.any():
                    kept = [line for line, is_gone in zip(lines, gone, strict=True) if not is_gone]
                    erase_part(path, b"".join(kept))
                    self._counts[path] = len(kept)
            erased, unclear = erased + int(gone.sum()), unclear + int(untold.sum())
        return erased, unclear

    def count(self) -> int:
        """How many rows are kept."""
        return sum(self._counts.values())


def _row_text(line: bytes) -> str:
    """The text of a row; of a line that somebody else has written, all of it."""
    try:
        return str(json.loads(line)["row"])
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace")


def _keep_private(folder: Path) -> None:
    """Close a folder to other users, whatever the umask; what others own stays as it is."""
    with suppress(PermissionError):
        folder.chmod(0o700)


def _table(rows: list[Rejected]) -> pa.Table:
    """The rows as text; a file's name may have bytes that are none, and they are shown as such."""
    columns = {
        name: [getattr(row, name).encode(errors="backslashreplace") for row in rows]
        for name in _COLUMNS
    }
    return pa.table(columns, schema=pa.schema([(name, pa.string()) for name in _COLUMNS]))
