"""Public distributions over a domain: what a pool is made of. None of them has seen data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final

import numpy as np

from dpstream.mechanisms.parts.synopses.public_numbers import below, gammas
from dpstream.records import Reals

CONCENTRATIONS: Final = (0.02, 0.1, 0.5, 2.0, 10.0, 100.0)
"""Of Dirichlet synopses, per bin: from a few spikes to nearly even."""

SHARES: Final = (0.1, 0.3, 0.6, 0.9)
"""The part of a mixture that is not spread evenly."""

_LARGEST_DRAW: Final = 10**5


def multinomial(bins: int, count: int, *, seed: int, units: int = 100) -> Iterator[Reals]:
    """Algorithm 2 of DPI: `units` of probability a bin, on average, each thrown into any bin.

    The paper throws as many units as the dataset has rows, which is private; here it is public.
    """
    for number in range(count):
        size = min(units * bins, _LARGEST_DRAW)
        thrown = below(f"multinomial {seed} {number}", size, bins)
        yield np.bincount(thrown, minlength=bins) / size


def dirichlet(bins: int, count: int, *, seed: int) -> Iterator[Reals]:
    """Dirichlet distributions, the concentrations in turn."""
    for number, concentration in zip(range(count), cycle(CONCENTRATIONS), strict=False):
        weights = gammas(f"dirichlet {seed} {number}", bins, concentration)
        yield _normal(weights + 1e-300)


def even(bins: int) -> Reals:
    """The uniform distribution."""
    return np.full(bins, 1 / bins)


def mixed(bins: int, count: int, *, seed: int) -> Iterator[Reals]:
    """The uniform distribution, then simple shapes and Dirichlet distributions in turn."""
    yield even(bins)
    simple, random = _all_shapes(bins), dirichlet(bins, count, seed=seed)
    for number in range(count - 1):
        found = next(simple, None) if number % 4 else None
        yield next(random) if found is None else found


POOLS: Final[dict[str, Callable[[int, int, int], Iterator[Reals]]]] = {
    "multinomial": lambda bins, count, seed: multinomial(bins, count, seed=seed),
    "dirichlet": lambda bins, count, seed: dirichlet(bins, count, seed=seed),
    "mixed": lambda bins, count, seed: mixed(bins, count, seed=seed),
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
