"""A state directory in a bucket: local working files, and a head that fences writers.

    s3://bucket/states/clicks

A run works in a directory of this machine. Before its ledger learns anything new, and so before
noise is drawn, everything that has changed is put into the bucket: new objects first (`files/...`),
then `head`, which says which objects make which files. The head takes the place of the one before,
compared by its e_tag, so what is in the bucket is always what a kill could have left at one moment.

Whoever opens the state puts a head of its own, with its id, in place of the last one, and then
fetches the files: what is on its machine from before does not count. From then on no other process
can write: its next head is refused, and it stops before it draws.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple

from dpstream.connectors.objects.client import Bucket, Version
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.ledger.store import LedgerAddress
from dpstream.privacy.state import mint_run_id
from dpstream.privacy.state.backup import Stamp, stamps
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.journal import this_process
from dpstream.privacy.state.mirrors import set_mirror

_KIND = "state"
FORMAT = 1
_GROWING = (".log", ".segment")  # files that are appended to
_PART = 1 << 16  # bytes of the last part of such a file from which it stays as it is
_TRIES = 1000

Head = dict[str, Any]


class Part(NamedTuple):
    """An object that holds a file, or a part of it."""

    key: str
    size: int
    sha256: str


_OPEN: dict[str, StateMirror] = {}


def open_state(uri: str) -> Path:
    """Take a state over; the directory that stands for it on this machine."""
    before = _OPEN.pop(uri, None)
    if before is not None:
        before.forget()
    mirror = _OPEN[uri] = StateMirror(uri)
    set_mirror(mirror.folder, mirror)
    return mirror.folder


class StateMirror:
    """The state of an address; see `Mirror`."""

    def __init__(self, uri: str) -> None:
        options = ServerOptions(uri)
        self._bucket, self._retry = Bucket(options), options.retry_policy()
        options.finish()
        name = options.path.strip("/")
        if not name:
            raise InvalidParameter(f"{options.where} must name a state in the bucket, as in {uri}x")
        self.place, self._prefix = options.where, f"{name}/"
        query = uri.partition("?")[2]
        ledger = self._bucket.uri(f"{self._prefix}ledger")
        self.ledger = LedgerAddress(f"{ledger}?{query}" if query else ledger)
        self._writer, self._number, self._lock = mint_run_id().hex(), 0, Lock()
        self._version: Version = {}
        self._files: dict[str, list[Part]] = {}
        self._stamps: dict[str, Stamp] = {}
        self._uploaded: list[str] = []
        self._garbage: list[str] = []
        self._made, self._broken = 0, False
        self._process = this_process.id
        self._place = _working_place()
        self.folder = Path(self._place.name, name.rpartition("/")[2])
        self.folder.mkdir(mode=0o700)
        self._held = _hold(Path(self._place.name))
        try:
            self._take_over()
        except ServerAway as problem:
            raise unreachable(self.place, problem) from None
        self._fetch()

    def sync(self) -> None:
        """Make durable in the bucket what the directory holds; refused if another took over."""
        if this_process.id != self._process:
            raise StateError(f"{self.place} was opened before a fork; open it in each process")
        with self._lock:
            if self._broken:
                raise self._overtaken()
            try:
                self._take_changes()
            except BaseException:
                self._broken = True  # what was uploaded, and what was not, is not known any more
                raise

    def forget(self) -> None:
        """Remove the local files; nothing more is written."""
        with self._lock:
            self._broken = True
        self._place.cleanup()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    # Opening

    def _take_over(self) -> None:
        """Put a head of ours in place of the one that is there, or make the first."""
        key = f"{self._prefix}head"
        for _ in range(_TRIES):
            found = self._bucket.get(key)
            if found is None:
                self._files = {}
                version = self._bucket.create(key, self._head())
            else:
                self._files = _files_of(found.data, self._bucket.uri(key))
                version = self._bucket.replace(key, self._head(), found.version)
            if version is not None:
                self._version = version
                return
        raise StateError(f"others open {self.place} again and again; run it in one place")

    def _fetch(self) -> None:
        """Make the files of the head here; remove objects that no head names."""
        for name, parts in self._files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            with path.open("wb") as file:
                for part in parts:
                    file.write(self._content(part, name))
        self._stamps = stamps(self.folder)
        named = {part.key for parts in self._files.values() for part in parts}
        there = self._retry.insist(lambda: self._bucket.find(f"{self._prefix}files/"))
        self._garbage = [one.key for one in there if one.key not in named]
        self._retry.insist(self._remove_garbage)

    def _content(self, part: Part, name: str) -> bytes:
        found = self._retry.insist(lambda: self._bucket.get(part.key))
        if found is None:
            head = self._retry.insist(lambda: self._bucket.get(f"{self._prefix}head"))
            if head is not None and head.version != self._version:
                raise self._overtaken()
        if found is None or _digest(found.data) != part.sha256:
            what = "is missing" if found is None else "is not what was put there"
            raise StateError(
                f"{self.place} is damaged: {self._bucket.uri(part.key)}, of the file {name}, "
                f"{what}; restore it, or use a new state (a new run, charged anew)"
            )
        return found.data

    # Writing

    def _take_changes(self) -> None:
        """Upload what has changed until nothing changes meanwhile; then let a head say so."""
        if not self.folder.is_dir():
            raise StateError(
                f"{self.folder} was removed while {self.place} was in use; start again"
            )
        files, known, self._uploaded = dict(self._files), self._stamps, []
        for _ in range(_TRIES):
            now = stamps(self.folder)
            if now == known:
                break
            for name in known.keys() - now.keys():
                del files[name]
            for name, stamp in now.items():
                if known.get(name) != stamp:
                    content = self._read(name, stamp)
                    if content is not None:
                        files[name] = content
            known = {name: stamp for name, stamp in now.items() if name in files}
        else:
            raise StateError(f"{self.folder} does not come to rest; stop what else writes it")
        if known == self._stamps:
            return
        before = {part.key for parts in self._files.values() for part in parts}
        before |= set(self._uploaded)
        self._number += 1
        self._retry.insist(lambda: self._put_head(files))
        after = {part.key for parts in files.values() for part in parts}
        self._garbage += sorted(before - after)
        self._files, self._stamps = files, known
        self._retry.insist(self._remove_garbage)

    def _read(self, name: str, stamp: Stamp) -> list[Part] | None:
        """Upload a file, or what was appended to it; None: it is gone."""
        parts, inode = self._files.get(name, []), self._stamps.get(name, (0, 0, 0))[0]
        grows = bool(parts) and name.endswith(_GROWING) and inode == stamp[0]
        start = sum(part.size for part in parts[:-1]) if grows else 0
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                content = file.read()
                if not grows or _digest(content[: parts[-1].size]) != parts[-1].sha256:
                    file.seek(0)
                    return [self._upload(file.read())]
        except FileNotFoundError:
            return None
        if parts[-1].size >= _PART:
            return [*parts, self._upload(content[parts[-1].size :])]
        return [*parts[:-1], self._upload(content)]

    def _upload(self, content: bytes) -> Part:
        self._made += 1
        key = f"{self._prefix}files/{self._writer}-{self._made:08d}"
        self._uploaded.append(key)
        self._retry.insist(lambda: self._bucket.create(key, content))
        return Part(key, len(content), _digest(content))

    def _head(self, files: dict[str, list[Part]] | None = None) -> bytes:
        files = self._files if files is None else files
        head = {"dpstream": _KIND, "format": FORMAT, "writer": self._writer, "write": self._number}
        return json.dumps(head | {"files": files}, separators=(",", ":")).encode()

    def _put_head(self, files: dict[str, list[Part]]) -> None:
        """Replace our last head; one that is another's stays."""
        key = f"{self._prefix}head"
        version = self._bucket.replace(key, self._head(files), self._version)
        if version is None:  # our own, of a try whose answer was lost, or another's
            found = self._bucket.get(key)
            if found is None or found.data != self._head(files):
                raise self._overtaken()
            version = found.version
        self._version = version

    def _remove_garbage(self) -> None:
        """Remove what no head names: keys of windows that are over must not stay."""
        while self._garbage:
            self._bucket.remove(self._garbage[-1:])
            self._garbage.pop()

    def _overtaken(self) -> StateError:
        return StateError(
            f"{self.place} was opened by another process, which goes on with it, or a write to it "
            "was cut short; two would put the same noise on different data, so this one stops: "
            "start it again, in one place"
        )


def _working_place() -> TemporaryDirectory[str]:
    """A new directory for working files; those that killed processes have left are removed."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(cache, "dpstream", "states")
    make_directory(place, mode=0o700)
    for left in place.iterdir():
        held = _hold(left)
        if held is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
    return TemporaryDirectory(prefix="state-", dir=place, ignore_cleanup_errors=True)


def _hold(folder: Path) -> int | None:
    """Lock a directory for as long as the process lives; None: another process has it."""
    fd = -1
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files_of(data: bytes, where: str) -> dict[str, list[Part]]:
    """The files that a head names."""
    try:
        head: Head = json.loads(data)
        known = head["dpstream"], head["format"]
    except (ValueError, KeyError, TypeError):
        known = None, None
    if known != (_KIND, FORMAT):
        raise StateError(
            f"{where} is no head of a state that this version reads; name another place, or use "
            "the version of dpstream that wrote it"
        )
    return {name: [Part(*part) for part in parts] for name, parts in head["files"].items()}
