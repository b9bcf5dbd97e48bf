"""Growing tables from 128-bit ids to dense rows, and the compiled loops over them.

Rows are numbered in the order of their first appearance and never move, so a snapshot appends what
is new, and the index is rebuilt from the ids. A slot of the index has 32 bits: as many as it takes
for the row's number plus one, and bits of the id in the rest; 0 is free. Ids are keyed hashes, so
their bits serve as the hash, and nobody outside can make them collide.

Memory that is touched for the first time costs more than all the work on it. So a large table is
given far more addresses than memory, and grows where it is.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dpstream.compiled import compiled
from dpstream.errors import StateError
from dpstream.records import Integers, Words

FAR, NEAR = 24, 12
"""Rows ahead at which the slot of an index, and then the row it names, are asked for.

A table of millions of rows is far larger than any cache, and each look at it misses; but which
rows will be looked at is known many rows ahead, so a dozen misses can be under way at once.
"""


@intrinsic
def _prefetch(typing_context, address):  # type: ignore[no-untyped-def]

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(ask, [pointer, number(0), number(3), number(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(types.uint64), generate


prefetch: Any = _prefetch
"""prefetch(address) begins to load a cache line; an address that is not mapped does no harm."""


Flags: TypeAlias = npt.NDArray[np.uint8]
Slots: TypeAlias = npt.NDArray[np.uint32]

SLICE = 1 << 13  # rows between two looks at the free space; what they touch stays in the cache
_FIRST = 1 << 8
_GROWTH = 2
_ADDRESSES = (1024, 32, 4)  # so many times what is needed, the first that the system gives
_LARGE_PAGE = 1 << 21  # bytes
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MOST_ROWS = (1 << 32) - 2  # row numbers have 32 bits
_FULLEST = 0.6
_EMPTIEST = _FULLEST / _GROWTH
_SLOT = 4  # bytes
_OF_INDEX = _SLOT / (_FULLEST * math.log(_GROWTH))  # bytes a row, where all sizes are as likely
LARGE_TABLE = 2 * _LARGE_PAGE
"""The most that a large table takes beside its rows: a page that is not full of rows, and one of
the index; half of it on average."""


def row_bytes(numbers: int = 0) -> tuple[float, float, float]:
    """Bytes of memory that a row of a large table takes with its part of the index.

    The average over all sizes of tables, and the least and the most.

    >>> [round(each, 1) for each in row_bytes(2)]
    [42.6, 39.7, 46.3]
    """
    row = 8 * (2 + numbers) + (1 if numbers else 0)
    return row + _OF_INDEX, row + _SLOT / _FULLEST, row + _SLOT / _EMPTIEST


class HashTable:
    """Rows of 64-bit words: an id of two words, then `numbers` signed ones, all in one cache line
    if they are few."""

    def __init__(self, numbers: int = 0) -> None:
        self.used = 0
        self.words: Words = np.zeros((_FIRST, 2 + numbers), np.uint64)
        self._slots: Slots = np.zeros(2 * _FIRST, np.uint32)
        self.index: Slots = self._slots  # those in use
        self.touched: Flags = np.zeros(_FIRST, np.uint8)
        """Rows that were found, and may have changed, since the last `delta`."""

    @property
    def ids(self) -> Words:
        """The ids, rows x 2."""
        return self.words[:, :2]

    @property
    def numbers(self) -> Integers:
        """The numbers, rows x as many as there are."""
        return self.words.view(np.int64)[:, 2:]

    def reserve(self, more: int) -> None:
        """Make room for `more` new rows."""
        wanted = self.used + more
        if wanted > _MOST_ROWS:
            raise StateError("a hash bucket is full (2^32 rows); use more buckets")
        if wanted > len(self.words):
            words, size = self.words, max(wanted, _GROWTH * len(self.words))
            self.words = _zeros(size, words.shape[1:], np.uint64)
            self.words[: self.used] = words[: self.used]
            touched, self.touched = self.touched, _flags(len(self.words))
            if self.words.shape[1] > 2:
                self.touched[: self.used] = touched[: self.used]
        if wanted > _FULLEST * len(self.index):
            slots = len(self.index)
            while wanted > _FULLEST * slots:
                slots *= _GROWTH
            if slots > len(self._slots):
                self._slots = _zeros(slots, (), np.uint32)
            else:
                self.index[:] = 0
            self.index = self._slots[:slots]
            reindex(self.words, self.used, self.index)

    @property
    def room(self) -> int:
        """As many rows as there may be before it grows."""
        return min(len(self.words), int(_FULLEST * len(self.index)))

    def rows(self, ids: Words, places: Integers | None = None) -> Integers:
        """The row of each id, or of those at `places`; new ids get new rows."""
        if places is None:
            places = np.arange(len(ids))
        rows: Integers = np.empty(len(places), np.int64)
        for start in range(0, len(places), SLICE):
            self.find(ids, places[start : start + SLICE], rows[start : start + SLICE])
        return rows

    def find(self, ids: Words, places: Integers, rows: Integers) -> None:
        """The same for a slice, into `rows`."""
        self.reserve(len(places))
        state = (self.words, self.index, self.touched)
        self.used = find_or_add(*state, self.used, ids, places, rows)

    def delta(self, since: int) -> dict[str, Any]:
        """What a snapshot adds: rows from `since` on, and older ones touched since the last."""
        # Rows without numbers never change: their flags are left alone, and take no memory.
        flags = self.touched[: since if self.words.shape[1] > 2 else 0]
        older: Integers = np.empty(np.count_nonzero(flags.view(np.bool_)), np.int64)
        changed: Words = np.empty((len(older), self.words.shape[1] - 2), np.uint64)
        _collect_flagged(self.words, flags, older, changed)
        self._clear_touched(self.used)
        new = self.words[since : self.used]
        return {
            "since": since,
            "new": new.copy() if new.shape[1] > 2 else new,  # ids never change
            "older": older,
            "changed": changed,
        }

    def apply(self, delta: dict[str, Any]) -> None:
        """Take in what `delta` gave, in the order it was given."""
        before = self.used
        if delta["since"] == 0:
            self.used = 0
        if delta["since"] != self.used:
            raise StateError(f"a snapshot has {self.used} rows where {delta['since']} belong")
        self.reserve(len(delta["new"]))
        end = self.used + len(delta["new"])
        self.words[self.used : end] = delta["new"]
        self.words[delta["older"], 2:] = delta["changed"]
        self.used = end
        self.words[end:before] = 0
        self._clear_touched(max(before, end))
        self.index[:] = 0
        reindex(self.words, self.used, self.index)

    def _clear_touched(self, rows: int) -> None:
        if self.words.shape[1] > 2:
            self.touched[:rows] = 0

    @property
    def stored(self) -> int:
        """Bytes of its rows in a snapshot."""
        return int(self.used * self.words.shape[1] * 8)

    @property
    def bytes(self) -> int:
        """Memory held: the rows in use, their flags if they have any, and the index."""
        flags = self.used if self.words.shape[1] > 2 else 0
        return int(self.stored + flags + self.index.nbytes)


def _zeros(rows: int, shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
    """At least so many rows of zeros. Many are in memory of their own, of large pages, which goes
    when they go, and there are many more of them: what is not used takes addresses, not memory."""
    row = np.dtype((kind, shape))
    if rows * row.itemsize < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((rows, *shape), kind)
    memory = _mapped(rows * row.itemsize, _ADDRESSES)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, row, count=len(memory) // row.itemsize)


def _flags(rows: int) -> Flags:
    """A flag for each row, in pages of the usual size: a large one would hold two million."""
    return (
        np.zeros(rows, np.uint8)
        if rows < _LARGE_PAGE
        else np.frombuffer(_mapped(rows, (1,)), np.uint8)
    )


def _mapped(size: int, spare: tuple[int, ...]) -> mmap.mmap:
    """The first of `spare` times `size` bytes of zeros for which the system has addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    for times in spare:
        with suppress(OSError, OverflowError, ValueError):
            return mmap.mmap(-1, size * times, flags=flags)
    return mmap.mmap(-1, size, flags=flags)


