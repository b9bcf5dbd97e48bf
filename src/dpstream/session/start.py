"""Start a query, or several over one read, with all that they need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.connectors.files.size_limits import SizeLimits
from dpstream.connectors.files.source import Files, open_directory
from dpstream.connectors.kafka.on_spark import topic_on_spark
from dpstream.connectors.registry import OUTPUTS, open_sink, open_source, upsert_specs
from dpstream.connectors.server_base import ServerOptions, is_object_uri, is_uri
from dpstream.connectors.shared import SharedSink, SharedSource, shared_sinks, tell_keys
from dpstream.connectors.storage import safe_name
from dpstream.connectors.union_source import union_source
from dpstream.connectors.write_ahead import PUSHED, PushedSource, WriteAhead, pushed_folder
from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.embedded.live_reader import Arrivals
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.engines.query_run import (
    AnyQuery,
    Beginning,
    Engine,
    EngineOptions,
    QueryRun,
    Run,
)
from dpstream.errors import (
    BudgetExceeded,
    InvalidParameter,
    LedgerError,
    StateError,
    UnexpectedResult,
    refuse_unwritable,
)
from dpstream.optional import optional
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger, warn_of_own_book
from dpstream.privacy.ledger.store import LedgerAddress, LedgerPlace, as_ledger_place
from dpstream.privacy.state import Secret
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.mirrors import mirror_of
from dpstream.privacy.state.run_directory import ANEW, GivenLedger, keep_book, read_about
from dpstream.privacy.state.secret import secret_path
from dpstream.query.public_tables import WholeTable
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.query.windows import iso
from dpstream.records import CheckedSink, Frame, Sink, Source, fence
from dpstream.session.budget import refuse_early, was_charged
from dpstream.session.first_rows import RowSample, refuse_over, refuse_useless, sample_rows
from dpstream.session.runs import Runs
from dpstream.session.union_run import UnionRun, book_of_all, refuse_other_times
from dpstream.session.whole_tables import Given, with_tables
from dpstream.sql_compiler import warn_of_budget, warn_of_remarks
from dpstream.sql_compiler.compile_sql import Compiled, compile_all, compile_sql

L = TypeVar("L")
Place: TypeAlias = str | os.PathLike[str]
SourceSpec: TypeAlias = (
    Source | Frame | pa.Table | pa.RecordBatch | Place | Sequence[Place] | list[Mapping[str, Any]]
)
"""What `open_source` takes; on Spark a DataFrame too."""
SinkSpec: TypeAlias = "Sink | Place | Callable[..., None] | Sequence[SinkSpec]"
"""What `open_sink` takes; on Spark a `SparkSink` or another function of a DataFrame too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """What queries read together: a source, live or not, and files that came before it.

    >>> Feed(source="incoming/", live=True).live
    True
    """

    source: SourceSpec
    live: bool = False
    history: SourceSpec | None = None
    name: str = ""
    options: Mapping[str, Any] | None = None
    """Of a server that a URI names, or limits of sizes for files and standard input."""
    buffer: int | None = None
    """Bytes of a live source's rows that are held for queries that lag; None: as the run's options
    say."""
    on_damage: str = "quarantine"
    """A file that cannot be used is set aside ("quarantine"), or stops its queries ("stop")."""
    on_done: str = "keep"
    """What becomes of files of a live directory that no recovery needs any more: they are kept,
    moved to `done/` in it ("move") or deleted ("delete")."""
    keep: timedelta | None = None
    """For how long rows that came only once stay (in `kept/`) when no recovery needs them any more,
    and files in `done/`; None: the rows go at once, the files stay."""


class UnitedFeeds(tuple[Feed, ...]):
    """Feeds that queries read together, by UNION ALL; each has the name of its table."""


