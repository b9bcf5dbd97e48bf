"""Ids as text, for the tests of hashing."""

import pyarrow as pa

from dpstream.rows.row_ids import column_ids

KEY = bytes(range(16))


def ids(values, kind=None):
    """A column's ids as hexadecimal text."""
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
    return [row.tobytes().hex() for row in column_ids(array, KEY)]
