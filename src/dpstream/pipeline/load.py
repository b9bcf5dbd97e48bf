"""A pipeline file, read and compiled: errors name file, table and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpstream.connectors.options import Options, is_uri
from dpstream.connectors.pushed import PUSHED, pushed_folder
from dpstream.connectors.storage import safe_name
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.pipeline.books import Book, books_of
from dpstream.pipeline.places import all_placed, listed, placed, placed_options, placed_sink
from dpstream.pipeline.tables import nearest, read_tables
from dpstream.privacy.state.secret import beside
from dpstream.session import Feed
from dpstream.session.budget import AnyQuery
from dpstream.sql.plan import Compiled, compile_sql
from dpstream.sql.remarks import remarks
from dpstream.stages.series_query import SeriesQuery

ENGINES = ("embedded", "spark")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A source whose rows are handed in: where they are kept, and which columns are."""

    folder: Path
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a pipeline file says; paths are already relative to the current directory."""

    path: Path
    queries: tuple[AnyQuery, ...]
    feeds: Mapping[str, Feed]
    """What each query reads, by its name; queries of one source have the same feed."""
    books: tuple[Book, ...]
    state: Path
    secret: Path
    sinks: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=lambda: {"name": "embedded"})
    """Where the queries run, and how it is set up."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The SQL of each query, by its name."""
    pushed: Mapping[str, Pushed] = field(default_factory=dict)
    """Sources whose rows are handed in, by the name they are handed in under."""
    remarks: tuple[str, ...] = ()
    """What who wrote the queries may not expect of them."""

    @property
    def folders(self) -> dict[str, Path]:
        """The state directory of each query."""
        return {query.name: self.state / safe_name(query.name) for query in self.queries}

    @property
    def live(self) -> bool:
        """Does any query go by the clock?"""
        return any(feed.live for feed in self.feeds.values())


def load_pipeline(path: str | Path) -> Pipeline:
    """Read a pipeline file and compile its queries."""
    path = Path(path)
    tables, base = read_tables(path), path.parent
    state = tables["state"]
    compiled = _compiled(path, tables["query"])
    of_query = {one.query.name: _source_of(path, one, compiled, tables) for one in compiled}
    compiled = [
        _typed(path, of_query[one.query.name], one, compiled, tables["source"]) for one in compiled
    ]
    feeds = {name: _feed(base, name, table) for name, table in tables["source"].items()}
    folder = Path(placed(base, state["path"]))
    secret = Path(placed(base, state["secret"])) if "secret" in state else beside(folder)
    sinks = listed(tables.get("sink", {}).get("to", []))
    queries = tuple(one.query for one in compiled)
    return Pipeline(
        path=path,
        queries=queries,
        feeds={query.name: feeds[of_query[query.name]] for query in queries},
        books=books_of(path, tables, queries, of_query, folder),
        state=folder,
        secret=secret,
        sinks=tuple(placed_sink(base, each) for each in sinks),
        engine=_engine(path, tables.get("engine", {"name": "embedded"}), feeds),
        texts={one.query.name: one.text for one in compiled},
        pushed=_pushed(compiled, of_query, feeds, folder),
        remarks=tuple(words for one in compiled for words in remarks(one)),
    )


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


def _compiled(path: Path, tables: Sequence[Mapping[str, Any]]) -> list[Compiled]:
    found: dict[str, Compiled] = {}
    for table in tables:
        name = table["name"]
        where = f"{path}, [[query]] {name!r}"
        if name in found:
            raise InvalidInput(f"{where}: two queries have this name; rename one")
        if ("sql" in table) == ("file" in table):
            raise InvalidInput(f"{where} needs sql or file, and not both")
        text = table["sql"] if "sql" in table else _text(where, path.parent / table["file"])
        try:
            found[name] = compile_sql(text, name)
        except InvalidParameter as problem:
            raise InvalidParameter(f"{where}: {problem}") from None
    return list(found.values())


def _source_of(
    path: Path, one: Compiled, others: Sequence[Compiled], tables: Mapping[str, Any]
) -> str:
    """The source that a query's FROM names; a source without a name has any."""
    known = tables["source"]
    if "" not in known:
        if one.table not in known:
            raise InvalidInput(
                f"{path}, [[query]] {one.query.name!r} reads {one.table!r}, and there is no "
                f"[source.{one.table}]; {nearest(one.table, known)}"
            )
        return one.table
    if len({each.table for each in others}) > 1:
        listed = ", ".join(f"{each.query.name!r} reads {each.table!r}" for each in others)
        raise InvalidInput(
            f"{path}: all queries read the one [source]; but {listed}; name the sources: "
            f"[source.{one.table}]"
        )
    return ""


def _typed(
    path: Path, name: str, one: Compiled, others: Sequence[Compiled], sources: Mapping[str, Any]
) -> Compiled:
    """The query with the types of its columns that its source declares; its own go before."""
    given = sources[name].get("column_types", {})
    where = f"{path}, [source{'.' if name else ''}{name}]"
    read = {column for each in others for column in each.query.source_columns}
    strange = [column for column in given if column not in read]
    if strange:
        raise InvalidInput(
            f"{where}: column_types names {strange[0]!r}, which no query reads; leave it out"
        )
    query = one.query
    rows = query.rows if isinstance(query, SeriesQuery) else query
    mine = {column: kind for column, kind in given.items() if column in rows.source_columns}
    if not mine:
        return one
    try:
        rows = replace(rows, column_types=mine | rows.declared)
    except InvalidParameter as problem:
        raise InvalidInput(f"{where}: {problem}") from None
    made = replace(query, rows=rows) if isinstance(query, SeriesQuery) else rows
    return replace(one, query=made)


def _feed(base: Path, name: str, table: Mapping[str, Any]) -> Feed:
    history, path = table.get("history"), table["path"]
    options, pushed = placed_options(base, table.get("options", {})), path == PUSHED
    by_clock = pushed or (is_uri(path) and not _ends(path, options))
    return Feed(
        source=PUSHED if pushed else all_placed(base, path),
        live=table.get("live", False) or by_clock,
        options=options,
        history=None if history is None else all_placed(base, history),
        name=name,
        buffer=_bytes(table.get("buffer_mib")),
    )


def _bytes(mib: int | None) -> int | None:
    if mib is not None and mib < 1:
        raise InvalidInput(f"buffer_mib must be at least 1; got {mib}")
    return None if mib is None else mib << 20


def _pushed(
    compiled: Sequence[Compiled],
    of_query: Mapping[str, str],
    feeds: Mapping[str, Feed],
    folder: Path,
) -> dict[str, Pushed]:
    """What may be handed in: a source without a name has that of the table that is read."""
    found: dict[str, Pushed] = {}
    for name, feed in feeds.items():
        readers = [one for one in compiled if of_query[one.query.name] == name]
        if feed.source == PUSHED and readers:
            columns = [column for one in readers for column in one.query.source_columns]
            found[name or readers[0].table] = Pushed(
                folder=pushed_folder(folder, name), columns=tuple(dict.fromkeys(columns))
            )
    return found


def _ends(uri: str, options: Mapping[str, Any]) -> bool:
    """Is a server's source bounded?"""
    return "until" in options or "until" in Options(uri).names


def _text(where: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(f"{where}: file {path} cannot be read: {reason}") from None
