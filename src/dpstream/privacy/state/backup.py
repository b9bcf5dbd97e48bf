"""A consistent copy of a state directory while its runs go on, and putting it back.

A backup is a folder or a tar file of `backup.json` (what it is, and the SHA-256 of every file),
`state/` (the directory) and, where it lies elsewhere, each `ledger-N`. Its secret is not in it,
unless that is asked for.

A copy must be what a kill could have left. Most of a directory is written once, under a name of its
own, and is copied while the runs go on. Then the ledger's lock is held, and what has changed since
is copied again, until nothing changes meanwhile. Under that lock no step is logged, no key is used,
and none is erased: log, ledger and keys stand still, and a snapshot that was still on its way is
complete, or not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpstream.errors import StateError
from dpstream.privacy.ledger.ledger import Ledger, follow_moves
from dpstream.privacy.ledger.store import LedgerPlace, as_ledger_place, open_store
from dpstream.privacy.state.durable_files import erase, make_directory, replace, sync_directory
from dpstream.privacy.state.inspection import saved_step
from dpstream.privacy.state.journal import Journal
from dpstream.privacy.state.run_directory import (
    ANEW,
    NEXT,
    RestoredRun,
    adopt,
    ledger_place,
    read_about,
    refuse_restore,
    restore_run,
    wrapping_path,
)
from dpstream.privacy.state.secret import secret_path

_LOG = logging.getLogger("dpstream.state")
FORMAT = 1
NAME = "backup.json"
Told = Callable[[int, int], None]
"""Is told how many files are done, of how many."""

SETTLED = "changes.json"
"""What `dpstream apply` has settled for the queries of a directory."""
_KIND = "state backup"
_WORDS = (
    "name the newest ledger where it always was; or, if this is the newest one (moved or copied, "
    "and nothing was charged to another copy since), say so (--newest-ledger); or, if nothing was "
    "published since the backup, say that (--nothing-since)"
)
_ALIVE = ("arrived", "pushed", "served", "dead-letters")  # grow while nothing is published
_TRIES, _PAUSE = 2000, 0.005  # seconds

Stamp = tuple[int, int, int]


def runs_in(folder: Path) -> list[Path]:
    """The directory itself, or those of a pipeline's queries in it."""
    found = sorted(path.parent for path in (*folder.glob("run.dps"), *folder.glob("*/run.dps")))
    if not found:
        raise StateError(f"{folder} holds no run; name the directory that has a run.dps")
    return found


def back_up(
    folder: Path, to: Path, *, secret: Path | None = None, told: Told = lambda *_: None
) -> dict[str, Any]:
    """Copy a directory, which may be in use, to a new folder or tar file; returns what it is."""
    if to.exists():
        raise StateError(f"{to} exists already; a backup is never overwritten: name another place")
    folder = folder.resolve()
    charged = _ledgers(folder)
    ledgers = sorted({book for book in charged.values() if isinstance(book, Path)})
    make_directory(to.parent)
    with TemporaryDirectory(prefix=f".{to.name}.", suffix=".new", dir=to.parent) as staging:
        content = Path(staging) / "backup"
        state = content / "state"
        state.mkdir(parents=True, mode=0o700)
        inside = {path: str(path.relative_to(folder)) for path in ledgers if folder in path.parents}
        outside = {path: f"ledger-{n}" for n, path in enumerate(ledgers) if path not in inside}
        copied = _copy_new(folder, state, {}, told)
        with _held(set(charged.values())):
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            _copy_rest(folder, state, copied)
            for path, name in outside.items():
                _copy(path, content / name)
                _copy(_head_of(path), _head_of(content / name))
        wrapping: dict[str, str] = {}
        if secret is not None:
            _copy(secret, content / "secret")
            for number, (place, path) in enumerate(wrapping_in_use(folder).items()):
                wrapping[str(place.relative_to(folder))] = name = f"secret-{number}"
                _copy(path, content / name)
        facts = {
            "dpstream": _KIND,
            "format": FORMAT,
            "at": at,
            "folder": str(folder),
            "ledgers": {str(p): f"state/{n}" for p, n in inside.items()}
            | {str(p): n for p, n in outside.items()},
            "runs": {str(p.relative_to(folder)): str(book) for p, book in charged.items()},
            "secret": secret is not None,
            "wrapping": wrapping,
            "files": _digests(content),
        }
        replace(content / NAME, json.dumps(facts, indent=1).encode())
        _finish(content, to)
    return facts


