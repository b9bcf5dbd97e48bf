"""A run's state directory: who it is, its snapshots, its log, and whether they belong together.

run.dps           mechanism, dataset, run id, a check of the secret
snapshot.dps      the newest state; snapshot.1.dps the one before
inputs-<run>.log  digests of every later step, durable before its noise
ledger            the book, unless the run shares another
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpstream.errors import StateError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, read_packed, write_packed
from dpstream.privacy.state.secret import beside


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a state directory says about its run."""

    folder: Path
    about: dict[str, Any]
    snapshot: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """The run and its last whole snapshot; an older generation covers a bad medium."""
        about = read_packed(folder / "run.dps", kind="run")
        try:
            snapshot = read_packed(folder / "snapshot.dps", kind="snapshot")
        except StateError:
            if not (folder / "snapshot.1.dps").exists():
                raise
            snapshot = read_packed(folder / "snapshot.1.dps", kind="snapshot")
        return cls(folder=folder, about=about, snapshot=snapshot)

    def secret(self, given: Secret | bytes | str | Path | None) -> Secret:
        """The secret that the run was made with: the given one, or the one beside the directory."""
        if given is None or isinstance(given, str | Path):
            secret = Secret.load(beside(self.folder) if given is None else given)
        else:
            secret = Secret.of(given)
        if secret.key("check", self.about["run"]) != self.about["secret check"]:
            raise StateError(
                f"{self.folder} was made with another secret; name the right one, "
                "or start a new run"
            )
        return secret

    def ledger(self, given: Ledger | str | Path | None) -> Ledger:
        """The book to charge: the given one, or the run's own (never a copy of it).

        One in memory that was not charged yet moves to the file that the run is charged to.
        """
        own = self.folder / "ledger"
        place = own if own.exists() else Path(self.about.get("ledger place", "of its own"))
        if isinstance(given, Ledger) and given.path is None:
            move_book(given, place, self.folder)
        if given is not None:
            return given if isinstance(given, Ledger) else Ledger(given)
        if place != own:
            raise StateError(
                f"{self.folder} keeps its budget in another ledger, {place}; name that one "
                "(--ledger, or ledger= in Python)"
            )
        book = Ledger(own)
        if book.identity() != self.snapshot["ledger"]:
            raise StateError(
                f"{self.folder} is a copy, its ledger too; two copies of a book cannot keep one "
                "budget; name the ledger that counts"
            )
        return book

    def mismatch(self, ledger: Ledger) -> str:
        """Why `ledger` is not the book that this run was charged to; "" if it is."""
        dataset, run = self.about["dataset"], self.snapshot["run"].hex()
        if ledger.terms(dataset) is None or not ledger.knows(dataset, run):
            return "knows nothing of this run"
        if ledger.identity() != self.snapshot["ledger"]:
            return "is another file than the one the run was charged to"
        if not ledger.has(self.snapshot["ledger head"]):
            return "lacks charges that it had: it was rolled back"
        return ""

    def open_log(self, ledger: Ledger) -> InputLog | None:
        """The run's log, if it is the one the snapshot was taken with and holds every step."""
        run = self.snapshot["run"]
        path = log_path(self.folder, run)
        if not path.exists():
            return None
        log = InputLog(path, run=run)
        charged = ledger.newest_step(self.about["dataset"], run.hex())
        whole = charged <= max(log.last, self.snapshot["logged from"] - 1)
        if log.identity != self.snapshot["log"] or not whole:
            log.close()
            return None
        if log.ledger_head is not None and not ledger.has(log.ledger_head):
            log.close()
            raise StateError(
                f"{ledger.path} lacks charges that {self.folder} has seen: it was rolled back; "
                "restore it"
            )
        return log


def move_book(ledger: Ledger, place: Path, folder: Path) -> None:
    """A book in memory becomes the file that a begun run is charged to, which must be there."""
    if not place.exists():
        raise StateError(
            f"the ledger {place}, which {folder} is charged to, is gone; restore it, or use a new "
            "state directory (a new run, charged anew)"
        )
    ledger.persist(place)


def log_path(folder: Path, run: bytes) -> Path:
    """Where a run's inputs are logged."""
    return folder / f"inputs-{run.hex()[:16]}.log"


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Say whose directory this is."""
    write_packed(folder / "run.dps", about, kind="run")


def write_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Put a new snapshot in place of the last one, which becomes the older generation."""
    current = folder / "snapshot.dps"
    if current.exists():
        last = read_packed(current, kind="snapshot")
        write_packed(folder / "snapshot.1.dps", last, kind="snapshot")
    write_packed(current, snapshot, kind="snapshot")
