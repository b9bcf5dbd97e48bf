"""Ids in place of names: 128-bit keyed ids of units and groups, digests of rows.

They are the same on every replay. The caller's 16-byte key never hashes a value itself: it derives
one key per kind of value (a tag), per number of key columns and per number of words in a row, so
that none of these can meet another. Under a secret key two different values share an id with
probability about 2^-128.

A column is hashed in its canonical form (`column_values.canonical`), in parts: the first covers
every row, a later one replaces the rows it names, for values that need a tag of their own. Equal
values have the same tag and the same bytes, whatever type they are stored in; different values
differ in one of the two. The tags are part of every stored id: a number that has been used never
changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpstream.errors import InvalidParameter
from dpstream.query.column_types import canonical_type
from dpstream.query.row_spec import RowSpec
from dpstream.records import Integers, Words
from dpstream.rows.column_values import canonical
from dpstream.rows.number_text import one_number_spelling
from dpstream.rows.row_batch import RowKeys, stepwise
from dpstream.rows.siphash import add_rows, hash_rows, hash_slices

T = TypeVar("T", bound=np.generic)

NULL, BOOLEAN, INTEGER, UNSIGNED, FLOAT, TEXT, BINARY, DECIMAL, DATE = range(9)
LOCAL, ZONED, TIME, DURATION = 16, 20, 24, 28  # plus the unit's number
MICRO, NANO, MILLI, SECOND = range(4)
_COLUMN, _GROUP, _ROW = range(3)
_MOST_DIGITS = Context(prec=100)  # decimal256 has 76


class FixedWidth(NamedTuple):
    """Eight bytes a row; `rows` says which rows these are, None that they are all."""

    tag: int
    words: NDArray[np.uint64]
    rows: NDArray[np.bool_] | None = None


class ByteSlices(NamedTuple):
    """Any number of bytes a row: row i is data[offsets[i] : offsets[i + 1]]."""

    tag: int
    data: NDArray[np.uint8]
    offsets: NDArray[np.int32]


def column_ids(array: pa.Array | pa.ChunkedArray, key: bytes) -> Words:
    """One id per row, two words each: equal for equal values, whatever type holds them.

    - Integers of any width and sign are numbers; booleans are not. Floats are a kind of their own
      (1.0 is not 1); every NaN is one value and -0.0 is 0.0. Decimals are equal as numbers.
    - Text is text in every string type and in a dictionary; bytes are a kind of their own.
    - Timestamps are equal if they are the same instant, in any unit. With a time zone they are
      instants in UTC, the zone's name does not count; without one they are a kind of their own.
    - NULL is a value, the same one in every type, and equal to no other.
    - A type that wraps another (dictionary, run-end, extension) counts as what it wraps; a UUID is
      its text.

    >>> ids = column_ids(pa.array(["a", "b", None, "a"]), bytes(16))
    >>> ids.shape, bool((ids[0] == ids[3]).all()), len(np.unique(ids, axis=0))
    ((4, 2), True, 3)
    """
    canonical_type(array.type)  # refused with rows or without
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    ids = [_array_ids(canonical(chunk), key) for chunk in chunks if len(chunk)]
    return ids[0] if len(ids) == 1 else np.concatenate([np.empty((0, 2), np.uint64), *ids])


def _array_ids(array: pa.Array, key: bytes) -> Words:
    """The ids of a canonical array."""
    out = np.empty((len(array), 2), np.uint64)
    for part in _parts(array):
        part_key = _derived(key, _COLUMN, part.tag)
        if isinstance(part, ByteSlices):
            hash_slices(_fixed(part.data), _fixed(part.offsets), part_key, out)
        elif part.rows is None:
            _digest([part.words], part_key, out)
        else:
            out[part.rows] = _digest([part.words], part_key)
    if array.null_count:
        out[array.is_null().to_numpy(zero_copy_only=False)] = _derived(key, _COLUMN, NULL)
    return out


def _parts(array: pa.Array) -> Iterator[FixedWidth | ByteSlices]:
    """What of a canonical array is hashed; a NULL row's part means nothing."""
    kind = array.type
    if kind in (pa.string(), pa.binary()):
        yield _slices(array, TEXT if kind == pa.string() else BINARY)
    elif pa.types.is_integer(kind):
        words = _values(array, np.uint64)
        yield FixedWidth(INTEGER, words)
        if kind == pa.uint64() and (large := words >= np.uint64(2**63)).any():
            yield FixedWidth(UNSIGNED, words[large], large)
    elif pa.types.is_boolean(kind):
        yield FixedWidth(BOOLEAN, _values(pc.cast(array, pa.uint8()), np.uint8).astype(np.uint64))
    elif pa.types.is_floating(kind):
        yield FixedWidth(FLOAT, _values(array, np.uint64))
    elif pa.types.is_date(kind):
        yield FixedWidth(DATE, _values(array, np.int32).astype(np.int64).view(np.uint64))
    elif pa.types.is_decimal(kind):  # the shortest plain text: 1.50 and 1.5 are equal
        distinct = array.dictionary_encode()
        texts = [plain_decimal(value) for value in distinct.dictionary.to_pylist()]
        yield _slices(pa.array(texts, pa.string()).take(distinct.indices), DECIMAL)
    else:
        yield from _times(array)


