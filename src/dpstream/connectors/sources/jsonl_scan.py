"""The compiled pass over JSON lines: where the values of the wanted keys lie.

It accepts only what it is sure of. Any doubt makes a line HARD, and the `json` module decides.
"""

from __future__ import annotations

import numpy as np

from dpstream.compiled import compiled
from dpstream.connectors.sources.cells import Bytes, Offsets
from dpstream.stages.number_text import LONGEST

GOOD, BLANK, HARD, NEW_KEY = 0, 1, 2, 3

_LF, _QUOTE = np.uint8(10), np.uint8(34)
_COLON, _COMMA, _SPACE = np.uint8(58), np.uint8(44), np.uint8(32)
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = np.uint8(123), np.uint8(125), np.uint8(91), np.uint8(93)
_LOWER_N, _MINUS = np.uint8(110), np.uint8(45)
_NO_POINT, _EXPONENT, _NO_NUMBER = -1, -2, -3
_ONE = np.uint64(1)  # the inner loops count without sign: see cells.py
_PLAIN = np.array([byte >= 32 and byte not in b'"\\' for byte in range(256)])


@compiled
def scan(
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
        if at + 1 < len(data) and _is_simple_escape(data[at + 1]):
            at += 2
        elif at + 5 < len(data) and data[at + 1] == 117 and _is_character(data, at + 2):
            at += 6
        else:
            return -1, escaped


@compiled
def _is_simple_escape(byte: int) -> bool:
    r"""One of " \\ / b f n r t."""
    return (
        byte == 34
        or byte == 92
        or byte == 47
        or byte == 98
        or byte == 102
        or byte == 110
        or byte == 114
        or byte == 116
    )


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
    if data[at] == 116:
        return _word_end(data, at, 114, 117, 101), _NO_NUMBER  # true
    if data[at] == 110:
        return _word_end(data, at, 117, 108, 108), _NO_NUMBER  # null
    if data[at] == 102:
        at += 1  # false: its f is seen, so an a and the rest of it
        whole = at < len(data) and data[at] == 97
        return (_word_end(data, at, 108, 115, 101) if whole else -1), _NO_NUMBER
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
def _word_end(data: Bytes, at: int, second: int, third: int, fourth: int) -> int:
    same = (
        at + 3 < len(data)
        and data[at + 1] == second
        and data[at + 2] == third
        and data[at + 3] == fourth
    )
    return at + 4 if same else -1


@compiled
def _skip_digits(data: Bytes, at: int) -> int:
    here, size = np.uint64(at), np.uint64(len(data))
    while here < size and 48 <= data[here] <= 57:
        here += _ONE
    return int(np.int64(here))
