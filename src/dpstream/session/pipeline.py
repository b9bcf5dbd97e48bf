"""Pipeline files: sources, books, state, sinks and named queries, in TOML.

A file is read and checked table by table, its queries are compiled, and its paths, which are
relative to it, are seen from the current directory. Errors name file, table and key.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dpstream.connectors.encode import ENCODERS
from dpstream.connectors.files.source import ON_DAMAGE, ON_DONE
from dpstream.connectors.registry import OUTPUTS, UPSERT, upsert_specs
from dpstream.connectors.server_base import ServerOptions, is_object_uri, is_uri
from dpstream.connectors.storage import safe_name
from dpstream.connectors.write_ahead import PUSHED, pushed_folder
from dpstream.engines.query_run import AnyQuery
from dpstream.errors import InvalidInput, InvalidParameter, LedgerError
from dpstream.privacy.accounting.calibration import mu_squared_for, rho_for
from dpstream.privacy.accounting.promises import rows_of
from dpstream.privacy.amounts import on_grid, positive
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import BACKUPS, Ledger
from dpstream.privacy.ledger.store import LedgerPlace, as_ledger_place
from dpstream.privacy.state.secret import secret_path
from dpstream.query.book_periods import FOREVER, book_share, same_rows
from dpstream.query.noise_plan import pure_terms
from dpstream.query.public_tables import WholeTable
from dpstream.query.query import Query
from dpstream.query.windows import duration, in_words
from dpstream.session import Feed
from dpstream.session.changes import Changes
from dpstream.session.start import UnitedFeeds, ledger_beside, state_folder
from dpstream.session.whole_tables import Refreshed, with_tables
from dpstream.sql_compiler.compile_sql import Compiled, compile_sql, remarks

__all__ = ["ENGINES", "Pipeline", "load_pipeline"]

ENGINES = ("embedded", "spark")
_TEXT: tuple[type, ...] = (str,)
_TEXTS: tuple[type, ...] = (str, list)
_NUMBER: tuple[type, ...] = (int, float, str)
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "source": {
        "path": _TEXTS,
        "live": (bool,),
        "on_done": _TEXT,
        "history": _TEXTS,
        "options": (dict,),
        "column_types": (dict,),
        "buffer_mib": (int,),
        "on_damage": _TEXT,
    },
    "budget": {
        "dataset": _TEXT,
        "epsilon": _NUMBER,
        "delta": _NUMBER,
        "ledger": _TEXT,
        "privacy_unit_period": _TEXT,
    },
    "state": {"path": _TEXT, "secret": _TEXT},
    "sink": {"to": _TEXTS, "output": _TEXT},
    "engine": {"name": _TEXT, "master": _TEXT, "buckets": (int,), "state_location": _TEXT},
    "retention": dict.fromkeys(("backups", "releases", "served", "inputs", "dead_letters"), _TEXT),
    "alert": {
        "query": _TEXT,
        "column": _TEXT,
        "key": (list,),
        "above": (int, float),
        "below": (int, float),
        "webhook": _TEXT,
    },
    "public": {"name": _TEXT, "path": _TEXTS, "refresh": _TEXT},
    "registry": {"name": _TEXT, "path": _TEXTS},
    "functions": {},
    "query": {
        "name": _TEXT,
        "sql": _TEXT,
        "file": _TEXT,
        "params": (dict,),
        "anyway": (bool,),
        "analyst": _TEXT,
        "title": _TEXT,
        "description": _TEXT,
    },
}
_REQUIRED = {
    "source": ("path",),
    "budget": ("dataset", "epsilon"),
    "state": ("path",),
    "sink": ("to",),
    "engine": ("name",),
    "retention": (),
    "functions": (),
    "alert": ("query", "column", "webhook"),
    "public": ("name", "path"),
    "registry": ("name", "path"),
    "query": ("name",),
}
_OPTIONAL = ("sink", "engine", "retention", "functions", "alert", "public", "registry")
_LISTS = ("query", "alert", "public", "registry")  # [[query]]
_INNER = ("options", "column_types")  # tables within a source's
_SEVERAL = ("source", "budget")  # one table, or one for each source: [source.clicks]
_IN_WORDS = {
    str: "text",
    list: "a list of texts",
    bool: "true or false",
    int: "a number",
    dict: "a table",
}

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PushedTable:
    """A source whose rows are handed in: where they are kept, and which columns are."""

    folder: Path
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """When a published figure is told to an address: above (or below) a number by its margin."""

    query: str
    column: str
    figure: float
    webhook: str
    below: bool = False
    key: tuple[str, ...] = ()
    """The key that is looked at; all of them if there is none."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a pipeline file says; paths are already relative to the current directory."""

    path: Path
    queries: tuple[AnyQuery, ...]
    feeds: Mapping[str, Feed]
    """What each query reads, by its name; queries of one source have the same feed."""
    books: tuple[PipelineBook, ...]
    state: Path
    secret: Path
    sinks: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=lambda: {"name": "embedded"})
    """Where the queries run, and how it is set up."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The SQL of each query, by its name."""
    pushed: Mapping[str, PushedTable] = field(default_factory=dict)
    """Sources whose rows are handed in, by the name they are handed in under."""
    remarks: tuple[str, ...] = ()
    """What who wrote the queries may not expect of them."""
    anyway: frozenset[str] = frozenset()
    """Queries that begin though none of the first rows can be used."""
    backups: timedelta = BACKUPS
    """For how long a backup of the state may be put back."""
    retention: Mapping[str, timedelta] = field(default_factory=dict)
    """For how long releases, served releases, inputs and dead letters are kept, where that is said;
    others stay (inputs: until no recovery needs them)."""
    analysts: Mapping[str, str] = field(default_factory=dict)
    """Who asks for a query, by its name, where that is said."""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Each query's [[query]], by its name, with its SQL in place of a file's name."""
    changes: Changes = field(default_factory=Changes)
    """What `dpstream apply` has settled."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Functions in Python that its queries may call, by name."""
    alerts: tuple[Alert, ...] = ()
    """What `dpstream serve` tells to addresses."""
    written: str = ""
    """The file's own text."""
    who: str = ""
    """Who asks for queries that name no analyst."""

    def without(self, names: Collection[str]) -> Pipeline:
        """The same pipeline without some of its queries."""
        left = tuple(query for query in self.queries if query.name not in names)
        books = [
            replace(book, queries=tuple(q for q in book.queries if q.name not in names))
            for book in self.books
        ]
        return replace(self, queries=left, books=tuple(book for book in books if book.queries))

    def asked_by(self, who: str) -> Pipeline:
        """The same pipeline; queries that name no analyst are asked for by `who`."""
        known = {q.name: who for q in self.queries} | dict(self.analysts)
        return replace(self, analysts=known, who=who)

    @property
    def folders(self) -> dict[str, Path]:
        """The state directory of each query."""
        return {query.name: self.state / safe_name(query.name) for query in self.queries}

    @property
    def live(self) -> bool:
        """Does any query go by the clock?"""
        return any(feed.live for feed in self.feeds.values())

    @contextmanager
    def open_ledgers(self) -> Iterator[dict[LedgerPlace, Ledger]]:
        """The ledgers of its books, by path; they are closed at the end."""
        with ExitStack() as stack:
            yield {
                path: stack.enter_context(closing(Ledger(path, backups=self.backups)))
                for path in {book.ledger for book in self.books}
            }


