"""128-bit keyed ids of units and groups, and digests of rows: the same on every replay.

The caller's 16-byte key never hashes a value itself. It derives one key per kind of value
(`canonical.py`), per number of key columns and per number of words in a row, so that none of these
can meet another. Under a secret key two different values share an id with probability about
2^-128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpstream.errors import InvalidParameter
from dpstream.records import Words
from dpstream.stages.canonical import NULL, Fixed, Part, rule
from dpstream.stages.siphash import add_rows, hash_rows, hash_slices

T = TypeVar("T", bound=np.generic)

_COLUMN, _GROUP, _ROW = range(3)


def column_ids(array: pa.Array | pa.ChunkedArray, key: bytes) -> Words:
    """One id per row, two words each: equal for equal values, whatever type holds them.

    - Integers of any width and sign are numbers; booleans are not. Floats are a kind of their own
      (1.0 is not 1); every NaN is one value and -0.0 is 0.0. Decimals are equal as numbers.
    - Text is text in every string type and in a dictionary; bytes are a kind of their own.
    - Timestamps are equal if they are the same instant, in any unit. With a time zone they are
      instants in UTC, the zone's name does not count; without one they are a kind of their own.
    - NULL is a value, the same one in every type, and equal to no other.
    - A type that wraps another (dictionary, run-end, extension) counts as what it wraps.

    >>> ids = column_ids(pa.array(["a", "b", None, "a"]), bytes(16))
    >>> ids.shape, bool((ids[0] == ids[3]).all()), len(np.unique(ids, axis=0))
    ((4, 2), True, 3)
    """
    words = _key_words(key)
    rule(_unwrapped(array.type))  # refused with rows or without
    out = np.empty((len(array), 2), np.uint64)
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    known = _Dictionary(words)
    start = 0
    for chunk in chunks:
        if len(chunk):
            _fill(chunk, words, known, out[start : start + len(chunk)])
        start += len(chunk)
    return out


def group_ids(columns: Sequence[pa.Array | pa.ChunkedArray], key: bytes) -> Words:
    """One id per row of several key columns; that of a single column is its own.

    >>> pair = group_ids([pa.array(["a", "ab"]), pa.array(["bc", "c"])], bytes(16))
    >>> bool((pair[0] == pair[1]).all())
    False
    """
    _check_lengths(columns)
    ids = [column_ids(column, key) for column in columns]
    return ids[0] if len(ids) == 1 else _digest(ids, _derived(_key_words(key), _GROUP, len(ids)))


def row_digests(words: Sequence[NDArray[Any]], key: bytes) -> Words:
    """One 128-bit digest per row over columns of 8-byte items, [n] or [n, 2], taken bit by bit.

    >>> ids, seconds = np.array([[1, 2], [1, 2]], np.uint64), np.array([3.0, 4.0])
    >>> digests = row_digests([ids, seconds], bytes(16))
    >>> digests.shape, bool((digests[0] == digests[1]).all())
    ((2, 2), False)
    """
    _check_lengths(words)
    count = sum(_width(column) for column in words)
    return _digest(words, _derived(_key_words(key), _ROW, count))


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


class _Dictionary:
    """The ids of the dictionary seen last: the chunks of a column mostly share one."""

    def __init__(self, key: Words) -> None:
        self.key = key
        self.values: pa.Array | None = None
        self.ids = np.empty((0, 2), np.uint64)

    def of(self, values: pa.Array) -> Words:
        if self.values is None or not values.equals(self.values):
            self.ids = np.empty((len(values), 2), np.uint64)
            _fill(values, self.key, _Dictionary(self.key), self.ids)
            self.values = values
        return self.ids


def _unwrapped(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves."""
    if isinstance(kind, pa.BaseExtensionType):
        return _unwrapped(kind.storage_type)
    wrapped = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)
    return _unwrapped(kind.value_type) if wrapped else kind


def _fill(array: pa.Array, key: Words, known: _Dictionary, out: Words) -> None:
    """Write the ids of an array that has rows."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _fill(array.storage, key, known, out)
    elif pa.types.is_run_end_encoded(kind):
        _fill(pc.run_end_decode(array), key, known, out)
    elif pa.types.is_null(kind) or (
        pa.types.is_dictionary(kind) and array.null_count == len(array)
    ):
        out[:] = _derived(key, _COLUMN, NULL)
    elif pa.types.is_dictionary(kind) and len(array.dictionary) > len(array):
        _fill(array.dictionary_decode(), key, known, out)
    elif pa.types.is_dictionary(kind):
        places = pc.cast(pc.fill_null(array.indices, 0), pa.int64()).to_numpy()
        np.take(known.of(array.dictionary), places, axis=0, out=out, mode="clip")
        _fill_nulls(array.indices, key, out)
    else:
        for part in rule(kind)(array):
            _fill_part(part, _derived(key, _COLUMN, part.tag), out)
        _fill_nulls(array, key, out)


def _fill_part(part: Part, key: Words, out: Words) -> None:
    if not isinstance(part, Fixed):
        hash_slices(_fixed(part.data), _fixed(part.offsets), key, out)
    elif part.rows is None:
        _digest([part.words], key, out)
    else:
        out[part.rows] = _digest([part.words], key)


def _fill_nulls(array: pa.Array, key: Words, out: Words) -> None:
    if array.null_count:
        out[array.is_null().to_numpy(zero_copy_only=False)] = _derived(key, _COLUMN, NULL)


def _digest(columns: Sequence[NDArray[Any]], key: Words, out: Words | None = None) -> Words:
    """SipHash of each row's words, in the order of the columns."""
    held = [_regular(column) for column in columns]  # the addresses stay valid
    addresses = [c.ctypes.data + 8 * word for c in held for word in range(_width(c))]
    strides = [c.strides[0] for c in held for _ in range(_width(c))]
    if out is None:
        out = np.empty((len(held[0]), 2), np.uint64)
    hash_rows(np.array(addresses, np.uint64), np.array(strides, np.uint64), key, out)
    return out


def _regular(column: NDArray[Any]) -> NDArray[Any]:
    """The column with its words in order; one item that counts many times may stay so."""
    once = column.ndim == 1 and column.strides == (0,)
    return column if once else np.ascontiguousarray(column)


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


def _derived(key: Words, purpose: int, number: int) -> Words:
    """A key of its own for one purpose: the hash of one word."""
    return _fixed(_digest([np.array([purpose | number << 8], np.uint64)], key)[0])


def _key_words(key: bytes) -> Words:
    if len(key) != 16:
        raise InvalidParameter(f"a hash key must have 16 bytes, got {len(key)}; derive one per use")
    return _fixed(np.frombuffer(key, np.uint64))


def _fixed(array: NDArray[T]) -> NDArray[T]:
    """Read-only, as Arrow's buffers mostly are: one compiled version serves both."""
    view = array.view()
    view.flags.writeable = False
    return view