def _values(array: pa.Array, kind: Any, extra: int = 0) -> NDArray[Any]:
    """The array's own values as they lie in memory, those of NULL rows too."""
    start, count = array.offset * np.dtype(kind).itemsize, len(array) + extra
    return np.frombuffer(array.buffers()[1], kind, count, start)


def _slices(array: pa.Array, tag: int) -> ByteSlices:
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    return ByteSlices(tag, data, _values(array, np.int32, extra=1))


def plain_decimal(value: Decimal) -> str:
    """The shortest text without an exponent.

    >>> plain_decimal(Decimal("1.50")), plain_decimal(Decimal("1E+2"))
    ('1.5', '100')
    """
    return format(value.normalize(_MOST_DIGITS), "f")


def _times(array: pa.Array) -> Iterator[FixedWidth]:
    """Microseconds; where they do not fit or are too coarse, the one other unit that is exact."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        tag = LOCAL if kind.tz is None else ZONED
    else:
        tag = DURATION if pa.types.is_duration(kind) else TIME
    stored = np.int32 if pa.types.is_time32(kind) else np.int64
    raw: Integers = _values(array, stored).astype(np.int64, copy=False)
    if kind.unit in ("us", "ns"):
        micros = raw if kind.unit == "us" else raw // 1000
        yield FixedWidth(tag + MICRO, micros.view(np.uint64))
        if kind.unit == "ns" and (finer := micros * 1000 != raw).any():
            yield FixedWidth(tag + NANO, raw[finer].view(np.uint64), finer)
        return
    factor = 1000 if kind.unit == "ms" else 1_000_000
    yield FixedWidth(tag + MICRO, (raw * factor).view(np.uint64))
    if (far := _overflows(raw, factor)).any():
        millis = factor // 1000
        yield FixedWidth(tag + MILLI, (raw[far] * millis).view(np.uint64), far)
        if millis > 1 and (farther := _overflows(raw, millis)).any():
            yield FixedWidth(tag + SECOND, raw[farther].view(np.uint64), farther)


def _overflows(values: Integers, factor: int) -> NDArray[np.bool_]:
    """Is values * factor beyond int64? (One limit serves both signs: 1000 does not divide 2^63.)"""
    limit = (2**63 - 1) // factor
    return (values > limit) | (values < -limit)


def group_ids(columns: Sequence[pa.Array | pa.ChunkedArray], key: bytes) -> Words:
    """One id per row of several key columns; that of a single column is its own.

    >>> pair = group_ids([pa.array(["a", "ab"]), pa.array(["bc", "c"])], bytes(16))
    >>> bool((pair[0] == pair[1]).all())
    False
    """
    _check_lengths(columns)
    ids = [column_ids(column, key) for column in columns]
    return ids[0] if len(ids) == 1 else _digest(ids, _derived(key, _GROUP, len(ids)))


def row_digests(words: Sequence[NDArray[Any]], key: bytes) -> Words:
    """One 128-bit digest per row over columns of 8-byte items, [n] or [n, 2], taken bit by bit.

    >>> ids, seconds = np.array([[1, 2], [1, 2]], np.uint64), np.array([3.0, 4.0])
    >>> digests = row_digests([ids, seconds], bytes(16))
    >>> digests.shape, bool((digests[0] == digests[1]).all())
    ((2, 2), False)
    """
    _check_lengths(words)
    count = sum(_width(column) for column in words)
    return _digest(words, _derived(key, _ROW, count))


def multiset_digest(digests: Words) -> tuple[int, int]:
    """The sum of the digests modulo 2^128 and their number: the same in any order.

    Paper: Clarke, Devadas, van Dijk, Gassend, Suh, "Incremental Multiset Hash Functions and Their
    Application to Memory Integrity Checking", 2003.

    >>> multiset_digest(np.array([[2**64 - 1, 0], [1, 0]], np.uint64)) == (2**64, 2)
    True
    """
    low, high = add_rows(_fixed(np.ascontiguousarray(digests)))
    return int(low) | int(high) << 64, len(digests)


def combine(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The multiset digest of both parts together.

    >>> combine((2**128 - 1, 3), (2, 4))
    (1, 7)
    """
    return (one[0] + other[0]) % 2**128, one[1] + other[1]