def run(
    query: AnyQuery | UnionAll | str,
    source: SourceSpec | Mapping[str, SourceSpec] | None = None,
    *,
    sink: SinkSpec | None = None,
    output: str = "append",
    history: SourceSpec | None = None,
    state: str | Path | None = None,
    live: bool = False,
    on_done: str = "keep",
    secret: Secret | bytes | str | Path | None = None,
    ledger: GivenLedger = None,
    dataset: str = "stream",
    analyst: str = "",
    dead_letters: str | Path | None = None,
    on_damage: str = "quarantine",
    options: EngineOptions | None = None,
    clock: Clock | None = None,
    engine: Engine | None = None,
    anyway: bool = False,
    take_over: bool = False,
    public: Given = None,
    registry: Given = None,
) -> Run:
    """Publish a query's releases, for as long as its schedule runs.

    `query`: one that is built, or SQL with a privacy clause (see `dps.sql`), also UNION ALL of such
    queries: then a release has the rows of all branches, and each branch pays. `source`: files (a
    path, a glob, a directory, a list), a list of dicts, an Arrow table, a pandas or Polars frame or
    whatever else offers itself as an Arrow stream, "-" for standard input, or a URI such as
    "kafka://127.0.0.1:9092/clicks". Files are read by event time; with `live` a directory may grow,
    and what is in it is read by the clock; its files are deleted, or moved to `done/` in it, when
    no recovery needs them any more, if `on_done` is "delete" or "move". `history`: files that are
    read by event time before and beside a live source. `sink`: a directory (Parquet; "csv:out/",
    "jsonl:out/"), an `.sqlite` or `.duckdb` file, "-" for standard output, a URI, or a list of
    them. `output="upsert"`: a database, a Delta table or a compacted Kafka topic keeps the newest
    release of each window alone, a row for each group ("append": every release); "upsert:" before
    the name of one of several sinks says so of that one.

    With `state`, a directory, the run survives a kill at any moment; its secret is
    made beside it on first use: back it up. Rows that cannot be used go to `dead_letters` (default:
    in the state directory), with the reason. `on_damage`: a file that cannot be used is quarantined
    there as a whole, for good, and the run goes on ("quarantine"), or it is refused ("stop").

    What does not fit into the dataset's book is refused here, before a row is read. Without a
    `ledger` the query has a book of its own, and a NewBook warning says so once. A `Ledger` that is
    in memory moves to a file in the state directory, for all that share it. `take_over`: the state
    of an earlier run is lost, or the query has changed; where units are users within a period, that
    run is ended for good, and this one begins with the period after the last that it has begun.
    `analyst`: who asks, for a book that gives analysts shares. A query that was not charged yet is
    also refused here if its sink cannot take its releases, or if none of the rows there are can be
    used, as with times in another unit; `anyway` runs it over such rows, too.

    `public`: tables that the query joins or takes its keys from, and that everybody may know, by
    their names: frames, files, "names.duckdb", "delta:FOLDER", "postgres://...?table=pages".
    `registry`: tables whose rows belong to the privacy units, joined on them. Both are read whole
    at the start; one that has changed is another query, unless it is a `Refreshed` public table.

    `engine`: a `SparkEngine` runs the query on its session; then `source` and `history` may be
    DataFrames, streaming ones too (`live`: by the clock; otherwise all that is there, by event
    time), and `sink` a function of a DataFrame and its release, or a `SparkSink`.

    >>> import pyarrow as pa
    >>> from dpstream.query.query import Query
    >>> clicks = pa.table({"user": ["ann", "bob"] * 500, "page": ["home"] * 1000})
    >>> query = Query(privacy_unit_column="user", keys=["page"], public_groups=["home"],
    ...               epsilon=5, delta=1e-9, max_groups_contributed=1)
    >>> [table.column_names for table in run(query, source=clicks)]
    [['page', 'count', 'count_stddev', 'trigger_time', 'release_index', 'kept_share']]
    """
    places = {"source": source, "sink": sink, "history": history, "state": state}
    _check_names(places | {"secret": secret, "ledger": ledger, "dead_letters": dead_letters})
    state, ledger = open_state(state, secret=secret, ledger=ledger, engine=engine)
    sink = _with_output(sink, output)
    if isinstance(query, str):
        several = compile_all(query)
        for compiled in several:
            warn_of_remarks(compiled, stacklevel=2)
        query = UnionAll.of(several)
    if isinstance(query, UnionAll):
        if dead_letters is not None:
            raise InvalidParameter(
                "dead letters of a UNION ALL are kept by branch, in the state directory; give "
                "state, and leave dead_letters out"
            )
        return _run_union(
            query,
            source=source,
            ledger=ledger,
            analyst=analyst,
            clock=clock or SystemClock(),
            sink=sink,
            history=history,
            state=state,
            live=live,
            on_done=on_done,
            secret=secret,
            dataset=dataset,
            on_damage=on_damage,
            options=options,
            engine=engine,
            anyway=anyway,
            take_over=take_over,
            public=public,
            registry=registry,
        )
    _check_queries("run", [query])
    warn_of_budget(query, stacklevel=2)
    if source is None and history is None:
        raise InvalidParameter("a run needs a source: files, a table, or '-' for standard input")
    folder = None if state is None else Path(state)
    query = with_tables(query, public=public, registry=registry, state=folder)
    if not query.sources and _is_named(source):
        (source,) = cast(Mapping[str, SourceSpec], source).values()
    if query.sources and not isinstance(source, Source):
        absolute = engine is not None
        how = Feed(source="", live=live, on_damage=on_damage, on_done=on_done)
        source = _united(query, source, how, None if absolute else folder, absolute=absolute)
        on_done = "keep"  # of the union; its sources do as they are told
        if history is not None:
            how = Feed(source="", on_damage=on_damage)
            history = _united(query, history, how, None, absolute=absolute)
    if ledger is None:
        warn_of_own_book("query", folder, stacklevel=2)
    elif folder is None and not (isinstance(ledger, Ledger) and ledger.place is None):
        warnings.warn(NO_STATE.format("query"), UnexpectedResult, stacklevel=2)
    given, new = _own_ledger(ledger, folder), True
    begun: dict[str, Beginning] = {}
    if given is not None:
        if folder is not None and read_about(folder) is not None:
            keep_book(given, folder)
        now = (clock or SystemClock()).now()
        if options is not None and options.now is not None:
            now = options.now
        asked, asks = [(query, folder)], {query.name: analyst}
        held = {query.name: "" if options is None else options.instead_of}
        known: dict[str, Any] = {"now": now, "take_over": take_over, "held": held}
        begun = refuse_early(given, dataset, asked, analysts=asks, **known)
        new = given.terms(dataset) is None or not was_charged(given, dataset, folder)
        if given is not ledger:
            given.close()
    place = dead_letters if dead_letters is not None else folder and folder / "dead-letters"
    operator = OperatorCounts()
    if place is not None:
        letters = DeadLetters(Path(place))
        operator = OperatorCounts(keep_rejected=letters.write, erase_rejected=letters.erase)
    parts: dict[str, Any] = {
        "operator": operator,
        "folder": folder,
        "secret": secret,
        "ledger": ledger,
        "dataset": dataset,
        "clock": clock or SystemClock(),
        "options": replace(options or EngineOptions(), analyst=analyst),
    }
    if query.name in begun:
        parts["beginning"] = begun[query.name]
    if engine is not None:
        if on_done != "keep":
            raise _not_removed("another engine reads them")
        started = _start_on_engine(engine, query, (source, history), live, sink, parts, on_damage)
        return _checked(started, new=new, anyway=anyway)
    feed = Feed(source=cast("SourceSpec", source), live=live, on_damage=on_damage, on_done=on_done)
    parts |= {
        "source": None if source is None else _open_feed(feed, folder),
        "sink": open_sink(sink),
        "history": None if history is None else open_source(history, on_damage=on_damage),
    }
    kind: type[Run] = SeriesRun if isinstance(query, SeriesQuery) else LocalRun
    return _checked(kind(query=query, **parts), new=new, anyway=anyway)