@compiled
def find_or_add(
    words: Words,
    index: Slots,
    touched: Flags,
    used: int,
    wanted: Words,
    places: Integers,
    rows: Integers,
) -> int:
    """rows[i] = the row of wanted[places[i]], added if it is new; returns the rows in use."""
    bits = row_bits(index)
    for ahead in range(len(places) + FAR):
        if ahead < len(places):
            ask_slot(index, wanted[places[ahead], 1])
        near = ahead - (FAR - NEAR)
        if 0 <= near < len(places):
            ask_row(words, index, wanted[places[near], 1])
        i = ahead - FAR
        if i < 0:
            continue
        first, second = wanted[places[i], 0], wanted[places[i], 1]
        row = row_of(words, index, bits, first, second, used, len(words))
        rows[i] = row
        if row == used:
            used += 1
        else:
            touched[row] = 1
    return used


@compiled
def ask_slot(index: Slots, second: Any) -> None:
    """Ask for the slot that an id is looked for in first."""
    slots = np.uint64(index.ctypes.data)
    prefetch(slots + ((second & np.uint64(len(index) - 1)) << np.uint64(2)))


@compiled
def ask_row(words: Words, index: Slots, second: Any) -> None:
    """Ask for the row that this slot names, if there is one."""
    mask = np.uint64(len(index) - 1)
    entry = np.uint64(index[second & mask])
    if entry != 0:
        line = np.uint64(8 * words.shape[1])
        prefetch(np.uint64(words.ctypes.data) + ((entry & mask) - np.uint64(1)) * line)


