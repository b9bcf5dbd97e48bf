"""Where releases go: directories of files, databases, servers, standard output."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.options import is_uri
from dpstream.connectors.registry import open_uri
from dpstream.connectors.sinks.delta import DeltaSink
from dpstream.connectors.sinks.directory import DirectorySink
from dpstream.connectors.sinks.duckdb import DuckdbSink
from dpstream.connectors.sinks.encode import ENCODERS
from dpstream.connectors.sinks.sqlite import SqliteSink
from dpstream.connectors.sinks.stdout import StdoutSink
from dpstream.errors import InvalidParameter
from dpstream.records import ConcurrentSink, Sink, fence

__all__ = [
    "AllSinks",
    "DeltaSink",
    "DirectorySink",
    "DuckdbSink",
    "SqliteSink",
    "StdoutSink",
    "open_sink",
    "shared_sinks",
]

_DATABASES: dict[str, Callable[[Path], Sink]] = {
    ".sqlite": SqliteSink,
    ".db": SqliteSink,
    ".duckdb": DuckdbSink,
}


class AllSinks:
    """Every release goes to each of several sinks, in order; to a `TwoPhaseSink` in one step."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write to all; after a failure the next run writes again where it is missing."""
        for sink in self._sinks:
            sink.write(query, window, trigger, table)

    def fence(self, query: str, run: str) -> None:
        """Refuse a run whose releases one of them cannot take, before it is paid for."""
        for sink in self._sinks:
            fence(sink, query, run)

    def close(self) -> None:
        """Close all."""
        for sink in self._sinks:
            sink.close()


class SharedSink:
    """A sink object that several queries write to, each from a thread of its own, in turn.

    A `ConcurrentSink` is called by several threads at once. It is closed, by `release`, when all
    queries are over. Releases are written one by one, also to a `TwoPhaseSink`.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        at_once = isinstance(sink, ConcurrentSink) and sink.concurrent
        self._turn = nullcontext() if at_once else Lock()

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """When no other query writes."""
        with self._turn:
            self._sink.write(query, window, trigger, table)

    def fence(self, query: str, run: str) -> None:
        """Refuse a run whose releases it cannot take, before it is paid for."""
        with self._turn:
            fence(self._sink, query, run)

    def close(self) -> None:
        """Others may still write."""

    def release(self) -> None:
        """Nobody writes any more."""
        self._sink.close()


def shared_sinks(spec: Any) -> Any:
    """What several queries write to: each opens what is named, and shares what is an object."""
    if isinstance(spec, list | tuple):
        return [shared_sinks(one) for one in spec]
    return SharedSink(spec) if isinstance(spec, Sink) else spec


def open_sink(spec: Any, *, journal: Path | None = None, again: bool = False) -> Sink | None:
    """A sink for a directory, a database file, "-", a `Sink`, or a list of them.

    "out/" is a directory of Parquet files; "csv:out/", "jsonl:out/" and "parquet:out/" name the
    format; "delta:out/" has a Delta Lake table for each query. A path that ends in .sqlite, .db or
    .duckdb is a database. "-" is standard output, which remembers what it wrote in the file
    `journal`. A URI such as "kafka://127.0.0.1:9092/releases" names a server. None is no sink.
    `again`: this process has opened it before, and others may be writing there.
    """
    if spec is None:
        return None
    if isinstance(spec, str) and spec == "-":
        return StdoutSink(journal=journal)
    if is_uri(spec) and not spec.startswith("delta:"):
        opened: Sink = open_uri("sink", spec)
        return opened
    if isinstance(spec, str | os.PathLike):
        return _open_path(os.fspath(spec), again=again)
    if isinstance(spec, Sink):
        return spec
    if isinstance(spec, Sequence):
        several = (open_sink(one, journal=journal, again=again) for one in spec)
        return AllSinks([sink for sink in several if sink is not None])
    raise InvalidParameter(
        "a sink must be a directory, a database file, a URI, '-' or have the methods write and "
        f"close; got "
        f"{spec!r:.200}"
    )


def _open_path(text: str, *, again: bool) -> Sink:
    kind, colon, rest = text.partition(":")
    if colon and kind in ENCODERS:
        return DirectorySink(Path(rest), suffix=kind, again=again)
    if colon and kind == "delta":
        return DeltaSink(rest)
    path = Path(text)
    if path.suffix in _DATABASES and not text.endswith("/"):
        return _DATABASES[path.suffix](path)
    if path.suffix.removeprefix(".") in ENCODERS and not path.is_dir():
        suffix = path.suffix.removeprefix(".")
        raise InvalidParameter(
            f"a sink writes one file per release into a directory, not the one file {path}; "
            f"for {suffix} files write {suffix}:{path.with_suffix('')}/"
        )
    return DirectorySink(path, again=again)
