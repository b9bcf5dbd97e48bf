"""Make a source that cannot be read twice replayable: keep what it delivers until it is not needed.

Each chunk is a segment file, synced before the chunk is handed on: a line of magic, the SHA-256 of
the rest, then an Arrow stream. The segments hold raw data and are for this user alone.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock

import pyarrow as pa

from dpstream.connectors.storage import open_folder, put, put_new, remove, safe_name
from dpstream.errors import RowsLost, StateError
from dpstream.privacy.state.durable_files import make_directory, remove_leftovers, writing
from dpstream.records import Batch, EndingSource, InferredTypes, Position, Rejected, Source

_NAME = b"dpstream-write-ahead-"
_MAGIC = _NAME + b"1\n"  # with the number of the format
_REJECTED = b"dpstream.rejected"


class WriteAhead:
    """A source whose positions are segment numbers.

    A read at the last position takes the next chunk from the wrapped source; one at an earlier
    position gives the chunk that was delivered there. `commit` frees what no recovery needs. The
    columns that a chunk was read with are kept; a replay may ask for fewer.

    Of the wrapped source's abilities it has `ended` and `inferred`. Its positions start at 0
    whatever the wrapped source's are, and its partitions may always grow.
    """

    replayable = True

    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.bounded = source.bounded
        self.inferred = source.inferred if isinstance(source, InferredTypes) else {}
        self._live: dict[str, Position] = {}
        self._pending: dict[str, Batch] = {}  # read from the source, not yet on disk
        self._kept: dict[str, list[int]] = {}
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
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """A kept chunk, or the next one of the source once it is kept."""
        number = 0 if position is None else int(position)
        path = self._path(partition, number)
        if number == until:
            empty = pa.table({name: pa.array([], pa.string()) for name in columns or ()})
            return Batch(table=empty, position=position, done=True)
        if path.exists():
            return replace(load_batch(path, columns), position=number + 1, done=number + 1 == until)
        kept = self._numbers(partition)  # in order
        if until is not None:
            raise RowsLost(
                f"chunk {number} of {partition!r} was read before and is not in {self._folder} any "
                "more; restore the folder together with its state directory, or start anew with "
                "another state directory"
            )
        if kept and number != kept[-1] + 1:
            raise StateError(
                f"{self._folder} keeps the chunks {kept[0]} to {kept[-1]} of {partition!r}, but "
                f"chunk {number} is asked for; the folder and the state do not belong together"
            )
        batch = self._pending.pop(partition, None)
        if batch is None:
            batch = self._source.read(partition, self._live.get(partition), columns=columns)
            self._live[partition] = batch.position
        if batch.table.num_rows == 0 and not batch.rejected:
            return replace(batch, position=position)
        self._pending[partition] = batch  # a full disk must not lose what a pipe will not repeat
        if not put_new(path, dump_batch(batch), private=True):
            raise StateError(f"{path} was written by another process; only one may read the source")
        del self._pending[partition]
        kept.append(number)
        return replace(batch, position=number + 1)

    def commit(self, positions: Mapping[str, Position]) -> None:
        """Delete the chunks of each partition that come before its position."""
        for partition, position in positions.items():
            kept = self._numbers(partition)
            while kept and kept[0] < (position or 0):
                remove(self._path(partition, kept[0]))
                kept.pop(0)

    def close(self) -> None:
        """Close the wrapped source; the segments stay."""
        self._source.close()

    def _path(self, partition: str, number: int) -> Path:
        return self._folder / f"{safe_name(partition)}-{number:012d}.segment"

    def _numbers(self, partition: str) -> list[int]:
        """The segments on disk; the folder is looked through once."""
        if partition not in self._kept:
            pattern = re.compile(re.escape(safe_name(partition)) + r"-(\d{12})\.segment")
            found = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
            self._kept[partition] = sorted(int(one[1]) for one in found if one)
        return self._kept[partition]


def dump_batch(batch: Batch) -> bytes:
    """A chunk as the content of a segment."""
    rejected = json.dumps([asdict(one) for one in batch.rejected])
    metadata = {**(batch.table.schema.metadata or {}), _REJECTED: rejected}
    table = batch.table.replace_schema_metadata(metadata)
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    content = file.getvalue()
    return _MAGIC + sha256(content).digest() + content


def load_batch(path: Path, columns: Sequence[str] | None) -> Batch:
    """The chunk of a segment; the position is for the caller to set."""
    whole = path.read_bytes()
    start = len(_MAGIC) + 32
    content = whole[start:]
    if whole.startswith(_NAME) and not _MAGIC.startswith(whole[: len(_MAGIC)]):
        raise StateError(
            f"{path} has another format than this version of dpstream reads; use the version that "
            "wrote it"
        )
    if not whole.startswith(_MAGIC) or sha256(content).digest() != whole[len(_MAGIC) : start]:
        raise StateError(
            f"{path} is damaged; restore it from a copy, or start anew with another state directory"
        )
    table = pa.ipc.open_stream(content).read_all()
    metadata = dict(table.schema.metadata)
    rejected = [Rejected(**one) for one in json.loads(metadata.pop(_REJECTED))]
    table = table.replace_schema_metadata(metadata or None)
    if columns is not None:
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise StateError(
                f"{path} was kept without the column {missing[0]!r}; go on with the query that the "
                "chunk was read for, or start anew with another state directory"
            )
        table = table.select([name for name in table.column_names if name in columns])
    return Batch(table=table, position=None, done=False, rejected=rejected)


# Rows that somebody hands in: durable before they are acknowledged, read by the run like a source.
#
# An `Inbox` writes segments, numbered without gaps; a `PushedSource`, in this process or another
# one, reads them. Both hold raw data, for this user alone.

PUSHED = "http:"
"""The source whose rows are posted to the server."""
_SEGMENT_NAME = re.compile(r"(\d{12})\.segment")
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
                    "for; the folder and the state do not belong together"
                )
            if until is not None and number != until:
                raise RowsLost(
                    f"segment {number} was read before and is not in {self._folder} any more; "
                    "restore the folder together with its state directory, or start anew with "
                    "another state directory"
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
    found = (_SEGMENT_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(one[1]) for one in found if one)
