"""State directories that are kept elsewhere, too: told before the ledger learns anything new.

A mirror is asked to take what a directory holds now, and returns when that is durable. What a
ledger knows of a run, its mirror has: so whatever is lost of the directory itself, the mirror holds
what a kill could have left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dpstream.errors import SHOWN_PLACES, LedgerError, StateError
from dpstream.privacy.ledger.store import LedgerAddress


class Mirror(Protocol):
    """Where a state directory is kept, too."""

    @property
    def ledger(self) -> LedgerAddress:
        """The ledger of those who name none."""

    @property
    def place(self) -> str:
        """What users call it."""

    def sync(self, *, claim: bool = True) -> None:
        """Make durable there what the directory holds; refused if another has taken over.

        The first time takes it over. Without `claim` nothing is written before that.
        """

    def refuse_moved(self) -> None:
        """Raise an error if another process has gone on since this copy was made."""


_MIRRORS: dict[Path, Mirror] = {}


def set_mirror(folder: Path, mirror: Mirror) -> None:
    """Keep a directory, and what is in it, in a mirror from now on; errors name its place."""
    _MIRRORS[folder.resolve()] = mirror
    for path in (folder, folder.resolve()):
        SHOWN_PLACES[str(path)] = mirror.place
        SHOWN_PLACES[str(path.parent)] = mirror.place.rstrip("/").rpartition("/")[0]


def mirror_of(folder: Path | None) -> Mirror | None:
    """The mirror of a directory, or of one that it is in."""
    if folder is None or not _MIRRORS:
        return None
    folder = folder.resolve()
    found = (_MIRRORS.get(place) for place in (folder, *folder.parents))
    return next((mirror for mirror in found if mirror is not None), None)


def sync_mirror(folder: Path, *, claim: bool = True) -> None:
    """Have the mirror of a directory take what it holds, if it has one."""
    mirror = mirror_of(folder)
    if mirror is not None:
        mirror.sync(claim=claim)


@contextmanager
def refusing_moved(folder: Path | None) -> Iterator[None]:
    """What does not agree with its ledger may be a copy behind which another process goes on."""
    try:
        yield
    except (StateError, LedgerError):
        mirror = mirror_of(folder)
        if mirror is not None:
            mirror.refuse_moved()
        raise
