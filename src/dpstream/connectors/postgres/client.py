"""A connection to PostgreSQL, and a table with a key that grows, whose rows come as Arrow.

Rows are sent as CSV. Whole numbers, floats, booleans, dates and times keep their types,
numeric(p, s) is a decimal; all else is text as PostgreSQL spells it (numeric without bounds, uuid,
json, arrays, composites, ...). A value that Arrow cannot hold, such as a time at infinity, makes
its row unusable and no other.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import errors, pq
from psycopg.errors import InsufficientPrivilege

from dpstream.connectors.database import identifier
from dpstream.connectors.files.text import SHOWN
from dpstream.connectors.server_base import ServerAway, ServerOptions
from dpstream.errors import InvalidInput
from dpstream.records import Columns, Rejected, select_columns

_LIBPQ = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding", "gssencmode",
    "passfile", "service", "target_session_attrs", "connect_timeout", "keepalives",
    "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
)  # fmt: skip
"""What is passed through to the client library as it is."""
_DEFAULTS = {"connect_timeout": "10", "tcp_user_timeout": "30000", "keepalives_idle": "10"}
_FOR_NOW = ("starting up", "shutting down", "terminating", "too many", "recovery")
_FOR_GOOD = ("no password", "certificate", "SSL", "private key", "invalid")


def connection_settings(options: ServerOptions) -> dict[str, Any]:
    """What the client library is told of the server.

    What the options leave out comes from where libpq looks: PGHOST, PGUSER, PGPASSFILE, ...
    """
    hosts = [host for host in options.servers.split(",") if host]
    pairs = [host.rpartition(":") if ":" in host else (host, "", "") for host in hosts]
    given: dict[str, Any] = {
        "host": ",".join(host.strip("[]") for host, _, _ in pairs),
        "port": ",".join(port for _, _, port in pairs) if any(c for _, c, _ in pairs) else None,
        "user": options.user,
        "dbname": options.path,
        "password": options.secret("password"),
        **{name: options.text(name, _DEFAULTS.get(name)) for name in _LIBPQ},
    }
    return {name: value for name, value in given.items() if value}


def connect_function(options: ServerOptions) -> Callable[[], Any]:
    """A function that connects as `connector` says."""
    return connector(connection_settings(options))


def connector(given: dict[str, Any]) -> Callable[[], Any]:
    """A function that connects: without transactions of its own, times in UTC."""

    def connect() -> Any:
        connection = psycopg.connect(**given, application_name="dpstream", autocommit=True)
        for setting in ("TimeZone = 'UTC'", "DateStyle = 'ISO, YMD'", "extra_float_digits = 1"):
            connection.execute(f"SET {setting}")
        return connection

    return connect


def copy_out(connection: Any, statement: str) -> bytes:
    """What COPY ... TO STDOUT sends; some twelve times as fast as row by row through a cursor."""
    channel = connection.pgconn
    started = channel.exec_(statement.encode())
    if started.status != pq.ExecStatus.COPY_OUT:
        raise errors.error_from_result(started)
    content = bytearray()
    while (row := channel.get_copy_data(0))[0] > 0:
        content += row[1]
    problem = None
    while (result := channel.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            problem = errors.error_from_result(result)
    if problem is not None:
        raise problem
    return bytes(content)


@contextmanager
def raise_away() -> Iterator[None]:
    """Turn the error of a server that does not answer into `ServerAway`; others pass."""
    try:
        yield
    except psycopg.Error as problem:
        if _is_away(problem):
            raise ServerAway(one_line(problem)) from problem
        raise


def one_line(problem: Exception) -> str:
    """The server's words."""
    return " ".join(str(problem).split()) or type(problem).__name__


def _is_away(problem: Exception) -> bool:
    """Does the server not answer (and may, later), rather than refuse?"""
    state = getattr(problem, "sqlstate", None)
    kinds = (psycopg.OperationalError, psycopg.InterfaceError)
    broken = type(problem) is psycopg.DatabaseError and state is None  # what no server has said
    if not isinstance(problem, kinds) and not broken:
        return False
    if state is not None:  # 08: the connection broke; 57P: the server starts or shuts down
        return str(state).startswith(("08", "57P", "53300"))
    words = str(problem)
    if "FATAL" in words:
        return any(sign in words for sign in _FOR_NOW)
    return not any(sign in words for sign in _FOR_GOOD)


# A table of PostgreSQL with a key that grows, and ranges of its rows as Arrow.
#
# Rows are sent as CSV. Whole numbers, floats, booleans, dates and times keep their types,
# numeric(p, s) is a decimal; all else is text as PostgreSQL spells it (numeric without bounds,
# uuid, json, arrays, composites, ...). A value that Arrow cannot hold, such as a time at infinity,
# makes its row unusable and no other.

