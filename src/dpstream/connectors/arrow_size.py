"""How large an Arrow stream is once it is decoded, from what its messages say before any is.

A compressed buffer begins with its length when it is decompressed, and Arrow believes it. Rows that
have no buffers (nulls, runs of one value) are counted by what the batch says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.errors import InvalidInput
from dpstream.records import Integers

CELL = 16
"""Bytes that a cell is reckoned to take, beside its text."""
_DICTIONARY, _BATCH = 2, 3  # kinds of messages


def check_decoded_size(stream: bytes, columns: int, most: int) -> None:
    """Refuse a stream whose buffers, and cells of so many columns, would take more than `most`."""
    size = 0
    for message in pa.ipc.MessageReader.open_stream(stream):
        rows, buffers = _batch_size(message)
        size += rows * columns * CELL + buffers
        if size > most:
            raise _too_large(most)


def check_text_size(columns: list[pa.ChunkedArray], most: int) -> None:
    """Refuse columns whose text would take more: many cells may refer to one long value."""
    size = sum(_text_bytes(chunk) for column in columns for chunk in column.chunks)
    if size > most:
        raise _too_large(most)


def _too_large(most: int) -> InvalidInput:
    return InvalidInput(f"it takes more than {most} bytes when it is decoded; send it in parts")


def _text_bytes(array: pa.Array) -> int:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not isinstance(array, pa.DictionaryArray):
        return int(_lengths(array).sum())
    used = array.indices.drop_null().to_numpy(zero_copy_only=False)
    return int(_lengths(array.dictionary)[used].sum())


def _lengths(array: pa.Array) -> Integers:
    """The bytes of each text; those of other values are within what a cell is reckoned to take."""
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(-1, 4)
        return views[array.offset : array.offset + len(array), 0].astype(np.int64)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(pc.fill_null(pc.binary_length(array), 0), np.int64)
    return np.zeros(len(array), np.int64)


def _batch_size(message: pa.ipc.Message) -> tuple[int, int]:
    """Rows of a message, and bytes of its buffers when they are decompressed."""
    meta, body = message.metadata.to_pybytes(), message.body
    root = _Table(meta, struct.unpack_from("<I", meta)[0])
    kind = root.scalar(1, "<B")
    header = root.table(2)
    if kind == _DICTIONARY and header is not None:
        header = header.table(1)
    if kind not in (_DICTIONARY, _BATCH) or header is None:
        return 0, 0
    compressed = header.table(3) is not None
    size = 0
    for offset, length in header.pairs(2):
        if compressed and length >= 8:
            stated = struct.unpack_from("<q", body, offset)[0]
            length = length - 8 if stated < 0 else stated
        size += length
    return (header.scalar(0, "<q") if kind == _BATCH else 0), size


class _Table:
    """A table of a FlatBuffer; Arrow has verified it."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place

    def _field(self, number: int) -> int | None:
        fields = self._place - struct.unpack_from("<i", self._data, self._place)[0]
        size = struct.unpack_from("<H", self._data, fields)[0]
        if 4 + 2 * number >= size:
            return None
        offset = struct.unpack_from("<H", self._data, fields + 4 + 2 * number)[0]
        return self._place + offset if offset else None

    def _follow(self, number: int) -> int | None:
        at = self._field(number)
        return None if at is None else at + struct.unpack_from("<I", self._data, at)[0]

    def scalar(self, number: int, form: str) -> int:
        """A number; 0 if it is not there."""
        at = self._field(number)
        return 0 if at is None else int(struct.unpack_from(form, self._data, at)[0])

    def table(self, number: int) -> _Table | None:
        """A table within."""
        at = self._follow(number)
        return None if at is None else _Table(self._data, at)

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """A list of two numbers each."""
        at = self._follow(number)
        if at is None:
            return
        count = struct.unpack_from("<I", self._data, at)[0]
        yield from struct.iter_unpack("<qq", self._data[at + 4 : at + 4 + 16 * count])
