"""A pool of synopses in integers, and how far each of them is from a distribution.

A synopsis is a floor for every bin plus 0 to 255 equal units in each, all on the grid 1 / GRID of
probability: one byte a bin, so that thousands of synopses over thousands of bins are compared in
a few milliseconds. It is made without data: publishing a member of it costs what choosing costs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.synopses.queries import Groups
from dpstream.mechanisms.parts.synopses.shapes import POOLS
from dpstream.records import Integers, Reals

GRID: Final = 1 << 30
"""Probabilities are whole multiples of 1 / GRID."""

_UNITS: Final = 255
_FEWEST: Final = 2
_MOST: Final = 1 << 14  # candidates of one private choice

Naturals = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Synopses x bins: floor[j] + unit[j] * units[j, i]."""

    units: npt.NDArray[np.uint8]
    floor: Naturals
    unit: Naturals

    def __len__(self) -> int:
        return len(self.units)

    @property
    def bins(self) -> int:
        """The size of the domain."""
        return int(self.units.shape[1])

    @cached_property
    def digest(self) -> str:
        """Tells pools apart: a release goes on only with the pool that it began with."""
        parts = (self.units, self.floor, self.unit)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @cached_property
    def masses(self) -> Integers:
        """What each synopsis adds up to: GRID, or a little less."""
        return self.grouped(Groups.equal(self.bins, 1))[:, 0].astype(np.int64)

    def member(self, number: int) -> Naturals:
        """One synopsis, on the grid."""
        member: Naturals = self.floor[number] + self.unit[number] * self.units[number].astype(
            np.uint32
        )
        return member

    def pdf(self, number: int) -> Reals:
        """One synopsis, as published: a distribution that adds up to 1."""
        member = self.member(number).astype(np.float64)
        normal: Reals = member / member.sum()
        return normal

    def grouped(self, groups: Groups) -> Naturals:
        """Every synopsis, summed over groups of bins."""
        sizes = groups.sum(np.ones(self.bins, dtype=np.int64))
        out = np.empty((len(self), len(sizes)), dtype=np.uint32)
        for number, row in enumerate(self.units):
            units = groups.sum(row.astype(np.int64))
            out[number] = int(self.floor[number]) * sizes + int(self.unit[number]) * units
        return out

    def distances(self, probabilities: Naturals, grouped: Naturals | None = None) -> Integers:
        """L1 distance of each synopsis from `probabilities`, exactly, in grid steps.

        Of groups of bins, if the synopses are given `grouped`; they add up to the same.
        """
        shared = np.empty(len(self), dtype=np.int64)
        if grouped is None:
            _shared_bytes(probabilities, self.units, self.floor, self.unit, shared)
        else:
            _shared(probabilities, grouped, shared)
        return int(probabilities.sum(dtype=np.int64)) + self.masses - 2 * shared


def quantised(rows: list[Reals]) -> Pool:
    """Distributions in bytes: the smallest value of each is its floor, what is lost is spread."""
    bins = len(rows[0])
    units = np.empty((len(rows), bins), dtype=np.uint8)
    floor, unit = (np.empty(len(rows), dtype=np.uint32) for _ in range(2))
    for number, row in enumerate(rows):
        lowest, highest = float(row.min()), float(row.max())
        step = max(int(np.ceil((highest - lowest) * GRID / _UNITS)), 1)
        counts = np.floor((row - lowest) * GRID / step).clip(0, _UNITS).astype(np.int64)
        units[number], unit[number] = counts, step
        floor[number] = max(GRID - step * int(counts.sum()), 0) // bins
    return Pool(units=units, floor=floor, unit=unit)


@lru_cache(maxsize=2)
def pool(name: str, *, bins: int, size: int, seed: int) -> Pool:
    """The pool of this name; made once and kept, for it is large."""
    if name not in POOLS:
        raise InvalidParameter(f"a pool must be one of {', '.join(POOLS)}; got {name!r}")
    if not _FEWEST <= size <= _MOST:
        raise InvalidParameter(f"a pool has {_FEWEST} to {_MOST} synopses; got {size}")
    return _stacked(POOLS[name](bins, size, seed))


def _stacked(rows: Any) -> Pool:
    """A few rows at a time: all of them in floats would take eight times the room."""
    parts, chunk = [], []
    for row in rows:
        chunk.append(row)
        if len(chunk) == 64:
            parts.append(quantised(chunk))
            chunk = []
    if chunk:
        parts.append(quantised(chunk))
    return Pool(
        units=np.concatenate([part.units for part in parts]),
        floor=np.concatenate([part.floor for part in parts]),
        unit=np.concatenate([part.unit for part in parts]),
    )


@njit(cache=True, nogil=True)
def _shared_bytes(wanted, units, floor, unit, out):  # type: ignore[no-untyped-def]
    """Sum of minima by row; four rows at a time, because one does not keep the memory busy."""
    rows = units.shape[0]
    for j in range(0, rows - 3, 4):
        out[j], out[j + 1], out[j + 2], out[j + 3] = _four_rows(
            wanted, units[j : j + 4], floor[j : j + 4], unit[j : j + 4]
        )
    for j in range(rows - rows % 4, rows):
        total = np.uint32(0)
        for i in range(wanted.shape[0]):
            total = np.uint32(total + _lower(wanted[i], units[j, i], floor[j], unit[j]))
        out[j] = total


@njit(cache=True, nogil=True)
def _four_rows(wanted, units, floor, unit):  # type: ignore[no-untyped-def]
    """Sums stay below 2^32: each is at most what `wanted` adds up to, GRID and one a bin."""
    a = b = c = d = np.uint32(0)
    first, second, third, fourth = units[0], units[1], units[2], units[3]
    for i in range(wanted.shape[0]):
        a = np.uint32(a + _lower(wanted[i], first[i], floor[0], unit[0]))
        b = np.uint32(b + _lower(wanted[i], second[i], floor[1], unit[1]))
        c = np.uint32(c + _lower(wanted[i], third[i], floor[2], unit[2]))
        d = np.uint32(d + _lower(wanted[i], fourth[i], floor[3], unit[3]))
    return a, b, c, d


@njit(cache=True, nogil=True, inline="always")
def _lower(wanted, count, floor, unit):  # type: ignore[no-untyped-def]
    return min(wanted, np.uint32(floor + np.uint32(np.uint32(count) * unit)))


@njit(cache=True, nogil=True)
def _shared(wanted, synopses, out):  # type: ignore[no-untyped-def]
    """Sum of minima by row."""
    for j in range(synopses.shape[0]):
        total = np.int64(0)
        for i in range(synopses.shape[1]):
            total += min(wanted[i], synopses[j, i])
        out[j] = total
