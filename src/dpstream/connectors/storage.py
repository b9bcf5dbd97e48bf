"""Durable files for connectors: whole or absent, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from dpstream.errors import StateError
from dpstream.privacy.state.durable_files import (
    make_directory,
    remove_leftovers,
    replace,
    sync_directory,
    wrap_write_errors,
    write_hidden,
)

_LOOK = 3600.0  # seconds between two looks for old files
_LONGEST = 160  # of 255 bytes, with room for numbers, suffixes and temporary names


def safe_name(text: str) -> str:
    """A file name for any text; other texts get other names, and none is hidden.

    A text that is too long for a file name is cut, and its digest added.
    """
    safe = quote(text, safe="", errors="surrogatepass").replace(".", "%2E")
    safe = f"%5F{safe[1:]}" if safe.startswith("_") else safe
    if len(safe) <= _LONGEST:
        return safe
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{safe[: _LONGEST - len(digest) - 1]}~{digest}"


def printable(text: object) -> str:
    r"""A text, or a path, that any log and file takes: names of files may be no UTF-8.

    >>> printable("a\udcff.csv")
    'a\\udcff.csv'
    """
    return str(text).encode(errors="backslashreplace").decode()


def open_folder(folder: Path) -> None:
    """Make the folder if it is not there; it must be one that files can be created in."""
    with wrap_write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise StateError(f"{folder} must be a directory but is a file; name another place")
        make_directory(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def put_new(path: Path, content: bytes, *, private: bool = False) -> bool:
    """Write a file that stays as it is; if it is already there, do nothing and say False.

    Who may use the directory may use the file, unless it is `private` to this user.
    """
    return reveal([prepare_new(path, content, private=private)]) == 1


Prepared = tuple[Path, Path] | None
"""A file that is durable under its first name and will be seen under its second; None: it is."""


def prepare_new(path: Path, content: bytes, *, private: bool = False) -> Prepared:
    """Write a file that nobody sees yet."""
    if path.exists():
        return None
    with wrap_write_errors(path):
        try:
            hidden = write_hidden(path, content)
            if not private:
                os.chmod(hidden, path.parent.stat().st_mode & 0o666)
        except OSError:
            remove_leftovers(path.parent, path.name)
            raise
    return hidden, path


def reveal(prepared: Sequence[Prepared]) -> int:
    """Show files that are prepared, in order and durably; how many were not there before."""
    new = 0
    folders: list[Path] = []
    for hidden, path in filter(None, prepared):
        with wrap_write_errors(path):
            try:
                os.link(hidden, path)  # it appears whole or not at all
                new += 1
            except FileExistsError:
                pass
            finally:
                hidden.unlink()
        if path.parent not in folders:
            folders.append(path.parent)
    for folder in folders:
        with wrap_write_errors(folder):
            sync_directory(folder)
    return new


def put(path: Path, content: bytes) -> None:
    """Put new content under `path`, atomically; the file is private to this user."""
    with wrap_write_errors(path):
        try:
            replace(path, content)
        except OSError:
            remove_leftovers(path.parent, path.name)
            raise


def remove(path: Path) -> None:
    """Remove a file durably; one that is already gone is no error."""
    with wrap_write_errors(path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def old_files(folder: Path, keep: timedelta) -> list[Path]:
    """Files that were put into a folder so long ago: their times change when they are moved."""
    before = time.time() - keep.total_seconds()
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in paths if p.is_file() and is_older(p, before, by="st_ctime"))


def is_older(path: Path, moment: float, *, by: str = "st_mtime") -> bool:
    """Is a file's time before this moment? That of one that was removed meanwhile is not."""
    try:
        when: float = getattr(path.stat(), by)
    except FileNotFoundError:
        return False
    return when < moment


class AgingFolder:
    """A folder whose files go when they have been in it for `keep`; None: they stay."""

    def __init__(self, folder: Path, keep: timedelta | None) -> None:
        self.folder, self.keep = folder, keep
        self._look_at = 0.0

    def take(self, paths: Sequence[Path]) -> None:
        """Move files here, in order and durably."""
        for path in paths:
            with wrap_write_errors(path):
                make_directory(self.folder, mode=0o700)
                os.rename(path, self.folder / path.name)
        for folder in {path.parent for path in paths}:
            with wrap_write_errors(folder):
                sync_directory(self.folder)
                sync_directory(folder)

    def clean(self) -> None:
        """Remove what is old; it is looked for once an hour."""
        if self.keep is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK
        with wrap_write_errors(self.folder):
            for path in old_files(self.folder, self.keep):
                path.unlink(missing_ok=True)
