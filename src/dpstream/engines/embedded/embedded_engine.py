"""The embedded engine: one process, buckets on threads, durable if it has a state directory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.engines.embedded.arrivals import finish_reading
from dpstream.engines.embedded.loop import Loop
from dpstream.engines.embedded.snapshots import Snapshots
from dpstream.engines.embedded.step_rows import RunSources, check_columns
from dpstream.engines.query_directory import read_types, write_types
from dpstream.engines.query_run import EngineOptions, QueryRun, RunStorage
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, LedgerError, StateError
from dpstream.group_by.flow import Flow
from dpstream.group_by.hash_tables import HashTable
from dpstream.privacy.state import chain_digest
from dpstream.privacy.state.durable_files import writing
from dpstream.privacy.state.run_directory import RunDirectory, read_about
from dpstream.query.column_types import Types
from dpstream.records import CommittingSource, Integers, Sink, Source, Words
from dpstream.rows.column_values import in_type
from dpstream.rows.row_batch import id_pairs
from dpstream.rows.row_reader import RowReader

__all__ = ["EngineOptions", "LocalRun", "RunStorage"]

# Erase what a query's state says about one unit.
#
# The tables hold a unit as a keyed hash with two counters, and a keyed hash for each group that it
# is in. The latter go. The former stays, marked as full: a unit that could begin anew would
# contribute twice what the promise allows. Sums have taken the unit in long ago, and leave the
# process with noise only; nothing of them is taken back.


def erase_unit(flow: Flow, directory: RunDirectory, unit: Any, *, digest_key: bytes) -> int:
    """Erase a unit from the newest snapshot; returns in how many (period, group) places it was.

    The run must have stopped in good order: steps that a restart takes again would lack the unit,
    and the same noise would meet other sums.
    """
    snapshots = Snapshots(directory.folder, settled=lambda facts: None)
    try:
        facts = snapshots.load(flow)
        if facts is None:
            raise StateError(
                f"{directory.folder} holds no snapshot yet; let the run publish and stop first"
            )
        if directory.log.last >= facts["step"]:
            raise StateError(
                f"the run in {directory.folder} was killed after its last snapshot (step "
                f"{facts['step']} of {directory.log.last + 1} is saved); start it, stop it with "
                "Ctrl-C, and try again"
            )
        before = [*facts.get("before_erasures", []), facts["chain"]]
        directory.refuse_undone_erasure(facts["step"], before)
        directory.begin()  # a copy must not go on with the unit
        ids = list(_ids(flow, unit))
        found = sum(_erase(flow, one) for one in ids)
        # What follows depends on this: a replay without it must not pass for the same input.
        said = b"forgot" + b"".join(one.tobytes() for one in ids)
        chain = chain_digest(digest_key, facts["chain"], said)
        snapshots.save_whole(flow, facts | {"chain": chain, "before_erasures": before})
        snapshots.finish(overwrite=True)
        about, run = directory.about, directory.run.hex()
        directory.ledger.note_erasure(about["dataset"], run, facts["step"], chain.hex())
    finally:
        snapshots.close()
    return found


def _ids(flow: Flow, unit: Any) -> Iterator[Words]:
    """The unit's ids, one per period that has state."""
    name = flow.query.privacy_unit_column
    kind = flow.reader.types.get(name)
    if kind is None:
        raise StateError("this run has read nothing yet; there is nothing to erase")
    try:
        value, lost = in_type(pa.array([unit]), kind, name)
    except (InvalidInput, pa.ArrowException, OverflowError):
        value, lost = pa.nulls(1, kind), np.ones(1, bool)
    if lost.any():
        raise InvalidInput(f"the unit must fit the type of column {name!r}, {kind}; got {unit!r}")
    for period in sorted(flow.state.periods):
        yield flow.reader.ids.units(value, np.array([period]))


