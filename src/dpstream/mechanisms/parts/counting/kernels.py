"""Compiled loops over keys. No randomness, no fast-math: the same bytes on every replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpstream.compiled import compiled
from dpstream.records import Reals


@compiled
def advance_modes(
    state: Reals, factors: Reals, weights: Reals, z: Reals, base: Reals, noise: Reals
) -> None:
    """state[k, j] = factors[j] state[k, j] + z[k]; noise[k] = base[k] + weights . state[k].

    Only the first `len(factors)` columns of `state` are touched.
    """
    for k in range(state.shape[0]):
        total = base[k]
        for j in range(factors.shape[0]):
            value = factors[j] * state[k, j] + z[k]
            state[k, j] = value
            total += weights[j] * value
        noise[k] = total


@compiled
def in_grid_steps(noise: Reals, sigma: float, out: NDArray[np.int64]) -> None:
    """out[k] = sigma noise[k], rounded to the nearest whole number, ties to even."""
    for k in range(len(noise)):
        out[k] = np.int64(np.rint(noise[k] * sigma))


@compiled
def push_node(state: Reals, level: int, carry: Reals, scale: float, z: Reals, noise: Reals) -> None:
    """Close a node at `level`: it absorbs the lower levels, state[k, level] = scale z + carry.

    noise[k] is the sum of the live levels, added from the highest down.
    """
    for k in range(state.shape[0]):
        value = scale * z[k]
        for j in range(level):
            value += carry[j] * state[k, j]
            state[k, j] = 0.0
        state[k, level] = value
        total = 0.0
        for j in range(state.shape[1] - 1, level - 1, -1):
            total += state[k, j]
        noise[k] = total


@compiled
def weigh_history(state: Reals, weights: Reals, noise: Reals) -> None:
    """noise[k] = weights . state[k, :len(weights)], in the order of the columns."""
    for k in range(state.shape[0]):
        total = 0.0
        for j in range(weights.shape[0]):
            total += weights[j] * state[k, j]
        noise[k] = total
