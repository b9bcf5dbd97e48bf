"""A table of PostgreSQL and its key: what is there, and how a range of keys is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dpstream.connectors.postgres import copy_out
from dpstream.connectors.sinks.database import identifier
from dpstream.connectors.sources.postgres_types import Column, columns_of
from dpstream.errors import InvalidInput

_ABOUT = """
SELECT c.oid::int8, n.nspname, c.relname, c.relkind, pg_is_in_recovery(),
       EXISTS (SELECT 1 FROM pg_inherits i WHERE i.inhparent = c.oid) AND c.relkind <> 'p'
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
_KEY = """
SELECT a.attnum, a.attnotnull, pg_get_serial_sequence(%(name)s, a.attname), EXISTS (
    SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
      AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum)
FROM pg_attribute a WHERE a.attrelid = %(table)s AND a.attname = %(key)s
"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a key that grows."""

    oid: int
    number: int
    """Of the key's column."""
    name: str
    quoted: str
    key: str
    columns: dict[str, Column]
    sequence: str | None
    place: str
    """What it is called in messages."""

    @property
    def largest(self) -> str:
        """The statement that asks for the largest key."""
        return f"SELECT max({identifier(self.key)}) FROM {self.quoted}"

    def wanted(self, columns: Sequence[str] | None) -> list[str]:
        """The columns that are asked for, in the table's order."""
        for name in columns or ():
            if name not in self.columns:
                raise InvalidInput(
                    f"{self.place} has no column {name!r}; its columns are "
                    f"{', '.join(self.columns)}"
                )
        return [name for name in self.columns if columns is None or name in columns]

    def none(self, names: Sequence[str]) -> pa.Table:
        """No rows."""
        return pa.table({name: pa.array([], self.columns[name].kind) for name in names})

    def asked(self, names: Sequence[str]) -> list[Column]:
        """The key, and what else is wanted."""
        return [self.columns[name] for name in dict.fromkeys([self.key, *names])]

    def fetch(
        self, connection: Any, names: Sequence[str], after: int | None, upto: int, rows: int
    ) -> bytes:
        """Rows of a range of keys as CSV, the key first."""
        asked = ", ".join(column.asked for column in self.asked(names))
        statement = (
            f"COPY (SELECT {asked} FROM {self.quoted} WHERE {self._range(after, upto)} "
            f"ORDER BY {identifier(self.key)} LIMIT {rows:d}) "
            "TO STDOUT (FORMAT csv, ENCODING 'UTF8')"
        )
        return copy_out(connection, statement)

    def count(self, connection: Any, after: int | None, upto: int, most: int) -> int:
        """How many rows a range of keys has, at most `most`."""
        inside = f"SELECT 1 FROM {self.quoted} WHERE {self._range(after, upto)} LIMIT {most:d}"
        (found,) = connection.execute(f"SELECT count(*) FROM ({inside}) AS found").fetchone()
        return int(found)

    def last_of_sequence(self, connection: Any) -> int | None:
        """The last key that was handed out, if the key has a sequence and it may be seen."""
        if self.sequence is None:
            return None
        import psycopg

        try:
            asked = f"SELECT last_value FROM {self.sequence}"
            return int(connection.execute(asked).fetchone()[0])
        except psycopg.errors.InsufficientPrivilege:
            return None

    def _range(self, after: int | None, upto: int) -> str:
        key = identifier(self.key)
        above = "" if after is None else f"{key} > {after:d} AND "
        return f"{above}{key} <= {upto:d}"


def find_table(connection: Any, table: str, key: str, where: str) -> Table:
    """The table; refused if its rows cannot be read in order, each once."""
    place = f"the table {table} of {where}"
    about = connection.execute(_ABOUT, (table,)).fetchone()
    if about is None:
        raise InvalidInput(f"there is no table {table!r} at {where}; create it first")
    oid, schema, name, kind, standby, parent = about
    if kind not in ("r", "p") or parent:
        raise InvalidInput(f"{place} must be a table of its own, not a view and not inherited")
    if standby:
        raise InvalidInput(f"{where} is a standby, which does not see who writes; read the primary")
    quoted = f"{identifier(schema)}.{identifier(name)}"
    columns = columns_of(connection, oid)
    if key not in columns:
        raise InvalidInput(
            f"{place} has no column {key!r} for a key; its columns are {', '.join(columns)}"
        )
    given = {"name": quoted, "table": oid, "key": key}
    number, filled, sequence, unique = connection.execute(_KEY, given).fetchone()
    if not pa.types.is_integer(columns[key].kind) or not filled or not unique:
        raise InvalidInput(
            f"{place}: the key {key!r} must be whole numbers, NOT NULL, with a unique index of its "
            f"own, such as a primary key; it is {columns[key].sort}"
            f"{'' if filled else ', may be NULL'}{'' if unique else ', and has no such index'}"
        )
    return Table(
        oid=oid,
        number=number,
        name=f"{schema}.{name}",
        quoted=quoted,
        key=key,
        columns=columns,
        sequence=sequence,
        place=place,
    )
