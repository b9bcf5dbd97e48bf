"""Budgets for ever: series of exact rationals whose infinite sum stays within epsilon.

`term(i)` is the i-th budget, i = 1, 2, ..., and `about(i)` the same as a float. Terms never grow,
and all of them add up to at most `total`: drawn in any order, each at most once, they cost no more.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import spence

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.base import check_choice
from dpstream.records import Integers, Reals


def dilogarithm(x: float) -> float:
    """Li2(x) = sum of x^t / t^2, for x up to 1.

    >>> round(dilogarithm(1) - math.pi**2 / 6, 15)
    0.0
    """
    return float(spence(1 - x))


def _missing(gap: float) -> float:
    """Li2(1) - Li2(1 - gap) = Li2(gap) + ln(gap) ln(1 - gap), without loss for small gaps."""
    return dilogarithm(gap) + math.log(gap) * math.log1p(-gap)


def gap_for(missing: float, complaint: Callable[[float], str]) -> float:
    """The gap in (0, 1) with `_missing(gap)` = missing."""
    most = math.pi**2 / 6
    if missing <= 0:
        return 0.0
    if missing >= most:
        raise InvalidParameter(complaint(most))
    low, high = 1e-300, 1 - 2.0**-53
    if _missing(high) <= missing:
        return high
    logarithm = brentq(
        lambda x: _missing(math.exp(x)) - missing, math.log(low), math.log(high), xtol=1e-14
    )
    return math.exp(logarithm)


def one_minus_power(gap: float, t: int) -> float:
    """1 - (1 - gap)^t, without loss for small gaps."""
    return -math.expm1(t * math.log1p(-gap))


_ROUND: Final = Fraction(1) - Fraction(1, 2**30)
"""Terms made of floats are taken this much smaller, a million times what floats can be off."""


@dataclass(frozen=True, kw_only=True)
class Telescoping:
    """epsilon / (i (i + 1)): the sum up to n is epsilon (1 - 1 / (n + 1)), exactly.

    >>> half = Telescoping(total=Fraction(1))
    >>> sum(half.term(i) for i in range(1, 10))
    Fraction(9, 10)
    """

    total: Fraction

    def term(self, i: int) -> Fraction:
        """Falls like 1 / i^2."""
        return self.total / (i * (i + 1))

    def about(self, i: int) -> float:
        """Divided as a float."""
        return float(self.total) / (i * (i + 1))


@dataclass(frozen=True, kw_only=True)
class Level:
    """A part of epsilon, `head`, in `count` equal terms, the rest telescoping after them.

    A slot that can tell synopses apart needs a budget of some size; a series that falls from the
    start has it once.

    >>> level = Level(total=Fraction(1), count=4)
    >>> level.term(1), level.term(4), level.term(5)
    (Fraction(1, 8), Fraction(1, 8), Fraction(1, 10))
    """

    total: Fraction
    count: int = 6
    head: Fraction = Fraction(1, 2)

    @classmethod
    def sized(cls, *, total: Fraction, change: Fraction, candidates: int) -> Level:
        """As many equal terms as can each choose among so many candidates, 3 to 24 of them.

        A term e draws a candidate that scores a less with e^(-e a / (2 change)) of the weight.
        Against that stand `candidates` others: scores that differ by 1/2 are told apart if
        e / (4 change) is the logarithm of their number.

        >>> [Level.sized(total=Fraction(n), change=Fraction(1, 50), candidates=9).count for n in
        ...  (1, 2, 9)]
        [4, 9, 24]
        """
        head = Fraction(4, 5)
        enough = 4 * float(change) * math.log(candidates)
        count = min(max(int(float(head * total) / enough), _FEWEST_TERMS), _MOST_TERMS)
        return cls(total=total, count=count, head=head)

    def term(self, i: int) -> Fraction:
        """Equal, then falling like 1 / i^2."""
        if i <= self.count:
            return self.total * self.head / self.count
        return self.total * (1 - self.head) * self.count / (i * (i - 1))

    def about(self, i: int) -> float:
        """Divided as a float."""
        if i <= self.count:
            return float(self.total * self.head / self.count)
        return float(self.total * (1 - self.head) * self.count) / (i * (i - 1))


_FEWEST_TERMS: Final = 3
_MOST_TERMS: Final = 24


@dataclass(frozen=True, kw_only=True)
class Dilogarithm:
    """Theorem 5.4's series, for its true cost: X_t = (1 - m^(2t)) / (zeta t^2), alpha_t = X_t / 2.

    Two draws of weights exp(alpha_t score), with scores that one user moves by at most `change`,
    cost 4 alpha_t change = 2 change X_t. All of them together: 2 change (Li2(1) - Li2(m^2)) / zeta,
    which is `total`: m follows from it. There is no such m unless total < change pi^2 / (3 zeta).
    """

    total: Fraction
    change: Fraction
    decay: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.decay <= 0 or self.change <= 0 or self.total <= 0:
            raise InvalidParameter(
                f"total, change and decay must be positive; got {self.total}, {self.change}, "
                f"{self.decay}"
            )
        _ = self.gap  # raises where there is none

    @cached_property
    def gap(self) -> float:
        """1 - m^2."""
        return gap_for(
            float(self.total * self.decay / (2 * self.change)),
            lambda most: (
                f"the dilogarithm's series needs epsilon < {most * 2 * self.change / self.decay:g} "
                f"at decay_rate={float(self.decay):g} and scores that move by "
                f"{float(self.change):g}; got epsilon={float(self.total):g}; lower epsilon or "
                "decay_rate, or use series='telescoping'"
            ),
        )

    def term(self, i: int) -> Fraction:
        """2 change X_i, rounded down."""
        x = Fraction(one_minus_power(self.gap, i)) / (self.decay * i * i)
        return 2 * self.change * x * _ROUND

    def about(self, i: int) -> float:
        """Without the rounding."""
        return float(2 * self.change / self.decay) * one_minus_power(self.gap, i) / (i * i)


BudgetSeries = Telescoping | Level | Dilogarithm


def budget_series(
    name: str, *, total: Fraction, change: Fraction, decay: Fraction, candidates: int = 2
) -> BudgetSeries:
    """The series of this name; `candidates`: among how many a draw chooses."""
    by_name: dict[str, Callable[[], BudgetSeries]] = {
        "sized": lambda: Level.sized(total=total, change=change, candidates=candidates),
        "level": lambda: Level(total=total),
        "telescoping": lambda: Telescoping(total=total),
        "dilogarithm": lambda: Dilogarithm(total=total, change=change, decay=decay),
    }
    check_choice(name, "series", by_name)
    return by_name[name]()


def uniforms(name: str, size: int) -> Reals:
    """`size` numbers strictly between 0 and 1, 52 bits each, the same for the same public name.

    They make pools and budget schedules, which read no data. They hide nothing and must not.

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
    scale, accepted, attempt = shape - 1 / 3, np.zeros(0), 0
    while len(accepted) < size:
        missing = size - len(accepted)
        u, v, w = uniforms(f"{name}/{attempt}", 3 * (missing + 8)).reshape(3, -1)
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        cube = (1 + normal / np.sqrt(9 * scale)) ** 3
        accept = cube > 0
        accept[accept] = np.log(w[accept]) < (
            normal[accept] ** 2 / 2 + scale * (1 - cube[accept] + np.log(cube[accept]))
        )
        accepted, attempt = np.append(accepted, scale * cube[accept]), attempt + 1
    return accepted[:size]


