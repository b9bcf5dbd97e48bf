"""A run of a query, whatever the engine: what it is given, what it pays, and how it is used.

Every engine takes the same steps, and calls them by the same names:

    rows of a step -> _charge (once) -> _log -> _publish: draw, send -> _save -> windows settle

What a step has read is durable in the log before its noise is drawn. Its tables are in the sink
before the saved state says that it is done, and the key of a window is erased when no recovery can
need it. So a kill at any moment loses nothing: the saved state is loaded, the steps after it are
taken again, the same rows meet the same noise, and the sink already has the tables that come out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Protocol, Self

import pyarrow as pa

from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.collected import Releases, release_facts
from dpstream.engines.embedded.live_reader import BUFFER, Arrivals, LiveView
from dpstream.engines.run_storage import (
    KIND,
    OpenWindows,
    RunStorage,
    known_types,
    paths_to_make,
)
from dpstream.engines.table_versions import keep_first_versions, refuse_changed_table
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    LedgerError,
    StateError,
    UnexpectedResult,
)
from dpstream.group_by.release_table import release_schema
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.spend import noise_versions
from dpstream.privacy.state import MemoryWindowKeys, Secret, mint_run_id
from dpstream.privacy.state.durable_files import remove_leftovers, wrap_write_errors
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.mirrors import refusing_moved
from dpstream.privacy.state.run_directory import (
    About,
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
from dpstream.query.column_types import Types
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.settings import settings_as_begun
from dpstream.query.shared_noise import noise_as_begun
from dpstream.records import Sink, Source, check_schema, fence
from dpstream.rows.row_reader import RowReader, rows_of_unit
from dpstream.telemetry import span

AnyQuery = Query | SeriesQuery
Tables = Generator[pa.Table, None, None]
_LOG = logging.getLogger("dpstream.release")
_SOON = 60_000_000  # microseconds: what begins by then is charged with its first rows
_LOGGED = ("query", "release_index", "releases", "window_start", "window_end", "trigger_time")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the work is done; none of it changes what is published.

    >>> EngineOptions(threads=2).threads
    2
    """

    buckets: int = 0
    """Hash buckets; 0: as the size of a step demands, whatever the number of cores. A state
    directory keeps the number it was made with."""
    threads: int = 0
    """0: one per core."""
    snapshot_every: int = 10
    """Steps between two snapshots."""
    memory: int = 1 << 31
    """Bytes of rows that may wait for later steps; beyond, files are read again."""
    buffer: int = BUFFER
    """Bytes of a live source's rows that are held for queries that lag; beyond, they are read from
    the source again (or, where that cannot be and there is no state directory, reading waits)."""
    overdue_at_once: int = 1000
    """Overdue triggers of a live run (after a stop, or a clock that went ahead) that are published
    one after another; then it pauses for a second."""
    analyst: str = ""
    """Who asks: a book that names analysts counts it as theirs, and takes no new run of others."""
    windows: int | None = None
    """A live run ends after so many of its windows: it is to be changed, or to go."""
    now: int | None = None
    """A run that begins does so as if it were this time: where an earlier one has ended."""
    instead_of: str = ""
    """A run of the ledger that holds the place of one that begins (`dpstream apply`)."""
    run_id: bytes | None = None
    """For tests alone: runs that share it and their secret share their noise."""

    def __post_init__(self) -> None:
        if self.overdue_at_once < 1:
            raise InvalidParameter(
                f"overdue_at_once must be at least 1; got {self.overdue_at_once!r}"
            )


