"""An append-only file of JSON records that survives kill -9 and several writers.

One line a record: `tag json`. The tag is a BLAKE2 hash of the record and of the tag before it, so
an altered or missing line in the middle is found. A record whose tag verifies is a record, with or
without its newline. The beginning of one at the end (a kill inside a write) was never relied on and
is cut off by the next writer; anything else that does not verify is refused.

What is missing at the end leaves a valid file: where that matters, the file has a head beside it.
`<journal>.head` has two slots, each on a page of its own: where the journal ended, the tag of its
last record, and a checksum. A new end is written over the older slot, in place and synced, after
the record is durable. So the journal is never behind its head, and ahead of it by one append at
most: a kill between the two syncs. A slot that a kill has torn belongs to an append that is whole.

A journal that has grown long is compacted: its first line then holds, in place of the oldest
records, the ones that they fold to. The rest stays as it is, each record with its tag and with the
offset that it had (`offset` below is always that one), so the head, and whoever has noted an end,
need not know. The new file takes the old one's name under the lock and lists the old one's
identity; who has the old one open goes over to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.errors import DpstreamError, NewBook, StateError
from dpstream.privacy.state.durable_files import (
    file_identity,
    make_directory,
    remove_leftovers,
    replace,
    sync_directory,
    write_all,
    write_hidden,
)

Record = dict[str, Any]
Fold = Callable[[list[Record], int], tuple[list[Record], int]]
"""Of all records, the first so many of which are folded ones, and what the oldest of them fold to:
records, and how many they stand for."""

FORMAT = 1
COMPACTED = 2
LARGE = 1 << 20  # bytes of a file that a compaction may be worth
_PAGE = 4096  # a torn write of one slot leaves the other alone
NO_TAG = "0" * 16  # before the first record


class _Process:
    """Which process this is, without a system call: every step of every run asks.

    A forked child that went on with its parent's run would draw its parent's noise again.
    """

    def __init__(self) -> None:
        self.look()
        os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Ask the system."""
        self.id = os.getpid()


this_process = _Process()


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a journal that may be removed at any moment, and is never made here.

    False: another process has it, or has put another file in its place. A journal that is not there
    is nobody's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.stat(path), os.fstat(fd))
        except (BlockingIOError, FileNotFoundError):
            free = False
        yield free
    finally:
        os.close(fd)


class JournalEnd(NamedTuple):
    """An end that the journal had; `torn`: a later one was noted, and cannot be read."""

    offset: int
    tag: str
    torn: bool = False


