"""Start a query, or several over one read, with all that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from dpstream.connectors.dead_letters import DeadLetters
from dpstream.connectors.options import Options as Address
from dpstream.connectors.options import is_uri
from dpstream.connectors.pushed import PUSHED, PushedSource, pushed_folder
from dpstream.connectors.sinks import open_sink
from dpstream.connectors.sources import open_source
from dpstream.connectors.sources.growing import GrowingDirectory
from dpstream.connectors.sources.shared import SharedSource
from dpstream.connectors.storage import safe_name
from dpstream.connectors.write_ahead import WriteAhead
from dpstream.engines.clock import Clock, SystemClock
from dpstream.engines.directory import read_about
from dpstream.engines.local import LocalRun
from dpstream.engines.query_run import Engine, Options, QueryRun
from dpstream.engines.series import SeriesRun
from dpstream.errors import InvalidParameter
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.privacy.state.files import make_directory
from dpstream.privacy.state.secret import beside
from dpstream.records import Source
from dpstream.session.budget import AnyQuery, refuse_early
from dpstream.session.runs import Operator, Run, Runs
from dpstream.stages.series_query import SeriesQuery


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """What queries read together: a source, live or not, and files that came before it."""

    source: Any
    live: bool = False
    history: Any = None
    name: str = ""
    options: Mapping[str, Any] | None = None
    """Of a server that a URI names."""


def run(
    query: AnyQuery,
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
    engine: Engine | None = None,
) -> Run:
    """Publish a query's releases, for as long as its schedule runs.

    `source`: files (a path, a glob, a directory, a list), an Arrow table, a pandas or Polars frame,
    "-" for standard input, or a URI such as "kafka://127.0.0.1:9092/clicks". Files are read by
    event time; with `live` a directory may grow, and what is in it is read by the clock. `history`:
    files that are read by event time before and beside a live source. `sink`: a directory (Parquet;
    "csv:out/", "jsonl:out/"), an `.sqlite` or `.duckdb` file, "-" for standard output, a URI, or a
    list of them.

    With `checkpoint_location`, a directory, the run survives a kill at any moment; its secret is
    made beside it on first use: back it up. Rows that cannot be used go to `dead_letters` (default:
    in the state directory), with the reason.

    What does not fit into the dataset's book is refused here, before a row is read.

    `engine`: a `SparkEngine` runs the query on its session; then `source` and `history` may be
    DataFrames, streaming ones too (`live`: by the clock; otherwise all that is there, by event
    time), and `sink` a function of a DataFrame and its release, or a `SparkSink`.

    >>> import pyarrow as pa
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
    given = own_ledger(ledger, folder)
    if given is not None:
        refuse_early(given, dataset, [(query, folder)])
        if given is not ledger:
            given.close()
    place = dead_letters if dead_letters is not None else folder and folder / "dead-letters"
    operator = Operator(dead_letters=None if place is None else DeadLetters(Path(place)))
    parts: dict[str, Any] = {
        "aside": operator,
        "folder": folder,
        "secret": secret,
        "ledger": ledger,
        "dataset": dataset,
        "clock": clock or SystemClock(),
        "options": options or Options(),
    }
    if engine is not None:
        return Run(_elsewhere(engine, query, source, history, live, sink, parts), operator)
    parts |= {
        "source": _opened(source, live, folder),
        "sink": open_sink(sink),
        "history": None if history is None else open_source(history),
    }
    if isinstance(query, SeriesQuery):
        return Run(SeriesRun(query=query, **parts), operator)
    return Run(LocalRun(query=query, **parts), operator)