def _digest(columns: Sequence[NDArray[Any]], key: Words, out: Words | None = None) -> Words:
    """SipHash of each row's words, in the order of the columns."""
    regular = [  # kept until the end: the addresses stay valid; one item for all rows may stay so
        column if column.strides == (0,) else np.ascontiguousarray(column) for column in columns
    ]
    words = [(c, word) for c in regular for word in range(_width(c))]
    addresses = [c.__array_interface__["data"][0] + 8 * word for c, word in words]
    strides = [c.strides[0] for c, _ in words]
    if out is None:
        out = np.empty((len(regular[0]), 2), np.uint64)
    hash_rows(np.array(addresses, np.uint64), np.array(strides, np.uint64), key, out)
    return out


def _check_lengths(columns: Sequence[Any]) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidParameter(
            f"rows are hashed over at least one column, all of one length, got lengths {lengths}; "
            "pass the columns of one batch"
        )


def _width(column: NDArray[Any]) -> int:
    shaped = column.ndim == 1 or column.shape[1:] == (2,)
    if not shaped or column.dtype.itemsize != 8 or column.dtype.kind not in "iufmM":
        raise InvalidParameter(
            f"a column must be [n] or [n, 2] numbers of 8 bytes, got shape {column.shape} of "
            f"{column.dtype}; convert it, for example with astype(np.int64)"
        )
    return column.ndim


@lru_cache(maxsize=256)
def _derived(key: bytes, purpose: int, number: int) -> Words:
    """A key of its own for one purpose: the hash of one word."""
    return _fixed(_digest([np.array([purpose | number << 8], np.uint64)], _key_words(key))[0])


def _key_words(key: bytes) -> Words:
    if len(key) != 16:
        raise InvalidParameter(f"a hash key must have 16 bytes, got {len(key)}; derive one per use")
    return _fixed(np.frombuffer(key, np.uint64))


def _fixed(array: NDArray[T]) -> NDArray[T]:
    """Read-only, as Arrow's buffers mostly are: one compiled version serves both."""
    view = array.view()
    view.flags.writeable = False
    return view


class RowIds:
    """Makes the ids and digests of one run's rows."""

    def __init__(self, query: RowSpec, keys: RowKeys) -> None:
        self._query, self._keys = query, keys

    def units(self, units: pa.Array, periods: Integers) -> Words:
        """The ids of units, each within its period.

        Text that reads as a number counts by its value: 5, 5.0 and " 5" are one unit.
        """
        return self.in_periods(self.names(units), periods)

    @property
    def common(self) -> tuple[bytes, bytes]:
        """Runs with the same give a unit's name, and a group, the same id."""
        return self._keys.units, self._keys.groups

    def names(self, units: pa.Array) -> Words:
        """The ids of units, whatever the period: the same for every run under one secret."""
        return column_ids(one_number_spelling(units), self._keys.units)

    def in_periods(self, ids: Words, periods: Integers) -> Words:
        """The ids of units by name, each within its period."""
        if self._query.periods is None or not len(ids):
            return ids
        if (periods == periods[0]).all():
            known, where = periods[:1], None
        else:
            known, where = np.unique(periods, return_inverse=True)
        masks = row_digests([known.astype(np.int64)], self._keys.periods)
        return ids ^ (masks if where is None else masks[where])  # in each period another unit

    def groups(self, keys: pa.Table, count: int) -> Words:
        """The ids of `count` rows' groups; without key columns all rows are one group."""
        if not self._query.keys:
            return np.zeros((count, 2), np.uint64)
        return group_ids(keys.columns, self._keys.groups)

    def of_columns(self, columns: pa.Table, count: int) -> Words:
        """The ids of `count` rows of some columns, of this run alone; without any, they are 0."""
        if columns.num_columns == 0:
            return np.zeros((count, 2), np.uint64)
        return group_ids(columns.columns, self._keys.digests)

    def values(self, column: pa.Array, one_in: int = 1) -> Words:
        """The ids of values that are counted, of this run alone; NULL is 0.

        So are all values but one in `one_in`, a power of 2: their ids say which.
        """
        ids = column_ids(column, self._keys.digests)
        ids[column.is_null().to_numpy(zero_copy_only=False)] = 0
        ids[ids[:, 1] >> np.uint64(32) & np.uint64(one_in - 1) > 0] = 0
        return ids

    def periods(self, moments: Integers) -> Integers:
        """The number of each row's period."""
        ticks = self._query.periods
        if ticks is None:
            return np.broadcast_to(np.int64(0), len(moments))
        return stepwise(ticks.before, moments)

    def digests(self, content: list[Any]) -> Words:
        """One digest of each row, from columns that say all of it."""
        return row_digests(content, self._keys.digests)