def load_pipeline(
    path: str | Path, *, changes: Changes | None = None, text: str | None = None
) -> Pipeline:
    """Read a pipeline file and compile its queries.

    `changes`: of queries that are to change or end; those of its state directory by default.
    `text`: what the file said before, to go on with that.
    """
    path = Path(path)
    if path.suffix.lower() == ".sql":
        raise InvalidInput(
            f"{path} is a query, and this takes a pipeline file (`dpstream init` writes one; its "
            f'[[query]] may say file = "{path.name}"); to run the query alone: dpstream sql {path} '
            "--source TABLE=PATH"
        )
    try:
        text = path.read_text(encoding="utf-8") if text is None else text
    except UnicodeDecodeError as problem:
        raise InvalidInput(f"{path} is not TOML: {problem}") from None
    tables, base = _read_tables(path, text), path.parent
    state = tables["state"]
    _refuse_state(path, tables)
    folder = state_folder(_resolve(base, state["path"]), again=False)
    changes = Changes.read(folder) if changes is None else changes
    tables["query"] = changes.tables(tables["query"])
    functions = tables.get("functions", {})
    compiled = _with_tables(path, _compile(path, tables["query"], functions), tables, folder)
    of_query = {one.query.name: _source_of(path, one, compiled, tables) for one in compiled}
    compiled = [
        _declare_types(path, of_query[one.query.name], one, compiled, tables["source"])
        for one in compiled
    ]
    where, spans = f"{path}, [retention]", tables.get("retention", {})
    kept = {
        key: timedelta(microseconds=duration(text, f"{where}: {key}", least=0))
        for key, text in spans.items()
    }
    backups = kept.pop("backups", BACKUPS)
    inputs = kept.get("inputs")
    feeds = {
        n: replace(_feed(base, n, table), keep=inputs) for n, table in tables["source"].items()
    }
    for one in compiled:
        if one.query.sources:
            feeds.setdefault(one.table, _united(path, one, feeds))
    secret = Path(_resolve(base, state["secret"])) if "secret" in state else secret_path(folder)
    sinks = _listed(tables.get("sink", {}).get("to", []))
    queries = tuple(one.query for one in compiled)
    return Pipeline(
        path=path,
        queries=queries,
        feeds={query.name: feeds[of_query[query.name]] for query in queries},
        books=_books(path, tables, queries, of_query, folder),
        state=folder,
        secret=secret,
        sinks=tuple(_resolve_sink(base, each) for each in _by_output(path, sinks, tables)),
        engine=_engine(path, tables.get("engine", {"name": "embedded"}), feeds),
        texts={one.query.name: one.text for one in compiled},
        pushed=_pushed(compiled, of_query, feeds, folder),
        remarks=tuple(words for one in compiled for words in remarks(one)),
        anyway=frozenset(table["name"] for table in tables["query"] if table.get("anyway")),
        analysts={one["name"]: one["analyst"] for one in tables["query"] if "analyst" in one},
        tables={
            one.query.name: {key: value for key, value in table.items() if key != "file"}
            | {"sql": one.text}
            for one, table in zip(compiled, tables["query"], strict=True)
        },
        changes=changes,
        written=text,
        functions=functions,
        backups=backups,
        retention=kept,
        alerts=_alerts(path, tables.get("alert", ()), [query.name for query in queries], changes),
    )


