"""A column's values in the one type that the column has as long as a run lives.

What comes in another type is cast by value, row by row: a value that the type cannot hold exactly
costs its own row. Equal values then have equal bytes, so what is hashed and what is published are
one and the same column: no row shows its own spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.query.column_types import Types, canonical_type, is_number, is_text
from dpstream.query.per_unit import ROW, NoRows
from dpstream.query.public_tables import KeyTable
from dpstream.query.row_spec import RowSpec
from dpstream.query.windows import within_calendar
from dpstream.rows import parse
from dpstream.rows.number_text import number_text, one_number_spelling

_OF_TIME = (pa.types.is_time, pa.types.is_timestamp, pa.types.is_duration)


def canonical(array: pa.Array) -> pa.Array:
    """A column in its canonical type, with one form for equal values.

    >>> canonical(pa.array([-0.0, 1.5], pa.float32())).to_pylist()
    [0.0, 1.5]
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return _uuid_texts(array.storage)
        inner = canonical(array.storage)
        return pc.not_equal(inner, 0) if kind.extension_name == "arrow.bool8" else inner
    if pa.types.is_dictionary(kind):
        return canonical(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return canonical(pc.run_end_decode(array))
    target = canonical_type(kind)
    if pa.types.is_floating(kind):
        return _one_zero(array)
    if kind == pa.date64():
        return _days(array)
    return array if kind.equals(target) else pc.cast(array, target)


def in_type(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, parse.Mask]:
    """A column in the type that it has in this run, and the rows whose value that cannot hold.

    Those are NULL in the column; of a type whose values never become this one, all that have one.
    """
    fine = np.zeros(len(array), bool)
    if array.null_count == len(array):  # an empty chunk, or one without a value
        return pa.nulls(len(array), kind), fine
    if never_becomes(array.type, kind):
        return pa.nulls(len(array), kind), np.asarray(array.is_valid(), bool)
    array = canonical(array)
    values = array if array.type.equals(kind) else _by_value(array, kind)
    if values is None or values is array:
        return array, fine
    lost = np.asarray(pc.and_(values.is_null(), array.is_valid()), bool)
    if is_text(array.type):  # an empty cell has no value
        lost &= ~np.asarray(pc.fill_null(pc.equal(array, ""), False), bool)
    return values, lost


def unit_in_type(unit: Any, kind: pa.DataType, name: str) -> pa.Array:
    """A unit that somebody names, as a column of its type."""
    try:
        value, lost = in_type(pa.array([unit]), kind)
    except (InvalidInput, pa.ArrowException, OverflowError):
        value, lost = pa.nulls(1, kind), np.ones(1, bool)
    if lost.any():
        raise InvalidInput(f"the unit must fit the type of column {name!r}, {kind}; got {unit!r}")
    return value


def never_becomes(old: pa.DataType, kind: pa.DataType) -> bool:
    """Is no value of a type one of another type? By the types alone: no row can cause this."""
    try:
        old = canonical_type(old)
    except InvalidInput:  # lists and the like
        return True
    return not old.equals(kind) and _by_value(pa.array([], old), kind) is None


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """A column's values as Python has them; those that it lacks, such as far dates, as text."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_python_value(value) for value in column]
    return values


def _python_value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        if is_text(value.type):
            return value.as_buffer().to_pybytes().decode(errors="replace")
        with suppress(pa.ArrowException):
            return value.cast(pa.string()).as_py()
        return f"a {value.type} that cannot be shown"


def unwritable(keys: pa.Array) -> parse.Mask:
    """Where a key has a value that some sink cannot write, whatever sinks this run has.

    All of them write dates and instants of the years 1 to 9999, times within a day, lengths of time
    in 62 bits of microseconds, decimals within their precision, and every other kind of value.
    """
    kind = keys.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros, readable = parse.instants(keys, "UTC")
        return np.asarray(keys.is_valid(), bool) & ~(readable & within_calendar(micros))
    if pa.types.is_duration(kind):
        return ~parse.fits_micros(keys)
    if pa.types.is_time(kind) or pa.types.is_decimal(kind):
        return parse.invalid(keys)
    return np.zeros(len(keys), bool)


def _by_value(array: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """By value; NULL where the type has no such value, None if it never has."""
    old = array.type
    if is_text(kind):
        return _texts(array)
    if is_text(old):
        return _read(array, kind)
    if is_number(old) and is_number(kind):
        return _numbers(array, kind)
    zones = [getattr(each, "tz", None) is None for each in (old, kind)]
    same = any(holds(old) and holds(kind) for holds in _OF_TIME)
    return parse.cast_each(array, kind) if same and zones[0] == zones[1] else None


def _numbers(array: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """One kind of numbers as another, where that is exact."""
    if pa.types.is_floating(array.type) or pa.types.is_floating(kind):
        if pa.types.is_decimal(array.type) or pa.types.is_decimal(kind):
            return None  # 0.1 is no binary fraction
        valid = np.asarray(array.is_valid(), bool)
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        if pa.types.is_floating(kind):
            numbers = values.astype(np.float64)
            inside = numbers < float(2 ** (64 if pa.types.is_uint64(array.type) else 63))
            exact = inside & (np.where(inside, numbers, 0).astype(values.dtype) == values)
        else:
            unsigned = pa.types.is_uint64(kind)
            least, most = (0.0, 2.0**64) if unsigned else (-(2.0**63), 2.0**63)
            with np.errstate(invalid="ignore"):
                exact = (values >= least) & (values < most) & (np.floor(values) == values)
            numbers = np.where(exact, values, 0).astype(np.uint64 if unsigned else np.int64)
        return pa.array(numbers, kind, mask=~(exact & valid), from_pandas=False)
    if pa.types.is_integer(array.type) and pa.types.is_decimal(kind):
        array = pc.cast(array, pa.string())  # Arrow asks for room for the largest integer
    return parse.cast_each(array, kind)


def _texts(array: pa.Array) -> pa.Array | None:
    """Numbers in their one spelling, true and false."""
    if pa.types.is_boolean(array.type) or pa.types.is_integer(array.type):
        return pc.cast(array, pa.string())
    return one_number_spelling(pc.cast(array, pa.string())) if is_number(array.type) else None


def _read(array: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """What text says; NULL where it says nothing of the kind."""
    text = pc.utf8_trim_whitespace(array)
    if is_number(kind):
        numbers = parse.cast_each(_plain_numbers(text), kind)
        if pa.types.is_floating(kind):
            numbers = pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, kind))
        return numbers
    if pa.types.is_timestamp(kind):
        micros, readable = parse.written_times(text, "UTC")
        instants = pa.array(micros, pa.int64(), mask=~readable).view(pa.timestamp("us", kind.tz))
        return parse.cast_each(instants, kind)
    if pa.types.is_boolean(kind):
        text = pc.utf8_lower(text)
        return parse.cast_each(_where(text, r"^(true|false)$"), kind)
    if pa.types.is_date(kind):
        return parse.cast_each(_where(text, r"^\d{4}-\d\d-\d\d$"), kind)
    if pa.types.is_time(kind):
        text = _where(text, r"^\d\d:\d\d(:\d\d(\.\d+)?)?$")
        day = pc.binary_join_element_wise("1970-01-01T", text, "")
        return parse.cast_each(parse.cast_each(day, pa.timestamp(kind.unit)), kind)
    return None


def _plain_numbers(text: pa.Array) -> pa.Array:
    """Numbers in their one spelling, also those with a plus or with zeros before them."""
    text = pc.replace_substring_regex(text, r"^\+", "")
    text = one_number_spelling(pc.replace_substring_regex(text, r"^(-?)0+(\d)", r"\1\2"))
    return _where(text, r"^-?\d+(\.\d+)?(e-?\d{1,4})?$")


def _where(text: pa.Array, form: str) -> pa.Array:
    """NULL where a text has another form."""
    return pc.if_else(pc.match_substring_regex(text, form), text, pa.scalar(None, pa.string()))


def _one_zero(array: pa.Array) -> pa.Array:
    """Every NaN is one value, and -0.0 is 0.0."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        values = array.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
    values[np.isnan(values)] = np.nan
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    return pa.array(values, pa.float64(), mask=nulls, from_pandas=False)


def _days(array: pa.Array) -> pa.Array:
    """The days of milliseconds that may lie within them; Arrow would refuse those."""
    millis = pc.fill_null(array.view(pa.int64()), 0).to_numpy(zero_copy_only=False)
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    days = np.clip(millis // 86_400_000, -(2**31), 2**31 - 1).astype(np.int32)
    return pa.array(days, pa.int32(), mask=nulls).view(pa.date32())


def _uuid_texts(storage: pa.Array) -> pa.Array:
    """As RFC 9562 writes them: 8-4-4-4-12 digits."""
    few = pc.cast(storage, pa.binary()).dictionary_encode()
    texts = [str(UUID(bytes=item)) for item in few.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(few.indices)


def types_of(query: RowSpec, source: Types | None) -> Types:
    """The types of unit and keys over a source with these columns; one that tells none has text.

    What the query declares goes before what the source says.
    """
    names, prepare = query.typed_columns, query.prepare
    columns = names if prepare is None else prepare.columns
    kinds = {name: pa.string() if source is None else source[name] for name in columns}
    kinds |= {name: kind for name, kind in query.declared.items() if name in kinds}
    if prepare is not None:  # what it makes of nothing has the types of what it makes
        made = prepare(pa.schema(list(kinds.items())).empty_table())
        prepared = [*made.schema, *_finished(query, made).schema]
        kinds = {field.name: field.type for field in prepared if field.name in names}
    return {name: canonical_type(kind, name) for name, kind in kinds.items()}


def _finished(query: RowSpec, made: pa.Table) -> pa.Table:
    """What inner rows make of no rows, where the rows of each unit are grouped."""
    per_unit = query.per_unit
    if per_unit is None:
        return pa.table({})
    kinds = {name: made.schema.field(name).type for name in per_unit.held}
    for name in per_unit.numbers:
        if not pa.types.is_integer(kinds[name]):
            kinds[name] = pa.float64()
    held = pa.schema(list(kinds.items())).empty_table()
    edge = None if query.time_column is None else 0
    inner = per_unit.inner(NoRows(keys=held), (edge, edge), None)[1]
    return per_unit.finish(inner.append_column(ROW, pa.array([], pa.int64())))


def types_before_rows(query: RowSpec) -> Types:
    """The same before any source has told its types: text, or what a list of public keys holds."""
    known = types_of(query, None)
    for number, name in enumerate(query.keys if query.public_groups is not None else ()):
        computed = query.prepare is not None and name not in query.prepare.columns
        if name not in query.declared and not computed:
            known[name] = canonical_type(_public_column(query, number, name).type, name)
    return known


def _public_column(query: RowSpec, number: int, name: str) -> pa.Array:
    """The public keys of one column, in the type that they are listed in."""
    groups = query.public_groups
    if isinstance(groups, KeyTable):
        return groups.columns[number]
    return _array([row[number] for row in groups or ()], name)


def public_keys(query: RowSpec, number: int, kind: pa.DataType) -> pa.Array:
    """The public keys of one column in its type: by value, as rows are read."""
    groups, name = query.public_groups, query.keys[number]
    if isinstance(groups, KeyTable):
        column = groups.columns[number]
        if is_text(kind) and pa.types.is_temporal(column.type):
            column = column.cast(pa.string())  # days as text sources write them: 2024-05-01
        return _fit(column, column, kind, name)
    listed = [row[number] for row in groups or ()]
    if is_text(kind):
        return pa.array([text_of(item) for item in listed], kind)
    try:
        keys = pa.array(listed, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        keys = _array(listed, name)
    return _fit(keys, listed, kind, name)


def _fit(keys: pa.Array, listed: Any, kind: pa.DataType, name: str) -> pa.Array:
    keys, lost = in_type(keys, kind)
    if lost.any():
        wrong = listed[int(lost.argmax())]
        raise InvalidInput(
            f"public_groups of column {name!r} must fit its type {kind}; got {wrong!r}"
        )
    return keys


def _array(listed: Sequence[Any], name: str) -> pa.Array:
    try:
        return pa.array(listed)
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInput(
            f"public_groups of column {name!r} must be of one type: {error}; or declare the "
            f"column's: column_types={{{name!r}: 'STRING'}}"
        ) from None


def text_of(item: Any) -> str | None:
    """As text sources write it: numbers in their one spelling."""
    if item is None or isinstance(item, str):
        return item
    if isinstance(item, bool | np.bool_):
        return "true" if item else "false"
    return number_text(str(item)) if isinstance(item, int | float | Decimal) else str(item)
