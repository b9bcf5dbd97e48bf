"""A query, its source and its sink, brought together into a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.connectors.sinks import open_sink
from dpstream.connectors.sources import open_source
from dpstream.connectors.sources.growing import GrowingDirectory
from dpstream.connectors.sources.shared import SharedSource
from dpstream.connectors.storage import safe_name
from dpstream.connectors.write_ahead import WriteAhead
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.local import LocalRun, Options
from dpstream.errors import InvalidParameter
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.privacy.state.files import make_directory
from dpstream.privacy.state.secret import beside
from dpstream.records import Rejected, Source
from dpstream.stages.query import Query


@dataclass(kw_only=True)
class Operator:
    """What only the operator may see: rows read and rows set aside. Not private."""

    dead_letters: DeadLetters | None = None
    read: int = 0
    rejected_rows: int = 0
    outside: int = 0
    late: int = 0
    other_keys: int = 0
    latest: list[Rejected] = field(default_factory=list)

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        """Rows that could not be used go to the dead letters, under their chunk's name."""
        self.rejected_rows += len(rows)
        self.latest = [*self.latest, *rows][-100:]
        if self.dead_letters is not None and rows:
            self.dead_letters.write(chunk, rows)

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        """Add to the counts."""
        self.read += read
        self.outside += outside
        self.late += late
        self.other_keys += other_keys


