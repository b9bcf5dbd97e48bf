"""What the SQL sinks share: one table per query, and a book of the releases that are done."""

from __future__ import annotations

import json
from typing import Any, Protocol

import pyarrow as pa

from dpstream.connectors.sinks.numbers import another_run
from dpstream.errors import InvalidParameter, StateError

BOOK = "dpstream_releases"
QUERIES = "dpstream_queries"


class Connection(Protocol):
    """As much of a database connection as is needed."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any:
        """Run a statement."""
        ...


def identifier(name: str) -> str:
    """A name in quotes."""
    if "\0" in name or not name:
        raise InvalidParameter(f"a name in a database must be there, without NUL; got {name!r}")
    return '"' + name.replace('"', '""') + '"'


def prepare(connection: Connection) -> None:
    """Create the books."""
    connection.execute(
        f'CREATE TABLE IF NOT EXISTS {BOOK} (query TEXT NOT NULL, "window" BIGINT NOT NULL, '
        '"trigger" BIGINT NOT NULL, PRIMARY KEY (query, "window", "trigger"))'
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {QUERIES} (query TEXT PRIMARY KEY, columns TEXT NOT NULL, "
        "run TEXT NOT NULL)"
    )


def is_done(connection: Connection, query: str, window: int, trigger: int) -> bool:
    """Whether the release was written before."""
    found = connection.execute(
        f'SELECT 1 FROM {BOOK} WHERE query = ? AND "window" = ? AND "trigger" = ?',
        (query, window, trigger),
    )
    return found.fetchone() is not None


def mark_done(connection: Connection, query: str, window: int, trigger: int) -> None:
    """Note the release, in the transaction that writes its rows."""
    connection.execute(f"INSERT INTO {BOOK} VALUES (?, ?, ?)", (query, window, trigger))


def refuse_another_run(connection: Connection, query: str, run: str) -> None:
    """The query's releases here must be those of this run."""
    found = connection.execute(f"SELECT run FROM {QUERIES} WHERE query = ?", (query,)).fetchone()
    if found is not None and found[0] != run:
        raise another_run("the database", query)


def is_known(connection: Connection, query: str, schema: pa.Schema, run: str) -> bool:
    """Whether the query's table is there, with these columns; a query of another shape is refused.

    SQL takes `Clicks` and `clicks` for one name, so two queries must not differ in case only.
    """
    if query.lower().startswith("dpstream_"):
        raise InvalidParameter(
            f"tables named dpstream_... are the sink's own; rename the query {query!r}"
        )
    columns = {one.name: str(one.type) for one in schema}
    if len({name.lower() for name in columns}) < len(columns):
        raise InvalidParameter(
            f"columns of a database must differ in more than case; got {', '.join(columns)}"
        )
    rows = connection.execute(f"SELECT query, columns, run FROM {QUERIES}").fetchall()
    known = {name: json.loads(text) for name, text, _ in rows}
    if query not in known:
        if query.lower() in (name.lower() for name in known):
            raise InvalidParameter(f"another query of this sink is named like {query!r}; rename it")
        entry = (query, json.dumps(columns), run)
        connection.execute(f"INSERT INTO {QUERIES} VALUES (?, ?, ?)", entry)
        return False
    if known[query] != columns or list(known[query]) != list(columns):
        raise StateError(
            f"the table {query!r} of the sink has the columns {_shown(known[query])} but this "
            f"release has {_shown(columns)}; rename the query or use another sink"
        )
    return True


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())