NO_STATE = (
    "without a state directory this {} cannot be repeated: if its output is lost, its budget is "
    "spent all the same"
)


@dataclass(frozen=True, kw_only=True)
class UnionAll:
    """Private queries that a statement puts together by UNION ALL, and the tables they read."""

    queries: tuple[AnyQuery, ...]
    tables: tuple[str, ...]
    name: str

    @classmethod
    def of(cls, compiled: Sequence[Compiled]) -> AnyQuery | UnionAll:
        """The only query, or several."""
        if len(compiled) == 1:
            return compiled[0].query
        queries = tuple(each.query for each in compiled)
        name = queries[0].name.removesuffix("_1")
        return cls(queries=queries, tables=tuple(each.table for each in compiled), name=name)


def _run_union(
    union: UnionAll,
    *,
    source: Any,
    ledger: GivenLedger,
    analyst: str,
    clock: Clock,
    **given: Any,
) -> Run:
    """Run the branches side by side; without a ledger in a book that has room for all of them."""
    refuse_other_times(union.queries)
    if isinstance(source, Mapping):
        missing = [name for name in union.tables if name not in source]
        if missing and not any(query.sources for query in union.queries):
            raise InvalidParameter(
                f"the query reads {' and '.join(dict.fromkeys(union.tables))}, and no source is "
                f"given for {missing[0]!r}; name each: source={{{missing[0]!r}: ...}}"
            )
        how = {name: given[name] for name in ("live", "history", "on_damage", "on_done")}
        feeds = {name: Feed(source=source[name], name=name, **how) for name in {*union.tables}}
        by_query = zip(union.queries, union.tables, strict=True)
        source = {query.name: feeds[table] for query, table in by_query}
    elif len({*union.tables}) > 1:
        raise InvalidParameter(
            f"the query reads {' and '.join(dict.fromkeys(union.tables))}: name a source for each, "
            f"source={{{union.tables[0]!r}: ...}}"
        )
    dataset, folder = given["dataset"], None if given["state"] is None else Path(given["state"])
    if ledger is None:
        warn_of_own_book("query", folder, stacklevel=3)
    book = _own_ledger(ledger, folder)
    if book is None or book.terms(dataset) is None:  # it will have room for all of them
        tables = {name: given[name] for name in ("public", "registry")}
        whole = [with_tables(query, state=folder, **tables) for query in union.queries]
        book = book or _new_book(
            None if ledger is None else as_ledger_place(cast("LedgerPlace", ledger)), []
        )
        book.open(dataset, book_of_all(whole, clock.now()))
        ledger = ledger or book
    if book is not ledger:
        book.close()
    analysts = {query.name: analyst for query in union.queries}
    parts = run_all(
        union.queries, source=source, ledger=ledger, clock=clock, analysts=analysts, **given
    )
    return UnionRun(query=union.queries[0], source=None, clock=clock, parts=parts, name=union.name)


