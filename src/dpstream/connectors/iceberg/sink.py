"""Releases in Iceberg: one table per query, one commit per release.

A commit also sets a property of the table that says which release it is, so the table itself tells
what it has. PyIceberg would put a commit that met another one on top of it, with the rows twice;
that is turned off, and whoever comes second looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from dpstream.connectors.encode import (
    KEY_COLUMN,
    another_run,
    run_of,
    with_key_column,
    with_numbers,
)
from dpstream.connectors.iceberg.client import (
    iceberg_errors,
    open_catalog,
    raise_if_away,
    split_path,
)
from dpstream.connectors.lake_tables import (
    has_release,
    lake_types,
    one_line,
    release_mark,
    run_mark,
)
from dpstream.connectors.server_base import ServerOptions
from dpstream.connectors.storage import safe_name
from dpstream.errors import StateError
from dpstream.optional import optional
from dpstream.privacy.state.durable_files import sync_directory, wrap_write_errors

_SETTINGS = {
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Of every table: no commit is repeated on another, and old metadata goes."""
_LOCKS: dict[str, Lock] = {}


class IcebergSink:
    """The sink of iceberg://CATALOG/NAMESPACE: a table for each query in a namespace."""

    def __init__(self, options: ServerOptions) -> None:
        (self._namespace,) = split_path(options, parts=1, example="iceberg://CATALOG/NAMESPACE")
        self._where, self._retry = options.where, options.retry_policy()
        self._catalog, self._errors = open_catalog(options), iceberg_errors()
        self._lock = _LOCKS.setdefault(self._where, Lock())

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Append the rows in one commit, unless the table has them."""
        rows = with_numbers(table, window, trigger)
        self._retry.insist(lambda: self._commit(name, window, trigger, run_of(table), rows))

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Put the rows in place of the window's in one commit, unless it has newer ones."""
        rows = with_key_column(with_numbers(table, window, trigger), row_keys)
        self._retry.insist(lambda: self._commit(name, window, trigger, run_of(table), rows))

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse columns that Iceberg has not: a table of them is made elsewhere, and goes."""
        rows = lake_types(with_numbers(schema.empty_table(), 0, 1))
        with self._lock:
            self._refuse_other_columns(self._now(name), name, rows)
        catalog = optional("pyiceberg.catalog.sql", extra="iceberg", who="an iceberg:// sink")
        with TemporaryDirectory(prefix="dpstream-") as place, self._explain_errors(name):
            elsewhere = catalog.SqlCatalog("check", uri="sqlite:///:memory:", warehouse=place)
            elsewhere.create_namespace("check")
            elsewhere.create_table("check.check", rows.schema)
            elsewhere.close()

    def check_upsert(self, name: str, schema: pa.Schema) -> None:
        """The same, of a table with keys."""
        self.check(name, with_key_column(schema.empty_table()).schema)

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        with self._lock:
            self._refuse_another_run(self._now(name), name, run)

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def _commit(self, name: str, window: int, trigger: int, run: str, rows: pa.Table) -> None:
        """Rows with a key replace those of their window, others are added."""
        rows = lake_types(rows)
        with self._lock, self._explain_errors(name):
            known = self._known(name)
            if known is None:
                self._catalog.create_namespace_if_not_exists(self._namespace)
                properties = _SETTINGS | {run_mark(run): "0"}
                known = self._catalog.create_table(
                    self._identifier(name), rows.schema, properties=properties
                )
            self._refuse_another_run(known, name, run)
            self._refuse_other_columns(known, name, rows)
            mark, number = release_mark(window, trigger)
            marked = known.properties.get(mark)
            there = None if marked is None else int(marked)
            if has_release(there, window, trigger, self._place(name)):
                return
            was = known.current_snapshot()
            with known.transaction() as change:
                change.set_properties({mark: str(number)})
                if rows.column_names[-1] == KEY_COLUMN:
                    self._drop_window(known, change, rows.column_names[0], window)
                change.append(rows, snapshot_properties={"query": name, "window": str(window)})
            _sync(known, None if was is None else was.sequence_number)

    def _drop_window(self, known: Any, change: Any, column: str, window: int) -> None:
        expressions = optional("pyiceberg.expressions", extra="iceberg", who="an iceberg:// sink")
        of_window = expressions.EqualTo(column, window)
        if len(known.scan(of_window, selected_fields=(column,), limit=1).to_arrow()):
            change.delete(of_window)

    def _identifier(self, query: str) -> tuple[str, ...]:
        return (*self._namespace.split("."), safe_name(query).replace("%", "@"))

    def _place(self, query: str) -> str:
        return f"{self._where}/{self._identifier(query)[-1]}"

    def _now(self, query: str) -> Any:
        """The same, waiting for a catalog that is away."""

        def known() -> Any:
            with self._explain_errors(query):
                return self._known(query)

        return self._retry.insist(known)

    def _known(self, query: str) -> Any:
        """The query's table as it is now; None: it is not there yet."""
        identifier = self._identifier(query)
        if not self._catalog.table_exists(identifier):
            return None
        return self._catalog.load_table(identifier)

    def _refuse_another_run(self, known: Any, query: str, run: str) -> None:
        if known is not None and run_mark(run) not in known.properties:
            raise another_run(self._place(query), query)

    def _refuse_other_columns(self, known: Any, query: str, rows: pa.Table) -> None:
        names = rows.column_names if known is None else known.schema().column_names
        if (KEY_COLUMN in names) != (KEY_COLUMN in rows.column_names):
            was, now = ("upsert", "append") if KEY_COLUMN in names else ("append", "upsert")
            raise StateError(
                f"{self._place(query)} was written with output = {was!r}, and this run has "
                f"{now!r}; use another sink"
            )
        if list(names) != rows.column_names:
            raise StateError(
                f"{self._place(query)} cannot be written: it has the columns {', '.join(names)}, "
                f"and this run publishes {', '.join(rows.column_names)}; use another sink: nothing "
                "is lost"
            )

    @contextmanager
    def _explain_errors(self, query: str) -> Iterator[None]:
        try:
            yield
        except self._errors as problem:
            if isinstance(problem, StateError):
                raise
            raise_if_away(problem, self._where)
            raise StateError(
                f"the Iceberg table {self._place(query)} cannot be written: {one_line(problem)}; "
                "mend that and run again: nothing is lost"
            ) from problem


def _sync(table: Any, after: int | None) -> None:
    """Make files on this machine durable that commits after a snapshot have made."""
    paths = [table.metadata_location]
    for snapshot in table.snapshots():
        if after is not None and snapshot.sequence_number <= after:
            continue
        paths.append(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id == snapshot.snapshot_id:
                paths.append(manifest.manifest_path)
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                paths += [entry.data_file.file_path for entry in entries]
    local = [Path(urlsplit(path).path) for path in paths if urlsplit(path).scheme in ("", "file")]
    folders = {folder for path in local for folder in (path.parent, path.parent.parent)}
    for path in [*local, *sorted(folders)]:
        with wrap_write_errors(path):
            sync_directory(path)  # a file is synced in the same way


from_options = IcebergSink
