"""Durable files for connectors: whole or absent, and errors that say what to do.

`DeadLetters` keeps rows that could not be used, for the operator, with the place and the reason.
They are raw data: folder and files are for this user alone, and nothing of them enters a release.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from dpstream.connectors.encode import jsonl
from dpstream.errors import StateError
from dpstream.privacy.state.durable_files import (
    erase_part,
    make_directory,
    remove_leftovers,
    replace,
    sync_directory,
    write_hidden,
    writing,
)
from dpstream.records import Rejected

_LONGEST = 160  # of 255 bytes, with room for numbers, suffixes and temporary names


def safe_name(text: str) -> str:
    """A file name for any text; other texts get other names, and none is hidden.

    A text that is too long for a file name is cut, and its digest added.
    """
    safe = quote(text, safe="").replace(".", "%2E")
    safe = f"%5F{safe[1:]}" if safe.startswith("_") else safe
    if len(safe) <= _LONGEST:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{safe[: _LONGEST - len(digest) - 1]}~{digest}"


def open_folder(folder: Path) -> None:
    """Make the folder if it is not there; it must be one that files can be created in."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise StateError(f"{folder} must be a directory but is a file; name another place")
        make_directory(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def put_new(path: Path, content: bytes, *, private: bool = False) -> bool:
    """Write a file that stays as it is; if it is already there, do nothing and say False.

    Who may use the directory may use the file, unless it is `private` to this user.
    """
    return reveal([prepare_new(path, content, private=private)]) == 1


Prepared = tuple[Path, Path] | None
"""A file that is durable under its first name and will be seen under its second; None: it is."""


def prepare_new(path: Path, content: bytes, *, private: bool = False) -> Prepared:
    """Write a file that nobody sees yet."""
    if path.exists():
        return None
    with writing(path):
        try:
            hidden = write_hidden(path, content)
            if not private:
                os.chmod(hidden, path.parent.stat().st_mode & 0o666)
        except OSError:
            remove_leftovers(path.parent, path.name)
            raise
    return hidden, path


def reveal(prepared: Sequence[Prepared]) -> int:
    """Show files that are prepared, in order and durably; how many were not there before."""
    new = 0
    folders: list[Path] = []
    for hidden, path in filter(None, prepared):
        with writing(path):
            try:
                os.link(hidden, path)  # it appears whole or not at all
                new += 1
            except FileExistsError:
                pass
            finally:
                hidden.unlink()
        if path.parent not in folders:
            folders.append(path.parent)
    for folder in folders:
        with writing(folder):
            sync_directory(folder)
    return new


def put(path: Path, content: bytes) -> None:
    """Put new content under `path`, atomically; the file is private to this user."""
    with writing(path):
        try:
            replace(path, content)
        except OSError:
            remove_leftovers(path.parent, path.name)
            raise


def remove(path: Path) -> None:
    """Remove a file durably; one that is already gone is no error."""
    with writing(path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


# Rows that could not be used, kept for the operator with the place and the reason.

_COLUMNS = ("where", "reason", "row")


class DeadLetters:
    """One file of JSON lines per name; writing a name again replaces its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[Path, int] = {}
        if folder.is_dir():
            with writing(folder):
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
            with writing(path):
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
    columns = {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
    return pa.table(columns, schema=pa.schema([(name, pa.string()) for name in _COLUMNS]))
