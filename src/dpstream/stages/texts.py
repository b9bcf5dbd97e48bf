"""Quick looks at a whole column of text: mostly nothing is wrong with it, and that is soon seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.compiled import compiled

_HIGH = 0x8080808080808080


def plain(array: pa.Array) -> bool:
    """Is every byte of its text ASCII? (If not, it may be valid UTF-8 all the same.)

    >>> plain(pa.array(["a", None, "b"])), plain(pa.array(["caf\u00e9"]))
    (True, False)
    """
    found = slices(array)
    if found is None:
        return False
    offsets, data = found
    used = data[offsets[0] : offsets[-1]]
    words = len(used) // 8 * 8
    return not _has_high(used[:words].view(np.uint64)) and not (used[words:] > 127).any()


def lengths(array: pa.Array) -> tuple[int, int]:
    """Bytes of the shortest and of the longest, or wider limits; a NULL row may count as 0.

    >>> lengths(pa.array(["abc", "z", "zz"]))
    (1, 3)
    """
    found = slices(array)
    if found is None:
        return 0, 1 << 62
    return _extremes(found[0])


def slices(array: pa.Array) -> tuple[Any, Any] | None:
    """(offsets, data) of strings that lie one after another; None for other arrays, or no rows."""
    if not len(array) or array.type not in (pa.string(), pa.binary()):
        return None
    _, where, data = array.buffers()
    offsets = np.frombuffer(where, np.int32, len(array) + 1, 4 * array.offset)
    return offsets, np.frombuffer(data or b"", np.uint8)


@compiled
def _has_high(words: Any) -> bool:
    seen = np.uint64(0)
    for word in words:
        seen |= word
    return bool(seen & np.uint64(_HIGH))


@compiled
def _extremes(offsets: Any) -> tuple[int, int]:
    least, most = offsets[1] - offsets[0], offsets[1] - offsets[0]
    for i in range(1, len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        least, most = min(least, length), max(most, length)
    return least, most
