"""Where releases are kept: an SQLite book of them, and files for the large ones.

releases.sqlite     one line per release; small ones are in it
segments/           large ones, a file each, which is durable before its line

A release gets its number when it is announced: numbers grow by 1 and are never given twice.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpstream.errors import StateError

FORMAT = 1
BOOK, SEGMENTS = "releases.sqlite", "segments"
INLINE = 1 << 16
"""Bytes of a release that is kept in the book itself."""

_RELEASES = (
    'CREATE TABLE IF NOT EXISTS releases (query TEXT NOT NULL, "window" INTEGER NOT NULL, '
    '"trigger" INTEGER NOT NULL, start TEXT, "end" TEXT, time TEXT, planned INTEGER NOT NULL, '
    "rows INTEGER NOT NULL, content BLOB, id INTEGER, "
    'PRIMARY KEY (query, "window", "trigger"))'
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs (query TEXT PRIMARY KEY, run TEXT NOT NULL)",
    _RELEASES,
    "CREATE UNIQUE INDEX IF NOT EXISTS by_number ON releases (id)",
    "CREATE INDEX IF NOT EXISTS by_query ON releases (query, id)",
    f"PRAGMA user_version = {FORMAT}",
)
PLACE = 'query = ? AND "window" = ? AND "trigger" = ?'


def connect(folder: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Open the book; a commit is on the disk, and readers do not wait for it."""
    connection = sqlite3.connect(
        folder / BOOK, isolation_level=None, timeout=30, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if tables and found != FORMAT:
        connection.close()
        raise StateError(
            f"{folder / BOOK} has format {found}; this version of dpstream reads format {FORMAT}; "
            "use the version that wrote it"
        )
    if reading:
        connection.execute("PRAGMA query_only = ON")
    return connection


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of a new book, with the number of their format: all or none."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        for statement in _SCHEMA:
            connection.execute(statement)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder that is there; refused if another process holds it. A kill lets it go."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"{folder} is served by another process already; stop that first, or show what is "
                "there with --no-run"
            ) from None
        yield
    finally:
        os.close(fd)
