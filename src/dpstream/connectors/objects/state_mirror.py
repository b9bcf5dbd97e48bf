"""A state directory in a bucket: local working files, and a head that fences writers.

    s3://bucket/states/clicks

A run works in a directory of this machine. Before its ledger learns anything new, and so before
noise is drawn, everything that has changed is put into the bucket: new objects first (`files/...`),
then `head`, which says which objects make which files. The head takes the place of the one before,
compared by its e_tag, so what is in the bucket is always what a kill could have left at one moment.

Whoever opens the state fetches the files that the head names: what is on its machine from before
does not count. That writes nothing, so a start that is refused disturbs nobody. The first head of a
start takes the place of the very one that was fetched; if another process has written since, it is
refused. From then on no other process can write: its next head is refused, and it stops before it
draws.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple

from dpstream.connectors.objects.client import Bucket, Content, Version
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
"""By address, the newest of this process; and that which has taken it over, if that is another."""
_TAKEN: dict[str, StateMirror] = {}


def open_state(uri: str, *, again: bool = True) -> Path:
    """The directory that stands for a state on this machine; nothing is taken over before a write.

    `again`: fetch it, though this process has a copy which is the newest.
    """
    before = _OPEN.get(uri)
    if before is not None and not again and before.is_newest():
        return before.folder
    if before is not None:
        before.superseded = True
    mirror = _OPEN[uri] = StateMirror(uri)
    set_mirror(mirror.folder, mirror)
    return mirror.folder


class StateMirror:
    """The state of an address; see `Mirror`."""

    def __init__(self, uri: str) -> None:
        options = ServerOptions(uri)
        self._bucket, self._retry = Bucket(options), options.retry_policy()
        options.finish()
        self._bucket.refuse_unfenced("a state")
        name = options.path.strip("/")
        if not name:
            raise InvalidParameter(
                f"{options.where} must name a state in the bucket, as in "
                f"{self._bucket.uri('states/pages')}"
            )
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
        self._taken = False  # is the newest head that we know our own?
        self.superseded = False
        """Is there a newer copy in this process? Then a run that is left, perhaps when its memory
        is collected, brings its last files no more."""
        self._process = this_process.id
        self._uri, self._held = uri, -1
        try:
            head = self._bucket.get(self._key)  # a bucket or key that is wrong is told at once
        except ServerAway as problem:
            raise unreachable(self.place, problem) from None
        self._place, self._held = _working_place()
        self.folder = Path(self._place.name, name.rpartition("/")[2])
        try:
            self._fetch(head)
        except BaseException:
            self.forget()
            raise

    @property
    def _key(self) -> str:
        return f"{self._prefix}head"

    def sync(self, *, claim: bool = True) -> None:
        """Make durable in the bucket what the directory holds; refused if another took over.

        The first time takes the state over. Without `claim` nothing is written before that.
        """
        if this_process.id != self._process:
            raise StateError(f"{self.place} was opened before a fork; open it in each process")
        with self._lock:
            if self._broken:
                raise self._overtaken()
            if not claim and (self.superseded or not self._taken):
                return
            try:
                self._take_changes()
            except BaseException:
                self._broken = True  # what was uploaded, and what was not, is not known any more
                raise

    def is_newest(self) -> bool:
        """Is the head still the one that this copy goes on from?"""
        if self._broken:
            return False
        with self._lock:
            found = self._retry.insist(lambda: self._bucket.get(self._key, known=self._version))
            return ({} if found is None else found.version) == self._version

    def refuse_moved(self) -> None:
        """Say so if another process has written since this copy was fetched."""
        if not self._taken and not self.is_newest():
            raise self._overtaken()

    def forget(self) -> None:
        """Remove the local files; nothing more is written."""
        with self._lock:
            self._broken = True
        self._place.cleanup()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # Opening

    def _fetch(self, head: Content | None) -> None:
        """Make the files of the newest head here; objects may go while others go on writing."""
        for _ in range(_TRIES):
            self._version = {} if head is None else head.version
            self._files = {} if head is None else _files_of(head.data, self._bucket.uri(self._key))
            if head is not None and not head.version:
                raise StateError(
                    f"{self.place}: the store gives no e_tag, and no fence without one"
                )
            if self._fetch_files():
                self._stamps = stamps(self.folder)
                return
            head = self._retry.insist(lambda: self._bucket.get(self._key))
        raise StateError(f"others write {self.place} again and again; run it in one place")

    def _fetch_files(self) -> bool:
        """Fetch what the head names; False: there is a newer one."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)
        for name, parts in self._files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            with path.open("wb") as file:
                for part in parts:
                    content = self._content(part, name)
                    if content is None:
                        return False
                    file.write(content)
        return True

    def _content(self, part: Part, name: str) -> bytes | None:
        """A part of a file; None: there is a newer head, which does not name it."""
        found = self._retry.insist(lambda: self._bucket.get(part.key))
        if found is None and not self.is_newest():
            return None
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
        if known == self._stamps and self._taken:
            return
        before = {part.key for parts in self._files.values() for part in parts}
        before |= set(self._uploaded)
        if not self._taken:
            # listed before our first head is put: who has made these went on from an earlier head,
            # and cannot write any more; objects of later writers are not among them
            listed = self._retry.insist(lambda: self._bucket.find(f"{self._prefix}files/"))
            before |= {one.key for one in listed}
        self._number += 1
        self._retry.insist(lambda: self._put_head(files))
        self._take()
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
        """Replace the head that we know; one that is another's stays."""
        content = self._head(files)
        if self._version:
            version = self._bucket.replace(self._key, content, self._version)
        else:
            version = self._bucket.create(self._key, content)
        if version is None:  # our own, of a try whose answer was lost, or another's
            found = self._bucket.get(self._key)
            if found is None or found.data != content:
                raise self._overtaken()
            version = found.version
        self._version = version

    def _take(self) -> None:
        """It is ours from now on; what this process had of it before is not needed any more."""
        if self._taken:
            return
        self._taken = True
        before = _TAKEN.get(self._uri)
        _TAKEN[self._uri] = self
        if before is not None:
            before.forget()

    def _remove_garbage(self) -> None:
        """Remove what no head names: keys of windows that are over must not stay."""
        while self._garbage:
            self._bucket.remove(self._garbage[-1:])
            self._garbage.pop()

    def _overtaken(self) -> StateError:
        if not self._taken:
            return StateError(
                f"{self.place} is in use: another process has gone on with it while this one "
                "began, and this one has changed nothing; stop that one first, or start this one "
                "again if it is stopped by now"
            )
        return StateError(
            f"{self.place} was opened by another process, which goes on with it, or a write to it "
            "was cut short; two would put the same noise on different data, so this one stops: "
            "start it again, in one place"
        )


def _working_place() -> tuple[TemporaryDirectory[str], int]:
    """A new directory for working files, held; those that killed processes have left are removed.

    The folder of all of them is locked meanwhile: what is made and not held yet is not removed.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(cache, "dpstream", "states")
    make_directory(place, mode=0o700)
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # without locks `_hold` says so
            fcntl.flock(fd, fcntl.LOCK_EX)
        for left in place.iterdir():
            if (held := _hold(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)
        made = TemporaryDirectory(prefix="state-", dir=place, ignore_cleanup_errors=True)
        held = _hold(Path(made.name))
    finally:
        os.close(fd)
    if held is None:
        made.cleanup()
        raise StateError(
            f"{place} is for working files of states in buckets, and cannot be locked; name a "
            "folder of a disk of this machine: XDG_CACHE_HOME"
        )
    return made, held


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
