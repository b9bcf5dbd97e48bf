"""Neighbouring streams: the worst that theory knows, and random ones to find what it missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dpstream.mechanisms.base import Delayed, HistogramMechanism, Mechanism, SeriesMechanism
from dpstream.mechanisms.counters.factorised_counter import CountingParameters
from dpstream.records import Integers

_MILLION = 10**6
_HIGH = 400  # far beyond any noise: who compares, sees a change


@runtime_checkable
class Reported(Protocol):
    """An input that says in a report what it is."""

    def facts(self) -> Mapping[str, Any]:
        """As JSON has them."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two inputs that differ by one unit."""

    name: str
    one: Any
    two: Any

    def facts(self) -> dict[str, Any]:
        """The witness, for a report."""
        return {"name": self.name, "one": _plain(self.one), "two": _plain(self.two)}


def pairs_of(mechanism: Mechanism, *, random: int = 4, seed: int = 0) -> list[Pair]:
    """Pairs for a mechanism's family and unit: known worst cases, then `random` ones."""
    rng = np.random.default_rng(seed)
    if isinstance(mechanism, HistogramMechanism):
        return [*_window_pairs(mechanism.window), *_random_windows(mechanism.window, random, rng)]
    if isinstance(mechanism, CountingParameters):
        return [*_impulses(random, rng)]
    if isinstance(mechanism, SeriesMechanism):
        lo, hi, quantum = mechanism.range
        delay = mechanism.delay if isinstance(mechanism, Delayed) else 2
        return [*_values(int(lo / quantum), int(hi / quantum), delay, random, rng)]
    if mechanism.terms().unit == "user":
        return [dominating_user(), user_in_every_slot(4, (0, 1))]
    raise TypeError(f"no neighbours are known for {type(mechanism).__name__}; give pairs")


def _window_pairs(window: int) -> Iterator[Pair]:
    """An event in each of `window` steps: always in one bin, or moving; early, or late."""
    steps = 2 * window
    jumps = np.where(np.arange(steps)[:, None] % 2 == 0, (0, _HIGH), (_HIGH, 0))
    flat = np.full((steps, 2), 20)
    for base_name, base in (("jumping", jumps), ("flat", flat)):
        for start in (0, window):
            inside = np.arange(start, start + window)
            same, moving, apart = base.copy(), base.copy(), base.copy()
            same[inside, 0] += 1
            moving[inside, inside % 2] += 1
            apart[inside] += np.where(base[inside] == 0, 1, 0)  # where a jump has just gone to 0
            when = f"{base_name} counts, steps {start} to {start + window - 1}"
            yield Pair(name=f"{when}, one bin", one=base, two=same)
            yield Pair(name=f"{when}, another bin each step", one=base, two=moving)
            if base_name == "jumping":
                yield Pair(name=f"{when}, the low bin", one=base, two=apart)


def _random_windows(window: int, count: int, rng: np.random.Generator) -> Iterator[Pair]:
    for number in range(count):
        steps = 2 * window
        level = rng.choice([0, 3, 30, _HIGH], size=(steps, 2))
        base = rng.poisson(level)
        other, start = base.copy(), int(rng.integers(0, steps - window + 1))
        for step in range(start, start + window):
            bin_, sign = int(rng.integers(0, 2)), int(rng.choice([-1, 1]))
            other[step, bin_] += sign if other[step, bin_] + sign >= 0 else 1
        yield Pair(name=f"random counts {number}", one=base, two=other)


def _impulses(count: int, rng: np.random.Generator, steps: int = 8) -> Iterator[Pair]:
    """One event more: at the first step, which every prefix sum contains, or somewhere."""
    for number, at in enumerate([0, *(int(n) for n in rng.integers(1, steps, count))]):
        base = rng.poisson(3, size=(steps, 1))
        other = base.copy()
        other[at, 0] += 1
        yield Pair(name=f"one event at step {at} ({number})", one=base, two=other)


def _values(lo: int, hi: int, delay: int, count: int, rng: np.random.Generator) -> Iterator[Pair]:
    """One value moved across the range: among equal ones, among extremes, or random ones."""
    steps, middle = 2 * delay, (lo + hi) // 2
    ends = np.where(np.arange(steps) % 2 == 0, lo, hi)[:, None]
    for name, base in (
        ("all at the lower end", np.full((steps, 1), lo)),
        ("all in the middle", np.full((steps, 1), middle)),
        ("from end to end", ends),
    ):
        for at in sorted({0, delay - 1}):
            low, high = base.copy(), base.copy()
            low[at, 0], high[at, 0] = lo, hi
            yield Pair(name=f"{name}, step {at} from {lo} to {hi}", one=low, two=high)
    for number in range(count):
        base = rng.integers(lo, hi + 1, size=(steps, 1))
        low, high = base.copy(), base.copy()
        at = int(rng.integers(0, steps))
        low[at, 0], high[at, 0] = lo, hi
        yield Pair(name=f"random values {number}, step {at}", one=low, two=high)


def dominating_user(slots: int = 4) -> Pair:
    """A user with nearly all rows of every slot, against one row of somebody else."""
    others = np.tile((0, 1), (slots, 1))
    return Pair(
        name=f"a user who decides each of {slots} slots",
        one=others + np.array([_MILLION, 0]),
        two=others,
    )


def user_in_every_slot(slots: int = 200, others: tuple[int, int] = (0, 0)) -> Pair:
    """All rows of a user come or go: one in each slot, beside the same others in each."""
    without = np.tile(others, (slots, 1))
    return Pair(
        name=f"a user in each of {slots} slots, beside {sum(others)} others",
        one=without + np.array([1, 0]),
        two=without,
    )


def _plain(data: Any) -> Any:
    """Data as JSON has them."""
    if isinstance(data, np.ndarray):
        return _plain(data.tolist())
    if isinstance(data, Fraction):
        return float(data)
    if isinstance(data, Reported):
        return data.facts()
    if isinstance(data, list | tuple):
        return [_plain(part) for part in data]
    return data


def block(*rows: Any) -> Integers:
    """A stream written down: steps x bins."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)
