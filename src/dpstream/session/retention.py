"""What may go of a state directory and of a pipeline's files, and why; it goes when that is asked.

Of a run that has stopped: files that a kill has left half-written, parts of snapshots that no
manifest names, and all of it if its ledger says that it was ended for good. By age, where the
pipeline file says how long: release files, dead letters, inputs that are done. Every run is locked
meanwhile. What belongs to one that is running is left to the process that runs it, which removes
its old releases and dead letters itself (`Upkeep`). Ledgers and secrets stay.

Nothing reads these files again. A replay writes a release file that is gone once more, with the
same bytes.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dpstream.connectors.files.source import DONE
from dpstream.connectors.registry import release_folder
from dpstream.connectors.storage import is_older, old_files
from dpstream.connectors.write_ahead import KEPT
from dpstream.errors import StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.privacy.state import read_packed
from dpstream.privacy.state.durable_files import erase, sync_directory
from dpstream.privacy.state.journal import try_lock
from dpstream.privacy.state.run_directory import About, current_ledger_place, read_about
from dpstream.query.windows import in_words
from dpstream.session.pipeline import Pipeline

_EVERY = 3600.0  # seconds between two looks of a pipeline that runs
_LOG = logging.getLogger("dpstream.session")
_HALF_WRITTEN = re.compile(r"\..*\.[0-9a-f]{16}\.new")
_RELEASE = r"-w\d{6,}-t\d{6,}\."
_STAYS = re.compile(r"ledger(\.head)?|.*\.secret")  # of a run that is ended
_LAST = ("inputs", "run.dps")  # without them nobody knows any more which run it was


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Files that may go together."""

    what: str
    where: Path
    why: str
    files: int
    bytes: int
    removed: bool = False


def collect_runs(
    places: Iterable[Path], *, remove: bool, ledgers: Sequence[LedgerPlace] = ()
) -> Iterator[Waste]:
    """What may go of runs' directories; with `remove` it is gone when it is told.

    `ledgers`: where a run's ledger may be, if it is not where the run has left it.
    """
    for place in places:
        about = read_about(place)
        if about is None:
            continue
        with _held(place, about) as free:
            if not free:
                yield _in_use(place)
                continue
            ended = _why_ended(place, about, ledgers)
            if ended is not None:
                why = f"its run was ended for good ({ended}); ledger and secret stay"
                yield _take("ended run", place, why, _files_of_ended(place), remove=remove)
                continue
            cut = [path for path in place.rglob(".*.new") if _HALF_WRITTEN.fullmatch(path.name)]
            yield _take("half-written files", place, "a kill has left them", cut, remove=remove)
            why = "no snapshot that is kept names them"
            parts = place / "segments"
            yield _take("parts of snapshots", parts, why, _unnamed(place), remove=remove)


def collect_by_age(pipeline: Pipeline, *, remove: bool) -> Iterator[Waste]:
    """What a pipeline's [retention] no longer keeps, but for served releases; by their age.

    Runs are locked meanwhile; what belongs to one that is running stays, and the run is named.
    """
    with ExitStack() as stack:
        busy = []
        for place in sorted(path.parent for path in pipeline.state.glob("*/run.dps")):
            about = read_about(place)
            if about is not None and not stack.enter_context(_held(place, about)):
                busy.append(place)
                yield _in_use(place)
        yield from _old_releases_and_letters(pipeline, busy, remove=remove)
        span = pipeline.retention.get("inputs")
        if span is None or busy:  # several queries read the same rows
            return
        sources = dict.fromkeys(str(feed.source) for feed in pipeline.feeds.values())
        folders = [Path(source) / DONE for source in sources]
        folders += [path / KEPT for path in sorted(pipeline.state.glob("*")) if path.is_dir()]
        for folder in folders:
            why = f"read to their ends, and needed by no recovery, for more than {_words(span)}"
            yield _take("inputs", folder, why, old_files(folder, span), remove=remove)


class Upkeep:
    """Removes old releases and dead letters of a pipeline, from the process that runs it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._next = pipeline, 0.0

    def __call__(self) -> None:
        """Do it, if the last time was an hour ago; what cannot be removed is told, and stays."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        try:
            for _ in _old_releases_and_letters(self._pipeline, [], remove=True):
                pass
        except OSError as problem:
            _LOG.warning("what [retention] no longer keeps cannot be removed: %s", problem)


