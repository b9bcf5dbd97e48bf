"""Files that survive a kill: exclusive creation, atomic replacement, directory fsync."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

Buffer: TypeAlias = bytes | memoryview


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
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{token_hex(8)}.new")
    _write_synced(temporary, content)
    try:
        os.link(temporary, path)  # the file appears whole or not at all
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def replace(path: Path, *content: Buffer) -> None:
    """Put new content, in one or several pieces, under `path` atomically and durably (0600)."""
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{token_hex(8)}.new")
    _write_synced(temporary, *content)
    os.replace(temporary, path)
    sync_directory(path.parent)


def erase(path: Path) -> None:
    """Overwrite with zeros, then remove, each durably.

    A copy-on-write or wear-levelling medium may keep the old bytes; the threat model says so.
    """
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    sync_directory(path.parent)


def _write_synced(path: Path, *content: Buffer) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        for piece in content:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