def wrapping_in_use(folder: Path) -> dict[Path, Path]:
    """The secret that wraps the keys of each run which was rotated."""
    known = {place: read_about(place) or {} for place in runs_in(folder)}
    rotated = {place: about.get("rotations", 0) for place, about in known.items()}
    return {place: wrapping_path(place, times) for place, times in rotated.items() if times}


def _ledgers(folder: Path) -> dict[Path, LedgerPlace]:
    """What each run of a directory is charged to: a file, or the address of a server."""
    found: dict[Path, LedgerPlace] = {}
    for place in runs_in(folder):
        about = read_about(place)
        assert about is not None
        book = ledger_place(place, about)
        if isinstance(book, Path) and not book.exists() and (folder / book.name).exists():
            book = folder / book.name  # it was moved with the directory
        if not book.exists():
            raise StateError(f"{place} is charged to {book}, which is not there; restore it first")
        book = follow_moves(book)
        found[place] = book.resolve() if isinstance(book, Path) else book
    return found


@contextmanager
def _held(ledgers: Collection[LedgerPlace]) -> Iterator[None]:
    """Hold the ledgers: nothing is charged, no step is logged and no key is used meanwhile."""
    with ExitStack() as locks:
        for place in sorted(ledgers, key=str):
            store = locks.enter_context(closing(open_store(place)))
            locks.enter_context(store.locked())
        yield


def stamps(folder: Path, *, secrets: bool = False) -> dict[str, Stamp]:
    """Every file of a directory, and what changes when it does; its secrets only with `secrets`."""
    found: dict[str, Stamp] = {}
    left_out: tuple[str, ...] = (".new", ".lock", "-wal", "-shm", "-journal")
    left_out += () if secrets else (".secret", ".token")
    for root, folders, names in os.walk(folder):
        if not secrets and Path(root).name.startswith(("arrived", "pushed")):
            folders[:] = [name for name in folders if name != "kept"]  # no recovery needs it
        for name in names:
            if name.endswith(left_out):
                continue  # somebody is writing it, or it is not to be copied
            path = Path(root, name)
            with suppress(FileNotFoundError):
                stat = path.stat()
                stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
                found[str(path.relative_to(folder))] = stamp
    return found


def _copy_new(
    folder: Path,
    to: Path,
    known: dict[str, Stamp],
    told: Told = lambda *_: None,
    *,
    secrets: bool = False,
) -> dict[str, Stamp]:
    """Copy what is not known to be copied; forget what is gone. Returns what is copied now."""
    now, copied = stamps(folder, secrets=secrets), {}
    for name in known.keys() - now.keys():
        (to / name).unlink()
    for number, (name, stamp) in enumerate(now.items(), 1):
        told(number, len(now))
        if known.get(name) != stamp:
            with suppress(FileNotFoundError):  # it is gone since
                _copy(folder / name, to / name)
                copied[name] = stamp
        else:
            copied[name] = stamp
    return copied


def _copy_rest(folder: Path, to: Path, copied: dict[str, Stamp]) -> None:
    """Copy again until nothing has changed meanwhile, but what grows by itself."""

    def settled(stamps: Mapping[str, Stamp]) -> dict[str, Stamp]:
        return {n: s for n, s in stamps.items() if not n.split("/")[0].startswith(_ALIVE)}

    for _ in range(_TRIES):
        copied = _copy_new(folder, to, copied)
        if settled(copied) == settled(stamps(folder)):
            return
        time.sleep(_PAUSE)
    raise StateError(f"{folder} does not come to rest; stop what writes it, and try again")


def _copy(path: Path, to: Path) -> None:
    """Copy a file for this user alone; of a database, what is committed by now."""
    to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    to.unlink(missing_ok=True)
    if path.suffix == ".sqlite":
        os.close(os.open(to, os.O_CREAT | os.O_EXCL, 0o600))
        read_only = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with closing(read_only) as source, closing(sqlite3.connect(to)) as target:
            source.backup(target)
        return
    with path.open("rb") as source_file:
        fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            shutil.copyfileobj(source_file, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())


