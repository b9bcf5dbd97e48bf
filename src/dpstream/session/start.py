"""Start a query, or several over one read, with all that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.server_base import ServerOptions, is_uri
from dpstream.connectors.shared import SharedSink, shared_sinks
from dpstream.connectors.storage import DeadLetters, safe_name
from dpstream.engines.chunks import OperatorCounts
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.embedded.series_run import SeriesRun
from dpstream.engines.query_run import AnyQuery, Engine, EngineOptions, QueryRun, Run
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.ledger.ledger import Ledger, warn_of_own_book
from dpstream.privacy.state import Secret
from dpstream.privacy.state.durable_files import make_directory
from dpstream.privacy.state.run_directory import ANEW, keep_book, read_about
from dpstream.privacy.state.secret import beside
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Sink
from dpstream.session.budget import refuse_early
from dpstream.session.feeds import (
    Feed,
    Place,
    SourceSpec,
    absolute_paths,
    feeds_by_query,
    follow_source,
    open_feed,
    views_by_query,
)
from dpstream.session.runs import Runs

SinkSpec: TypeAlias = "Sink | Place | Callable[..., None] | Sequence[SinkSpec]"
"""What `open_sink` takes; on Spark a `SparkSink` or another function of a DataFrame too."""


def run(
    query: AnyQuery,
    *,
    source: SourceSpec | Mapping[str, SourceSpec] | None = None,
    sink: SinkSpec | None = None,
    history: SourceSpec | None = None,
    state: str | Path | None = None,
    live: bool = False,
    secret: Secret | bytes | str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    dataset: str = "stream",
    dead_letters: str | Path | None = None,
    options: EngineOptions | None = None,
    clock: Clock | None = None,
    engine: Engine | None = None,
) -> Run:
    """Publish a query's releases, for as long as its schedule runs.

    `source`: files (a path, a glob, a directory, a list), an Arrow table, a pandas or Polars frame,
    "-" for standard input, or a URI such as "kafka://127.0.0.1:9092/clicks". Files are read by
    event time; with `live` a directory may grow, and what is in it is read by the clock. `history`:
    files that are read by event time before and beside a live source. `sink`: a directory (Parquet;
    "csv:out/", "jsonl:out/"), an `.sqlite` or `.duckdb` file, "-" for standard output, a URI, or a
    list of them.

    With `state`, a directory, the run survives a kill at any moment; its secret is
    made beside it on first use: back it up. Rows that cannot be used go to `dead_letters` (default:
    in the state directory), with the reason.

    What does not fit into the dataset's book is refused here, before a row is read. Without a
    `ledger` the query has a book of its own, and a NewBook warning says so once. A `Ledger` that is
    in memory moves to a file in the state directory, for all that share it.

    `engine`: a `SparkEngine` runs the query on its session; then `source` and `history` may be
    DataFrames, streaming ones too (`live`: by the clock; otherwise all that is there, by event
    time), and `sink` a function of a DataFrame and its release, or a `SparkSink`.

    >>> import pyarrow as pa
    >>> from dpstream.query.query import Query
    >>> clicks = pa.table({"user": ["ann", "bob"] * 500, "page": ["home"] * 1000})
    >>> query = Query(privacy_unit_column="user", keys=["page"], public_groups=["home"],
    ...               epsilon=5, delta=1e-9, max_groups_contributed=1)
    >>> [table.column_names for table in run(query, source=clicks)]
    [['page', 'count', 'count_stddev', 'trigger_time', 'release_index']]
    """
    if source is None and history is None:
        raise InvalidParameter("a run needs a source: files, a table, or '-' for standard input")
    folder = None if state is None else Path(state)
    if ledger is None:
        warn_of_own_book("query", folder, stacklevel=2)
    given = own_ledger(ledger, folder)
    if given is not None:
        if folder is not None and read_about(folder) is not None:
            keep_book(given, folder)
        refuse_early(given, dataset, [(query, folder)])
        if given is not ledger:
            given.close()
    place = dead_letters if dead_letters is not None else folder and folder / "dead-letters"
    operator = OperatorCounts(dead_letters=None if place is None else DeadLetters(Path(place)))
    clock, options = clock or SystemClock(), options or EngineOptions()
    parts: dict[str, Any] = {
        "operator": operator,
        "folder": folder,
        "secret": secret,
        "ledger": ledger,
        "dataset": dataset,
        "clock": clock,
        "options": options,
    }
    if engine is not None:
        return _start_on_engine(engine, query, source, history, live, sink, parts)
    parts |= {
        "source": follow_source(open_feed(source, live, folder), clock, options),
        "sink": open_sink(sink),
        "history": None if history is None else open_source(history),
    }
    if isinstance(query, SeriesQuery):
        return SeriesRun(query=query, **parts)
    return LocalRun(query=query, **parts)


def run_all(
    queries: Sequence[AnyQuery],
    *,
    source: SourceSpec | Feed | Mapping[str, Feed],
    sink: SinkSpec | None = None,
    history: SourceSpec | None = None,
    state: str | Path | None = None,
    live: bool = False,
    secret: Secret | bytes | str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    dataset: str = "stream",
    options: EngineOptions | None = None,
    clock: Clock | None = None,
    check_budget: bool = True,
    engine: Engine | None = None,
) -> Runs:
    """Publish several queries of one dataset: one read of each source, one book, one secret.

    `source`: what all of them read, or a `Feed` for each by the query's name; queries with the same
    feed share one read. Each query has a state directory of its own in `state`, and
    its releases go to the one sink under its name. The book is that of `ledger`; it must hold all
    of them, so open it with `query.promise` or `dpstream ledger open` first. Queries that do not
    fit into it together are refused here, before a row is read (unless `check_budget` is off,
    for callers who open the book after this). On another `engine` each query reads by itself.

    A query that fails stops alone: the others go on to their ends, and its error is raised then.
    """
    names = [query.name for query in queries]
    if not queries or len(set(names)) < len(names):
        raise InvalidParameter(f"queries that run together need different names; got {names}")
    folder = None if state is None else Path(state)
    if ledger is None:
        warn_of_own_book("set of queries", folder, stacklevel=2)
    folders = {name: None if folder is None else folder / safe_name(name) for name in names}
    feeds = feeds_by_query(names, source, Feed(source=source, live=live, history=history))
    given = own_ledger(ledger, folder)
    own = _ledger_path(None, folder)
    if given is not None and own is not None and own.exists():
        given.persist(own)
    if check_budget:
        several = [(query, folders[query.name]) for query in queries]
        refuse_early(given or Ledger(), dataset, several)
    if folder is not None:
        make_directory(folder, mode=0o700)
    book = given or _new_book(_ledger_path(ledger, folder), folders.values())
    if own is not None:
        book.persist(own)  # one in memory must not end before its runs
    kept = _common_secret(secret, folder, names)
    clock, sink = clock or SystemClock(), sink if engine is not None else shared_sinks(sink)
    views: dict[str, tuple[Any, Any]]
    if engine is None:
        views = views_by_query(queries, feeds, folder, clock, options or EngineOptions())
    else:
        views = {name: (feeds[name].source, feeds[name].history) for name in names}

    def begin(query: AnyQuery, *, again: bool = False) -> Run:
        return run(
            query,
            source=views[query.name][0],
            sink=open_sink(sink, again=True) if again and engine is None else sink,
            history=views[query.name][1],
            live=engine is not None and feeds[query.name].live,
            engine=engine,
            state=folders[query.name],
            secret=Secret.of(kept),
            ledger=book,
            dataset=dataset,
            options=_of_query(options, query.name),
            clock=clock,
        )

    return Runs(
        [begin(query) for query in queries],
        again={query.name: partial(begin, query, again=True) for query in queries},
        held=[one for one in _listed(sink) if isinstance(one, SharedSink)],
    )


def _start_on_engine(
    engine: Engine,
    query: AnyQuery,
    source: Any,
    history: Any,
    live: bool,
    sink: Any,
    parts: dict[str, Any],
) -> QueryRun:
    """A run on another engine, which opens what only it knows; the rest is for the connectors."""
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
        opened = None if spec is None else engine.source(spec)
        if opened is None and is_uri(spec):
            raise _not_by_one_process(ServerOptions(spec))
        if spec is not None and opened is None:
            opened = open_feed(absolute_paths(spec), growing, None)
        sources.append(opened)
    known = engine.sink(sink)
    return engine.start(
        query=query,
        source=sources[0],
        history=sources[1],
        by_clock=live,
        sink=open_sink(sink) if known is None else known,
        **parts,
    )


def _not_by_one_process(address: ServerOptions) -> InvalidParameter:
    """Connectors read a server from one process, with places of their own in it."""
    advice = "give the engine a stream of its own"
    if address.scheme == "kafka":
        advice += (
            ': source=session.readStream.format("kafka").option("kafka.bootstrap.servers", '
            f'"{address.servers}").option("subscribe", "{address.path}").load(), with its value '
            "parsed by from_json (docs/howto/kafka-on-spark.md)"
        )
    return InvalidParameter(
        f"{address.where} is read by one process; {advice}; or use the embedded engine (without "
        "engine=)"
    )


def _listed(sink: Any) -> list[Any]:
    """One sink or several, one after another."""
    if not isinstance(sink, list):
        return [sink]
    return [one for each in sink for one in _listed(each)]


def _new_book(path: Path | None, folders: Iterable[Path | None]) -> Ledger:
    """A ledger that is not there is made, unless queries that have begun were charged to it."""
    begun = [one for one in folders if one is not None and read_about(one) is not None]
    if begun and path is not None and not path.exists():
        raise StateError(
            f"there is no ledger at {path}, and the query in {begun[0]} was begun with it; restore "
            f"it, or {ANEW}"
        )
    return Ledger(path)


def _common_secret(
    given: Secret | bytes | str | Path | None, folder: Path | None, names: Sequence[str]
) -> Secret | bytes | str | Path | None:
    """The one given, or the one beside the directory of all: made at first, never remade."""
    if given is not None or folder is None:
        return given
    begun = any(read_about(folder / safe_name(name)) is not None for name in names)
    return Secret.load(beside(folder)) if begun else beside(folder)


def _of_query(options: EngineOptions | None, name: str) -> EngineOptions | None:
    """A run id that a test has fixed must still differ from query to query."""
    if options is None or options.run_id is None:
        return options
    return replace(options, run_id=sha256(options.run_id + name.encode()).digest()[:16])


def own_ledger(ledger: Ledger | str | Path | None, folder: Path | None) -> Ledger | None:
    """The ledger, if it is there already: looking makes none."""
    if isinstance(ledger, Ledger):
        return ledger
    path = _ledger_path(ledger, folder)
    return Ledger(path) if path is not None and path.exists() else None


def _ledger_path(ledger: Any, folder: Path | None) -> Path | None:
    """Where the ledger is, or would be; None: in memory."""
    if ledger is not None:
        return Path(ledger)
    return None if folder is None else folder / "ledger"
