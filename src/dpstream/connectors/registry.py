"""Which URI is served by which file, and what must be installed for it.

A connector is one module with a function `from_options(options) -> Source` or `Sink`; it is loaded
when a URI asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from glob import glob, has_magic
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from dpstream.connectors.delta.sink import DeltaSink
from dpstream.connectors.duckdb.sink import DuckdbSink
from dpstream.connectors.encode import ENCODERS
from dpstream.connectors.files.sink import DirectorySink
from dpstream.connectors.files.source import SUFFIXES, Files, GrowingDirectory, suffix
from dpstream.connectors.memory.source import TableSource, as_table
from dpstream.connectors.options import ServerOptions, is_uri
from dpstream.connectors.pipes.sink import StdoutSink
from dpstream.connectors.pipes.source import StandardInput
from dpstream.connectors.sqlite.sink import SqliteSink
from dpstream.errors import InvalidInput, InvalidParameter, MissingDependency
from dpstream.records import ConcurrentSink, Sink, Source, fence

__all__ = [
    "AllSinks",
    "DeltaSink",
    "DirectorySink",
    "DuckdbSink",
    "Files",
    "GrowingDirectory",
    "SqliteSink",
    "StandardInput",
    "StdoutSink",
    "TableSource",
    "open_sink",
    "open_source",
    "shared_sinks",
]


@dataclass(frozen=True, kw_only=True)
class Connector:
    """A kind of server."""

    module: str
    example: str
    about: str
    package: str | None = None
    """The Python package that the module imports."""
    extra: str | None = None
    """What to install: dpstream[extra]."""

    @property
    def installed(self) -> bool:
        """Is its package there?"""
        return self.package is None or find_spec(self.package) is not None


SOURCES = {
    "kafka": Connector(
        module="dpstream.connectors.kafka.source",
        example="kafka://127.0.0.1:9092/clicks?format=json",
        about="a Kafka topic: JSON, CSV or Arrow messages",
        package="confluent_kafka",
        extra="kafka",
    ),
    "nats": Connector(
        module="dpstream.connectors.nats.source",
        example="nats://127.0.0.1:4222/CLICKS?format=json",
        about="a NATS JetStream stream: JSON, CSV or Arrow messages",
        package="nats",
        extra="nats",
    ),
    "postgres": Connector(
        module="dpstream.connectors.postgres.source",
        example="postgres://user@127.0.0.1:5432/database?table=clicks&key=id",
        about="a table of PostgreSQL that grows, by its key",
        package="psycopg",
        extra="postgres",
    ),
}
SINKS = {
    "kafka": Connector(
        module="dpstream.connectors.kafka.sink",
        example="kafka://127.0.0.1:9092/releases",
        about="a Kafka topic, by transactions",
        package="confluent_kafka",
        extra="kafka",
    ),
    "nats": Connector(
        module="dpstream.connectors.nats.sink",
        example="nats://127.0.0.1:4222/RELEASES",
        about="a NATS JetStream stream, a subject for each release",
        package="nats",
        extra="nats",
    ),
    "postgres": Connector(
        module="dpstream.connectors.postgres.sink",
        example="postgres://user@127.0.0.1:5432/database?schema=releases",
        about="PostgreSQL, a table for each query",
        package="psycopg",
        extra="postgres",
    ),
}

PATHS = {
    "source": {
        "files": Connector(
            module="dpstream.connectors.files.source",
            example="clicks/*.parquet",
            about="files of CSV, JSON lines or Parquet; with live, a directory that grows",
        ),
        "-": Connector(
            module="dpstream.connectors.pipes.source",
            example="-",
            about="standard input: CSV or JSON lines",
        ),
    },
    "sink": {
        "files": Connector(
            module="dpstream.connectors.files.sink",
            example="out/",
            about="a file for each release: Parquet, csv:out/ or jsonl:out/",
        ),
        "-": Connector(
            module="dpstream.connectors.pipes.sink",
            example="-",
            about="standard output: JSON lines",
        ),
        "sqlite": Connector(
            module="dpstream.connectors.sqlite.sink",
            example="out.sqlite",
            about="an SQLite file, a table for each query",
        ),
        "duckdb": Connector(
            module="dpstream.connectors.duckdb.sink",
            example="out.duckdb",
            about="a DuckDB file, a table for each query",
            package="duckdb",
            extra="duckdb",
        ),
        "delta": Connector(
            module="dpstream.connectors.delta.sink",
            example="delta:out/",
            about="Delta Lake, a table for each query",
            package="deltalake",
            extra="delta",
        ),
    },
}
"""What a path names, rather than a URI; for who asks what there is."""


def open_uri(kind: str, uri: str, more: Mapping[str, Any] | None = None) -> Any:
    """The `kind` ("source" or "sink") that a URI names, with further options."""
    options = ServerOptions(uri, more)
    if options.scheme == "postgresql":  # both are usual
        options.scheme = "postgres"
    known = SOURCES if kind == "source" else SINKS
    connector = known.get(options.scheme)
    if connector is None:
        schemes = ", ".join(f"{scheme}://" for scheme in known)
        raise InvalidParameter(
            f"there is no {kind} {options.scheme}://; there are {schemes}; a path has no scheme"
        )
    if not connector.installed:
        raise MissingDependency(
            f"{options.where} needs the package {connector.package}: "
            f"pip install 'dpstream[{connector.extra}]'"
        )
    opened = import_module(connector.module).from_options(options)
    options.finish()
    return opened


# Where rows come from: files of several formats, growing directories, pipes, tables in memory.


def open_source(
    spec: Any, *, growing: bool = False, options: Mapping[str, Any] | None = None
) -> Source:
    """A source for a path, glob, directory, list of them, "-", a URI, or a table in memory.

    A directory stands for its files of one format, sorted by name, as they are now; `growing`,
    also for the files that are moved into it later. "-" is standard input. A URI such as
    "kafka://127.0.0.1:9092/clicks" names a server; it may have further `options`.
    """
    if is_uri(spec):
        found: Source = open_uri("source", spec, options)
        return found
    if options:
        raise InvalidParameter(f"only a server's URI has options; got {spec!r:.200}")
    if isinstance(spec, Source):
        return spec
    table = as_table(spec)
    if table is not None:
        return TableSource(table)
    if isinstance(spec, str) and spec == "-":
        return StandardInput()
    if isinstance(spec, str | os.PathLike):
        if growing and Path(spec).is_dir():
            return GrowingDirectory(Path(spec))
        return Files(_expand(spec))
    several = isinstance(spec, Sequence) and len(spec) > 0
    if several and all(isinstance(one, str | os.PathLike) for one in spec):
        return Files(path for one in spec for path in _expand(one))
    raise InvalidParameter(
        "a source must be a path, a glob, a directory, a list of them, '-', a URI or a table; got "
        f"{spec!r:.200}"
    )


def _expand(spec: str | os.PathLike[str]) -> list[Path]:
    """The files that a path, directory or glob stands for, sorted by name."""
    path = Path(spec)
    if path.is_dir():
        return _in_directory(path)
    text = os.fspath(spec)
    if path.exists() or not has_magic(text):
        return [path]
    found = sorted(Path(one) for one in glob(text, recursive=True) if os.path.isfile(one))
    if not found:
        raise InvalidInput(f"no file matches {text!r}")
    return found


def _in_directory(folder: Path) -> list[Path]:
    visible = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))]
    found = sorted(path for path in visible if path.is_file() and suffix(path))
    kinds = sorted({str(suffix(path)).removesuffix(".gz") for path in found})
    if not kinds:
        raise InvalidInput(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise InvalidInput(
            f"{folder} has files of several formats ({', '.join(kinds)}); name one of them with a "
            f"glob such as {folder / ('*' + kinds[0])}"
        )
    return found


# Where releases go: directories of files, databases, servers, standard output.


_DATABASES: dict[str, Callable[[Path], Sink]] = {
    ".sqlite": SqliteSink,
    ".db": SqliteSink,
    ".duckdb": DuckdbSink,
}


class AllSinks:
    """Every release goes to each of several sinks, in order; to a `TwoPhaseSink` in one step."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write to all; after a failure the next run writes again where it is missing."""
        for sink in self._sinks:
            sink.write(name, window, trigger, table)

    def fence(self, name: str, run: str) -> None:
        """Refuse a run whose releases one of them cannot take, before it is paid for."""
        for sink in self._sinks:
            fence(sink, name, run)

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

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """When no other query writes."""
        with self._turn:
            self._sink.write(name, window, trigger, table)

    def fence(self, name: str, run: str) -> None:
        """Refuse a run whose releases it cannot take, before it is paid for."""
        with self._turn:
            fence(self._sink, name, run)

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
