"""An Iceberg catalog, as PyIceberg finds it, and what its errors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dpstream.connectors.server_base import ServerOptions, is_uri
from dpstream.errors import InvalidParameter
from dpstream.optional import optional

_PROPERTIES = ("uri", "warehouse", "type")


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
    warehouse = given.get("warehouse")
    if warehouse is not None and not is_uri(warehouse):  # a table's metadata has whole paths
        given["warehouse"] = str(Path(warehouse).resolve())
    try:
        return catalog.load_catalog(options.servers or None, **given)
    except iceberg_errors() as problem:
        raise InvalidParameter(
            f"{options.where}: there is no such catalog: {' '.join(str(problem).split())[:300]}"
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
