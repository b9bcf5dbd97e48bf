"""A checksum of large contents, several times as fast as a cryptographic hash.

It finds damage: torn, swapped or flipped bytes. It does not stop somebody who forges a file; who
can write to the state directory is trusted. Content is taken in blocks of 64 KiB; each becomes
eight words by multiplication and rotation, every step of which can be undone, so that a change of
one word always changes them; SHA-256 joins the words of all blocks, the rest and the length.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from dpstream.compiled import njit
from dpstream.privacy.state.large_files import Buffer

_LANES, _BLOCK = 8, 1 << 16
_START, _TIMES = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd numbers without a pattern


class Checksum:
    """Of pieces, one after another; how they are divided does not matter."""

    def __init__(self) -> None:
        self._digest, self._rest, self._size = hashlib.sha256(), b"", 0

    def update(self, piece: Buffer) -> None:
        """Take in more."""
        self._size += len(piece)
        if len(self._rest) + len(piece) < _BLOCK:
            self._rest += bytes(piece)
            return
        view = memoryview(piece)
        if self._rest:
            missing = _BLOCK - len(self._rest)
            self._absorb(self._rest + bytes(view[:missing]))
            view = view[missing:]
        whole = len(view) // _BLOCK * _BLOCK
        self._absorb(view[:whole])
        self._rest = bytes(view[whole:])

    def digest(self) -> bytes:
        """32 bytes."""
        found = self._digest.copy()
        found.update(self._rest + self._size.to_bytes(8, "big"))
        return found.digest()

    def _absorb(self, blocks: Buffer) -> None:
        words = np.frombuffer(blocks, "<u8").reshape(-1, _BLOCK // 8 // _LANES, _LANES)
        words = words if words.flags.aligned else words.copy()
        words.flags.writeable = False  # one compiled version serves all
        out = np.empty((len(words), _LANES), "<u8")
        _mix(words, out)
        self._digest.update(out.data)


@njit(cache=True, nogil=True)
def _mix(words: Any, out: Any) -> None:
    lanes = np.empty(_LANES, np.uint64)
    for block in range(words.shape[0]):
        for lane in range(_LANES):
            lanes[lane] = np.uint64(_START) * np.uint64(2 * lane + 1)
        for row in range(words.shape[1]):
            for lane in range(_LANES):
                mixed = (lanes[lane] ^ words[block, row, lane]) * np.uint64(_TIMES)
                lanes[lane] = (mixed << np.uint64(29)) | (mixed >> np.uint64(35))
        for lane in range(_LANES):
            out[block, lane] = lanes[lane]
