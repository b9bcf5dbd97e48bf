"""Releases as JSON lines on standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from dpstream.connectors.encode import jsonl, with_numbers
from dpstream.connectors.storage import open_folder
from dpstream.errors import StateError
from dpstream.privacy.state.durable_files import writing


class StdoutSink:
    """One JSON object a row, with the query's name and the numbers of window and release.

    Nobody can ask a pipe what it has received. Within a process a release is written once. With
    `journal`, a small file that lists what was written, this holds across restarts too, except
    for a release during which the process was killed: that one may come twice.
    """

    def __init__(self, stream: BinaryIO | None = None, *, journal: Path | None = None) -> None:
        self._stream = sys.stdout.buffer if stream is None else stream
        self._journal = journal
        self._done: set[tuple[str, int, int]] = set()
        if journal is not None:
            open_folder(journal.parent)
            self._done = _read_journal(journal)

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write the rows, unless they were written before."""
        key = (name, window, trigger)
        if key in self._done:
            return
        table = with_numbers(table, window, trigger)
        if "query" not in table.column_names:
            table = table.add_column(0, "query", pa.array([name] * table.num_rows, pa.string()))
        try:
            self._stream.write(jsonl(table))
            self._stream.flush()
        except BrokenPipeError as problem:
            raise StateError(
                "the reader of standard output has gone away; start it again and run again"
            ) from problem
        except OSError as problem:
            raise StateError(f"standard output cannot be written: {problem}") from problem
        self._note(key)

    def close(self) -> None:
        """Standard output stays open."""

    def _note(self, key: tuple[str, int, int]) -> None:
        self._done.add(key)
        if self._journal is None:
            return
        with writing(self._journal), self._journal.open("ab") as file:
            file.write(json.dumps(key).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _read_journal(path: Path) -> set[tuple[str, int, int]]:
    """What was written; a last line without its end was cut by a kill, and is cut off."""
    if not path.exists():
        return set()
    with writing(path):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    try:
        return {(str(q), int(w), int(t)) for q, w, t in map(json.loads, whole.splitlines())}
    except (ValueError, TypeError) as problem:
        raise StateError(
            f"{path} is not a journal of releases: {problem}; name another one"
        ) from problem