class Journal:
    """Records of one `kind`, which the first line of the file names.

    Every method but `locked` must be called inside `with journal.locked()`. With `head`, the end
    of the file is kept beside it too, and one record is appended at a time.
    """

    _fd = -1

    def __init__(
        self,
        path: Path,
        *,
        kind: str,
        error: type[DpstreamError] = StateError,
        head: bool = False,
    ) -> None:
        self.path, self.kind, self._error = Path(path), kind, error
        make_directory(self.path.parent)
        self.place = Path(os.path.abspath(self.path))  # the same after a change of directory
        self._fd, new = _open_or_create(self.place)
        self._thread_lock, self._depth = threading.RLock(), 0
        self._process = this_process.id
        self._offset, self._tag = 0, NO_TAG
        self._base: JournalEnd | None = None  # where what was folded has ended
        self._shift = 0  # how much longer the file would be with it
        self._was: list[str] = []
        self._real = Path(os.path.realpath(self.place))
        self._head = _Head(self._real, error) if head else None
        if new and self._head is not None:
            self._begin_anew(self._head)

    @classmethod
    def write_new(
        cls, path: Path, records: Iterable[Record], *, kind: str, error: type[DpstreamError]
    ) -> None:
        """Make a file with a head that holds these records: whole, or not at all."""
        data, tag = to_lines(NO_TAG, [{"dpstream": kind, "format": FORMAT}, *records])
        cls._put(path, data, JournalEnd(len(data), tag), error)

    @classmethod
    def write_copy(
        cls, path: Path, lines: list[tuple[int, str]], record: Record, *, error: type[DpstreamError]
    ) -> None:
        """Make a file with a head of another journal's `read_lines`, and a record behind them.

        Offsets and tags stay, so whoever has noted an end of the other one finds it here.
        """
        start, last = lines[-1]
        end = start + len(last.encode()) + 1, last[:16]
        if start == 0:  # a header alone
            end = tuple(json.loads(last[17:]).get("base", end))
        data, tag = to_lines(end[1], [record])
        whole = "".join(f"{line}\n" for _, line in lines).encode() + data
        cls._put(path, whole, JournalEnd(end[0] + len(data), tag), error)

    @classmethod
    def _put(cls, path: Path, data: bytes, end: JournalEnd, error: type[DpstreamError]) -> None:
        temporary = write_hidden(path, data)
        try:
            head = _Head(Path(os.path.realpath(path)), error)
            head.begin(end.offset, end.tag)
            os.link(temporary, path)
        except FileExistsError:
            raise error(f"{path} exists already; it is never overwritten") from None
        finally:
            temporary.unlink()
        sync_directory(path.parent)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file against other processes and threads."""
        with self._thread_lock:
            if not self._depth:
                self.acquire()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def acquire(self, *, wait: bool = True) -> None:
        """Take the file's lock; without `wait`, refuse if another process has it."""
        if this_process.id != self._process:
            raise self._error(f"{self.path} was opened before a fork; open it in each process")
        if self._fd < 0:
            raise self._error(f"{self.path} was closed; open it again")
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise self._error(
                    f"{self.path} is in use by another process or runner; stop or close that "
                    "first, or give this one its own state directory"
                ) from None
            try:
                if os.path.samestat(os.stat(self.place), os.fstat(self._fd)):
                    return
                self._follow()
            except FileNotFoundError:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                raise self._replaced() from None
            except BaseException:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                raise

    def _follow(self) -> None:
        """Go over to the file that a compaction has put in this one's place.

        What was read of this one stays read, unless it was folded since: then nothing was.
        """
        fd = os.open(self.place, os.O_RDWR | os.O_CLOEXEC)
        try:
            with os.fdopen(os.dup(fd), "rb") as file:
                line = file.readline()
            header = json.loads(line[17:]) if verifies(NO_TAG, line[:-1]) else {}
            if file_identity(self._fd) not in _predecessors(header, fd):
                raise self._replaced()
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self._take_header(header, len(line))
        assert self._base is not None
        if self._offset < self._base.offset:
            self.rewind()

    def _replaced(self) -> DpstreamError:
        return self._error(f"{self.path} was replaced or removed while in use; restore it")

    def read_new(self) -> list[Record]:
        """Records appended since the last call, by anyone; the header is checked and left out.

        A record without its newline is a record. Less than a record at the end is left for the
        next writer to cut, if it can only be a kill inside an append that nobody relied on.
        """
        size = self._end()
        if size == self._offset > 0:
            return []
        if size < self._offset:
            raise self._error(f"{self.path} became shorter while it was in use; restore it")
        noted = self._noted_end(size)
        records, ends, torn = self._parse(size)
        if noted is not None:
            self._compare(noted, ends, torn)
        if not torn and self._end() < ends[-1][0]:
            os.pwrite(self._fd, b"\n", self.size)  # it was lost
            os.fsync(self._fd)
        self._offset, self._tag = ends[-1]
        if noted is not None and noted.offset < self._offset:  # a kill came between record and head
            assert self._head is not None
            os.fsync(self._fd)
            self._head.move(self._offset, self._tag)
        return records

    def append(self, records: Iterable[Record]) -> None:
        """Write records after everything read so far and return once they are durable."""
        new_file = self._offset == 0
        batch: list[Record] = [*records]
        assert self._head is None or len(batch) == 1, "a journal with a head takes one at a time"
        if new_file:
            batch.insert(0, {"dpstream": self.kind, "format": FORMAT})
            if self._head is not None and self._head.read() is None:
                self._head.begin()  # before the file: one that holds anything always has a head
        tail = self._read(self._end())
        if tail and (b"\n" in tail or _is_record(self._tag, tail)):
            raise self._error(f"{self.path} grew since it was read; read it before appending")
        data, tag = to_lines(self._tag, batch)
        place, written = self._offset - self._shift, 0
        if tail:
            os.ftruncate(self._fd, place)  # it is torn
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], place + written)
        os.fsync(self._fd)
        if new_file:
            sync_directory(self.place.parent)
        if self._head is not None:
            self._head.move(self._offset + len(data), tag)
        self._offset, self._tag = self._offset + len(data), tag

    def read_all(self) -> list[Record]:
        """Every record from the first on; what `read_new` has read stays read."""
        kept = self._offset, self._tag
        self.rewind()
        try:
            return self.read_new()
        finally:
            self._offset, self._tag = kept

    def read_lines(self) -> list[tuple[int, str]]:
        """Every line as it stands, with the offset at which it begins."""
        kept = self._offset, self._tag
        self.rewind()
        try:
            *_, ends, _ = self._parse(self._end())
            lines = self._read(ends[-1][0]).decode().splitlines()
            return [(0, lines[0]), *zip((end for end, _ in ends[1:]), lines[1:], strict=False)]
        finally:
            self._offset, self._tag = kept

    def accept(self, record: Callable[[JournalEnd | None], Record]) -> None:
        """Take the file as it is, whatever its head says; `record` notes that, with the old head.

        Only a record that was torn at the end is cut; one that does not match its tag is refused.
        """
        assert self._head is not None
        try:
            noted = self._head.read()
        except self._error:
            noted = None
        self.rewind()
        _, ends, _ = self._parse(self._end())
        offset, tag = ends[-1]
        if not offset:
            raise self._error(f"{self.path} is empty: there is nothing to go on with; restore it")
        data, tag = to_lines(tag, [record(noted)])
        os.ftruncate(self._fd, offset - 1 - self._shift)
        os.pwrite(self._fd, b"\n" + data, offset - 1 - self._shift)
        os.fsync(self._fd)
        self._head.begin(offset + len(data), tag)

    def compact(self, fold: Fold) -> None:
        """Put a shorter file in this one's place; only a process of the file's owner does it.

        Everything was read before. Records that `fold` returns lead, read in place of the oldest
        ones, to the same.
        """
        if os.fstat(self._fd).st_uid != os.geteuid():
            return
        remove_leftovers(self._real.parent, self._real.name)  # of a kill in here
        kept = self._offset, self._tag
        try:
            self.rewind()
            records, ends, _ = self._parse(self._end())
            folded_before = len(records) - (len(ends) - 2)
            folded, count = fold(records, folded_before)
            if count <= folded_before:
                return
            base = ends[1 + count - folded_before]
            self._offset = base[0]
            tail = self._read(kept[0])
        finally:
            self._offset, self._tag = kept
        header = {"dpstream": self.kind, "format": COMPACTED, "base": base, "folded": folded}
        try:
            self._go_over(header | {"was": [*self._was, self.identity()]}, tail)
        except OSError as problem:
            warnings.warn(
                f"{self.path} has grown to {self.size} bytes and cannot be compacted: "
                f"{problem.strerror or problem}; it is used as it is, and goes on growing",
                RuntimeWarning,
                stacklevel=3,
            )

    def _go_over(self, header: Record, tail: bytes) -> None:
        """Put a file with this first line and this rest in the place of this one, and use it."""
        temporary = write_hidden(self._real)
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # who finds it waits
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            header["identity"] = file_identity(fd)
            line, _ = to_lines(NO_TAG, [header])
            write_all(fd, line)
            write_all(fd, tail)
            os.fsync(fd)
            os.replace(temporary, self._real)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        self._take_header(header, len(line))
        sync_directory(self._real.parent)

    def _take_header(self, header: Record, size: int) -> None:
        """What the first line, of so many bytes, says about the rest."""
        self._base, self._shift = None, 0
        self._was = _predecessors(header, self._fd)
        if "base" in header:
            self._base = JournalEnd(*header["base"])
            self._shift = self._base.offset - size

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    @property
    def is_long(self) -> bool:
        """May a compaction be worth its while?"""
        return self.size >= LARGE

    def _end(self) -> int:
        """The offset where the file ends."""
        return self.size + self._shift

    def rewind(self) -> None:
        """Forget what was read, so that `read_new` starts from the first record again."""
        self._offset, self._tag = 0, NO_TAG

    def head(self) -> tuple[int, str]:
        """How far the file was read or written, and the tag of its last record."""
        return self._offset, self._tag

    def has(self, head: tuple[int, str]) -> bool:
        """Does the file begin with what it held at `head`? Not if it was rolled back or swapped.

        Of what was folded since, this cannot be seen: it may have.
        """
        offset, tag = head
        if self._base is not None and offset <= self._base.offset:
            return offset < self._base.offset or tag == self._base.tag
        if offset == 0 or self._end() < offset:
            return offset == 0
        size, begin, last, end = 0, -1, b"", offset - self._shift
        while begin < 0 and size < end:  # until the last record begins in what is read
            size = min(max(2 * size, 1 << 12), end)
            last = os.pread(self._fd, size, end - size)
            begin = last.rfind(b"\n", 0, len(last) - 1)
        return last[begin + 1 : begin + 17] == tag.encode()

    def identity(self) -> str:
        """Which file this is on this machine: a copy has another identity."""
        return file_identity(self._fd)

    @property
    def identities(self) -> list[str]:
        """That of this file, and of those that compactions have put it in the place of."""
        return [*self._was, self.identity()]

    def replaces(self, identity: str) -> bool:
        """Is this the file with that identity, or what compactions have put in its place?"""
        return identity in self.identities

    def close(self) -> None:
        """Release the file and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Nobody has it any more, and nobody has closed it."""
        self.close()

    def _read(self, size: int) -> bytes:
        """Everything from the offset to `size`; one call may return less (2 GiB at most)."""
        shift = self._shift if self._offset else 0
        parts, at, size = [], self._offset - shift, size - self._shift
        while at < size and (part := os.pread(self._fd, size - at, at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _begin_anew(self, head: _Head) -> None:
        """The file was not there: say so if its head says that it has been."""
        with self.locked():
            noted = head.read()
            if noted is None or not noted.offset or self.size:
                return
            warnings.warn(
                f"{self.path} was removed (it held {noted.offset} bytes, {head.path.name} says): a "
                "new one begins, and what the old one held is not counted; if that was not meant, "
                "restore it",
                NewBook,
                stacklevel=5,
            )
            head.begin()

    def _noted_end(self, size: int) -> JournalEnd | None:
        """Where the head says that the file has ended, at least; None without a head."""
        if self._head is None:
            return None
        noted = self._head.read()
        if noted is None and size:
            raise self._error(
                f"{self._head.path.name}, which says how far {self.path} had come, is missing: "
                f"records may be lost from its end; restore it (a copy of a {self.kind} takes both "
                f"files along), or take the {self.kind} as it is: dpstream ledger repair "
                f"{self.path} --because TEXT"
            )
        if noted is not None and noted.offset < self._offset:
            raise self._error(f"{self._head.path} went back while it was in use; restore it")
        return noted

    def _parse(self, size: int) -> tuple[list[Record], list[tuple[int, str]], bool]:
        """Records from the offset on, where each of them ends (the offset first), and a torn end.

        The last record ends where its newline is, or was.
        """
        *lines, tail = self._read(size).split(b"\n")
        header = to_lines(NO_TAG, [{"dpstream": self.kind, "format": FORMAT}])[0]
        if self._offset == 0 and not lines and not header.startswith(tail):
            raise self._damaged(0)  # cutting this as a torn line would destroy somebody's file
        ends, records = [(self._offset, self._tag)], list[Record]()
        for number, line in enumerate([*lines, tail]):
            offset, tag = ends[-1]
            if number == len(lines) and not verifies(tag, tail):
                break
            if not verifies(tag, line):
                raise self._damaged(offset)
            record: Record = json.loads(line[17:])
            if offset:
                records.append(record)
                ends.append((offset + len(line) + 1, line[:16].decode()))
                continue
            check_header(record, self.path, self.kind, self._error)
            self._take_header(record, len(line) + 1)
            records += record.get("folded", [])
            ends.append(tuple(record.get("base", (len(line) + 1, line[:16].decode()))))
        else:
            return records, ends, False
        if _is_record(ends[-1][1], tail):
            raise self._damaged(ends[-1][0])
        return records, ends, bool(tail)

    def _compare(self, noted: JournalEnd, ends: list[tuple[int, str]], torn: bool) -> None:
        """The file holds what its head says, and beyond it at most the append that was killed."""
        assert self._head is not None
        last, remedy = ends[-1][0], f"dpstream ledger repair {self.path} --because TEXT"
        if last < noted.offset:
            raise self._error(
                f"{self.path} is shorter than it was: it ends after {last} bytes, and "
                f"{self._head.path.name} says that it held {noted.offset}; records are lost; "
                f"restore the file, or take it as it is, without them: {remedy}"
            )
        beyond = [end for end in ends if end[0] >= noted.offset]
        most = 2 if noted.offset == 0 else 1  # the first append also writes the header
        ahead = len(beyond) - 1
        if (
            beyond[0] != (noted.offset, noted.tag)
            or ahead > most
            or (torn and ahead == most)
            or (noted.torn and (torn or ahead != most))
        ):
            raise self._error(
                f"{self._head.path} is damaged, or does not belong to this state of {self.path}: "
                "one of the two was exchanged, and records may be lost; restore both, or take the "
                f"{self.kind} as it is: {remedy}"
            )

    def _damaged(self, offset: int) -> DpstreamError:
        if not offset:
            return self._error(
                f"{self.path} is not a dpstream {self.kind} file, or its first line was "
                "altered; name another file or restore this one"
            )
        return self._error(
            f"{self.path} is damaged after byte {offset}: a record does not match its "
            "checksum; restore the file from a backup"
        )


class _Head:
    """The side file of one journal; every method is called under the journal's lock."""

    def __init__(self, journal: Path, error: type[DpstreamError]) -> None:
        self.path, self._error = journal.with_name(journal.name + ".head"), error

    def read(self) -> JournalEnd | None:
        """The newest end that was noted; None if there is no such file."""
        try:
            with self.path.open("rb") as file:
                known = self._slots(file.fileno())
        except FileNotFoundError:
            return None
        newest = max(end for end in known if end is not None)
        return newest._replace(torn=None in known)

    def begin(self, offset: int = 0, tag: str = NO_TAG) -> None:
        """Write a new file, in place of any other."""
        slot = _slot(offset, tag).ljust(_PAGE - 1) + b"\n"
        replace(self.path, slot, slot)

    def move(self, offset: int, tag: str) -> None:
        """Note a new end, durably."""
        try:
            with self.path.open("r+b", buffering=0) as file:
                descriptor = file.fileno()
                known = [(-1, "") if end is None else end[:2] for end in self._slots(descriptor)]
                os.pwrite(descriptor, _slot(offset, tag), _PAGE * known.index(min(known)))
                os.fsync(descriptor)
        except FileNotFoundError:
            raise self._error(
                f"{self.path} was removed while it was in use; restore it, or see `dpstream ledger "
                "repair`"
            ) from None

    def _slots(self, descriptor: int) -> list[JournalEnd | None]:
        known = [_read_slot(os.pread(descriptor, _SLOT, _PAGE * number)) for number in range(2)]
        if known == [None, None]:
            raise self._error(
                f"{self.path} is damaged: neither of its two slots matches its checksum; restore "
                "it, or see `dpstream ledger repair`"
            )
        return known


def check_header(record: Record, place: object, kind: str, error: type[DpstreamError]) -> None:
    """Refuse a first record that is not one of `kind`, or of a format that is not known."""
    if record.get("dpstream") != kind:
        raise error(
            f"{place} is a dpstream {record.get('dpstream')!r} file; a {kind!r} file was expected"
        )
    if record.get("format") not in (FORMAT, COMPACTED):
        raise error(
            f"{place} has format {record.get('format')}; this version reads {FORMAT} and "
            f"{COMPACTED}; use the version of dpstream that wrote it"
        )


def _open_or_create(path: Path) -> tuple[int, bool]:
    """The file, and whether it had to be made."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), False
    except FileNotFoundError:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sync_directory(path.parent)  # who notes which file it is must find it again
        return fd, True


def _predecessors(header: Record, fd: int) -> list[str]:
    """Which files this one, by its header, was put in the place of; a copy of it was in none."""
    was: list[str] = header.get("was", [])
    return was if header.get("identity") == file_identity(fd) else []


def to_lines(tag: str, records: Iterable[Record]) -> tuple[bytes, str]:
    """Records as the lines that follow one with `tag`, and the tag of the last."""
    lines = []
    for record in records:
        body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
        tag = _tag(tag, body)
        lines.append(tag.encode() + b" " + body + b"\n")
    return b"".join(lines), tag


def verifies(previous: str, line: bytes) -> bool:
    """Does this line follow one with the tag `previous`, unaltered?"""
    tag, _, body = line.partition(b" ")
    return tag.decode("ascii", "replace") == _tag(previous, body)


def _is_record(previous: str, tail: bytes) -> bool:
    """Is this a complete record, however damaged, and not the beginning of one?"""
    if verifies(previous, tail) or verifies(previous, tail[:-1]):
        return True
    try:
        return isinstance(json.loads(tail[17:]), dict)
    except ValueError:
        return False


def _tag(previous: str, body: bytes) -> str:
    return hashlib.blake2b(previous.encode() + body, digest_size=8).hexdigest()


def _slot(offset: int, tag: str) -> bytes:
    facts = f"{offset:020d} {tag} "
    return (facts + _checksum(facts) + "\n").encode()


def _read_slot(slot: bytes) -> JournalEnd | None:
    facts, end = slot[:38].decode("ascii", "replace"), slot[38:].decode("ascii", "replace")
    return JournalEnd(int(facts[:20]), facts[21:37]) if end == _checksum(facts) + "\n" else None


def _checksum(facts: str) -> str:
    return hashlib.blake2b(facts.encode(), digest_size=8, person=b"journal head").hexdigest()


_SLOT = len(_slot(0, NO_TAG))
