"""What `dpstream apply` has settled for a pipeline: `changes.json` in its state directory.

A query that is changed or removed ends for good. Where units have periods, it goes on as it was
until the windows of its last period are published; then its run is ended in the ledger, and only
after that its successor begins. The successor has a name of its own (`pages_2`): its releases are
those of another query, and no sink mixes the two. Nothing here is trusted: a successor is charged
only if its book has room, whatever this file says. Its place there is held from the moment on that
the change is accepted, by a charge in the name of a run that never begins.

It also holds the queries that analysts have asked for over the server: they run beside those of the
file, each in the name of the analyst whose token asked.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from dpstream.connectors.storage import safe_name
from dpstream.errors import StateError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import LedgerPlace
from dpstream.privacy.state import durable_files
from dpstream.privacy.state.backup import SETTLED
from dpstream.privacy.state.inspection import saved_step
from dpstream.privacy.state.mirrors import sync_mirror
from dpstream.privacy.state.run_directory import current_ledger_place, read_about

FORMAT = 4
_NAME = SETTLED
Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A run that is to end, and what it may still publish."""

    run: str
    dataset: str
    windows: int = 0
    """It publishes so many of its windows; 0: nothing more."""
    steps: int = 0
    """Triggers by which it has published them."""
    at: int | None = None
    """When its last period is over; None: it ends at once."""
    successor: str | None = None
    because: str = ""
    who: str = ""

    def is_over(self, folder: Path) -> bool:
        """Has it published, and saved, what it may?"""
        return self.windows == 0 or saved_step(folder) >= self.steps


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Which queries have other names than in the file, and which are about to end."""

    texts: Mapping[str, Table] = field(default_factory=dict)
    """Each query as it was started last, like a [[query]] of a file."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What queries of the file are called since they were changed."""
    endings: Mapping[str, Ending] = field(default_factory=dict)
    begins: Mapping[str, int] = field(default_factory=dict)
    """From when on successors publish that have not begun yet."""
    asked: Mapping[str, Table] = field(default_factory=dict)
    """Queries that analysts have asked for over the server, like a [[query]] of the file."""
    held: Mapping[str, str] = field(default_factory=dict)
    """By the name of a successor, the run of the ledger that holds its place."""
    unsettled: Mapping[str, Ending] = field(default_factory=dict)
    """Endings that an apply was about to write into the books; none once it is over.

    If there are some, it was broken off: the next one finishes that, or takes it back.
    """

    @classmethod
    def read(cls, state: Path) -> Self:
        """Those of a state directory; none if there is no file."""
        path = state / _NAME
        try:
            told = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except ValueError:
            told = None
        if isinstance(told, dict) and told.get("format") in (2, 3, FORMAT):
            whole = told.pop("sha256", None) == _checksum(told)
        elif isinstance(told, dict) and told.get("format") == 1:  # it had no checksum
            whole = True
        elif isinstance(told, dict) and "format" in told:
            raise StateError(f"{path} has another format; use the version that wrote it")
        else:
            whole = False
        if not whole:
            raise StateError(
                f"{path} is damaged; restore it from your backup; or move it away, and apply the "
                "pipeline file again (dpstream apply): what was settled for later, and queries "
                "that analysts have asked for, are then lost"
            )
        return cls.from_json({key: value for key, value in told.items() if key != "format"})

    @classmethod
    def from_json(cls, told: Table) -> Self:
        """What `asdict` has made of them."""
        endings = {
            key: {name: Ending(**each) for name, each in told.get(key, {}).items()}
            for key in ("endings", "unsettled")
        }
        return cls(**told | endings)

    def write(self, state: Path, *, mirrored: bool = True) -> None:
        """Make them durable, all or nothing; without `mirrored` on this machine alone for now."""
        facts = {"format": FORMAT, **asdict(self)}
        content = json.dumps({**facts, "sha256": _checksum(facts)}, indent=1).encode()
        path = state / _NAME
        if not path.exists() or path.read_bytes() != content:
            durable_files.replace(path, content)
            if mirrored:
                sync_mirror(state)

    def tables(self, given: list[Table]) -> list[Table]:
        """The queries that run now: those of the file, or what they were until they end."""
        going_on = {name: each for name, each in self.endings.items() if each.windows}
        left_out = {*going_on, *(each.successor for each in going_on.values())}
        named = [table | {"name": self.names.get(table["name"], table["name"])} for table in given]
        named += self.asked.values()
        now = [table for table in named if table["name"] not in left_out]
        return now + [self.texts[name] for name in going_on]

    @property
    def settled(self) -> tuple[Any, ...]:
        """All but the texts, which every start brings up to date."""
        return self.names, self.endings, self.begins


def _checksum(facts: Table) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def edit(state: Path, change: Callable[[Changes], Changes], *, mirrored: bool = True) -> None:
    """Change those of a state directory; nobody else does so meanwhile."""
    fd = os.open(state / f".{_NAME}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(fd, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        change(Changes.read(state)).write(state, mirrored=mirrored)


def keep_texts(state: Path, texts: Mapping[str, Table]) -> None:
    """Remember how queries were started, to go on so when the file says something else.

    That alone takes no state over: it is durable in a bucket with the first step.
    """
    edit(state, lambda known: replace(known, texts={**known.texts, **texts}), mirrored=False)


def end_due(state: Path, ledgers: Iterable[LedgerPlace] = ()) -> bool:
    """End the runs that have published all they may; True if there was one.

    After a kill anywhere the next call does the rest: what is ended stays ended. `ledgers`: where
    a run's ledger may be, if it is not where the run has left it.
    """
    endings = Changes.read(state).endings
    due = {name: e for name, e in endings.items() if e.is_over(state / safe_name(name))}
    for name, each in due.items():
        _end_run(state / safe_name(name), each, [*ledgers])
    begins = {e.successor: e.at for e in due.values() if e.successor and e.at is not None}

    def without(known: Changes) -> Changes:
        left = {name: e for name, e in known.endings.items() if due.get(name) != e}
        return replace(known, endings=left, begins={**known.begins, **begins})

    if due:
        edit(state, without)
    return bool(due)


def _end_run(folder: Path, ending: Ending, ledgers: list[LedgerPlace]) -> None:
    about = read_about(folder)
    if about is None or about["run"].hex() != ending.run:
        return
    place = current_ledger_place(folder, about, ledgers)
    if not place.exists():
        raise StateError(
            f"the run in {folder} is to end, and the ledger that it is charged to, {place}, is not "
            "there; restore it, or name it in the pipeline file"
        )
    with closing(Ledger(place)) as ledger:
        if is_known(ledger, ending.dataset, ending.run):
            ledger.end(ending.dataset, ending.run, because=ending.because, who=ending.who)
    for key in sorted((folder / "windows").glob("*.key")):
        durable_files.erase(key)  # nothing of it is drawn again


def is_known(ledger: Ledger, dataset: str, run: str) -> bool:
    """Does the book know of the run? One that was begun and not charged it may not."""
    paid = {
        line["run"]
        for book in ledger.report()
        if book["dataset"] == dataset
        for line in book["spent_on"]
    }
    return run in paid or ledger.known(run).dataset == dataset
