"""Rows of a source as one table, to be looked at before a query is written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.connectors.registry import open_source
from dpstream.errors import InvalidParameter, UnexpectedResult
from dpstream.session.start import SourceSpec

_TYPES = (pa.int64(), pa.float64(), pa.date32(), pa.timestamp("us"))
"""What a column of texts may be, the narrowest first."""
_NAME = r"^[+-]?(0\d|\d{16})"
"""Names in digits, which are no floats: 007, or more digits than those have."""


def read(
    source: SourceSpec,
    *,
    columns: Sequence[str] | None = None,
    rows: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> pa.Table:
    """The rows of files, or of a table in memory, as queries read them: for your eyes alone.

    `columns` and `rows`: these, and so many, instead of all. A column of texts whose values are all
    numbers, dates or times becomes one of them; an empty field is null. Lines that cannot be read
    are left out, with a warning that says where the first one is. Nothing is charged, and nothing
    is private: what comes back are the data themselves. Series for `release` are read so, too.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "visits.csv")
    >>> _ = path.write_text("hour,visits\\n2026-01-01 00:00:00,5\\n2026-01-01 01:00:00,7\\n")
    >>> read(path)["visits"].to_pylist()
    [5, 7]
    """
    if rows is not None and (type(rows) is not int or rows < 1):
        raise InvalidParameter(f"rows must be a whole number of at least 1; got {rows!r}")
    if isinstance(columns, str) or (columns is not None and not columns):
        raise InvalidParameter(f"columns must be a list of names; got {columns!r:.80}")
    with closing(open_source(source, options=options)) as opened:
        if not opened.bounded:
            raise InvalidParameter(
                "read takes what ends: files or a table; a server, a pipe or a growing table goes "
                "on for ever, and its rows are read by a query; where it has the option until, "
                "that names an end"
            )
        tables, left, wrong = [], rows, list[str]()
        for partition in opened.partitions():
            position, done = None, False
            while not done and left != 0:
                batch = opened.read(partition, position, columns=columns)
                position, done = batch.position, batch.done
                wrong += [each.where for each in batch.rejected]
                taken = batch.table.slice(0, left)
                left = None if left is None else left - taken.num_rows
                tables.append(taken)
    if wrong:
        warnings.warn(
            f"{len(wrong)} rows could not be read and are left out; the first is {wrong[0]}",
            UnexpectedResult,
            stacklevel=2,
        )
    if not tables:
        return pa.table({})
    table = pa.concat_tables(tables, promote_options="permissive")
    return pa.table({name: _typed(table[name]) for name in table.column_names})


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts as what all of its values are; a number is one if it is written as one."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    texts = pc.if_else(pc.equal(column, ""), None, column)
    if texts.null_count == len(texts):
        return column
    for kind in _TYPES:
        try:
            found = texts.cast(kind)
        except pa.ArrowException:
            continue
        if kind == pa.int64() and not pc.all(pc.equal(found.cast(texts.type), texts)).as_py():
            return column  # 007 is a name
        if kind == pa.float64() and pc.any(pc.match_substring_regex(texts, _NAME)).as_py():
            return column
        return found
    return column
