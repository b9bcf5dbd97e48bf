"""JSON lines: one object a line, its scalars as strings; a number has one spelling for its value.

A line that the compiled scanner cannot take as it stands (broken, an escape in a key, a nested
value) is looked at by the `json` module, and rejected alone if that refuses it too. The scanner
skips nested values of columns that nobody wants; a nested value of a wanted one rejects the line.
It takes only what it is sure of: any doubt makes a line HARD, and the `json` module decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.compiled import compiled
from dpstream.connectors.files.text import (
    Bytes,
    Offsets,
    Parsed,
    UnreadableRange,
    not_utf8,
    string_array,
)
from dpstream.errors import InvalidInput
from dpstream.records import Columns
from dpstream.rows.number_text import LONGEST, number_text

GOOD, BLANK, HARD, NEW_KEY = 0, 1, 2, 3

_LF, _QUOTE = np.uint8(10), np.uint8(34)
_COLON, _COMMA, _SPACE = np.uint8(58), np.uint8(44), np.uint8(32)
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = np.uint8(123), np.uint8(125), np.uint8(91), np.uint8(93)
_LOWER_N, _MINUS = np.uint8(110), np.uint8(45)
_NO_POINT, _EXPONENT, _NO_NUMBER = -1, -2, -3
_ONE = np.uint64(1)  # the inner loops count without sign: see `text._copy`
_PLAIN = np.array([byte >= 32 and byte not in b'"\\' for byte in range(256)])
_ESCAPES = np.array([byte in b'"\\/bfnrt' for byte in range(256)])
_TRUE, _FALSE, _NULL = (np.frombuffer(word, np.uint8) for word in (b"true", b"false", b"null"))
_BOM = b"\xef\xbb\xbf"
_MOST_COLUMNS = 1000
_LOOK_AHEAD = 64  # lines that are looked at together when one has a new key


class _NoRow(Exception):
    """Why a line is no row."""


class JsonlParser:
    """Objects of scalars; an absent key and a JSON null are null."""

    line_ends = b"\n"

    def __init__(self, name: str) -> None:
        self._name = name

    def head(self, block: bytes, *, final: bool) -> int | None:
        """JSON lines have no header."""
        if len(block) < len(_BOM) and not final:
            return None
        return len(_BOM) if block.startswith(_BOM) else 0

    def parse(self, block: bytes, *, final: bool, columns: Columns) -> Parsed:
        """The whole lines of the block; without `columns`, every key that the block has."""
        block = block if final else block[: block.rfind(b"\n") + 1]
        every = columns is None
        names = self._add([], [block[: block.find(b"\n") + 1]]) if every else _distinct(columns)
        lines, starts, stops = _scan_block(block, names, every)
        while (fresh := lines[lines[:, 2] == NEW_KEY][:_LOOK_AHEAD]).size:
            names = self._add(names, (block[start:stop] for start, stop, _ in fresh.tolist()))
            lines, starts, stops = _scan_block(block, names, every)

        hard = np.flatnonzero(lines[:, 2] == HARD)
        starts[:, hard] = -1
        objects, bad = _parse_hard_lines(block, lines, hard, None if every else names)
        if every:
            names = _distinct([*names, *(key for cells in objects.values() for key in cells)])
            absent = np.full((len(names) - len(starts), len(lines)), -1, dtype=np.int32)
            starts, stops = np.concatenate([starts, absent]), np.concatenate([stops, absent])
        cells = zip(names, starts, stops, strict=True)
        arrays = [_array(block, name, begin, end, objects) for name, begin, end in cells]
        table = pa.table(arrays, names=names)
        keep = lines[:, 2] == GOOD
        keep[list(objects)] = True
        if names and not keep.all():
            table = table.filter(pa.array(keep))
        return Parsed(table=table, used=len(block), bad=bad)

    def _add(self, names: list[str], lines: Iterable[bytes]) -> list[str]:
        """The names, and those of the lines that can be read."""
        known = list(names)
        for line in lines:
            try:
                known += _loads(line, None)
            except _NoRow:
                continue
        known = _distinct(known)
        if len(known) > _MOST_COLUMNS:
            raise InvalidInput(
                f"{self._name} has more than {_MOST_COLUMNS} different keys; name the columns"
            )
        return known


def _scan_block(block: bytes, names: list[str], every: bool) -> tuple[Offsets, Offsets, Offsets]:
    """Lines x (start, stop, kind), and the cells, columns x lines."""
    data = np.frombuffer(block, dtype=np.uint8)
    encoded = [name.encode() for name in names]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    most = int(np.count_nonzero(data == ord("\n"))) + 1
    starts, stops = (np.empty((len(names), most), dtype=np.int32) for _ in range(2))
    lines = np.empty((most, 3), dtype=np.int32)
    joined = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    count = _scan(data, joined, bounds, every, starts, stops, lines)
    lines = lines[:count]
    foreign = not_utf8(block, lines[:, 0], lines[:, 1])
    if foreign is not None:
        lines[foreign, 2] = HARD
    return lines, starts[:, :count], stops[:, :count]


def _parse_hard_lines(
    block: bytes, lines: Offsets, hard: Any, names: list[str] | None
) -> tuple[dict[int, dict[str, str | None]], list[UnreadableRange]]:
    """What the `json` module makes of the hard lines: objects by line, and what it refuses."""
    objects, bad = {}, []
    for line in hard.tolist():
        start, stop, _ = lines[line].tolist()
        try:
            objects[line] = _loads(block[start:stop], names)
        except _NoRow as problem:
            bad.append(UnreadableRange(start=start, stop=stop, reason=str(problem)))
    return objects, bad


def _array(
    block: bytes,
    name: str,
    starts: Offsets,
    stops: Offsets,
    objects: dict[int, dict[str, str | None]],
) -> pa.Array:
    """One column; cells that must be written anew and hard lines are put in afterwards."""
    anew = np.flatnonzero((starts >= 0) & (stops < 0))
    places = np.stack([starts[anew], ~stops[anew]], axis=1).tolist()
    starts[anew] = -1
    array = string_array(np.frombuffer(block, dtype=np.uint8), starts, stops)
    if not len(anew) and not objects:
        return array
    later: dict[int, str | None] = {}
    escaped, cells = [], []
    for line, (start, stop) in zip(anew.tolist(), places, strict=True):
        if block[start - 1 : start] == b'"':
            escaped.append(line)
            cells.append(block[start:stop])
        else:
            later[line] = number_text(block[start:stop].decode())
    texts = json.loads(b'["' + b'","'.join(cells) + b'"]') if cells else []
    later |= zip(escaped, texts, strict=True)
    later |= {line: cells.get(name) for line, cells in objects.items()}
    mask = np.zeros(len(array), dtype=np.bool_)
    mask[list(later)] = True
    values = pa.array([later[line] for line in sorted(later)], pa.string())
    return pc.replace_with_mask(array, pa.array(mask), values)


def _loads(line: bytes, names: list[str] | None) -> dict[str, str | None]:
    """The wanted scalars of one line as strings, or _NoRow."""
    try:
        value = json.loads(
            line.decode(),
            parse_int=number_text,
            parse_float=number_text,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError:
        raise _NoRow("it is not UTF-8 text") from None
    except json.JSONDecodeError as problem:
        raise _NoRow(f"it is not JSON: {problem.msg} at column {problem.colno}") from None
    except RecursionError:
        raise _NoRow("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise _NoRow("it is not a JSON object; one object a line is needed")
    return {key: _scalar(key, item) for key, item in value.items() if names is None or key in names}


def _scalar(key: str, value: Any) -> str | None:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        raise _NoRow(f"the value of {key!r} is {kind}; a column holds numbers or strings")
    text = None if value is None else str(value)
    if isinstance(value, bool):
        text = "true" if value else "false"
    try:
        (key + (text or "")).encode()
    except UnicodeEncodeError:
        raise _NoRow(f"{key!r} has half of a surrogate pair, which is no character") from None
    return text


def _refuse_constant(word: str) -> NoReturn:
    raise _NoRow(f"{word} is no JSON value")


def _distinct(names: Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(names or ()))


@compiled
def _scan(
    data: Bytes,
    names: Bytes,
    bounds: Offsets,
    every: bool,
    starts: Offsets,
    stops: Offsets,
    lines: Offsets,
) -> int:
    """Fill the cells (columns x lines) and each line's start, stop and kind; the line count.

    `names[bounds[j] : bounds[j + 1]]` is the key of column j. A start of -1 is null or absent; a
    stop below 0 is ~stop of a cell that must be written anew: a string with escapes, or a number
    in another than its one spelling. `every`: a line with another key is NEW_KEY.
    """
    at = row = 0
    while at < len(data):
        begin = at
        for slot in range(len(starts)):
            starts[slot, row] = -1
        kind, at = _line(data, at, names, bounds, every, starts, stops, row)
        while at < len(data) and data[at] != _LF:
            at += 1
        lines[row, 0], lines[row, 1], lines[row, 2] = begin, at, kind
        row += 1
        at += 1
    return row


@compiled
def _line(
    data: Bytes,
    at: int,
    names: Bytes,
    bounds: Offsets,
    every: bool,
    starts: Offsets,
    stops: Offsets,
    row: int,
) -> tuple[int, int]:
    """What kind of line begins at `at`, and a place at or before its end."""
    size = len(data)
    at = _skip_space(data, at)
    if at == size or data[at] == _LF:
        return BLANK, at
    if data[at] != _OPEN:
        return HARD, at
    fresh = False
    slot = -1
    at = _skip_space(data, at + 1)
    if at < size and data[at] == _CLOSE:
        return _end(data, at + 1, GOOD)
    while True:
        if at == size or data[at] != _QUOTE:
            return HARD, at
        start = at + 1
        at = _skip_plain(data, start)
        if at == size or data[at] != _QUOTE:
            return HARD, at
        slot = _column(data, start, at, names, bounds, slot + 1)
        at = _skip_space(data, at + 1)
        if at == size or data[at] != _COLON:
            return HARD, at
        start = _skip_space(data, at + 1)
        if start == size:
            return HARD, start
        wanted = every or slot >= 0
        lead = data[start]
        escaped, point = False, _NO_NUMBER
        if lead == _QUOTE:
            start += 1
            stop, escaped = _string_end(data, start)
            at = stop + 1
        elif lead in (_OPEN, _OPEN_LIST):
            at = stop = -1 if wanted else _nested_end(data, start)
        else:
            at, point = _scalar_end(data, start)
            stop = at
        if stop < 0:
            return HARD, start
        if slot >= 0:
            if point != _NO_NUMBER:
                start, stop, escaped = _one_spelling(data, start, stop, point)
            null = lead == _LOWER_N
            starts[slot, row] = -1 if null else start
            stops[slot, row] = ~stop if escaped else stop
        elif every:
            fresh = True
        at = _skip_space(data, at)
        if at == size:
            return HARD, at
        if data[at] == _CLOSE:
            return _end(data, at + 1, NEW_KEY if fresh else GOOD)
        if data[at] != _COMMA:
            return HARD, at
        at = _skip_space(data, at + 1)


@compiled
def _one_spelling(data: Bytes, start: int, stop: int, point: int) -> tuple[int, int, bool]:
    """Where a number lies without zeros at its end; True if it must be written anew."""
    if point >= 0:
        while data[stop - 1] == 48:
            stop -= 1
        if stop == point + 1:
            stop = point
    if stop == start + 2 and data[start] == _MINUS and data[start + 1] == 48:
        start += 1  # zero has no sign
    return start, stop, point == _EXPONENT or stop - start > LONGEST


@compiled
def _end(data: Bytes, at: int, kind: int) -> tuple[int, int]:
    at = _skip_space(data, at)
    return (kind if at == len(data) or data[at] == _LF else HARD), at


@compiled
def _skip_space(data: Bytes, at: int) -> int:
    """Past the white space of a line: space, tab, carriage return."""
    here, size = np.uint64(at), np.uint64(len(data))
    while here < size and (data[here] == 32 or data[here] == 9 or data[here] == 13):
        here += _ONE
    return int(np.int64(here))


@compiled
def _skip_plain(data: Bytes, at: int) -> int:
    """To the first quote, backslash or control character."""
    here, size = np.uint64(at), np.uint64(len(data))
    while here < size and _PLAIN[data[here]]:
        here += _ONE
    return int(np.int64(here))


@compiled
def _column(data: Bytes, start: int, stop: int, names: Bytes, bounds: Offsets, guess: int) -> int:
    """The column of a key; keys mostly come in the same order, so `guess` is tried first."""
    if guess < len(bounds) - 1 and _is_key(data, start, stop, names, bounds, guess):
        return guess
    for slot in range(len(bounds) - 1):
        if _is_key(data, start, stop, names, bounds, slot):
            return slot
    return -1


@compiled
def _is_key(data: Bytes, start: int, stop: int, names: Bytes, bounds: Offsets, slot: int) -> bool:
    first = bounds[slot]
    if bounds[slot + 1] - first != stop - start:
        return False
    here, there = np.uint64(start), np.uint64(first)
    while here < np.uint64(stop):
        if data[here] != names[there]:
            return False
        here += _ONE
        there += _ONE
    return True


@compiled
def _string_end(data: Bytes, at: int) -> tuple[int, bool]:
    """Where the string's closing quote is, or -1; whether it holds an escape."""
    escaped = False
    while True:
        at = _skip_plain(data, at)
        if at == len(data) or data[at] < _SPACE:
            return -1, escaped
        if data[at] == _QUOTE:
            return at, escaped
        escaped = True
        if at + 1 < len(data) and _ESCAPES[data[at + 1]]:
            at += 2
        elif at + 5 < len(data) and data[at + 1] == 117 and _is_character(data, at + 2):
            at += 6
        else:
            return -1, escaped


