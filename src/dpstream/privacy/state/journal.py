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
from dpstream.privacy.state.files import sync_directory

Record = dict[str, Any]

FORMAT = 1


class Journal:
    """Records of one `kind`, described by one `header` fixed at creation.

    Every method but `locked` must be called inside `with journal.locked()`.
    """

    def __init__(self, path: Path, *, kind: str, error: type[DpstreamError] = StateError) -> None:
        self.path, self.kind, self._error = Path(path), kind, error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._thread_lock = threading.RLock()
        self._offset, self._tag = 0, "0" * 16

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the file against other processes and threads."""
        with self._thread_lock:
            self.acquire(wait=wait)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def acquire(self, *, wait: bool = True) -> None:
        """Take the file's lock; without `wait`, refuse if another process has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise self._error(
                f"{self.path} is in use by another process; stop that process first, "
                "or give this one its own state directory"
            ) from None

    def read_new(self) -> list[Record]:
        """Records appended since the last call, by anyone; the header is checked and left out."""
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            raise self._error(f"{self.path} became shorter while it was in use; restore it")
        data = os.pread(self._fd, size - self._offset, self._offset)
        lines = data.split(b"\n")[:-1]  # what follows the last newline is a torn line
        records: list[Record] = []
        for line in lines:
            record = self._parse(line)
            if self._offset == 0:
                self._check_header(record)
            else:
                records.append(record)
            self._offset += len(line) + 1
            self._tag = line[:16].decode()
        return records

    def append(self, records: Iterable[Record]) -> None:
        """Write records after everything read so far and return once they are durable."""
        new_file = self._offset == 0
        batch: list[Record] = [*records]
        if new_file:
            batch.insert(0, {"dpstream": self.kind, "format": FORMAT})
        chunk, tag = [], self._tag
        for record in batch:
            body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
            tag = _tag(tag, body)
            chunk.append(tag.encode() + b" " + body + b"\n")
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

    def identity(self) -> str:
        """Which file this is on this machine: a copy has another identity."""
        stat = os.fstat(self._fd)
        return f"{stat.st_dev:x}-{stat.st_ino:x}"

    def close(self) -> None:
        """Release the file and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _parse(self, line: bytes) -> Record:
        tag, _, body = line.partition(b" ")
        if tag.decode("ascii", "replace") != _tag(self._tag, body):
            if self._offset == 0:
                raise self._error(
                    f"{self.path} is not a dpstream {self.kind} file, or its first line was "
                    "altered; name another file or restore this one"
                )
            raise self._error(
                f"{self.path} is damaged after byte {self._offset}: a record does not match its "
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


def _tag(previous: str, body: bytes) -> str:
    return hashlib.blake2b(previous.encode() + body, digest_size=8).hexdigest()
