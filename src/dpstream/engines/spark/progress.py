"""How far a run is: what the driver makes durable between two jobs.

The newest copy says which step is next, which rows wait, and which files hold each bucket's state.
Files that it does not name are leftovers of a job that did not come to its end.

There is one copy, replaced atomically and durably, with a checksum. An older one would not do: the
stream's own checkpoint has gone on, rows that were published are removed, and the noise of windows
that are over is erased with their keys, at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpstream.engines.spark.segments import Stored
from dpstream.engines.spark.waiting import StepDigests, Waiting
from dpstream.errors import StateError
from dpstream.privacy.state import read_packed, write_packed

_KIND = "spark progress"


@dataclass(kw_only=True)
class Progress:
    """Between two jobs."""

    run: str
    """The tag of the run that it belongs to."""
    step: int = 0
    chain: bytes = bytes(16)
    """The digest chain of all steps before."""
    jobs: int = 0
    """How many were begun: their files have names of their own."""
    waiting: list[Waiting] = field(default_factory=list)
    digests: StepDigests = field(default_factory=dict)
    """Of the rows that wait, by step."""
    units: dict[int, list[Stored]] = field(default_factory=dict)
    groups: dict[int, list[Stored]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    """Inputs that were read to their end."""
    batch: int = -1
    """The last batch of the stream whose rows wait or have been published."""
    batch_digests: StepDigests = field(default_factory=dict)
    batch_arrived: int | None = None
    """The step at which that batch was read; None: its rows' event times tell."""

    @classmethod
    def load(cls, path: Path, run: str) -> Progress:
        """The newest one; another run's is refused."""
        if not path.exists():
            return cls(run=run)
        try:
            kept = read_packed(path, kind=_KIND)
        except StateError as problem:
            raise StateError(
                f"{path} cannot be used ({problem}); restore it from a backup of the whole state "
                "directory, or use a new one (a new run, charged anew)"
            ) from None
        if kept["run"] != run:
            raise StateError(
                f"{path} belongs to another run; restore the run's own, or use a new state "
                "directory (a new run, charged anew)"
            )
        kept["waiting"] = [Waiting.from_json(one) for one in kept["waiting"]]
        for name in ("digests", "batch_digests"):
            kept[name] = {step: (int(digest), count) for step, digest, count in kept[name]}
        return cls(**kept)

    def save(self, path: Path) -> None:
        """Make it the newest one, durably."""
        kept: dict[str, Any] = dict(self.__dict__)
        kept["waiting"] = [one.to_json() for one in self.waiting]
        for name in ("digests", "batch_digests"):
            # numbers of 128 bits, as text
            kept[name] = [
                [step, str(digest), count] for step, (digest, count) in kept[name].items()
            ]
        write_packed(path, kept, kind=_KIND)

    def extend(self, stage: str, bucket: int, segment: Stored, *, whole: bool) -> None:
        """Add a file to a bucket's chain, or put it in place of the chain."""
        chains = self.units if stage == "units" else self.groups
        chains[bucket] = [segment] if whole else [*chains.get(bucket, []), segment]

    def names(self) -> set[str]:
        """Every file that is needed."""
        chains = [*self.units.values(), *self.groups.values()]
        return {one.name for one in self.waiting} | {name for chain in chains for name, *_ in chain}
