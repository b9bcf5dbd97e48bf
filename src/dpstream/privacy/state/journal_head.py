"""How far a journal had come: kept beside it, so that records lost from its end are noticed.

`<journal>.head` has two slots, each on a page of its own: where the journal ended, the tag of its
last record, and a checksum. A new end is written over the older slot, in place and synced, after
the record is durable. So the journal is never behind its head, and ahead of it by one append at
most: a kill between the two syncs. A slot that a kill has torn belongs to an append that is whole.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from dpstream.errors import DpstreamError
from dpstream.privacy.state.files import replace

_PAGE = 4096  # a torn write of one slot leaves the other alone
NO_TAG = "0" * 16  # before the first record


class Mark(NamedTuple):
    """An end that the journal had; `torn`: a later one was noted, and cannot be read."""

    offset: int
    tag: str
    torn: bool = False


class JournalHead:
    """The side file of one journal; every method is called under the journal's lock."""

    def __init__(self, journal: Path, error: type[DpstreamError]) -> None:
        self.path, self._error = journal.with_name(journal.name + ".head"), error

    def read(self) -> Mark | None:
        """The newest end that was noted; None if there is no such file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            known = self._slots(descriptor)
        finally:
            os.close(descriptor)
        newest = max(mark for mark in known if mark is not None)
        return newest._replace(torn=None in known)

    def begin(self, offset: int = 0, tag: str = NO_TAG) -> None:
        """Write a new file, in place of any other."""
        slot = _slot(offset, tag).ljust(_PAGE - 1) + b"\n"
        replace(self.path, slot, slot)

    def move(self, offset: int, tag: str) -> None:
        """Note a new end, durably."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._error(
                f"{self.path} was removed while it was in use; restore it, or see `dpstream ledger "
                "repair`"
            ) from None
        try:
            known = [(-1, "") if mark is None else mark[:2] for mark in self._slots(descriptor)]
            os.pwrite(descriptor, _slot(offset, tag), _PAGE * known.index(min(known)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _slots(self, descriptor: int) -> list[Mark | None]:
        known = [_mark(os.pread(descriptor, _SIZE, _PAGE * number)) for number in range(2)]
        if known == [None, None]:
            raise self._error(
                f"{self.path} is damaged: neither of its two slots matches its checksum; restore "
                "it, or see `dpstream ledger repair`"
            )
        return known


def _slot(offset: int, tag: str) -> bytes:
    facts = f"{offset:020d} {tag} "
    return (facts + _checksum(facts) + "\n").encode()


def _mark(slot: bytes) -> Mark | None:
    facts, found = slot[:38].decode("ascii", "replace"), slot[38:].decode("ascii", "replace")
    return Mark(int(facts[:20]), facts[21:37]) if found == _checksum(facts) + "\n" else None


def _checksum(facts: str) -> str:
    return hashlib.blake2b(facts.encode(), digest_size=8, person=b"journal head").hexdigest()


_SIZE = len(_slot(0, NO_TAG))
