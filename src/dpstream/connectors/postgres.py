"""A connection to PostgreSQL: where it is, who asks, and what its errors mean."""

from __future__ import annotations

from typing import Any

from dpstream.connectors.address import Address, secret_from
from dpstream.errors import MissingDependency

LIBPQ = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding", "gssencmode",
    "passfile", "service", "target_session_attrs", "connect_timeout", "keepalives",
    "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
)  # fmt: skip
"""What is passed through to the client library as it is."""
OPTIONS = (*LIBPQ, "password_file", "patience")
_FOR_NOW = ("starting up", "shutting down", "terminating", "too many", "recovery")
_FOR_GOOD = ("no password", "certificate", "SSL", "private key", "invalid")
_DEFAULTS = {"connect_timeout": "10", "tcp_user_timeout": "30000", "keepalives_idle": "10"}


def connect(address: Address) -> Any:
    """A connection without transactions of its own; hosts, user and database as libpq has them.

    What the address leaves out comes from the environment (PGHOST, PGUSER, PGPASSFILE, ...).
    """
    psycopg = driver()
    hosts = [host.rpartition(":") if ":" in host else (host, "", "") for host in address.hosts]
    about = {
        "host": ",".join(host or port for host, _, port in hosts),
        "port": ",".join(port for host, colon, port in hosts if colon),
        "user": address.user,
        "dbname": address.name,
    }
    options = _DEFAULTS | {name: address.options[name] for name in LIBPQ if name in address.options}
    if "password_file" in address.options:
        options["password"] = secret_from(address.options["password_file"])
    given = {name: value for name, value in about.items() if value} | options
    connection = psycopg.connect(**given, application_name="dpstream", autocommit=True)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET DateStyle = 'ISO, YMD'")
    connection.execute("SET extra_float_digits = 1")
    return connection


def driver() -> Any:
    """The module psycopg."""
    try:
        import psycopg
    except ImportError:
        raise MissingDependency(
            "a postgres:// address needs the package psycopg: pip install 'dpstream[postgres]'"
        ) from None
    return psycopg


def is_away(problem: Exception) -> bool:
    """Does the server not answer (and may, later), rather than refuse?"""
    psycopg = driver()
    if not isinstance(problem, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    state = getattr(problem, "sqlstate", None)
    if state is not None:  # 08: the connection broke; 57P: the server starts or shuts down
        return str(state).startswith(("08", "57P", "53300"))
    words = str(problem)
    if "FATAL" in words:
        return any(sign in words for sign in _FOR_NOW)
    return not any(sign in words for sign in _FOR_GOOD)


def said(problem: Exception) -> str:
    """The server's words in one line."""
    return " ".join(str(problem).split()) or type(problem).__name__