def _old_releases_and_letters(
    pipeline: Pipeline, busy: Sequence[Path], *, remove: bool
) -> Iterator[Waste]:
    """Those of runs that are not busy; releases of runs whose state is gone are among them."""
    if (span := pipeline.retention.get("releases")) is not None:
        names = {place.name for place in busy}
        for folder, kind in filter(None, map(release_folder, pipeline.sinks)):
            why = f"published more than {_words(span)} ago"
            old = _old_releases(folder, kind, span, names)
            yield _take("release files", folder, why, old, remove=remove, overwrite=False)
    if (span := pipeline.retention.get("dead_letters")) is not None:
        for place in pipeline.folders.values():
            folder = place / "dead-letters"
            old = [p for p in folder.glob("*.jsonl") if is_older(p, _before(span))]
            why = f"set aside more than {_words(span)} ago"
            if place not in busy:
                yield _take("dead letters", folder, why, old, remove=remove)


def _in_use(place: Path) -> Waste:
    why = "it is running, and removes what it does not need itself"
    return Waste(what="in use", where=place, why=why, files=0, bytes=0)


@contextmanager
def _held(place: Path, about: About) -> Iterator[bool]:
    """Hold a run; False: a process has it, or it is gone since `about` was read."""
    with try_lock(place / about["log"]) as free:
        if not free:
            yield False
            return
        try:
            now = read_about(place)
        except StateError:  # another call is removing it
            now = None
        yield now is not None and now["run"] == about["run"]


def _why_ended(place: Path, about: About, ledgers: Sequence[LedgerPlace]) -> str | None:
    """Why a run was ended for good, if it was and its ledger is there to say so."""
    book = current_ledger_place(place, about, ledgers)
    if not book.exists():
        return None
    with closing(Ledger(book)) as ledger:
        known = ledger.known(about["run"].hex())
    return None if known.ended is None else known.ended[0]


def _files_of_ended(place: Path) -> list[Path]:
    """Its files; those by which it is known come last, so that a kill leaves the rest to find."""
    files = [p for p in place.rglob("*") if p.is_file() and not _STAYS.fullmatch(p.name)]
    return sorted(files, key=lambda path: (path.name.startswith(_LAST), path))


def _unnamed(place: Path) -> list[Path]:
    """Parts of snapshots that no manifest names; none if one of these cannot be read."""
    named: set[str] = set()
    manifests = [*place.glob("manifest-*.dps")]
    try:
        for path in manifests:
            for *_, chain in read_packed(path, kind="manifest")["chains"]:
                named |= {name for name, *_ in chain}
    except StateError:
        return []
    return sorted(p for p in place.glob("segments/*.dps") if manifests and p.name not in named)


def _old_releases(folder: Path, kind: str, span: timedelta, busy: set[str]) -> list[Path]:
    """Files of releases of the queries that have written here, by the marks that they leave."""
    queries = {path.name[1 : -len(".run")] for path in folder.glob(".*.run")} - busy
    names = re.compile(f"({'|'.join(map(re.escape, queries))}){_RELEASE}{kind}")
    before = _before(span)
    found = [p for p in folder.glob(f"*.{kind}") if queries and names.fullmatch(p.name)]
    return sorted(path for path in found if is_older(path, before))


def _take(
    what: str, where: Path, why: str, paths: list[Path], *, remove: bool, overwrite: bool = True
) -> Waste:
    """Count files, and remove them if that is asked; what is not public is overwritten first."""
    found: dict[Path, os.stat_result] = {}
    for path in paths:
        with suppress(FileNotFoundError):  # its run, or another call, has removed it
            found[path] = path.stat()
    for path, was in found.items() if remove else ():
        with suppress(FileNotFoundError):  # the same; or its run has written it anew
            if path.stat().st_mtime_ns == was.st_mtime_ns:
                erase(path) if overwrite and path.stat().st_nlink == 1 else path.unlink()
    if remove and found:
        for folder in sorted({path.parent for path in found}, reverse=True):
            with suppress(FileNotFoundError):
                sync_directory(folder)
        if what == "ended run":
            _remove_empty(where)
    size = sum(was.st_size for was in found.values())
    return Waste(what=what, where=where, why=why, files=len(found), bytes=size, removed=remove)


def _remove_empty(folder: Path) -> None:
    for path in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        with suppress(OSError):  # it holds something, or is gone
            path.rmdir()
    with suppress(OSError):
        folder.rmdir()


def _before(span: timedelta) -> float:
    return time.time() - span.total_seconds()


def _words(span: timedelta) -> str:
    return in_words(int(span.total_seconds() * 10**6))
