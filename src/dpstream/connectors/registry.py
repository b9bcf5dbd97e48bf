"""Which URI is served by which file, and what must be installed for it.

A connector is one module with a function `from_options(options) -> Source` or `Sink`; it is loaded
when a URI asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dpstream.connectors.options import Options
from dpstream.errors import InvalidParameter, MissingDependency


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
        module="dpstream.connectors.sources.kafka",
        example="kafka://127.0.0.1:9092/clicks?format=json",
        about="a Kafka topic: JSON, CSV or Arrow messages",
        package="confluent_kafka",
        extra="kafka",
    ),
    "nats": Connector(
        module="dpstream.connectors.sources.nats",
        example="nats://127.0.0.1:4222/CLICKS?format=json",
        about="a NATS JetStream stream: JSON, CSV or Arrow messages",
        package="nats",
        extra="nats",
    ),
    "postgres": Connector(
        module="dpstream.connectors.sources.postgres",
        example="postgres://user@127.0.0.1:5432/database?table=clicks&key=id",
        about="a table of PostgreSQL that grows, by its key",
        package="psycopg",
        extra="postgres",
    ),
}
SINKS = {
    "kafka": Connector(
        module="dpstream.connectors.sinks.kafka",
        example="kafka://127.0.0.1:9092/releases",
        about="a Kafka topic, by transactions",
        package="confluent_kafka",
        extra="kafka",
    ),
    "nats": Connector(
        module="dpstream.connectors.sinks.nats",
        example="nats://127.0.0.1:4222/RELEASES",
        about="a NATS JetStream stream, a subject for each release",
        package="nats",
        extra="nats",
    ),
    "postgres": Connector(
        module="dpstream.connectors.sinks.postgres",
        example="postgres://user@127.0.0.1:5432/database?schema=releases",
        about="PostgreSQL, a table for each query",
        package="psycopg",
        extra="postgres",
    ),
}

PATHS = {
    "source": {
        "files": Connector(
            module="dpstream.connectors.sources.files",
            example="clicks/*.parquet",
            about="files of CSV, JSON lines or Parquet; with live, a directory that grows",
        ),
        "-": Connector(
            module="dpstream.connectors.sources.stdin",
            example="-",
            about="standard input: CSV or JSON lines",
        ),
    },
    "sink": {
        "files": Connector(
            module="dpstream.connectors.sinks.directory",
            example="out/",
            about="a file for each release: Parquet, csv:out/ or jsonl:out/",
        ),
        "-": Connector(
            module="dpstream.connectors.sinks.stdout",
            example="-",
            about="standard output: JSON lines",
        ),
        "sqlite": Connector(
            module="dpstream.connectors.sinks.sqlite",
            example="out.sqlite",
            about="an SQLite file, a table for each query",
        ),
        "duckdb": Connector(
            module="dpstream.connectors.sinks.duckdb",
            example="out.duckdb",
            about="a DuckDB file, a table for each query",
            package="duckdb",
            extra="duckdb",
        ),
        "delta": Connector(
            module="dpstream.connectors.sinks.delta",
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
    options = Options(uri, more)
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
