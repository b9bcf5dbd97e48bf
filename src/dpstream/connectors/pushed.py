"""Rows that somebody hands in: durable before they are acknowledged, read by the run like a source.

An `Inbox` writes segments, numbered without gaps; a `PushedSource`, in this process or another one,
reads them. Both hold raw data, for this user alone.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Lock

import pyarrow as pa

from dpstream.connectors.storage import open_folder, put, put_new, remove, safe_name
from dpstream.connectors.write_ahead import dump_batch, load_batch
from dpstream.errors import RowsLost, StateError
from dpstream.privacy.state.files import make_directory, remove_leftovers, writing
from dpstream.records import Batch, Position

PUSHED = "http:"
"""The source whose rows are posted to the server."""
_NAME = re.compile(r"(\d{12})\.segment")
_REQUESTS = "requests.jsonl"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_REMEMBERED = 10_000  # requests that are recognised when they come again


def pushed_folder(state: Path, name: str) -> Path:
    """Where the rows of a source are kept, in the state directory."""
    return state / (f"pushed-{safe_name(name)}" if name else "pushed")


class Inbox:
    """Takes batches in; one process at a time. A request that comes again is not taken twice."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        make_directory(folder, mode=0o700)
        open_folder(folder)
        remove_leftovers(folder)
        self._next = max(_numbers(folder), default=-1) + 1
        self._known = self._read_requests()

    def put(self, batch: Batch, *, request: str | None = None) -> tuple[int, bool]:
        """Keep a batch for good; its number, and whether the request was known already."""
        request_id = None if request is None else sha256(request.encode()).hexdigest()
        with self._lock:
            if request_id is not None and request_id in self._known:
                return self._known[request_id], True
            if request_id is not None:  # in the segment, too: a kill may come before it is noted
                metadata = {b"dpstream.request": request_id.encode()}
                batch = replace(batch, table=batch.table.replace_schema_metadata(metadata))
            content = dump_batch(batch)
            while not put_new(_path(self._folder, self._next), content, private=True):
                self._find()  # written by a put that failed afterwards, or by another process
                if request_id is not None and request_id in self._known:
                    return self._known[request_id], True
            number = self._next
            self._next += 1
            if request_id is not None:
                self._note(request_id, number)
            return number, False

    def _find(self) -> None:
        """Go on after the segments that are there, and know the requests they are of."""
        for number in _numbers(self._folder):
            if number >= self._next:
                told = _request_of(self._folder, number)
                if told is not None:
                    self._note(told, number)
                self._next = number + 1

    @property
    def waiting(self) -> int:
        """Bytes that are kept for the run."""
        found = 0
        for number in _numbers(self._folder):
            try:
                found += _path(self._folder, number).stat().st_size
            except FileNotFoundError:  # it was forgotten just now
                continue
        return found

    def _note(self, request_id: str, number: int) -> None:
        self._known[request_id] = number
        path = self._folder / _REQUESTS
        with writing(path), os.fdopen(os.open(path, _APPEND, 0o600), "ab") as file:
            file.write(json.dumps([request_id, number]).encode() + b"\n")
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _read_requests(self) -> OrderedDict[str, int]:
        """The last requests: what was noted, and what the segments say."""
        found: OrderedDict[str, int] = OrderedDict()
        path = self._folder / _REQUESTS
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                request_id, number = json.loads(line)
            except ValueError:  # cut by a kill; its segment is still there
                continue
            found[request_id] = number
        for number in _numbers(self._folder):
            told = _request_of(self._folder, number)
            if told is not None:
                found.setdefault(told, number)
        kept = OrderedDict(list(found.items())[-_REMEMBERED:])
        if kept:
            lines = "".join(json.dumps(one) + "\n" for one in kept.items())
            put(path, lines.encode())
        return kept


class PushedSource:
    """Reads what was handed in; a position is the number of the next segment."""

    bounded = False
    replayable = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def partitions(self) -> list[str]:
        """One: rows come in the order in which they were acknowledged."""
        return ["pushed"]

    def columns(self, partition: str) -> None:
        """What comes is text."""

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """The next segment, if it is there and not behind `until`.

        Who begins begins with the oldest that is kept: it is kept while anybody needs it.
        """
        number = min(_numbers(self._folder), default=0) if position is None else int(position)
        path = _path(self._folder, number)
        if number == until or not path.exists():
            kept = _numbers(self._folder)
            if kept and number < kept[0]:
                raise StateError(
                    f"{self._folder} begins at segment {kept[0]}, but segment {number} is asked "
                    "for; the folder and the checkpoint do not belong together"
                )
            if until is not None and number != until:
                raise RowsLost(
                    f"segment {number} was read before and is not in {self._folder} any more; "
                    "restore the folder together with its checkpoint, or start anew with another "
                    "state directory"
                )
            names = columns or ()
            nothing = pa.table({name: pa.array([], pa.string()) for name in names})
            return Batch(table=nothing, position=position, done=True)
        batch = load_batch(path, columns)
        table = batch.table.replace_schema_metadata(None)
        return replace(batch, table=table, position=number + 1, done=number + 1 == until)

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Delete segments before a position; the newest stays, so that numbers go on after it."""
        before = positions.get("pushed") or 0
        for number in _numbers(self._folder)[:-1]:
            if number < before:
                remove(_path(self._folder, number))

    def close(self) -> None:
        """Nothing is held open."""


def _request_of(folder: Path, number: int) -> str | None:
    """The id of the request that a segment was posted with."""
    table = load_batch(_path(folder, number), None).table
    told = (table.schema.metadata or {}).get(b"dpstream.request")
    return None if told is None else told.decode()


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}.segment"


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(one[1]) for one in found if one)
