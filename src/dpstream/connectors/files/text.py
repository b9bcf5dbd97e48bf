"""Text files read in blocks; a position is the byte offset of a line start (after decompression).

A format is a parser that takes as many whole lines of a block as it can. What it cannot read it
reports by byte range; the line number of a rejected row is counted only when one is needed. A line
that is too long is rejected alone, and never in memory as a whole.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.compiled import compiled
from dpstream.connectors.files.size_limits import LIMITS, SizeLimits
from dpstream.errors import InvalidInput, UnusableFile, unreadable
from dpstream.records import Batch, Columns, Position, Rejected

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]
BLOCK = 8 << 20
SHOWN = 4096
"""A rejected row is kept up to this many characters."""
_QUOTE, _ONE = np.uint8(34), np.uint64(1)


@dataclass(frozen=True, kw_only=True)
class UnreadableRange:
    """A byte range of a block that could not be read."""

    start: int
    stop: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The rows of the first `used` bytes of a block."""

    table: pa.Table
    used: int
    bad: list[UnreadableRange] = field(default_factory=list)


class Parser(Protocol):
    """A line format; it may keep what the head of the text says."""

    line_ends: bytes
    """Each of these bytes ends a line."""

    def head(self, block: bytes, *, final: bool) -> int | None:
        """Take what comes before the rows: its bytes, or None if the block is too short."""
        ...

    def parse(self, block: bytes, *, final: bool, columns: Columns) -> Parsed:
        """The whole rows of a block that begins at a row; all of it if `final`."""
        ...


class TextFile:
    """A reader of one plain or gzipped text file."""

    def __init__(
        self,
        path: Path,
        parser: Parser,
        *,
        name: str,
        block: int = BLOCK,
        limits: SizeLimits = LIMITS,
    ) -> None:
        self._path, self._parser, self._name, self._limits = path, parser, name, limits
        self._block = min(block, limits.max_row_bytes)
        self._file = _open(path)
        self._head: int | None = None
        self._counter: BinaryIO | None = None
        self._counted = (0, 1)  # a byte offset, and the number of the line that holds it
        self._kept = (0, b"")  # what was read last, and from where: a gzip file cannot go back

    def columns(self) -> None:
        """Text declares no types."""

    def read(self, position: Position, columns: Columns, until: Position = None) -> Batch:
        """The whole lines of the next block."""
        head = self._prepare()
        offset = head if position is None else int(position)
        end = None if until is None else int(until)
        size, longest = self._block, self._limits.max_row_bytes
        while True:
            left = size if end is None else end - offset
            block, final = self._read_at(offset, min(size, left))
            if len(block) == left < size:
                final = True  # lines end at a position: nothing behind it can belong to them
            parsed = self._parser.parse(block, final=final, columns=columns)
            if parsed.used or final or size == longest:
                break
            size = min(2 * size, longest)
        after, bad = offset + parsed.used, parsed.bad
        if not parsed.used and not final:  # one line, longer than is allowed
            after, final = self._line_end(offset + size)
            reason = self._limits.too_long(after - offset)
            bad = [UnreadableRange(start=0, stop=size, reason=reason)]
        if end is not None and (after > end or (final and after != end)):
            raise InvalidInput(
                f"{self._name} ends at byte {after} and was read up to byte {end} before; it is "
                "not the file that was read then: put that one back"
            )
        rejected = []
        if bad:
            rejected = rejected_rows(self._name, block, bad, self._line(offset))
        done = final or after == end
        return Batch(table=parsed.table, position=after, done=done, rejected=rejected)

    def check(self, columns: Columns) -> None:
        """Refuse a text whose head has not these columns."""
        self._prepare()
        self._parser.parse(b"", final=True, columns=columns)

    def read_through(self) -> None:
        """Read a compressed file to its end, without a look at the rows: is it all there?"""
        final = self._path.suffix != ".gz"
        while not final:
            _, final = self._read_at(self._file.tell(), self._block)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._counter is not None:
            self._counter.close()

    def _prepare(self) -> int:
        """Let the parser see the head of the file, which a read from the middle needs too."""
        size, longest = 1 << 16, self._limits.max_row_bytes
        while self._head is None:
            block, final = self._read_at(0, size)
            self._head = self._parser.head(block, final=final)
            if self._head is None and size >= longest:
                raise UnusableFile(
                    f"{self._name}, line 1: no line ends within {longest} bytes (max_row_bytes); "
                    "is this a text file with one row a line?"
                )
            size = min(4 * size, longest)
        return self._head

    def _read_at(self, offset: int, size: int) -> tuple[bytes, bool]:
        start, kept = self._kept
        kept = kept[offset - start :][:size] if start <= offset <= start + len(kept) else b""
        at = offset + len(kept)
        try:
            if self._file.tell() != at:
                self._file.seek(at)
            block = kept + self._file.read(size - len(kept))
        except (OSError, EOFError, zlib.error) as problem:
            raise unreadable(self._path, problem) from problem
        if self._path.suffix == ".gz":
            self._limits.refuse_unpacked(self._path, offset + len(block))
        self._kept = (offset, block)
        return block, len(block) < size

    def _line_end(self, offset: int) -> tuple[int, bool]:
        """Where the line that reaches up to `offset` ends, and whether the file does."""
        while True:
            block, final = self._read_at(offset, self._block)
            ends = [at for end in self._parser.line_ends if (at := block.find(end)) >= 0]
            if ends:
                return offset + min(ends) + 1, final and min(ends) + 1 == len(block)
            offset += len(block)
            if final:
                return offset, True

    def _line(self, offset: int) -> int:
        """The number of the line that begins at `offset`."""
        start, line = self._counted
        if start > offset:
            start, line = 0, 1
        if start < offset and self._counter is None:
            self._counter = _open(self._path)
        while start < offset:
            assert self._counter is not None
            self._counter.seek(start)
            block = self._counter.read(min(BLOCK, offset - start))
            line += block.count(b"\n")
            start += len(block)
        self._counted = (offset, line)
        return line


