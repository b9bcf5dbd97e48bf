"""From bounds to numbers: how far one protected change can move a quantity.

No number is written where noise is drawn; it is computed here, in grid steps, with its reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.records import Reals


@cache
def histogram_change() -> Fraction:
    """L1 change of a step's histogram under one event.

    At most one row per unit and step enters it, so one bin moves by one.
    """
    return Fraction(1)


@cache
def range_change(lo: Fraction, hi: Fraction, quantum: Fraction) -> Fraction:
    """Grid steps by which one value can move when it is replaced by any other in [lo, hi].

    >>> range_change(Fraction(0), Fraction(10), Fraction(1, 2))
    Fraction(20, 1)
    """
    if lo >= hi:
        raise InvalidParameter(f"the public range needs lo < hi; got lo={lo}, hi={hi}")
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound % quantum != 0:
            raise InvalidParameter(
                f"{name}={bound} must be a multiple of quantum={quantum}; "
                "choose bounds on the grid or a finer quantum"
            )
    return (hi - lo) / quantum


@cache
def deviation_change(change: Fraction, *, grid: int) -> Fraction:
    """How far floor(grid * sum_i |c_i - mean|) moves when one c_i moves by `change`.

    The value's own term moves by change (1 - 1/n), the n - 1 others by change / n each: together
    2 change (1 - 1/n), for every n less than 2 change. Rounded down, a number that moves by at
    most a whole number of steps still does.

    >>> deviation_change(Fraction(1), grid=1024)
    Fraction(2048, 1)
    """
    return Fraction(math.ceil(2 * change * grid))


@cache
def deviation_grid(change: Fraction) -> int:
    """Parts of a unit in which a deviation is measured: fewer where the range is wide."""
    return max(1, min(1024, (1 << 20) // math.ceil(change)))


@cache
def grouping_change(change: Fraction, *, delay: int, grid: int) -> Fraction:
    """L1 change of all tests of a batch, if one of its `delay` values moves by `change`.

    A test of a value against a group (n values together) reads grid n dev / (n - 1), dev being
    sum_i |c_i - mean|; one of them moves it by at most 2 change grid, whatever n is. The i-th value
    takes part in one test for every group before it, at most i - 1, and, as a member of one group,
    in one test of every later value: delay - 1 in all.

    >>> grouping_change(Fraction(10), delay=4, grid=1)
    Fraction(60, 1)
    """
    return (delay - 1) * deviation_change(change, grid=grid)


@cache
def comparison_change(change: Fraction, *, delay: int) -> Fraction:
    """L1 change of all differences that read one value, if it moves by `change`.

    It is compared with the `delay` values before it and the `delay` values after it.

    >>> comparison_change(Fraction(10), delay=4)
    Fraction(80, 1)
    """
    return 2 * delay * change


@cache
def bucket_change(change: Fraction, *, width: int) -> Fraction:
    """How far a value moves that is clipped to a bucket of this width, and in any case in all.

    >>> bucket_change(Fraction(100), width=25)
    Fraction(25, 1)
    """
    return min(change, Fraction(width))


@cache
def truncation_change(change: Fraction) -> Fraction:
    """How far one value moves any of the centred scores of truncation bounds.

    At the bound b a value v scores (v - lo)/2 - max(v - b, 0): slope 1/2 below b, -1/2 above it. So
    a move by `change` moves no score by more than half of it. Twice, to be whole: the scores are
    doubled too.
    """
    return change


def root_above(square: Fraction, bits: int = 40) -> Fraction:
    """A rational not below the square root, within 2^-bits of it.

    >>> float(root_above(Fraction(2)))
    1.414213562373...
    """
    scaled = math.ceil(square * 4**bits)
    root = math.isqrt(scaled)
    return Fraction(root + (root * root < scaled), 2**bits)


@cache
def group_by_change(*, rows: int, per_group: int, groups: int, largest: Fraction) -> Fraction:
    """L2 change of one column over all groups, when all rows of a unit come or go.

    The unit has at most C = min(rows, per_group * groups) rows, at most K = per_group of them in
    one group, and each adds at most `largest` = L to its group. The sum of the groups' squares is
    convex in their rows, so it is largest with q = C // K full groups and the rest r in one more:
    L sqrt(q K^2 + r^2).

    >>> group_by_change(rows=5, per_group=2, groups=9, largest=Fraction(10))
    Fraction(30, 1)
    """
    _at_least_one(rows=rows, per_group=per_group, groups=groups)
    if largest < 0:
        raise InvalidParameter(f"the largest value must be 0 or more; got {largest}")
    most = min(rows, per_group * groups)
    full, rest = divmod(most, min(per_group, most))
    return root_above(largest**2 * (full * min(per_group, most) ** 2 + rest**2))


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise:
    """Noise of which each group has a part of its own, and all groups of a window have one alike.

    Standard deviations, in grid steps, that cost mu = 1.
    """

    own: Fraction
    shared: Fraction
    ratio: float = 1.0
    """Of the standard deviation to that of independent noise."""

    @property
    def stddev(self) -> float:
        """Of one group."""
        return math.hypot(self.own, self.shared)


_GRID = 2000  # parts of what g may be
_WORTH = 0.98  # of the noise without it: what correlated noise must have at most


@cache
def correlated_noise(
    *,
    known: int,
    rows: int,
    per_group: int,
    groups: int,
    largest: Fraction,
    beside: Fraction = Fraction(0),
) -> CorrelatedNoise | None:
    """Noise of a column to which a unit only adds, in groups of one window; None: it gains nothing.

    Bounds as in `group_by_change`; `known` = d: all groups of the window, which are public. With
    covariance a I + b 11^T a unit that adds x costs (|x|^2 - g (sum x)^2)/a, g = b/(a + b d): what
    is added to several groups at once looks like the shared part. `beside`: what the same groups
    have cost before, of a unit that adds all it may; of another one less, as |x|^2. The sum of both
    is convex in x, so it is largest at a corner of 0 <= x <= K L, sum x <= C L: k full groups, or
    all of them and the rest. The g of least variance is looked for on a grid; a and b are exact for
    whatever g it is.

    >>> all_groups = {"known": 24, "rows": 24, "per_group": 1, "groups": 24}
    >>> noise = correlated_noise(**all_groups, largest=Fraction(1))
    >>> round(noise.stddev / 24**0.5, 3), round(float(noise.own), 2), round(float(noise.shared), 2)
    (0.602, 2.69, 1.2)
    >>> last = correlated_noise(**all_groups, largest=Fraction(1), beside=Fraction(3, 4))
    >>> round(last.stddev / (24 / (1 - 3 / 4)) ** 0.5, 3)
    0.439
    """
    _at_least_one(rows=rows, per_group=per_group, groups=groups, known=known)
    groups = min(groups, known)
    most = min(rows, per_group * groups)
    per_group = min(per_group, most)
    full, rest = divmod(most, per_group)
    part = Fraction(rest, per_group)
    corners = [(Fraction(k), Fraction(k)) for k in range(1, full + 1)]
    corners += [(full + part**2, full + part)] if rest else []
    all_of_it = corners[-1][0]
    squares, totals = (np.array([float(c[at]) for c in corners]) for at in (0, 1))
    room = 1 - float(beside) * (squares / float(all_of_it))

    def costs(g: float) -> Reals:
        return np.asarray((squares - g * totals**2) / room)

    def exact_cost(g: Fraction) -> Fraction:
        near = costs(float(g))  # off by less than 1e-12: 1 - g total is 1/2000 or more
        largest = (corners[n] for n in np.flatnonzero(near > near.max() * (1 - 1e-9)))
        return max((n - g * t**2) / (1 - beside * n / all_of_it) for n, t in largest)

    def variance(g: float) -> float:
        return float(costs(g).max()) * (1 + g / (1 - g * known))

    best = min(range(_GRID), key=lambda n: variance(n / (_GRID * known)))
    if variance(best / (_GRID * known)) > _WORTH**2 * variance(0.0):
        return None
    g = Fraction(best, _GRID * known)
    a = exact_cost(g)
    b = g * a / (1 - g * known)
    size = per_group * largest
    ratio = (variance(float(g)) / variance(0.0)) ** 0.5
    own, shared = (root_above(each * size**2) for each in (a, b))
    return CorrelatedNoise(own=own, shared=shared, ratio=ratio)


@cache
def units_change(*, rows: int, groups: int) -> Fraction:
    """L2 change of the distinct units of all groups, when one unit comes or goes.

    It counts once in each of the groups that its rows reach, min(rows, groups) at most, however
    many rows it has in each.

    >>> units_change(rows=9, groups=4)
    Fraction(2, 1)
    """
    _at_least_one(rows=rows, groups=groups)
    return root_above(Fraction(min(rows, groups)))


@cache
def per_unit_change(*, groups: int, largest: Fraction) -> Fraction:
    """L2 change of a column that is bounded per unit and group, when one unit comes or goes.

    It adds at most `largest` to each of its groups, over all steps together, however many rows it
    has there. What it takes away at other steps is counted by the counter (`opposed_norm`).

    >>> per_unit_change(groups=4, largest=Fraction(10))
    Fraction(20, 1)
    """
    return group_by_change(rows=groups, per_group=1, groups=groups, largest=largest)


def weights_change(*, squares: int) -> Fraction:
    """L2 change of the weighted units of all groups, when one unit comes or goes.

    Its weights never change once they are counted, and their `squares` sum to no more than that.

    >>> weights_change(squares=25)
    Fraction(5, 1)
    """
    return root_above(Fraction(squares))


@cache
def total_change(*, rows: int, largest: Fraction) -> Fraction:
    """L1 change of one column over all groups: each of a unit's rows moves one group.

    >>> total_change(rows=5, largest=Fraction(10))
    Fraction(50, 1)
    """
    _at_least_one(rows=rows)
    return rows * largest


@cache
def rank_change(share: Fraction, *, per_group: int) -> Fraction:
    """How far a unit moves the distance of any leaf's ranks from the rank of a quantile.

    Counted in parts of a row, as many as the share's denominator. One row moves each rank by 0 or
    1, and the rank looked for by the share p: their difference by p or 1 - p.

    >>> rank_change(Fraction(19, 20), per_group=2)
    Fraction(38, 1)
    """
    _at_least_one(per_group=per_group)
    over, under = share.numerator, share.denominator
    return Fraction(per_group * max(over, under - over))


def rounds_change(*, rows: int) -> Fraction:
    """L2 change of the units of all rounds of all groups, for one unit with at most `rows` rows.

    A row is counted in one round of one group, and a unit once in a round: at most `rows` impulses
    of size 1, each in a process of its own.

    >>> rounds_change(rows=4)
    Fraction(2, 1)
    """
    _at_least_one(rows=rows)
    return root_above(Fraction(rows))


def _at_least_one(**bounds: int) -> None:
    for name, bound in bounds.items():
        if bound < 1:
            raise InvalidParameter(f"{name} must be at least 1; got {bound}")


@cache
def encoded_change(norm: Fraction, change: Fraction, *, slack: Fraction = Fraction(0)) -> Fraction:
    """L2 change of everything that a counter measures, when one step's value moves by `change`.

    `norm` bounds the norms of the encoder's columns; `slack` what rounding the measured values
    to integers adds to that, over all steps together.
    """
    return norm * change + slack


@cache
def distribution_change(*, rows: int | None, dummy_rows: int = 0) -> Fraction:
    """L1 change of one step's distribution over bins, when all rows of a user come or go.

    Two distributions are never further apart than 2. With at most `rows` = b of the user's rows
    in a step and n0 = `dummy_rows` public ones, (c + r) / (n + n0 + |r|) and c / (n + n0) differ
    by (r - |r| D) / (n + n0 + |r|), D the latter: at most 2 b / (n0 + b), whatever n is.

    >>> distribution_change(rows=1, dummy_rows=99), distribution_change(rows=None)
    (Fraction(1, 50), Fraction(2, 1))
    """
    if dummy_rows < 0:
        raise InvalidParameter(f"dummy_rows must be 0 or more; got {dummy_rows}")
    if rows is None:
        return Fraction(2)
    _at_least_one(rows=rows)
    return Fraction(2 * rows, dummy_rows + rows)


@cache
def user_histogram_change(rows: int) -> Fraction:
    """L1 change of a step's histogram, when at most `rows` rows of a user in it come or go."""
    _at_least_one(rows=rows)
    return Fraction(rows)


@cache
def score_change(change: Fraction, *, bins: int, grid: int, span: int, steps: int) -> Fraction:
    """How far one step's score of a synopsis moves, in score steps, when its distribution does.

    The score is floor(steps (span + const - 2 error) / span), held within [-steps, steps]; `span`
    is the paper's mu and `error` an L1 distance, both in grid steps. Each bin is rounded to the
    grid, by less than 1 + 2^-20: the error moves by at most change * grid + 2 bins.

    >>> score_change(Fraction(2), bins=10, grid=2**30, span=2**30, steps=100)
    Fraction(200, 1)
    """
    error = math.ceil(change * grid) + 2 * bins
    return Fraction(min(2 * steps, -(-2 * steps * error // span)))


def score_sum_change(change: Fraction, *, slots: int) -> Fraction:
    """How far one user, who may be in every slot, moves a sum of scores over `slots`.

    A private choice by the sum with this sensitivity is one by the mean with `change`.
    """
    return change * max(slots, 1)