@dataclass(kw_only=True, repr=False, eq=False)
class Run(ABC):
    """A query that runs: iterate over it for its releases, Arrow tables, as they are published.

    It can be iterated over once, and is closed at the end; leave early with `close`, or use `with`.
    `async for` does not hold up an event loop meanwhile. `collect` runs it to its end and keeps the
    releases, for frames and plots. Each table's metadata
    say which window and trigger it belongs to. `operator` holds counts that are not private.

    >>> import dpstream as dps
    >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
    ...                   epsilon=2, delta=1e-6)
    >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
    >>> with dps.run(query, source=rows) as running:
    ...     for release in running:
    ...         print(release.num_rows, release["page"].to_pylist())
    1 ['/home']
    >>> dps.run(query, source=rows).collect().table.num_rows
    1
    """

    query: AnyQuery
    """As it runs: with its start, and with the grids that were chosen for it."""
    source: Source | None
    """Read live (by the clock) unless it is bounded."""
    history: Source | None = None
    """Bounded; read by event time before and beside `source`."""
    sink: Sink | None = None
    operator: OperatorCounts = field(default_factory=OperatorCounts)
    folder: Path | None = None
    secret: GivenSecret = None
    ledger: GivenLedger = None
    dataset: str = "stream"
    clock: Clock = field(default_factory=SystemClock)
    options: EngineOptions = field(default_factory=EngineOptions)
    steps_done: int = field(init=False, default=0)
    """How many triggers have been published."""
    _iterator: Generator[pa.Table, None, None] | None = field(init=False, default=None)
    stopped: Event = field(init=False, default_factory=Event)
    """Set when it is to end at the next occasion."""

    def _begin(self, kept: About | None) -> None:
        """Fix the start of the query, and refuse what cannot run; `kept`: of an earlier start."""
        now = self.clock.now() if self.options.now is None else self.options.now
        self._now = now if kept is None else kept["notes"]["now"]
        if self.options.run_id is not None and self.folder is None and self.ledger is not None:
            raise InvalidParameter(
                "a fixed run id needs a state directory: without its log the same noise could "
                "meet other data"
            )
        if self.query.live and not self.live:
            raise InvalidParameter(
                "a query over files needs its public range: give start and end (in SQL among "
                "OPTIONS: start = '2024-05-01', end = '2024-06-01'), from what is known and not "
                "from the rows; or read a directory that grows, live"
            )
        self.query = self.query.starting(self._now)

    def _find_run(self, kind: str, facts: Facts) -> tuple[About | None, Secret, Ledger]:
        """The run that the directory has, if any, its secret and its ledger; others are refused."""
        if self.folder is None:
            ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
            return None, Secret.of(self.secret), ledger
        refuse_changed_table(self.query, self.folder)
        about, secret = find_run(
            self.folder,
            kind=kind,
            facts=facts,
            names=self.query.names_of_keys(),
            dataset=self.dataset,
            given_secret=self.secret,
        )
        with wrap_write_errors(self.folder):
            keep_first_versions(self.query, self.folder)
            return about, secret, open_ledger(self.folder, about, self.ledger)

    @abstractmethod
    def _releases(self) -> Generator[pa.Table, None, None]:
        """The life of the run: a None when everything is open, then its releases."""

    def open(self) -> Generator[pa.Table, None, None]:
        """Open state, source and sink; what cannot run is refused here, and nothing is charged.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> running = dps.run(query, source=rows)
        >>> _ = running.open()  # a source that cannot be read is refused here
        >>> running.close()
        """
        if self._iterator is None:
            self._iterator = self._log_each(self._releases())
            next(self._iterator)
        return self._iterator

    def _log_each(self, releases: Tables) -> Tables:
        """Note every release as it comes, and log it: what is said of it is public."""
        with closing(releases), refusing_moved(self.folder):
            for table in releases:
                if table is not None:
                    self.operator.releases += 1
                    self.operator.last_release = time.time()
                if table is not None and _LOG.isEnabledFor(logging.INFO):
                    facts = release_facts(table)
                    told = {name: facts.get(name) for name in _LOGGED} | {"rows": table.num_rows}
                    _LOG.info("released", extra={"facts": told})
                yield table
        for words in self.operator.losses():
            warnings.warn(f"{self.query.name}: {words}", UnexpectedResult, stacklevel=2)

    def __iter__(self) -> Iterator[pa.Table]:
        """The releases. There is one iterator: a second one would be a second noisy copy."""
        return self.open()

    async def __aiter__(self) -> AsyncIterator[pa.Table]:
        """The releases, each awaited in a thread; what leaves the loop early stops the run."""
        releases = iter(self)
        try:
            while (table := await asyncio.to_thread(next, releases, None)) is not None:
                yield table
        finally:
            self.close()

    def finish(self) -> Self:
        """Run to the end; the releases go to the sink.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> dps.run(query, source=rows).finish().operator.read
        400
        """
        for _ in self:
            pass
        return self

    def collect(self) -> Releases:
        """Run to the end and keep every release in memory.

        A run that was at its end before publishes nothing again, and a warning says so.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> dps.run(query, source=rows).collect().table["page"].to_pylist()
        ['/home']
        """
        releases = list(self)
        if not releases and self.folder is not None and self.steps_done:
            place = "its sink has them" if self.sink is not None else "give sink= to keep them"
            warnings.warn(
                f"the run in {self.folder} was at its end: its releases were published before, and "
                f"none comes twice; {place} (dps.read shows what is in files)",
                UnexpectedResult,
                stacklevel=2,
            )
        return Releases(releases)

    def stop(self) -> None:
        """End at the next occasion, durably; a later run goes on from there.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> running = dps.run(query, source=rows)
        >>> running.stop()
        >>> len(list(running))
        0
        """
        self.stopped.set()

    def close(self) -> None:
        """Leave it where it is; a run with the same state directory goes on from there.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> running = dps.run(query, source=rows)
        >>> next(iter(running)).num_rows
        1
        >>> running.close()
        """
        if self._iterator is None:
            return
        if getgeneratorstate(self._iterator) == GEN_RUNNING:
            self.stop()  # in a thread of its own, which closes it
        else:
            self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def erase_unit(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state directory of a run that has stopped.

        Nothing more of this unit is kept (within the periods that are still open): a unit that
        began anew could contribute twice what the promise allows. Its dead letters go, too; how
        many, and how many do not tell whose they are, is in `operator`. What was published and
        charged stays; sources, sinks and backups are left alone. Returns in how many groups the
        unit was: an exact number, for the operator alone.

        >>> import dpstream as dps
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> with TemporaryDirectory() as folder:
        ...     place = {"source": rows, "state": Path(folder) / "state"}
        ...     _ = dps.run(query, **place).finish()
        ...     dps.run(query, **place).erase_unit("nobody")
        0
        """

    def _erase_letters(self, unit: Any, kind: pa.DataType) -> None:
        """Erase a unit's rows among those that could not be used; `kind`: of its column."""
        if self.operator.erase_rejected is not None:
            name = self.query.privacy_unit_column
            select = partial(rows_of_unit, unit=unit, kind=kind, name=name)
            erased, unclear = self.operator.erase_rejected(select)
            self.operator.letters_erased += erased
            self.operator.letters_unclear = unclear

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every release and their types; fixed before the first one is published.

        Types of keys that are not declared follow from the source's first schema: of a live source
        that has none yet they are text until it has.
        """

    @property
    def live(self) -> bool:
        """Is there a source that goes by the clock?"""
        return self.source is not None and not self.source.bounded

    @property
    def steps(self) -> int | None:
        """How many triggers it publishes in all; None: it has no end."""
        schedule, windows = self.query.schedule, self.options.windows
        if windows is None:
            return schedule.steps
        steps = schedule.last_step(windows - 1) + 1
        return steps if schedule.steps is None else min(steps, schedule.steps)

    @property
    def next_trigger(self) -> int | None:
        """When the next one is, in microseconds since 1970; None if it has no time."""
        step, steps = self.steps_done, self.steps
        over = steps is not None and step >= steps
        return None if over else self.query.schedule.time_of(step)

    def tables_at(self, step: int) -> int:
        """How many tables a trigger publishes."""
        return len(self.query.schedule.due(step))

    @property
    def arrivals(self) -> Arrivals | None:
        """What its live source has; queries over one source have the same."""
        return self.source.shared if isinstance(self.source, LiveView) else None

    def leave(self) -> None:
        """It reads no more: what it has not read is not held for it."""
        if isinstance(self.source, LiveView):
            self.source.close()

    def _finish_reading(self) -> None:
        """It has published all it ever will, and needs no rows any more."""
        if isinstance(self.source, LiveView):
            self.source.finish()

    def operator_facts(self) -> dict[str, Any]:
        """What became of the rows, and how far behind it is: for the operator alone.

        >>> import dpstream as dps
        >>> query = dps.Query(privacy_unit_column="user", keys=["page"], max_groups_contributed=1,
        ...                   epsilon=2, delta=1e-6)
        >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
        >>> dps.run(query, source=rows).finish().operator_facts()["read"]
        400
        """
        facts: dict[str, Any] = dict(self.operator.counts())
        if self.operator.stale_tables:
            facts["stale_tables"] = sorted(self.operator.stale_tables)
        if self.live:
            due, source = self.next_trigger, self.source
            late = 0.0 if due is None else max(0, self.clock.now() - due) / 1e6
            facts |= {
                "rows_waiting": source.waiting if isinstance(source, LiveView) else 0,
                "consumer_lag": source.behind if isinstance(source, LiveView) else {},
                "lag_seconds": round(late, 6),
                "release_delay_seconds": self.operator.lag_seconds,
                "worst_release_delay_seconds": self.operator.worst_lag_seconds,
            }
        return facts

    def _close_ends(self) -> None:
        """Close what it reads and writes."""
        for end in (self.source, self.history, self.sink):
            if end is not None:
                end.close()

    def __repr__(self) -> str:
        steps = self.steps
        total = "no end" if steps is None else str(steps)
        return f"<Run {self.query.name!r}: {self.steps_done} of {total} triggers published>"


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where a run of a query with periods begins, if not with its first window."""

    not_before: int | None = None
    """Windows that begin before this time are left out: it is the first of a period."""
    takes_over: tuple[str, ...] = ()
    """Runs that are ended for good before this one is charged."""
    who: str = ""
    """Who wants that."""
    notice: str = ""
    """All of it in words, for the operator."""


@dataclass(kw_only=True, repr=False, eq=False)
class QueryRun(Run):
    """A running GROUP BY; an engine adds how rows come in and how a step is worked out."""

    query: Query
    beginning: Beginning = field(default_factory=Beginning)
    """Of a run that begins; one that goes on keeps its own."""
    plan: NoisePlan = field(init=False)
    is_new: bool = field(init=False)
    """Does its directory, if it has one, know nothing of it yet?"""
    engine: ClassVar[str] = "embedded"
    _storage: RunStorage = field(init=False)
    _reader: RowReader = field(init=False)
    _windows: OpenWindows = field(init=False)
    _spend: QuerySpend | None = field(init=False, default=None)
    _paid: QuerySpend | None = field(init=False, default=None)
    """Of a run whose place is held: it draws after its first rows, as every run."""

    def __post_init__(self) -> None:
        kept = None if self.folder is None else read_about(self.folder, kind=KIND)
        if kept is not None and kept["notes"]["engine"] != self.engine:
            raise StateError(
                f"{self.folder} was begun by the engine {kept['notes']['engine']!r} and goes on "
                f"there, not in {self.engine!r}; or use a new state directory (a new run, charged "
                "anew)"
            )
        if self.live and self.query.time_column is None:
            raise InvalidParameter(
                "a live source needs a query with time= and windows (in SQL: FROM TUMBLE(...), or "
                "time_column); without a time it would never be published; standard input is live "
                "too: rows that are complete belong in a file"
            )
        self._begin(kept)
        self.is_new = kept is None
        if kept is not None:
            self.beginning = Beginning(**kept["notes"].get("beginning", {}))
        if self.beginning.not_before is not None:
            self.query = self.query.not_before(self.beginning.not_before)
        if kept is not None:
            self.query = noise_as_begun(self.query, kept["facts"])
            self.query = settings_as_begun(self.query, kept["facts"])
        self.plan = plan_query(self.query, None if kept is None else kept["facts"]["counters"])
        self.query = self.plan.query

    @property
    def schema(self) -> pa.Schema:
        """The columns of every release and their types, as they are known by now."""
        return release_schema(self.plan, known_types(self.query, self.folder, self._schemas()))

    @abstractmethod
    def _schemas(self) -> list[Types | None]:
        """What the sources declare, as far as they do by now."""

    def _releases(self) -> Generator[pa.Table, None, None]:
        """Open everything, publish step by step; a run that is refused at first leaves nothing."""
        with ExitStack() as undo:
            self._open_storage()
            undo.callback(self._close)
            directory = self._storage.directory
            try:
                if self._storage.ledger.terms(self.dataset) is not None:
                    self._admit()  # refuse early what will not fit
                self._open(undo)
                yield None
                self._hold_place()
                yield from self._publish_steps()
            except (BudgetExceeded, LedgerError, InvalidInput, InvalidParameter):
                if directory is not None and not self.steps_done:
                    self._withdraw(directory)
                raise

    @abstractmethod
    def _open(self, undo: ExitStack) -> None:
        """Open what the engine needs, as it was left; `undo` closes it."""

    @abstractmethod
    def _publish_steps(self) -> Iterator[pa.Table]:
        """Every step from where the run stands."""

    def _withdraw(self, directory: RunDirectory) -> None:
        """Take back what this start has made, if nothing was drawn: a charge, too."""
        if self._paid is not None and directory.unused:
            run, who = self._storage.run.hex(), self.beginning.who
            with suppress(LedgerError):
                because = "it was refused before it began"
                self._storage.ledger.void(self.dataset, run, because=because, who=who)
        directory.withdraw()

    def _open_storage(self) -> None:
        """Open the state directory, or make it; another query, secret or ledger is refused.

        With a fixed run id, which is for tests, window keys are derived instead of drawn.
        """
        folder, run_id, facts = self.folder, self.options.run_id, self._facts()
        made = () if folder is None else paths_to_make(folder, self.query)
        run, buckets, notes = run_id or mint_run_id(), self._default_buckets(), self._notes()
        about, secret, ledger = self._find_run(KIND, facts)
        if about is None:
            self.plan = self.plan.for_book(ledger.terms(self.dataset))
            self.query = self.plan.query
            facts = self._facts()
        keys: Any = MemoryWindowKeys(derived_for_tests=None if run_id is None else secret)
        directory, owns_ledger = None, not isinstance(self.ledger, Ledger)
        if folder is not None:
            with ExitStack() as undo, wrap_write_errors(folder):
                if owns_ledger:
                    undo.callback(ledger.close)
                common: dict[str, Any] = {"secret": secret, "ledger": ledger}
                if about is None:
                    more = {"facts": facts, "buckets": buckets, "notes": notes}
                    common |= {"kind": KIND, "run": run, "dataset": self.dataset, "more": more}
                    directory = make_run(folder, **common)
                    directory.created = made
                else:
                    directory = open_run(folder, about=about, **common)
                undo.callback(directory.close)  # a refused directory must not stay locked
                for place in (folder, folder / "windows", folder / "segments"):
                    remove_leftovers(place, overwrite=True)  # a kill may leave half a key, or noise
                directory.open_keys(derived_for_tests=run_id is not None)
                undo.pop_all()
            directory.owns_ledger = owns_ledger
            run, keys, buckets = directory.run, directory.keys, directory.about["buckets"]
        self._storage = RunStorage(
            run=run,
            secret=secret,
            ledger=ledger,
            keys=keys,
            buckets=buckets,
            owns_ledger=owns_ledger,
            directory=directory,
        )
        self._reader = self._storage.reader(self.query)
        self._windows = OpenWindows(self.query.schedule.last_step, self._erase)
        if directory is not None:
            self._windows.add(*directory.keys.open_windows())

    def _facts(self) -> Facts:
        """What fixes the releases besides the data."""
        noise, counters = canonical(tuple(noise_versions())), canonical(self.plan.matrices)
        return self.query.facts() | {"noise": noise, "counters": counters}

    def _notes(self) -> dict[str, Any]:
        """What the state directory remembers of how the run began."""
        notes: dict[str, Any] = {"now": self._now, "engine": self.engine}
        if self.beginning != Beginning():
            notes["beginning"] = asdict(self.beginning)
        return notes

    @abstractmethod
    def _default_buckets(self) -> int:
        """How many hash buckets a run begins with."""

    def _admit(self) -> None:
        """Open the book if there is none; refuse early what will not fit."""
        ledger = self._storage.ledger
        terms = self.plan.terms(ledger.terms(self.dataset))
        ledger.admit(self.dataset, terms, f"query {self.query.name!r}")

    @property
    def begins_later(self) -> bool:
        """Is its first trigger still to be waited for?"""
        due = None if self.steps_done else self.next_trigger
        return self.live and due is not None and due - self.clock.now() > _SOON

    def _hold_place(self) -> None:
        """Charge a run that is kept, and whose first trigger lies ahead, when it is accepted.

        Otherwise another query could take its place in the book meanwhile. One that never begins a
        step is given back (`dpstream ledger void`).
        """
        if self.begins_later and self._storage.directory is not None:
            fence(self.sink, self.query.name, self._storage.run_tag)
            self._paid = self._pay()

    def _charge(self) -> QuerySpend:
        """Charge the run, after its first rows: a source that cannot be read costs nothing."""
        if self._spend is None:
            fence(self.sink, self.query.name, self._storage.run_tag)
            self._reader.settle_types()
            schema = release_schema(self.plan, self._reader.types)  # refuses what cannot be shown
            directory = self._storage.directory
            if directory is None or directory.log.last < 0:  # nothing is charged or drawn yet
                check_schema(self.sink, self.query.name, schema)
            with span("charge", query=self.query.name):
                self._spend = self._paid or self._pay()
        return self._spend

    def _pay(self) -> QuerySpend:
        """Open the book if there is none, register the run, and charge it."""
        self._admit()
        storage = self._storage
        because = f"run {storage.run.hex()[:8]} of {self.query.name!r} takes over"
        for run in self.beginning.takes_over:
            storage.ledger.end(self.dataset, run, because=because, who=self.beginning.who)
        facts = canonical(("query", sorted(self._facts().items()), self.dataset))
        fingerprint = storage.secret.fingerprint(storage.run, facts)
        kept = storage.directory is not None
        storage.ledger.register(
            self.dataset, storage.run.hex(), fingerprint, analyst=self.options.analyst, kept=kept
        )
        spend = QuerySpend(
            run=storage.run,
            query=self.query.name,
            ledger=storage.ledger,
            dataset=self.dataset,
            keys=storage.keys,
        )
        try:
            digest = hashlib.sha256(fingerprint.encode()).hexdigest()
            self.plan.pay(spend, digest, instead_of=self.options.instead_of)
        except BudgetExceeded as problem:
            if not self.beginning.takes_over:
                raise
            raise BudgetExceeded(
                f"{problem}; what it takes over from has begun another period meanwhile, and is "
                "ended now: take over once more, and it begins behind that"
            ) from None
        return spend

    def tables_at(self, step: int) -> int:
        """How many tables a trigger publishes: none of windows that were given up."""
        left_out = () if self._iterator is None else self._left_out  # known once it is open
        due = self.query.schedule.due(step)
        return sum(not any(one.window in left for left in left_out) for one in due)

    @property
    def _left_out(self) -> tuple[range, ...]:
        """Windows that are not published: abandoned ones, and those behind its end."""
        directory, windows = self._storage.directory, self.options.windows
        abandoned = () if directory is None else directory.abandoned
        return abandoned if windows is None else (*abandoned, range(windows, sys.maxsize))

    def _erase(self, window: int) -> None:
        """Forget a window's key; a run that has not drawn yet may have one to forget, too."""
        (self._spend or self._storage.keys).erase(window)

    def _close(self) -> None:
        self._storage.close()
        self._close_ends()


class Engine(Protocol):
    """Another place to run queries than this process."""

    def source(self, spec: Any) -> Any:
        """A source that only this engine knows; None: it is for the connectors."""

    def sink(self, spec: Any) -> Any:
        """A sink that only this engine knows; None: it is for the connectors."""

    def start(self, **facts: Any) -> QueryRun:
        """A run."""
