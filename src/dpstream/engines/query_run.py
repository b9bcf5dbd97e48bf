"""What every engine's run of a query has in common: its plan, its place, its budget."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from dpstream.engines.chunks import RejectHandler
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.embedded.arrivals import BUFFER
from dpstream.engines.query_directory import KIND, kept_types, open_directory
from dpstream.errors import InvalidParameter, StateError
from dpstream.group_by.release_table import release_schema
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.spend import noise_versions
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.run_directory import RunDirectory, read_about
from dpstream.privacy.state.window_keys import MemoryWindowKeys
from dpstream.query.column_types import Types
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.query import Query
from dpstream.query.row_spec import RowSpec
from dpstream.records import Source
from dpstream.rows.column_values import types_before_rows, types_of

# What every run has in common, whatever it publishes: it is iterated once, stopped and closed.


@dataclass(kw_only=True)
class IteratedRun(ABC):
    """A running query: iterate over its releases."""

    source: Source | None
    """Read live (by the clock) unless it is bounded."""
    _iterator: Generator[pa.Table, None, None] | None = field(init=False, default=None)
    _stop: Event = field(init=False, default_factory=Event)

    def stop(self) -> None:
        """End at the next occasion, durably; a later run goes on from there."""
        self._stop.set()

    def __iter__(self) -> Iterator[pa.Table]:
        """The releases. There is one iterator: a second one would be a second noisy copy."""
        if self._iterator is None:
            self._iterator = self._releases()
        return self._iterator

    def close(self) -> None:
        """Give up where it is: as a kill would, but with everything closed."""
        if self._iterator is None:
            return
        if getgeneratorstate(self._iterator) == GEN_RUNNING:
            self.stop()  # in a thread of its own, which closes it
        else:
            self._iterator.close()

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""

    @abstractmethod
    def erase_unit(self, unit: Any) -> int:
        """Erase one unit from the state directory, instead of running; how many places it had."""

    @abstractmethod
    def _releases(self) -> Generator[pa.Table, None, None]:
        """The life of the run."""


def refuse_shared_noise(
    run_id: bytes | None, folder: Path | None, ledger: Ledger | str | Path | None
) -> None:
    """Refuse a fixed run id where nothing remembers what its noise has met."""
    if run_id is not None and folder is None and ledger is not None:
        raise InvalidParameter(
            "a fixed run id needs a state directory: without its log the same noise could "
            "meet other data"
        )


def refuse_endless_files(*, query_is_live: bool, source_is_live: bool) -> None:
    """Refuse a query without a public range over files."""
    if query_is_live and not source_is_live:
        raise InvalidParameter(
            "a query over files needs its public range: give start and end (in SQL among OPTIONS: "
            "start = '2024-05-01', end = '2024-06-01'), from what is known and not from the rows; "
            "or read a directory that grows, live"
        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
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
class RunStorage:
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
    aside: RejectHandler
    folder: Path | None = None
    secret: Secret | bytes | str | Path | None = None
    ledger: Ledger | str | Path | None = None
    dataset: str = "stream"
    clock: Clock = field(default_factory=SystemClock)
    options: EngineOptions = field(default_factory=EngineOptions)
    plan: NoisePlan = field(init=False)
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
        if self.live and self.query.time_column is None:
            raise InvalidParameter(
                "a live source needs a query with time= and windows (in SQL: FROM TUMBLE(...), or "
                "time_column); without a time it would never be published; standard input is live "
                "too: rows that are complete belong in a file"
            )
        refuse_shared_noise(self.options.run_id, self.folder, self.ledger)
        refuse_endless_files(query_is_live=self.query.live, source_is_live=self.live)
        self.plan = plan_query(self.query.starting(start))

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

    def _storage(self) -> RunStorage:
        if self.folder is None:
            ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
            run = mint_run_id() if self.options.run_id is None else self.options.run_id
            secret = Secret.of(self.secret)
            tests = None if self.options.run_id is None else secret
            keys = MemoryWindowKeys(derived_for_tests=tests)
            return RunStorage(run=run, secret=secret, ledger=ledger, keys=keys)
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
        return RunStorage(
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

    def _admit(self, storage: RunStorage) -> None:
        """Open the book if there is none; refuse early what will not fit."""
        terms, name = self.plan.terms(), self.plan.query.name
        storage.ledger.admit(self.dataset, terms, f"query {name!r}")

    def _pay(self, storage: RunStorage, fix_schema: Callable[[], Any]) -> QuerySpend:
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

    def _close(self, storage: RunStorage) -> None:
        if storage.directory is not None:
            storage.directory.close()
        elif not isinstance(self.ledger, Ledger):
            storage.ledger.close()


def run_tag(run: bytes) -> str:
    """Names a run in its tables, so that a sink can tell runs apart."""
    return hashlib.sha256(b"run mark" + run).hexdigest()[:16]


def known_types(query: RowSpec, folder: Path | None, schemas: list[Types | None]) -> Types:
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
