"""Tables that are read whole: their digest, and the rows of one that are equal to given values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidInput
from dpstream.query.column_types import canonical_type
from dpstream.query.public_tables import KeyTable, WholeTable
from dpstream.rows.column_values import canonical
from dpstream.rows.parse import whole_column
from dpstream.rows.row_batch import id_order
from dpstream.rows.row_ids import group_ids

_NO_KEY = bytes(16)  # of ids that only tell whether two values are equal


def whole_table(name: str, table: pa.Table, *, registry: bool = False) -> WholeTable:
    """A table under a name; columns of types that no expression can use are left out.

    Equal columns and rows, in any order, have equal digests.
    """
    names = table.column_names
    if len(set(names)) < len(names):
        raise InvalidInput(f"the columns of {name} must differ; got {', '.join(names)}")
    columns = {}
    for each in names:
        try:
            canonical_type(table.schema.field(each).type)
        except InvalidInput:  # lists and the like
            continue
        columns[each] = canonical(whole_column(table[each]))
    if not columns:
        raise InvalidInput(f"{name} has no column that can be used; it has {', '.join(names)}")
    return WholeTable(
        name=name,
        digest=_digest(list(columns), list(columns.values()), ordered=False),
        registry=registry,
        table=pa.table(columns),
    )


def key_table(columns: Sequence[pa.Array]) -> KeyTable:
    """Keys in columns, each once, in the order in which they come first.

    >>> key_table([pa.array(["b", "a", "b"])])[:]
    [('b',), ('a',)]
    """
    arrays = [canonical(whole_column(column)) for column in columns]
    if arrays and len(arrays[0]):
        ids = group_ids(arrays, _NO_KEY)
        order = id_order(ids)
        again = (ids[order[1:]] == ids[order[:-1]]).all(axis=1)
        if again.any():
            rows = pa.array(np.sort(order[np.concatenate([[True], ~again])]))
            arrays = [array.take(rows) for array in arrays]
    return KeyTable(arrays, _digest([""] * len(arrays), arrays))


def _digest(names: Sequence[str], columns: Sequence[pa.Array], *, ordered: bool = True) -> str:
    """SHA-256 of names, types and ids of rows: no version of Arrow writes others."""
    kinds = [str(column.type) for column in columns]
    digest = hashlib.sha256(repr([*zip(names, kinds, strict=True), len(columns[0])]).encode())
    ids = group_ids(list(columns), _NO_KEY)
    digest.update(np.ascontiguousarray(ids if ordered else ids[id_order(ids)]).tobytes())
    return digest.hexdigest()
