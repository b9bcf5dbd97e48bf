"""Compiled loops over keys. No randomness, no fast-math: the same bytes on every replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft

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


# Long convolutions by fast Fourier transform, without loading the rest of `scipy.signal`.


def convolve(left: Reals, right: Reals, length: int) -> Reals:
    """The first `length` entries of the convolution of `left` and `right`, along the first axis.

    >>> convolve(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0]), 4).round(9).tolist()
    [1.0, 3.0, 5.0, 3.0]
    """
    full = len(left) + len(right) - 1
    size = next_fast_len(full, real=True)
    product = rfft(left, size, axis=0) * rfft(right, size, axis=0)
    return np.asarray(irfft(product, size, axis=0)[:full][:length], dtype=np.float64)


# Sums of geometric modes: processes x_j(t) = (1 - decay_j) x_j(t - 1) + z_t under a shared z.
#
# Decays lie in [0, 1]; decay 0 is the plain sum of z. All formulas work on decays, not on factors
# near 1, and add nonnegative numbers only, so they lose no more than some units in the last place.


def powers(decays: Reals, count: int) -> Reals:
    """(1 - decay)^count."""
    if count == 0:
        return np.ones_like(decays)
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(count * np.log1p(-decays)))


def spans(decays: Reals, count: int) -> Reals:
    """Sum over i < count of (1 - decay)^i: what a mode reaches under z = 1."""
    with np.errstate(divide="ignore"):
        decayed = -np.expm1(count * np.log1p(-decays))
    still = decays == 0
    return np.where(still, float(count), decayed / np.where(still, 1.0, decays))


def gram(decays: Reals, count: int) -> Reals:
    """Covariance of the modes after `count` steps: sum over i < count of (f_j f_k)^i.

    >>> gram(np.array([0.5, 0.0]), 2)
    array([[1.25, 1.5 ],
           [1.5 , 2.  ]])
    """
    if count == 0:
        return np.zeros((len(decays), len(decays)))
    gaps = decays[:, None] + decays[None, :] * (1 - decays[:, None])  # 1 - f_j f_k
    with np.errstate(divide="ignore"):
        logs = np.log1p(-decays)
    decayed = -np.expm1(count * (logs[:, None] + logs[None, :]))
    still = gaps == 0
    return np.where(still, float(count), decayed / np.where(still, 1.0, gaps))


def weighted_norms(decays: Reals, weights: Reals, counts: Reals) -> Reals:
    """sqrt(weights @ gram(decays, n) @ weights) for many n at once."""
    with np.errstate(divide="ignore"):
        logs = np.log1p(-decays)
    total = np.zeros(len(counts))
    for j in range(len(decays)):
        for k in range(j + 1):
            weight = weights[j] * weights[k] * (1 if j == k else 2)
            gap = decays[j] + decays[k] * (1 - decays[j])
            total += weight * (-np.expm1(counts * (logs[j] + logs[k])) / gap if gap else counts)
    return np.sqrt(total)


def root(decays: Reals, count: int) -> Reals:
    """R with R.T @ R = gram(decays, count), found without ever squaring.

    The rows of V(n) are f^i for i < n. V(2n) stacks V(n) on V(n) f^n, so its triangular QR factor
    follows from that of V(n); likewise for one more row. The error of R is a few log2(count) units
    in the last place, where a Cholesky factor of the nearly singular gram would lose half of
    them.
    """
    factor = np.zeros((0, len(decays)))
    done = 0
    for bit in bin(count)[2:] if count else "":
        if done:
            factor = _triangle(np.vstack([factor, factor * powers(decays, done)]))
            done *= 2
        if bit == "1":
            ones = np.ones((1, len(decays)))
            factor = _triangle(np.vstack([ones, factor * powers(decays, 1)]))
            done += 1
    return factor


def _triangle(rows: Reals) -> Reals:
    return np.asarray(np.linalg.qr(rows, mode="r"))
