"""Parameters of buffered linear Toeplitz counters: a shipped table, and an optimiser for the rest.

A counter of d buffers is fixed by 2d decays 0 < a_1 < b_1 < a_2 < ... < a_d < b_d <= 1: the a are
those of C, the b those of B. Interlacing makes every weight of both matrices positive.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files

import numpy as np
from scipy.optimize import minimize

from dpstream.mechanisms.parts.counting.modes import gram
from dpstream.mechanisms.parts.counting.strategy import check_whole
from dpstream.records import Reals

MOST_BUFFERS = 6
MOST_STEPS = 2**40
COMMON_STEPS = sorted(
    {1, *(2**k for k in range(3, 31))}
    | {10**k for k in range(1, 8)}
    | {24, 30, 48, 52, 60, 96, 144, 168, 200, 288, 365, 500, 720, 1440, 8760, 86400}
)


def exact(decays: Reals) -> Reals:
    """Round decays so that the factors 1 - decay are exact floats: multiples of 2^-53."""
    return np.asarray(1.0 - (1.0 - decays))


def encoder_weights(decays: Reals) -> Reals:
    """Weights w with c_i = sum_j w_j (1 - a_j)^(i - 1) for i >= 1, c_0 = 1; all positive."""
    a, b = decays[0::2], decays[1::2]
    return _residues(b[None, :] - a[:, None], a[None, :] - a[:, None])


def decoder_weights(decays: Reals) -> Reals:
    """Weights w with b_i = sum_j w_j (1 - b_j)^i, last decay 0; all positive, sum 1."""
    a, b = decays[0::2], np.append(decays[1::2], 0.0)
    return _residues(a[None, :] - b[:, None], b[None, :] - b[:, None])


def _residues(above: Reals, below: Reals) -> Reals:
    return np.asarray(above.prod(axis=1) / (below + np.eye(len(below))).prod(axis=1))


def squared_norms(decays: Reals, steps: int) -> tuple[float, float]:
    """(largest squared column norm of C, largest squared row norm of B)."""
    encoder, decoder = encoder_weights(decays), decoder_weights(decays)
    column = 1 + encoder @ gram(decays[0::2], steps - 1) @ encoder
    row = decoder @ gram(np.append(decays[1::2], 0.0), steps) @ decoder
    return float(column), float(row)


def optimise(steps: int, buffers: int) -> tuple[float, ...]:
    """Decays that minimise the largest standard deviation over `steps` steps.

    Local search from a geometric grid between 1/steps and 2 (rates -log(1 - decay)); the gaps are
    searched on a logarithmic scale, which keeps the interlacing. Six significant digits are kept:
    the optimum is flat, and the last bits of a search differ between machines.
    """
    check_whole("steps", steps, 1, MOST_STEPS)
    check_whole("buffers", buffers, 1, MOST_BUFFERS)
    horizon = max(steps, 4 * buffers)  # fewer steps leave parameters undetermined

    def decays_of(point: Reals) -> Reals:
        rates = np.exp(point[0]) * np.cumprod(np.append(1.0, 1 + np.exp(point[1:])))
        return np.asarray(-np.expm1(-rates))

    def loss(point: Reals) -> float:
        with np.errstate(all="ignore"):
            column, row = squared_norms(decays_of(point), horizon)
            value = np.log(column) + np.log(row)
        return float(value) if np.isfinite(value) else 1e9

    grid = np.linspace(-np.log(horizon), np.log(2.0), 2 * buffers)
    start = np.append(grid[0], np.log(np.expm1(np.diff(grid))))
    found = minimize(loss, start, method="BFGS", options={"gtol": 1e-6, "maxiter": 1000})
    return tuple(float(f"{decay:.6g}") for decay in decays_of(found.x))


@lru_cache(maxsize=1)
def table() -> dict[str, list[float]]:
    """The shipped parameters, by "steps/buffers"."""
    text = files("dpstream.mechanisms.parts.counting").joinpath("blt_table.json").read_text("ascii")
    loaded: dict[str, list[float]] = json.loads(text)
    return loaded


@lru_cache(maxsize=256)
def parameters(steps: int, buffers: int) -> tuple[float, ...]:
    """Decays for any number of steps: from the table if there, else optimised on the spot.

    >>> parameters(1024, 2)
    (0.00188792, 0.0147575, 0.0911752, 0.464216)
    """
    known = table().get(f"{steps}/{buffers}")
    return tuple(known) if known else optimise(steps, buffers)


def table_text() -> str:
    """The text of `blt_table.json`, computed anew (half a minute)."""
    lines = [
        f'"{steps}/{buffers}": {json.dumps(optimise(steps, buffers))}'
        for steps in COMMON_STEPS
        for buffers in range(1, MOST_BUFFERS + 1)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"
