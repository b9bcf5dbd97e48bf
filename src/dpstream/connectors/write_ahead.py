"""Rows on disk as segments: of a source that cannot be read twice, and of those handed in by HTTP.

A segment file holds one chunk and is synced before the chunk is handed on, or acknowledged: a line
of magic, the SHA-256 of the rest, then an Arrow stream. Segments are numbered without gaps. They
hold raw data and are for this user alone.

`WriteAhead` makes a source replayable: it keeps what the source delivers until it is not needed.
An `Inbox` takes batches in; a `PushedSource`, in this process or another one, reads them.
"""

from __future__ import annotations

import io
import json
import os
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from threading import Lock

import pyarrow as pa

from dpstream.connectors.files.text import empty_strings
from dpstream.connectors.storage import (
    AgingFolder,
    open_folder,
    put,
    put_new,
    remove,
    safe_name,
)
from dpstream.errors import InvalidInput, RowsLost, StateError
from dpstream.privacy.state.durable_files import make_directory, remove_leftovers, wrap_write_errors
from dpstream.records import Batch, Columns, EndingSource, InferredTypes, Position, Rejected, Source

KEPT = "kept"
"""The folder of segments that no recovery needs, in that of the others."""
PUSHED = "http:"
"""The source whose rows are posted to the server."""
_NAME = b"dpstream-write-ahead-"
_MAGIC = _NAME + b"1\n"  # with the number of the format
_REJECTED, _REQUEST = b"dpstream.rejected", b"dpstream.request"
_REQUESTS = "requests.jsonl"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_REMEMBERED = 10_000  # requests that are recognised when they come again


class Segments:
    """The segment files of a folder whose names begin with `prefix`."""

    def __init__(self, folder: Path, prefix: str = "", *, keep: timedelta | None = None) -> None:
        """`keep`: for how long segments stay that are not needed any more, in `kept/`."""
        self._folder, self._prefix = folder, prefix
        self._kept = AgingFolder(folder / KEPT, keep)

    def path(self, number: int) -> Path:
        """Where a segment is, or would be."""
        return self._folder / f"{self._prefix}{number:012d}.segment"

    def numbers(self) -> list[int]:
        """The segments on disk, in order."""
        if not self._folder.is_dir():
            return []
        pattern = re.compile(re.escape(self._prefix) + r"(\d{12})\.segment")
        names = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def free(self, numbers: Sequence[int]) -> None:
        """No recovery needs these segments any more, the oldest that are there."""
        paths = [self.path(number) for number in numbers]
        if self._kept.keep is not None:
            self._kept.take(paths)
            self._kept.clean()
        else:
            for path in paths:
                remove(path)

    def write_new(self, number: int, batch: Batch) -> bool:
        """Write a segment, unless it is there."""
        rejected = json.dumps([asdict(row) for row in batch.rejected])
        metadata = {**(batch.table.schema.metadata or {}), _REJECTED: rejected}
        table = batch.table.replace_schema_metadata(metadata)
        file = io.BytesIO()
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        content = file.getvalue()
        return put_new(self.path(number), _MAGIC + sha256(content).digest() + content, private=True)

    def read(self, number: int, columns: Columns, until: Position = None) -> Batch:
        """The chunk of a segment that is there; `done` if it is the last one before `until`."""
        path = self.path(number)
        content = path.read_bytes()
        start = len(_MAGIC) + 32
        stream = content[start:]
        if content.startswith(_NAME) and not _MAGIC.startswith(content[: len(_MAGIC)]):
            raise StateError(
                f"{path} has another format than this version of dpstream reads; use the version "
                "that wrote it"
            )
        if (
            not content.startswith(_MAGIC)
            or sha256(stream).digest() != content[len(_MAGIC) : start]
        ):
            raise StateError(
                f"{path} is damaged; restore it from a copy, or start anew with another state "
                "directory"
            )
        table = pa.ipc.open_stream(stream).read_all()
        metadata = dict(table.schema.metadata)
        rejected = [Rejected(**row) for row in json.loads(metadata.pop(_REJECTED))]
        table = table.replace_schema_metadata(metadata or None)
        if columns is not None:
            missing = [name for name in columns if name not in table.column_names]
            if missing:
                raise StateError(
                    f"{path} was kept without the column {missing[0]!r}; go on with the query that "
                    "the chunk was read for, or start anew with another state directory"
                )
            table = table.select([name for name in table.column_names if name in columns])
        return Batch(table=table, position=number + 1, done=number + 1 == until, rejected=rejected)