def _refuse_state(path: Path, tables: Mapping[str, Any]) -> None:
    """A state in a bucket is for any machine: each of them needs the same secret."""
    state, engine = tables["state"], tables.get("engine", {}).get("name", "embedded")
    if not is_uri(state["path"]):
        return
    where = f"{path}, [state]"
    if not is_object_uri(state["path"]):
        raise InvalidInput(
            f"{where}: path must be a directory, or a name in a bucket, s3://bucket/states/NAME; "
            f"got {state['path']!r}"
        )
    if "secret" not in state:
        raise InvalidInput(
            f'{where}: a state in a bucket needs its secret named: add secret = "FILE", and keep '
            "the same file on every machine that goes on with it"
        )
    if engine != "embedded":
        raise InvalidInput(
            f"{where}: a state in a bucket is for the embedded engine; for {engine} name a "
            "directory, and a state_location in the bucket"
        )


def _alerts(
    path: Path, tables: Sequence[Mapping[str, Any]], queries: Sequence[str], changes: Changes
) -> tuple[Alert, ...]:
    """Each alert once, for the run that publishes its query now."""
    followed = {each.successor: name for name, each in changes.endings.items() if each.successor}
    made: dict[Alert, None] = {}
    for number, table in enumerate(tables, 1):
        where = f"{path}, [[alert]] number {number}"
        name = changes.names.get(table["query"], table["query"])
        name = name if name in queries else followed.get(name, name)
        if name not in queries:
            near = _nearest(table["query"], queries)
            raise InvalidInput(f"{where}: there is no query {table['query']!r}; {near}")
        if ("above" in table) == ("below" in table):
            raise InvalidInput(f"{where} needs above or below, and not both: a number")
        place = urlsplit(table["webhook"])
        if place.scheme not in ("http", "https") or not place.hostname or "@" in place.netloc:
            raise InvalidInput(
                f"{where}: webhook must be an address such as https://hooks.example.org/TOKEN, "
                "without a user's name or password"
            )
        below = "below" in table
        made[
            Alert(
                query=name,
                column=table["column"],
                figure=float(table["below" if below else "above"]),
                webhook=table["webhook"],
                below=below,
                key=tuple(table.get("key", ())),
            )
        ] = None
    return tuple(made)


