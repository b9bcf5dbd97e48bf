"""What a ledger knows of each run besides its charges: enough to recognise its state directory.

A state directory can lose files, or be put back from an older copy. The ledger is the witness: it
is told of every start (epoch) and of every step's input before noise is drawn for it, and how many
windows have had a key. What does not agree with it is refused (`run_directory.py`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from dpstream.privacy.state.journal import Record

RECENT = 256
"""Newest steps whose digests are held in memory, or the newest batch of them; the file has all."""


@dataclass(kw_only=True)
class KnownRun:
    """One run."""

    dataset: str = ""
    fingerprint: str = ""
    """Of everything that fixes its releases besides the data; "" until it is registered."""
    epoch: str = ""
    """Of its newest start; "" if none was kept in a state directory."""
    reached: int = -1
    """The newest step whose input is known."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the newest steps, in order."""
    types: str = ""
    """Digest of the types of its columns at that step."""
    minted: int = 0
    final: int = 0
    """Windows that have had a key, and those whose keys were erased: from 0 to here, exclusive."""
    finished: int | None = None
    """After how many steps a series was finished: none may follow."""
    erasure: tuple[int, str] | None = None
    """Before which step a unit was last erased from the state, and the digest chain from there."""

    def apply(self, record: Record) -> None:
        """Take in a record about this run."""
        self.dataset = record["dataset"]
        if "fingerprint" in record:
            self.fingerprint = record["fingerprint"]
        elif "epoch" in record:
            self.epoch = record["epoch"]
        elif "reached" in record:
            self._reach(record["reached"], record["digests"])
            self.types = record["types"]
        elif "minted" in record:
            self.minted = max(self.minted, record["minted"])
            self.final = max(self.final, record["final"])
        elif "finished" in record:
            self.finished = record["finished"]
        elif "erasure" in record:
            self.erasure = (record["erasure"], record["digest"])

    def as_of_now(self) -> KnownRun:
        """A copy that does not change."""
        found = copy(self)
        found.digests = dict(self.digests)
        return found

    def _reach(self, last: int, digests: list[str]) -> None:
        first = last + 1 - len(digests)
        self.digests.update(enumerate(digests, start=first))
        self.reached = max(self.reached, last)
        while len(self.digests) > max(RECENT, len(digests)):
            del self.digests[next(iter(self.digests))]

    def records(self, run: str) -> list[Record]:
        """Records that, applied to a new one, make this one again."""
        about = {"dataset": self.dataset, "run": run}
        found: list[Record] = []
        if self.fingerprint:
            found.append(about | {"fingerprint": self.fingerprint})
        if self.epoch:
            found.append(about | {"epoch": self.epoch})
        if self.digests:
            digests = [self.digests[step] for step in sorted(self.digests)]
            found.append(about | {"reached": self.reached, "digests": digests, "types": self.types})
        if self.minted or self.final:
            found.append(about | {"minted": self.minted, "final": self.final})
        if self.finished is not None:
            found.append(about | {"finished": self.finished})
        if self.erasure is not None:
            found.append(about | {"erasure": self.erasure[0], "digest": self.erasure[1]})
        return found


def is_about_run(record: Record) -> bool:
    """Is this a record about a run, not a book, a charge or a settlement?"""
    return "run" in record and "amount" not in record