def rejected_rows(
    name: str, block: bytes, bad: Sequence[UnreadableRange], line: int = 1
) -> list[Rejected]:
    """Rows that could not be read of a block that begins with line number `line`."""
    rows, seen = [], 0
    for span in bad:
        line += block.count(b"\n", seen, span.start)
        seen = span.start
        text = block[span.start : min(span.stop, span.start + 4 * SHOWN)].decode(errors="replace")
        row = text.rstrip("\r\n")[:SHOWN]
        rows.append(Rejected(where=f"{name}, line {line}", reason=span.reason, row=row))
    return rows


def _open(path: Path) -> BinaryIO:
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        return path.open("rb")
    except OSError as problem:
        raise unreadable(path, problem) from problem


def string_array(block: Bytes, starts: Offsets, stops: Offsets) -> pa.Array:
    """The cells of one column, which must be UTF-8, without a Python object per cell.

    A cell is `block[start:stop]`. A start of -1 is a null; a stop below 0 is ~stop of a cell in
    which a doubled quote stands for a single one.
    """
    offsets = np.empty(len(starts) + 1, dtype=np.int32)
    nulls = _lengths(block, starts, stops, offsets)
    content = np.empty(offsets[-1], dtype=np.uint8)
    _copy(block, starts, stops, offsets, content)
    valid = None
    if nulls:
        valid = pa.py_buffer(np.packbits(starts >= 0, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(starts), buffers, nulls)


def empty_strings(columns: Columns) -> pa.Table:
    """A table of string columns without rows."""
    return pa.table({name: pa.array([], pa.string()) for name in columns or ()})


def not_utf8(block: bytes, starts: Offsets, stops: Offsets) -> npt.NDArray[np.bool_] | None:
    """Which of the byte ranges are not UTF-8; None if the whole block is."""
    if block.isascii() or _is_utf8(block):
        return None
    data = np.frombuffer(block + b"\0", dtype=np.uint8)  # a range may begin at the end
    invalid = np.maximum.reduceat(data, starts) > 127  # the others are ASCII: most, as a rule
    for i in np.flatnonzero(invalid).tolist():
        invalid[i] = not _is_utf8(block[starts[i] : stops[i]])
    return invalid


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@compiled
def _lengths(block: Bytes, starts: Offsets, stops: Offsets, offsets: Offsets) -> int:
    total = 0
    nulls = 0
    offsets[0] = 0
    for i in range(len(starts)):
        start, stop = starts[i], stops[i]
        if start < 0:
            nulls += 1
        elif stop >= 0:
            total += stop - start
        else:
            at = start
            while at < ~stop:
                at += 2 if block[at] == _QUOTE else 1
                total += 1
        offsets[i + 1] = total
    return nulls


@compiled
def _copy(block: Bytes, starts: Offsets, stops: Offsets, offsets: Offsets, content: Bytes) -> None:
    for i in range(len(starts)):
        start, stop, to = starts[i], stops[i], offsets[i]
        if start < 0:
            continue
        if stop >= 0:
            # unsigned, an index needs no test for being negative, which halves the time
            here, there = np.uint64(start), np.uint64(to)
            while here < np.uint64(stop):
                content[there] = block[here]
                here += _ONE
                there += _ONE
        else:
            at = start
            while at < ~stop:
                content[to] = block[at]
                to += 1
                at += 2 if block[at] == _QUOTE else 1