def _checked(started: Run, *, new: bool, anyway: bool) -> Run:
    """A run that may begin: one that is not charged yet is refused if it would be for nothing."""
    tell_keys(started.sink, started.query.name, started.query.label_columns)
    begun = started.folder is not None and (started.folder / "run.dps").exists()
    if new and not begun:  # whatever the sink has of this query is another run's
        fence(started.sink, started.query.name, "a run that begins")
    if new and isinstance(started.sink, CheckedSink):
        started.sink.check(started.query.name, started.schema)
    if new and not anyway:
        refuse_useless(started)
        refuse_over(started)
    for notice in first_notices(started):
        warnings.warn(notice, UnexpectedResult, stacklevel=3)
    return started


def first_notices(run: Run) -> list[str]:
    """What is said of a run at its first start: that it takes over, or begins later than asked."""
    if not isinstance(run, QueryRun) or not run.is_new:
        return []
    said = [run.beginning.notice] if run.beginning.notice else []
    due = run.next_trigger
    if due is not None and run.begins_later:
        held = "its place in the book is held from now on"
        if run.folder is None:
            held = "until then its place in the book is not held: it has no state directory"
        said.append(f"the first trigger of {run.query.name!r} is {iso(due)}; {held}")
    return said


def run_all(
    queries: Sequence[AnyQuery | str],
    *,
    source: SourceSpec | Feed | Mapping[str, Feed],
    sink: SinkSpec | None = None,
    output: str = "append",
    history: SourceSpec | None = None,
    state: str | Path | None = None,
    live: bool = False,
    on_done: str = "keep",
    secret: Secret | bytes | str | Path | None = None,
    ledger: GivenLedger = None,
    dataset: str = "stream",
    analysts: Mapping[str, str] | None = None,
    on_damage: str = "quarantine",
    options: EngineOptions | None = None,
    clock: Clock | None = None,
    check_budget: bool = True,
    engine: Engine | None = None,
    anyway: bool | Collection[str] = False,
    take_over: bool = False,
    more_options: Mapping[str, Mapping[str, Any]] | None = None,
    public: Given = None,
    registry: Given = None,
) -> Runs:
    """Publish several queries of one dataset: one read of each source, one book, one secret.

    A query may be SQL text, which is named by its place: `query_1`, `query_2`; without a ledger and
    a state directory a book is opened then that has room for all of them.
    `source`: what all of them read, or a `Feed` for each by the query's name; queries with the same
    feed share one read (and `on_done` waits for the last of them). Each query has a state directory
    of its own in `state`, and its releases go to the one sink under its name. The book is that of
    `ledger`; it must hold all of them, so open it with `query.promise` or `dpstream ledger open`
    first. Queries that do not fit into it together are refused here, before a row is read (unless
    `check_budget` is off, for callers who open the book after this). `analysts`: who asks for each
    query, by its name. On another `engine` each query reads by itself. `anyway`: as in `run`, for
    all of them, or for those that are named. `more_options`: options of single queries. `public`
    and `registry`: as in `run`; a table is read once for all.

    A query that fails stops alone: the others go on to their ends, and its error is raised then.

    >>> import dpstream as dps
    >>> queries = [
    ...     dps.Query(name=name, privacy_unit_column="user", keys=keys, max_groups_contributed=1,
    ...               epsilon=2, delta=1e-6)
    ...     for name, keys in (("pages", ["page"]), ("everybody", []))
    ... ]
    >>> book = dps.Ledger()
    >>> book.open("clicks", queries[0].promise(epsilon=4, delta=1e-5))
    >>> rows = [{"user": f"u{n}", "page": "/home"} for n in range(400)]
    >>> found = run_all(queries, source=rows, ledger=book, dataset="clicks").collect()
    >>> {name: releases.table.num_rows for name, releases in found.items()}
    {'pages': 1, 'everybody': 1}
    """
    asked: list[AnyQuery] = []
    for number, each in enumerate(queries, 1):
        asked.append(_compiled(each, f"query_{number}") if isinstance(each, str) else each)
    _check_queries("run_all", asked)
    _check_names({"state": state, "ledger": ledger, "secret": secret})
    state, ledger = open_state(state, secret=secret, ledger=ledger, engine=engine)
    sink = _with_output(sink, output)
    names = [query.name for query in asked]
    if not asked or len(set(names)) < len(names):
        raise InvalidParameter(f"queries that run together need different names; got {names}")
    folder = None if state is None else Path(state)
    folders = {name: None if folder is None else folder / safe_name(name) for name in names}
    known: dict[str, WholeTable] = {}
    given_tables: dict[str, Any] = {"public": public, "registry": registry, "known": known}
    asked = [with_tables(query, state=folders[query.name], **given_tables) for query in asked]
    if ledger is None:
        warn_of_own_book("set of queries", folder, stacklevel=2)
        if folder is None and any(isinstance(each, str) for each in queries):
            ledger = Ledger()  # as that of a UNION ALL: it has room for all of them
            ledger.open(dataset, book_of_all(asked, (clock or SystemClock()).now()))
    common = Feed(source=source, live=live, history=history, on_damage=on_damage, on_done=on_done)
    feeds = _feeds_by_query(names, source, common)
    united: dict[Any, Feed] = {}
    for query in asked:
        feed = feeds[query.name]
        if query.sources and isinstance(feed.source, Mapping):
            key = (id(feed), *query.sources)
            parts = [replace(feed, source=feed.source[n], name=n) for n in query.sources]
            whole = replace(feed, source=UnitedFeeds(parts), on_done="keep")
            feeds[query.name] = united.setdefault(key, whole)
    given = _own_ledger(ledger, folder)
    own = _ledger_path(None, folder)
    if given is not None and own is not None and own.exists():
        given.persist(own)
    if check_budget:
        pairs = [(q, folders[q.name]) for q in asked]
        now = (clock or SystemClock()).now()
        refuse_early(
            given or Ledger(), dataset, pairs, now=now, take_over=take_over, analysts=analysts
        )
    if folder is not None:
        make_directory(folder, mode=0o700)
    begun = [each for each in folders.values() if each and read_about(each) is not None]
    book = given or _new_book(_ledger_path(ledger, folder), begun)
    if own is not None:
        book.persist(own)  # one in memory must not end before its runs
    if secret is None and folder is not None:  # made at first, never remade
        secret = Secret.load(secret_path(folder)) if begun else secret_path(folder)
    secret = secret if secret is not None else Secret.of(None)  # one for all, in memory
    clock, sink = clock or SystemClock(), sink if engine is not None else shared_sinks(sink)
    views: dict[str, tuple[Any, Any]]
    if engine is None:
        views = _views_by_query(asked, feeds, folder, clock, options or EngineOptions())
    else:
        views = {name: (_address(feeds[name]), feeds[name].history) for name in names}

    def begin(query: AnyQuery, *, again: bool = False) -> Run:
        return run(
            query,
            source=views[query.name][0],
            sink=open_sink(sink, again=True) if again and engine is None else sink,
            history=views[query.name][1],
            live=engine is not None and feeds[query.name].live,
            on_damage=feeds[query.name].on_damage,
            on_done="keep" if engine is None else feeds[query.name].on_done,
            engine=engine,
            state=folders[query.name],
            secret=Secret.of(secret),
            ledger=book,
            dataset=dataset,
            analyst=(analysts or {}).get(query.name, ""),
            options=_of_query(options, query.name, (more_options or {}).get(query.name, {})),
            clock=clock,
            anyway=anyway if isinstance(anyway, bool) else query.name in anyway,
            take_over=take_over,
        )

    return Runs(
        [begin(query) for query in asked],
        again={query.name: partial(begin, query, again=True) for query in asked},
        sinks=[each for each in _listed(sink) if isinstance(each, SharedSink)],
    )


