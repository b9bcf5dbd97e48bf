"""Noise for many keys at once: normals of full precision, combined in floats, then rounded.

Each key has a buffered linear Toeplitz process of its own, begun at step 1. A key that joins later
draws its state from the exact law that the process has by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from dpstream.compiled import compiled
from dpstream.counting.noise_process import NoiseProcess, late_normals, late_start
from dpstream.errors import InvalidInput, StateError
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals, Words

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
    sigma: float,
    draw: Draw,
    *,
    distinct: bool = False,
) -> tuple[KeyedNoise, Integers]:
    """Move everybody's process to `step` (from 1) and let `joining` in, as if begun at step 1.

    Answers who is in, in the order of joining, and the noise of each in grid steps. The arrays of
    `noise` (None: nobody has joined) are used up: they become those of the answer. `distinct`
    says that a table made sure that nobody joins twice.
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
    _round_to_grid(path, sigma, steps)
    return KeyedNoise(ids=ids, state=state, step=step), steps


@compiled
def _round_to_grid(noise: Reals, sigma: float, out: Integers) -> None:
    """out[k] = sigma noise[k], rounded to the nearest whole number, ties to even."""
    for k in range(len(noise)):
        out[k] = np.int64(np.rint(noise[k] * sigma))


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
