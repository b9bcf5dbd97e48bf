"""Numbers that look random and are known to all: a hash of a public name.

They make pools and budget schedules, which read no data. They hide nothing and must not.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dpstream.records import Integers, Reals


def uniforms(name: str, size: int) -> Reals:
    """`size` numbers strictly between 0 and 1, 52 bits each, the same for the same name.

    >>> uniforms("an example", 2).tolist() == uniforms("an example", 3)[:2].tolist()
    True
    """
    words = np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * size), dtype="<u8")
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def below(name: str, size: int, count: int) -> Integers:
    """`size` whole numbers in [0, count), evenly spread (to within count / 2^52)."""
    return (uniforms(name, size) * count).astype(np.int64)


def gammas(name: str, size: int, shape: float) -> Reals:
    """`size` numbers that follow the gamma distribution of this shape.

    Marsaglia, Tsang, "A Simple Method for Generating Gamma Variables", 2000; normals by Box and
    Muller. A shape below 1 takes one above it, times a power of a uniform number.
    """
    if shape < 1:
        return gammas(f"{name}+", size, shape + 1) * uniforms(f"{name}^", size) ** (1 / shape)
    scale = shape - 1 / 3
    found: list[Reals] = []
    missing = attempt = 0
    while attempt == 0 or missing > 0:
        wanted = size if attempt == 0 else missing
        u, v, w = uniforms(f"{name}/{attempt}", 3 * (wanted + 8)).reshape(3, -1)
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        cube = (1 + normal / np.sqrt(9 * scale)) ** 3
        kept = cube > 0
        kept[kept] = np.log(w[kept]) < (
            normal[kept] ** 2 / 2 + scale * (1 - cube[kept] + np.log(cube[kept]))
        )
        found.append(scale * cube[kept])
        missing, attempt = size - sum(map(len, found)), attempt + 1
    return np.concatenate(found)[:size]
