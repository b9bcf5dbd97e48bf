"""Where a run's keys, budget and log of inputs are: in its state directory, or in this process.

run.dps        the run id, the query, a check of the secret; written before the first charge
inputs.log     epochs, column types, digest and positions of every step; locked by one process
windows/       one key per open window, wrapped by the secret
segments/, manifest-*.dps   snapshots, two generations
finished-*.log              files of a live directory that were read to their ends
spark.dps, shared/          in their place: progress and files of a run on Spark
tables/                     versions of public tables that are read anew
ledger         the book, unless the run shares another

`privacy/state/run_directory.py` says how the files and the ledger are tied to each other, and
refuses what does not belong together before anything is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.engines.table_versions import first_versions
from dpstream.privacy.ledger.charges import chain_digest
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret
from dpstream.privacy.state.input_log import logged_types
from dpstream.privacy.state.run_directory import (
    RunDirectory,
    read_about,
)
from dpstream.query.column_types import Types
from dpstream.query.row_spec import RowSpec
from dpstream.records import Position
from dpstream.rows.column_values import types_before_rows, types_of
from dpstream.rows.row_reader import RowReader

KIND = "GROUP BY query"
START_CHAIN = bytes(16)
"""The chain of digests before the first step."""


@dataclass(kw_only=True)
class RunStorage:
    """A run's id and secret, its ledger, its windows' keys, and its directory if it has one."""

    run: bytes
    secret: Secret
    ledger: Ledger
    keys: Any
    buckets: int
    """Hash buckets; a run that goes on has as many as it began with."""
    owns_ledger: bool
    directory: RunDirectory | None = None

    @property
    def run_tag(self) -> str:
        """See `run_tag`."""
        return run_tag(self.run)

    @cached_property
    def digest_key(self) -> bytes:
        """The key of the log's digests."""
        return self.secret.key("input digest", self.run)

    def reader(self, query: RowSpec) -> RowReader:
        """Reads rows with the run's keys, and with the column types that the run has met."""
        reader = RowReader(query, self.secret, self.run)
        if self.directory is not None:
            keep_types(reader, self.directory.log)
        return reader

    def log_steps(
        self,
        first: int,
        contents: Iterable[bytes],
        before: bytes,
        *,
        positions: dict[str, Position] | None = None,
    ) -> list[bytes]:
        """Make what steps have read durable, so that their noise may be drawn.

        `before`: the chain of digests that the steps before have ended; returns the one that each
        of these ends.
        """
        link = partial(chain_digest, self.digest_key)
        _, *chains = accumulate(contents, link, initial=before)
        if self.directory is not None:
            self.directory.record(first, chains, positions=positions)
        return chains

    def close(self) -> None:
        """Release the locks."""
        if self.directory is not None:
            self.directory.close()
        elif self.owns_ledger:
            self.ledger.close()


def run_tag(run: bytes) -> str:
    """Names a run in its tables, so that a sink can tell runs apart."""
    return hashlib.sha256(b"run mark" + run).hexdigest()[:16]


def paths_to_make(folder: Path, query: RowSpec) -> tuple[Path, ...]:
    """What a run that begins in a folder makes, the outermost last: `withdraw` takes it back.

    Its ledger and its secret stay: others may have charged that book meanwhile.
    """
    names = ["spark.dps", "run.dps", "inputs.log"]
    names += ["windows/final", "windows/minted", "windows", "segments", "shared"]
    copies = list(first_versions(query, folder))
    tables = [*copies, *(path.parent for path in copies), *{path.parents[1] for path in copies}]
    paths = [*(folder / name for name in names), *tables, folder]
    return tuple(path for path in paths if not path.exists())


def keep_types(reader: RowReader, log: InputLog) -> None:
    """Read with the types that a run has met, and log those that it meets.

    After a restart 5 and "5" must not be two users.
    """
    reader.types = _types(log.types[-1:])
    reader.learned = lambda types: log.keep_types(
        pa.schema(list(types.items())).serialize().to_pybytes()
    )


def known_types(query: RowSpec, folder: Path | None, schemas: list[Types | None]) -> Types:
    """The types of unit and keys: those that a run has fixed, or would fix if it began now.

    `schemas`: what the sources declare. The run of the folder may be running.
    """
    about = None if folder is None else read_about(folder)
    path = None if folder is None or about is None else folder / about["log"]
    kept = _types(logged_types(path)[-1:]) if path is not None and path.exists() else {}
    now = types_of(query, schemas[0]) if schemas else types_before_rows(query)
    return now | kept


def _types(newest: list[bytes]) -> dict[str, pa.DataType]:
    schemas = [pa.ipc.read_schema(pa.py_buffer(stored)) for stored in newest]
    return {field.name: field.type for schema in schemas for field in schema}


class OpenWindows:
    """Windows whose keys exist; they are erased once nothing can replay them."""

    def __init__(self, last_step: Callable[[int], int], erase: Callable[[int], None]) -> None:
        self._last_step, self._erase = last_step, erase
        self._known: set[int] = set()
        self._lock = Lock()  # the snapshots' writer settles while the engine goes on

    def add(self, *windows: int) -> None:
        """Their keys exist."""
        with self._lock:
            self._known.update(windows)

    def settle(self, before: int) -> None:
        """Erase the keys of windows whose last step is before this one."""
        with self._lock:
            over = sorted(w for w in self._known if self._last_step(w) < before)
            self._known.difference_update(over)
        for window in over:
            self._erase(window)


def step_content(step: int, total: tuple[int, int]) -> bytes:
    """What a step has read, in any order: the sum of its rows' digests, and their number."""
    digest, count = total
    return step.to_bytes(8, "little") + digest.to_bytes(16, "little") + count.to_bytes(8, "little")