def _erase(flow: Flow, one: Words) -> int:
    """Empty the places of one unit, and mark it as full."""
    bounds, most, found = flow.query.bounds, flow.query.debias_rows or 0, 0
    for bucket in flow.state.units:
        for units in bucket.periods.values():
            units.numbers[_rows_of(units, one)] = (bounds.rows, bounds.groups)
        for offered in bucket.offered.values():
            offered.numbers[_rows_of(offered, one)] = most
    for window, buckets in flow.state.windows.items():
        groups = np.concatenate([b.table.ids[: b.table.used] for b in buckets])
        places = one ^ groups[:, ::-1]  # as bounding names a unit in a group
        tables = [b.windows[window] for b in flow.state.units if window in b.windows]
        for table in tables:
            found += _empty(table, places)
        for group in buckets:
            if group.members is not None:
                _empty(group.members, places)
    return found


def _rows_of(table: HashTable, wanted: Words) -> Integers:
    """The rows of ids that are there."""
    present = np.isin(id_pairs(table.ids[: table.used]), id_pairs(wanted))
    rows: Integers = np.flatnonzero(present)
    return rows


def _empty(table: HashTable, places: Words) -> int:
    """Overwrite rows with zeros; the index forgets them when it is next built."""
    rows = _rows_of(table, places)
    table.words[rows] = 0
    return len(rows)


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

    def _opened(self, storage: RunStorage) -> Loop:
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

    def _sources(self) -> RunSources:
        return RunSources(source=self.source, history=self.history)

    def _flow(self, storage: RunStorage, *, threads: int) -> Flow:
        buckets = self._buckets()
        reader = RowReader(self.plan.query, storage.secret, storage.run)
        if storage.directory is not None:
            buckets = storage.directory.about["buckets"]
            reader.types = read_types(storage.directory.log)
            reader.learned = partial(write_types, storage.directory.log)
        return Flow(self.plan, reader, buckets=buckets, threads=threads, run_tag=storage.run_tag)

    def _notes(self) -> dict[str, Any]:
        return super()._notes() | {"partitions": self._sources().partitions()}

    def _storage(self) -> RunStorage:
        storage = super()._storage()
        if storage.directory is not None:
            try:
                self._sources().refuse_others(storage.directory.about["notes"]["partitions"])
            except InvalidInput:
                storage.directory.close()
                raise
        return storage

    def _close(self, storage: RunStorage) -> None:
        super()._close(storage)
        for part in (self.source, self.history, self.sink):
            if part is not None:
                part.close()


# Keep freed memory for the next batch instead of giving it back to the system.
#
# An engine allocates and frees the same hundred megabytes again and again. By default large blocks
# go back to the system when they are freed, and every page of the next one is a page fault; on a
# virtual machine that has cost a quarter of the whole time. So the heap is kept, and it is made of
# large pages. This changes the allocator of the whole process, so it is left to programs: the
# command line does it, a library call does not.

# glibc's names: M_TRIM_THRESHOLD and so on
_TRIM, _TOP_PAD, _MMAP, _MMAPS, _ARENAS = -1, -2, -3, -4, -8
_SETTINGS = ((_ARENAS, 1), (_MMAP, 32 << 20), (_TRIM, (1 << 31) - 1), (_TOP_PAD, 64 << 20))
_HEAP = 1 << 30  # bytes of addresses; memory is taken as it is used
_PAGE, _LARGE_PAGES = 4096, 14  # MADV_HUGEPAGE


def keep_freed_memory() -> bool:
    """Tell glibc and Arrow to reuse memory; False where there is no glibc to tell."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        tune, malloc, free = libc.mallopt, libc.malloc, libc.free
    except (OSError, AttributeError):
        return False
    done = all(tune(option, value) for option, value in _SETTINGS)
    if done:
        _use_large_pages(libc, tune, malloc, free)
        pa.set_memory_pool(pa.system_memory_pool())
    return done


def _use_large_pages(libc: ctypes.CDLL, tune, malloc, free) -> None:  # type: ignore[no-untyped-def]
    """Stretch the heap once and ask for large pages there; a refusal loses nothing."""
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    tune(_MMAPS, 0)  # so that the block is a part of the heap
    block = malloc(_HEAP)
    if block:
        start = -(-block // _PAGE) * _PAGE
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HEAP - _PAGE), _LARGE_PAGES)
        free(block)
    tune(_MMAPS, 1 << 16)
