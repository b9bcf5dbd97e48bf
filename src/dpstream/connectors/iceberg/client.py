"""An Iceberg catalog, as PyIceberg finds it, and what its errors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dpstream.connectors.lake_tables import one_line
from dpstream.connectors.server_base import ServerAway, ServerOptions, is_uri, unreachable
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.optional import optional

_PROPERTIES = ("uri", "warehouse", "type")
_AWAY = (
    "ServiceUnavailableError", "ServerError", "TooManyRequestsError", "CommitStateUnknownException",
)  # fmt: skip
_REFUSES = ("UnauthorizedError", "ForbiddenError", "OAuthError", "AuthorizationExpiredError")


def open_catalog(options: ServerOptions) -> Any:
    """The catalog of iceberg://NAME/...; what is not given stands in PyIceberg's configuration."""
    catalog = optional("pyiceberg.catalog", extra="iceberg", who="an iceberg:// table")
    given = {name: value for name in _PROPERTIES if (value := options.text(name)) is not None}
    if urlsplit(given.get("uri", "")).password is not None:
        raise InvalidParameter(
            f"{options.where}: uri must not hold a password, which logs and process lists would "
            "show; put it into PyIceberg's configuration (~/.pyiceberg.yaml, or a variable "
            f"PYICEBERG_CATALOG__{options.servers.upper()}__URI)"
        )
    warehouse, served = given.get("warehouse"), given.get("uri", "").startswith("http")
    if warehouse is not None and not served and not is_uri(warehouse):
        # a table's metadata has whole paths; to a REST catalog it is a name
        given["warehouse"] = str(Path(warehouse).resolve())
    try:
        return catalog.load_catalog(options.servers or None, **given)
    except iceberg_errors() as problem:
        try:
            raise_if_away(problem, options.where)
        except ServerAway as away:
            raise unreachable(options.where, away) from None
        raise InvalidParameter(
            f"{options.where}: there is no such catalog: {one_line(problem)}"
        ) from None


def raise_if_away(problem: Exception, where: str) -> None:
    """Raise `ServerAway` for what may go by when it is asked again, also if an answer was lost.

    Credentials that a REST catalog refuses do not: InvalidInput.
    """
    requests = optional("requests", extra="iceberg", who="an iceberg:// table")
    kind = type(problem).__name__
    away = (requests.ConnectionError, requests.Timeout)
    if kind in _AWAY or isinstance(problem, away):
        raise ServerAway(f"the catalog does not answer: {one_line(problem)}") from problem
    if kind in _REFUSES:
        raise InvalidInput(
            f"{where}: the catalog refuses the credentials: {one_line(problem)}; put others into "
            "PyIceberg's configuration (~/.pyiceberg.yaml, or variables PYICEBERG_CATALOG__...)"
        ) from None


def iceberg_errors() -> tuple[type[Exception], ...]:
    """What PyIceberg and the clients below it raise."""
    names = vars(optional("pyiceberg.exceptions", extra="iceberg", who="an iceberg:// table"))
    own = [
        each for each in names.values() if isinstance(each, type) and issubclass(each, Exception)
    ]
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return (*own, OSError, ValueError)
    return (*own, SQLAlchemyError, OSError, ValueError)  # ValueErrors are Arrow's, too


def split_path(options: ServerOptions, *, parts: int, example: str) -> tuple[str, ...]:
    """Namespace, and table if there are two parts, of a URI's path."""
    names = tuple(options.path.strip("/").split("/"))
    if not options.servers or len(names) != parts or not all(names):
        raise InvalidParameter(f"{options.where} must be like {example}")
    return names
