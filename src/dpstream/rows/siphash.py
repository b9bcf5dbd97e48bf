"""SipHash-2-4 with a 128-bit result, compiled: many short messages at once.

Paper: Aumasson, Bernstein, "SipHash: a fast short-input PRF", 2012, and its 128-bit variant.

The rows of a tile advance together, one message word at a time, in loops without branches that
the compiler turns into vector instructions. Words are read as they lie in memory: little-endian.
A key is two words; a result is two words a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dpstream.compiled import njit


def _loader(bits: int) -> Any:
    """Code that reads `bits` bits at an address, which need not be aligned; nothing is checked."""

    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return types.uint64(types.uint64), generate

    return load


load_byte, load_word = _loader(8), _loader(64)
"""load_word(address): the 8 bytes there as a number; load_byte(address): the byte."""


_TILE = 256  # rows that advance together: their states and words stay in the first-level cache
_TILE_WORDS = 16  # a longer message is hashed on its own


@njit(cache=True, nogil=True, inline="always")
def _turn(word, bits):  # type: ignore[no-untyped-def]
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@njit(cache=True, nogil=True)
def _round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    b = _turn(b, 13) ^ a
    a = _turn(a, 32)
    c += d
    d = _turn(d, 16) ^ c
    a += d
    d = _turn(d, 21) ^ a
    c += b
    b = _turn(b, 17) ^ c
    c = _turn(c, 32)
    return a, b, c, d


@njit(cache=True, nogil=True)
def _begin(key):  # type: ignore[no-untyped-def]
    return (
        key[0] ^ np.uint64(0x736F6D6570736575),
        key[1] ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE),
        key[0] ^ np.uint64(0x6C7967656E657261),
        key[1] ^ np.uint64(0x7465646279746573),
    )


@njit(cache=True, nogil=True, inline="always")
def _absorb(a, b, c, d, word):  # type: ignore[no-untyped-def]
    a, b, c, d = _round(a, b, c, d ^ word)
    a, b, c, d = _round(a, b, c, d)
    return a ^ word, b, c, d


@njit(cache=True, nogil=True)
def _four_rounds(a, b, c, d):  # type: ignore[no-untyped-def]
    a, b, c, d = _round(a, b, c, d)
    a, b, c, d = _round(a, b, c, d)
    a, b, c, d = _round(a, b, c, d)
    return _round(a, b, c, d)


@njit(cache=True, nogil=True, inline="always")
def _end(a, b, c, d):  # type: ignore[no-untyped-def]
    a, b, c, d = _four_rounds(a, b, c ^ np.uint64(0xEE), d)
    first = a ^ b ^ c ^ d
    a, b, c, d = _four_rounds(a, b ^ np.uint64(0xDD), c, d)
    return first, a ^ b ^ c ^ d


@njit(cache=True, nogil=True, inline="always")
def _last_word(start, length, limit):  # type: ignore[no-untyped-def]
    """The bytes after the last full word, and the length in the top byte.

    `limit` is the address where the buffer ends: nothing is read beyond it.
    """
    rest = length & np.uint64(7)
    rest_at = start + length - rest
    word = np.uint64(0)
    if rest_at + np.uint64(8) <= limit:
        word = load_word(rest_at) & ((np.uint64(1) << (rest << np.uint64(3))) - np.uint64(1))
    else:
        for i in range(rest):
            word |= load_byte(rest_at + i) << (i << np.uint64(3))
    return word | (length << np.uint64(56))


@njit(cache=True, nogil=True)
def _hash_one(start, length, limit, key):  # type: ignore[no-untyped-def]
    a, b, c, d = _begin(key)
    for i in range(length >> np.uint64(3)):
        a, b, c, d = _absorb(a, b, c, d, load_word(start + (i << np.uint64(3))))
    a, b, c, d = _absorb(a, b, c, d, _last_word(start, length, limit))
    return _end(a, b, c, d)


@njit(cache=True, nogil=True)
def _absorb_tile(state, words, rows):  # type: ignore[no-untyped-def]
    for i in range(rows):
        a, b, c, d = _absorb(state[0, i], state[1, i], state[2, i], state[3, i], words[i])
        state[0, i] = a
        state[1, i] = b
        state[2, i] = c
        state[3, i] = d


@njit(cache=True, nogil=True)
def _begin_tile(state, key):  # type: ignore[no-untyped-def]
    a, b, c, d = _begin(key)
    state[0] = a
    state[1] = b
    state[2] = c
    state[3] = d


@njit(cache=True, nogil=True)
def _end_tile(state, rows):  # type: ignore[no-untyped-def]
    """The results replace the first two words of the state."""
    for i in range(rows):
        first, second = _end(state[0, i], state[1, i], state[2, i], state[3, i])
        state[0, i] = first
        state[1, i] = second


@njit(cache=True, nogil=True)
def hash_slices(data, offsets, key, out):  # type: ignore[no-untyped-def]
    """out[i] = hash of data[offsets[i] : offsets[i + 1]].

    A tile's rows are ordered by their number of words, longest first, so that the rows which still
    have a word to absorb are the first ones.
    """
    state = np.empty((4, _TILE), np.uint64)
    words = np.empty((_TILE_WORDS, _TILE), np.uint64)
    rows_with = np.empty(_TILE_WORDS + 1, np.int64)
    place = np.empty(_TILE_WORDS + 1, np.int64)
    row_at = np.empty(_TILE, np.int64)
    base = np.uint64(data.ctypes.data)
    limit = base + np.uint64(data.shape[0])
    for tile in range(0, out.shape[0], _TILE):
        rows = min(_TILE, out.shape[0] - tile)
        rows_with[:] = 0
        for i in range(rows):
            full = np.uint64(offsets[tile + i + 1] - offsets[tile + i]) >> np.uint64(3)
            rows_with[min(full, np.uint64(_TILE_WORDS))] += 1
        before = 0
        for count in range(_TILE_WORDS - 1, -1, -1):
            place[count] = before
            before += rows_with[count]
            rows_with[count] = before  # rows with more than `count` words
        for i in range(rows):
            start = np.uint64(offsets[tile + i])
            length = np.uint64(offsets[tile + i + 1]) - start
            start += base
            full = length >> np.uint64(3)
            if full >= np.uint64(_TILE_WORDS):
                out[tile + i, 0], out[tile + i, 1] = _hash_one(start, length, limit, key)
                continue
            to = np.uint64(place[full])
            place[full] += 1
            row_at[to] = tile + i
            for j in range(full):
                words[j, to] = load_word(start + (j << np.uint64(3)))
            words[full, to] = _last_word(start, length, limit)
        _begin_tile(state, key)
        for j in range(_TILE_WORDS):
            if rows_with[j] == 0:
                break
            _absorb_tile(state, words[j], rows_with[j])
        _end_tile(state, before)
        for i in range(before):
            out[row_at[i], 0] = state[0, i]
            out[row_at[i], 1] = state[1, i]


@njit(cache=True, nogil=True)
def hash_rows(addresses, strides, key, out):  # type: ignore[no-untyped-def]
    """out[i] = hash of the words at addresses[j] + strides[j] * i, j = 0, 1, ..."""
    state = np.empty((4, _TILE), np.uint64)
    words = np.empty(_TILE, np.uint64)
    length = np.uint64(8 * addresses.shape[0])
    for tile in range(0, out.shape[0], _TILE):
        rows = min(_TILE, out.shape[0] - tile)
        _begin_tile(state, key)
        for j in range(addresses.shape[0]):
            step = strides[j]
            address = addresses[j] + step * np.uint64(tile)
            for i in range(rows):
                words[i] = load_word(address + step * np.uint64(i))
            _absorb_tile(state, words, rows)
        words[:] = length << np.uint64(56)
        _absorb_tile(state, words, rows)
        _end_tile(state, rows)
        for i in range(rows):
            out[tile + i, 0] = state[0, i]
            out[tile + i, 1] = state[1, i]


@njit(cache=True, nogil=True)
def add_rows(rows):  # type: ignore[no-untyped-def]
    """The sum modulo 2^128 of 128-bit numbers, lower word first."""
    low = np.uint64(0)
    high = np.uint64(0)
    for i in range(rows.shape[0]):
        low += rows[i, 0]
        high += rows[i, 1] + np.uint64(low < rows[i, 0])
    return low, high