def open_state(
    state: str | Path | None, *, secret: Any, ledger: L, engine: Engine | None = None
) -> tuple[Path | None, L | LedgerAddress]:
    """The directory that a run keeps its state in, and its ledger.

    For one in a bucket a working directory stands here; the first write takes it over.
    """
    if not is_object_uri(state):
        folder = None if state is None else Path(state)
    elif engine is not None:
        raise InvalidParameter(
            f"{state}: a state in a bucket is for the embedded engine; on Spark name a directory, "
            "and a state_location in the bucket"
        )
    else:
        if secret is None:
            raise InvalidParameter(
                f"{state}: a state in a bucket needs its secret named (secret=..., --secret, "
                "DPSTREAM_SECRET_FILE): every machine that goes on with it needs the same one"
            )
        folder = state_folder(cast("str", state))
    return folder, ledger_beside(folder, ledger)


def state_folder(state: str | Path, *, again: bool = True) -> Path:
    """The directory of a state: one in a bucket is fetched, and nothing is written there.

    `again`: also where this process has a copy that is the newest.
    """
    if not is_object_uri(state):
        return Path(state)
    optional("obstore", extra="objects", who=f"the state {state}")
    mirror: Any = import_module("dpstream.connectors.objects.state_mirror")
    folder: Path = mirror.open_state(state, again=again)
    return folder


