"""The matrices of counters written out: A = B C, the decoder B and the encoder C, for few steps.

They are built from the definitions of the schemes and share no code with the counters' streams.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
from scipy.linalg import toeplitz

from dpstream.counting.binary_tree import Honaker, Tree
from dpstream.counting.buffered import (
    BufferedLinearToeplitz,
    LastTwice,
    decays_for,
    decoder_weights,
    encoder_weights,
)
from dpstream.counting.noise_process import NoiseProcess
from dpstream.mechanisms.counters.naive_counter import NaiveCounter
from dpstream.mechanisms.counters.toeplitz import ToeplitzCounter, root_coefficients
from dpstream.mechanisms.counters.tree_counter import SmoothBinary
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from dpstream.records import Reals

Node = tuple[int, int, float]
"""First and last step of a node, and its weight in a running sum."""


def noise_paths(process: NoiseProcess, z: Reals) -> Reals:
    """B @ z for many keys by the stream: `z` is `[steps, keys]`, and so is the result."""
    state = np.zeros((z.shape[1], process.width))
    return np.stack([process.advance(state, step, row) for step, row in enumerate(z, start=1)])


def row_norms(process: Any) -> Reals:
    """The standard deviations of all steps, for sigma = 1."""
    return np.array([process.row_norm(step) for step in range(1, process.steps + 1)])


@singledispatch
def dense(scheme: Any) -> tuple[Reals, Reals]:
    """(B, C) of a noise process, or of a counter: of the scheme that it uses."""
    return dense(scheme.tree if hasattr(scheme, "tree") else scheme.process)


@dense.register
def _(scheme: NaiveCounter) -> tuple[Reals, Reals]:
    return np.tri(scheme.steps), np.eye(scheme.steps)


@dense.register
def _(scheme: ToeplitzCounter) -> tuple[Reals, Reals]:
    root = np.tril(toeplitz(root_coefficients(scheme.steps)))
    return root, root.copy()


@dense.register
def _(scheme: BufferedLinearToeplitz) -> tuple[Reals, Reals]:
    decoder = decoder_coefficients(scheme, scheme.steps)
    encoder = encoder_coefficients(scheme, scheme.steps)
    return np.tril(toeplitz(decoder)), np.tril(toeplitz(encoder))


def decoder_coefficients(scheme: BufferedLinearToeplitz, count: int) -> Reals:
    """The first `count` entries of B's first column."""
    factors = (1 - scheme.mode_decays)[None, :] ** np.arange(count)[:, None]
    return factors @ decoder_weights(np.array(scheme.decays))


def encoder_coefficients(scheme: BufferedLinearToeplitz, count: int) -> Reals:
    """The first `count` entries of C's first column."""
    decays = np.array(scheme.decays)
    powers = np.log1p(-decays[0::2])[None, :] * np.arange(count - 1)[:, None]
    return np.append(1.0, np.exp(powers) @ encoder_weights(decays))


@dense.register
def _(scheme: LastTwice) -> tuple[Reals, Reals]:
    decoder, encoder = dense(scheme.process)
    first, other = scheme.weights
    decoder = np.hstack([decoder, np.zeros((scheme.steps, 1))])
    decoder[-1] = np.append(first * decoder[-1, :-1], other)
    return decoder, np.vstack([encoder, np.full(scheme.steps, scheme.gain)])


@dense.register
def _(scheme: Tree) -> tuple[Reals, Reals]:
    """One row of C per distinct node of any running sum."""
    rows = [nodes(scheme, step) for step in range(1, scheme.steps + 1)]
    spans = sorted({node[:2] for row in rows for node in row}, key=lambda span: span[::-1])
    place = {span: index for index, span in enumerate(spans)}
    decoder, encoder = np.zeros((len(rows), len(spans))), np.zeros((len(spans), len(rows)))
    for index, row in enumerate(rows):
        for first, last, weight in row:
            decoder[index, place[first, last]] = weight
    for (first, last), index in place.items():
        encoder[index, first - 1 : last] = 1.0
    return decoder, encoder


def nodes(tree: Tree, step: int) -> list[Node]:
    """The nodes that make up a running sum; those of `Honaker` with their whole subtrees."""
    word, found, done = tree.word(step), [], 0
    for top in tree.live(word):
        size = 2**top
        if isinstance(tree, SmoothBinary):  # a digit of the combinatorial number system
            size = math.comb(top, (word & (2 ** (top + 1) - 1)).bit_count())
        if isinstance(tree, Honaker):
            for level in range(top, -1, -1):
                weight = tree.variance(level) * tree.carry(level, top)
                firsts = range(done + 1, done + size + 1, 2**level)
                found += [(first, first + 2**level - 1, weight) for first in firsts]
        else:
            found.append((done + 1, done + size, 1.0))
        done += size
    return found


def short_epochs(*lengths: int, share: float = 0.3, buffers: int = 2) -> tuple[Any, ...]:
    """Epochs of these lengths for `UnboundedCounter`."""
    return tuple((length, share, *decays_for(length, buffers)) for length in lengths)


def dense_epochs(counter: UnboundedCounter, steps: int) -> tuple[Reals, Reals]:
    """(B, C) of the first `steps` steps of a stream without end; columns of C have norm 1.

    C has a row per step, then one per total; the total of an epoch that is over is averaged.
    """
    lengths, shares = [], []
    while sum(lengths) < steps:
        length, share = counter.epochs[min(len(lengths), len(counter.epochs) - 1)][:2]
        lengths.append(int(length))
        shares.append(share)
    decoder, encoder = (np.zeros((steps, steps + len(lengths))) for _ in range(2))
    start = 0
    for index, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        decays = counter.epochs[min(index, len(counter.epochs) - 1)][2:]
        inside = BufferedLinearToeplitz(steps=length, buffers=len(decays) // 2, decays=decays)
        scale = inside.column_norm() / math.sqrt(1 - share)
        own = inside if length <= steps else replace(inside, steps=steps)  # no more is looked at
        decode, encode = dense(own)
        count, end = min(length, steps - start), start + length
        block = slice(start, start + count)
        decoder[block, block] = scale * decode[:count, :count]
        encoder[block, block] = encode[:count, :count].T / scale
        if end <= steps:
            encoder[block, steps + index] = math.sqrt(share)
            counted = (scale * decode[-1]) @ (scale * decode[-1])
            weight = 1 / share / (counted + 1 / share)
            closed = np.zeros(steps + len(lengths))
            closed[block] = weight * scale * decode[-1]
            closed[steps + index] = (1 - weight) / math.sqrt(share)
            decoder[end - 1] = closed + (decoder[start - 1] if start else 0)
        if start:
            last = start + count - (end <= steps)
            decoder[start:last] += decoder[start - 1]
        start = end
    return decoder, encoder.T
