"""Successive values that stay close together, grouped bin by bin as they come.

A group c_1 ... c_n may take in the next value as long as dev = sum_i |c_i - mean| stays below a
noisy threshold:

    dev + nu < theta + rho,    rho ~ Lap(4 Delta / e) per group,  nu ~ Lap(8 Delta / e) per test.

A value that fails is a closed group of its own, and the next value starts a new group. So every
value takes part in exactly one run of tests, as a member or as the one that ends it.

Guarantee: e for every value that changes by at most Delta, whatever else is published from its own
budget in between. A changed value moves dev by at most 2 Delta (1 - 1/n), hence k changed values
of one run move every dev of that run by at most D = 2 k Delta. Then rho -> rho + D keeps all who
joined (cost k e / 2) and nu -> nu + 2 D in the last test keeps the failure (cost k e / 2): k e for
the run. The runs of different bins and times have no value in common, so the costs add up to e
per changed value, which is paid at the step of that value, and not by the run.
Unlike `above_threshold`, whose distances move by Delta however many steps change, an interval of
a fixed price would not do here: dev reads all values of the group.

theta may be any function of releases; rho and the values stay in the state. A group is closed
without a test when it is `longest` values long.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from dpstream.compiled import njit
from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import deviation_change, histogram_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Reals

GRID = 1024
"""dev is measured in steps of 1 / GRID, rounded down."""

Smoother = Literal["mean", "median", "james_stein"]
"""What noisy values of one group are published as; see `smooth`."""

_SHORT = 24  # values that are sorted faster than selected from

_NONE = np.zeros(0, np.int64)


@storable("history")
@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """The newest values of every bin, which may be raw: at least the last `longest` steps.

    `block` is bins x columns, the newest at column `end - 1`.

    An older History goes on showing what it showed: columns are written once, the first to append
    to a block owns its next column, and whoever comes later (or finds it full) takes a copy.

    >>> old = History.of(bins=1, longest=2, dtype=np.int64).append(np.array([5]))
    >>> new, other = old.append(np.array([6])), old.append(np.array([7]))
    >>> [h.block[0, : h.end].tolist() for h in (old, new, other)]
    [[5], [5, 6], [5, 7]]
    """

    block: npt.NDArray[Any]
    end: int
    written: npt.NDArray[np.int64]  # columns of the block that are taken, shared by all who see it

    @classmethod
    def of(cls, *, bins: int, longest: int, dtype: npt.DTypeLike) -> History:
        """Nothing yet. Room for twice `longest`, so that a copy is made every `longest` steps."""
        block = np.zeros((bins, 2 * longest), dtype)
        return cls(block=block, end=0, written=np.zeros(1, np.int64))

    def last(self, count: int) -> npt.NDArray[Any]:
        """The newest `count` steps, bins x steps."""
        return self.block[:, self.end - count : self.end]

    def append(self, column: npt.NDArray[Any]) -> History:
        """One step more."""
        block, end, written = self.block, self.end, self.written
        if end == block.shape[1] or written[0] != end:
            keep = min(end, block.shape[1] // 2)
            block = np.zeros_like(self.block)
            block[:, :keep] = self.block[:, end - keep : end]
            end, written = keep, np.zeros(1, np.int64)
        block[:, end] = column
        written[0] = end + 1
        return History(block=block, end=end + 1, written=written)


@storable("time groups")
@dataclass(frozen=True, kw_only=True, eq=False)
class TimeGroups:
    """The open group of every bin."""

    values: History  # exact ones
    length: Integers  # 0: the next value starts a new group
    rho: Integers  # the group's threshold noise
    run: str = ""  # whose payments the open groups have


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """How groups grow: `epsilon` per value that changes by at most `change`."""

    epsilon: Fraction
    change: Fraction
    longest: int

    @cached_property
    def sensitivity(self) -> Fraction:
        """By how much one changed value moves dev, on its grid."""
        return deviation_change(self.change, grid=GRID)

    @cached_property
    def for_threshold(self) -> Fraction:
        """Half of e: with a sensitivity of 2 Delta, rho ~ Lap(4 Delta / e)."""
        return self.epsilon / 2

    @cached_property
    def for_test(self) -> Fraction:
        """A quarter of e: nu ~ Lap(8 Delta / e)."""
        return self.epsilon / 4

    @cached_property
    def largest(self) -> int:
        """Larger deviations count as this one, which keeps all sums within 62 bits."""
        return min(1 << 40, (1 << 62) // self.longest**2)

    def start(self, bins: int) -> TimeGroups:
        """No group is open."""
        return TimeGroups(
            values=History.of(bins=bins, longest=self.longest, dtype=np.int64),
            length=np.zeros(bins, np.int64),
            rho=np.zeros(bins, np.int64),
        )

    def grow(
        self, groups: TimeGroups, x: Integers, theta: Integers, spend: Spender
    ) -> tuple[TimeGroups, Integers]:
        """The groups with the values `x`, and the size of the group that each value is in.

        `theta` is per bin, or one for all, in steps of 1 / GRID, rounded up: for whole numbers
        "below theta" then means what it does for the exact one.
        """
        paid = spend.pay(x, sensitivity=self.change, epsilon=self.epsilon, purpose="group")
        length = groups.length
        if groups.run != paid.run:  # a copied state: this run has not paid for the open groups
            length = np.zeros_like(length)
        dev = deviations(groups.values.block, groups.values.end, length, x, self.largest)
        rho = noisy = _NONE
        if len(dev) < len(x):
            rho = spend.laplace(
                np.zeros(len(x) - len(dev), np.int64),
                sensitivity=self.sensitivity,
                epsilon=self.for_threshold,
                purpose="threshold",
                interval=paid,
            )
        if len(dev):
            noisy = spend.laplace(
                dev,
                sensitivity=self.sensitivity,
                epsilon=self.for_test,
                purpose="test",
                interval=paid,
            )
        size, length, rho = _settle(length, groups.rho, rho, noisy, theta, self.longest)
        values = groups.values.append(x)
        return TimeGroups(values=values, length=length, rho=rho, run=paid.run), size


@njit(cache=True, nogil=True)
def deviations(block: Integers, end: int, length: Integers, x: Integers, largest: int) -> Integers:
    """floor(GRID dev) of every open group with its candidate `x`, in the order of the bins.

    n dev = sum_i |n c_i - sum c| is an integer, and is taken of c - min c. dev is at least
    max c - min c, so from a range of `largest` on the answer is known: GRID largest.
    """
    out, opened = np.empty(len(x), np.int64), 0
    for j in range(len(x)):
        n = length[j] + 1
        if n == 1:
            continue
        low = high = x[j]
        for i in range(end - n + 1, end):
            low, high = min(low, block[j, i]), max(high, block[j, i])
        dev = GRID * largest
        if high - low < largest:
            total = x[j] - low
            for i in range(end - n + 1, end):
                total += block[j, i] - low
            times_n = abs(n * (x[j] - low) - total)
            for i in range(end - n + 1, end):
                times_n += abs(n * (block[j, i] - low) - total)
            dev = min(dev, GRID * (times_n // n) + GRID * (times_n % n) // n)
        out[opened] = dev
        opened += 1
    return out[:opened]


@njit(cache=True, nogil=True)
def _settle(
    length: Integers, rho: Integers, fresh: Integers, noisy: Integers, theta: Integers, longest: int
) -> tuple[Integers, Integers, Integers]:
    """Who starts, joins or fails: size of each value's group, length of the open groups, rho."""
    size, after, rho = np.ones_like(length), np.ones_like(length), rho.copy()
    started = tested = 0
    for j in range(len(length)):
        if length[j] == 0:
            rho[j] = fresh[started]
            started += 1
        elif noisy[tested] - rho[j] < theta[j % len(theta)]:
            size[j] = after[j] = length[j] + 1
            tested += 1
        else:
            after[j] = 0
            tested += 1
        if after[j] == longest:
            after[j] = 0
    return size, after, rho


