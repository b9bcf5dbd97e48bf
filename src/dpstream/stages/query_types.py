"""The types of a query's unit and keys: declared, told by the first schema, or text."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidInput
from dpstream.stages import parse
from dpstream.stages.column_types import Types, canonical_type
from dpstream.stages.column_values import in_type
from dpstream.stages.number_text import number_text
from dpstream.stages.query import Query


def types_of(query: Query, source: Types | None) -> Types:
    """The types of unit and keys over a source with these columns; one that tells none has text.

    What the query declares goes before what the source says.
    """
    names, prepare = (query.unit, *query.keys), query.prepare
    columns = names if prepare is None else prepare.columns
    kinds = {name: pa.string() if source is None else source[name] for name in columns}
    kinds |= {name: kind for name, kind in query.declared.items() if name in kinds}
    if prepare is not None:  # what it makes of nothing has the types of what it makes
        made = prepare(pa.schema(list(kinds.items())).empty_table()).schema
        kinds = {field.name: field.type for field in made if field.name in names}
    return {name: canonical_type(kind, name) for name, kind in kinds.items()}


def types_before_rows(query: Query) -> Types:
    """The same before any source has told its types: text, or what a list of public keys holds."""
    known = types_of(query, None)
    for number, name in enumerate(query.keys if query.public_keys is not None else ()):
        computed = query.prepare is not None and name not in query.prepare.columns
        if name not in query.declared and not computed:
            listed = [row[number] for row in query.public_keys or ()]
            known[name] = canonical_type(_array(listed, name).type, name)
    return known


def listed_keys(listed: Sequence[Any], kind: pa.DataType, name: str) -> pa.Array:
    """Public keys of one column in its type: by value, as rows are read."""
    if parse.is_text(kind):
        return pa.array([_text(item) for item in listed], kind)
    try:
        found = pa.array(listed, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        found = _array(listed, name)
    made, lost = in_type(found, kind, name)
    if lost.any():
        wrong = listed[int(lost.argmax())]
        raise InvalidInput(
            f"public_keys of column {name!r} must fit its type {kind}; got {wrong!r}"
        )
    return made


def _array(listed: Sequence[Any], name: str) -> pa.Array:
    try:
        return pa.array(listed)
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInput(
            f"public_keys of column {name!r} must be of one type: {error}; or declare the "
            f"column's: column_types={{{name!r}: 'STRING'}}"
        ) from None


def _text(item: Any) -> str | None:
    """As text sources write it: numbers in their one spelling."""
    if item is None or isinstance(item, str):
        return item
    if isinstance(item, bool):
        return "true" if item else "false"
    return number_text(str(item)) if isinstance(item, int | float | Decimal) else str(item)