class Run:
    """A query that runs: iterate over it for its releases, Arrow tables, as they are published.

    It can be iterated over once, and is closed at the end; leave early with `close`, or use `with`.
    Each table's metadata say which window and trigger it belongs to. `operator` holds counts that
    are not private.
    """

    def __init__(self, engine: LocalRun, operator: Operator) -> None:
        self._engine, self.operator = engine, operator

    def __iter__(self) -> Iterator[pa.Table]:
        return iter(self._engine)

    def finish(self) -> Run:
        """Run to the end; the releases go to the sink."""
        for _ in self:
            pass
        return self

    def stop(self) -> None:
        """End at the next occasion; a run with the same state directory goes on from there."""
        self._engine.stop()

    def close(self) -> None:
        """Leave it where it is; a run with the same state directory goes on from there."""
        self._engine.close()

    def forget(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state directory of a run that has stopped.

        Nothing more of this unit is kept (within the periods that are still open): a unit that
        began anew could contribute twice what the promise allows. What was published stays.
        Returns in how many groups the unit was.
        """
        return self._engine.forget(unit)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def query(self) -> Query:
        """The query as it runs: with its start, and with the grids that were chosen for it."""
        return self._engine.plan.query

    @property
    def steps_done(self) -> int:
        """How many triggers have been published."""
        return self._engine.steps_done

    @property
    def next_trigger(self) -> int | None:
        """When the next one is, in microseconds since 1970; None if it has no time."""
        schedule, step = self.query.schedule, self.steps_done
        return (
            None
            if schedule.steps is not None and step >= schedule.steps
            else schedule.time_of(step)
        )


def run(
    query: Query,
    *,
    source: Any = None,
    sink: Any = None,
    history: Any = None,
    checkpoint_location: str | Path | None = None,
    live: bool = False,
    secret: Secret | bytes | str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    dataset: str = "stream",
    dead_letters: str | Path | None = None,
    options: Options | None = None,
    clock: Clock | None = None,
) -> Run:
    """Publish a query's releases, for as long as its schedule runs.

    `source`: files (a path, a glob, a directory, a list), an Arrow table, a pandas or Polars frame,
    or "-" for standard input. Files are read by event time; with `live` a directory may grow, and
    what is in it is read by the clock. `history`: files that are read by event time before and
    beside a live source. `sink`: a directory (Parquet; "csv:out/", "jsonl:out/"), an `.sqlite` or
    `.duckdb` file, "-" for standard output, or a list of them.

    With `checkpoint_location`, a directory, the run survives a kill at any moment; its secret is
    made beside it on first use: back it up. Rows that cannot be used go to `dead_letters` (default:
    in the state directory), with the reason.

    >>> from dpstream.stages.query import Query
    >>> clicks = pa.table({"user": ["ann", "bob"] * 500, "page": ["home"] * 1000})
    >>> query = Query(unit="user", keys=["page"], public_keys=["home"], epsilon=5, delta=1e-9,
    ...               max_groups_contributed=1)
    >>> [table.column_names for table in run(query, source=clicks)]
    [['page', 'count', 'count_stddev', 'trigger_time', 'release_index']]
    """
    if source is None and history is None:
        raise InvalidParameter("a run needs a source: files, a table, or '-' for standard input")
    folder = None if checkpoint_location is None else Path(checkpoint_location)
    opened = _opened(source, live, folder)
    place = dead_letters if dead_letters is not None else folder and folder / "dead-letters"
    operator = Operator(dead_letters=None if place is None else DeadLetters(Path(place)))
    engine = LocalRun(
        query=query,
        source=opened,
        aside=operator,
        sink=open_sink(sink),
        history=None if history is None else open_source(history),
        folder=folder,
        secret=secret,
        ledger=ledger,
        dataset=dataset,
        clock=clock or SystemClock(),
        options=options or Options(),
    )
    return Run(engine, operator)


class Runs:
    """Several queries side by side over one source; iterate for (name, table) in trigger order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = {run.query.name: run for run in runs}

    def __iter__(self) -> Iterator[tuple[str, pa.Table]]:
        """The query whose next trigger is the earliest goes on."""
        left = {name: iter(run) for name, run in self.runs.items()}
        while left:
            name = min(left, key=lambda one: self.runs[one].next_trigger or 0)
            table = next(left[name], None)
            if table is None:
                del left[name]
            else:
                yield name, table

    def finish(self) -> Runs:
        """Run all to their ends."""
        for _ in self:
            pass
        return self

    def stop(self) -> None:
        """End all at the next occasion."""
        for run in self.runs.values():
            run.stop()

    def forget(self, unit: Any) -> int:
        """Instead of running: erase one unit from the state of all; see `Run.forget`."""
        return sum(run.forget(unit) for run in self.runs.values())

    def close(self) -> None:
        """Leave all where they are."""
        for run in self.runs.values():
            run.close()


def run_all(
    queries: Sequence[Query],
    *,
    source: Any,
    sink: Any = None,
    history: Any = None,
    checkpoint_location: str | Path | None = None,
    live: bool = False,
    secret: Secret | bytes | str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    dataset: str = "stream",
    options: Options | None = None,
    clock: Clock | None = None,
) -> Runs:
    """Publish several queries of one dataset: one read of the source, one book, one secret.

    Each query has a state directory of its own in `checkpoint_location`, and its releases go to the
    one sink under its name. The book is that of `ledger`; it must hold all of them, so open it with
    `dpstream.promise` or `dpstream ledger open` first.
    """
    names = [query.name for query in queries]
    if not queries or len(set(names)) < len(names):
        raise InvalidParameter(f"queries that run together need different names; got {names}")
    folder = None if checkpoint_location is None else Path(checkpoint_location)
    if folder is not None:
        make_directory(folder, mode=0o700)
    own = folder / "ledger" if folder is not None else None
    book = ledger if isinstance(ledger, Ledger) else Ledger(own if ledger is None else ledger)
    kept = secret
    if secret is None and folder is not None:
        begun = any((folder / safe_name(name) / "run.dps").exists() for name in names)
        kept = Secret.load(beside(folder)) if begun else beside(folder)  # a lost one is not remade
    opened = _opened(source, live, folder)
    assert opened is not None
    shared = SharedSource(opened, [query.source_columns for query in queries])
    runs = [
        run(
            query,
            source=view,
            sink=sink,
            history=history,
            checkpoint_location=None if folder is None else folder / safe_name(query.name),
            secret=Secret.of(kept),
            ledger=book,
            dataset=dataset,
            options=options,
            clock=clock,
        )
        for query, view in zip(queries, shared.views(), strict=True)
    ]
    return Runs(runs)


def _opened(source: Any, live: bool, folder: Path | None) -> Source | None:
    """The source; one that cannot be read twice is kept in the state directory."""
    if source is None:
        return None
    growing = live and _is_path(source)
    opened = GrowingDirectory(Path(source)) if growing else open_source(source)
    if not opened.replayable and folder is not None:
        return WriteAhead(opened, folder / "arrived")
    return opened


def _is_path(source: Any) -> bool:
    return isinstance(source, str | Path) and source != "-"
