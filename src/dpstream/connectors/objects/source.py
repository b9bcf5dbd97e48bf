"""Objects as a source, each a partition named by its key: those that are there, or live.

An object is fetched whole before it is read, and from then on it is a file like any other: the same
formats, limits and quarantine. It must stay as it is; one that was overwritten since it was listed,
or since it was read, is told from the old one by its e_tag.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa

from dpstream.connectors.files.size_limits import SizeLimits
from dpstream.connectors.files.source import SUFFIXES, Files, suffix
from dpstream.connectors.files.text import TextFile, empty_strings
from dpstream.connectors.files.trial import start_trials
from dpstream.connectors.objects.client import Bucket, Listed
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.connectors.storage import printable
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, UnusableFile
from dpstream.records import Batch, Columns, Position, is_quarantined

T = TypeVar("T")
POLL = 1.0
"""Seconds between two listings of a live prefix; more where a listing takes long."""
_AWAY = 0.1  # seconds that a read takes while the store is away
_SHARE = 20  # of a listing's time: so many times as long is the pause after it
_MOST_COPIES, _MOST_BYTES = 32, 4 << 30  # that are on this machine at a time
_MAGIC = re.compile(r"[*?[]")
_LOG = logging.getLogger("dpstream.sources")


def from_options(options: ServerOptions, *, growing: bool = False, on_damage: str = "stop") -> Any:
    """The source of s3://BUCKET/PREFIX/, s3://BUCKET/logs/*.parquet or s3://BUCKET/KEY."""
    return (LiveObjects if growing else Objects)(options, on_damage=on_damage)


