"""What ledgers on servers share: the lines of a ledger file, kept elsewhere, and its sections.

Lines carry the tag of the one before, so an altered or missing one is found; a head says where they
end. A section reads the head first. What it appends is written at its end, if the head is where the
section has found it, or not at all. If the answer is lost, the store looks whether the lines are
there (done), or the head is where it was (they are sent again), or others have written: then the
section is done anew (`Overtaken`).
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dpstream.connectors.server_base import RetryPolicy, ServerAway
from dpstream.errors import LedgerError, ServerUnreachable
from dpstream.privacy.ledger.store import LedgerAddress, Overtaken
from dpstream.privacy.state.journal import (
    COMPACTED,
    FORMAT,
    LARGE,
    NO_TAG,
    Fold,
    JournalEnd,
    Record,
    check_header,
    this_process,
    to_lines,
    verifies,
)

KIND = "ledger"
_log = logging.getLogger("dpstream")
Rows = list[tuple[int, str]]
"""Lines, with the offsets at which they begin in a file."""


class LedgerEnd(NamedTuple):
    """Where the ledger ends, by its head; what is folded ends at `base`."""

    offset: int
    tag: str
    base: int


class ServerLedger(ABC):
    """The store of one ledger on a server; see `LedgerStore`."""

    _head = "the head"
    """What holds it, in words."""

    def __init__(self, place: LedgerAddress, retry: RetryPolicy) -> None:
        self.place, self._retry = place, retry
        self._thread_lock, self._depth = threading.RLock(), 0
        self._process, self._closed = this_process.id, False
        self._identity = ""
        self._offset, self._tag = 0, NO_TAG
        self._noted: LedgerEnd | None = None  # what the head said when the section began
        self._pending: Rows = []  # appended in this section

    @abstractmethod
    def _begin(self) -> LedgerEnd | None:
        """Begin a section: what the head says now, None if it is lost."""

    @abstractmethod
    def _commit(self) -> None:
        """Write what is pending at the place that the section has found, or not at all."""

    @abstractmethod
    def _leave(self) -> None:
        """End a section that writes nothing."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of what is known of the server."""

    @abstractmethod
    def _fetch(self, first: int, most: int | None = None) -> Rows:
        """The lines from an offset on, as the section sees them."""

    @abstractmethod
    def _last_before(self, offset: int) -> Rows:
        """The last line that begins before an offset, if there is one."""

    @abstractmethod
    def _put_end(self, added: tuple[int, str], new: LedgerEnd) -> None:
        """Write a line and a head, whatever the head was, in one step; the section is over."""

    @abstractmethod
    def _put_all(self, rows: Rows, new: LedgerEnd) -> None:
        """Write all lines of a ledger that has none; the section is over."""

    @abstractmethod
    def _put_folded(self, header: str, base: int) -> None:
        """Put another first line in place of all that begin before `base`; the section is over."""

    # Sections

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger against all other writers; what is appended is durable at the end."""
        with self._thread_lock:
            if not self._depth:
                self._acquire()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._release()

    def _acquire(self) -> None:
        if this_process.id != self._process:
            raise LedgerError(f"{self.place} was opened before a fork; open it in each process")
        if self._closed:
            raise LedgerError(f"{self.place} was closed; open it again")
        self._noted = self._retry.insist(self._begin)
        if self._noted is not None and self._offset < self._noted.base:
            self.rewind()  # what was read is folded since

    def _release(self) -> None:
        """Write what is pending, durably; if that cannot be done nothing counts as read."""
        try:
            if self._pending:
                self._retry.insist(self._commit)
                self._pending = []
            else:
                self._leave()
        except BaseException:
            self.rewind()
            self._drop()
            raise

    def _overtaken(self) -> Overtaken:
        self._drop()
        return Overtaken(
            f"others have written to {self.place} while this process was not connected to it; "
            "nothing was charged by it: run it again"
        )

    # Records

    def read_new(self) -> list[Record]:
        """Records appended since the last call, by anyone; checked against the head."""
        noted = self._noted
        if noted is None:
            raise LedgerError(
                f"{self.place}: {self._head}, which says how far the ledger had come, is missing: "
                f"records may be lost from its end; restore it, or {self._repair}"
            )
        if self._pending or (self._offset, self._tag) == noted[:2]:
            return []
        if noted.offset <= self._offset:
            raise LedgerError(f"{self.place} went back while it was in use; restore it")
        records, ends = self._parse(self._fetch(self._offset), self._offset, self._tag)
        if ends[-1] != noted[:2]:
            raise LedgerError(
                f"{self.place} is not what its head says: its lines end at {ends[-1][0]}, and it "
                f"held {noted.offset}; records are lost; restore it, or take it as it is, without "
                f"them: {self._repair}"
            )
        self._offset, self._tag = ends[-1]
        return records

    def read_all(self) -> list[Record]:
        """Every record from the first on, with those of this section."""
        return self._parse([*self._fetch(0), *self._pending], 0, NO_TAG)[0]

    def read_lines(self) -> Rows:
        """Every line as it stands, with the offset at which it begins."""
        return self._fetch(0)

    def append(self, records: Iterable[Record]) -> None:
        """Add records to those that the section writes at its end."""
        header = [] if self._offset else [{"dpstream": KIND, "format": FORMAT}]
        for record in [*header, *records]:
            line, tag = to_lines(self._tag, [record])
            self._pending.append((self._offset, line[:-1].decode()))
            self._offset, self._tag = self._offset + len(line), tag

    def rewind(self) -> None:
        """Forget what was read, and what this section has appended."""
        self._offset, self._tag, self._pending = 0, NO_TAG, []

    def accept(self, record: Callable[[JournalEnd | None], Record]) -> None:
        """Take the lines as they are, whatever the head says; `record` notes that."""
        self.rewind()
        rows, noted = self._fetch(0), self._noted
        if not rows:
            raise LedgerError(f"{self.place} is empty: there is nothing to go on with; restore it")
        offset, tag = self._parse(rows, 0, NO_TAG)[1][-1]
        had = None if noted is None else JournalEnd(noted.offset, noted.tag)
        line, tag = to_lines(tag, [record(had)])
        new = LedgerEnd(offset + len(line), tag, base_of(rows[0][1])[0])
        self._put_end((offset, line[:-1].decode()), new)
        self._noted = new

    def fill(self, lines: Rows, record: Record) -> None:
        """Take the lines of another ledger as they are, and `record` behind them.

        Offsets and tags stay, so whoever has noted an end of the other one finds it here. A ledger
        that holds anything is refused.
        """
        if self._noted is None or self._noted.offset or self._fetch(0):
            raise LedgerError(f"{self.place} is a ledger with records of its own; name another")
        offset, tag = self._parse(lines, 0, NO_TAG)[1][-1]
        line, tag = to_lines(tag, [record])
        new = LedgerEnd(offset + len(line), tag, base_of(lines[0][1])[0])
        self._put_all([*lines, (offset, line[:-1].decode())], new)
        self._noted = new

    def compact(self, fold: Fold) -> None:
        """Put what the oldest lines fold to into the first one; the others stay as they are."""
        try:
            records, ends = self._parse(self._fetch(0), 0, NO_TAG)
            before = len(records) - (len(ends) - 2)
            folded, count = fold(records, before)
            if count <= before:
                return
            base = ends[1 + count - before]
            header = {"dpstream": KIND, "format": COMPACTED, "base": base, "folded": folded}
            self._put_folded(to_lines(NO_TAG, [header])[0][:-1].decode(), base[0])
            assert self._noted is not None
            self._noted = self._noted._replace(base=base[0])
        except (ServerAway, ServerUnreachable) as problem:
            _log.warning("%s is not compacted now: %s", self.place, problem)

    @property
    def is_long(self) -> bool:
        """May a compaction be worth its while?"""
        return self._noted is not None and self._offset - self._noted.base >= LARGE

    def head(self) -> tuple[int, str]:
        """How far the ledger was read or written, and the tag of its last record."""
        return self._offset, self._tag

    def has(self, head: tuple[int, str]) -> bool:
        """Does the ledger begin with what it held at `head`? Not if it was rolled back."""
        offset, tag = head
        base = 0 if self._noted is None else self._noted.base
        if offset < base or offset == 0:
            return True  # of what was folded since, this cannot be seen
        if offset == base:
            return base_of(self._fetch(0, 1)[0][1]) == [offset, tag]
        last = self._last_before(offset)
        return any(begin + len(line) + 1 == offset and line[:16] == tag for begin, line in last)

    def identity(self) -> str:
        """Which ledger this is, where: a copy in another database or server is another one."""
        return self._identity

    def replaces(self, identity: str) -> bool:
        """Is this the ledger with that identity? Compactions leave it as it is."""
        return identity == self._identity

    def _parse(
        self, rows: Rows, offset: int, tag: str
    ) -> tuple[list[Record], list[tuple[int, str]]]:
        """Records of these rows, and where each of them ends (the offset first)."""
        ends, records = [(offset, tag)], list[Record]()
        for start, text in rows:
            (offset, tag), line = ends[-1], text.encode()
            if start != offset or not verifies(tag, line):
                raise LedgerError(
                    f"{self.place} is damaged after byte {offset}: a record is missing or does not "
                    "match its checksum; restore it from a backup"
                )
            record: Record = json.loads(line[17:])
            end = start + len(line) + 1, text[:16]
            if offset:
                records.append(record)
            else:
                check_header(record, self.place, KIND, LedgerError)
                records += record.get("folded", [])
                end = tuple(record.get("base", end))
            ends.append(end)
        return records, ends

    @property
    def _repair(self) -> str:
        return f"dpstream ledger repair '{self.place}' --because TEXT"


def base_of(header: str) -> list[Any]:
    """Where what is folded has ended, and its last tag, by the first line."""
    base: list[Any] = json.loads(header[17:]).get("base", [0, NO_TAG])
    return base
