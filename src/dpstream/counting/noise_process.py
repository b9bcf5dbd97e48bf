"""What every continual counter offers: a factorisation A = B C and the noise process B z.

A is the lower-triangular all-ones matrix (prefix sums). A counter releases B (C x + z), which is
A x + B z: the exact running sums plus a noise process. Everything here is linear algebra; the
standard normals `z` are always handed in.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.records import Reals


class NoiseProcess(Protocol):
    """The noise B z as a stream: a small state per key, one standard normal per key and step.

    Steps count from 1; the state at step 0 is all zeros. States are rows: `[keys, width]`.
    """

    def __hash__(self) -> int:
        """Processes are values: what is worked out for one is kept."""

    @property
    def width(self) -> int:
        """Floats of state per key."""

    def advance(self, state: Reals, step: int, z: Reals) -> Reals:
        """Move `state` in place from `step - 1` to `step`; return the noise of `step`, `[keys]`."""

    @property
    def readout(self) -> Reals:
        """The vector r with noise = state @ r, at every step."""

    def late_root(self, step: int) -> Reals:
        """R such that the state at `step` has the law of z @ R, z standard normal.

        `R` has one row per normal needed and R.T @ R is the covariance of the state.
        """


def late_start(process: NoiseProcess, step: int, z: Reals) -> tuple[Reals, Reals]:
    """(state, noise) at `step` of streams that join there, as if begun at step 1.

    Guarantee: the joint law of this and all later noise equals that of a stream begun at step 1.
    `z` holds `late_normals(process, step)` standard normals per key.
    """
    root = _late_root(process, step)
    if z.ndim != 2 or z.shape[1] != root.shape[0]:
        raise InvalidParameter(
            f"a late start at step {step} needs {root.shape[0]} normals per key; got an array of "
            f"shape {z.shape}; draw late_normals(process, step) per key"
        )
    state = np.zeros((z.shape[0], process.width))
    for row in range(root.shape[0]):  # fixed order of addition, the same on every machine
        state += z[:, row, None] * root[row]
    readout = process.readout
    noise = np.zeros(z.shape[0])
    for column in range(process.width):
        noise += state[:, column] * readout[column]
    return state, noise


def late_normals(process: NoiseProcess, step: int) -> int:
    """How many standard normals per key a late start at `step` takes."""
    return int(_late_root(process, step).shape[0])


@lru_cache(maxsize=1024)
def _late_root(process: NoiseProcess, step: int) -> Reals:
    """Processes are frozen, so it is kept."""
    return process.late_root(step)


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Refuse anything but an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidParameter(f"{name} must be an integer; got {value!r}")
    if not low <= value <= high:
        raise InvalidParameter(f"{name} must lie between {low} and {high}; got {value}")


def check_advance(state: Reals, width: int, z: Reals) -> None:
    """Refuse states and normals that do not fit together."""
    if state.ndim != 2 or state.shape[1] != width or z.shape != (state.shape[0],):
        raise InvalidParameter(
            f"state must be [keys, {width}] and z [keys]; got {state.shape} and {z.shape}"
        )
