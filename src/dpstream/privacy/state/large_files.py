"""Large files, written past the system's cache where that is possible.

A snapshot is read after a stop, if ever. In the cache it would take the memory, and the time to
find it, that the run itself needs. Direct writes come from pages of their own, in whole blocks; the
rest of a file, or all of it where the file system cannot do this, is written as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | memoryview

_STAGE = 1 << 20  # bytes of one write; a multiple of every disk's block
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_large(fd: int, content: Sequence[Buffer]) -> None:
    """Write the pieces, one after another, from the start of a file."""
    direct = _set_direct(fd, on=True)
    with mmap.mmap(-1, _STAGE) as stage:
        filled = 0
        for piece in content:
            left = memoryview(piece).cast("B")
            while len(left):
                taken = min(len(left), _STAGE - filled)
                stage[filled : filled + taken] = left[:taken]
                left, filled = left[taken:], filled + taken
                if filled == _STAGE:
                    direct, filled = _write_stage(fd, stage, direct=direct), 0
        if direct:
            _set_direct(fd, on=False)
        write_all(fd, stage[:filled])


def zeros(size: int) -> list[Buffer]:
    """So many zero bytes, in pieces that share their memory.

    >>> [len(piece) for piece in zeros((1 << 20) + 5)]
    [1048576, 5]
    """
    stage = memoryview(bytes(min(size, _STAGE)))
    return [stage[: size - at] for at in range(0, size, _STAGE)]


def write_all(fd: int, content: Buffer) -> None:
    """Write everything, however many calls it takes."""
    left = memoryview(content)
    while len(left):
        left = left[os.write(fd, left) :]


def _write_stage(fd: int, stage: mmap.mmap, *, direct: bool) -> bool:
    """Write a full stage; can the next one be written directly, too?"""
    with memoryview(stage) as whole:
        written = 0
        if direct:
            try:
                written = os.write(fd, whole)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise
            if written == _STAGE:
                return True
            _set_direct(fd, on=False)  # blocks of another size, or a write that was cut short
        with whole[written:] as rest:
            write_all(fd, rest)
    return False


def _set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct writes on or off; are they on?"""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (_DIRECT if on else 0))
    except OSError:  # a file system without them
        return False
    return on