def _head_of(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".head")


def _digests(folder: Path, *, secrets: bool = False) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file."""
    digests = {}
    for name in sorted(stamps(folder, secrets=secrets)):
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return digests


def _is_tar(path: Path) -> bool:
    return path.name.endswith((".tar", ".tar.gz", ".tgz"))


def _finish(content: Path, to: Path) -> None:
    """Give the backup its name: it is there whole, or not at all."""
    whole = content
    if _is_tar(to):
        whole = content.with_name("archive")
        fd = os.open(whole, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            with tarfile.open(fileobj=file, mode="w" if to.suffix == ".tar" else "w:gz") as archive:
                for name in (NAME, *(p.name for p in sorted(content.iterdir()) if p.name != NAME)):
                    archive.add(content / name, arcname=name)
            file.flush()
            os.fsync(file.fileno())
    whole.rename(to)
    sync_directory(to.parent)


@contextmanager
def opened(source: Path, *, beside: Path | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A backup's folder and what it is, once every file is what it was when it was made.

    `beside`: where a tar file is unpacked meanwhile.
    """
    if not source.exists():
        raise StateError(f"there is no backup at {source}")
    with ExitStack() as undo:
        folder = source
        if source.is_file():
            temporary = TemporaryDirectory(prefix=".dpstream-backup-", dir=beside)
            folder = Path(undo.enter_context(temporary))
            try:
                with tarfile.open(source) as archive:
                    archive.extractall(folder, filter="data")
            except (tarfile.TarError, EOFError, OSError) as problem:
                raise StateError(f"{source} is no backup, or is damaged: {problem}") from None
        try:
            facts = json.loads((folder / NAME).read_bytes())
        except (FileNotFoundError, ValueError):
            facts = {}
        if facts.get("dpstream") != _KIND:
            raise StateError(
                f"{source} was not made by dpstream state backup: it has no {NAME}; for a plain "
                "copy see dpstream state adopt"
            )
        if facts["format"] != FORMAT:
            raise StateError(
                f"{source} has format {facts['format']}; this version reads {FORMAT}; use the "
                "version of dpstream that wrote it"
            )
        found = {n: d for n, d in _digests(folder).items() if n != NAME}
        for name in sorted(found.keys() | facts["files"].keys()):
            if found.get(name) != facts["files"].get(name):
                what = "missing" if name not in found else "not the file that was backed up"
                raise StateError(f"{source}: {name} is {what}; use another backup")
        yield folder, facts


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Where a backup is put back, and what becomes of it."""

    folder: Path
    ledger: LedgerPlace | None = None
    """The ledger that was kept, if it is not where it was."""
    nothing_since: bool = False
    """Has somebody said that nothing was published since the backup?"""
    newest_ledger: bool = False
    """Has somebody said that the ledger is the newest one, though it is another file?"""
    without: Sequence[str] = ()
    """Runs that are left out."""
    because: str
    who: str

    def restore(self, source: Path) -> dict[str, RestoredRun]:
        """Put a backup back; the runs, by their places in the directory.

        Runs that were ended for good, by now, are left out: they must not go on.
        """
        folder = self.folder.resolve()
        make_directory(folder.parent)
        with opened(source, beside=folder.parent) as (content, facts), ExitStack() as undo:
            runs = dict(facts["runs"])
            for name in self.without:
                if runs.pop(name, None) is None:
                    known = ", ".join(facts["runs"])
                    raise StateError(f"the backup has no run {name!r}; it has {known}")
            if isinstance(self.ledger, Path) and source.resolve() in self.ledger.resolve().parents:
                raise StateError(
                    f"{self.ledger} is the backup's own ledger, which knows nothing of what was "
                    f"published since; {_WORDS}"
                )
            books = {book: self._book(book, facts, folder) for book in runs.values()}
            staging = folder.with_name(f".{folder.name}.restoring")
            if staging.exists():
                shutil.rmtree(staging)  # of a restore that was killed
            inside = {n.removeprefix("state/") for n in facts["ledgers"].values()}
            names = [n for n in stamps(content / "state") if n.removesuffix(".head") not in inside]
            for name in names:
                if name == SETTLED and (folder / name).exists():
                    continue  # what was settled since is newer
                if name.split("/")[0] not in self.without:
                    _refuse_taken(folder, name)
                    _copy(content / "state" / name, staging / name)
            for book, place in books.items():
                if isinstance(place, Path) and not place.exists():
                    self._put_ledger(content / facts["ledgers"][book], place)
                    undo.callback(_remove_ledger, place)  # a refused restore leaves nothing
            for name in self._ended(staging, {n: books[b] for n, b in runs.items()}):
                shutil.rmtree(staging / name)
                del runs[name]
            for name, book in runs.items():  # before any of them is fenced
                self._refuse_unsafe(staging / name, folder / name, books[book])
                with closing(Ledger(books[book])) as ledger:
                    refuse_restore(staging / name, ledger=ledger)
            restored = {n: self._run(staging / n, folder / n, books[b]) for n, b in runs.items()}
            if facts["secret"] and not secret_path(folder).exists():
                _copy(content / "secret", secret_path(folder))
            _take_in(staging, folder)
            for place, path in wrapping_in_use(folder).items():
                saved = facts.get("wrapping", {}).get(str(place.relative_to(folder)))
                if saved is not None and not path.exists():
                    _copy(content / saved, path)
            undo.pop_all()
        return restored

    def _book(self, book: str, facts: dict[str, Any], folder: Path) -> LedgerPlace:
        """Where the ledger of a run is, or is put."""
        if book not in facts["ledgers"]:  # on a server
            return self.ledger or as_ledger_place(book)
        name = facts["ledgers"][book]
        place = folder / name.removeprefix("state/") if name.startswith("state/") else Path(book)
        kept = self.ledger.resolve() if isinstance(self.ledger, Path) else self.ledger
        if kept is not None and kept != place:
            if not isinstance(kept, Path):
                return kept
            if name.startswith("state/"):
                raise StateError(
                    f"the ledger of this state lies in its directory: put the one that was kept "
                    f"there, mkdir -p {place.parent}; mv {self.ledger} {self.ledger}.head "
                    f"{place.parent}/, and restore without --ledger"
                )
            place = kept
        if not place.exists() and not self.nothing_since:
            raise StateError(
                f"there is no ledger at {place}, and only the newest one knows what was published "
                f"since this backup ({facts['at']}): the same noise could meet other data; name "
                "the one that was kept (--ledger FILE); or, if nothing was published since, say so "
                "(--nothing-since): the backup's own ledger is put back; or leave this state, and "
                f"{ANEW}, from after its longest window on"
            )
        return place

    def _put_ledger(self, saved: Path, place: Path) -> None:
        make_directory(place.parent)
        _copy(_head_of(saved), _head_of(place))
        _copy(saved, place)

    def _ended(self, staging: Path, books: dict[str, LedgerPlace]) -> list[str]:
        """Runs that were ended for good; none if there are no others: then there is no way on."""
        ended: dict[str, str] = {}
        for name, book in books.items():
            about = read_about(staging / name)
            with closing(Ledger(book)) as ledger:
                known = None if about is None else ledger.known(about["run"].hex()).ended
            if known is not None:
                ended[name] = known[0]
        if len(ended) == len(books):
            return []
        for name, because in ended.items():
            _LOG.warning("%s is left out: its run was ended for good (%s)", name, because)
        return [*ended]

    def _refuse_unsafe(self, place: Path, home: Path, book: LedgerPlace) -> None:
        """Refuse a ledger that may be older than what was published, and units that come back.

        A file that the run was charged to is the newest. A copy of it may be of any time, and so
        may be what is in a server: then somebody must say so.
        """
        with closing(Ledger(book)) as ledger:
            about = read_about(place)
            assert about is not None
            same = isinstance(book, Path) and ledger.replaces(about["ledger"])
            if not (same or self.newest_ledger or self.nothing_since):
                what = "not the file that was charged" if isinstance(book, Path) else "in a server"
                raise StateError(
                    f"{book} is {what}, and may be older than what was published last: then the "
                    f"same noise would meet other data; {_WORDS}"
                )
            erasure, saved = ledger.known(about["run"].hex()).erasure, saved_step(place)
            if erasure is not None and saved < erasure[0]:
                raise StateError(
                    f"a unit was erased from {home} before step {erasure[0]}, and this backup is "
                    f"of step {saved}: it would bring the unit back; use a later backup; or, if "
                    f"units have periods, {NEXT}; or {ANEW}"
                )

    def _run(self, place: Path, home: Path, book: LedgerPlace) -> RestoredRun:
        because = self.because
        if self.newest_ledger:
            because += " (by word: this is the newest ledger)"
        with closing(Ledger(book)) as ledger:
            return restore_run(
                place, ledger=ledger, home=home, book=book, because=because, who=self.who
            )


def _remove_ledger(place: Path) -> None:
    place.unlink()
    _head_of(place).unlink()


def _refuse_taken(folder: Path, name: str) -> None:
    top = folder / name.split("/")[0]
    if top.exists():
        raise StateError(
            f"{top} is there already; move {folder} away first, but for a ledger in it that was "
            f"kept: mv {folder} {folder}.old"
        )


def _take_in(staging: Path, folder: Path) -> None:
    """Bring a restored state to its place, which has nothing of it but perhaps a ledger."""
    if folder.exists():
        for path in sorted(staging.iterdir(), key=lambda each: each.name == "run.dps"):
            path.rename(folder / path.name)
        staging.rmdir()
        sync_directory(folder)
    else:
        staging.rename(folder)
    sync_directory(folder.parent)


def move(folder: Path, to: Path, *, because: str, who: str) -> None:
    """Move the directory of runs that have stopped, with its secret, to any file system.

    Where it must be copied, the original gets a hidden name first, so that nobody starts it; after
    a kill the same call goes on.
    """
    folder, to = Path(os.path.abspath(folder)), Path(os.path.abspath(to))
    hidden = folder.with_name(f".{folder.name}.moved")
    if to.exists():
        raise StateError(f"{to} exists already; name another place")
    if folder.exists():
        charged = _ledgers(folder)
        with ExitStack() as locks:
            for place in charged:
                about = read_about(place)
                assert about is not None
                log = Journal(place / about["log"], kind="input log")
                locks.enter_context(closing(log))
                log.acquire(wait=False)
            make_directory(to.parent)
            folder.rename(hidden)
    elif not hidden.exists():
        raise StateError(f"there is no state directory at {folder}")
    copied = os.stat(hidden).st_dev != os.stat(to.parent).st_dev
    if copied:
        staging = to.with_name(f".{to.name}.restoring")
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir(mode=0o700)
        _copy_new(hidden, staging, {}, secrets=True)
        if _digests(hidden, secrets=True) != _digests(staging, secrets=True):
            raise StateError(f"{folder} was not copied as it is to {to}; the medium is faulty")
        staging.rename(to)
    else:
        hidden.rename(to)
    sync_directory(to.parent)
    _bring_secret(folder, to)
    for place in runs_in(to):
        about = read_about(place)
        assert about is not None
        book = ledger_place(place, about)
        if not about["own ledger"] and isinstance(book, Path) and folder in book.parents:
            book = to / book.relative_to(folder)
        if book == ledger_place(place, about) and not about["own ledger"]:
            continue  # it is outside, and has not moved
        with closing(Ledger(follow_moves(book))) as ledger:
            adopt(place, ledger=ledger, because=because, who=who)
    if copied:
        for path in hidden.rglob("*.key"):
            erase(path)
        shutil.rmtree(hidden)


def _bring_secret(folder: Path, to: Path) -> None:
    """Move the secrets that lie beside a directory: its own, and those that wrap its keys."""
    for old in sorted(folder.parent.glob("*.secret")):
        rest = old.name.removeprefix(folder.name)
        is_its_own = old.name != rest and (rest == ".secret" or rest.startswith(".keys-"))
        if is_its_own and not (new := to.with_name(to.name + rest)).exists():
            _copy(old, new)
            sync_directory(new.parent)
            erase(old)