def ledger_beside(folder: Path | None, ledger: L) -> L | LedgerAddress:
    """The ledger that is named; of a state in a bucket, by default the one beside it there."""
    mirrored, named = mirror_of(folder), cast("Any", ledger)
    if mirrored is None:
        return ledger
    place = named.place if isinstance(named, Ledger) else named and as_ledger_place(named)
    if place is not None and not isinstance(place, LedgerAddress):
        raise InvalidParameter(
            f"{mirrored.place} is in a bucket, and its ledger {place} would stay on this machine; "
            f"leave it out ({mirrored.ledger}), or name one on a server"
        )
    return mirrored.ledger if ledger is None else ledger


def look(
    query: AnyQuery, feed: Feed, *, state: Path | None, rows: int, clock: Clock
) -> dict[str, RowSample]:
    """What would become of rows of a feed: "source", and "history" if there is one.

    Nothing is charged, written, moved or committed. What cannot run is refused as by `run`. A pipe
    is left out: it can be read only once.
    """
    source: Source
    if isinstance(feed.source, UnitedFeeds):
        source = _open_feed(feed, None)
    elif feed.source == PUSHED and state is not None:
        source = PushedSource(pushed_folder(state, feed.name))
    else:
        growing = feed.live and (_is_path(feed.source) or is_object_uri(feed.source))
        source = open_source(
            feed.source, growing=growing, options=feed.options, on_damage=feed.on_damage
        )
    history = feed.history
    before = None if history is None else open_source(history, on_damage=feed.on_damage)
    kind: type[Run] = SeriesRun if isinstance(query, SeriesQuery) else LocalRun
    started = kind(query=query, source=source, history=before, clock=clock)
    try:
        return {
            name: sample_rows(
                *(started.query, each), now=clock.now(), most=rows, live=started.live, own=True
            )
            for name, each in (("source", source), ("history", before))
            if each is not None and each.replayable
        }
    finally:
        for end in (source, before):
            if end is not None:
                end.close()


def would_fit(
    queries: Sequence[tuple[AnyQuery, Path | None]],
    *,
    ledger: GivenLedger,
    dataset: str,
    terms: Terms | None = None,
    analysts: Mapping[str, str] | None = None,
    held: Mapping[str, str] | None = None,
) -> tuple[str, list[str]]:
    """Why queries would not fit into their book together ("": they would); which are charged.

    `queries` come with their state directories; `terms` are the book's, where they are declared;
    `analysts`: who asks for each query, by its name; `held`: runs that hold their places, likewise.
    The book is left as it is, and if there is none, none is made.
    """
    known, problem = _own_ledger(ledger, None), ""
    try:
        if known is not None and terms is not None and known.terms(dataset) is not None:
            known.open(dataset, terms)  # it is open: other terms are refused
        now = SystemClock().now()
        asked: dict[str, Any] = {"now": now, "terms": terms, "analysts": analysts, "held": held}
        refuse_early(known or Ledger(), dataset, queries, **asked)
    except (BudgetExceeded, LedgerError) as refusal:
        problem = str(refusal)
    charged = [q.name for q, folder in queries if known and was_charged(known, dataset, folder)]
    if known is not None and known is not ledger:
        known.close()
    return problem, charged


def _feeds_by_query(names: Sequence[str], source: Any, common: Feed) -> dict[str, Feed]:
    """What each query reads, by its name."""
    if not (isinstance(source, Mapping) and any(isinstance(f, Feed) for f in source.values())):
        return dict.fromkeys(names, source if isinstance(source, Feed) else common)
    for name in names:
        if not isinstance(source.get(name), Feed):
            raise InvalidParameter(f"source has no Feed for the query {name!r}; add it")
    return {name: source[name] for name in names}


