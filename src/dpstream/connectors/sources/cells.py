"""From byte ranges of a text block to Arrow strings, without a Python object per cell.

A scanner fills `starts` and `stops` (columns x rows). A start of -1 is a null; a stop below 0 is
~stop of a cell in which a doubled quote stands for one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.compiled import compiled

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]

_QUOTE = np.uint8(34)
_ONE = np.uint64(1)


def strings(block: Bytes, starts: Offsets, stops: Offsets) -> pa.Array:
    """The cells of one column; the bytes must be UTF-8."""
    offsets = np.empty(len(starts) + 1, dtype=np.int32)
    nulls = _lengths(block, starts, stops, offsets)
    content = np.empty(offsets[-1], dtype=np.uint8)
    _copy(block, starts, stops, offsets, content)
    valid = None
    if nulls:
        valid = pa.py_buffer(np.packbits(starts >= 0, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(starts), buffers, nulls)


def not_utf8(block: bytes, starts: Offsets, stops: Offsets) -> npt.NDArray[np.bool_] | None:
    """Which of the byte ranges are not UTF-8; None if the whole block is."""
    if block.isascii():
        return None
    try:
        block.decode()
    except UnicodeDecodeError:
        return _invalid(np.frombuffer(block, dtype=np.uint8), starts, stops)
    return None


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


@compiled
def _invalid(block: Bytes, starts: Offsets, stops: Offsets) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(starts), dtype=np.bool_)
    for i in range(len(starts)):
        found[i] = not _is_utf8(block, starts[i], stops[i])
    return found


@compiled
def _is_utf8(block: Bytes, start: int, stop: int) -> bool:
    """Well-formed as Unicode has it: no overlong form, no surrogate, nothing past U+10FFFF."""
    at = start
    while at < stop:
        lead = block[at]
        at += 1
        if lead < 0x80:
            continue
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
        elif 0xF0 <= lead <= 0xF4:
            more = 3
        else:
            return False
        if at + more > stop:
            return False
        low = 0xA0 if lead == 0xE0 else 0x90 if lead == 0xF0 else 0x80
        high = 0x9F if lead == 0xED else 0x8F if lead == 0xF4 else 0xBF
        for _ in range(more):
            if not low <= block[at] <= high:
                return False
            low, high = 0x80, 0xBF
            at += 1
    return True
