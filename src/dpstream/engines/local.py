"""The embedded engine: one process, buckets on threads, durable if it has a state directory.

Each step: rows, their digest, log it (durable), then draw, publish, acknowledge; every so many
steps a snapshot. After a kill the newest snapshot is loaded and the logged steps are taken again:
the same rows meet the same noise and give the same tables, which the sink already has.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pyarrow as pa

from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.directory import StateDirectory, open_directory, read_about
from dpstream.engines.inputs import Aside, ChunkReader, FileInput, LiveInput, check_columns
from dpstream.engines.snapshots import Snapshots
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, LedgerError
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.spend import noise_versions
from dpstream.privacy.state import Secret, chain_digest, mint_run_id
from dpstream.privacy.state.memory_keys import MemoryWindowKeys
from dpstream.records import Sink, Source
from dpstream.stages.flow import Flow, Piece
from dpstream.stages.hashing import combine, multiset_digest
from dpstream.stages.plan import Plan, planned
from dpstream.stages.query import Query
from dpstream.stages.rows import RowReader

_START = bytes(16)  # the digest chain before the first step


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
    run_id: bytes | None = None
    """For tests: a run id is otherwise minted."""
    plan: Plan = field(init=False)
    steps_done: int = field(init=False, default=0)
    _stop: Event = field(init=False, default_factory=Event)

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder)
        start = self.clock.now() if kept is None else kept["notes"]["now"]
        self._now = start
        if self.live and self.query.time is None:
            raise InvalidParameter(
                "a live source needs a query with time= and windows; without a time it would "
                "never be published"
            )
        if self.query.live and not self.live:
            raise InvalidParameter(
                "a query over files needs its public range: give start= and end="
            )
        self.plan = planned(self.query.starting(start))
        for source in (self.source, self.history):
            if source is not None:
                check_columns(source, self.plan.query.columns)

    @property
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""
        return self.source is not None and not self.source.bounded

    def stop(self) -> None:
        """End at the next occasion, with a snapshot; a later run goes on from there."""
        self._stop.set()

    def __iter__(self) -> Iterator[pa.Table]:
        storage = self._storage()
        query, schedule = self.plan.query, self.plan.query.schedule
        cores = len(os.sched_getaffinity(0))
        buckets = self.options.buckets or cores
        if storage.directory is not None:
            buckets = storage.directory.about["buckets"]
        reader = RowReader(query, storage.secret, storage.run)
        flow = Flow(self.plan, reader, buckets=buckets, threads=self.options.threads or cores)
        spend = self._paid(storage)
        log = None if storage.directory is None else storage.directory.log
        files, live = self._inputs(reader)
        windows = _Windows(spend, schedule.last_step)
        digest_key = storage.secret.key("input digest", storage.run)
        chain, step = _START, 0

        def settled(before: int) -> None:
            windows.settle(before)
            forget = getattr(self.source, "forget", None)
            if forget is not None and live is not None and log is not None:
                forget(log.positions.get(before - 1, {}))

        snapshots = None
        try:
            if storage.directory is not None:
                snapshots = Snapshots(storage.directory.folder, settled=settled)
                windows.add(*storage.directory.keys.open_windows())
                if (facts := snapshots.load(flow)) is not None:
                    chain, step = facts["chain"], facts["step"]
                    if live is not None:
                        live.positions = dict(facts["positions"])
            while schedule.steps is None or step < schedule.steps:
                pieces = self._rows(step, files, live, log)
                if pieces is None:
                    break
                chain = chain_digest(digest_key, chain, _content(step, pieces))
                if log is not None:  # durable before any noise
                    positions = None if live is None else live.positions
                    log.record(step, [chain], ledger=storage.ledger.head(), positions=positions)
                spend.begin(step)
                tables = flow.step(step, pieces, spend)
                for table in tables:
                    due = table.due
                    windows.add(due.window)
                    if self.sink is not None:
                        self.sink.write(query.name, due.window, due.release, table.table)
                    if due.release == due.releases:
                        flow.forget(due.window)
                step += 1
                self.steps_done = step
                flow.forget_periods(step)
                over = step == schedule.steps
                if snapshots is None:
                    windows.settle(step)
                elif over or step % self.options.snapshot_every == 0:
                    snapshots.save(flow, _facts(step, chain, live))
                for table in tables:
                    yield table.table
            if snapshots is not None:
                if step == schedule.steps:
                    snapshots.finish()
                elif step:
                    snapshots.save(flow, _facts(step, chain, live))
                    snapshots.wait()
        finally:
            self._close(storage, snapshots, flow, files)

    def _rows(
        self, step: int, files: FileInput | None, live: LiveInput | None, log: Any
    ) -> list[Piece] | None:
        pieces: list[Piece] = []
        if live is not None:
            logged = None if log is None else log.positions.get(step)
            found = live.take(step) if logged is None else live.replay(step, logged)
            if found is None:
                return None
            pieces += found
        elif self._stop.is_set():
            return None
        return pieces + ([] if files is None else files.take(step))

    def _inputs(self, reader: RowReader) -> tuple[FileInput | None, LiveInput | None]:
        bounded = [s for s in (self.history, self.source) if s is not None and s.bounded]
        if len(bounded) > 1:
            raise InvalidInput("history goes with a live source; join two bounded ones in a list")
        files = live = None
        if bounded:
            chunks = ChunkReader(bounded[0], reader, self.aside)
            files = FileInput(chunks, memory=self.options.memory)
        if self.live:
            assert self.source is not None
            live = LiveInput(ChunkReader(self.source, reader, self.aside), self.clock, self._stop)
        return files, live

    def _storage(self) -> Storage:
        if self.folder is None:
            ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
            run = mint_run_id() if self.run_id is None else self.run_id
            secret = Secret.of(self.secret)
            tests = None if self.run_id is None else secret
            keys = MemoryWindowKeys(derived_for_tests=tests)
            return Storage(run=run, secret=secret, ledger=ledger, keys=keys)
        directory = open_directory(
            self.folder,
            facts=self._facts_of_query(),
            dataset=self.dataset,
            buckets=self.options.buckets or len(os.sched_getaffinity(0)),
            given_secret=self.secret,
            given_ledger=self.ledger,
            notes={"now": self._now, "partitions": self._fixed_partitions()},
            run_id=self.run_id,
            derived_keys_for_tests=self.run_id is not None,
        )
        was = directory.about["notes"]["partitions"]
        if was != self._fixed_partitions():
            directory.close()
            raise InvalidInput(
                f"the source had {len(was)} files when this run began and has "
                f"{len(self._fixed_partitions())} now, or other ones; a run over files reads a "
                "fixed set; use a live source for a directory that grows, or a new state directory"
            )
        return Storage(
            run=directory.run,
            secret=directory.secret,
            ledger=directory.ledger,
            keys=directory.keys,
            directory=directory,
        )

    def _fixed_partitions(self) -> list[str]:
        bounded = [s for s in (self.history, self.source) if s is not None and s.bounded]
        return [name for source in bounded for name in source.partitions()]

    def _facts_of_query(self) -> dict[str, str]:
        return self.plan.query.facts() | {"noise": repr(tuple(noise_versions()))}

    def _paid(self, storage: Storage) -> QuerySpend:
        """Admit, register and charge the run before anything is read."""
        name = self.plan.query.name
        try:
            storage.ledger.admit(self.dataset, self.plan.terms(), f"query {name!r}")
            facts = repr(sorted(self._facts_of_query().items())) + repr(self.dataset)
            mark = storage.secret.fingerprint(storage.run, facts)
            storage.ledger.register(self.dataset, storage.run.hex(), mark)
            spend = QuerySpend(
                run=storage.run,
                query=name,
                ledger=storage.ledger,
                dataset=self.dataset,
                keys=storage.keys,
            )
            self.plan.pay(spend, hashlib.sha256(mark.encode()).hexdigest())
        except BaseException as error:
            if storage.directory is not None:
                refused = isinstance(error, BudgetExceeded | LedgerError | InvalidParameter)
                unused = storage.directory.created and refused
                storage.directory.discard() if unused else storage.directory.close()
            raise
        return spend

    def _close(
        self, storage: Storage, snapshots: Snapshots | None, flow: Flow, files: FileInput | None
    ) -> None:
        flow.close()
        if files is not None:
            files.close()
        if snapshots is not None:
            snapshots.close()
        if storage.directory is not None:
            storage.directory.close()
        for part in (self.source, self.history, self.sink):
            if part is not None:
                part.close()


class _Windows:
    """Windows whose keys exist; they are erased once nothing can replay them."""

    def __init__(self, spend: QuerySpend, last_step: Any) -> None:
        self._spend, self._last_step = spend, last_step
        self._known: set[int] = set()
        self._lock = Lock()  # the snapshot's writer settles while the engine goes on

    def add(self, *windows: int) -> None:
        with self._lock:
            self._known.update(windows)

    def settle(self, before: int) -> None:
        with self._lock:
            over = sorted(w for w in self._known if self._last_step(w) < before)
            self._known.difference_update(over)
        for window in over:
            self._spend.erase(window)


def _facts(step: int, chain: bytes, live: LiveInput | None) -> dict[str, Any]:
    positions = {} if live is None else dict(live.positions)
    return {"step": step, "chain": chain, "positions": positions}


def _content(step: int, pieces: list[Piece]) -> bytes:
    """What a step has read, in any order: the sum of its rows' digests, and their number."""
    total = (0, 0)
    for rows, first, end in pieces:
        total = combine(total, multiset_digest(rows.digests[first:end]))
    digest, count = total
    return step.to_bytes(8, "little") + digest.to_bytes(16, "little") + count.to_bytes(8, "little")
