"""Systems that rows come from and releases go to, each in its own module, loaded when it is used.

A module's class has `open(address)`, which gives a source or a sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

from dpstream.connectors.address import parse_address, scheme_of
from dpstream.errors import InvalidParameter


@dataclass(frozen=True, kw_only=True)
class Connector:
    """One kind of system."""

    name: str
    schemes: tuple[str, ...] = ()
    example: str
    """How its address looks."""
    source: str | None = None
    """`module:Class` below `dpstream.connectors`, for a scheme; any text for a kind of file."""
    sink: str | None = None
    package: str | None = None
    """What must be installed for it; None: nothing beyond the core."""
    module: str | None = None
    extra: str | None = None

    def installed(self) -> str | None:
        """The version of its package, "" if it needs none; None: it is not there."""
        if self.package is None:
            return ""
        if self.module is None or find_spec(self.module) is None:
            return None
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


CONNECTORS: Final = (
    Connector(name="files", example="clicks/*.parquet, clicks.csv, clicks.jsonl.gz",
              source="CSV, JSON lines, Parquet; directories that grow",
              sink="directories of Parquet, CSV or JSON lines"),
    Connector(name="standard input and output", example="-", source="CSV or JSON lines",
              sink="JSON lines"),
    Connector(name="SQLite", example="out.sqlite", sink="a table per query"),
    Connector(name="DuckDB", example="out.duckdb", sink="a table per query",
              package="duckdb", module="duckdb", extra="duckdb"),
    Connector(name="PostgreSQL", schemes=("postgres", "postgresql"),
              example="postgres://user@host:5432/database?table=clicks&key=id",
              source="sources.postgres:PostgresSource", sink="sinks.postgres:PostgresSink",
              package="psycopg", module="psycopg", extra="postgres"),
    Connector(name="NATS JetStream", schemes=("nats", "tls"),
              example="nats://user@host:4222/STREAM?format=json",
              source="sources.nats:NatsSource", sink="sinks.nats:NatsSink",
              package="nats-py", module="nats", extra="nats"),
    Connector(name="Delta Lake", example="delta:out/", sink="a table per query",
              package="deltalake", module="deltalake", extra="delta"),
)  # fmt: skip


def is_uri(spec: object) -> bool:
    """Is it the address of a server, rather than a path?"""
    scheme = scheme_of(spec)
    return scheme is not None and any(scheme in one.schemes for one in CONNECTORS)


def open_uri(text: str, role: str) -> Any:
    """The source or the sink at an address."""
    address = parse_address(text)
    found = next(one for one in CONNECTORS if address.scheme in one.schemes)
    place = getattr(found, role)
    if place is None:
        raise InvalidParameter(f"{found.name} cannot be a {role}; see: dpstream sources")
    module, _, name = place.partition(":")
    return getattr(import_module(f"dpstream.connectors.{module}"), name).open(address)
