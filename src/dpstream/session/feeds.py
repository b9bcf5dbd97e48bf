"""What queries read: a source, opened as it is named, and one read for all that share a feed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from dpstream.connectors.files.source import GrowingDirectory
from dpstream.connectors.registry import open_source
from dpstream.connectors.server_base import is_uri
from dpstream.connectors.shared import SharedSource
from dpstream.connectors.storage import safe_name
from dpstream.connectors.write_ahead import PUSHED, PushedSource, WriteAhead, pushed_folder
from dpstream.engines.clock import Clock
from dpstream.engines.embedded.arrivals import Arrivals, LiveView
from dpstream.engines.query_run import AnyQuery, EngineOptions
from dpstream.errors import InvalidParameter
from dpstream.records import Frame, Source

Place: TypeAlias = str | os.PathLike[str]
SourceSpec: TypeAlias = Source | Frame | pa.Table | pa.RecordBatch | Place | Sequence[Place]
"""What `open_source` takes; on Spark a DataFrame too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """What queries read together: a source, live or not, and files that came before it."""

    source: SourceSpec
    live: bool = False
    history: SourceSpec | None = None
    name: str = ""
    options: Mapping[str, Any] | None = None
    """Of a server that a URI names."""
    buffer: int | None = None
    """Bytes of a live source's rows that are held for queries that lag; None: as the run's options
    say."""


def feeds_by_query(names: Sequence[str], source: Any, common: Feed) -> dict[str, Feed]:
    """What each query reads, by its name."""
    if isinstance(source, Feed):
        return dict.fromkeys(names, source)
    if not (isinstance(source, Mapping) and any(isinstance(f, Feed) for f in source.values())):
        return dict.fromkeys(names, common)
    for name in names:
        if not isinstance(source.get(name), Feed):
            raise InvalidParameter(f"source has no Feed for the query {name!r}; add it")
    return {name: source[name] for name in names}


def views_by_query(
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
        source = open_feed(feed.source, feed.live, folder, feed.name, feed.options)
        assert source is not None
        views: list[Any] = list(_views(source, columns, clock, feed.buffer or options.buffer))
        before: list[Any] = [None] * len(readers)
        if feed.history is not None:
            before = list(SharedSource(open_source(feed.history), columns).views())
        pairs = zip(readers, views, before, strict=True)
        by_query |= {query.name: (view, earlier) for query, view, earlier in pairs}
    return by_query


def _views(
    source: Source, columns: Sequence[Sequence[str]], clock: Clock, buffer: int
) -> Sequence[Any]:
    """A view for each query, of files by event time or of what arrives by the clock."""
    if source.bounded:
        return SharedSource(source, columns).views()
    together = dict.fromkeys(name for wanted in columns for name in wanted)
    return Arrivals(source, clock, list(together), views=len(columns), buffer=buffer).views


def follow_source(source: Source | None, clock: Clock, options: EngineOptions) -> Source | None:
    """The source for one query: a live one is read while the query is busy, too."""
    if source is None or source.bounded or isinstance(source, LiveView):
        return source
    return Arrivals(source, clock, buffer=options.buffer).views[0]


def open_feed(
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


def absolute_paths(source: Any) -> Any:
    """Paths as other processes see them, which work in other folders."""
    if isinstance(source, list | tuple):
        return [absolute_paths(each) for each in source]
    return str(Path(source).absolute()) if _is_path(source) else source


def _is_path(source: Any) -> bool:
    return isinstance(source, str | Path) and source != "-" and not is_uri(source)
