"""An append-only file of JSON records that survives kill -9 and several writers.

One line a record: `tag json`. The tag is a BLAKE2 hash of the record and of the tag before it, so
an altered or missing line in the middle is found. A torn last line (a kill inside a write) never
was durable and is cut off by the next writer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpstream.errors import DpstreamError, StateError
from dpstream.privacy.process import this_process
from dpstream.privacy.state.files import file_identity, make_directory, sync_directory

Record = dict[str, Any]

FORMAT = 1


class Journal:
    """Records of one `kind`, described by one `header` fixed at creation.

    Every method but `locked` must be called inside `with journal.locked()`.
    """

    def __init__(self, path: Path, *, kind: str, error: type[DpstreamError] = StateError) -> None:
        self.path, self.kind, self._error = Path(path), kind, error
        make_directory(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._thread_lock, self._depth = threading.RLock(), 0
        self._process = this_process()
        self._offset, self._tag = 0, "0" * 16

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the file against other processes and threads."""
        with self._thread_lock:
            if not self._depth:
                self.acquire(wait=wait)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def acquire(self, *, wait: bool = True) -> None:
        """Take the file's lock; without `wait`, refuse if another process has it."""
        if this_process() != self._process:
            raise self._error(f"{self.path} was opened before a fork; open it in each process")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise self._error(
                f"{self.path} is in use by another process or runner; stop or close that first, "
                "or give this one its own state directory"
            ) from None
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            current = None
        held = os.fstat(self._fd)
        if current is None or (current.st_dev, current.st_ino) != (held.st_dev, held.st_ino):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise self._error(f"{self.path} was replaced or removed while in use; restore it")

    def read_new(self) -> list[Record]:
        """Records appended since the last call, by anyone; the header is checked and left out."""
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            raise self._error(f"{self.path} became shorter while it was in use; restore it")
        *lines, torn = self._read(size).split(b"\n")
        if self._offset == 0 and not lines and not self._header().startswith(torn):
            raise self._foreign()  # cutting this as a torn line would destroy somebody's file
        records: list[Record] = []
        offset, tag = self._offset, self._tag
        for line in lines:
            record = self._parse(line, offset, tag)
            if offset == 0:
                self._check_header(record)
            else:
                records.append(record)
            offset, tag = offset + len(line) + 1, line[:16].decode()
        self._offset, self._tag = offset, tag
        return records

    def append(self, records: Iterable[Record]) -> None:
        """Write records after everything read so far and return once they are durable."""
        new_file = self._offset == 0
        batch: list[Record] = [*records]
        if new_file:
            batch.insert(0, {"dpstream": self.kind, "format": FORMAT})
        if b"\n" in self._read(os.fstat(self._fd).st_size):
            raise self._error(f"{self.path} grew since it was read; read it before appending")
        chunk, tag = [], self._tag
        for record in batch:
            line = _line(tag, record)
            tag = line[:16].decode()
            chunk.append(line)
        data = b"".join(chunk)
        os.ftruncate(self._fd, self._offset)  # cut a torn tail
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._offset + written)
        os.fsync(self._fd)
        if new_file:
            sync_directory(self.path.parent)
        self._offset, self._tag = self._offset + len(data), tag

    def rewind(self) -> None:
        """Forget what was read, so that `read_new` starts from the first record again."""
        self._offset, self._tag = 0, "0" * 16

    def head(self) -> tuple[int, str]:
        """How far the file was read or written, and the tag of its last record."""
        return self._offset, self._tag

    def has(self, head: tuple[int, str]) -> bool:
        """Does the file begin with what it held at `head`? Not if it was rolled back or swapped."""
        offset, tag = head
        before = os.pread(self._fd, offset, 0)
        last = before[before.rfind(b"\n", 0, max(offset - 1, 0)) + 1 :]
        return offset == 0 or (len(before) == offset and last[:16] == tag.encode())

    def identity(self) -> str:
        """Which file this is on this machine: a copy has another identity."""
        return file_identity(self._fd)

    def close(self) -> None:
        """Release the file and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, size: int) -> bytes:
        """Everything from the offset to `size`; one call may return less (2 GiB at most)."""
        parts, at = [], self._offset
        while at < size and (part := os.pread(self._fd, size - at, at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _header(self) -> bytes:
        return _line("0" * 16, {"dpstream": self.kind, "format": FORMAT})

    def _foreign(self) -> DpstreamError:
        return self._error(
            f"{self.path} is not a dpstream {self.kind} file, or its first line was "
            "altered; name another file or restore this one"
        )

    def _parse(self, line: bytes, offset: int, previous: str) -> Record:
        tag, _, body = line.partition(b" ")
        if tag.decode("ascii", "replace") != _tag(previous, body):
            if offset == 0:
                raise self._foreign()
            raise self._error(
                f"{self.path} is damaged after byte {offset}: a record does not match its "
                "checksum; restore the file from a backup"
            )
        record: Record = json.loads(body)
        return record

    def _check_header(self, record: Record) -> None:
        if record.get("dpstream") != self.kind:
            raise self._error(
                f"{self.path} is a dpstream {record.get('dpstream')!r} file; "
                f"a {self.kind!r} file was expected"
            )
        if record.get("format") != FORMAT:
            raise self._error(
                f"{self.path} has format {record.get('format')}; this version reads {FORMAT}; "
                "use the version of dpstream that wrote it"
            )


def _line(previous: str, record: Record) -> bytes:
    body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    return _tag(previous, body).encode() + b" " + body + b"\n"


def _tag(previous: str, body: bytes) -> str:
    return hashlib.blake2b(previous.encode() + body, digest_size=8).hexdigest()
