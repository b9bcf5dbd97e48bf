"""One type for a column as long as a run lives: 5 and "5" must not become two users."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.stages import parse


def usual_type(kind: pa.DataType) -> pa.DataType:
    """The type in which values of a kind are kept, whatever their width."""
    if pa.types.is_dictionary(kind):
        return usual_type(kind.value_type)
    if parse.is_text(kind):
        return pa.string()
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind


def in_type(array: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """A column in the type that it has in this run."""
    if array.type.equals(kind):
        return array
    if pa.types.is_null(array.type):  # an empty chunk, or one without a value
        return pa.nulls(len(array), kind)
    if not usual_type(array.type).equals(kind):  # by the types alone: no row can cause this
        raise InvalidInput(
            f"column {name!r} was {kind} when this query began and is {array.type} now; give "
            "all files one type"
        )
    return pc.cast(array, kind)