def _elsewhere(
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
        found = None if spec is None else engine.source(spec)
        if found is None and is_uri(spec):
            raise _not_by_one_process(Address(spec))
        if spec is not None and found is None:
            found = _opened(_absolute(spec), growing, None)
        sources.append(found)
    known = engine.sink(sink)
    return engine.start(
        query=query,
        source=sources[0],
        history=sources[1],
        by_clock=live,
        sink=open_sink(sink) if known is None else known,
        **parts,
    )


def _not_by_one_process(address: Address) -> InvalidParameter:
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


def run_all(
    queries: Sequence[AnyQuery],
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
    check_budget: bool = True,
    engine: Engine | None = None,
) -> Runs:
    """Publish several queries of one dataset: one read of each source, one book, one secret.

    `source`: what all of them read, or a `Feed` for each by the query's name; queries with the same
    feed share one read. Each query has a state directory of its own in `checkpoint_location`, and
    its releases go to the one sink under its name. The book is that of `ledger`; it must hold all
    of them, so open it with `query.promise` or `dpstream ledger open` first. Queries that do not
    fit into it together are refused here, before a row is read (unless `check_budget` is off,
    for callers who open the book after this). On another `engine` each query reads by itself.
    """
    names = [query.name for query in queries]
    if not queries or len(set(names)) < len(names):
        raise InvalidParameter(f"queries that run together need different names; got {names}")
    folder = None if checkpoint_location is None else Path(checkpoint_location)
    folders = {name: None if folder is None else folder / safe_name(name) for name in names}
    feeds = _feeds(names, source, Feed(source=source, live=live, history=history))
    given = own_ledger(ledger, folder)
    if check_budget:
        several = [(query, folders[query.name]) for query in queries]
        refuse_early(given or Ledger(), dataset, several)
    if folder is not None:
        make_directory(folder, mode=0o700)
    book = given or Ledger(_ledger_path(ledger, folder))
    kept = secret
    if secret is None and folder is not None:
        begun = any(read_about(folder / safe_name(name)) is not None for name in names)
        kept = Secret.load(beside(folder)) if begun else beside(folder)  # a lost one is not remade
    views: dict[str, tuple[Any, Any]]
    if engine is None:
        views = _views(queries, feeds, folder)
    else:
        views = {name: (feeds[name].source, feeds[name].history) for name in names}
    runs = [
        run(
            query,
            source=views[query.name][0],
            sink=sink,
            history=views[query.name][1],
            live=engine is not None and feeds[query.name].live,
            engine=engine,
            checkpoint_location=folders[query.name],
            secret=Secret.of(kept),
            ledger=book,
            dataset=dataset,
            options=_of_query(options, query.name),
            clock=clock,
        )
        for query in queries
    ]
    return Runs(runs)


def _of_query(options: Options | None, name: str) -> Options | None:
    """A run id that a test has fixed must still differ from query to query."""
    if options is None or options.run_id is None:
        return options
    return replace(options, run_id=sha256(options.run_id + name.encode()).digest()[:16])


def _feeds(names: Sequence[str], source: Any, common: Feed) -> dict[str, Feed]:
    """What each query reads, by its name."""
    if isinstance(source, Feed):
        return dict.fromkeys(names, source)
    if not (isinstance(source, Mapping) and any(isinstance(f, Feed) for f in source.values())):
        return dict.fromkeys(names, common)
    for name in names:
        if not isinstance(source.get(name), Feed):
            raise InvalidParameter(f"source has no Feed for the query {name!r}; add it")
    return {name: source[name] for name in names}


def _views(
    queries: Sequence[AnyQuery], feeds: Mapping[str, Feed], folder: Path | None
) -> dict[str, tuple[Any, Any]]:
    """Each query's view of what its feed reads once for all."""
    found: dict[str, tuple[Any, Any]] = {}
    for feed in dict.fromkeys(feeds.values()):
        readers = [query for query in queries if feeds[query.name] is feed]
        columns = [query.source_columns for query in readers]
        opened = _opened(feed.source, feed.live, folder, feed.name, feed.options)
        assert opened is not None
        views: list[Any] = list(SharedSource(opened, columns).views())
        before: list[Any] = [None] * len(readers)
        if feed.history is not None:
            before = list(SharedSource(open_source(feed.history), columns).views())
        pairs = zip(readers, views, before, strict=True)
        found |= {query.name: (view, earlier) for query, view, earlier in pairs}
    return found


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


def _opened(
    source: Any,
    live: bool,
    folder: Path | None,
    name: str = "",
    options: Mapping[str, Any] | None = None,
) -> Source | None:
    """The source; one that cannot be read twice is kept in the state directory."""
    if source is None:
        return None
    if isinstance(source, str) and source == PUSHED:
        if folder is None:
            raise InvalidParameter(f"the source {PUSHED!r} needs a state directory")
        return PushedSource(pushed_folder(folder, name))
    if live and isinstance(source, list | tuple):
        raise InvalidParameter(
            f"live reads one directory, and not the list {source!r:.200}; move the files into one, "
            "name older ones as history, or leave live out"
        )
    growing = live and _is_path(source)
    opened = GrowingDirectory(Path(source)) if growing else open_source(source, options=options)
    if not opened.replayable and folder is not None:
        place = f"arrived-{safe_name(name)}" if name else "arrived"
        return WriteAhead(opened, folder / place)
    return opened


def _absolute(source: Any) -> Any:
    """Paths as other processes see them, which work in other folders."""
    if isinstance(source, list | tuple):
        return [_absolute(each) for each in source]
    return str(Path(source).absolute()) if _is_path(source) else source


def _is_path(source: Any) -> bool:
    return isinstance(source, str | Path) and source != "-" and not is_uri(source)
