"""Sums of geometric modes: processes x_j(t) = (1 - decay_j) x_j(t - 1) + z_t under a shared z.

Decays lie in [0, 1]; decay 0 is the plain sum of z. All formulas work on decays, not on factors
near 1, and add nonnegative numbers only, so they lose no more than some units in the last place.
"""

from __future__ import annotations

import numpy as np

from dpstream.records import Reals


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
