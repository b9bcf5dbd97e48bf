"""What every engine's run of a query has in common: its plan, its place, its budget."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from dpstream.engines.arrivals import BUFFER
from dpstream.engines.chunks import Aside
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.directory import KIND, kept_types, open_directory
from dpstream.engines.iterated import IteratedRun, refuse_endless_files, refuse_shared_noise
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.run_directory import RunDirectory, read_about
from dpstream.privacy.spend import noise_versions
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.window_keys import MemoryWindowKeys
from dpstream.stages.column_types import Types
from dpstream.stages.plan import Plan, planned
from dpstream.stages.query import Query
from dpstream.stages.query_types import types_before_rows, types_of
from dpstream.stages.release_table import release_schema


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the work is done; none of it changes what is published."""

    buckets: int = 0
    """Hash buckets; 0: one per core. A state directory keeps the number it was made with."""
    threads: int = 0
    """0: one per core."""
    snapshot_every: int = 10
    """Steps between two snapshots."""
    memory: int = 1 << 31
    """Bytes of rows that may wait for later steps; beyond, files are read again."""
    buffer: int = BUFFER
    """Bytes of a live source's rows that are held for queries that lag; beyond, they are read from
    the source again (or, where that cannot be and there is no state directory, reading waits)."""
    run_id: bytes | None = None
    """For tests alone: runs that share it and their secret share their noise."""


@dataclass(kw_only=True)
class Storage:
    """Where a run's keys and budget are: on disk, or in this process alone."""

    run: bytes
    secret: Secret
    ledger: Ledger
    keys: Any
    directory: RunDirectory | None = None

    @property
    def run_tag(self) -> str:
        """See `run_tag`."""
        return run_tag(self.run)

    @property
    def digest_key(self) -> bytes:
        """The key of its input log's digests."""
        return self.secret.key("input digest", self.run)


@dataclass(kw_only=True)
class QueryRun(IteratedRun):
    """A running GROUP BY."""

    query: Query
    aside: Aside
    folder: Path | None = None
    secret: Secret | bytes | str | Path | None = None
    ledger: Ledger | str | Path | None = None
    dataset: str = "stream"
    clock: Clock = field(default_factory=SystemClock)
    options: Options = field(default_factory=Options)
    plan: Plan = field(init=False)
    engine: ClassVar[str] = "embedded"

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder, kind=KIND)
        if kept is not None and kept["notes"]["engine"] != self.engine:
            raise StateError(
                f"{self.folder} was begun by the engine {kept['notes']['engine']!r} and goes on "
                f"there, not in {self.engine!r}; or use a new state directory (a new run, charged "
                "anew)"
            )
        start = self.clock.now() if kept is None else kept["notes"]["now"]
        self._now = start
        if self.live and self.query.time is None:
            raise InvalidParameter(
                "a live source needs a query with time= and windows (in SQL: FROM TUMBLE(...), or "
                "time_column); without a time it would never be published; standard input is live "
                "too: rows that are complete belong in a file"
            )
        refuse_shared_noise(self.options.run_id, self.folder, self.ledger)
        refuse_endless_files(query_is_live=self.query.live, source_is_live=self.live)
        self.plan = planned(self.query.starting(start))

    @property
    @abstractmethod
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """How many triggers have been published."""

    @abstractmethod
    def _schemas(self) -> list[Types | None]:
        """What the sources declare, as far as they do by now."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""
        types = known_types(self.plan.query, self.folder, self._schemas())
        return release_schema(self.plan, types)

    def _notes(self) -> dict[str, Any]:
        """What the state directory remembers of how the run began."""
        return {"now": self._now, "engine": self.engine}

    def _buckets(self) -> int:
        return self.options.buckets or len(os.sched_getaffinity(0))

    def _storage(self) -> Storage:
        if self.folder is None:
            ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
            run = mint_run_id() if self.options.run_id is None else self.options.run_id
            secret = Secret.of(self.secret)
            tests = None if self.options.run_id is None else secret
            keys = MemoryWindowKeys(derived_for_tests=tests)
            return Storage(run=run, secret=secret, ledger=ledger, keys=keys)
        directory = open_directory(
            self.folder,
            facts=self._facts_of_query(),
            dataset=self.dataset,
            buckets=self._buckets(),
            given_secret=self.secret,
            given_ledger=self.ledger,
            notes=self._notes(),
            run_id=self.options.run_id,
        )
        return Storage(
            run=directory.run,
            secret=directory.secret,
            ledger=directory.ledger,
            keys=directory.keys,
            directory=directory,
        )

    def _facts_of_query(self) -> dict[str, str]:
        """What fixes the releases besides the data."""
        facts = self.plan.query.facts()
        facts["noise"] = canonical(tuple(noise_versions()))
        facts["counters"] = canonical(self.plan.matrices)
        return facts

    def _admit(self, storage: Storage) -> None:
        """Open the book if there is none; refuse early what will not fit."""
        terms, name = self.plan.terms(), self.plan.query.name
        storage.ledger.admit(self.dataset, terms, f"query {name!r}")

    def _pay(self, storage: Storage, fix_schema: Callable[[], Any]) -> QuerySpend:
        """Open the book if there is none, register the run, and charge it."""
        fix_schema()
        self._admit(storage)
        facts = canonical(("query", sorted(self._facts_of_query().items()), self.dataset))
        fingerprint = storage.secret.fingerprint(storage.run, facts)
        storage.ledger.register(self.dataset, storage.run.hex(), fingerprint)
        spend = QuerySpend(
            run=storage.run,
            query=self.plan.query.name,
            ledger=storage.ledger,
            dataset=self.dataset,
            keys=storage.keys,
        )
        self.plan.pay(spend, hashlib.sha256(fingerprint.encode()).hexdigest())
        return spend

    def _close(self, storage: Storage) -> None:
        if storage.directory is not None:
            storage.directory.close()
        elif not isinstance(self.ledger, Ledger):
            storage.ledger.close()


def run_tag(run: bytes) -> str:
    """Names a run in its tables, so that a sink can tell runs apart."""
    return hashlib.sha256(b"run mark" + run).hexdigest()[:16]


def known_types(query: Query, folder: Path | None, schemas: list[Types | None]) -> Types:
    """The types of unit and keys: those that a run has fixed, or would fix if it began now."""
    kept = {} if folder is None else kept_types(folder)
    now = types_of(query, schemas[0]) if schemas else types_before_rows(query)
    return now | kept


class Engine(Protocol):
    """Another place to run queries than this process."""

    def source(self, spec: Any) -> Any:
        """A source that only this engine knows; None: it is for the connectors."""

    def sink(self, spec: Any) -> Any:
        """A sink that only this engine knows; None: it is for the connectors."""

    def start(self, **facts: Any) -> QueryRun:
        """A run."""
