"""Releases as files: one for each query, window and trigger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from dpstream.connectors.encode import ENCODERS, another_run, run_of
from dpstream.connectors.storage import (
    Prepared,
    open_folder,
    prepare_new,
    put_new,
    reveal,
    safe_name,
)
from dpstream.errors import InvalidParameter
from dpstream.privacy.state.durable_files import remove_leftovers, wrap_write_errors


class DirectorySink:
    """Files such as `clicks-w000003-t000017.parquet`; `suffix` is parquet, csv or jsonl.

    A file appears whole or not at all, and stays as it is once it is there. One process at a time
    writes to a directory: opening it removes the temporary files that a killed one left (not
    `again`, while other queries of this process write there).
    """

    def __init__(self, folder: Path, *, suffix: str = "parquet", again: bool = False) -> None:
        if suffix not in ENCODERS:
            raise InvalidParameter(f"suffix must be one of {', '.join(ENCODERS)}; got {suffix!r}")
        self._folder, self._suffix = folder, suffix
        self._runs: dict[str, str] = {}  # by query
        open_folder(folder)
        if not again:
            with wrap_write_errors(folder):
                remove_leftovers(folder)

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write the file, unless it is there; releases of another run are refused."""
        self.publish([self.prepare(name, window, trigger, table)])

    def prepare(self, name: str, window: int, trigger: int, table: pa.Table) -> Prepared:
        """Write the file where nobody sees it, unless it is there; several threads may."""
        run = run_of(table)
        if run and name not in self._runs:
            put_new(self._marker(name), run.encode())
            self.fence(name, run)
            self._runs[name] = run
        self.fence(name, run)
        path = self._folder / file_name(name, window, trigger, self._suffix)
        return None if path.exists() else prepare_new(path, ENCODERS[self._suffix](table))

    def publish(self, prepared: Sequence[Prepared]) -> None:
        """Show files that were prepared, in order."""
        reveal(prepared)

    def close(self) -> None:
        """Nothing is held open."""

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse columns that the format has not."""
        ENCODERS[self._suffix](schema.empty_table())

    def fence(self, name: str, run: str) -> None:
        """Refuse a query whose releases here are from another run: a small file says from which."""
        if run and self._runs.get(name) != run:
            marker = self._marker(name)
            with wrap_write_errors(marker):
                known = marker.read_text() if marker.exists() else run
            if known != run:
                known, mark = file_name(name, 0, 0, self._suffix), self._marker(name).name
                files = f"{known.partition('-w')[0]}-w*.{self._suffix} and {mark}"
                raise another_run(self._folder, name, files=files)

    def _marker(self, query: str) -> Path:
        return self._folder / f".{safe_name(query)}.run"


def file_name(query: str, window: int, trigger: int, suffix: str) -> str:
    """The name of a release's file; other releases have other names, whatever the query's name."""
    return f"{safe_name(query)}-w{window:06d}-t{trigger:06d}.{suffix}"
