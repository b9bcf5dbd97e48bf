"""Start a query on another engine than this process: what it reads, and where it publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpstream.connectors.options import ServerOptions as Address
from dpstream.connectors.options import is_uri
from dpstream.connectors.registry import open_sink
from dpstream.engines.query_run import Engine, QueryRun
from dpstream.errors import InvalidParameter
from dpstream.query.series_query import SeriesQuery
from dpstream.session.budget import AnyQuery
from dpstream.session.feeds import absolute, opened_source


def start_on_engine(
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
            found = opened_source(absolute(spec), growing, None)
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