def _views_by_query(
    queries: Sequence[AnyQuery],
    feeds: Mapping[str, Feed],
    folder: Path | None,
    clock: Clock,
    options: EngineOptions,
) -> dict[str, tuple[Any, Any]]:
    """Each query's view of what its feed reads once for all."""
    by_query: dict[str, tuple[Any, Any]] = {}
    for feed in dict.fromkeys(feeds.values()):
        readers = [query for query in queries if feeds[query.name] is feed]
        columns = [query.source_columns for query in readers]
        source = _open_feed(feed, folder)
        views: Sequence[Any]
        if source.bounded:
            views = SharedSource(source, columns).views()
        else:
            together = list(dict.fromkeys(name for wanted in columns for name in wanted))
            buffer = feed.buffer or options.buffer
            views = Arrivals(source, clock, together, views=len(readers), buffer=buffer).views
        before: Sequence[Any] = [None] * len(readers)
        if feed.history is not None:
            opened = open_source(feed.history, on_damage=feed.on_damage)
            before = SharedSource(opened, columns).views()
        pairs = zip(readers, views, before, strict=True)
        by_query |= {query.name: (view, earlier) for query, view, earlier in pairs}
    return by_query


def _united(
    query: AnyQuery, given: Any, how: Feed, folder: Path | None, *, absolute: bool = False
) -> Source:
    """The sources of a UNION ALL as one; `given` has one for each of its tables, by their names."""
    if isinstance(given, UnitedFeeds):
        given = {feed.name: feed for feed in given}
    missing = [
        name for name in query.sources if not isinstance(given, Mapping) or name not in given
    ]
    if missing:
        raise InvalidParameter(
            f"the query {query.name!r} reads {' and '.join(query.sources)}, and no source is given "
            f"for {missing[0]!r}; name each: source={{{query.sources[0]!r}: ...}}, --source "
            f"{missing[0]}=PATH, [source.{missing[0]}] in a pipeline"
        )
    feeds = {
        name: given[name]
        if isinstance(given[name], Feed)
        else replace(how, source=given[name], name=name)
        for name in query.sources
    }
    if absolute:
        feeds = {n: replace(f, source=_absolute_paths(f.source)) for n, f in feeds.items()}
    return union_source({name: _open_feed(feed, folder) for name, feed in feeds.items()})


def _open_feed(feed: Feed, folder: Path | None) -> Source:
    """The source; one that cannot be read twice is kept in the state directory."""
    source: Any = feed.source
    if isinstance(source, UnitedFeeds):
        return union_source({each.name: _open_feed(each, folder) for each in source})
    if isinstance(source, str) and source == PUSHED:
        if folder is None:
            raise InvalidParameter(f"the source {PUSHED!r} needs a state directory")
        return PushedSource(pushed_folder(folder, feed.name), keep=feed.keep)
    if feed.live and isinstance(source, list | tuple):
        raise InvalidParameter(
            f"live reads one directory, and not the list {source!r:.200}; move the files into one, "
            "name older ones as history, or leave live out"
        )
    opened: Source
    growing = feed.live and _is_path(source)
    if feed.on_done != "keep" and not growing:
        raise _not_removed("only a live directory has such files")
    if feed.on_done != "keep" and folder is None:
        raise _not_removed("without a state directory nobody knows when they are needed no more")
    if growing:
        limits = SizeLimits.of(feed.options)
        opened = open_directory(
            Path(source), feed.on_done, on_damage=feed.on_damage, limits=limits, keep=feed.keep
        )
    else:
        opened = open_source(
            source, growing=feed.live, options=feed.options, on_damage=feed.on_damage
        )
    if not opened.replayable and folder is not None:
        place = f"arrived-{safe_name(feed.name)}" if feed.name else "arrived"
        return WriteAhead(opened, folder / place, keep=feed.keep)
    return opened


def _not_removed(why: str) -> InvalidParameter:
    return InvalidParameter(f"on_done moves or deletes files that were read: {why}; leave it out")


def _absolute_paths(source: Any) -> Any:
    """Paths as other processes see them, which work in other folders."""
    if isinstance(source, list | tuple):
        return [_absolute_paths(each) for each in source]
    return str(Path(source).absolute()) if _is_path(source) else source


def _compiled(text: str, name: str) -> AnyQuery:
    compiled = compile_sql(text, name=name)
    warn_of_remarks(compiled, stacklevel=3)
    return compiled.query


def _check_queries(name: str, queries: Sequence[Any]) -> None:
    """Refuse what is no query, by its kind alone: it may be the data."""
    for each in queries:
        if isinstance(each, Query | SeriesQuery):
            continue
        kind = f"an object of type {type(each).__name__}"
        how = '"SELECT ..."' if name == "run" else '["SELECT ...", "SELECT ..."]'
        raise InvalidParameter(
            f"{name} takes the query first, then its source: dps.{name}({how}, source=frame); "
            f"got {kind}"
        )


def _is_named(source: Any) -> bool:
    """Is it one source under the name of its table, and no dict of columns?"""
    if not isinstance(source, Mapping) or len(source) != 1:
        return False
    (only,) = source.values()
    if isinstance(only, list):
        return bool(only) and all(isinstance(row, Mapping) for row in only)
    return not isinstance(only, tuple | np.ndarray)


