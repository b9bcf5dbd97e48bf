"""Partitions that a query has read to their ends, in a log beside its snapshots.

A live directory may come to have a hundred thousand files. What was read of each is kept for as
long as the file may be there, but written once: a snapshot holds the positions of files that are
being read, and says how far the log was its own.

finished-<number>.log   records of what was finished, and of what is gone since; a run that goes on
                        from an older snapshot writes over the records that came after it

A log of which little is left is written anew under the next number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpstream.errors import StateError
from dpstream.privacy.state.journal import Journal, Record
from dpstream.privacy.state.run_directory import ANEW
from dpstream.records import EmptyingSource, Position, Source, StampedPartitions

Mark = tuple[int, int]
"""A log and how many of its records: what was finished by then."""
_SMALL = 1000  # names; a log with fewer is left alone
_WASTE = 4


class FinishedLog:
    """What a query has finished: `ends` has the last position of each partition.

    Of a source that removes what is finished, the entry of a removed partition goes too.
    """

    def __init__(self, folder: Path | None = None, run: bytes = b"", mark: Any = None) -> None:
        self.ends: dict[str, Position] = {}
        self._stamps: dict[str, Any] = {}  # kept where finished partitions are removed
        self._marks: dict[str, Mark] = {}  # after which an entry with a stamp is durable
        self._folder, self._run = folder, run.hex()
        self._mark: Mark = (1, 0) if mark is None else (mark[0], mark[1])
        self._done: list[Any] = []
        self._gone: list[str] = []
        self._names, self._removes = 0, False  # names in the records
        self._journal: Journal | None = None
        if folder is not None and mark is not None and mark[1]:
            self._load(folder, self._mark)

    def add(self, partition: str, end: Position, stamp: Any = None) -> None:
        """A partition was read to its end."""
        self.ends[partition] = end
        if self._removes:
            self._stamps[partition], self._marks[partition] = stamp, self._mark
        if self._folder is not None:
            self._done.append([partition, end, stamp])

    def forget(self, partition: str) -> None:
        """It is gone, and its name is free."""
        if partition in self.ends:
            self._drop(partition)
            self._gone.append(partition)

    def resume(self, source: Source) -> None:
        """Tell the source what is finished, and forget what is not there any more."""
        self._removes = isinstance(source, EmptyingSource)
        if isinstance(source, StampedPartitions):
            for name, stamp in [*self._stamps.items()]:
                if not source.resume(name, self.ends[name], stamp):
                    self.forget(name)
        if not self._removes:
            self._stamps, self._marks = {}, {}

    def save(self) -> Mark:
        """Make everything durable; how far the log is now."""
        if self._folder is None or not (self._done or self._gone):
            return self._mark
        number, after = self._mark
        if self._names > _SMALL + _WASTE * len(self.ends):
            self.close()
            number, after, self._names = number + 1, 0, 0
            stamps = self._stamps.get
            self._gone, self._done = [], [[*each, stamps(each[0])] for each in self.ends.items()]
        if self._journal is None:
            self._open(self._folder, number)
        assert self._journal is not None
        self._journal.append([{"after": after, "gone": self._gone, "done": self._done}])
        self._names += len(self._gone) + len(self._done)
        self._done, self._gone, self._mark = [], [], (number, after + 1)
        return self._mark

    def close(self) -> None:
        """Release the log."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def before(self, mark: Mark) -> dict[str, Position]:
        """What may be removed once nobody goes back beyond a mark; older logs go."""
        if self._folder is not None:
            for number in range(mark[0] - 1, 0, -1):
                path = self._path(self._folder, number)
                if not path.exists():
                    break
                path.unlink()
        marks, ends = dict(self._marks), self.ends  # a snapshot's writer asks
        return {name: ends[name] for name, at in marks.items() if at < mark and name in ends}

    def _drop(self, partition: str) -> None:
        self.ends.pop(partition, None)
        self._stamps.pop(partition, None)
        self._marks.pop(partition, None)

    def _path(self, folder: Path, number: int) -> Path:
        return folder / f"finished-{number}.log"

    def _load(self, folder: Path, mark: Mark) -> None:
        path = self._path(folder, mark[0])
        lost = f"{path} has lost its end, or is gone; it says which files were read: restore it"
        if not path.exists():
            raise StateError(f"{lost}, or {ANEW}")
        records = self._open(folder, mark[0])
        if len(records) < mark[1]:
            self.close()
            raise StateError(f"{lost}, or {ANEW}")
        for at, record in enumerate(records[: mark[1]]):
            for name in record["gone"]:
                self._drop(name)
            for name, end, stamp in record["done"]:
                self.ends[name] = end
                self._stamps[name], self._marks[name] = stamp, (mark[0], at)
            self._names += len(record["gone"]) + len(record["done"])

    def _open(self, folder: Path, number: int) -> list[Record]:
        """Open a log, or make it; its records, without those that were written over."""
        journal = self._journal = Journal(self._path(folder, number), kind="finished")
        journal.acquire(wait=False)
        records: list[Record] = []
        for record in journal.read_new():
            if "run" not in record:
                del records[record["after"] :]
                records.append(record)
            elif record["run"] != self._run:
                self.close()
                raise StateError(
                    f"{journal.path} belongs to another run; restore its own, or {ANEW}"
                )
        if not records:
            journal.append([{"run": self._run}])
        return records
