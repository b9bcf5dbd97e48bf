"""A query's state directory: which run it belongs to, its log, its keys, its snapshots.

run.dps        the run id, the query, a check of the secret; written before the first charge
inputs.log     epochs, column types, digest and positions of every step; locked by one process
windows/       one key per open window, wrapped by the secret
segments/, manifest-*.dps   snapshots, two generations
spark.dps, shared/          in their place: progress and files of a run on Spark
ledger         the book, unless the run shares another

`privacy/run_directory.py` says how the files and the ledger are tied to each other.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.errors import StateError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.run_directory import ANEW, RunDirectory, read_about
from dpstream.privacy.state import InputLog, Secret, WindowKeys
from dpstream.privacy.state.inputs import noted_types

KIND = "GROUP BY query"


@dataclass(kw_only=True)
class StateDirectory:
    """An open state directory (`open_directory.py` opens it); its log holds the lock."""

    run_directory: RunDirectory
    keys: WindowKeys
    created: bool
    own_ledger: bool
    made: tuple[Path, ...] = ()
    """Files and folders that did not exist before, the outermost last."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.run_directory.folder

    @property
    def about(self) -> dict[str, Any]:
        """What `run.dps` says."""
        return self.run_directory.about

    @property
    def secret(self) -> Secret:
        """The run's secret."""
        return self.run_directory.secret

    @property
    def ledger(self) -> Ledger:
        """The ledger that the run is charged to."""
        return self.run_directory.ledger

    @property
    def log(self) -> InputLog:
        """What each step has read."""
        return self.run_directory.log

    @property
    def run(self) -> bytes:
        """The run's id."""
        return self.run_directory.run

    def record(self, step: int, digests: list[bytes], *, positions: Any = None) -> None:
        """Make the input of `step` and those after it durable, before noise is drawn for them."""
        self.run_directory.record(step, digests, positions=positions)

    def types(self) -> dict[str, pa.DataType]:
        """The types of unit and keys that this run has met; none at first."""
        return read_types(self.log)

    def keep_types(self, types: dict[str, pa.DataType]) -> None:
        """Fix the types of unit and keys: after a restart 5 and "5" must not be two users."""
        write_types(self.log, types)

    def refuse_undone_erasure(self, step: int, chains: list[bytes]) -> None:
        """Refuse to go on from before a unit was erased, or from a state that still has it.

        `chains`: the digest chain before each erasure of the state at this step, and that of now.
        """
        erasure = self.ledger.known(self.run.hex()).erasure
        known = erasure is None or (step == erasure[0] and bytes.fromhex(erasure[1]) in chains)
        if erasure is None or known or step > erasure[0]:
            return
        raise StateError(
            f"a unit was erased from {self.folder} before step {erasure[0]}, and the snapshot of "
            f"that is lost; going on from an older one would bring the unit back: restore it, or "
            f"{ANEW}"
        )

    def close(self) -> None:
        """Release the lock."""
        self.run_directory.close()
        if self.own_ledger:
            self.ledger.close()

    @property
    def unused(self) -> bool:
        """Was it made just now, and nothing drawn?"""
        return self.created and self.log.unused

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


def kept_types(folder: Path) -> dict[str, pa.DataType]:
    """The types that the run of a directory has met, which may be running; none without one."""
    about = read_about(folder)
    path = None if about is None else folder / about["log"]
    return {} if path is None or not path.exists() else _types(noted_types(path)[-1:])


def read_types(log: InputLog) -> dict[str, pa.DataType]:
    """The types of unit and keys that a run has met; none at first."""
    return _types(log.types[-1:])


def _types(newest: list[bytes]) -> dict[str, pa.DataType]:
    found = [pa.ipc.read_schema(pa.py_buffer(one)) for one in newest]
    return {field.name: field.type for schema in found for field in schema}


def write_types(log: InputLog, types: dict[str, pa.DataType]) -> None:
    """Fix the types of unit and keys."""
    log.keep_types(pa.schema(list(types.items())).serialize().to_pybytes())
