"""The embedded engine: one process, buckets on threads, durable if it has a state directory."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.engines.arrivals import finish_reading
from dpstream.engines.directory import read_types, write_types
from dpstream.engines.erasure import erase_unit
from dpstream.engines.inputs import Sources, check_columns
from dpstream.engines.loop import Loop
from dpstream.engines.query_run import Options, QueryRun, Storage
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, LedgerError
from dpstream.privacy.run_directory import read_about
from dpstream.privacy.state.files import writing
from dpstream.records import CommittingSource, Sink, Source
from dpstream.stages.column_types import Types
from dpstream.stages.flow import Flow
from dpstream.stages.row_reader import RowReader

__all__ = ["LocalRun", "Options", "Storage"]


@dataclass(kw_only=True)
class LocalRun(QueryRun):
    """A running query: iterate over its releases.

    `history` is a bounded source that is read by event time before and beside `source`.
    """

    sink: Sink | None = None
    history: Source | None = None
    _loop: Loop | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in (self.source, self.history):
            if source is not None:
                check_columns(source, self.plan.query)

    @property
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""
        return self.source is not None and not self.source.bounded

    @property
    def steps_done(self) -> int:
        """How many triggers have been published."""
        return 0 if self._loop is None else self._loop.step

    def erase_unit(self, unit: Any) -> int:
        """Erase one unit from the state directory, instead of running; how many places it had."""
        if self.folder is None or read_about(self.folder) is None:
            raise InvalidParameter("only a run with a state directory has anything to erase")
        storage = self._storage()
        assert storage.directory is not None
        flow = self._flow(storage, threads=1)
        try:
            with writing(self.folder):
                return erase_unit(flow, storage.directory, unit, digest_key=storage.digest_key)
        finally:
            flow.close()
            self._close(storage)

    def _releases(self) -> Generator[pa.Table, None, None]:
        storage = self._storage()
        loop = None
        try:
            with writing(self.folder or Path()):
                loop = self._loop = self._opened(storage)
                yield from loop.releases()
            if loop.finished:
                finish_reading(self.source)
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
            pay=lambda: self._pay(storage, flow.fix_schema),
            digest_key=storage.digest_key,
            files=files,
            live=live,
            sink=self.sink,
            directory=storage.directory,
            snapshot_every=self.options.snapshot_every,
            stopped=self._stop.is_set,
            commit=self.source.commit if isinstance(self.source, CommittingSource) else None,
        )

    def _schemas(self) -> list[Types | None]:
        return self._sources().schemas()

    def _sources(self) -> Sources:
        return Sources(source=self.source, history=self.history)

    def _flow(self, storage: Storage, *, threads: int) -> Flow:
        buckets = self._buckets()
        reader = RowReader(self.plan.query, storage.secret, storage.run)
        if storage.directory is not None:
            buckets = storage.directory.about["buckets"]
            reader.types = read_types(storage.directory.log)
            reader.learned = partial(write_types, storage.directory.log)
        return Flow(self.plan, reader, buckets=buckets, threads=threads, run_tag=storage.run_tag)

    def _notes(self) -> dict[str, Any]:
        return super()._notes() | {"partitions": self._sources().partitions()}

    def _storage(self) -> Storage:
        storage = super()._storage()
        if storage.directory is not None:
            try:
                self._sources().refuse_others(storage.directory.about["notes"]["partitions"])
            except InvalidInput:
                storage.directory.close()
                raise
        return storage

    def _close(self, storage: Storage) -> None:
        super()._close(storage)
        for part in (self.source, self.history, self.sink):
            if part is not None:
                part.close()