class WriteAhead:
    """A source whose positions are segment numbers.

    A read at the last position takes the next chunk from the wrapped source; one at an earlier
    position gives the chunk that was delivered there. `commit` frees what no recovery needs. The
    columns that a chunk was read with are kept; a replay may ask for fewer.

    Of the wrapped source's abilities it has `ended` and `inferred`. Its positions start at 0
    whatever the wrapped source's are, and its partitions may always grow.
    """

    replayable = True

    def __init__(self, source: Source, folder: Path, *, keep: timedelta | None = None) -> None:
        """`keep`: for how long chunks that are freed stay in `kept/`; None: they go at once."""
        self._source, self._folder, self._keep = source, folder, keep
        self.bounded = source.bounded
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self._live: dict[str, Position] = {}
        self._pending: dict[str, Batch] = {}  # read from the source, not yet on disk
        self._parts: dict[str, tuple[Segments, list[int]]] = {}  # segments are listed once
        open_folder(folder)
        remove_leftovers(folder)

    @property
    def ended(self) -> bool:
        """The wrapped source has ended, and all of it is on disk."""
        return isinstance(self._source, EndingSource) and self._source.ended and not self._pending

    def partitions(self) -> list[str]:
        """Those of the wrapped source."""
        return self._source.partitions()

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of the wrapped source."""
        return self._source.columns(partition)

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """A kept chunk, or the next one of the source once it is kept."""
        number = 0 if position is None else int(position)
        segments, numbers = self._segments(partition)
        if number == until:
            return Batch(table=empty_strings(columns), position=position, done=True)
        if segments.path(number).exists():
            return segments.read(number, columns, until)
        if until is not None:
            raise RowsLost(
                f"chunk {number} of {partition!r} was read before and is not in {self._folder} any "
                "more; restore the folder together with its state directory, or start anew with "
                "another state directory"
            )
        if numbers and number != numbers[-1] + 1:
            raise StateError(
                f"{self._folder} keeps the chunks {numbers[0]} to {numbers[-1]} of {partition!r}, "
                f"but chunk {number} is asked for; the folder and the state do not belong "
                "together"
            )
        batch = self._pending.pop(partition, None)
        if batch is None:
            batch = self._source.read(partition, self._live.get(partition), columns=columns)
            self._live[partition] = batch.position
        if batch.table.num_rows == 0 and not batch.rejected:
            return replace(batch, position=position)
        self._pending[partition] = batch  # a full disk must not lose what a pipe will not repeat
        if not segments.write_new(number, batch):
            raise StateError(
                f"{segments.path(number)} was written by another process; only one may read the "
                "source"
            )
        del self._pending[partition]
        numbers.append(number)
        return replace(batch, position=number + 1)

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Delete the chunks of each partition that come before its position."""
        for partition, position in positions.items():
            segments, numbers = self._segments(partition)
            free = bisect_left(numbers, position or 0)
            segments.free(numbers[:free])
            del numbers[:free]

    def close(self) -> None:
        """Close the wrapped source; the segments stay."""
        self._source.close()

    def _segments(self, partition: str) -> tuple[Segments, list[int]]:
        """The segments of a partition, and the numbers of those on disk."""
        if partition not in self._parts:
            segments = Segments(self._folder, f"{safe_name(partition)}-", keep=self._keep)
            self._parts[partition] = segments, segments.numbers()
        return self._parts[partition]


def pushed_folder(state: Path, name: str) -> Path:
    """Where the rows of a source are kept, in the state directory."""
    return state / (f"pushed-{safe_name(name)}" if name else "pushed")