@dataclass(frozen=True, kw_only=True)
class GroupedHistogram(HistogramMechanism, identity=None):
    """4/5 of epsilon / window for the counts of each step, 1/5 for their groups in time."""

    constant_charges: ClassVar[bool] = True
    publishes_stddev: ClassVar[bool] = False

    @cached_property
    def share(self) -> Fraction:
        """eps_p, what the noisy counts of one step may spend."""
        return on_grid(self.budget / self.window - self.grouping.epsilon)

    @cached_property
    def grouping(self) -> Grouping:
        """How groups grow, with eps_g per step; they hold at most `window` counts of one bin."""
        epsilon = on_grid(self.budget / (5 * self.window))
        return Grouping(epsilon=epsilon, change=histogram_change(), longest=self.window)


def smooth(noisy: History, size: Integers, smoother: Smoother) -> Reals:
    """The newest value of every bin, from the last `size` of that bin (its group).

    Guarantee: post-processing; it reads noisy values and group sizes, which tests have made public.
    "james_stein" shrinks the newest value z towards the mean: (z - mean) / size + mean.

    >>> noisy = History.of(bins=1, longest=3, dtype=np.float64)
    >>> for z in (1.0, 2.0, 9.0):
    ...     noisy = noisy.append(np.array([z]))
    >>> three = np.array([3])
    >>> [float(smooth(noisy, three, how)[0]) for how in ("median", "mean", "james_stein")]
    [2.0, 4.0, 5.666666666666667]
    """
    kernel = _medians if smoother == "median" else _means
    smoothed: Reals = kernel(noisy.block, noisy.end, size)
    if smoother == "james_stein":
        smoothed += (noisy.block[:, noisy.end - 1] - smoothed) / size
    return smoothed


@njit(cache=True, nogil=True)
def _medians(block: Reals, end: int, size: Integers) -> Reals:
    out, ordered = np.empty(len(size)), np.empty(_SHORT)
    for j in range(len(size)):
        n = size[j]
        if n > _SHORT:
            out[j] = np.median(block[j, end - n : end])
            continue
        for i in range(n):  # most groups are short, and soon sorted
            value, at = block[j, end - n + i], i
            while at > 0 and ordered[at - 1] > value:
                ordered[at] = ordered[at - 1]
                at -= 1
            ordered[at] = value
        out[j] = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return out


@njit(cache=True, nogil=True)
def _means(block: Reals, end: int, size: Integers) -> Reals:
    out = np.empty(len(size))
    for j in range(len(size)):
        total = 0.0
        for i in range(end - size[j], end):
            total += block[j, i]
        out[j] = total / size[j]
    return out
