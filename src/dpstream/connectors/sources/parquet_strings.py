"""Text columns of Parquet files, straight from their pages: half of what Arrow takes for it.

Of a column that holds a string in every row, stored one by one or by a dictionary (which writers
give up once it is large), as is usual: PLAIN and RLE_DICTIONARY in data pages of version 1. For
everything else the answer is None, and Arrow reads the column. The answers are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.connectors.sources.parquet_loops import BROKEN, gather, plain, size_of, unpack
from dpstream.connectors.sources.parquet_pages import CODECS, Bytes, LeftToArrow, Page, pages
from dpstream.records import Integers
from dpstream.stages.unaligned import STRIDE

_PLAIN, _BY_DICTIONARY = 0, (2, 8)  # 2 is the old name of 8
_LEVELS = 4  # bytes before definition levels: their length
_MOST_BITS = 32
_LARGEST = (1 << 31) - 1  # offsets of a string array have 32 bits


def strings(file: pa.NativeFile, chunk: Any, *, optional: bool) -> pa.Array | None:
    """The strings of a column chunk; None for one that Arrow should read.

    `optional`: the column may have NULL, so that levels come before the values.
    """
    if chunk.physical_type != "BYTE_ARRAY" or chunk.compression not in CODECS:
        return None
    start = chunk.data_page_offset
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    largest = chunk.total_uncompressed_size
    try:
        made = _Strings(rows=chunk.num_values, size=largest, optional=optional)
        raw = memoryview(file.read_at(chunk.total_compressed_size, start))
        for page in pages(raw, codec=chunk.compression, largest=largest):
            made.add(page)
        return made.finished()
    except (LeftToArrow, ValueError, MemoryError):  # or a footer with sizes that cannot be
        return None


class _Strings:
    """A string array in the making."""

    def __init__(self, *, rows: int, size: int, optional: bool) -> None:
        """`size`: about how many bytes the strings have; they get more room if need be."""
        self._rows, self._optional, self._filled = rows, optional, 0
        self._offsets: Any = np.zeros(rows + 1, np.int32)
        self._data: Bytes = np.empty(size + STRIDE, np.uint8)
        self._dictionary: tuple[Any, Bytes] | None = None

    def add(self, page: Page) -> None:
        """Take in the next page."""
        if page.is_dictionary:
            self._dictionary = _dictionary(page)
            return
        first, end = self._filled, self._filled + page.values
        if end > self._rows:
            raise LeftToArrow("more values than the chunk has")
        offsets, at = self._offsets[first : end + 1], self._after_levels(page)
        if page.encoding == _PLAIN:
            self._make_room(int(offsets[0]) + len(page.data))
            done = plain(page.data, at, offsets, self._data)
        elif page.encoding in _BY_DICTIONARY and self._dictionary is not None:
            known, data = self._dictionary
            wanted = _indices(page, at)
            size = size_of(wanted, known)
            self._make_room(int(offsets[0]) + size)
            done = size if size == BROKEN else gather(wanted, known, data, offsets, self._data)
        else:
            raise LeftToArrow(f"encoding {page.encoding}")
        if done == BROKEN:
            raise LeftToArrow("a page that ends too early")
        self._filled = end

    def finished(self) -> pa.Array:
        """The array, which all pages have filled."""
        if self._filled != self._rows:
            raise LeftToArrow("fewer values than the chunk has")
        data = pa.py_buffer(self._data[: self._offsets[-1]])
        offsets = pa.py_buffer(self._offsets)
        return pa.StringArray.from_buffers(self._rows, offsets, data, null_count=0)

    def _after_levels(self, page: Page) -> int:
        """Where the values begin: after the levels, which say that there is one in every row."""
        if not self._optional:
            return 0
        size = int.from_bytes(page.data[:_LEVELS].tobytes(), "little")
        end = _LEVELS + size
        levels: Integers = np.empty(page.values, np.int64)
        if unpack(page.data[:end], _LEVELS, 1, levels) != end or (levels != 1).any():
            raise LeftToArrow("NULL, or broken levels")
        return end

    def _make_room(self, used: int) -> None:
        """For so many bytes in all, and a stride more, since strings are copied by strides."""
        if used > _LARGEST:
            raise LeftToArrow("more than an array of strings holds")
        if used + STRIDE > len(self._data):
            longer = np.empty(used + used // 2 + STRIDE, np.uint8)
            filled = self._offsets[self._filled]
            longer[:filled] = self._data[:filled]
            self._data = longer


def _dictionary(page: Page) -> tuple[Any, Bytes]:
    """(offsets, data) of a dictionary's strings, with a stride to spare."""
    if page.encoding not in (_PLAIN, 2) or page.values > len(page.data):
        raise LeftToArrow(f"a dictionary in encoding {page.encoding}")
    offsets = np.zeros(page.values + 1, np.int32)
    data: Bytes = np.zeros(len(page.data) + STRIDE, np.uint8)
    if plain(page.data, 0, offsets, data) == BROKEN:
        raise LeftToArrow("a dictionary that ends too early")
    return offsets, data


def _indices(page: Page, at: int) -> Integers:
    """Places in the dictionary; a byte says how many bits each has."""
    found: Integers = np.empty(page.values, np.int64)
    bits = int(page.data[at]) if at < len(page.data) else _MOST_BITS + 1
    if bits > _MOST_BITS or unpack(page.data, at + 1, bits, found) != len(page.data):
        raise LeftToArrow("broken indices")
    return found