class Objects(Files):
    """The objects that a prefix, a glob or a key names now, in the order of their keys."""

    def __init__(self, options: ServerOptions, *, on_damage: str) -> None:
        names = [each.name for each in fields(SizeLimits)]
        limits = {name: int(options.number(name, 0)) for name in names if name in options.names}
        super().__init__([], on_damage=on_damage, limits=SizeLimits.of(limits))
        self._bucket, self._retry = Bucket(options), options.retry_policy()
        self._prefix, self._wanted = _pattern(self._bucket)
        self._known: dict[str, Listed] = {}  # and what was fetched, if it was not listed yet
        self._place = TemporaryDirectory(prefix="dpstream-objects-")
        self._begin(options)

    def _begin(self, options: ServerOptions) -> None:
        """Take what is there."""
        for one in self._first_look():
            self._known[one.key] = one
        if not self._known and suffix(Path(self._prefix)) and not self._prefix.endswith("/"):
            raise InvalidInput(
                f"there is no object {self._bucket.uri(self._prefix)}; mend its name, or name a "
                f"prefix, such as {self._bucket.scheme}://{self._bucket.name}/logs/"
            )
        if not self._known:
            raise InvalidInput(
                f"{self._bucket.where} names no object that ends in {', '.join(SUFFIXES)}"
            )

    def _first_look(self) -> list[Listed]:
        """The objects that are named; a store that does not answer is an error at once."""
        try:
            found = self._matching()
        except ServerAway as problem:
            raise unreachable(self._bucket.where, problem) from None
        formats = sorted({str(suffix(Path(one.key))).removesuffix(".gz") for one in found})
        if len(formats) > 1:
            raise InvalidInput(
                f"{self._bucket.where} has objects of several formats ({', '.join(formats)}); name "
                f"one of them, as in {self._bucket.uri(self._prefix)}*{formats[0]}"
            )
        if self.quarantines and formats == [".parquet"]:
            start_trials()
        return found

    def _matching(self) -> list[Listed]:
        return [one for one in self._bucket.find(self._prefix) if self._wanted(one.key)]

    def partitions(self) -> list[str]:
        """The keys, in order."""
        return list(self._known)

    def columns(self, partition: str) -> dict[str, pa.DataType] | None:
        """The types of a Parquet file; None for text."""
        return self._of_copy(partition, lambda: super(Objects, self).columns(partition))

    def check(self, partition: str, columns: Columns, *, whole: bool = False) -> Position:
        """None if these columns can be read; else the position that says that it is quarantined."""
        work = super().check
        return self._of_copy(partition, lambda: work(partition, columns, whole=whole))

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """One row group or block; while the store is away, it is waited for."""
        work = super().read
        if is_quarantined(position) or is_quarantined(until):
            return work(partition, position, columns=columns, until=until)
        return self._of_copy(
            partition, lambda: work(partition, position, columns=columns, until=until)
        )

    def chunk_ranges(self, partition: str, column: str) -> list[tuple[Position, int, int]] | None:
        """(position, least, largest) of a column of instants for every chunk, if the file tells."""
        work = super().chunk_ranges
        return self._of_copy(partition, lambda: work(partition, column))

    def row_estimate(self, partition: str) -> int | None:
        """By its size: nothing is fetched for it."""
        return self._known[partition].size // 64

    def reader(self) -> Objects:
        """The same objects, with copies of its own."""
        other = copy(self)
        other._open, other._paths = type(self._open)(), {}
        other._place = TemporaryDirectory(prefix="dpstream-objects-")
        return other

    def close(self) -> None:
        """Close and remove every copy."""
        super().close()
        self._paths.clear()
        self._place.cleanup()

    def _read(self, partition: str, position: Position, columns: Columns, until: Position) -> Batch:
        """One row group or block, of an object that is as long as what was read of it."""
        path = self._paths[partition]
        for place in (position, until):
            if isinstance(place, int) and path.suffix != ".gz" and place > path.stat().st_size:
                raise InvalidInput(
                    f"{path} has no byte {place}; it is not the object that was read before: put "
                    "that one back"
                )
        return super()._read(partition, position, columns, until)

    def _shown_name(self, partition: str) -> str:
        """The object, wherever its copy is."""
        return self._bucket.uri(partition)

    def _of_copy(self, partition: str, work: Callable[[], T]) -> T:
        """Do some work on an object's copy; errors name the object."""
        path = self._paths.get(partition) or self._retry.insist(lambda: self._fetch(partition))
        try:
            return work()
        except (UnusableFile, InvalidInput) as problem:
            words = str(problem).replace(str(path), self._bucket.uri(partition))
            raise type(problem)(words) from problem

    def _quarantine(self, partition: str, problem: UnusableFile, after: Position) -> Position:
        """The same, with a reason that is the same wherever the copy is."""
        copied, uri = str(self._paths[partition]), self._bucket.uri(partition)
        named = UnusableFile(str(problem).replace(copied, uri))
        return super()._quarantine(partition, named, after)

    def _fetch(self, partition: str, *, fresh: bool = False) -> Path:
        """Copy an object, which must be the one that was listed, or is read for the first time."""
        listed = self._known.get(partition)
        size = 0 if listed is None else listed.size
        while self._paths and (
            len(self._paths) >= _MOST_COPIES or size + sum(self._sizes()) > _MOST_BYTES
        ):
            self._drop(next(iter(self._paths)))
        number = time.monotonic_ns()
        path = Path(self._place.name, f"{number}{suffix(Path(partition.rpartition('/')[2]))}")
        found = self._bucket.fetch(partition, path)
        if found is None:
            raise RowsLost(
                f"{self._bucket.uri(partition)} was read before but is gone; put it back, and keep "
                "objects until the stream has ended or no state needs them any more"
            )
        if listed is not None and not fresh and found.tag != listed.tag:
            raise RowsLost(
                f"{self._bucket.uri(partition)} was overwritten since it was listed; objects must "
                "stay as they are: write new rows to a new key"
            )
        self._known[partition], self._paths[partition] = found, path
        return path

    def _sizes(self) -> list[int]:
        return [self._known[partition].size for partition in self._paths]

    def _drop(self, partition: str) -> None:
        """Keep an object's copy no longer."""
        if partition in self._open:
            self._open.pop(partition).close()
        path = self._paths.pop(partition, None)
        if path is not None:
            path.unlink(missing_ok=True)