def _check_names(places: Mapping[str, Any]) -> None:
    """Refuse names that no file can have; those of files need not be UTF-8."""
    for part, place in places.items():
        for each in place if isinstance(place, list | tuple) else [place]:
            try:
                os.fsencode(each if isinstance(each, str | os.PathLike) else "")
            except UnicodeEncodeError:
                refuse_unwritable(part, os.fspath(each))


def _with_output(sink: Any, output: str) -> Any:
    if output not in OUTPUTS:
        raise InvalidParameter(f"output must be one of {', '.join(OUTPUTS)}; got {output!r}")
    if output == "append":
        return sink
    if sink is None:
        raise InvalidParameter("output = 'upsert' says how a sink is written, and there is no sink")
    return upsert_specs(sink)


def _is_path(source: Any) -> bool:
    return isinstance(source, str | Path) and source != "-" and not is_uri(source)


def _start_on_engine(
    engine: Engine,
    query: AnyQuery,
    read: tuple[Any, Any],
    live: bool,
    sink: Any,
    parts: Any,
    on_damage: str,
) -> QueryRun:
    """A run on another engine, which opens what only it knows; the rest is for the connectors."""
    source, history = read
    if isinstance(query, SeriesQuery):
        raise InvalidParameter(
            f"{query.name!r} is a time series ({type(query.mechanism).__name__}), which one "
            "process publishes step by step; run it on the embedded engine: without engine=, "
            "without --engine, without [engine] in the pipeline file"
        )
    if isinstance(source, Mapping):
        if query.name not in source and len(source) != 1:
            raise InvalidParameter(
                f"source has no entry for the query {query.name!r}; it has {', '.join(source)}"
            )
        source = source[query.name] if query.name in source else next(iter(source.values()))
    sources = []
    for spec, growing in ((source, live), (history, False)):
        if isinstance(spec, str) and spec.startswith("kafka://"):
            spec = topic_on_spark(spec)
        opened = None if spec is None else engine.source(spec)
        if opened is None and is_uri(spec):
            raise _not_by_one_process(ServerOptions(spec))
        if spec is not None and opened is None:
            feed = Feed(source=_absolute_paths(spec), live=growing, on_damage=on_damage)
            opened = _open_feed(feed, None)
        sources.append(opened)
    known = engine.sink(sink)
    return engine.start(
        query=query,
        source=sources[0],
        history=sources[1],
        by_clock=live,
        sink=open_sink(sink) if known is None else known,
        open_files=Files,
        **parts,
    )


def _address(feed: Feed) -> Any:
    """What a feed reads, with its options where an address can hold them."""
    if not is_uri(feed.source) or not feed.options:
        return feed.source
    words = {name: str(value) for name, value in feed.options.items()}
    return f"{feed.source}{'&' if '?' in str(feed.source) else '?'}{urlencode(words)}"


def _not_by_one_process(address: ServerOptions) -> InvalidParameter:
    """Connectors read a server from one process, with places of their own in it."""
    return InvalidParameter(
        f"{address.where} is read by one process; give the engine a stream of its own; or use the "
        "embedded engine (without engine=)"
    )


def _listed(sink: Any) -> list[Any]:
    """One sink or several, one after another."""
    if not isinstance(sink, list):
        return [sink]
    return [one for each in sink for one in _listed(each)]


def _new_book(path: LedgerPlace | None, begun: Sequence[Path]) -> Ledger:
    """A ledger that is not there is made, unless queries that have begun were charged to it."""
    if begun and path is not None and not path.exists():
        raise StateError(
            f"there is no ledger at {path}, and the query in {begun[0]} was begun with it; restore "
            f"it, or {ANEW}"
        )
    return Ledger(path)


def _of_query(
    options: EngineOptions | None, name: str, more: Mapping[str, Any]
) -> EngineOptions | None:
    """A run id that a test has fixed must still differ from query to query."""
    options = replace(options or EngineOptions(), **more) if more else options
    if options is None or options.run_id is None:
        return options
    return replace(options, run_id=sha256(options.run_id + name.encode()).digest()[:16])


def _own_ledger(ledger: GivenLedger, folder: Path | None) -> Ledger | None:
    """The ledger, if it is there already: looking makes none."""
    if isinstance(ledger, Ledger):
        return ledger
    path = _ledger_path(ledger, folder)
    return Ledger(path) if path is not None and path.exists() else None


def _ledger_path(ledger: Any, folder: Path | None) -> LedgerPlace | None:
    """Where the ledger is, or would be; None: in memory."""
    if ledger is not None:
        return as_ledger_place(ledger)
    mirrored = mirror_of(folder)
    if mirrored is not None:
        return mirrored.ledger
    return None if folder is None else folder / "ledger"
