"""What a source or a sink may be named by, and which connector serves the name.

A name is a path, a table in memory, "-" for a pipe, or the URI of a server. A server's connector is
the folder of its scheme, such as `connectors/kafka`: `source.py` and `sink.py` have a function
`from_options(options)`. They are imported when a URI asks for them, so that their packages are
needed only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpstream.connectors.database import DuckdbSink, SqliteSink
from dpstream.connectors.delta.sink import DeltaSink
from dpstream.connectors.encode import ENCODERS
from dpstream.connectors.files.sink import DirectorySink
from dpstream.connectors.files.size_limits import SizeLimits
from dpstream.connectors.files.source import SUFFIXES, Files, GrowingDirectory, suffix
from dpstream.connectors.memory import table_source
from dpstream.connectors.pipes import StandardInput, StdoutSink
from dpstream.connectors.server_base import OBJECT_STORES, ServerOptions, is_uri
from dpstream.connectors.shared import AllSinks, UpsertSink
from dpstream.errors import InvalidInput, InvalidParameter, MissingDependency
from dpstream.records import Sink, Source, UpsertingSink


@dataclass(frozen=True)
class Connector:
    """A kind of source or sink: how it is named, and what to install for it."""

    example: str
    about: str
    extra: str | None = None
    """What to install: dpstream[extra]."""
    promise: str = ""
    """What holds after a crash, and how."""
    upsert: bool = False
    """Can a sink keep the newest release of each window alone?"""

    @property
    def package(self) -> str | None:
        """The Python package that it imports."""
        return None if self.extra is None else _PACKAGES[self.extra]

    @property
    def installed(self) -> bool:
        """Is its package there?"""
        return self.package is None or find_spec(self.package) is not None


_PACKAGES = {
    "duckdb": "duckdb",
    "delta": "deltalake",
    "iceberg": "pyiceberg",
    "kafka": "confluent_kafka",
    "nats": "nats",
    "objects": "obstore",
    "postgres": "psycopg",
}
"""By extra."""
SOURCES = {
    "files": Connector(
        "clicks/*.parquet",
        "files of CSV, JSON lines or Parquet; with live, a directory that grows",
        promise="exactly once: by file and position, with a digest of what was read",
    ),
    "-": Connector(
        "-",
        "standard input: CSV or JSON lines",
        promise="exactly once with --state: rows are kept there before they count",
    ),
    "objects": Connector(
        "s3://bucket/clicks/",
        "objects of CSV, JSON lines or Parquet (s3://, gs://, az://); with live, a prefix that "
        "grows",
        "objects",
        "exactly once: by key and position, with a digest of what was read",
    ),
    "kafka": Connector(
        "kafka://127.0.0.1:9092/clicks?format=json",
        "a Kafka topic: JSON, CSV or Arrow messages; changes by Debezium (format=debezium-json); "
        "with registry= Avro, JSON Schema, Protobuf; JSON, CSV and Arrow also on Spark",
        "kafka",
        "exactly once: by the topic's id, partition and offset",
    ),
    "nats": Connector(
        "nats://127.0.0.1:4222/CLICKS?format=json",
        "a NATS JetStream stream: JSON, CSV or Arrow messages",
        "nats",
        "exactly once: by the stream's birth and sequence numbers",
    ),
    "postgres": Connector(
        "postgres://user@127.0.0.1:5432/database?table=clicks&key=id",
        "a table of PostgreSQL that grows, by its key; with slot= its changes",
        "postgres",
        "exactly once: by a key that grows, behind open transactions, or by a place in the log",
    ),
    "delta": Connector(
        "delta:clicks/",
        "a Delta Lake table that grows, by its change data feed",
        "delta",
        "exactly once: by the table's id and version",
    ),
    "iceberg": Connector(
        "iceberg://local/logs/clicks",
        "an Iceberg table that grows, snapshot by snapshot; SQL and REST catalogs",
        "iceberg",
        "exactly once: by the table's id and sequence number",
    ),
}
SINKS = {
    "files": Connector(
        "out/",
        "a file for each release: Parquet, csv:out/ or jsonl:out/",
        promise="exactly once: by the file's name",
    ),
    "objects": Connector(
        "s3://bucket/releases/",
        "an object for each release (s3://, az://): Parquet, ?format=csv or jsonl",
        "objects",
        "exactly once: by the object's key, which only the first writer makes",
    ),
    "-": Connector(
        "-",
        "standard output: JSON lines",
        promise="exactly once with --state, but for a release during which it was killed",
    ),
    "sqlite": Connector(
        "out.sqlite",
        "an SQLite file, a table for each query",
        promise="exactly once: one transaction with an index of releases",
        upsert=True,
    ),
    "duckdb": Connector(
        "out.duckdb",
        "a DuckDB file, a table for each query",
        "duckdb",
        "exactly once: one transaction with an index of releases",
        upsert=True,
    ),
    "delta": Connector(
        "delta:out/",
        "Delta Lake, a table for each query",
        "delta",
        "exactly once: one commit with an application transaction",
        upsert=True,
    ),
    "iceberg": Connector(
        "iceberg://local/releases",
        "Apache Iceberg, a table for each query; SQL and REST catalogs",
        "iceberg",
        "exactly once: one commit with a property of the table",
        upsert=True,
    ),
    "kafka": Connector(
        "kafka://127.0.0.1:9092/releases",
        "a Kafka topic, by transactions; with registry= Avro or JSON Schema",
        "kafka",
        "exactly once for readers of committed messages: one transaction with an index",
        upsert=True,
    ),
    "nats": Connector(
        "nats://127.0.0.1:4222/RELEASES",
        "a NATS JetStream stream, a subject for each release",
        "nats",
        "exactly once: a subject takes one message",
    ),
    "postgres": Connector(
        "postgres://user@127.0.0.1:5432/database?schema=releases",
        "PostgreSQL, a table for each query",
        "postgres",
        "exactly once: one transaction with an index of releases",
        upsert=True,
    ),
}
UPSERT = "upsert:"
"""Before the name of a sink: its releases replace those before them."""
OUTPUTS = ("append", "upsert")
_FOLDERS = {"postgresql": "postgres"} | dict.fromkeys(OBJECT_STORES, "objects")
"""The connector of a scheme, if it has not its name."""
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*")
_DATABASES: dict[str, Callable[[Path], Sink]] = {
    ".sqlite": SqliteSink,
    ".db": SqliteSink,
    ".duckdb": DuckdbSink,
}


def open_source(
    spec: Any,
    *,
    growing: bool = False,
    options: Mapping[str, Any] | None = None,
    on_damage: str = "stop",
) -> Source:
    """A source for a path, glob, directory, list of them, "-", a URI, or a table in memory.

    A directory stands for its files of one format, sorted by name, as they are now; `growing`,
    also for the files that are moved into it later. "-" is standard input. A URI such as
    "kafka://127.0.0.1:9092/clicks" names a server. `options`: further ones of a server, or limits
    of sizes for files and standard input (`SizeLimits`). `on_damage`: a file that cannot be used is
    quarantined ("quarantine"), or stops the run ("stop"). "delta:clicks/" is a Delta Lake table.
    """
    if type(spec).__module__.startswith("polars.lazyframe"):
        spec = spec.collect()
    if is_uri(spec):
        named: Source = open_uri("source", spec, options, growing=growing, on_damage=on_damage)
        return named
    opened = spec if isinstance(spec, Source) else table_source(spec)
    if opened is not None and options:
        raise InvalidParameter(f"a table, or a source that is open, has no options; got {options}")
    if opened is not None:
        return opened
    limits = SizeLimits.of(options)
    if isinstance(spec, str) and spec == "-":
        return StandardInput(limits=limits)
    if isinstance(spec, str | os.PathLike):
        if growing and Path(spec).is_dir():
            return GrowingDirectory(Path(spec), on_damage=on_damage, limits=limits)
        return Files(_expand(spec), on_damage=on_damage, limits=limits)
    several = isinstance(spec, Sequence) and len(spec) > 0
    if several and all(isinstance(path, str | os.PathLike) for path in spec):
        paths = [path for each in spec for path in _expand(each)]
        return Files(paths, on_damage=on_damage, limits=limits)
    several = isinstance(spec, Sequence) and all(isinstance(each, str) for each in spec)
    raise InvalidParameter(
        "a source must be a path, a glob, a directory, a list of them, '-', a URI or a table (a "
        "frame, Arrow, a list of dicts); got "
        + (f"{spec!r:.200}" if several else f"an object of the type {type(spec).__name__}")
    )


def open_sink(spec: Any, *, journal: Path | None = None, again: bool = False) -> Sink | None:
    """A sink for a directory, a database file, "-", a `Sink`, or a list of them.

    "out/" is a directory of Parquet files; "csv:out/", "jsonl:out/" and "parquet:out/" name the
    format; "delta:out/" has a Delta Lake table for each query. A path that ends in .sqlite, .db or
    .duckdb is a database. "-" is standard output, which remembers what it wrote in the file
    `journal`. A URI such as "kafka://127.0.0.1:9092/releases" names a server. None is no sink.
    "upsert:" before a database, "delta:" or a Kafka topic: the newest release of each window takes
    the place of those before. `again`: this process has opened it before, and others may be writing
    there.
    """
    if spec is None:
        return None
    if isinstance(spec, str) and spec.startswith(UPSERT):
        return _upserting(open_sink(spec.removeprefix(UPSERT), again=again), spec)
    if isinstance(spec, str) and spec == "-":
        return StdoutSink(journal=journal)
    if is_uri(spec) and not spec.startswith("delta:"):
        sink: Sink = open_uri("sink", spec)
        return sink
    if isinstance(spec, str | os.PathLike):
        return _open_path(os.fspath(spec), again=again)
    if isinstance(spec, Sink):
        return spec
    if isinstance(spec, Sequence):
        several = (open_sink(each, journal=journal, again=again) for each in spec)
        return AllSinks([sink for sink in several if sink is not None])
    raise InvalidParameter(
        "a sink must be a directory, a database file, a URI, '-' or have the methods write and "
        f"close; got {spec!r:.200}"
    )


def upsert_specs(spec: Any) -> Any:
    """What names a sink, or several, for upserts.

    >>> upsert_specs(["out.sqlite", "upsert:delta:out/"])
    ['upsert:out.sqlite', 'upsert:delta:out/']
    """
    if spec is None or isinstance(spec, UpsertSink):
        return spec
    if isinstance(spec, str | os.PathLike):
        text = os.fspath(spec)
        return text if text.startswith(UPSERT) else f"{UPSERT}{text}"
    if isinstance(spec, Sequence):
        return [upsert_specs(each) for each in spec]
    return _upserting(spec, spec)


def _upserting(sink: Any, spec: Any) -> UpsertSink:
    if not isinstance(sink, UpsertingSink):
        able = ", ".join(each.example for each in SINKS.values() if each.upsert)
        raise InvalidParameter(
            f"{spec!r:.200} cannot replace releases that are there; output = 'upsert' is for sinks "
            f"such as {able}"
        )
    return UpsertSink(sink)


def open_uri(kind: str, uri: str, more: Mapping[str, Any] | None = None, **as_files: Any) -> Any:
    """The `kind` ("source" or "sink") that a server's URI names, with further options.

    `as_files`: how objects are read, which are files to us.
    """
    options = ServerOptions(uri, more)
    connectors = SOURCES if kind == "source" else SINKS
    name = _FOLDERS.get(options.scheme, options.scheme)
    connector = connectors.get(name)
    if connector is None or not is_uri(connector.example):
        known = [each.example for each in connectors.values() if "://" in each.example]
        schemes = ", ".join(f"{example.partition('://')[0]}://" for example in known)
        raise InvalidParameter(
            f"there is no {kind} {options.scheme}://; there are {schemes}; a path has no scheme"
        )
    if not connector.installed:
        raise MissingDependency(
            f"{options.where} needs the package {connector.package}: "
            f"pip install 'dpstream[{connector.extra}]'"
        )
    module = import_module(f"dpstream.connectors.{name}.{kind}")
    about = as_files if options.scheme in OBJECT_STORES else {}
    source_or_sink = module.from_options(options, **about)
    options.finish()
    return source_or_sink


def _expand(spec: str | os.PathLike[str]) -> list[Path]:
    """The files that a path, directory or glob stands for, sorted by name."""
    path = Path(spec)
    if path.is_dir():
        return _list_directory(path)
    text = os.fspath(spec)
    if path.exists() or not has_magic(text):
        return [path]
    matches = sorted(Path(name) for name in glob(text, recursive=True) if os.path.isfile(name))
    if not matches:
        raise InvalidInput(f"no file matches {text!r}")
    return matches


def _list_directory(folder: Path) -> list[Path]:
    visible = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))]
    files = sorted(path for path in visible if path.is_file() and suffix(path))
    formats = sorted({str(suffix(path)).removesuffix(".gz") for path in files})
    if not formats:
        raise InvalidInput(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")
    if len(formats) > 1:
        raise InvalidInput(
            f"{folder} has files of several formats ({', '.join(formats)}); name one of them with "
            f"a glob such as {folder / ('*' + formats[0])}"
        )
    return files


def release_folder(text: str) -> tuple[Path, str] | None:
    """The folder and the format of a sink that writes a file for each release; None: another."""
    kind, colon, rest = text.partition(":")
    if colon and kind in ENCODERS:
        return Path(rest), kind
    path = Path(text)
    if text == "-" or is_uri(text) or (path.suffix in _DATABASES and not text.endswith("/")):
        return None
    return path, "parquet"


def _open_path(text: str, *, again: bool) -> Sink:
    kind, colon, rest = text.partition(":")
    if colon and kind in ENCODERS:
        return DirectorySink(Path(rest), suffix=kind, again=again)
    if colon and kind == "delta":
        return DeltaSink(rest)
    if colon and len(kind) > 1 and _SCHEME.fullmatch(kind):  # a single letter is a drive
        known = [f"{each}:" for each in (*ENCODERS, "delta", *OUTPUTS[1:])]
        meant = get_close_matches(f"{kind}:", known, n=1)
        raise InvalidParameter(
            f"there is no sink {kind}:; {f'did you mean {meant[0]}? ' if meant else ''}there are "
            f"{', '.join(known)} and servers such as kafka://HOST/TOPIC (`dpstream sources`); a "
            f"folder of this name is ./{text}"
        )
    path = Path(text)
    if path.suffix in _DATABASES and not text.endswith("/"):
        return _DATABASES[path.suffix](path)
    kind = path.suffix.removeprefix(".")
    if kind in ENCODERS and not path.is_dir():
        raise InvalidParameter(
            f"a sink writes one file per release into a directory, not the one file {path}; "
            f"for {kind} files write {kind}:{path.with_suffix('')}/"
        )
    return DirectorySink(path, again=again)
