"""Files that survive a kill: exclusive creation, atomic replacement, directory fsync.

Large files are written past the system's cache where that is possible. A snapshot is read after a
stop, if ever: in the cache it would take the memory, and the time to find it, that the run itself
needs. Direct writes come from pages of their own, in whole blocks; the rest of a file, or all of it
where the file system cannot do this, is written as usual.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

from dpstream.errors import DpstreamError, StateError

Buffer: TypeAlias = bytes | memoryview

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)

_LARGE = 1 << 20  # bytes from which a file is written past the system's cache
_STAGE = 1 << 20  # bytes of one write; a multiple of every disk's block
_DIRECT = getattr(os, "O_DIRECT", 0)

_BORN = 0x800  # statx: the time of birth is asked for, or was given
_OF_FD = 0x1000  # statx: of the file that is open, not of a path
_BORN_AT, _STATX_SIZE = 80, 256  # where that time is in the answer, and how long the answer is


def file_identity(fd: int) -> str:
    """Which file this is: a copy has another identity, the same file after a remount has not.

    Inode number and time of birth; a device number changes when a volume is attached again. Where
    the file system keeps no time of birth the device number must do, and a remount looks like a
    copy.
    """
    stat, born = os.fstat(fd), _birth_time(fd)
    return f"{stat.st_ino:x}-{born:x}" if born else f"{stat.st_ino:x}-on-{stat.st_dev:x}"


def _birth_time(fd: int) -> int:
    """Nanoseconds since 1970; 0 where it is not known."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    if statx is None or statx(fd, b"", _OF_FD, _BORN, answer):
        return 0
    if not int.from_bytes(answer.raw[:4], sys.byteorder) & _BORN:
        return 0
    seconds = int.from_bytes(answer.raw[_BORN_AT : _BORN_AT + 8], sys.byteorder, signed=True)
    return seconds * 10**9 + int.from_bytes(answer.raw[_BORN_AT + 8 : _BORN_AT + 12], sys.byteorder)


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its parents durably: each new name is synced in its parent."""
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    path.mkdir(mode=mode, exist_ok=True)
    sync_directory(path.parent)


def create_exclusive(path: Path, content: bytes) -> None:
    """Write a new private file (0600) durably; FileExistsError if somebody else was first."""
    temporary = write_hidden(path, content)
    try:
        os.link(temporary, path)  # the file appears whole or not at all
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def write_hidden(path: Path, *content: Buffer) -> Path:
    """Write the content of a file-to-be durably under a hidden name; return that name."""
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{token_hex(8)}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file:
        _write(file.fileno(), content)
        os.fsync(file.fileno())
    return temporary


def replace(path: Path, *content: Buffer) -> None:
    """Put new content, in one or several buffers, under `path` atomically and durably (0600)."""
    os.replace(write_hidden(path, *content), path)
    sync_directory(path.parent)


def erase(path: Path) -> None:
    """Overwrite with zeros, then remove, each durably.

    A copy-on-write or wear-levelling medium may keep the old bytes; the threat model says so.
    """
    with path.open("r+b", buffering=0) as file:
        _write(file.fileno(), _zeros(path.stat().st_size))
        os.fsync(file.fileno())
    path.unlink()
    sync_directory(path.parent)


def erase_part(path: Path, rest: bytes) -> None:
    """Leave only `rest` of a file, atomically; then overwrite what was there."""
    if not rest:
        erase(path)
        return
    with path.open("r+b", buffering=0) as file:
        replace(path, rest)
        _write(file.fileno(), _zeros(os.fstat(file.fileno()).st_size))
        os.fsync(file.fileno())


def _write(fd: int, content: Sequence[Buffer]) -> None:
    """Write all buffers, one after another, from the start of a file."""
    if sum(len(buffer) for buffer in content) < _LARGE:
        write_all(fd, b"".join(content))
        return
    direct = _set_direct(fd, on=True)
    with mmap.mmap(-1, _STAGE) as stage:
        filled = 0
        for buffer in content:
            left = memoryview(buffer).cast("B")
            while len(left):
                taken = min(len(left), _STAGE - filled)
                stage[filled : filled + taken] = left[:taken]
                left, filled = left[taken:], filled + taken
                if filled == _STAGE:
                    direct, filled = _write_stage(fd, stage, direct=direct), 0
        if direct:
            _set_direct(fd, on=False)
        write_all(fd, stage[:filled])


def _zeros(size: int) -> list[Buffer]:
    """`size` zero bytes, in buffers that share their memory.

    >>> [len(buffer) for buffer in _zeros((1 << 20) + 5)]
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


def remove_leftovers(folder: Path, name: str = "*", *, overwrite: bool = False) -> None:
    """Remove the temporary files that a killed process left of `name`, or of all files."""
    pattern = name if name == "*" else glob.escape(name)
    for path in folder.glob(f".{pattern}.{'[0-9a-f]' * 16}.new"):
        if overwrite and path.stat().st_nlink == 1:  # else it is another name of a file in use
            erase(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into a StateError."""
    try:
        yield
    except DpstreamError:  # a server that does not answer says so itself
        raise
    except OSError as problem:
        if problem.errno in _FULL:
            raise StateError(
                f"there is no space left to write {path}; free some and run again: the file is not "
                "there, and the run goes on where it stopped"
            ) from problem
        if problem.errno in _FORBIDDEN:
            reason = "may not be written by this user; grant permission or name another place"
        else:
            reason = f"cannot be written: {problem.strerror or problem}; mend that and run again"
        raise StateError(f"{path} {reason}") from problem
