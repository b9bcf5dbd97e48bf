"""One ready example of every registered mechanism, and streams and neighbours to try it on."""

from dataclasses import fields
from fractions import Fraction
from itertools import pairwise

import numpy as np

from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CounterMechanism, CountingParameters
from dpstream.mechanisms.infinite.dpi import Dpi

WINDOW = 5
DELAY = 4
LO, HI = 0, 20
LONGEST = 1500  # steps of the longest stream that a law feeds

# A mechanism that needs more than its family's parameters names them here.
EXTRA: dict[str, dict[str, object]] = {
    "adapub": {"pivots": 2},
    # thresholds of their own would make no tests at these epsilons
    "contin_group": {"threshold": 4},
    "discontin_group": {"threshold": 4},
    "buc_order": {"bucket": 4},
    "sensitivity_truncation": {"options": (("threshold", 4),), "every": 2},
    "dpi": {"rows_per_user": 1, "dummy_rows": 20, "pool_size": 60}
    | {"allocation": "ranges", "series": "telescoping", "queries": (6, 3)},
    "unbounded_counter": {"epochs": ((8, 0.3, 0.144502, 0.603162), (16, 0.3, 0.144502, 0.603162))},
}

CHOOSING = {"dpi": {"epsilon": 100, "allocation": "in_order"}}
"""Mechanisms that add no noise but choose, with parameters at which a choice says much."""


def example(name: str, epsilon: Fraction | float = 1) -> Mechanism:
    """A small instance, from its family's parameters."""
    cls = find(name)
    family: dict[str, object] = {}
    if issubclass(cls, HistogramMechanism):
        family = {"epsilon": epsilon, "window": WINDOW}
    elif issubclass(cls, SeriesMechanism):
        family = {"epsilon": epsilon, "lo": LO, "hi": HI}
        if "delay" in {field.name for field in fields(cls)}:
            family["delay"] = DELAY
    elif issubclass(cls, CountingParameters):
        family = {"rho": Fraction(str(epsilon)) ** 2 / 2}
        if issubclass(cls, CounterMechanism):
            family["steps"] = LONGEST
    elif issubclass(cls, Dpi):
        family = {"epsilon": epsilon}
    return cls(**(family | EXTRA.get(name, {})))


def bins_of(mechanism: Mechanism) -> int:
    """Several bins for histograms, counts and distributions, one for series."""
    if isinstance(mechanism, Dpi):
        return 6
    return 3 if isinstance(mechanism, HistogramMechanism | CountingParameters) else 1


def stream(mechanism: Mechanism, steps: int, seed: int = 0) -> np.ndarray:
    """A stream with quiet and busy stretches, so that adaptive mechanisms take every branch."""
    rng = np.random.default_rng(seed)
    level = np.where(np.arange(steps) // 7 % 3 == 2, 15, 3)[:, None]
    return rng.poisson(level, size=(steps, bins_of(mechanism))).clip(LO, HI)


def neighbours(mechanism: Mechanism, block: np.ndarray, count: int, seed: int = 0):
    """Worst-case changes: an event in each step of a window, or one value across the range."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        other = block.copy()
        if isinstance(mechanism, HistogramMechanism):
            start = int(rng.integers(0, max(1, len(block) - WINDOW + 1)))
            for step in range(start, min(start + WINDOW, len(block))):
                bin_ = int(rng.integers(0, block.shape[1]))
                sign = (1, -1, int(rng.choice((-1, 1))))[number % 3]
                other[step, bin_] += sign if other[step, bin_] + sign >= 0 else 1
        elif isinstance(mechanism, CountingParameters):
            step, bin_ = (int(rng.integers(0, size)) for size in block.shape)
            step = 0 if number < 2 else step  # the worst step of every counter
            other[step, bin_] += 1 if number % 2 or other[step, bin_] == 0 else -1
        elif isinstance(
            mechanism, Dpi
        ):  # a user with a row in every step, or in some, comes or goes
            always = int(rng.integers(0, block.shape[1]))
            for step in range(len(block)):
                bin_ = always if number % 3 == 0 else int(rng.integers(0, block.shape[1]))
                if number % 3 < 2 or rng.random() < 0.3:
                    other[step, bin_] += 1 if number % 2 or other[step, bin_] == 0 else -1
        else:
            step = int(rng.integers(0, len(block)))
            other[step, 0] = (LO, HI)[number % 2]
        yield other


def worst_loss(charges, width: int | None) -> Fraction:
    """An independent, brute-force ledger: charges given as (kind, first, last, bins, amount).

    Adds per cell, takes the maximum over bins, sums every window of `width` steps, and adds every
    interval that overlaps it; shares no code with the one it checks.
    """
    cells, intervals = {}, []
    edges = {0}
    for kind, first, last, bins, amount in charges:
        if kind == "interval":
            intervals.append((first, last, amount))
            continue
        edges |= {edge for pair in bins or () for edge in pair}
    places = sorted(edges)
    for kind, first, last, bins, amount in charges:
        if kind == "cells":
            for step in range(first, last + 1):
                for place in places:
                    if bins is None or any(a <= place < b for a, b in bins):
                        cells[step, place] = cells.get((step, place), 0) + amount
    steps = {step for step, _ in cells} | {f for f, _, _ in intervals}
    newest = max(steps, default=0)
    worst = Fraction(0)
    for end in range(newest + (width or 1)):
        start = 0 if width is None else end - width + 1
        inside = range(max(start, 0), end + 1)
        loss = sum(max(cells.get((s, p), 0) for p in places) for s in inside)
        loss += sum(a for f, last, a in intervals if f <= end and (last is None or last >= start))
        worst = max(worst, loss)
    return worst


NAMES = sorted(REGISTRY)
assert all(a < b for a, b in pairwise(NAMES))
