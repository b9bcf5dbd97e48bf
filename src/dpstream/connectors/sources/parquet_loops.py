"""Compiled loops over a page of a Parquet file: strings, and numbers in runs.

Every length comes from the file and is checked before it is used: nothing is read beyond the page,
nothing written beyond what the caller has made room for. A page that does not hold is BROKEN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.compiled import compiled
from dpstream.stages.unaligned import STRIDE, copy, load_half

BROKEN = -1


@compiled
def plain(page: Any, at: Any, offsets: Any, out: Any) -> Any:
    """Strings with their lengths in four bytes before each become strings one after another.

    They end where the page ends. `offsets[0]` is where the first one goes; `out` has room for the
    page and a stride.
    """
    source, target = np.uint64(page.ctypes.data), np.uint64(out.ctypes.data)
    limit, used = len(page), np.int64(offsets[0])
    for i in range(len(offsets) - 1):
        if at + 4 > limit:
            return BROKEN
        size = np.int64(load_half(source + np.uint64(at)))
        at += 4
        if size > limit - at:
            return BROKEN
        if at + size + STRIDE <= limit:
            for moved in range(0, size, STRIDE):
                copy(target + np.uint64(used + moved), source + np.uint64(at + moved))
        else:  # a stride would read beyond the page
            for j in range(size):
                out[used + j] = page[at + j]
        at += size
        used += size
        offsets[i + 1] = used
    return used if at == limit else BROKEN


@compiled
def unpack(page: Any, at: Any, bits: int, out: Any) -> Any:
    """Fill `out` from runs: of one number, or of numbers packed into bits, eight at a time.

    A run begins with a varint: its lowest bit tells which kind it is, the others how long.
    """
    done = 0
    while done < len(out):
        head, at = _varint(page, at)
        packed, length = head & 1, head >> 1
        size = length * bits if packed else (bits + 7) // 8
        if head < 0 or size > len(page) - at:
            return BROKEN
        count = min(length * 8 if packed else length, len(out) - done)
        if packed:
            _spread(page, at, bits, out[done : done + count])
        else:
            number: Any = 0
            for j in range(size):
                number |= np.int64(page[at + j]) << (8 * j)
            out[done : done + count] = number
        at += size
        done += count
    return at


@compiled
def _varint(page: Any, at: Any) -> tuple[Any, Any]:
    """Seven bits a byte, the lowest first: the number, and where it ends."""
    found: Any = 0
    for shift in range(0, 36, 7):
        if at >= len(page):
            break
        byte = np.int64(page[at])
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    return BROKEN, at


@compiled
def _spread(page: Any, at: Any, bits: int, out: Any) -> None:
    """Numbers of so many bits each, the lowest bits first."""
    bag, held = np.uint64(0), 0
    width = np.uint64(bits)
    mask = (np.uint64(1) << width) - np.uint64(1)
    for i in range(len(out)):
        while held < bits:
            bag |= np.uint64(page[at]) << np.uint64(held)
            at += 1
            held += 8
        out[i] = np.int64(bag & mask)
        bag >>= width
        held -= bits


@compiled
def size_of(wanted: Any, offsets: Any) -> Any:
    """Bytes of all wanted strings of a dictionary, if it has all of them."""
    size: Any = 0
    for place in wanted:
        if place >= len(offsets) - 1:
            return BROKEN
        size += np.int64(offsets[place + 1]) - np.int64(offsets[place])
    return size


@compiled
def gather(wanted: Any, known: Any, data: Any, offsets: Any, out: Any) -> Any:
    """Copy the wanted strings of a dictionary, one after another, from `offsets[0]` on."""
    source, target = np.uint64(data.ctypes.data), np.uint64(out.ctypes.data)
    used = np.int64(offsets[0])
    for i in range(len(wanted)):
        begin = np.int64(known[wanted[i]])
        size = np.int64(known[wanted[i] + 1]) - begin
        for moved in range(0, size, STRIDE):
            copy(target + np.uint64(used + moved), source + np.uint64(begin + moved))
        used += size
        offsets[i + 1] = used
    return used
