"""One type for a column as long as a run lives.

A query's unit and keys have types that are public and fixed before its first release: declared, or
those of the first schema that is read. `column_values` casts what comes in another type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa

from dpstream.errors import InvalidInput, InvalidParameter

Types = dict[str, pa.DataType]

UTC = pa.timestamp("us", tz="UTC")
NAMES: dict[str, pa.DataType] = {
    "INT64": pa.int64(),
    "FLOAT64": pa.float64(),
    "NUMERIC": pa.decimal128(38, 9),
    "BOOL": pa.bool_(),
    "STRING": pa.string(),
    "BYTES": pa.binary(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "DATETIME": pa.timestamp("us"),
    "TIMESTAMP": UTC,
}
"""Types of columns as BigQuery names them; DATETIME has no time zone, TIMESTAMP is an instant."""

_WIDTHS = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_AS_THEY_ARE = (pa.types.is_boolean, pa.types.is_time, pa.types.is_timestamp, pa.types.is_duration)


def is_text(kind: pa.DataType) -> bool:
    """Is it a column of strings?"""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_number(kind: pa.DataType) -> bool:
    """Is it a column of integers, floats or decimals?"""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(holds(kind) for holds in tests)


def named_type(given: Any) -> pa.DataType:
    """The type that a name stands for: BigQuery's, or Arrow's, or an Arrow type itself.

    >>> named_type("INT64"), named_type("float32"), named_type(pa.date64())
    (DataType(int64), DataType(double), DataType(date32[day]))
    """
    kind = NAMES.get(str(given).upper()) if isinstance(given, str) else given
    if kind is None:
        try:
            kind = pa.type_for_alias(given)
        except ValueError:
            raise InvalidParameter(
                f"column_types knows no type {given!r}; use one of {', '.join(NAMES)}, or a type "
                "of Arrow"
            ) from None
    if not isinstance(kind, pa.DataType):
        raise InvalidParameter(f"column_types takes names of types, or types of Arrow; got {kind}")
    try:
        return canonical_type(kind)
    except InvalidInput as error:
        raise InvalidParameter(f"column_types: {error}") from None


def declared_types(given: Any) -> tuple[tuple[str, pa.DataType], ...]:
    """Columns and their types, by name: of a mapping, or of pairs."""
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        raise InvalidParameter(
            f"column_types must be columns and their types, such as {{'user': 'INT64'}}; got "
            f"{given!r}"
        ) from None
    return tuple((str(name), named_type(kind)) for name, kind in sorted(pairs.items()))


def canonical_type(kind: pa.DataType, name: str = "") -> pa.DataType:
    """The type in which a column's values are hashed and published, whatever type holds them.

    >>> canonical_type(pa.date64()), canonical_type(pa.dictionary(pa.int8(), pa.float32()))
    (DataType(date32[day]), DataType(double))
    """
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return pa.string()
        if kind.extension_name == "arrow.bool8":
            return pa.bool_()
        return canonical_type(kind.storage_type, name)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return canonical_type(kind.value_type, name)
    return _canonical_type(kind, name)


@lru_cache(maxsize=256)  # every chunk asks; types of extensions need not be hashable
def _canonical_type(kind: pa.DataType, name: str) -> pa.DataType:
    """Of a type that holds its values itself."""
    if is_text(kind) or pa.types.is_null(kind):  # no value: text is missing
        return pa.string()
    if any(holds(kind) for holds in _WIDTHS) or kind == pa.binary_view():
        return pa.binary()
    if pa.types.is_integer(kind):
        return kind if pa.types.is_uint64(kind) else pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_decimal(kind):
        digits, scale = kind.precision - min(kind.scale, 0), max(kind.scale, 0)
        wide = pa.types.is_decimal256(kind) or digits > 38
        return pa.decimal256(digits, scale) if wide else pa.decimal128(digits, scale)
    if any(holds(kind) for holds in _AS_THEY_ARE):
        return kind
    column = f"column {name!r} has the type {kind}, which" if name else f"the type {kind}"
    raise InvalidInput(
        f"{column} cannot name a unit or a group: that takes a single value, such as a number, "
        "text, a date or a time; use one of its fields, or cast it"
    )