@compiled
def row_of(
    words: Words, index: Slots, bits: Any, first: Any, second: Any, used: int, room: int
) -> int:
    """The row of an id: `used` if it is new and was added there, -1 if it is new and has no room.

    `bits`: `row_bits` of the index.
    """
    mask, one = np.uint64(len(index) - 1), np.uint64(1)
    tag = (first >> np.uint64(32)) >> bits
    slot = second & mask
    while True:
        entry = np.uint64(index[slot])
        if entry == 0:
            if used >= room:
                return -1
            words[used, 0], words[used, 1] = first, second
            index[slot] = (tag << bits) | np.uint64(used + 1)
            return used
        if entry >> bits == tag:
            row = np.int64(entry & mask) - 1
            if words[row, 0] == first and words[row, 1] == second:
                return row  # type: ignore[return-value]
        slot = (slot + one) & mask


@compiled
def _collect_flagged(words: Words, flags: Flags, older: Integers, changed: Words) -> None:
    """The rows that are flagged, and their numbers: in one pass, for they are half a table."""
    count = 0
    for row in range(len(flags)):
        if flags[row]:
            older[count] = row
            for j in range(changed.shape[1]):
                changed[count, j] = words[row, 2 + j]
            count += 1


@compiled
def reindex(words: Words, used: int, index: Slots) -> None:
    """Fill an empty index."""
    mask, bits = np.uint64(len(index) - 1), row_bits(index)
    one, half = np.uint64(1), np.uint64(32)
    slots = np.uint64(index.ctypes.data)
    for row in range(used):
        ahead = row + FAR
        if ahead < used:
            prefetch(slots + ((words[ahead, 1] & mask) << np.uint64(2)))
        slot = words[row, 1] & mask
        while index[slot] != 0:
            slot = (slot + one) & mask
        tag = (words[row, 0] >> half) >> bits
        index[slot] = (tag << bits) | np.uint64(row + 1)


@compiled
def row_bits(index: Slots) -> Any:
    """Bits of a slot that hold the row's number plus one, which is below the number of slots."""
    bits = 0
    while (1 << bits) < len(index):
        bits += 1
    return np.uint64(bits)


def in_buckets(ids: Words, buckets: int, taken: Flags | None = None) -> list[Integers]:
    """Numbers of the rows (taken) by hash bucket."""
    if buckets == 1:
        return [np.arange(len(ids)) if taken is None else np.flatnonzero(taken)]
    if taken is None:
        taken = np.ones(len(ids), np.uint8)
    order: Integers = np.empty(len(ids), np.int64)
    ends: Integers = np.empty(buckets, np.int64)
    split(np.ascontiguousarray(ids), taken, buckets, order, ends)
    return np.split(order[: ends[-1]], ends[:-1])


@compiled
def split(ids: Words, taken: Any, buckets: int, order: Integers, ends: Integers) -> None:
    """Numbers of the rows taken, by bucket; `ends[b]` is where bucket b ends in `order`."""
    starts = np.zeros(buckets + 1, np.int64)
    for i in range(len(ids)):
        if taken[i]:
            starts[bucket_of(ids[i, 0], buckets) + 1] += 1
    for b in range(buckets):
        starts[b + 1] += starts[b]
    for b in range(buckets):
        ends[b] = starts[b + 1]
    for i in range(len(ids)):
        if taken[i]:
            b = bucket_of(ids[i, 0], buckets)
            order[starts[b]] = i
            starts[b] += 1


@compiled
def bucket_of(word: int, buckets: int) -> int:
    """A bucket from 16 bits of an id that neither tag nor slot uses."""
    part: Any = ((np.uint64(word) & np.uint64(0xFFFF)) * np.uint64(buckets)) >> np.uint64(16)
    return np.int64(part)  # type: ignore[return-value]


@compiled
def find_known(words: Words, index: Slots, wanted: Words, rows: Integers) -> None:
    """rows[i] = the row of wanted[i]; -1 if the table has none."""
    mask, bits = np.uint64(len(index) - 1), row_bits(index)
    one, half = np.uint64(1), np.uint64(32)
    slots, lines = np.uint64(index.ctypes.data), np.uint64(words.ctypes.data)
    line = np.uint64(8 * words.shape[1])
    for ahead in range(len(wanted) + FAR):
        if ahead < len(wanted):
            prefetch(slots + ((wanted[ahead, 1] & mask) << np.uint64(2)))
        near = ahead - (FAR - NEAR)
        if 0 <= near < len(wanted):
            entry = np.uint64(index[wanted[near, 1] & mask])
            if entry != 0:
                prefetch(lines + ((entry & mask) - one) * line)
        i = ahead - FAR
        if i < 0:
            continue
        tag, slot = (wanted[i, 0] >> half) >> bits, wanted[i, 1] & mask
        rows[i] = -1
        while index[slot] != 0:
            entry = np.uint64(index[slot])
            row = np.int64(entry & mask) - 1
            if (
                entry >> bits == tag
                and words[row, 0] == wanted[i, 0]
                and words[row, 1] == wanted[i, 1]
            ):
                rows[i] = row
                break
            slot = (slot + one) & mask