class Inbox:
    """Takes batches in; one process at a time. A request that comes again is not taken twice."""

    def __init__(self, folder: Path) -> None:
        self._requests, self._lock = folder / _REQUESTS, Lock()
        self._segments = Segments(folder)
        make_directory(folder, mode=0o700)
        open_folder(folder)
        remove_leftovers(folder)
        self._next = max(self._segments.numbers(), default=-1) + 1
        self._known = self._read_requests()

    def put(self, batch: Batch, *, request: str | None = None, body: str = "") -> tuple[int, bool]:
        """Keep a batch for good; its number, and whether the request was known already.

        `body`: the digest of what was sent; a request that is known with another one is refused.
        """
        request_id = "" if request is None else sha256(request.encode()).hexdigest()
        with self._lock:
            if request_id in self._known:
                return self._known_number(request_id, body), True
            if request_id:  # in the segment, too: a kill may come before it is noted
                metadata = {_REQUEST: f"{request_id} {body}".strip().encode()}
                batch = replace(batch, table=batch.table.replace_schema_metadata(metadata))
            while not self._segments.write_new(self._next, batch):
                self._skip_written()  # by a put that failed afterwards, or by another process
                if request_id in self._known:
                    return self._known_number(request_id, body), True
            self._next += 1
            self._note(request_id, body, self._next - 1)
            return self._next - 1, False

    def _known_number(self, request_id: str, body: str) -> int:
        number, known = self._known[request_id]
        if known and body and known != body:
            raise InvalidInput("the request was known with another body; send it under a new key")
        return number

    @property
    def waiting(self) -> int:
        """Bytes that are kept for the run."""
        size = 0
        for number in self._segments.numbers():
            try:
                size += self._segments.path(number).stat().st_size
            except FileNotFoundError:  # it was deleted just now
                continue
        return size

    def _skip_written(self) -> None:
        """Go on after the segments that are there, and know the requests they are of."""
        for number in self._segments.numbers():
            if number >= self._next:
                self._note(*self._request_of(number), number)
                self._next = number + 1

    def _note(self, request_id: str, body: str, number: int) -> None:
        if not request_id:
            return
        self._known[request_id] = (number, body)
        path = self._requests
        with wrap_write_errors(path), os.fdopen(os.open(path, _APPEND, 0o600), "ab") as file:
            file.write(_line(request_id, number, body))
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _read_requests(self) -> OrderedDict[str, tuple[int, str]]:
        """The last requests: what was noted, and what the segments say."""
        known: dict[str, tuple[int, str]] = {}
        path = self._requests
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                request_id, number, *body = json.loads(line)
            except ValueError:  # cut by a kill; its segment is still there
                continue
            known[request_id] = (number, body[0] if body else "")
        for number in self._segments.numbers():
            request_id, body = self._request_of(number)
            known.setdefault(request_id, (number, body))
        known.pop("", None)
        last = OrderedDict(list(known.items())[-_REMEMBERED:])
        if last:
            put(path, b"".join(_line(request_id, *facts) for request_id, facts in last.items()))
        return last

    def _request_of(self, number: int) -> tuple[str, str]:
        """The id of the request that a segment was posted with, and its body's digest."""
        metadata = self._segments.read(number, None).table.schema.metadata or {}
        request_id, _, body = metadata.get(_REQUEST, b"").decode().partition(" ")
        return request_id, body


def _line(request_id: str, number: int, body: str) -> bytes:
    """A request in the list of those that were taken; one of before has no body."""
    return json.dumps([request_id, number, *([body] if body else [])]).encode() + b"\n"


class PushedSource:
    """Reads what was handed in; a position is the number of the next segment."""

    bounded = False
    replayable = True

    def __init__(self, folder: Path, *, keep: timedelta | None = None) -> None:
        """`keep`: for how long segments that are freed stay in `kept/`; None: they go at once."""
        self._folder, self._segments = folder, Segments(folder, keep=keep)

    def partitions(self) -> list[str]:
        """One: rows come in the order in which they were acknowledged."""
        return ["pushed"]

    def columns(self, partition: str) -> None:
        """What comes is text."""

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """The next segment, if it is there and not behind `until`.

        A run that begins, begins with the oldest that is kept: it is kept while anybody needs it.
        """
        numbers = self._segments.numbers
        number = min(numbers(), default=0) if position is None else int(position)
        if number == until or not self._segments.path(number).exists():
            on_disk = numbers()
            if on_disk and number < on_disk[0]:
                raise StateError(
                    f"{self._folder} begins at segment {on_disk[0]}, but segment {number} is asked "
                    "for; the folder and the state do not belong together"
                )
            if until is not None and number != until:
                raise RowsLost(
                    f"segment {number} was read before and is not in {self._folder} any more; "
                    "restore the folder together with its state directory, or start anew with "
                    "another state directory"
                )
            return Batch(table=empty_strings(columns), position=position, done=True)
        batch = self._segments.read(number, columns, until)
        return replace(batch, table=batch.table.replace_schema_metadata(None))

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Delete segments before a position; the newest stays, so that numbers go on after it."""
        before = positions.get("pushed") or 0
        self._segments.free([n for n in self._segments.numbers()[:-1] if n < before])

    def close(self) -> None:
        """Nothing is held open."""