_LARGEST = 2**31 - 1  # bytes of a block of CSV
_EXACT: dict[str, pa.DataType] = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "bytea": pa.binary(),
}
_DAY = r"\d{4}-\d\d-\d\d"
_PLAIN = {
    "date": rf"^{_DAY}$",
    "timestamp": rf"^{_DAY} \d\d:\d\d:\d\d(\.\d{{1,6}})?$",
    "timestamptz": rf"^{_DAY} \d\d:\d\d:\d\d(\.\d{{1,6}})?\+00$",
    "numeric": r"^-?\d+(\.\d+)?$",
}
"""How values look that Arrow holds; others are infinite, NaN, or before our era."""
_MOST_DIGITS = 38

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
_COLUMNS = """
WITH RECURSIVE kinds (name, number, type, modifier) AS (
    SELECT attname, attnum, atttypid, atttypmod FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
  UNION ALL  -- a domain is what it is made of
    SELECT name, number, t.typbasetype, t.typtypmod FROM kinds JOIN pg_type t ON t.oid = kinds.type
    WHERE t.typtype = 'd')
SELECT name, t.typname, modifier FROM kinds JOIN pg_type t ON t.oid = kinds.type
WHERE t.typtype <> 'd' ORDER BY number
"""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its type in PostgreSQL and in Arrow."""

    name: str
    postgres_type: str
    arrow_type: pa.DataType

    @property
    def expression(self) -> str:
        """The SQL expression whose text is sent."""
        name = identifier(self.name)
        if self.postgres_type == "bytea":
            return f"encode({name}, 'hex')"
        if self.postgres_type == "bool":
            return f"{name}::int"
        if self.postgres_type == "numeric" and self.arrow_type == pa.string():
            return f"trim_scale({name})"  # 1.5 and 1.50 are one number
        return name if self.arrow_type != pa.string() else f"{name}::text"

    def parse(self, text: pa.Array) -> tuple[pa.Array, pa.Array]:
        """(values, which of them cannot be held)."""
        bad = pa.array(np.zeros(len(text), bool))
        if self.arrow_type == pa.string():
            return text, bad
        if self.postgres_type == "bytea":
            values = [None if cell is None else bytes.fromhex(cell) for cell in text.to_pylist()]
            return pa.array(values, pa.binary()), bad
        if self.postgres_type == "bool":
            return text.cast(pa.int8()).cast(pa.bool_()), bad
        if self.postgres_type in _PLAIN:
            fits = pc.match_substring_regex(text, _PLAIN[self.postgres_type])
            bad = pc.invert(pc.fill_null(fits, True))
            text = pc.if_else(bad, pa.scalar(None, pa.string()), text)
        return text.cast(self.arrow_type), bad


@dataclass(frozen=True, kw_only=True, eq=False)
class FetchedRows:
    """Rows as they came: those that can be used, the rest, how many in all, and the last key."""

    table: pa.Table
    rejected: list[Rejected]
    rows: int
    last: int | None


@dataclass(frozen=True, kw_only=True)
class PostgresTable:
    """A table with a key that grows."""

    oid: int
    key_number: int
    """The number of the key's column."""
    name: str
    quoted: str
    key: str
    columns: dict[str, Column]
    sequence: str | None
    place: str
    """What it is called in messages."""

    def no_rows(self, columns: Columns) -> pa.Table:
        """An empty table of the columns that are asked for, in the table's order."""
        names = select_columns(self.place, list(self.columns), columns)
        return pa.table({name: pa.array([], self.columns[name].arrow_type) for name in names})

    def fetch(
        self, connection: Any, columns: Columns, after: int | None, upto: int, rows: int
    ) -> FetchedRows:
        """The rows of a range of keys, in their order."""
        empty = self.no_rows(columns)
        sent = [self.columns[name] for name in dict.fromkeys([self.key, *empty.column_names])]
        content = copy_out(
            connection,
            f"COPY (SELECT {', '.join(column.expression for column in sent)} "
            f"FROM {self.quoted} WHERE {self._range(after, upto)} "
            f"ORDER BY {identifier(self.key)} LIMIT {rows:d}) "
            "TO STDOUT (FORMAT csv, ENCODING 'UTF8')",
        )
        if not content:
            return FetchedRows(table=empty, rejected=[], rows=0, last=None)
        fetched = _decode(content, sent, place=self.place)
        return replace(fetched, table=fetched.table.select(empty.column_names))

    def count(self, connection: Any, after: int | None, upto: int, most: int) -> int:
        """How many rows a range of keys has, at most `most`."""
        inside = f"SELECT 1 FROM {self.quoted} WHERE {self._range(after, upto)} LIMIT {most:d}"
        (rows,) = connection.execute(f"SELECT count(*) FROM ({inside}) AS found").fetchone()
        return int(rows)

    def largest_key(self, connection: Any) -> int | None:
        """The largest key that is visible now."""
        asked = f"SELECT max({identifier(self.key)}) FROM {self.quoted}"
        largest: int | None = connection.execute(asked).fetchone()[0]
        return largest

    def last_of_sequence(self, connection: Any) -> int | None:
        """The last key that was handed out, if the key has a sequence and it may be seen."""
        if self.sequence is None:
            return None
        try:
            asked = f"SELECT last_value FROM {self.sequence}"
            return int(connection.execute(asked).fetchone()[0])
        except InsufficientPrivilege:
            return None

    def _range(self, after: int | None, upto: int) -> str:
        key = identifier(self.key)
        above = "" if after is None else f"{key} > {after:d} AND "
        return f"{above}{key} <= {upto:d}"


