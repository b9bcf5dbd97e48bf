"""Releases in Delta Lake: one table per query, one commit per release.

A commit carries an application transaction that says which release it is, so the table itself
tells what it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.encode import (
    KEY_COLUMN,
    another_run,
    run_of,
    with_key_column,
    with_numbers,
)
from dpstream.connectors.lake_tables import has_release, lake_types, release_mark, run_mark
from dpstream.connectors.server_base import is_uri
from dpstream.connectors.storage import open_folder, safe_name
from dpstream.errors import StateError
from dpstream.optional import optional
from dpstream.privacy.state.durable_files import sync_directory, wrap_write_errors

_LOCKS: dict[str, Lock] = {}


class DeltaSink:
    """Tables in a folder, or in an object store whose keys the environment holds."""

    def __init__(self, folder: str | Path) -> None:
        self._delta = optional("deltalake", extra="delta", who="a delta: sink")
        self._local = not is_uri(os.fspath(folder))
        self._place = os.fspath(folder).rstrip("/") or "."
        self._tables: dict[str, Any] = {}  # by query
        if self._local:
            open_folder(Path(self._place))
        place = str(Path(self._place).resolve()) if self._local else self._place
        self._lock = _LOCKS.setdefault(place, Lock())

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Append the rows in one commit, unless the table has them."""
        self._commit(name, window, trigger, run_of(table), with_numbers(table, window, trigger))

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Merge the rows into those of the window in one commit, unless it has a newer one."""
        rows = with_key_column(with_numbers(table, window, trigger), row_keys)
        self._commit(name, window, trigger, run_of(table), rows)

    def _commit(self, name: str, window: int, trigger: int, run: str, rows: pa.Table) -> None:
        """Rows with a key replace those of their window, others are added."""
        rows = lake_types(rows)
        with self._lock, self._explain_errors(name):
            known = self._known(name)
            self._refuse_another_run(name, run)
            self._refuse_another_output(name, rows.schema)
            mark = release_mark(window, trigger)
            marked = None if known is None else known.transaction_version(mark[0])
            if has_release(marked, window, trigger, self._uri(name)):
                return
            about = self._delta.CommitProperties(
                custom_metadata={"query": name, "window": str(window), "run": run},
                app_transactions=[
                    self._delta.Transaction(*mark),
                    self._delta.Transaction(run_mark(run), 0),
                ],
                max_commit_retries=0,  # another writer may have written this very release
            )
            if known is not None and rows.column_names[-1] == KEY_COLUMN:
                column = rows.column_names[0]
                same = (f"old.{name} = new.{name}" for name in (column, KEY_COLUMN))
                merge = known.merge(
                    rows,
                    predicate=" AND ".join(same),
                    source_alias="new",
                    target_alias="old",
                    commit_properties=about,
                )
                merge.when_matched_update_all().when_not_matched_insert_all()
                merge.when_not_matched_by_source_delete(f"old.{column} = {window}").execute()
            else:
                self._delta.write_deltalake(
                    self._uri(name) if known is None else known,
                    rows,
                    mode="append",
                    name=name if known is None else None,
                    commit_properties=about,
                )
            self._sync(name)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse columns that Delta Lake has not: a table of them is made elsewhere, and goes."""
        rows = lake_types(with_numbers(schema.empty_table(), 0, 1))
        with self._lock, self._explain_errors(name):
            self._refuse_another_output(name, rows.schema)
        with TemporaryDirectory(prefix="dpstream-") as elsewhere, self._explain_errors(name):
            self._delta.write_deltalake(elsewhere, rows, name=name)

    def check_upsert(self, name: str, schema: pa.Schema) -> None:
        """The same, of a table with keys."""
        self.check(name, with_key_column(schema.empty_table()).schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._lock, self._explain_errors(name):
            self._refuse_another_run(name, run)

    def close(self) -> None:
        """Nothing is held open."""

    def _uri(self, query: str) -> str:
        # %20 would be read as a space; no name has an @ of its own
        return f"{self._place}/{safe_name(query).replace('%', '@')}"

    def _known(self, query: str) -> Any:
        """The query's table as it is now; None: it is not there yet."""
        if query in self._tables:
            self._tables[query].update_incremental()
        elif self._delta.DeltaTable.is_deltatable(self._uri(query)):
            self._tables[query] = self._delta.DeltaTable(self._uri(query))
        return self._tables.get(query)

    def _refuse_another_run(self, query: str, run: str) -> None:
        known = self._known(query)
        if known is not None and known.transaction_version(run_mark(run)) is None:
            raise another_run(self._uri(query), query)

    def _refuse_another_output(self, query: str, schema: pa.Schema) -> None:
        """Rows with a key and rows without one have no table in common."""
        known = self._known(query)
        names = None if known is None else [field.name for field in known.schema().fields]
        if names is not None and (KEY_COLUMN in names) != (KEY_COLUMN in schema.names):
            was, now = ("upsert", "append") if KEY_COLUMN in names else ("append", "upsert")
            raise StateError(
                f"{self._uri(query)} was written with output = {was!r}, and this run has {now!r}; "
                "use another sink"
            )

    def _sync(self, query: str) -> None:
        """Make the newest commit and its files durable; an object store does so by itself."""
        if not self._local:
            return
        folder = Path(self._uri(query))
        known = self._known(query)
        commit = folder / "_delta_log" / f"{known.version():020d}.json"
        with wrap_write_errors(folder):
            lines = map(json.loads, commit.read_bytes().splitlines())
            files = [folder / line["add"]["path"] for line in lines if "add" in line]
            for path in [*files, commit, commit.parent, folder, folder.parent]:
                sync_directory(path)  # a file is synced in the same way

    @contextmanager
    def _explain_errors(self, query: str) -> Iterator[None]:
        try:
            yield
        except (self._delta.exceptions.DeltaError, OSError, pa.ArrowInvalid) as problem:
            self._tables.pop(query, None)
            words = " ".join(str(problem).split())
            raise StateError(
                f"the Delta table {self._uri(query)} cannot be written: {words}; mend that and run "
                "again: nothing is lost"
            ) from problem
