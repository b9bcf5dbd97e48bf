"""Streams for DPI: the paper's synthetic design, two that are not nearly even, and a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from dpstream.bench.streams import Stream, streams
from dpstream.records import Integers, Reals

ROWS: Final = 10_000
"""Rows of a slot, about, where the domain has 100 bins."""

_CHUNK: Final = 500


def gaussian_counts(
    slots: int, *, items: int = 100, mean: float = 100, seed: int = 0
) -> Iterator[Integers]:
    """Section 6.4 of the paper: in every slot one variance of 1, 4, ..., 100, drawn afresh.

    The truth is the uniform distribution plus noise that no slot shares with another.
    """
    rng = np.random.default_rng(seed)
    for first in range(0, slots, _CHUNK):
        count = min(_CHUNK, slots - first)
        deviation = rng.integers(1, 11, (count, 1))
        drawn = rng.standard_normal((count, items), dtype=np.float32) * deviation + mean
        yield np.rint(np.maximum(drawn, 0)).astype(np.int64)


def zipf_counts(slots: int, *, items: int = 100, seed: int = 0) -> Integers:
    """Shares like 1 / rank^1.1 in the order of the bins: skewed, and the same in every slot."""
    shares = np.arange(1.0, items + 1) ** -1.1
    return np.random.default_rng(seed).poisson(ROWS * shares / shares.sum(), (slots, items))


def moving_bump(slots: int, *, items: int = 100, seed: int = 0) -> Integers:
    """A bump that moves over a third of the domain within the stream."""
    middle = items * (0.3 + 0.3 * np.arange(slots)[:, None] / slots)
    weights = np.exp(-0.5 * ((np.arange(items) - middle) / (items / 10)) ** 2)
    rows = ROWS * weights / weights.sum(axis=1, keepdims=True)
    block: Integers = np.random.default_rng(seed).poisson(rows)
    return block


def all_streams(slots: int) -> list[Stream]:
    """Gaussian counts at full length, the others a fifth of it; a taxi is one row of a slot."""
    gaussian = np.concatenate(list(gaussian_counts(slots)))
    taxis = next(one for one in streams(steps=slots // 5) if one.name == "t-drive")
    return [
        Stream(name="gaussian", source="generated", block=gaussian),
        Stream(name="zipf", source="generated", block=zipf_counts(slots // 5)),
        Stream(name="moving bump", source="generated", block=moving_bump(slots // 5)),
        taxis,
    ]


def distributions(block: Integers) -> Reals:
    """Counts as distributions; an empty slot is even."""
    rows = block.sum(axis=1, keepdims=True)
    shares: Reals = np.where(rows > 0, block / np.maximum(rows, 1), 1 / block.shape[1])
    return shares


def mean_squared(pdfs: Reals, truth: Reals) -> Reals:
    """By slot.

    >>> mean_squared(np.array([[0.5, 0.5]]), np.array([[0.6, 0.4]])).round(3).tolist()
    [0.01]
    """
    errors: Reals = ((pdfs - truth) ** 2).mean(axis=1)
    return errors


def divergence(pdfs: Reals, truth: Reals, least: float = 1e-9) -> Reals:
    """KL divergence of the release from the truth, by slot; released shares count as `least`.

    >>> divergence(np.array([[0.5, 0.5]]), np.array([[1.0, 0.0]])).round(4).tolist()
    [0.6931]
    """
    ratio = np.maximum(truth, least) / np.maximum(pdfs, least)
    found: Reals = np.where(truth > 0, truth * np.log(ratio), 0.0).sum(axis=1)
    return found
