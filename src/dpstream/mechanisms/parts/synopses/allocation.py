"""Which term of a series a slot may spend: each term at most once, by public rules only.

Whatever the order, the sum of distinct terms is at most the series' total, for ever. An allocation
reads no data; its random choices are public numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.parts.synopses.public_numbers import below, uniforms
from dpstream.mechanisms.parts.synopses.series import Series
from dpstream.records import Integers

RUNS: Final = 512
"""Runs of used terms that are remembered; when there are more, small terms are given up."""

LARGE, MEDIUM = 10, 1000
"""Algorithm 4's ranges: the first terms, those up to the thousandth, all others."""


class Allocation(Protocol):
    """A rule that gives every slot a term of the series, or none."""

    def start(self) -> Any:
        """What is remembered before the first slot."""

    def pick(self, used: Any, slot: int) -> tuple[Any, int]:
        """The term of slot 1, 2, ... (0: none, the slot is free), and what to remember."""


@dataclass(frozen=True, kw_only=True)
class InOrder:
    """Term t in slot t: large budgets first."""

    def start(self) -> None:
        """Nothing to remember."""

    def pick(self, used: None, slot: int) -> tuple[None, int]:
        """The slot's own number."""
        return None, slot


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Term k in slot 4^(k-1), nothing in between: few budgets, and none of them tiny."""

    def start(self) -> None:
        """Nothing to remember."""

    def pick(self, used: None, slot: int) -> tuple[None, int]:
        """Powers of four publish; the others hold."""
        power = slot.bit_length() - 1
        return None, power // 2 + 1 if slot == 1 << power and power % 2 == 0 else 0


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Algorithm 3: draw a number from Exp(rate), spend the unused term nearest to it.

    With the paper's rate of 10^8 nearly all of them are tiny, and nearly all budget is kept.
    """

    series: Series
    rate: float
    seed: int = 0

    def start(self) -> Integers:
        """No run of used terms: pairs (first, last), padded with zeros."""
        return np.zeros((RUNS, 2), dtype=np.int64)

    def pick(self, used: Integers, slot: int) -> tuple[Integers, int]:
        """The nearest unused term, which is used from now on."""
        aim = -math.log(uniforms(f"nearest {self.seed} {slot}", 1)[0]) / self.rate
        runs = used[: np.count_nonzero(used[:, 0])]
        term = self._unused(runs, self._closest(aim), aim)
        return _with(runs, term), term

    def _closest(self, aim: float) -> int:
        """The term nearest to `aim`, used or not: terms fall, so the place is found by halving."""
        high = 1
        while self.series.about(high) > aim:
            high *= 2
        low = high // 2  # value(low) > aim >= value(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.series.about(middle) > aim else (low, middle)
        return self._nearer(low, high, aim)

    def _unused(self, runs: Integers, term: int, aim: float) -> int:
        at = int(np.searchsorted(runs[:, 0], term, side="right")) - 1
        if at < 0 or runs[at, 1] < term:
            return term
        return self._nearer(int(runs[at, 0]) - 1, int(runs[at, 1]) + 1, aim)

    def _nearer(self, low: int, high: int, aim: float) -> int:
        if low < 1:
            return high
        return low if self.series.about(low) - aim <= aim - self.series.about(high) else high


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Algorithm 4: queues of large, medium and small terms; a queue at random gives its next."""

    large: int = LARGE
    medium: int = MEDIUM
    seed: int = 0

    def start(self) -> tuple[int, int, int]:
        """The next term of each queue."""
        return 1, self.large + 1, self.medium + 1

    def pick(self, used: tuple[int, int, int], slot: int) -> tuple[tuple[int, int, int], int]:
        """The next term of a queue that is not empty; the queue of small terms never is."""
        ends = (self.large, self.medium, math.inf)
        open_ = [i for i in range(3) if used[i] <= ends[i]]
        queue = open_[int(below(f"ranges {self.seed} {slot}", 1, len(open_))[0])]
        term = used[queue]
        large, medium, small = (used[i] + (i == queue) for i in range(3))
        return (large, medium, small), term


ALLOCATIONS: Final = ("sparse", "random", "ranges", "in_order")


def allocation(name: str, *, series: Series, rate: Fraction, seed: int) -> Allocation:
    """The rule of this name; `random` is Algorithm 3, `ranges` Algorithm 4."""
    if name == "random":
        return Nearest(series=series, rate=float(rate), seed=seed)
    if name == "ranges":
        return Ranges(seed=seed)
    if name == "in_order":
        return InOrder()
    if name == "sparse":
        return Sparse()
    raise InvalidParameter(f"allocation must be one of {', '.join(ALLOCATIONS)}; got {name!r}")


def _with(runs: Integers, term: int) -> Integers:
    """The runs with one more term, joined where they meet, padded; too many lose a gap."""
    at = int(np.searchsorted(runs[:, 0], term, side="right"))
    before, after = runs[:at], runs[at:]
    first = last = term
    if len(before) and before[-1, 1] == term - 1:
        first, before = before[-1, 0], before[:-1]
    if len(after) and after[0, 0] == term + 1:
        last, after = after[0, 1], after[1:]
    joined = np.concatenate([before, [(first, last)], after])
    if len(joined) > RUNS:  # the terms between the last two, the smallest, are given up
        joined[-2, 1] = joined[-1, 1]
        joined = joined[:-1]
    padded = np.zeros((RUNS, 2), dtype=np.int64)
    padded[: len(joined)] = joined
    return padded