@compiled
def _is_character(data: Bytes, at: int) -> bool:
    r"""Four hexadecimal digits that are no half of a surrogate pair (\ud800 to \udfff)."""
    for k in range(4):
        digit = data[at + k] | 32
        if not (48 <= data[at + k] <= 57 or 97 <= digit <= 102):
            return False
    return not ((data[at] | 32) == 100 and (data[at + 1] >= 56))


@compiled
def _nested_end(data: Bytes, at: int) -> int:
    """Past the end of an object or array that nobody wants, or -1; its inside is not checked."""
    depth = 0
    while at < len(data) and data[at] != _LF:
        byte = data[at]
        if byte == _QUOTE:
            at, _ = _string_end(data, at + 1)
            if at < 0:
                return -1
        elif byte in (_OPEN, _OPEN_LIST):
            depth += 1
        elif byte in (_CLOSE, _CLOSE_LIST):
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return -1


@compiled
def _scalar_end(data: Bytes, at: int) -> tuple[int, int]:
    """Past the end of a number, true, false or null, or -1; where a number has its point."""
    if data[at] == _TRUE[0]:
        return _word_end(data, at, _TRUE), _NO_NUMBER
    if data[at] == _NULL[0]:
        return _word_end(data, at, _NULL), _NO_NUMBER
    if data[at] == _FALSE[0]:
        return _word_end(data, at, _FALSE), _NO_NUMBER
    if data[at] == 45:  # minus
        at += 1
    start, point = at, _NO_POINT
    at = _skip_digits(data, at)
    if at == start or (data[start] == 48 and at > start + 1):  # no digit, or a leading zero
        return -1, point
    if at < len(data) and data[at] == 46:  # point
        point, start = at, at + 1
        at = _skip_digits(data, start)
        if at == start:
            return -1, point
    if at < len(data) and (data[at] | 32) == 101:  # e or E
        point = _EXPONENT
        at += 1
        if at < len(data) and (data[at] == 43 or data[at] == 45):
            at += 1
        start = at
        at = _skip_digits(data, start)
        if at == start:
            return -1, point
    return at, point


@compiled
def _word_end(data: Bytes, at: int, word: Bytes) -> int:
    """Past the end of a word that must be at `at`, or -1."""
    if at + len(word) > len(data):
        return -1
    for k in range(len(word)):
        if data[at + k] != word[k]:
            return -1
    return at + len(word)


@compiled
def _skip_digits(data: Bytes, at: int) -> int:
    here, size = np.uint64(at), np.uint64(len(data))
    while here < size and 48 <= data[here] <= 57:
        here += _ONE
    return int(np.int64(here))
