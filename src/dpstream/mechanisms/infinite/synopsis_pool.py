"""A pool of synopses in integers, and how far each of them is from a distribution.

A synopsis is a floor for every bin plus 0 to 255 equal units in each, all on the grid 1 / GRID of
probability: one byte a bin, so that thousands of synopses over thousands of bins are compared in
a few milliseconds. It is made without data: publishing a member of it costs what choosing costs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import check_choice, whole
from dpstream.mechanisms.infinite.budget_series import below, gammas
from dpstream.records import Integers, Reals

CONCENTRATIONS: Final = (0.02, 0.1, 0.5, 2.0, 10.0, 100.0)
"""Of Dirichlet synopses, per bin: from a few spikes to nearly even."""

SHARES: Final = (0.1, 0.3, 0.6, 0.9)
"""The part of a mixture that is not spread evenly."""

_LARGEST_DRAW: Final = 10**5


def multinomial(bins: int, count: int, seed: int, units: int = 100) -> Iterator[Reals]:
    """Algorithm 2 of DPI: `units` of probability a bin, on average, each thrown into any bin.

    The paper throws as many units as the dataset has rows, which is private; here it is public.
    """
    for number in range(count):
        size = min(units * bins, _LARGEST_DRAW)
        thrown = below(f"multinomial {seed} {number}", size, bins)
        yield np.bincount(thrown, minlength=bins) / size


def dirichlet(bins: int, count: int, seed: int) -> Iterator[Reals]:
    """Dirichlet distributions, the concentrations in turn."""
    for number, concentration in zip(range(count), cycle(CONCENTRATIONS), strict=False):
        weights = gammas(f"dirichlet {seed} {number}", bins, concentration)
        yield _normal(weights + 1e-300)


def even(bins: int) -> Reals:
    """The uniform distribution."""
    return np.full(bins, 1 / bins)


def mixed(bins: int, count: int, seed: int) -> Iterator[Reals]:
    """The uniform distribution, then simple shapes and Dirichlet distributions in turn."""
    yield even(bins)
    simple, random = _all_shapes(bins), dirichlet(bins, count, seed=seed)
    for number in range(count - 1):
        shape = next(simple, None) if number % 4 else None
        yield next(random) if shape is None else shape


POOLS: Final[dict[str, Callable[[int, int, int], Iterator[Reals]]]] = {
    "multinomial": multinomial,
    "dirichlet": dirichlet,
    "mixed": mixed,
}
"""By name: bins, size and seed to distributions."""


def _all_shapes(bins: int) -> Iterator[Reals]:
    """Level by level; each level has twice the resolution of the one before."""
    place = (np.arange(bins) + 0.5) / bins
    for exponent in (0.5, 1.0, 1.5, 2.0):
        for side in (1, -1):
            yield from _mixtures(np.power(np.arange(1.0, bins + 1)[::side], -exponent))
    for level in range(1, math.ceil(math.log2(max(bins, 2))) + 1):
        cells = min(2**level, bins)
        for cell in range(cells):
            inside = (place * cells).astype(np.int64) == cell
            if inside.any():
                yield from _mixtures(inside.astype(np.float64))  # at the last level, spikes
            if cells < bins:
                bump = np.exp(-0.5 * ((place - (cell + 0.5) / cells) * 2 * cells) ** 2)
                yield from _mixtures(bump)


def _mixtures(weights: Reals) -> Iterator[Reals]:
    shape, flat = _normal(weights), even(len(weights))
    for share in SHARES:
        yield share * shape + (1 - share) * flat


def _normal(weights: Reals) -> Reals:
    normal: Reals = weights / weights.sum()
    return normal


Grouping = int | tuple[int, ...]
"""So many equal runs of successive bins, or the group number of every bin."""


@dataclass(frozen=True, kw_only=True)
class BinGroups:
    """A query that boosting weighs: the group of every bin, 0 to count - 1.

    The answer is the distribution over the groups. Summing bins makes no L1 distance larger, so one
    user moves every answer by no more than the distribution itself.
    """

    of: tuple[int, ...]

    @classmethod
    def equal(cls, bins: int, count: int) -> BinGroups:
        """`count` runs of successive bins, as equal as can be.

        >>> BinGroups.equal(5, 2).of
        (0, 0, 0, 1, 1)
        """
        return cls(of=tuple(int(i) for i in np.arange(bins) * count // bins))

    @cached_property
    def single(self) -> bool:
        """Does every bin stand for itself? (If so they may be left in their order.)"""
        return max(self.of) + 1 == len(self.of)

    @cached_property
    def _labels(self) -> Integers:
        return np.array(self.of)

    def sum(self, values: Any) -> Integers:
        """Values of bins to values of groups; exact, for all of them are below 2^53."""
        return np.bincount(self._labels, weights=values).astype(np.int64)


def check_groups(queries: Any) -> tuple[Grouping, ...]:
    """Groupings as they are stored; a single number of groups is one of them."""
    if isinstance(queries, int):
        queries = (queries,)
    if isinstance(queries, str) or not isinstance(queries, Sequence):
        raise InvalidParameter(
            f"queries must be numbers of groups, such as (100, 16), or group numbers of all bins; "
            f"got {queries!r}"
        )
    return tuple(
        tuple(whole(label, "a group number", at_least=0) for label in query)
        if isinstance(query, Sequence)
        else whole(query, "the number of groups of a query", at_least=2)
        for query in queries
    )


def groups_of(queries: Sequence[Grouping], bins: int) -> tuple[BinGroups, ...]:
    """The groupings of a domain; without any, every bin by itself."""
    groupings = []
    for query in queries or (bins,):
        if isinstance(query, int):
            if query > bins:
                raise InvalidParameter(
                    f"a query has {query} groups, but there are {bins} bins; ask for at most {bins}"
                )
            groupings.append(BinGroups.equal(bins, query))
            continue
        if len(query) != bins or sorted(set(query)) != list(range(max(query) + 1)):
            raise InvalidParameter(
                f"a query names the group of each of the {bins} bins, as numbers from 0 on without "
                f"gaps; got {len(query)} numbers, {sorted(set(query))[:9]}"
            )
        groupings.append(BinGroups(of=query))
    return tuple(groupings)


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

    @cached_property
    def digest(self) -> str:
        """Tells pools apart: a release goes on only with the pool that it began with."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.units, self.floor, self.unit):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @cached_property
    def masses(self) -> Integers:
        """What each synopsis adds up to: GRID, or a little less."""
        units = self.unit * self.units.sum(axis=1, dtype=np.int64)
        masses: Integers = self.floor.astype(np.int64) * self.units.shape[1] + units
        return masses

    def member(self, number: int) -> Naturals:
        """One synopsis, on the grid."""
        units = self.units[number].astype(np.uint32)
        member: Naturals = self.floor[number] + self.unit[number] * units
        return member

    def pdf(self, number: int) -> Reals:
        """One synopsis, as published: a distribution that adds up to 1."""
        return _normal(self.member(number).astype(np.float64))

    def grouped(self, groups: BinGroups) -> Naturals:
        """Every synopsis, summed over groups of bins."""
        sizes = np.bincount(groups.of)
        out = np.empty((len(self), len(sizes)), dtype=np.uint32)
        for number, row in enumerate(self.units):
            out[number] = int(self.floor[number]) * sizes + int(self.unit[number]) * groups.sum(row)
        return out

    def distances(self, probabilities: Naturals, grouped: Naturals | None = None) -> Integers:
        """L1 distance of each synopsis from `probabilities`, exactly, in grid steps.

        Of groups of bins, if the synopses are given `grouped`; they add up to the same.
        """
        if grouped is None:
            shared = np.empty(len(self), dtype=np.int64)
            _shared_mass(probabilities, self.units, self.floor, self.unit, shared)
        else:
            shared = np.minimum(probabilities, grouped).sum(axis=1, dtype=np.int64)
        return int(probabilities.sum(dtype=np.int64)) + self.masses - 2 * shared


def quantise(rows: Iterable[Reals], *, size: int, bins: int) -> Pool:
    """Distributions in bytes: the smallest value of each is its floor, what is lost is spread."""
    units = np.empty((size, bins), dtype=np.uint8)
    floor, unit = (np.empty(size, dtype=np.uint32) for _ in range(2))
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
    check_choice(name, "a pool", POOLS)
    if not _FEWEST <= size <= _MOST:
        raise InvalidParameter(f"a pool has {_FEWEST} to {_MOST} synopses; got {size}")
    return quantise(POOLS[name](bins, size, seed), size=size, bins=bins)


@njit(cache=True, nogil=True)
def _shared_mass(wanted, units, floor, unit, out):  # type: ignore[no-untyped-def]
    """Sum of minima by row; it stays below 2^32: it is at most what `wanted` adds up to, GRID."""
    for j in range(units.shape[0]):
        total = np.uint32(0)
        for i in range(wanted.shape[0]):
            member = np.uint32(floor[j] + np.uint32(np.uint32(units[j, i]) * unit[j]))
            total = np.uint32(total + min(wanted[i], member))
        out[j] = total