def _engine(path: Path, table: Mapping[str, Any], feeds: Mapping[str, Feed]) -> Mapping[str, Any]:
    if table["name"] not in ENGINES:
        raise InvalidInput(
            f"{path}, [engine]: name must be one of {', '.join(ENGINES)}; got {table['name']!r}"
        )
    if table["name"] != "embedded" and any(feed.source == PUSHED for feed in feeds.values()):
        raise InvalidInput(
            f"{path}, [engine]: rows that are posted ({PUSHED!r}) are read by the embedded engine; "
            f"{table['name']} reads files and servers"
        )
    return table


def _compile(
    path: Path, tables: Sequence[Mapping[str, Any]], functions: Mapping[str, str]
) -> list[Compiled]:
    queries: dict[str, Compiled] = {}
    for table in tables:
        name = table["name"]
        where = f"{path}, [[query]] {name!r}"
        if name in queries:
            raise InvalidInput(f"{where}: two queries have this name; rename one")
        if ("sql" in table) == ("file" in table):
            raise InvalidInput(f"{where} needs sql or file, and not both")
        text = table["sql"] if "sql" in table else _text(where, path.parent / table["file"])
        try:
            queries[name] = compile_sql(
                text, name, params=table.get("params"), functions=functions, folder=path.parent
            )
        except InvalidParameter as problem:
            raise InvalidParameter(f"{where}: {problem}") from None
    return list(queries.values())


def _with_tables(
    path: Path, compiled: Sequence[Compiled], tables: Mapping[str, Any], state: Path
) -> list[Compiled]:
    """The queries with the tables that they join; each table is read once."""
    given: dict[str, dict[str, Any]] = {"public": {}, "registry": {}}
    for kind, places in given.items():
        for table in tables.get(kind, ()):
            if table["name"] in places:
                raise InvalidInput(f"{path}: two [[{kind}]] are named {table['name']!r}")
            place = table["path"]
            places[table["name"]] = (
                _resolve(path.parent, place)
                if isinstance(place, str)
                else [_resolve(path.parent, each) for each in place]
            )
            if "refresh" in table:
                places[table["name"]] = Refreshed(places[table["name"]], every=table["refresh"])
    known: dict[str, WholeTable] = {}
    bound = []
    for one in compiled:
        folder = state / safe_name(one.query.name)
        try:
            query = with_tables(one.query, **given, state=folder, known=known)
        except (InvalidInput, InvalidParameter) as problem:
            raise type(problem)(f"{path}, [[query]] {one.query.name!r}: {problem}") from None
        bound.append(replace(one, query=query))
    return bound


def _source_of(
    path: Path, one: Compiled, others: Sequence[Compiled], tables: Mapping[str, Any]
) -> str:
    """The source that a query's FROM names; a source without a name has any."""
    known = tables["source"]
    if "" not in known or one.query.sources:
        for table in one.query.sources or [one.table]:
            if table not in known:
                raise InvalidInput(
                    f"{path}, [[query]] {one.query.name!r} reads {table!r}, and there is no "
                    f"[source.{table}]; {_nearest(table, known)}"
                )
        return one.table
    if len({each.table for each in others}) > 1:
        listed = ", ".join(f"{each.query.name!r} reads {each.table!r}" for each in others)
        raise InvalidInput(
            f"{path}: all queries read the one [source]; but {listed}; name the sources: "
            f"[source.{one.table}]"
        )
    return ""


