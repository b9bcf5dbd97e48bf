"""A query's state directory: who it belongs to, its log, its keys, its snapshots.

types.dps      the types of unit and keys
run.dps        the run id, the query, a check of the secret; written before the first charge
inputs.log     digest and positions of every step, durable before its noise; locked by one process
windows/       one key per open window, wrapped by the secret
segments/, manifest-*.dps   snapshots, two generations
spark.dps, shared/          in their place: progress and files of a run on Spark
ledger         the book, unless the run shares another
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.errors import StateError
from dpstream.mechanisms.saved_run import move_book
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import (
    InputLog,
    Secret,
    WindowKeys,
    read_packed,
    write_packed,
)

STATE_FORMAT = 1


@dataclass(kw_only=True)
class StateDirectory:
    """An open state directory (`open_directory.py` opens it); its log holds the lock."""

    folder: Path
    about: dict[str, Any]
    secret: Secret
    ledger: Ledger
    log: InputLog
    keys: WindowKeys
    created: bool
    own_ledger: bool
    made: tuple[Path, ...] = ()
    """Files and folders that did not exist before, the outermost last."""

    @property
    def run(self) -> bytes:
        """The run's id."""
        run: bytes = self.about["run"]
        return run

    def types(self) -> dict[str, pa.DataType]:
        """The types of unit and keys that this run has met; none at first."""
        return read_types(self.folder)

    def keep_types(self, types: dict[str, pa.DataType]) -> None:
        """Fix the types of unit and keys: after a restart 5 and "5" must not be two users."""
        write_types(self.folder, types)

    def close(self) -> None:
        """Release the lock."""
        self.log.close()
        if self.own_ledger:
            self.ledger.close()

    @property
    def unused(self) -> bool:
        """Was it made just now, and nothing drawn?"""
        return self.created and self.log.last < 0

    def withdraw(self) -> None:
        """Take back what was made just now, if nothing was drawn: a second try begins afresh."""
        if not self.unused:
            return
        self.close()
        for path in self.made:
            if path.is_dir():
                with suppress(OSError):  # it holds something else
                    path.rmdir()
            else:
                path.unlink(missing_ok=True)


def keep_book(ledger: Ledger, folder: Path) -> None:
    """A book in memory must not end before a run that is kept: it moves to a file.

    To the one that the directory is charged to, or to a new one in it.
    """
    if ledger.path is not None:
        return
    about, own = read_about(folder), folder / "ledger"
    if about is None:
        ledger.persist(own)
    else:
        move_book(ledger, own if own.exists() else Path(about.get("ledger place", own)), folder)


def read_types(folder: Path) -> dict[str, pa.DataType]:
    """The types of unit and keys that a run has met; none at first."""
    path = folder / "types.dps"
    if not path.exists():
        return {}
    stored = read_packed(path, kind="column types")
    return {field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(stored))}


def write_types(folder: Path, types: dict[str, pa.DataType]) -> None:
    """Fix the types of unit and keys."""
    schema = pa.schema(list(types.items())).serialize().to_pybytes()
    write_packed(folder / "types.dps", schema, kind="column types")


def read_about(folder: Path) -> dict[str, Any] | None:
    """What a directory says about its run; None if it holds none."""
    path = folder / "run.dps"
    if not path.exists():
        return None
    about: dict[str, Any] = read_packed(path, kind="query run")
    if about["format"] != STATE_FORMAT:
        raise StateError(
            f"{folder} has state format {about['format']}; this version reads {STATE_FORMAT}; use "
            "the version of dpstream that wrote it, or a new state directory"
        )
    return about
