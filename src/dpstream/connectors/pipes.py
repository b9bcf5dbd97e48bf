"""Standard input as a source, and standard output as a sink.

The input is CSV with a header, or JSON lines if its first byte is a brace. A pipe cannot be read
twice, so the source is not replayable; `WriteAhead` makes it so. Releases are JSON lines.
"""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import BinaryIO

import pyarrow as pa

from dpstream.connectors.encode import jsonl, with_numbers
from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.size_limits import LIMITS, SizeLimits
from dpstream.connectors.files.text import (
    BLOCK,
    Parser,
    UnreadableRange,
    empty_strings,
    rejected_rows,
)
from dpstream.connectors.storage import open_folder
from dpstream.errors import InvalidInput, StateError
from dpstream.privacy.state.durable_files import wrap_write_errors
from dpstream.records import Batch, Columns, Position

NAME = "stdin"
_READ_BYTES = 1 << 16
_READ_AHEAD = 256  # reads that the thread is ahead of its reader
_LOOK = 0.05  # seconds between two looks at whether the thread has ended


class StandardInput:
    """One partition, "stdin". `read` returns the whole lines that are there and never waits.

    `done` means that nothing more is there yet; `ended` is set when the input has ended and all
    of it was read. A position is the number of bytes read; only the last one can be gone on from.
    """

    bounded = False
    replayable = False

    def __init__(self, descriptor: int = 0, *, limits: SizeLimits = LIMITS) -> None:
        self.ended = False
        self._descriptor, self._limits = descriptor, limits
        self._queue: Queue[bytes | OSError] = Queue(maxsize=_READ_AHEAD)
        self._closed = Event()
        self._parser: Parser | None = None
        self._rest = b""  # read, but no whole line yet
        self._dropped = 0  # bytes before it of a line that is too long
        self._at = 0
        self._line = 1
        self._final = False
        self._wake = os.pipe()  # closing it ends a wait for a silent pipe
        # a daemon: who forgets to close it must be able to leave all the same
        self._thread = Thread(target=self._read_ahead, name="dpstream-stdin", daemon=True)
        self._thread.start()

    def partitions(self) -> list[str]:
        """The input itself."""
        return [NAME]

    def columns(self, partition: str) -> None:
        """Text declares no types."""

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """What has come since the last read, whole lines only."""
        if (position or 0) != self._at or until is not None:
            raise InvalidInput(
                f"standard input was read up to byte {self._at} and cannot go on from {position}; "
                "wrap it in WriteAhead to read it again"
            )
        longest = self._limits.max_row_bytes
        # of what arrives, only the first line may be too long: the others fit into it
        block = self._rest + self._take_arrived(min(BLOCK, longest - _READ_BYTES))
        ends = self._parser.line_ends if self._parser is not None else b"\n"
        if len(block) < longest or any(block.find(end, 0, longest) >= 0 for end in ends):
            return self._parse(block, columns)
        if self._parser is None:
            raise InvalidInput(
                f"standard input, line 1: no line ends within {longest} bytes (max_row_bytes)"
            )
        return self._drop_line(block, ends, columns)

    def close(self) -> None:
        """Stop reading ahead: what a thread holds at the exit of the process is never freed."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self._wake[1])
        while self._thread.is_alive():
            with suppress(Empty):
                self._queue.get_nowait()  # it may wait for room
            self._thread.join(_LOOK)
        os.close(self._wake[0])

    def _parse(self, block: bytes, columns: Columns) -> Batch:
        used, table, rejected = 0, empty_strings(columns), []
        if self._parser is None and block:
            is_json = block.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
            self._parser = JsonlParser(NAME) if is_json else CsvParser(NAME)
            head = self._parser.head(block, final=self._final)
            if head is None:
                self._parser = None
            else:
                used = head
        if self._parser is not None:
            rows, line = block[used:], self._line + block.count(b"\n", 0, used)
            parsed = self._parser.parse(rows, final=self._final, columns=columns)
            table, rejected = parsed.table, rejected_rows(NAME, rows, parsed.bad, line)
            used += parsed.used
        self._line += block.count(b"\n", 0, used)
        self._rest = block[used:]
        self._at += used
        self.ended = self._final
        done = self._final or self._queue.empty()
        return Batch(table=table, position=self._at or None, done=done, rejected=rejected)

    def _drop_line(self, block: bytes, ends: bytes, columns: Columns) -> Batch:
        """Drop a line that is too long as it comes, but for its beginning; reject it at its end."""
        longest = self._limits.max_row_bytes
        found = [at for end in ends if (at := block.find(end, longest)) >= 0]
        if not found and not self._final:
            self._dropped += len(block) - longest
            self._rest = block[:longest]
            done = self._queue.empty()
            return Batch(table=empty_strings(columns), position=self._at or None, done=done)
        stop = min(found, default=len(block) - 1) + 1
        reason = self._limits.too_long(self._dropped + stop)
        bad = [UnreadableRange(start=0, stop=stop, reason=reason)]
        rejected = rejected_rows(NAME, block, bad, self._line)
        self._at, self._line, self._dropped = self._at + self._dropped + stop, self._line + 1, 0
        batch = self._parse(block[stop:], columns)
        return replace(batch, rejected=[*rejected, *batch.rejected])

    def _take_arrived(self, most: int) -> bytes:
        """What the thread has read, up to about `most` bytes."""
        reads: list[bytes] = []
        while sum(map(len, reads)) < most and not self._final:
            try:
                content = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(content, OSError):
                raise InvalidInput(f"standard input cannot be read: {content}") from content
            reads.append(content)
            self._final = not content
        return b"".join(reads)

    def _read_ahead(self) -> None:
        """Hand on what comes; an empty read is the end."""
        content: bytes | OSError = b" "
        waiting = select.poll()
        for descriptor in (self._descriptor, self._wake[0]):
            waiting.register(descriptor, select.POLLIN)
        while content:
            ready = [descriptor for descriptor, _ in waiting.poll()]
            if self._closed.is_set():
                return
            if self._descriptor not in ready:
                continue
            try:
                # not sys.stdin.buffer: its lock, held while waiting, would break the exit
                content = os.read(self._descriptor, _READ_BYTES)
            except OSError as problem:
                content = problem
            self._queue.put(content)
            if isinstance(content, OSError):
                return


# Releases as JSON lines on standard output.


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
        self._done.add(key)
        if self._journal is not None:
            with wrap_write_errors(self._journal), self._journal.open("ab") as file:
                file.write(json.dumps(key).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Standard output stays open."""


def _read_journal(path: Path) -> set[tuple[str, int, int]]:
    """What was written; a last line without its end was cut by a kill, and is cut off."""
    if not path.exists():
        return set()
    with wrap_write_errors(path):
        content = path.read_bytes()
        lines = content[: content.rfind(b"\n") + 1]
        if len(lines) < len(content):
            os.truncate(path, len(lines))
    try:
        return {(str(q), int(w), int(t)) for q, w, t in map(json.loads, lines.splitlines())}
    except (ValueError, TypeError) as problem:
        raise StateError(
            f"{path} is not a journal of releases: {problem}; name another one"
        ) from problem
