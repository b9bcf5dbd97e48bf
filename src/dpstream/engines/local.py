"""The embedded engine: one process, buckets on threads, durable if it has a state directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa

from dpstream.engines.chunks import Aside
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.directory import StateDirectory, open_directory, read_about
from dpstream.engines.erasure import erase_unit
from dpstream.engines.inputs import Sources, check_columns
from dpstream.engines.loop import Loop
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, LedgerError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.spend import noise_versions
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.files import writing
from dpstream.privacy.state.memory_keys import MemoryWindowKeys
from dpstream.records import Sink, Source
from dpstream.stages.flow import Flow
from dpstream.stages.plan import Plan, planned
from dpstream.stages.query import Query
from dpstream.stages.rows import RowReader


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
    run_id: bytes | None = None
    """For tests alone: runs that share it and their secret share their noise."""


@dataclass(kw_only=True)
class Storage:
    """Where a run's keys and budget are: on disk, or in this process alone."""

    run: bytes
    secret: Secret
    ledger: Ledger
    keys: Any
    directory: StateDirectory | None = None


@dataclass(kw_only=True)
class LocalRun:
    """A running query: iterate over its releases.

    `source` is read live (by the clock) unless it is bounded; `history` is a bounded source that
    is read by event time before and beside it.
    """

    query: Query
    source: Source | None
    aside: Aside
    sink: Sink | None = None
    history: Source | None = None
    folder: Path | None = None
    secret: Secret | bytes | str | Path | None = None
    ledger: Ledger | str | Path | None = None
    dataset: str = "stream"
    clock: Clock = field(default_factory=SystemClock)
    options: Options = field(default_factory=Options)
    plan: Plan = field(init=False)
    _loop: Loop | None = field(init=False, default=None)
    _iterator: Generator[pa.Table, None, None] | None = field(init=False, default=None)
    _stop: Event = field(init=False, default_factory=Event)

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder)
        self._begun = None if kept is None else kept["facts"]
        if self._begun is not None:
            self.query = self.query.as_begun(self._begun)
        start = self.clock.now() if kept is None else kept["notes"]["now"]
        self._now = start
        if self.live and self.query.time is None:
            raise InvalidParameter(
                "a live source needs a query with time= and windows; without a time it would "
                "never be published"
            )
        if self.options.run_id is not None and self.folder is None and self.ledger is not None:
            raise InvalidParameter(
                "a fixed run id needs a state directory: without its log the same noise could "
                "meet other data"
            )
        if self.query.live and not self.live:
            raise InvalidParameter(
                "a query over files needs its public range: give start= and end="
            )
        self.plan = planned(self.query.starting(start))
        for source in (self.source, self.history):
            if source is not None:
                check_columns(source, self.plan.query.source_columns)

    @property
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""
        return self.source is not None and not self.source.bounded

    def stop(self) -> None:
        """End at the next occasion, with a snapshot; a later run goes on from there."""
        self._stop.set()

    @property
    def steps_done(self) -> int:
        """How many triggers have been published."""
        return 0 if self._loop is None else self._loop.step

    def __iter__(self) -> Iterator[pa.Table]:
        """The releases. There is one iterator: a second one would be a second noisy copy."""
        if self._iterator is None:
            self._iterator = self._releases()
        return self._iterator

    def forget(self, unit: Any) -> int:
        """Erase one unit from the state directory, instead of running; how many places it had."""
        if self.folder is None or read_about(self.folder) is None:
            raise InvalidParameter("only a run with a state directory has anything to forget")
        storage = self._storage()
        assert storage.directory is not None
        flow = self._flow(storage, threads=1)
        try:
            with writing(self.folder):
                key = storage.secret.key("input digest", storage.run)
                return erase_unit(flow, storage.directory, unit, digest_key=key)
        finally:
            flow.close()
            self._close(storage)

    def close(self) -> None:
        """Give up where it is, without a snapshot: as a kill would, but with everything closed."""
        if self._iterator is not None:
            self._iterator.close()

    def _releases(self) -> Generator[pa.Table, None, None]:
        storage = self._storage()
        loop = None
        try:
            loop = self._loop = self._opened(storage)
            with writing(self.folder or Path()):
                yield from loop.releases()
        except (BudgetExceeded, LedgerError, InvalidInput, InvalidParameter):
            if storage.directory is not None and (loop is None or not loop.step):
                storage.directory.withdraw()
            raise
        finally:
            if loop is not None:
                loop.close()
            self._close(storage)

    def _opened(self, storage: Storage) -> Loop:
        flow = self._flow(storage, threads=self.options.threads or len(os.sched_getaffinity(0)))
        if storage.ledger.terms(self.dataset) is not None:  # refuse early what will not fit
            self._admit(storage)
        files, live = self._sources().inputs(
            flow.reader, self.aside, self.clock, self._stop, memory=self.options.memory
        )
        return Loop(
            flow=flow,
            pay=lambda: self._pay(storage, flow),
            digest_key=storage.secret.key("input digest", storage.run),
            files=files,
            live=live,
            sink=self.sink,
            directory=storage.directory,
            snapshot_every=self.options.snapshot_every,
            stopped=self._stop.is_set,
            forget_rows=getattr(self.source, "forget", None) if live is not None else None,
        )

    def _sources(self) -> Sources:
        return Sources(source=self.source, history=self.history)

    def _flow(self, storage: Storage, *, threads: int) -> Flow:
        buckets = self.options.buckets or len(os.sched_getaffinity(0))
        reader = RowReader(self.plan.query, storage.secret, storage.run)
        if storage.directory is not None:
            buckets = storage.directory.about["buckets"]
            reader.types = storage.directory.types()
            reader.learned = storage.directory.keep_types
        mark = hashlib.sha256(b"run mark" + storage.run).hexdigest()[:16]
        return Flow(self.plan, reader, buckets=buckets, threads=threads, mark=mark)

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
            buckets=self.options.buckets or len(os.sched_getaffinity(0)),
            given_secret=self.secret,
            given_ledger=self.ledger,
            notes={"now": self._now, "partitions": self._sources().partitions()},
            run_id=self.options.run_id,
        )
        try:
            self._sources().refuse_others(directory.about["notes"]["partitions"])
        except InvalidInput:
            directory.close()
            raise
        return Storage(
            run=directory.run,
            secret=directory.secret,
            ledger=directory.ledger,
            keys=directory.keys,
            directory=directory,
        )

    def _facts_of_query(self) -> dict[str, str]:
        """What fixes the releases, as far as the version knew it that began the run."""
        facts = self.plan.query.facts()
        facts["noise"] = repr(tuple(noise_versions()))
        facts["counters"] = repr(self.plan.matrices)
        if self._begun is None:
            return facts
        return {name: fact for name, fact in facts.items() if name in self._begun}

    def _admit(self, storage: Storage) -> None:
        terms, name = self.plan.terms(), self.plan.query.name
        storage.ledger.admit(self.dataset, terms, f"query {name!r}")

    def _pay(self, storage: Storage, flow: Flow) -> QuerySpend:
        """Open the book if there is none, register the run, and charge it."""
        flow.try_finish()
        self._admit(storage)
        facts = repr(sorted(self._facts_of_query().items())) + repr(self.dataset)
        mark = storage.secret.fingerprint(storage.run, facts)
        storage.ledger.register(self.dataset, storage.run.hex(), mark)
        spend = QuerySpend(
            run=storage.run,
            query=self.plan.query.name,
            ledger=storage.ledger,
            dataset=self.dataset,
            keys=storage.keys,
        )
        self.plan.pay(spend, hashlib.sha256(mark.encode()).hexdigest())
        return spend

    def _close(self, storage: Storage) -> None:
        if storage.directory is not None:
            storage.directory.close()
        elif not isinstance(self.ledger, Ledger):
            storage.ledger.close()
        for part in (self.source, self.history, self.sink):
            if part is not None:
                part.close()