RUNS: Final = 512
"""Runs of used terms that are remembered; when there are more, small terms are given up."""

_LAST: Final = 1 << 62  # beyond the term of any number that can be drawn

LARGE, MEDIUM = 10, 1000
"""Algorithm 4's ranges: the first terms, those up to the thousandth, all others."""


class Allocation(ABC):
    """A rule that gives every slot a term of the series, or none; each term at most once.

    Whatever the order, the sum of distinct terms is at most the series' total, for ever. A rule
    reads no data; its random choices are public numbers, and `Adaptive` follows what was published.
    """

    restarts: ClassVar[bool] = False
    """Are the slots before a publication forgotten after it?"""

    def start(self) -> Any:
        """What is remembered before the first slot; by default nothing."""
        return None

    @abstractmethod
    def pick(self, used: Any, slot: int) -> tuple[Any, int]:
        """The term of slot 1, 2, ... (0: none, the slot is free), and what to remember."""

    def listens(self, used: Any, slot: int) -> bool:
        """Does the slot count for the next publication? By default every slot does."""
        return True

    def after(self, used: Any, slot: int, *, moved: bool) -> Any:
        """What to remember after `slot` was published; `moved`: unlike the one before."""
        return used


class InOrder(Allocation):
    """Term t in slot t: large budgets first."""

    def pick(self, used: None, slot: int) -> tuple[None, int]:
        """The slot's own number."""
        return None, slot


class Sparse(Allocation):
    """Term k in slot 4^(k-1), nothing in between: few budgets, and none of them tiny."""

    def pick(self, used: None, slot: int) -> tuple[None, int]:
        """Powers of four publish; the others hold."""
        power = slot.bit_length() - 1
        return None, power // 2 + 1 if slot == 1 << power and power % 2 == 0 else 0