def find_table(connection: Any, table: str, key: str, where: str) -> PostgresTable:
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
    if not pa.types.is_integer(columns[key].arrow_type) or not filled or not unique:
        raise InvalidInput(
            f"{place}: the key {key!r} must be whole numbers, NOT NULL, with a unique index of its "
            f"own, such as a primary key; it is {columns[key].postgres_type}"
            f"{'' if filled else ', may be NULL'}{'' if unique else ', and has no such index'}"
        )
    return PostgresTable(
        oid=oid,
        key_number=number,
        name=f"{schema}.{name}",
        quoted=quoted,
        key=key,
        columns=columns,
        sequence=sequence,
        place=place,
    )


def fetch_whole(connection: Any, table: str, where: str) -> FetchedRows:
    """All rows of a table or a view, as one statement sees them; each is named by its number."""
    about = connection.execute(_ABOUT, (table,)).fetchone()
    if about is None:
        raise InvalidInput(f"there is no table {table!r} at {where}; create it first")
    oid, schema, name, *_ = about
    columns = columns_of(connection, oid)
    number = Column(name="row", postgres_type="int8", arrow_type=pa.int64())
    content = copy_out(
        connection,
        f"COPY (SELECT row_number() OVER (), {', '.join(c.expression for c in columns.values())} "
        f"FROM {identifier(schema)}.{identifier(name)}) TO STDOUT (FORMAT csv, ENCODING 'UTF8')",
    )
    if not content:
        empty = pa.table({n: pa.array([], c.arrow_type) for n, c in columns.items()})
        return FetchedRows(table=empty, rejected=[], rows=0, last=None)
    place = f"the table {table} of {where}"
    fetched = _decode(content, [number, *columns.values()], place=place)
    kept = pa.table(fetched.table.columns[1:], names=list(columns))  # one may be named "row", too
    return replace(fetched, table=kept)


def columns_of(connection: Any, oid: int) -> dict[str, Column]:
    """The columns of a table."""
    return {
        column: Column(name=column, postgres_type=sort, arrow_type=_arrow_type(sort, modifier))
        for column, sort, modifier in connection.execute(_COLUMNS, (oid,)).fetchall()
    }


def _arrow_type(postgres_type: str, modifier: int) -> pa.DataType:
    if postgres_type == "numeric" and modifier >= 4:
        digits, scale = (modifier - 4) >> 16 & 0xFFFF, modifier - 4 & 0x7FF
        if digits <= _MOST_DIGITS and scale <= digits:  # a negative scale is a large one here
            return pa.decimal128(digits, scale)
    return _EXACT.get(postgres_type, pa.string())


def _decode(content: bytes, columns: Sequence[Column], *, place: str) -> FetchedRows:
    """The rows of a COPY in CSV; the first column is the key, which names a row."""
    names = [f"{number}" for number in range(len(columns))]
    try:
        texts = pyarrow.csv.read_csv(
            io.BytesIO(content),
            read_options=pyarrow.csv.ReadOptions(
                column_names=names,
                use_threads=False,
                block_size=min(len(content) + 1, _LARGEST),  # a row must fit into a block
            ),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
                quoted_strings_can_be_null=False,  # NULL comes bare, an empty text in quotes
            ),
        ).combine_chunks()
        arrays = [text.chunk(0) if text.num_chunks else pa.array([], pa.string()) for text in texts]
        found = usable_rows(
            columns, arrays, lambda row: f"{place}, {columns[0].name} = {arrays[0][row].as_py()}"
        )
    except pa.ArrowInvalid as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidInput(f"{place} sent what cannot be read: {reason}") from problem
    return replace(found, last=int(arrays[0][-1].as_py()))


def usable_rows(
    columns: Sequence[Column], arrays: Sequence[pa.Array], where: Callable[[int], str]
) -> FetchedRows:
    """Rows of texts as PostgreSQL's COPY writes them; those with a value that Arrow lacks apart."""
    parsed = [column.parse(text) for column, text in zip(columns, arrays, strict=True)]
    table = pa.table([values for values, _ in parsed], names=[column.name for column in columns])
    masks = np.array([bad.to_numpy(zero_copy_only=False) for _, bad in parsed])  # columns x rows
    unusable = masks.any(axis=0)
    rejected = []
    for row in np.flatnonzero(unusable).tolist():
        cells = {
            column.name: text[row].as_py() for column, text in zip(columns, arrays, strict=True)
        }
        at = columns[int(masks[:, row].argmax())]
        rejected.append(
            Rejected(
                where=where(row),
                reason=f"{at.name} is {cells[at.name]}, which {at.arrow_type} lacks",
                row=", ".join(f"{name}: {value}" for name, value in cells.items())[:SHOWN],
            )
        )
    return FetchedRows(
        table=table.filter(pa.array(~unusable)) if rejected else table,
        rejected=rejected,
        rows=table.num_rows,
        last=None,
    )
