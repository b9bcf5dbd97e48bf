"""What the plugin `pgoutput` of PostgreSQL says of a table's changes, in its protocol 1.

A transaction comes when it is committed, in one piece: Begin, changes, Commit. Values are text; a
value that is stored apart (TOAST) and did not change is not sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpstream.errors import InvalidInput

UNSENT = object()
"""In place of a value that has not changed and was not sent."""
Values = tuple[Any, ...]
"""A row's values as texts; None is NULL."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """A transaction begins; its commit stands at `commit` in the log."""

    commit: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    """It ends; the log goes on at `end`."""

    end: int


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A table as it was when the next changes were made: (name, type, modifier) by column."""

    table: int
    name: str
    columns: Sequence[tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """An insert, update, delete or truncate, with the row before it as far as that is known."""

    operation: str
    table: int
    row: Values = ()
    before: Values = ()


class _Reader:
    """Takes a message apart."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f">{layout}", self.content, self.at)
        self.at += struct.calcsize(f">{layout}")
        return values

    def text(self) -> str:
        end = self.content.index(b"\0", self.at)
        found, self.at = self.content[self.at : end].decode(), end + 1
        return found

    def values(self) -> Values:
        """A row."""
        found: list[Any] = []
        (count,) = self.take("H")
        for _ in range(count):
            (kind,) = self.take("c")
            if kind == b"t":
                (size,) = self.take("i")
                found.append(self.content[self.at : self.at + size].decode())
                self.at += size
            elif kind in (b"n", b"u"):
                found.append(None if kind == b"n" else UNSENT)
            else:
                raise ValueError(kind)
        return tuple(found)


def parse(content: bytes) -> list[Begin | Commit | Relation | Change]:
    """What a message says; most say one thing, a truncation names several tables.

    >>> parse(b"C" + bytes(9) + (77).to_bytes(8, "big") + bytes(8))
    [Commit(end=77)]
    >>> parse(b"b" + bytes(20))
    Traceback (most recent call last):
    dpstream.errors.InvalidInput: the server sent a message 'b' of pgoutput, which is not known ...
    """
    reader, kind = _Reader(content[1:]), content[:1]
    try:
        if kind == b"B":
            return [Begin(commit=reader.take("QqI")[0])]
        if kind == b"C":
            return [Commit(end=reader.take("BQQq")[2])]
        if kind == b"R":
            (table,) = reader.take("I")
            name = f"{reader.text() or 'pg_catalog'}.{reader.text()}"
            _, count = reader.take("cH")
            columns = []
            for _ in range(count):
                reader.take("B")
                columns.append((reader.text(), *reader.take("Ii")))
            return [Relation(table=table, name=name, columns=columns)]
        if kind in (b"I", b"U", b"D"):
            return [_change(kind, reader)]
        if kind == b"T":
            count, _ = reader.take("IB")
            return [Change(operation="truncate", table=table) for table in reader.take(f"{count}I")]
        if kind in (b"Y", b"O"):  # names of types, where a transaction is from
            return []
    except (struct.error, ValueError, IndexError):
        raise InvalidInput(f"the server sent a message {kind!r} that is cut off") from None
    raise InvalidInput(
        f"the server sent a message {kind.decode(errors='replace')!r} of pgoutput, which is not "
        "known here; use a slot that was made without two_phase"
    )


def _change(kind: bytes, reader: _Reader) -> Change:
    (table,), (part,) = reader.take("I"), reader.take("c")
    before: Values = ()
    if part in (b"K", b"O"):
        before = reader.values()
        if kind == b"U":
            reader.take("c")
    if kind == b"D":
        return Change(operation="delete", table=table, before=before)
    operation = "insert" if kind == b"I" else "update"
    return Change(
        operation=operation,
        table=table,
        row=reader.values(),
        before=before if part == b"O" else (),
    )
