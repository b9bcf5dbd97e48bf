"""The pages of a Parquet column chunk, decompressed, as far as they are of the usual kind.

A chunk is a row of pages: perhaps one with a dictionary, then those with data. Each begins with a
header in Thrift's compact protocol. Files come from anywhere, so every size is checked; what is
damaged or unusual is `LeftToArrow`, whose reader knows all kinds of pages and all kinds of damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]

CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip"}
"""How a chunk may be compressed: Parquet's names and Arrow's."""

# Thrift's numbers: kinds of pages, fields of a header, kinds of fields
_DATA, _DICTIONARY = 0, 2
_KIND, _SIZE, _COMPRESSED, _OF_DATA, _OF_DICTIONARY = 1, 2, 3, 5, 7
_VALUES, _ENCODING = 1, 2
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_WHOLE = (4, 5, 6)
_DEEPEST = 3  # structs within structs


class LeftToArrow(Exception):
    """The chunk is not of the usual kind."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Page:
    """Decompressed bytes of so many values, in an encoding of Parquet's numbers."""

    is_dictionary: bool
    values: int
    encoding: int
    data: Bytes


def pages(raw: memoryview, *, codec: str, largest: int) -> Iterator[Page]:
    """The pages of a chunk; none is larger than `largest` when it is decompressed."""
    name = CODECS[codec]
    unpack = None if name is None else pa.Codec(name)
    at = 0
    while at < len(raw):
        header, at = _header(raw, at)
        try:
            kind, size, compressed = header[_KIND], header[_SIZE], header[_COMPRESSED]
            if kind not in (_DATA, _DICTIONARY):
                raise LeftToArrow(f"a page of kind {kind}")
            about = header[_OF_DATA if kind == _DATA else _OF_DICTIONARY]
            values, encoding = about[_VALUES], about[_ENCODING]
        except (KeyError, TypeError):
            raise LeftToArrow("a header without its fields") from None
        end = at + compressed
        if not (0 <= size <= largest and at <= end <= len(raw) and values >= 0):
            raise LeftToArrow(f"a page of {compressed} bytes, {size} decompressed")
        data = np.frombuffer(_unpacked(raw[at:end], unpack, size), np.uint8)
        data.flags.writeable = False  # compressed or not: one compiled version serves both
        yield Page(is_dictionary=kind == _DICTIONARY, values=values, encoding=encoding, data=data)
        at = end


def _unpacked(raw: memoryview, codec: pa.Codec | None, size: int) -> Any:
    if codec is None:
        return raw
    try:
        return codec.decompress(raw, size)
    except (OSError, ValueError) as problem:
        raise LeftToArrow(str(problem)) from None


def _header(raw: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """The fields of the header at a place, and where it ends."""
    reader = _Compact(raw, at)
    try:
        return reader.struct(), reader.at
    except IndexError:
        raise LeftToArrow("a header that does not end") from None


class _Compact:
    """Thrift's compact protocol, of which page headers use a part."""

    def __init__(self, raw: memoryview, at: int) -> None:
        self.raw, self.at = raw, at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Values by field number; those of bytes and of fractions are passed over."""
        if depth > _DEEPEST:
            raise LeftToArrow("structs within structs")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():  # how much the number grows, and the kind of the field
            number = number + (head >> 4) if head >> 4 else self._whole()
            found[number] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _WHOLE:
            return self._whole()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind not in (_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY):
            raise LeftToArrow(f"a field of kind {kind}")
        size = self._varint() if kind == _BINARY else {_BYTE: 1, _DOUBLE: 8}.get(kind, 0)
        self.at += size
        return None

    def _whole(self) -> int:
        """Small numbers of both signs have small codes."""
        code = self._varint()
        return (code >> 1) ^ -(code & 1)

    def _varint(self) -> int:
        """Seven bits a byte, the lowest first."""
        found = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise LeftToArrow("a number of more than 64 bits")

    def _byte(self) -> int:
        byte: int = self.raw[self.at]
        self.at += 1
        return byte