def _declare_types(
    path: Path, name: str, one: Compiled, others: Sequence[Compiled], sources: Mapping[str, Any]
) -> Compiled:
    """The query with the types of its columns that its source declares; its own go before."""
    if one.query.sources:
        given = {
            f"{source}.{column}": kind
            for source in one.query.sources
            for column, kind in sources[source].get("column_types", {}).items()
            if f"{source}.{column}" in one.query.source_columns
        }
    else:
        given = sources[name].get("column_types", {})
    where = f"{path}, [source{'.' if name else ''}{name}]"
    read = {column for each in others for column in each.query.source_columns}
    strange = [column for column in given if column not in read]
    if strange:
        raise InvalidInput(
            f"{where}: column_types names {strange[0]!r}, which no query reads; leave it out"
        )
    query = one.query
    mine = {column: kind for column, kind in given.items() if column in query.source_columns}
    if not mine:
        return one
    try:
        types = tuple((mine | query.declared).items())
        query = replace(query, column_types=types)
    except InvalidParameter as problem:
        raise InvalidInput(f"{where}: {problem}") from None
    return replace(one, query=query)


def _united(path: Path, one: Compiled, feeds: Mapping[str, Feed]) -> Feed:
    """What a UNION ALL reads: several sources as one."""
    parts = [feeds[name] for name in one.query.sources]
    where = f"{path}, [[query]] {one.query.name!r}: UNION ALL"
    if any(feed.source == PUSHED for feed in parts):
        raise InvalidInput(f"{where} cannot read rows that are posted; read them by themselves")
    if len({(feed.live, feed.history is None) for feed in parts}) > 1 or parts[0].history:
        raise InvalidInput(
            f"{where} reads sources that are all live, or all not, and none with history"
        )
    return Feed(
        source=UnitedFeeds(parts),
        live=parts[0].live,
        name=one.table,
        buffer=parts[0].buffer,
        on_damage=parts[0].on_damage,
        keep=parts[0].keep,
    )


def _feed(base: Path, name: str, table: Mapping[str, Any]) -> Feed:
    path, history, mib = table["path"], table.get("history"), table.get("buffer_mib")
    options = {
        option: _resolve(base, value) if option.endswith("_file") else value
        for option, value in table.get("options", {}).items()
    }
    if mib is not None and mib < 1:
        raise InvalidInput(f"buffer_mib must be at least 1; got {mib}")
    damage = table.get("on_damage", "quarantine")
    if damage not in ON_DAMAGE:
        raise InvalidInput(f"on_damage must be quarantine or stop; got {damage!r}")
    on_done = table.get("on_done", "keep")
    if on_done not in ON_DONE:
        raise InvalidInput(f"on_done must be one of {', '.join(ON_DONE)}; got {on_done!r}")
    pushed = path == PUSHED
    server = is_uri(path) and not is_object_uri(path)
    endless = server and "until" not in options and "until" not in ServerOptions(path).names
    return Feed(
        source=PUSHED if pushed else _resolve_all(base, path),
        live=table.get("live", False) or pushed or endless,
        options=options,
        history=None if history is None else _resolve_all(base, history),
        name=name,
        buffer=None if mib is None else mib << 20,
        on_damage=damage,
        on_done=on_done,
    )


def _pushed(
    compiled: Sequence[Compiled],
    of_query: Mapping[str, str],
    feeds: Mapping[str, Feed],
    folder: Path,
) -> dict[str, PushedTable]:
    """What may be handed in: a source without a name has that of the table that is read."""
    pushed: dict[str, PushedTable] = {}
    for name, feed in feeds.items():
        readers = [one for one in compiled if of_query[one.query.name] == name]
        if feed.source == PUSHED and readers:
            columns = [column for one in readers for column in one.query.source_columns]
            pushed[name or readers[0].table] = PushedTable(
                folder=pushed_folder(folder, name), columns=tuple(dict.fromkeys(columns))
            )
    return pushed


