"""Public tables that a live run reads anew: which version the rows of a step are joined to.

A table is due at the first step that begins in another of its intervals, by the query's own
schedule. What is read then is a version: its copy is durable in the state directory before its
digest is logged with the step, and the digest is logged before the step's noise is drawn. So a
replay joins the rows of a step to the version that they met before, whatever the table is by then.

tables/NAME/first.arrow       what the run began with; its digest is part of what fixes the run
tables/NAME/<digest>.arrow    a version that a recovery may still need
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from dpstream.engines.chunks import OperatorCounts
from dpstream.errors import DpstreamError, InvalidInput, StateError
from dpstream.privacy.state import durable_files
from dpstream.privacy.state.run_directory import read_about
from dpstream.query.public_tables import Joining, WholeTable
from dpstream.query.row_spec import Prepare, RowSpec
from dpstream.query.windows import Ticks, instant
from dpstream.records import Position
from dpstream.rows.whole_table import whole_table

_LOG = logging.getLogger("dpstream.sources")
_FOLDER, _FIRST, _SUFFIX = "tables", "first", ".arrow"
_KEY = "//table/"  # before a table's name among the positions of a step: no partition begins so


def is_table(name: str) -> bool:
    """Is this, among the positions of a step, a table and no partition of the source?"""
    return name.startswith(_KEY)


def refreshed_tables(query: RowSpec) -> dict[str, WholeTable]:
    """The tables that a query joins and that a live run reads anew, by their names."""
    joining: object = query.prepare
    tables = joining.tables if isinstance(joining, Joining) else ()
    return {whole.name: whole for whole in tables if whole.refresh is not None}


def refuse_changed_table(query: RowSpec, folder: Path) -> None:
    """Refuse a table that is another than when the run of a folder began, in words of its own.

    The rest of what fixes a run is compared where the run is opened.
    """
    about = read_about(folder)
    joining: object = query.prepare
    if about is None or not isinstance(joining, Joining):
        return
    was = re.findall(r" IS ([0-9a-f]{64})", about["facts"].get("prepare", ""))
    for digest, whole in zip(was, joining.tables, strict=False):
        if digest != whole.digest:
            raise StateError(
                f"the table {whole.name!r} has changed since the run in {folder} began (its "
                f"SHA-256 was {digest[:16]}... and is {whole.digest[:16]}...), and a run joins the "
                "table that it began with: put it back; or use a new state directory (a new run, "
                "charged anew), with a refresh interval if it is public and is to be read anew; in "
                "a pipeline file, see what the change costs, and accept it: dpstream apply FILE"
            )


def first_versions(query: RowSpec, folder: Path) -> dict[Path, WholeTable]:
    """The versions that a run of the query begins with, by the places of their copies."""
    return {_place(folder, name, _FIRST): each for name, each in refreshed_tables(query).items()}


def keep_first_versions(query: RowSpec, folder: Path) -> None:
    """Make copies of the tables that a run begins with, where there are none."""
    for path, whole in first_versions(query, folder).items():
        if not path.exists():
            _write(path, whole)


def kept_first_version(folder: Path | None, name: str) -> pa.Table | None:
    """What the run of a folder began with, of a table that is read anew; None: it has no copy."""
    path = None if folder is None else _place(folder, name, _FIRST)
    return None if path is None or not path.exists() else _load(path)


class TableVersions:
    """The versions of a query's tables, step by step."""

    def __init__(self, query: RowSpec, folder: Path | None, operator: OperatorCounts) -> None:
        self._query, self._folder, self._operator = query, folder, operator
        self._first = refreshed_tables(query)
        self._now = dict(self._first)
        self._prepare: Prepare | None = query.prepare
        self._read_now: dict[str, Position] = {}
        self._since = [(-1, name, whole.digest) for name, whole in self._first.items()]
        self._lock = Lock()  # snapshots settle on a thread of their own

    def begin(self, step: int, logged: Mapping[str, Position] | None) -> Prepare | None:
        """What the rows of a step are prepared with: a table that is due is read anew.

        `logged`: what the step has read before; its tables are those of then.
        """
        self._read_now = {}
        for name, first in self._first.items():
            if logged is None:
                if not self._is_due(first, step):
                    continue
                version = self._read(name)
            elif (mark := logged.get(_KEY + name)) is not None:
                version = self._kept(first, mark["digest"], step)
            else:
                continue
            self._use(version, step)
            self._read_now[_KEY + name] = {"digest": version.digest}
        return self._prepare

    def moved(self) -> dict[str, Position]:
        """The versions that this step has begun with, for its log."""
        return self._read_now

    def save(self) -> dict[str, str]:
        """The digests of the versions that are joined now, for a snapshot."""
        return {name: whole.digest for name, whole in self._now.items()}

    def go_on_from(self, saved: Mapping[str, Any]) -> None:
        """Join the versions that a snapshot names."""
        for name, digest in saved.get("tables", {}).items():
            self._use(self._kept(self._first[name], digest, saved["step"]), saved["step"] - 1)

    def prepared_as(self, digests: Mapping[str, str], step: int) -> Prepare:
        """What rows were prepared with that met these versions, at a step."""
        joining: object = self._query.prepare
        assert isinstance(joining, Joining)
        tables = {whole.name: whole for whole in joining.tables}
        met = {name: self._kept(self._first[name], each, step) for name, each in digests.items()}
        prepare: Prepare = joining.with_tables(tables | met)
        return prepare

    def settle(self, saved: Mapping[str, Any]) -> None:
        """No recovery goes back beyond this snapshot: versions of before it go."""
        if self._folder is None:
            return
        step = saved["step"]
        with self._lock:
            newest = {name: digest for at, name, digest in self._since if at < step}
            later = [each for each in self._since if each[0] >= step]
            kept = [(step - 1, name, digest) for name, digest in saved.get("tables", {}).items()]
            kept += [(step - 1, name, digest) for name, digest in newest.items()]
            self._since = [*dict.fromkeys(kept), *later]
            for table in self._first:
                needed = {digest for _, name, digest in self._since if name == table}
                folder = _place(self._folder, table, _FIRST).parent
                for path in folder.glob(f"*{_SUFFIX}"):
                    if path.stem not in {_FIRST, *needed}:
                        path.unlink()

    def _is_due(self, first: WholeTable, step: int) -> bool:
        """Does the step begin in another interval than the one before it?"""
        query = self._query
        if step == 0:
            return False  # the run began with what it has read
        assert first.refresh is not None
        assert query.start is not None
        origin = instant("1970-01-01", "the first interval", query.time_zone)
        ticks = Ticks(origin=origin, size=first.refresh, zone=query.time_zone)
        times = [query.schedule.time_of(step - 1)]
        times.append(query.schedule.time_of(step - 2) if step > 1 else query.start)
        now, before = (ticks.last_before(time) for time in times if time is not None)
        return now != before

    def _read(self, name: str) -> WholeTable:
        """What a table is now; what cannot be used leaves the version there was."""
        first, now = self._first[name], self._now[name]
        assert first.read is not None
        try:
            version = _same_columns(first, first.read())
            if version.digest != now.digest:
                self._prepared(version)  # refuses what cannot be joined
        except (DpstreamError, OSError, pa.ArrowException) as problem:
            words = str(problem).removeprefix(f"the table {name!r}: ")
            self._operator.stale_tables[name] = words
            _LOG.warning(
                "the public table %r cannot be read anew, and rows go on to meet its last version: "
                "%s",
                name,
                words,
            )
            return now
        self._operator.stale_tables.pop(name, None)
        return version

    def _use(self, version: WholeTable, step: int) -> None:
        """Join a version from a step on; its copy is durable then."""
        with self._lock:  # nobody removes it since
            self._since.append((step, version.name, version.digest))
        first = self._first[version.name]
        if self._folder is not None and version.digest != first.digest:
            path = _place(self._folder, version.name, version.digest)
            if not path.exists():
                _write(path, version)
        if version.digest != self._now[version.name].digest:
            self._prepare = self._prepared(version)
            self._now[version.name] = version

    def _prepared(self, version: WholeTable) -> Prepare:
        joining: object = self._query.prepare
        assert isinstance(joining, Joining)
        tables = {whole.name: whole for whole in joining.tables} | self._now
        prepare: Prepare = joining.with_tables(tables | {version.name: version})
        return prepare

    def _kept(self, first: WholeTable, digest: str, step: int) -> WholeTable:
        """The version with a digest, from its copy."""
        now = self._now[first.name]
        for known in (now, first):
            if known.digest == digest:
                return known
        path = _place(self._folder or Path(), first.name, digest)
        if self._folder is None or not path.exists():
            raise StateError(
                f"step {step} has met a version of the table {first.name!r} whose copy {path} is "
                "missing; restore it, or use a new state directory (a new run, charged anew)"
            )
        version = _same_columns(first, _load(path))
        if version.digest != digest:
            raise _damaged(path)
        return version