@dataclass(frozen=True, kw_only=True)
class Adaptive(Allocation):
    """Terms in order; the next one later where releases stay alike, sooner where they move.

    A gap doubles after a release like the one before, and halves after another one. It is never
    below `gap`, nor below 3 / `level` of the slots so far, so that `level` equal terms last while a
    stream grows e^3 times as long. Of a gap's slots only the last quarter counts: what came before
    is further away than what is to come.

    >>> rule = Adaptive(level=6, gap=4)
    >>> used, paid = rule.start(), []
    >>> for slot in range(1, 100):
    ...     used, term = rule.pick(used, slot)
    ...     if term:
    ...         paid, used = [*paid, slot], rule.after(used, slot, moved=slot > 30)
    >>> paid
    [1, 5, 13, 29, 61, 91]
    """

    restarts: ClassVar[bool] = True
    level: int
    gap: int

    def start(self) -> tuple[int, int, int, int]:
        """Terms used, the next slot that pays, the gap before it, the first slot that counts."""
        return 0, 1, self.gap, 1

    def pick(
        self, used: tuple[int, int, int, int], slot: int
    ) -> tuple[tuple[int, int, int, int], int]:
        """The next term if the slot's time has come."""
        terms, due, gap, heard = used
        if slot < due:
            return used, 0
        return (terms + 1, due, gap, heard), terms + 1

    def listens(self, used: tuple[int, int, int, int], slot: int) -> bool:
        """The last quarter of a gap."""
        return slot >= used[3]

    def after(
        self, used: tuple[int, int, int, int], slot: int, *, moved: bool
    ) -> tuple[int, int, int, int]:
        """When to publish next."""
        terms, _, gap, _ = used
        if terms > 1:
            gap = max(gap // 2, self.gap) if moved else min(2 * gap, _LAST >> 1)
        wait = max(gap, 3 * slot // self.level)
        due = slot + wait
        return terms, due, gap, due - max(wait // 4, 1) + 1


@dataclass(frozen=True, kw_only=True)
class Nearest(Allocation):
    """Algorithm 3: draw a number from Exp(rate), spend the unused term nearest to it.

    With the paper's rate of 10^8 nearly all of them are tiny, and nearly all budget is kept.
    """

    series: BudgetSeries
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
        return _use_term(runs, term), term

    def _closest(self, aim: float) -> int:
        """The term nearest to `aim`, used or not: terms fall, so the place is found by halving."""
        low = bisect_left(range(1, _LAST), -aim, key=lambda i: -self.series.about(i))
        return self._nearer(low, low + 1, aim)  # about(low) > aim >= about(low + 1)

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
class Ranges(Allocation):
    """Algorithm 4: queues of large, medium and small terms; a queue at random gives its next."""

    seed: int = 0

    def start(self) -> tuple[int, int, int]:
        """The next term of each queue."""
        return 1, LARGE + 1, MEDIUM + 1

    def pick(self, used: tuple[int, int, int], slot: int) -> tuple[tuple[int, int, int], int]:
        """The next term of a queue that is not empty; the queue of small terms never is."""
        ends = (LARGE, MEDIUM, math.inf)
        open_ = [i for i in range(3) if used[i] <= ends[i]]
        queue = open_[int(below(f"ranges {self.seed} {slot}", 1, len(open_))[0])]
        term = used[queue]
        large, medium, small = (used[i] + (i == queue) for i in range(3))
        return (large, medium, small), term


ALLOCATIONS: Final[dict[str, Callable[[BudgetSeries, float, int, int], Allocation]]] = {
    "adaptive": lambda series, rate, seed, gap: Adaptive(level=_level_terms(series), gap=gap),
    "sparse": lambda series, rate, seed, gap: Sparse(),
    "random": lambda series, rate, seed, gap: Nearest(series=series, rate=rate, seed=seed),
    "ranges": lambda series, rate, seed, gap: Ranges(seed=seed),
    "in_order": lambda series, rate, seed, gap: InOrder(),
}


def _level_terms(series: BudgetSeries) -> int:
    """How many terms a stream is to be spread over, before they fall."""
    return series.count if isinstance(series, Level) else _FEWEST_TERMS


def allocation(
    name: str, *, series: BudgetSeries, rate: Fraction, seed: int, gap: int = 32
) -> Allocation:
    """The rule of this name; `random` is Algorithm 3, `ranges` Algorithm 4."""
    check_choice(name, "allocation", ALLOCATIONS)
    return ALLOCATIONS[name](series, float(rate), seed, gap)


def _use_term(runs: Integers, term: int) -> Integers:
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
