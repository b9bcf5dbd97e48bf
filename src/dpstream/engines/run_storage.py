"""Where a run's keys, budget and log of inputs are: in its state directory, or in this process.

run.dps        the run id, the query, a check of the secret; written before the first charge
inputs.log     epochs, column types, digest and positions of every step; locked by one process
windows/       one key per open window, wrapped by the secret
segments/, manifest-*.dps   snapshots, two generations
spark.dps, shared/          in their place: progress and files of a run on Spark
ledger         the book, unless the run shares another

`privacy/state/run_directory.py` says how the files and the ledger are tied to each other, and
refuses what does not belong together before anything is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.privacy.ledger.charges import chain_digest
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import InputLog, Secret, mint_run_id
from dpstream.privacy.state.durable_files import remove_leftovers, writing
from dpstream.privacy.state.input_log import logged_types
from dpstream.privacy.state.run_directory import (
    Facts,
    GivenLedger,
    GivenSecret,
    RunDirectory,
    find_run,
    make_run,
    open_ledger,
    open_run,
    read_about,
)
from dpstream.privacy.state.secret import beside
from dpstream.privacy.state.window_keys import MemoryWindowKeys
from dpstream.query.column_types import Types
from dpstream.query.query import Query
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

    @property
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
    ) -> bytes:
        """Make what steps have read durable, so that their noise may be drawn.

        `before`: the chain of digests that the steps before have ended; returns the one of these.
        """
        link = partial(chain_digest, self.digest_key)
        _, *chains = accumulate(contents, link, initial=before)
        if self.directory is not None:
            self.directory.record(first, chains, positions=positions)
        return chains[-1]

    def close(self) -> None:
        """Release the locks."""
        if self.directory is not None:
            self.directory.close()
        elif self.owns_ledger:
            self.ledger.close()


def run_tag(run: bytes) -> str:
    """Names a run in its tables, so that a sink can tell runs apart."""
    return hashlib.sha256(b"run mark" + run).hexdigest()[:16]


def open_storage(
    folder: Path | None,
    *,
    facts: Facts,
    dataset: str,
    buckets: int,
    given_secret: GivenSecret,
    given_ledger: GivenLedger,
    notes: dict[str, Any],
    run_id: bytes | None = None,
) -> RunStorage:
    """Open a query's directory, or make it; another query, secret or ledger is refused.

    Without a folder the run ends with its process. With `run_id`, which is for tests, window keys
    are derived instead of drawn.
    """
    owns_ledger = not isinstance(given_ledger, Ledger)
    if folder is None:
        secret = Secret.of(given_secret)
        return RunStorage(
            run=mint_run_id() if run_id is None else run_id,
            secret=secret,
            ledger=given_ledger if isinstance(given_ledger, Ledger) else Ledger(given_ledger),
            keys=MemoryWindowKeys(derived_for_tests=None if run_id is None else secret),
            buckets=buckets,
            owns_ledger=owns_ledger,
        )
    missing = tuple(path for path in _paths(folder, given_ledger) if not path.exists())
    about, secret = find_run(
        folder,
        kind=KIND,
        facts=facts,
        names=Query.names_of_keys(),
        dataset=dataset,
        given_secret=given_secret,
    )
    with ExitStack() as undo, writing(folder):
        ledger = open_ledger(folder, about, given_ledger)
        if owns_ledger:
            undo.callback(ledger.close)
        if about is None:
            directory = make_run(
                folder,
                kind=KIND,
                run=mint_run_id() if run_id is None else run_id,
                dataset=dataset,
                secret=secret,
                ledger=ledger,
                more={"facts": facts, "buckets": buckets, "notes": notes},
            )
            directory.made = missing
        else:
            directory = open_run(folder, about=about, secret=secret, ledger=ledger)
        undo.callback(directory.close)  # a refused directory must not stay locked
        for place in (folder, folder / "windows", folder / "segments"):
            remove_leftovers(place, overwrite=True)  # a kill may leave half a key, or noise
        directory.open_keys(derived_for_tests=run_id is not None)
        undo.pop_all()
    directory.owns_ledger = owns_ledger
    return RunStorage(
        run=directory.run,
        secret=secret,
        ledger=ledger,
        keys=directory.keys,
        buckets=directory.about["buckets"],
        owns_ledger=owns_ledger,
        directory=directory,
    )


def _paths(folder: Path, ledger: GivenLedger) -> list[Path]:
    """What a run on this folder makes, the outermost last: `withdraw` takes it back."""
    names = ["spark.dps", "run.dps", "inputs.log"]
    names += ["windows/final", "windows/minted", "windows", "segments", "shared"]
    names += ["ledger", "ledger.head"] if ledger is None else []
    return [*(folder / name for name in names), beside(folder), folder]


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