def _place(folder: Path, name: str, version: str) -> Path:
    return folder / _FOLDER / quote(name, safe="") / f"{version}{_SUFFIX}"


def _write(path: Path, whole: WholeTable) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, whole.table.schema) as file:
        file.write_table(whole.table)
    durable_files.make_directory(path.parent, mode=0o700)
    durable_files.replace(path, memoryview(sink.getvalue()))


def _load(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
    except pa.ArrowException:
        raise _damaged(path) from None


def _damaged(path: Path) -> StateError:
    return StateError(f"{path}, the copy of a table that rows have met, is damaged; restore it")


def _same_columns(first: WholeTable, table: pa.Table) -> WholeTable:
    """A version with the columns of the first, whatever else it has; other types are refused."""
    names = first.table.column_names
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InvalidInput(
            f"it has no column {missing[0]!r} any more; it has {', '.join(table.column_names)}"
        )
    version = whole_table(first.name, table.select(names))
    now = dict(zip(version.table.column_names, version.table.schema.types, strict=True))
    for each in first.table.schema:
        if now.get(each.name) != each.type:
            raise InvalidInput(
                f"its column {each.name!r} was {each.type} when the run began and is "
                f"{now.get(each.name, table.schema.field(each.name).type)} now"
            )
    return replace(version, refresh=first.refresh, read=first.read)
