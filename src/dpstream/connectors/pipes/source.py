"""Standard input as a source: CSV with a header, or JSON lines if its first byte is a brace.

A pipe cannot be read twice, so the source is not replayable; `WriteAhead` makes it so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import Empty, Queue
from threading import Event, Thread

import pyarrow as pa

from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.text import BLOCK, LONGEST_LINE, Parser, UnreadableRange, rejected
from dpstream.errors import InvalidInput
from dpstream.records import Batch, Position, Rejected

NAME = "stdin"
_PIECE = 1 << 16
_WAITING = 256  # pieces that the thread reads ahead


class StandardInput:
    """One partition, "stdin". `read` returns the whole lines that are there and never waits.

    `done` means that nothing more is there yet; `ended` is set when the input has ended and all
    of it was read. A position is the number of bytes read; only the last one can be gone on from.
    """

    bounded = False
    replayable = False

    def __init__(self, descriptor: int = 0) -> None:
        self.ended = False
        self._descriptor = descriptor
        self._pieces: Queue[bytes | OSError] = Queue(maxsize=_WAITING)
        self._closed = Event()
        self._parser: Parser | None = None
        self._rest = b""  # read, but no whole line yet
        self._at = 0
        self._line = 1
        self._final = False
        # a daemon: a read that waits for a silent pipe must not keep the process alive
        Thread(target=self._pump, name="dpstream-stdin", daemon=True).start()

    def partitions(self) -> list[str]:
        """The input itself."""
        return [NAME]

    def columns(self, partition: str) -> None:
        """Text declares no types."""

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """What has come since the last read, whole lines only."""
        if (position or 0) != self._at or until is not None:
            raise InvalidInput(
                f"standard input was read up to byte {self._at} and cannot go on from {position}; "
                "wrap it in WriteAhead to read it again"
            )
        block = self._rest + self._arrived(BLOCK)
        batch = self._parse(block, columns)
        if len(self._rest) > LONGEST_LINE:
            raise InvalidInput(
                f"standard input, byte {self._at}: no line ends within {LONGEST_LINE >> 20} MiB"
            )
        return batch

    def close(self) -> None:
        """Stop reading ahead; a thread that waits for the pipe ends with its next byte."""
        self._closed.set()
        while not self._pieces.empty():
            self._pieces.get_nowait()

    def _parse(self, block: bytes, columns: Sequence[str] | None) -> Batch:
        used, bad = 0, []
        table = pa.table({name: pa.array([], pa.string()) for name in columns or ()})
        if self._parser is None and block:
            self._parser = JsonlParser(NAME) if _is_json(block) else CsvParser(NAME)
            head = self._parser.head(block, final=self._final)
            if head is None:
                self._parser = None
            else:
                used = head
        if self._parser is not None:
            parsed = self._parser.parse(block[used:], final=self._final, columns=columns)
            bad = [
                UnreadableRange(start=b.start + used, stop=b.stop + used, reason=b.reason)
                for b in parsed.bad
            ]
            table = parsed.table
            used += parsed.used
        rejects = self._rejected(block, bad)
        self._line += block.count(b"\n", 0, used)
        self._rest = block[used:]
        self._at += used
        self.ended = self._final
        done = self._final or self._pieces.empty()
        return Batch(table=table, position=self._at or None, done=done, rejected=rejects)

    def _rejected(self, block: bytes, bad: list[UnreadableRange]) -> list[Rejected]:
        found, line, seen = [], self._line, 0
        for one in bad:
            line += block.count(b"\n", seen, one.start)
            seen = one.start
            found.append(rejected(f"{NAME}, line {line}", one, block))
        return found

    def _arrived(self, most: int) -> bytes:
        """What the thread has read, up to about `most` bytes."""
        pieces: list[bytes] = []
        while sum(map(len, pieces)) < most and not self._final:
            try:
                piece = self._pieces.get_nowait()
            except Empty:
                break
            if isinstance(piece, OSError):
                raise InvalidInput(f"standard input cannot be read: {piece}") from piece
            pieces.append(piece)
            self._final = not piece
        return b"".join(pieces)

    def _pump(self) -> None:
        """Hand on what comes; an empty piece is the end."""
        piece: bytes | OSError = b" "
        while piece and not self._closed.is_set():
            try:
                # not sys.stdin.buffer: its lock, held while waiting, would break the exit
                piece = os.read(self._descriptor, _PIECE)
            except OSError as problem:
                piece = problem
            self._pieces.put(piece)
            if isinstance(piece, OSError):
                return


def _is_json(block: bytes) -> bool:
    return block.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
