"""CSV: a header line, then rows of strings; a row that does not fit is rejected alone.

Quoting follows RFC 4180: a field that begins with a quote ends at the next single quote, may hold
commas and line ends, and doubles a quote that it holds; a quote later in a field stands for itself.
The scanner decides where each record ends, so a block is cut at a record and never inside quotes.
A record whose quoting is broken (text after the closing quote, or a quoted field that runs on for
more than 1 MiB or past the end) costs its first line only: reading goes on at the next line.
"""

from __future__ import annotations

import csv
import io

import numpy as np
import pyarrow as pa

from dpstream.compiled import njit
from dpstream.connectors.files.text import (
    Bytes,
    Offsets,
    Parsed,
    UnreadableRange,
    not_utf8,
    string_array,
)
from dpstream.errors import UnusableFile
from dpstream.records import Columns, select_columns

_COMMA, _QUOTE, _LF, _CR = np.uint8(44), np.uint8(34), np.uint8(10), np.uint8(13)
_LONGEST_QUOTED = 1 << 20
_WIDTH, _QUOTING = 0, 1
_BOM = b"\xef\xbb\xbf"


class CsvParser:
    """Rows as wide as the header; every cell a string, an empty one ""."""

    line_ends = b"\n\r"

    def __init__(self, name: str) -> None:
        self._name = name
        self._header: list[str] = []

    def head(self, block: bytes, *, final: bool) -> int | None:
        """Take the header line; a text of no bytes at all has no columns and no rows."""
        bom = len(_BOM) if block.startswith(_BOM) else 0
        text = block[bom:].decode(errors="surrogateescape")
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines)
        try:
            self._header = [name.strip() for name in next(reader, [])]
        except csv.Error as problem:
            raise UnusableFile(f"{self._name}, line 1 must be a header; {problem}") from None
        used = bom + len(text[: lines.tell()].encode(errors="surrogateescape"))
        if used == len(block) and not final:
            return None
        if used == bom:
            return used
        if len(set(self._header)) < len(self._header):
            raise UnusableFile(
                f"{self._name}, line 1: column names must differ; got {self._header}"
            )
        printable = all(name.isprintable() for name in self._header)  # broken UTF-8 is not
        if not any(self._header) or not printable:
            raise UnusableFile(
                f"{self._name}, line 1 must be a header of column names in UTF-8; got "
                f"{ascii(self._header)[:200]}"
            )
        return used

    def parse(self, block: bytes, *, final: bool, columns: Columns) -> Parsed:
        """The whole records of the block."""
        names = list(columns or ())  # a file of no bytes lacks nothing
        if self._header:
            names = select_columns(self._name, self._header, columns)
        slots = np.array(
            [names.index(name) if name in names else -1 for name in self._header], dtype=np.int32
        )
        data = np.frombuffer(block, dtype=np.uint8)
        most = int(np.count_nonzero(data == _LF)) + 1
        if b"\r" in block:
            most += int(np.count_nonzero(data == _CR))
        starts, stops = (np.empty((len(names), most), dtype=np.int32) for _ in range(2))
        rows, bad = (np.empty((most, width), dtype=np.int32) for width in (2, 4))
        used, good, wrong = _scan(data, final, slots, starts, stops, rows, bad)

        problems = [self._problem(*line) for line in bad[:wrong].tolist()]
        arrays = [string_array(data, starts[j, :good], stops[j, :good]) for j in range(len(names))]
        table = pa.table(arrays, names=names)
        foreign = not_utf8(block, rows[:good, 0], rows[:good, 1])
        if foreign is not None:
            places = rows[:good][foreign].tolist()
            problems += [
                UnreadableRange(start=a, stop=b, reason="it is not UTF-8 text") for a, b in places
            ]
            problems.sort(key=lambda bad: bad.start)
            table = table.filter(pa.array(~foreign))
        return Parsed(table=table, used=used, bad=problems)

    def _problem(self, start: int, stop: int, kind: int, fields: int) -> UnreadableRange:
        reason = f"it has {fields} fields but the header has {len(self._header)}"
        if kind == _QUOTING:
            reason = "its quoting is broken: a quoted field must close before the next comma"
        return UnreadableRange(start=start, stop=stop, reason=reason)


@njit(cache=True, nogil=True)
def _scan(
    data: Bytes,
    final: bool,
    slots: Offsets,
    starts: Offsets,
    stops: Offsets,
    rows: Offsets,
    bad: Offsets,
) -> tuple[int, int, int]:
    """Fill the cells of the good records and the list of bad ones; used bytes, good, bad."""
    size, width = len(data), len(slots)
    at = good = wrong = 0
    while at < size:
        begin = at
        if data[at] == _LF or data[at] == _CR:  # an empty line is no record
            at += 1
            continue
        fields = 0
        broken = False
        while True:
            if at < size and data[at] == _QUOTE:
                start = at + 1
                stop, doubled = _closing_quote(data, start, min(size, begin + _LONGEST_QUOTED))
                if stop < 0 and not final and size < begin + _LONGEST_QUOTED:
                    return begin, good, wrong
                at = stop + 1
                if stop < 0 or (
                    at < size and data[at] != _COMMA and data[at] != _LF and data[at] != _CR
                ):
                    broken = True
                    break
                if doubled:
                    stop = ~stop
            else:
                start = at
                at = stop = _field_end(data, start)
            if fields < width and slots[fields] >= 0:
                starts[slots[fields], good] = start
                stops[slots[fields], good] = stop
            fields += 1
            if at == size or data[at] != _COMMA:
                break
            at += 1
        if broken:
            at = begin
            while at < size and data[at] != _LF and data[at] != _CR:
                at += 1
        ending = at
        if at == size:
            if not final:
                return begin, good, wrong
        else:  # of a \r\n that the block's end cuts, the \n is left over as an empty line
            crlf = data[at] == _CR and at + 1 < size and data[at + 1] == _LF
            at += 2 if crlf else 1
        if broken or fields != width:
            bad[wrong, 0], bad[wrong, 1] = begin, ending
            bad[wrong, 2], bad[wrong, 3] = _QUOTING if broken else _WIDTH, fields
            wrong += 1
        else:
            rows[good, 0], rows[good, 1] = begin, ending
            good += 1
    return at, good, wrong


@njit(cache=True, nogil=True)
def _field_end(data: Bytes, start: int) -> int:
    """The first comma or line end from `start` on."""
    at, size = np.uint64(start), np.uint64(len(data))  # unsigned: see `text._copy`
    while at < size and (
        data[at] > _COMMA or (data[at] != _COMMA and data[at] != _LF and data[at] != _CR)
    ):
        at += np.uint64(1)
    return int(np.int64(at))


@njit(cache=True, nogil=True)
def _closing_quote(data: Bytes, start: int, stop: int) -> tuple[int, bool]:
    """Where the quoted field that begins at `start` closes, or -1; whether it holds a quote."""
    doubled = False
    at = start
    while at < stop:
        if data[at] == _QUOTE:
            if at + 1 < len(data) and data[at + 1] == _QUOTE:
                doubled = True
                at += 1
            else:
                return at, doubled
        at += 1
    return -1, doubled
