"""The noise process B z of a continual counter, and such noise for many keys at once.

A is the lower-triangular all-ones matrix (prefix sums), A = B C. A counter releases B (C x + z),
which is A x + B z: the exact running sums plus a noise process. Everything here is linear algebra;
the standard normals `z` are always handed in.

Each key has a process of its own, begun at step 1; normals of full precision are combined in
floats, then rounded. A key that joins later draws its state from the exact law that the process has
by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from dpstream.compiled import compiled
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Words


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


Draw = Callable[[Words, str, int], Reals]
"""(ids, purpose, each): that many standard normals for each id; purpose is "step" or "join"."""


@storable("keyed noise")
@dataclass(frozen=True, kw_only=True)
class KeyedNoise:
    """Who has joined, 128 bits each, and their processes, keys x floats, as of `step`."""

    ids: Words
    state: Reals
    step: int | None = None


def advance_noise(
    process: NoiseProcess,
    noise: KeyedNoise | None,
    joining: Words,
    step: int,
    sigma: float | Reals,
    draw: Draw,
    *,
    distinct: bool = False,
    alike: float = 0.0,
) -> tuple[KeyedNoise, Integers]:
    """Move everybody's process to `step` (from 1) and let `joining` in, as if begun at step 1.

    Answers who is in, in the order of joining, and the noise of each in grid steps. The arrays of
    `noise` (None: nobody has joined) are used up: they become those of the answer. `sigma`: one for
    all, or one for each in that order. `distinct` says that a table made sure that nobody joins
    twice. `alike`: noise that all of them have, in grid steps.
    """
    known = no_keys(process) if noise is None else noise
    ids, state, path = known.ids, known.state, np.zeros(0)
    if len(ids) and known.step not in (None, step - 1):
        raise StateError(
            f"noise is at step {known.step} and was asked for step {step}; a step that is left "
            "out would lack its noise: move at every step, in order"
        )
    if len(ids):
        path = process.advance(state, step, draw(ids, "step", 1)[:, 0])
    if len(joining):
        if not distinct:
            _refuse_known(ids, joining)
        z = draw(joining, "join", late_normals(process, step))
        new_state, new_path = late_start(process, step, z)
        state, path = append_rows(state, new_state), np.concatenate([path, new_path])
        ids = append_rows(ids, joining)
    steps: Integers = np.empty(len(path), np.int64)
    if isinstance(sigma, np.ndarray):
        path, sigma = path * sigma, 1.0
    _round_to_grid(path, sigma, alike, steps)
    return KeyedNoise(ids=ids, state=state, step=step), steps


@compiled
def _round_to_grid(noise: Reals, sigma: float, alike: float, out: Integers) -> None:
    """out[k] = sigma noise[k] + alike, rounded to the nearest whole number, ties to even."""
    for k in range(len(noise)):
        out[k] = np.int64(np.rint(noise[k] * sigma + alike))


def no_keys(process: NoiseProcess) -> KeyedNoise:
    """Nobody has joined."""
    return KeyedNoise(ids=np.zeros((0, 2), np.uint64), state=np.zeros((0, process.width)))


_ROOMS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Buffers that were made with room behind the rows in use, by their addresses."""


def append_rows(array: Any, more: Any) -> Any:
    """The array with more rows after it; it is used up, since its buffer may be the answer's.

    Half as much room again is left, so that a few rows at a time are not a copy of all each time.
    """
    size, wanted = len(array), len(array) + len(more)
    buffer = _ROOMS.get(array.ctypes.data)
    if buffer is None or buffer is not array.base or len(buffer) < wanted:
        buffer = np.empty((wanted + wanted // 2, *array.shape[1:]), array.dtype)
        buffer[:size] = array
        _ROOMS[buffer.ctypes.data] = buffer
    buffer[size:wanted] = more
    return buffer[:wanted]


def _refuse_known(known: Words, joining: Words) -> None:
    """A key that joined twice would have two processes on the same normals."""
    pair = np.dtype([("high", "<u8"), ("low", "<u8")])
    before, new = (np.ascontiguousarray(ids, "<u8").view(pair)[:, 0] for ids in (known, joining))
    if np.isin(new, before).any():
        raise InvalidInput("a key joins once; one of these has joined before")