class LiveObjects(Objects):
    """A prefix under which objects appear while the stream runs; notifications are not needed.

    A store shows an object whole or not at all. New ones come after those already known, in the
    order of their keys. One that is overwritten after it was read is not read again, which is said
    once, in the log `dpstream.sources`.
    """

    bounded = False
    partitions_end = True  # an object is complete when it comes

    def _begin(self, options: ServerOptions) -> None:
        """Look whether the prefix can be listed; nothing need be there yet."""
        if suffix(Path(self._prefix)) and not self._prefix.endswith("/"):
            raise InvalidInput(
                f"{self._bucket.where} is one object, and live reads whole objects as they come: "
                "name a prefix, such as s3://BUCKET/logs/; without live it is read once"
            )
        self._poll = options.number("poll", POLL)
        self._listed, self._look_at = list[str](), 0.0
        self._seen: set[str] = set()
        self._read_to_end: dict[str, str] = {}  # the tags of what was read
        self._ends: dict[str, Position] = {}
        self._told: set[str] = set()
        self._take(self._first_look())

    def partitions(self) -> list[str]:
        """The keys seen so far; newer ones behind. While the store is away, those."""
        now = time.monotonic()
        if now < self._look_at or self._retry.too_early:
            return self._listed
        try:
            found = self._matching()
        except ServerAway as problem:
            self._retry.report_failure(str(problem))
            return self._listed
        self._retry.report_success()
        self._take(found)
        after = time.monotonic()
        if self._poll:  # else at every look
            self._look_at = after + max(self._poll, _SHARE * (after - now))
        return self._listed

    def _take(self, found: list[Listed]) -> None:
        """Add what is new; say what has changed."""
        new = [one for one in found if one.key not in self._seen]
        for one in found:
            before = self._read_to_end.get(one.key, one.tag)
            if before != one.tag and one.key not in self._told:
                self._told.add(one.key)
                _LOG.warning(
                    "%s was overwritten after it was read: what was added or changed is not "
                    "counted; write new rows to a new key",
                    printable(self._bucket.uri(one.key)),
                )
        for one in new:
            self._known.setdefault(one.key, one)
            self._seen.add(one.key)
        if new:
            self._listed = [*self._listed, *(one.key for one in new)]
            if self.quarantines and any(one.key.endswith(".parquet") for one in new):
                start_trials()

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
    ) -> Batch:
        """One row group or block; no rows while the store is away."""
        if position is not None and position == self._ends.get(partition) and until is None:
            return Batch(table=empty_strings(columns), position=position, done=True)
        place = self._paths.get(partition)
        if place is None and not (is_quarantined(position) or is_quarantined(until)):
            away = self._retry.too_early
            try:
                if not away:
                    self._fetch(partition, fresh=position is None and until is None)
                    self._retry.report_success()
            except ServerAway as problem:
                self._retry.report_failure(str(problem))
                away = True
            if away:
                time.sleep(_AWAY)
                # not done: the object is there, and its rows will come
                return Batch(table=empty_strings(columns), position=position, done=False)
        batch = super().read(partition, position, columns=columns, until=until)
        if batch.done:
            self._drop(partition)
        if batch.done and until is None:
            self._read_to_end[partition] = self._known[partition].tag
            self._ends[partition] = batch.position
        return batch

    def _read(self, partition: str, position: Position, columns: Columns, until: Position) -> Batch:
        """One row group or block; before the first, it is known that all can be read."""
        batch = super()._read(partition, position, columns, until)
        if position is None and not batch.done and until is None:
            reader = self._reader(partition)
            if isinstance(reader, TextFile):
                reader.read_through()
        return batch

    def stamp(self, partition: str) -> Any:
        """Which content the object had when it was read."""
        return self._read_to_end.get(partition, "")

    def resume(self, partition: str, position: Position, stamp: Any) -> bool:
        """Look from now on whether an object that a query has finished stays as it was."""
        if is_quarantined(position):
            self._marks[partition] = position
        else:
            self._read_to_end.setdefault(partition, stamp)
        return True


def _pattern(bucket: Bucket) -> tuple[str, Callable[[str], bool]]:
    """What to list, and which of it is meant: a key, a prefix or a glob."""
    path = bucket.path
    prefix = _MAGIC.split(path)[0]
    if not _MAGIC.search(path) and not path.endswith("/") and suffix(Path(path)):
        return path, lambda key: key == path
    if not _MAGIC.search(path):
        prefix = path if not path or path.endswith("/") else f"{path}/"
        return prefix, lambda key: _is_data(key[len(prefix) :])
    try:
        glob = re.compile(_as_expression(path))
    except re.error as problem:
        raise InvalidParameter(f"{bucket.where} is no pattern: {problem}") from None
    return prefix, lambda key: glob.fullmatch(key) is not None and _is_data(key.rpartition("/")[2])


def _is_data(name: str) -> bool:
    """Has it a known suffix, and no name that is set apart?"""
    apart = any(part.startswith((".", "_")) for part in name.split("/"))
    return not apart and suffix(Path(name)) is not None


def _as_expression(glob: str) -> str:
    r"""A glob as a regular expression: `*` and `?` stay within a folder, `**` does not.

    >>> _as_expression("logs/**/[ab]?.csv")
    'logs/(?:.*/)?[ab][^/]\\.csv'
    """
    words = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]]+\])", glob)
    known: Mapping[str, str] = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = []
    for word in words:
        if word.startswith("[") and word.endswith("]"):
            parts.append(word.replace("[!", "[^", 1))
        else:
            parts.append(known.get(word, re.escape(word)))
    return "".join(parts)
