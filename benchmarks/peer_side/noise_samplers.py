"""Discrete Laplace and Gaussian noise of the peers, timed where they run.

opendp: one measurement on a vector of 64-bit integers, its vectorised form; the zeros come as a
NumPy array, which it takes in faster than a list. diffprivlib: one call per value, its only form;
its discrete Gaussian finds a scale from epsilon and delta, so the scale is set directly.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

PACKAGES = ("opendp", "diffprivlib", "numpy")

Sampler = Callable[[int], Any]


@cache
def opendp(law: str, scale: int, vector: bool) -> Sampler:
    """A vector measurement, or the scalar one for draws of size 1."""
    dp: Any = importlib.import_module("opendp.prelude")
    dp.enable_features("contrib")
    atom = dp.atom_domain(T="i64")
    make = dp.m.make_laplace if law == "discrete_laplace" else dp.m.make_gaussian
    if not vector:
        single = make(atom, dp.absolute_distance(T="i64"), scale=float(scale))
        return lambda _: [single(0)]
    distance = dp.l1_distance if law == "discrete_laplace" else dp.l2_distance
    many = make(dp.vector_domain(atom), distance(T="i64"), scale=float(scale))
    return lambda size: many(np.zeros(size, dtype=np.int64))


@cache
def diffprivlib(law: str, scale: int, vector: bool) -> Sampler:
    """The scalar mechanism in a loop."""
    mechanisms: Any = importlib.import_module("diffprivlib.mechanisms")
    if law == "discrete_laplace":
        mechanism = mechanisms.Geometric(epsilon=1.0, sensitivity=scale)
    else:
        mechanism = mechanisms.GaussianDiscrete(epsilon=1.0, delta=1e-6)
        mechanism._scale = float(scale)
    return lambda size: [mechanism.randomise(0) for _ in range(size)]


LIBRARIES = {"opendp": opendp, "diffprivlib": diffprivlib}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Time one call, or `calls` of them."""
    vector = request["size"] > 1
    draw = LIBRARIES[request["library"]](request["law"], request["scale"], vector)
    seconds, squares = [], 0.0
    for _ in range(request.get("calls", 1)):
        began = time.perf_counter()
        values = draw(request["size"])
        seconds.append(time.perf_counter() - began)
        squares += float(np.square(np.asarray(values, dtype=np.float64)).sum())
    return {"seconds": seconds, "squares": squares, "whole": _whole(values)}


def _whole(values: Any) -> bool:
    return all(isinstance(value, int) for value in values[:100])