def _text(where: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(f"{where}: file {path} cannot be read: {reason}") from None


@dataclass(frozen=True, kw_only=True)
class PipelineBook:
    """A dataset's book: epsilon (and delta) for all queries on it."""

    where: str
    dataset: str
    epsilon: Fraction
    delta: Fraction | None
    ledger: LedgerPlace
    queries: tuple[AnyQuery, ...]
    period: str | None = None
    """Within which users are protected, where queries have several; None: they all have one."""

    def terms(self) -> Terms:
        """The terms of the book; every query must protect the same rows."""
        if self.period is not None:
            return self._terms_of_period(self.period)
        first = self.queries[0]
        wanted = self._terms_of(first)
        for query in self.queries[1:]:
            other = self._terms_of(query)
            if other != wanted:
                raise InvalidParameter(
                    f"{self.where}: queries that share a book must protect the same unit: "
                    f"{first.name!r} protects {_protects(wanted)}, {query.name!r} protects "
                    f"{_protects(other)}; make them agree, or use two pipelines"
                    f"{_same_but_for_periods(first, query)}"
                )
        return wanted

    def _terms_of_period(self, period: str) -> Terms:
        """The terms of a book whose queries may have finer and coarser periods than it has."""
        users = [query for query in self.queries if isinstance(query, Query)]
        timed = [query for query in users if query.periods is not None] or users
        if len(users) < len(self.queries):
            raise InvalidParameter(
                f"{self.where}: privacy_unit_period is for queries that protect users; leave it out"
            )
        own, change = self._terms_of(timed[0]), timed[0].protected
        if period == FOREVER:
            change = rows_of(timed[0].privacy_unit_column)
        elif timed[0].periods is None:
            raise InvalidParameter(
                f"{self.where}: no query has a privacy_unit_period, and the book has {period!r}; "
                "leave it out, or give one of them that period"
            )
        else:
            period = in_words(duration(period, f"{self.where}: privacy_unit_period", calendar=True))
        wanted = replace(own, period=period, change=change)
        for query in users:
            if wanted.measure == "epsilon":
                self._refuse_other_period(query, wanted)
                continue
            if not same_rows(query, wanted):
                raise InvalidParameter(
                    f"{self.where}: queries that share a book must protect the same users; the "
                    f"book protects {_protects(wanted)}, {query.name!r} protects "
                    f"{_protects(self._terms_of(query))}; make them agree, or use two pipelines"
                )
            try:
                book_share(query.starting(0), wanted)
            except LedgerError as problem:
                raise InvalidParameter(f"{self.where}: {problem}") from None
        return wanted

    def _refuse_other_period(self, query: Query, wanted: Terms) -> None:
        """What a query without delta takes of other periods is not counted."""
        own = self._terms_of(query)
        if own != wanted:
            raise InvalidParameter(
                f"{self.where} has no delta, so its queries have the book's period: the book "
                f"protects {_protects(wanted)}, {query.name!r} protects {_protects(own)}; make "
                "them agree, or give the book and the queries a delta"
            )

    def _terms_of(self, query: AnyQuery) -> Terms:
        if isinstance(query, Query) and query.pure and self.delta is None:
            return pure_terms(query, self.epsilon)
        if isinstance(query, Query):
            return query.promise(epsilon=self.epsilon, delta=self._delta_for(query))
        if query.start is None:
            raise InvalidParameter(
                f"{self.where}: {query.name!r} has no start, and its book counts steps from there; "
                "add start = TIMESTAMP '...' to its OPTIONS"
            )
        terms = query.terms()
        if terms.measure == "epsilon":
            return replace(terms, total=self.epsilon)
        convert = {"rho": rho_for, "mu_squared": mu_squared_for}[terms.measure]
        total = convert(epsilon=self.epsilon, delta=self._delta_for(query))
        return replace(terms, total=on_grid(total))

    def _delta_for(self, query: AnyQuery) -> Fraction:
        if self.delta is None:
            raise InvalidParameter(
                f"{self.where} has no delta, which {query.name!r} needs; add delta = 1e-8"
            )
        return self.delta


def _same_but_for_periods(one: AnyQuery, other: AnyQuery) -> str:
    """The way out for queries of the same users with several periods."""
    if not (isinstance(one, Query) and isinstance(other, Query)):
        return ""
    if one.privacy_unit_column != other.privacy_unit_column or one.periods == other.periods:
        return ""
    return (
        "; or say which period the book protects, such as privacy_unit_period = "
        f"{one.period_in_words!r}: a query of another one then costs more (docs/group-by.md)"
    )


def _protects(terms: Terms) -> str:
    if terms.unit == "user":
        return f"{terms.change} (period {terms.period}, time zone {terms.time_zone})"
    window = "" if terms.window is None else f" within {terms.window} steps"
    return f"{terms.unit} {terms.change}{window} ({terms.clock})"


def _books(
    path: Path,
    tables: Mapping[str, Any],
    queries: Sequence[AnyQuery],
    of_query: Mapping[str, str],
    folder: Path,
) -> tuple[PipelineBook, ...]:
    """One book for all, or one for each source."""
    budgets, sources, books = tables["budget"], tables["source"], []
    for query in queries if "" not in budgets else ():
        if query.sources:
            raise InvalidInput(
                f"{path}, [[query]] {query.name!r} reads several sources by UNION ALL, so they "
                "share a book: use one [budget]"
            )
    if "" not in budgets and set(budgets) != set(sources):
        other = sorted(set(budgets) ^ set(sources))[0]
        raise InvalidInput(
            f"{path}: with [budget.NAME] every source has its own; {other or 'the source'!r} has "
            "only one of [source.NAME] and [budget.NAME]"
        )
    if "" not in budgets:
        _refuse_one_place_twice(path, sources)
    for name, table in budgets.items():
        where = f"{path}, [budget{'.' if name else ''}{name}]"
        mine = tuple(query for query in queries if not name or of_query[query.name] == name)
        if not mine:
            continue  # a source that no query reads yet
        named = _resolve(path.parent, table["ledger"]) if "ledger" in table else None
        place = ledger_beside(folder, named)
        books.append(
            PipelineBook(
                where=where,
                dataset=table["dataset"],
                epsilon=positive(table["epsilon"], f"{where}: epsilon"),
                delta=positive(table["delta"], f"{where}: delta") if "delta" in table else None,
                ledger=as_ledger_place(place or folder / "ledger"),
                queries=mine,
                period=table.get("privacy_unit_period"),
            )
        )
    names = [(book.ledger, book.dataset) for book in books]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{path}: two budgets name one dataset; use one [budget] for both")
    return tuple(books)


def _refuse_one_place_twice(path: Path, sources: Mapping[str, Any]) -> None:
    """Two books for the same rows would promise each of them what their sum spends."""
    seen: dict[str, str] = {}
    for name, table in sources.items():
        if table["path"] == PUSHED:  # each source has rows of its own
            continue
        for place in {_resolve(path.parent, each) for each in _listed(table["path"])}:
            if seen.setdefault(place, name) != name:
                raise InvalidInput(
                    f"{path}: [source.{seen[place]}] and [source.{name}] read the same rows, which "
                    "two books would promise their budgets each; use one [budget] for both"
                )


def _read_tables(path: Path, text: str) -> dict[str, Any]:
    """The file's tables; `source` and `budget` by name, under "" if there is one for all."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise InvalidInput(f"{path} is not TOML: {problem}") from None
    for name in tables:
        if name not in _KEYS:
            raise InvalidInput(f"{path} has an unknown table [{name}]; {_nearest(name, _KEYS)}")
    for name in _KEYS:
        if name not in tables and name not in _OPTIONAL:
            wanted = ", ".join(_REQUIRED[name])
            raise InvalidInput(f"{path} has no table {_heading(name)}; add it, with {wanted}")
    for name, table in tables.items():
        entries = table if name in _LISTS else [table]
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise InvalidInput(f"{path}: {name} must be a table; write {_heading(name)} above it")
        if name in _SEVERAL:
            tables[name] = _named(path, name, table)
            continue
        for number, entry in enumerate(entries, 1):
            which = f" number {number}" if name in _LISTS else ""
            _check(f"{path}, {_heading(name)}{which}", name, entry)
    return tables


def _named(path: Path, name: str, table: Table) -> dict[str, Table]:
    """One table for all, or one for each name."""
    inner = {
        key: value
        for key, value in table.items()
        if isinstance(value, dict) and not (key in _INNER and "path" in table)
    }
    if inner and len(inner) < len(table):
        key = next(key for key in table if key not in inner)
        raise InvalidInput(
            f"{path}, [{name}] has {key} beside [{name}.{next(iter(inner))}]; move it into one of "
            "the named tables"
        )
    if not inner:
        _check(f"{path}, [{name}]", name, table)
        return {"": table}
    for key, value in inner.items():
        inner[key] = {"dataset": key} | value if name == "budget" else value
        _check(f"{path}, [{name}.{key}]", name, inner[key])
    return inner


def _check(where: str, name: str, table: Mapping[str, Any]) -> None:
    known = _KEYS[name]
    if name == "functions":  # names are free
        known = dict.fromkeys(table, _TEXT)
    for key, value in table.items():
        if key not in known:
            raise InvalidInput(f"{where} has an unknown key {key!r}; {_nearest(key, known)}")
        fits = isinstance(value, known[key]) and (bool in known[key] or not isinstance(value, bool))
        if isinstance(value, dict):
            for inner, given in value.items():
                several = key == "params" and isinstance(given, list)
                if not isinstance(given, str | int | float) and not several:
                    raise InvalidInput(
                        f"{where}: {key}.{inner} must be text, a number, true or false; got "
                        f"{given!r:.80}"
                    )
        if isinstance(value, list):
            fits = fits and bool(value) and all(isinstance(each, str) for each in value)
        if not fits or value == "":
            wanted = " or ".join(_IN_WORDS[kind] for kind in known[key] if kind in _IN_WORDS)
            wanted = "a number" if known[key] == _NUMBER else wanted
            raise InvalidInput(f"{where}: {key} must be {wanted}; got {value!r:.80}")
    for key in _REQUIRED[name]:
        if key not in table:
            raise InvalidInput(f"{where} has no {key}; add it")


def _heading(name: str) -> str:
    """How a table is written in the file."""
    return f"[[{name}]]" if name in _LISTS else f"[{name}]"


def _nearest(name: str, known: Iterable[str]) -> str:
    """The most similar name there is, as advice."""
    names = [*known]
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def _resolve(base: Path, text: str) -> str:
    """A path of the file, seen from the current directory; "-" is standard input or output.

    A URI stays as it is.
    """
    kind, colon, place = text.partition(":")
    if colon and kind == "delta":
        return f"delta:{_resolve(base, place)}"
    slash = "/" if text.endswith("/") else ""  # an "out.db/" is a directory
    return text if text == "-" or is_uri(text) else f"{base / text}{slash}"


def _resolve_all(base: Path, value: str | list[str]) -> str | list[str]:
    """One path or several."""
    if isinstance(value, str):
        return _resolve(base, value)
    return [_resolve(base, each) for each in value]


def _by_output(path: Path, sinks: list[str], tables: Mapping[str, Any]) -> list[str]:
    """The sinks, marked for upserts if the file asks for them."""
    output = tables.get("sink", {}).get("output", "append")
    if output not in OUTPUTS:
        raise InvalidInput(
            f"{path}, [sink]: output must be one of {', '.join(OUTPUTS)}; got {output!r}"
        )
    marked: list[str] = upsert_specs(sinks) if output == "upsert" else sinks
    return marked


def _resolve_sink(base: Path, text: str) -> str:
    """A sink, which may have its kind before its path."""
    if text.startswith(UPSERT):
        return f"{UPSERT}{_resolve_sink(base, text.removeprefix(UPSERT))}"
    kind, colon, path = text.partition(":")
    if colon and kind in (*ENCODERS, "delta"):
        return f"{kind}:{_resolve(base, path)}"
    return _resolve(base, text)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
