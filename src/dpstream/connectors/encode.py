"""Releases as bytes, and what they say of themselves.

The bytes are a function of the table alone, so a replay writes the same file.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.errors import InvalidInput, StateError


def parquet(table: pa.Table) -> bytes:
    """A Parquet file; how the table was chunked does not matter.

    Without dictionaries: keys do not repeat within a release, and what does Snappy finds.
    """
    file = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), file, compression="snappy", use_dictionary=False)
    written: bytes = file.getvalue().to_pybytes()
    return written


def csv(table: pa.Table) -> bytes:
    """CSV with a header; times in ISO 8601, bytes in hexadecimal, lists as JSON, a null is an empty
    field."""
    file = io.BytesIO()
    columns = [hexadecimal(simple_column(column)) for column in table.combine_chunks().columns]
    columns = [_json(each) if pa.types.is_list(each.type) else each for each in columns]
    options = pyarrow.csv.WriteOptions(quoting_header="needed")
    texts = pa.table(columns, names=table.column_names)
    pyarrow.csv.write_csv(texts, file, write_options=options)
    return file.getvalue()


def jsonl(table: pa.Table) -> bytes:
    """One JSON object a row; times in ISO 8601, bytes in hexadecimal, NaN and infinity are null."""
    if table.num_rows == 0:
        return b""
    if table.num_columns == 0:
        return b"{}\n" * int(table.num_rows)
    parts: list[pa.ChunkedArray | str] = []
    for i, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        parts += [f"{', ' if i else '{'}{json.dumps(name, ensure_ascii=False)}: ", _json(column)]
    lines = pc.binary_join_element_wise(*parts, "}", "")
    texts: list[str] = lines.to_pylist()
    return "\n".join([*texts, ""]).encode()


KEY_COLUMN = "upsert_key"
"""The column of a table's rows that are replaced by newer ones of the same key."""
ENCODERS: dict[str, Callable[[pa.Table], bytes]] = {"parquet": parquet, "csv": csv, "jsonl": jsonl}


def _json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Each value as JSON text."""
    column = hexadecimal(simple_column(column))
    kind = column.type
    if pa.types.is_floating(kind):
        finite = pc.fill_null(pc.is_finite(column), False)
        text = pc.if_else(finite, column.cast(pa.string()), "null")
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        text = column.cast(pa.string())
    elif pa.types.is_string(kind):
        text = _quoted(column)
    else:
        encode = partial(json.dumps, ensure_ascii=False, default=str)  # a list, too
        text = pa.chunked_array([pa.array(map(encode, column.to_pylist()), pa.string())])
    return pc.fill_null(text, "null")


def _quoted(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """JSON strings; only those with a character that needs an escape are looked at one by one."""
    quoted = pc.binary_join_element_wise('"', column, '"', "")
    special = pc.fill_null(pc.match_substring_regex(column, r'["\\\x00-\x1f\x7f]'), False)
    if not pc.any(special).as_py():
        return quoted
    texts = [json.dumps(text, ensure_ascii=False) for text in column.filter(special).to_pylist()]
    return pc.replace_with_mask(quoted, special.combine_chunks(), pa.array(texts, pa.string()))


def hexadecimal(column: pa.ChunkedArray, prefix: str = "") -> pa.ChunkedArray:
    """Bytes as text, whatever they are; other values as they are."""
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return column
    texts = [None if value is None else f"{prefix}{value.hex()}" for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])


def simple_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as ISO 8601 text, lengths of time as counts of their unit, large strings as strings."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_timestamp(column.type):
        zone = column.type.tz
        utc = column.cast(pa.timestamp(column.type.unit, "UTC" if zone else None))
        few = utc.combine_chunks().dictionary_encode()  # a release has few different times
        form = "%Y-%m-%dT%H:%M:%SZ" if zone else "%Y-%m-%dT%H:%M:%S"
        return pa.chunked_array([pc.strftime(few.dictionary, format=form).take(few.indices)])
    if pa.types.is_duration(column.type):
        return column.cast(pa.int64())
    if pa.types.is_temporal(column.type):
        return column.cast(pa.string())
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    return column


def release_facts(table: pa.Table) -> dict[str, Any]:
    """What a release says of itself in its metadata: query, run, window, times and numbers."""
    facts: dict[str, Any] = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
    return facts


def run_of(table: pa.Table) -> str:
    """The tag of the run that published a release; "" if it does not say."""
    return str(release_facts(table).get("run", ""))


def row_keys(query: str, window: int, table: pa.Table, keys: Sequence[str]) -> list[str]:
    """What tells each row of a release from all others of its query: a JSON object.

    >>> row_keys("clicks", 4, pa.table({"page": ["/a"], "n": [1.0]}), ["page"])
    ['{"query": "clicks", "window": 4, "page": "/a"}']
    """
    texts = {}
    for name in keys:
        column = table[name]  # NaN and the infinities have no place in JSON but as text
        texts[name] = column.cast(pa.string()) if pa.types.is_floating(column.type) else column
    head = json.dumps({"query": query, "window": window}, ensure_ascii=False)[:-1]
    rows = jsonl(pa.table(texts)).decode().split("\n")[:-1] if keys else ["{}"] * len(table)
    return [f"{head}, {row[1:]}" if keys else f"{head}}}" for row in rows]


def with_key_column(table: pa.Table, row_keys: Sequence[str] = ()) -> pa.Table:
    """The table with the digest of each row's key: of any length, a key has 32 characters."""
    digests = [hashlib.sha256(key.encode()).hexdigest()[:32] for key in row_keys]
    if KEY_COLUMN in table.column_names:
        raise InvalidInput(f"the sink has its own column {KEY_COLUMN!r}; rename that of the query")
    return table.append_column(KEY_COLUMN, pa.array(digests, pa.string()))


def another_run(place: object, query: str, *, files: str = "") -> StateError:
    """A sink that holds another run's releases would take the new ones for old, and lose them.

    `files`: what to move away, where the sink knows that.
    """
    return StateError(
        f"{place} holds releases of {query!r} from another run; use another sink: a run that "
        "begins, or takes over from another, numbers its windows anew; name a new place ([sink] to "
        "= ... in the pipeline file, --sink), and the old releases stay where they are; or move "
        f"{files or f'all releases of {query!r}'} away, and start again; but if the state of that "
        "run is lost, put a backup of it back (dpstream state restore): it goes on here, and is "
        "not charged again"
    )


def with_numbers(table: pa.Table, window: int, trigger: int) -> pa.Table:
    """The table behind the columns `window` and `release`.

    `release` counts the releases of a window from 1, where the table's metadata tells; otherwise
    it is the trigger's number. A name that the table has itself becomes `window_number` or
    `release_number`.
    """
    numbers = {"window": window, "release": release_facts(table).get("release_index") or trigger}
    for i, (name, number) in enumerate(numbers.items()):
        if name in table.column_names:
            name = f"{name}_number"
        if name in table.column_names:
            raise InvalidInput(f"the sink has its own column {name!r}; rename that of the query")
        column = pa.array([number], pa.int64()).take(pa.array([0] * table.num_rows, pa.int32()))
        table = table.add_column(i, name, column)
    return table
