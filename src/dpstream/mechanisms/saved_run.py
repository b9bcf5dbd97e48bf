"""A Runner's state directory: which run it holds, and its snapshots.

run.dps           mechanism, dataset, run id, a check of the secret
snapshot.dps      the newest state; snapshot.1.dps the one before
inputs-<run>.log  digests of every later step, durable before its noise
ledger            the book, unless the run shares another

`privacy/run_directory.py` says how the files and the ledger are tied to each other.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpstream.errors import StateError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.run_directory import (
    About,
    RunDirectory,
    existing_ledger,
    keep_book,
    known_secret,
    open_run,
    read_about,
    refuse_moved,
    refuse_other_secret,
)
from dpstream.privacy.state import InputLog, Secret, read_packed, write_packed


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a state directory says about its run."""

    folder: Path
    about: About
    snapshot: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """The run and its last whole snapshot; an older generation covers a bad medium."""
        about = read_about(folder)
        if about is None:
            raise StateError(f"there is no run at {folder}: it has no run.dps")
        if "mechanism" not in about:
            raise StateError(f"{folder} holds the state of a {about['kind']}, not of a Runner")
        try:
            snapshot = read_packed(folder / "snapshot.dps", kind="snapshot")
        except StateError:
            if not (folder / "snapshot.1.dps").exists():
                raise
            snapshot = read_packed(folder / "snapshot.1.dps", kind="snapshot")
        return cls(folder=folder, about=about, snapshot=snapshot)

    def secret(self, given: Secret | bytes | str | Path | None) -> Secret:
        """The secret that the run was made with: the given one, or the one beside the directory."""
        secret = known_secret(self.folder, given)
        refuse_other_secret(self.folder, self.about, secret)
        return secret

    def ledger(self, given: Ledger | str | Path | None) -> Ledger:
        """The book to charge: the given one, or the run's own."""
        if isinstance(given, Ledger):
            keep_book(given, self.folder)
            return given
        return existing_ledger(self.folder, self.about, given)

    def open(self, secret: Secret, ledger: Ledger) -> RunDirectory:
        """The directory, to go on with its run; refused if it is not what the ledger has seen."""
        if self.snapshot["run"] != self.about["run"]:
            raise StateError(
                f"{self.folder} holds a snapshot of another run than its run.dps names; restore "
                "both, or start a new run that is charged anew (new_run=True)"
            )
        found = open_run(self.folder, about=self.about, secret=secret, ledger=ledger)
        try:
            self.refuse_rolled_back(ledger)
        except BaseException:
            found.close()
            raise
        return found

    def refuse_rolled_back(self, ledger: Ledger) -> None:
        """The run's own ledger must hold all that the run has seen in it, also for a new run."""
        own = ledger.identity() == self.about["ledger"]
        if own and not ledger.has(self.snapshot["ledger head"]):
            raise StateError(
                f"{ledger.path} lacks charges that {self.folder} has seen: it was rolled back; "
                "restore it"
            )

    def take_for_new_run(self, ledger: Ledger) -> None:
        """A new run may begin from this snapshot: nobody goes on with the old one just now.

        Its ledger may be another one, but no copy of the old one: two copies of a book cannot keep
        one budget.
        """
        if self.about["own ledger"] and ledger.place == self.folder.resolve() / "ledger":
            refuse_moved(self.folder, self.about, ledger)
        self.refuse_rolled_back(ledger)
        log = self.folder / self.about["log"]
        if log.exists() and log.stat().st_size:
            InputLog(log, run=self.about["run"]).close()  # it is locked while somebody goes on


def write_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Put a new snapshot in place of the last one, which becomes the older generation."""
    current = folder / "snapshot.dps"
    with suppress(StateError):  # there is none, or it is damaged and the older one was used
        last = read_packed(current, kind="snapshot")
        write_packed(folder / "snapshot.1.dps", last, kind="snapshot")
    write_packed(current, snapshot, kind="snapshot")
